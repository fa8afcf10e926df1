"""launch/parity.py: finds the layouts equal where they are, says so where they are not, refuses what cannot be."""

from __future__ import annotations

import io
import math
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from project import ROOT
from rich.console import Console
from safetensors.torch import save_file

from ds_vit.launching.ports import free_port
from ds_vit.tools.parity import Row, deviation, matrix
from ds_vit.tools.parity.progress import Progress, note_step
from ds_vit.tools.parity.request import default_layouts, parse, parse_cut, parse_layouts
from ds_vit.tools.parity.runs import worst_weight

TOOL = ROOT / "launch" / "parity.py"
TRAINING = [
    *("--deepspeed_config", str(ROOT / "ds_configs" / "cpu_zero1_fp32.json"), "--dataset", "digits"),
    *("--model", "vit_tiny_patch16_224", "--img-size", "16", "-b", "8", "--workers", "0"),
    *("--model-kwargs", "patch_size=4", "embed_dim=48", "depth=3", "num_heads=4", "qk_norm=True"),
]

# The tool, with the sum of the gradients of q_norm and k_norm left out, and a rank that dies under ZeRO-3.
BROKEN = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from ds_vit.tools.parity import main, runs
from ds_vit.parallel.tensor import cut

cut.sum_over_group = lambda x, tp: x
run_steps = runs.run_steps


def dies(plan, *more):
    if plan.deepspeed.zero_stage == 3 and plan.parallel.process.rank == 1:
        os._exit(3)
    return run_steps(plan, *more)


runs.run_steps = dies
if __name__ == "__main__":
    sys.exit(main())
"""


def start(script: Path, cwd: Path, *words: str, num_ranks: int = 0) -> subprocess.CompletedProcess:
    """Run the tool as a person would: under deepspeed's launcher, or (0 ranks) by plain python."""
    command = [sys.executable]
    if num_ranks:
        command += [str(Path(sys.executable).parent / "deepspeed"), "--num_accelerators", str(num_ranks)]
        command += ["--master_port", str(free_port())]
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    env |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    argv = [*command, str(script), *TRAINING, *words]
    return subprocess.run(argv, cwd=cwd, env=env, capture_output=True, text=True, timeout=500)


def verdicts(output: str) -> dict[str, str]:
    """Layout → verdict, from the printed matrix."""
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in output.splitlines() if line.startswith("│")]
    return {row[0]: row[-1] for row in cells if row[0]}


def test_the_line_follows_the_steps_on_a_terminal(tmp_path):
    # Catches: silence while a layout trains; the steps of the layout before it, counted again; a word on stdout.
    screen = io.StringIO()
    progress = Progress(Console(file=screen, force_terminal=True, width=100))
    for name in ("zero1", "zero3"):
        with progress.doing(f"training {name}", tmp_path, 3) as look:
            look()
            for _ in range(2):
                note_step(tmp_path)
            look()
            time.sleep(0.3)  # rich draws ten times a second
    shown = screen.getvalue()
    for name in ("zero1", "zero3"):
        part = shown[shown.index(f"training {name}") :].partition("training zero3" if name == "zero1" else "\0")[0]
        assert "0/3" in part
        assert "2/3" in part
        assert "4/3" not in part


def test_a_rank_beside_the_first_says_nothing(capsys):
    # Catches: a line a rank.
    with Progress.of_rank(1).doing("training") as look:
        look()
    assert capsys.readouterr() == ("", "")


@pytest.mark.slow
def test_four_ranks_agree(tmp_path):
    # Catches: a tool that cannot start a second layout, that changes the batch with dp, or that more ranks than one
    # speak in; and a promise that is broken.
    layouts = "pp2 tp2 --pp-partition 0,2,5, tp2 --sequence-parallel -b 4, zero3"
    words = ["--layouts", layouts, "--steps", "3", "--drop-path", "0.1", "--mixup", "0.8"]
    done = start(TOOL, tmp_path, *words, num_ranks=4)
    assert done.returncode == 0, done.stdout + done.stderr
    names = ["pp2 tp2 --pp-partition 0,2,5", "tp2 --sequence-parallel -b 4", "zero3"]
    assert verdicts(done.stdout) == dict.fromkeys(names, "same"), done.stdout
    assert done.stdout.count("global batch 32, 3 steps") == 1
    said = [line for line in done.stderr.splitlines() if line.startswith("parity.py: training")]
    assert said[0].startswith("parity.py: training the reference, "), "once, not by each rank"
    assert said[1:] == [f"parity.py: training {name}, layout {at} of 3" for at, name in enumerate(names, 1)]
    assert "pp 2 x dp 1 x tp 2, ZeRO-1, fp32, 8 x 4 a replica" in done.stdout
    assert not list(tmp_path.iterdir()), "the tool leaves nothing behind"


@pytest.mark.slow
def test_a_broken_layout_and_a_dead_rank_are_found(tmp_path):
    # Catches: a comparison that cannot fail, and a tool that hangs or stops where one rank of a layout dies.
    script = tmp_path / "broken.py"
    script.write_text(BROKEN)
    done = start(script, tmp_path, "--layouts", "tp2, zero3, zero2", "--steps", "3", num_ranks=2)
    assert done.returncode == 1, done.stdout + done.stderr
    assert verdicts(done.stdout) == {"tp2": "DEVIATES", "zero3": "failed", "zero2": "same"}, done.stdout
    assert re.search(r"tp2 .*attn\.[qk]_norm\.(weight|bias)", done.stdout), done.stdout
    assert "zero3: rank 1: its process died (exit code 3)" in done.stdout


@pytest.mark.slow
def test_layouts_that_cannot_be(tmp_path):
    # Catches: a refusal after half of the layouts were trained, without the numbers, or told once a rank.
    layouts = "zero0, pp2 zero2, tp3, zero1 -b 5"
    done = start(TOOL, tmp_path, "--layouts", layouts, num_ranks=2)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("parity.py: error") == 1
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("parity.py: error")]
    assert "layout 'pp2 zero2':" in line
    assert "cpu_zero1_fp32.json: ZeRO stage 2 does not go with --pp 2" in line
    assert "layout 'tp3': 2 ranks cannot be cut into --pp 1 x --tp 3 = 3 ranks" in line
    assert "global batch of 16 is not micro-batch 5 x data-parallel 2 x a whole accumulation; choose -b among 1" in line
    assert "zero0" not in line
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layouts", "tp2 dp2"], "layout 'tp2 dp2': dp2 is not part of a layout (dp follows"),
        (["--layouts", "tp2,pp"], "layout 'pp': pp is not part of a layout"),
        (["--layouts", "tp2 --lr 3"], "--lr is not part of a layout"),
        (["--layouts", "tp2, zero1, tp2"], "layout 'tp2' stands twice"),
        (["--layouts", ""], "layout '': nothing is not part"),
        (["--tp", "2"], "--tp is part of a layout here"),
        (["--max-steps", "9"], "--max-steps has no place in parity.py; use --steps"),
        (["--steps", "0"], "--steps must be at least 1"),
        (["--rtol", "nan"], "--rtol must be a number >= 0"),
        (["--step", "3"], "there is no flag --step"),
    ],
)
def test_command_lines_that_cannot_be(words, message):
    # Catches: a mistyped layout that is silently left out of the matrix.
    with pytest.raises(ValueError, match=re.escape(message)):
        parse([*TRAINING, *words])


def test_layouts_as_written():
    # Catches: a comma of --pp-partition that ends a layout.
    cuts = parse_layouts("pp2 tp2 zero1, pp3 --pp-partition 0,2,7,9,zero3 fp32 --grad-checkpointing -b 4")
    assert [cut.flags for cut in cuts] == [
        {"pp": 2, "tp": 2},
        {"pp": 3, "pp_partition": "0,2,7,9"},
        {"grad_checkpointing": "full", "batch_size": 4},
    ]
    assert [(cut.stage, cut.fp32) for cut in cuts] == [(1, False), (None, False), (3, True)]


def test_default_layouts():
    # Catches: a degree that does not divide the world, a pipeline with the JSON's ZeRO-3.
    for world, stage in [(1, 1), (2, 1), (6, 3), (8, 2)]:
        cuts = default_layouts(world, stage=stage)
        assert all(world % math.prod(cut.flags.get(axis, 1) for axis in ("pp", "tp")) == 0 for cut in cuts)
        assert all(cut.stage == 1 for cut in cuts if stage > 1 and "pp" in cut.flags)
        assert len({cut.text for cut in cuts}) == len(cuts)
    assert parse_cut("pp2 tp2") in default_layouts(4, stage=1)


def test_deviation():
    # Catches: a diverged or skipped step that counts as agreement.
    assert deviation([2.0, 4.0], [2.0, 4.4]) == pytest.approx(0.1)
    assert deviation([None, 1.0], [None, 1.0]) == 0.0
    assert deviation([1.0], [None]) == math.inf
    assert deviation([math.nan], [math.nan]) == math.inf
    assert deviation([0.0], [1e-9]) == math.inf


def test_worst_weight(tmp_path):
    # Catches: rounding in a tensor that should be zero told as the worst, and a real error that is not.
    a = {"weight": torch.full((100,), 0.1), "bias": torch.zeros(10), "index": torch.arange(3)}
    save_file(a, str(tmp_path / "a"))
    noise = {**a, "bias": torch.full((10,), 1e-11)}
    assert worst_weight(tmp_path / "a", noise)[1] < 1e-6
    name, value = worst_weight(tmp_path / "a", {**noise, "weight": a["weight"] * 1.01})
    assert (name, value) == ("weight", pytest.approx(0.01, rel=1e-4))
    assert worst_weight(tmp_path / "a", {**a, "bias": torch.full((10,), math.nan)}) == ("bias", math.inf)
    with pytest.raises(ValueError, match="'bias'"):
        worst_weight(tmp_path / "a", {"weight": a["weight"], "index": a["index"]})


def test_verdicts():
    # Catches: an illegal layout of the default list that counts as a broken promise.
    rows = [Row("tp2", 0.0, 0.0, ("head.bias", 0.0)), Row("tp3", problem="3 heads"), Row("pp2", failed=True)]
    assert [row.verdict for row in rows] == ["same", "not legal", "DEVIATES"]
    assert matrix(rows, judge_weights=True).row_count == 3
