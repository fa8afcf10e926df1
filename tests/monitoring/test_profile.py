"""--profile-steps: which steps and whose."""

import json

import pytest
from project import ROOT
from runs import DIGITS, run_quietly

from ds_vit.train import main

RUN = [*DIGITS, "--val-split", "", "--max-steps", "6", "--warmup-steps", "1", "--checkpoint-interval", "0"]
RUN += ["--model-kwargs", "patch_size=4", "embed_dim=32", "depth=3", "num_heads=2", "-b", "4"]
RUN += ["--deepspeed_config", str(ROOT / "ds_configs" / "cpu_zero1_fp32.json")]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("world", "flags", "recorded"), [(1, [], [0]), (4, ["--pp", "2"], [0, 1])])
def test_a_run_writes_what_its_steps_did(ranks, tmp_path, world, flags, recorded):
    """Steps that are not profiled, or all of them; every rank's trace of a thousand; a pipeline without its bubble."""
    argv = [*RUN, *flags, "--grad-accum-steps", "2", "--profile-steps", "3:5", "--output", str(tmp_path / "run")]
    results = ranks.run(world, run_quietly, argv)
    assert [code for code, _, _ in results] == [0] * world
    folder = tmp_path / "run" / "profile"
    assert f"steps 3 to 4 profiled: {folder}" in results[0][1]
    traces = {path.name: path for path in folder.glob("*.json")}
    assert sorted(traces) == [f"stage{stage}-rank{rank}.json" for stage, rank in enumerate(recorded)]
    for path in traces.values():
        names = [row.get("name") for row in json.loads(path.read_text())["traceEvents"]]
        updates = sum(name == "aten::_fused_adamw_" for name in names)
        assert updates in (2, 4), "two steps, of one or two groups of parameters"
        waiting = next(name for name in names if name and "DataLoader" in name)
        table = path.with_suffix(".txt").read_text()
        assert waiting in table
        assert "aten::addmm" in table


def test_a_disk_that_refuses_costs_the_profile_alone(ranks, tmp_path):
    """A run of hours that ends because a trace could not be written."""
    argv = [*RUN, "--profile-steps", "3:5", "--output", str(tmp_path / "run")]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "profile").write_text("")  # in the way of the folder
    [(code, said, _)] = ranks.run(1, run_quietly, argv)
    assert code == 0
    assert "WARNING: the profile could not be written" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--profile-steps 3", "--profile-steps 3: write the first step and the one behind the last"),
        ("--profile-steps 0:2", "such as 10:13 for 10 to 12"),
        ("--profile-steps 5:8", "--profile-steps 5:8: the run has 6 steps"),
        ("--profile-steps 1:2 --eval-only --val-split validation", "--profile-steps has no effect with --eval-only"),
    ],
)
def test_steps_that_cannot_be_profiled_are_refused(capsys, tmp_path, words, said):
    """Before anything starts, with the numbers."""
    assert main([*RUN, *words.split(), "--output", str(tmp_path / "run")]) == 2
    assert said in capsys.readouterr().err
