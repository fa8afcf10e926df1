"""launch/parity.py: finds the layouts equal where they are, says so where they are not, refuses invalid layouts."""

from __future__ import annotations

import io
import math
import re
import sys

import pytest
import torch
from project import ON_CPU, ROOT
from rich.console import Console
from runs import run_quietly

from ds_vit.tools import parity
from ds_vit.tools.parity import (
    LayoutRun,
    RunFailed,
    compare,
    default_layouts,
    deviation,
    main,
    matrix,
    parse,
    parse_layout,
    parse_layouts,
    train,
    worst_weight,
)

TRAINING = [
    *("--deepspeed_config", str(ROOT / "ds_configs" / "cpu_zero1_fp32.json"), "--dataset", "digits"),
    *("--model", "vit_tiny_patch16_224", "--img-size", "16", "-b", "8", "--workers", "0"),
    *("--model-kwargs", "patch_size=4", "embed_dim=48", "depth=3", "num_heads=4", "qk_norm=True"),
]


def train_broken(argv: list[str]) -> tuple[int, str, str]:
    """On a rank: train without the sum of the gradients of q_norm and k_norm."""
    from ds_vit.parallel.tensor import shard

    shard.sum_over_group = lambda x, tp: x
    return run_quietly(argv)


def verdicts(output: str) -> dict[str, str]:
    """Layout → verdict, from the printed matrix."""
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if line.startswith("│")]
    return {row[0]: row[-1] for row in cells if row[0]}


def test_the_line_follows_the_steps_on_a_terminal(tmp_path, monkeypatch):
    # Catches: silence while a layout trains; a failure whose error is not shown.
    screen, layout = io.StringIO(), LayoutRun("zero1", folder=tmp_path)
    script = f"""
import pathlib, sys, time
run = pathlib.Path({str(tmp_path)!r}) / "run"
time.sleep(0.5)
run.mkdir()
(run / "metrics.jsonl").write_text(2 * '{{"kind": "train"}}\\n')
time.sleep(1)
sys.exit("train.py: error: no images")
"""
    console = Console(file=screen, force_terminal=True, width=100)
    monkeypatch.setattr(parity, "Console", lambda **_: console)
    with pytest.raises(RunFailed, match="no images"):
        train(layout, "training zero1", [sys.executable, "-c", script], 3, verbose=False)
    shown = screen.getvalue()
    assert "training zero1" in shown
    assert "0/3" in shown
    assert "2/3" in shown


@pytest.mark.slow
def test_four_ranks_agree(ranks, monkeypatch, tmp_path, capsys):
    # Catches: a tool that changes the batch with dp, that stops where a run fails, or that leaves runs behind; and a
    # promise that is broken.
    def run(layout, what, launcher, steps, *, verbose):
        if layout.stage == 3:
            raise RunFailed("planted")
        words = ["--recipe", str(layout.folder / "layout.yaml")]
        assert [code for code, _, _ in ranks.run(int(launcher[-1]), run_quietly, words)] == [0] * 4

    monkeypatch.setattr(parity, "train", run)
    monkeypatch.setattr(parity.tempfile, "tempdir", str(tmp_path))
    layout = "pp2 tp2 --pp-partition 0,2,5 -b 4"
    words = ["-n", "4", "--layouts", f"zero3, {layout}", "--steps", "2", "--drop-path", "0.1", "--mixup", "0.8"]
    code, said = main([*TRAINING, *words, "--lr", "3"]), capsys.readouterr().out
    assert code == 1, said
    assert verdicts(said) == {"zero3": "failed", layout: "same"}, said
    assert said.count("global batch 32, 2 steps") == 1
    assert "pp 2 x dp 1 x tp 2, ZeRO-1, fp32, 4 x 8 per replica" in said
    assert "idle here: --lr\n" in said
    assert "zero3: planted" in said
    assert not list(tmp_path.glob("ds_vit*")), "the tool leaves nothing behind"


@pytest.mark.slow
def test_a_broken_layout_is_found(ranks, monkeypatch, capsys):
    # Catches: a comparison that cannot fail; a tool that starts other ranks than it says. The launcher starts the
    # reference for real, and the pool what is broken.
    said = []

    def run(layout, what, launcher, steps, *, verbose):
        assert launcher[-1] == "2"
        said.append(what)
        if layout.name != "tp2":
            return train(layout, what, launcher, steps, verbose=verbose)
        words = ["--recipe", str(layout.folder / "layout.yaml")]
        assert [code for code, _, _ in ranks.run(2, train_broken, words)] == [0] * 2

    for name, value in ON_CPU.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(parity, "train", run)
    code, (out, err) = main([*TRAINING, "-n", "2", "--layouts", "tp2", "--steps", "2"]), capsys.readouterr()
    assert code == 1, out + err
    assert verdicts(out) == {"tp2": "DEVIATES"}, out
    assert re.search(r"tp2 .*attn\.[qk]_norm\.(weight|bias)", out), out
    assert said == ["training the reference, zero1 fp32", "training tp2, layout 1 of 1"]
    assert "parity.py: training the reference, zero1 fp32\n" in err


def test_invalid_layouts(tmp_path):
    # Catches: a refusal after half of the layouts were trained, without the numbers, or more than once.
    with pytest.raises(ValueError, match="layout") as refused:
        compare(*parse([*TRAINING, "-n", "2", "--layouts", "zero0, pp2 zero2, tp3, zero1 -b 5"]), tmp_path)
    line = str(refused.value)
    assert "layout 'pp2 zero2':" in line
    assert "cpu_zero1_fp32.json: ZeRO stage 2 does not work with --pp 2" in line
    assert "layout 'tp3': 2 ranks cannot be split into --pp 1 x --tp 3 = 3 ranks" in line
    assert "train_batch_size 16 is not micro-batch 5 x accumulation 1 x data-parallel 2 = 10;" in line
    assert "choose micro-batch x accumulation as one of 8 x 1, 4 x 2" in line
    assert "zero0" not in line


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layouts", "tp2 dp2"], "layout 'tp2 dp2': 'dp2' follows no flag"),
        (["--layouts", "tp2,pp"], "layout 'pp': 'pp' follows no flag\n  (a layout is made of ppN, tpN, zeroN, fp32"),
        (["--layouts", "tp2 --lr 3"], "layout 'tp2 --lr 3': there is no flag --lr"),
        (["--layouts", "tp2, zero1, tp2"], "layout 'tp2' is given twice"),
        (["--layouts", ""], "layout '': it has no words"),
        (["--tp", "2"], "there is no flag --tp"),
        (["--max-steps", "9"], "there is no flag --max-steps; the nearest is --steps"),
        (["--steps", "0"], "--steps: must be at least 1"),
        (["--launcher", "srun"], "--launcher needs -n N"),
        (["--rtol", "nan"], "--rtol: must be at least 0"),
        (["--step", "3"], "there is no flag --step"),
    ],
)
def test_invalid_command_lines(words, message):
    # Catches: a mistyped layout that is silently left out of the matrix.
    with pytest.raises(ValueError, match=re.escape(message)):
        parse([*TRAINING, *words])


def test_layouts_as_written():
    # Catches: a comma of --pp-partition that ends a layout.
    layouts = parse_layouts("pp2 tp2 zero1, pp3 --pp-partition 0,2,7,9,zero3 fp32 --grad-checkpointing -b 4")
    assert [layout.flags for layout in layouts] == [
        {"pp": 2, "tp": 2},
        {"pp": 3, "pp_partition": "0,2,7,9"},
        {"grad_checkpointing": "full", "batch_size": 4},
    ]
    assert [(layout.stage, layout.fp32) for layout in layouts] == [(1, False), (None, False), (3, True)]


def test_default_layouts():
    # Catches: a degree that does not divide the world, a pipeline with the JSON's ZeRO-3.
    for world, stage in [(1, 1), (2, 1), (6, 3), (8, 2)]:
        layouts = default_layouts(world, stage=stage)
        assert all(world % math.prod(layout.flags.get(axis, 1) for axis in ("pp", "tp")) == 0 for layout in layouts)
        assert all(layout.stage == 1 for layout in layouts if stage > 1 and "pp" in layout.flags)
        assert len({layout.name for layout in layouts}) == len(layouts)
    assert parse_layout("pp2 tp2") in default_layouts(4, stage=1)


def test_deviation():
    # Catches: a diverged or skipped step that counts as agreement.
    assert deviation([2.0, 4.0], [2.0, 4.4]) == pytest.approx(0.1)
    assert deviation([None, 1.0], [None, 1.0]) == 0.0
    assert deviation([1.0], [None]) == math.inf
    assert deviation([math.nan], [math.nan]) == math.inf
    assert deviation([0.0], [1e-9]) == math.inf


def test_worst_weight():
    # Catches: rounding in a tensor that should be zero told as the worst, and a real error that is not.
    a = {"weight": torch.full((100,), 0.1), "bias": torch.zeros(10), "index": torch.arange(3)}
    noise = {**a, "bias": torch.full((10,), 1e-11)}
    assert worst_weight(a, noise)[1] < 1e-6
    name, value = worst_weight(a, {**noise, "weight": a["weight"] * 1.01})
    assert (name, value) == ("weight", pytest.approx(0.01, rel=1e-4))
    assert worst_weight(a, {**a, "bias": torch.full((10,), math.nan)}) == ("bias", math.inf)
    with pytest.raises(ValueError, match="'bias'"):
        worst_weight(a, {"weight": a["weight"], "index": a["index"]})


def test_verdicts():
    # Catches: an illegal layout of the default list that counts as a broken promise.
    layouts = [
        LayoutRun("tp2", weight=("head.bias", 0.0)),
        LayoutRun("tp3", problem="3 heads"),
        LayoutRun("pp2", failed=True),
    ]
    assert [layout.verdict for layout in layouts] == ["same", "not legal", "DEVIATES"]
    assert len(matrix(layouts, compare_weights=True)) == 1 + 3


def test_it_refuses_to_be_started_once_a_rank(monkeypatch, capsys):
    # Catches: `deepspeed launch/parity.py`, as it was once, whose every rank would start all ranks.
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert main([*TRAINING]) == 2
    assert "python launch/parity.py -n 4" in capsys.readouterr().err
