"""Six kills of a run with two towers, at random times in changing layouts, and a curve that shows none of them."""

from __future__ import annotations

import json
import random
import signal
import time
from pathlib import Path

import pytest
from curves import assert_same_curve, train_in, train_rows
from interrupting import TINY, alive, strikes, train_with
from project import ROOT
from ranks import RankFailure
from safetensors.torch import load_file

from ds_vit.checkpoint.folder import newest

pytestmark = pytest.mark.slow

STEPS = 28
PAIRS = [
    *("--task", "clip", "--dataset", "glyphs", "--text-width", 32, "--text-depth", 2, "--text-heads", 2),
    *("--context-length", 24, "--embed-dim", 16),
]
DP2, PP2, TP2, ZERO3 = (2, 1, 1, 1), (2, 2, 1, 1), (2, 1, 2, 2), (3, 1, 1, 3)  # ranks, --pp, --tp, ZeRO stage
# Layout, signal, and when: steps after the last checkpoint, while a checkpoint is written, or as the run starts.
KILLS = [
    (DP2, signal.SIGKILL, {"step": 1, "saving": True}),
    (PP2, signal.SIGTERM, {"step": 2}),
    (ZERO3, signal.SIGKILL, {"step": 1, "saving": True}),
    (DP2, signal.SIGKILL, {}),
    (TP2, signal.SIGKILL, {"step": 3}),
    (PP2, signal.SIGKILL, {"step": 3, "saving": True}),
]


def command(folder: Path, layout: tuple[int, int, int, int], output: Path, *words: object) -> list[str]:
    world, pp, tp, stage = layout
    data = json.loads((ROOT / "ds_configs" / f"cpu_zero{stage}_fp32.json").read_text())
    data["optimizer"]["params"]["eps"] = 1e-6
    path = folder / f"{world}-{pp}-{tp}-{stage}.json"
    path.write_text(json.dumps(data))
    argv = [*TINY, *PAIRS, "--deepspeed_config", path, "--pp", pp, "--tp", tp, "--max-steps", STEPS]
    argv += ["--batch-size", 24 // (world // pp // tp) // pp, "--grad-accum-steps", pp, "--eval-interval", 0]
    argv += ["--checkpoint-interval", 2, "--resume", "auto", "--output", output, *words]
    return [str(word) for word in argv]


@pytest.mark.timeout(1500)
def test_killed_at_random_moments(ranks, tmp_path):
    # Catches: a save that a kill leaves half done and that is taken for whole; a step, a sample or a moment that is
    # lost or counted twice; rows that a killed process tore; folders and processes that nobody removes.
    generator = random.Random(5)
    output = tmp_path / "run"
    reference = train_in(ranks, 1, command(tmp_path, (1, 1, 1, 0), tmp_path / "whole"))
    saved = 0
    for number, (layout, signum, when) in enumerate(KILLS):
        at = {"step": saved + when["step"], "delay": generator.uniform(0.0, 0.1)} if when else {}
        when = {"step": 0, "delay": generator.uniform(0.0, 1.0)} | when | at
        words = ("--workers", 1) if number % 4 == 1 else ()  # processes that must not outlive their rank
        argv = command(tmp_path, layout, output, *words)
        arguments = (argv, str(output), generator.randrange(layout[0]), signum, when)
        if signum == signal.SIGKILL:
            with pytest.raises(RankFailure, match="was killed by SIGKILL"):
                ranks.run(layout[0], train_with, *arguments, timeout=120.0)
        else:
            assert {code for code, _, _ in ranks.run(layout[0], train_with, *arguments, timeout=120.0)} == {75}
        checkpoint, notes = newest(output / "checkpoints")
        assert not [note for note in notes if "latest" not in note], notes
        if checkpoint is not None:
            checkpoint.verify()
            assert checkpoint.step >= saved, "an older checkpoint than before the kill"
            saved = checkpoint.step
    assert 0 < saved < STEPS
    assert any(strike["saving"] and strike["signal"] == signal.SIGKILL for strike in strikes(output))

    rows = train_in(ranks, 2, command(tmp_path, DP2, output))
    assert [row["step"] for row in train_rows(rows)] == list(range(1, STEPS + 1))
    assert_same_curve(reference, rows, rtol=1e-5)
    # Recalls of a barely trained model differ by near ties.
    last = [[row for row in r if row["kind"] == "eval_ema"][-1]["similarity"] for r in (reference, rows)]
    assert last[1] == pytest.approx(last[0], abs=1e-5)
    deadline = time.monotonic() + 120
    while alive(output):  # a loader's worker looks for its rank every few seconds
        assert time.monotonic() < deadline, "processes of killed runs are left"
        time.sleep(0.5)
    assert not [path.name for path in output.rglob("*") if path.name.startswith(".")]
    kept = sorted(path.name for path in (output / "checkpoints").glob("step-*"))
    assert len(kept) <= 3
    assert kept[-1] == f"step-{STEPS:08d}"
    for file in ("model.safetensors", "text.safetensors"):
        whole, killed = (load_file(str(path / file)) for path in (tmp_path / "whole", output))
        for name, tensor in whole.items():
            assert (killed[name] - tensor).norm() <= 1e-4 * max(1.0, float(tensor.norm())), name
