"""--profile-steps: which steps, whose time, and what the page says."""

import json
from types import SimpleNamespace

import pytest
from project import ROOT
from runs import DIGITS, run_quietly
from torch.autograd import DeviceType

from ds_vit.monitoring.profile import WAITING, page, sum_up, union
from ds_vit.train import main

RUN = [*DIGITS, "--val-split", "", "--max-steps", "6", "--warmup-steps", "1", "--checkpoint-interval", "0"]
RUN += ["--model-kwargs", "patch_size=4", "embed_dim=32", "depth=3", "num_heads=2", "-b", "4"]
RUN += ["--deepspeed_config", str(ROOT / "ds_configs" / "cpu_zero1_fp32.json")]


def event(name, start, end, device=DeviceType.CPU, annotation=False):
    span = SimpleNamespace(start=start, end=end, elapsed_us=lambda: end - start)
    own = end - start
    return SimpleNamespace(
        name=name, time_range=span, device_type=device, is_user_annotation=annotation, self_cpu_time_total=own
    )


def test_shares_of_the_time():
    """Time counted twice where spans overlap, a transfer that counts as computing, the host's time for the device's."""
    assert union([(5, 6), (0, 2), (1, 3)]) == [(0, 3), (5, 6)]
    on_cpu = [event("aten::mm", 0, 40), event("aten::addmm", 10, 30), event("gloo:all_reduce", 30, 60)]
    on_cpu += [event(WAITING, 60, 70), event("autograd::engine", 0, 100)]
    found = sum_up(on_cpu, stage=1, rank=3, seconds=100e-6)
    assert found.computing == pytest.approx(0.4)
    assert found.communicating == pytest.approx(0.3)
    assert found.hidden == pytest.approx(1 / 3)
    assert found.waiting == pytest.approx(0.1)
    assert list(found.operations) == ["aten::mm", "gloo:all_reduce", "aten::addmm"]
    gpu = DeviceType.CUDA
    on_gpu = [event("ampere_gemm", 50, 70, gpu), event("ncclDevKernel_AllReduce_Sum_f32", 60, 90, gpu)]
    on_gpu += [event("nccl:all_reduce", 0, 100, gpu, annotation=True)]
    found = sum_up([*on_cpu, *on_gpu], stage=0, rank=0, seconds=100e-6)
    assert (found.computing, found.communicating) == (pytest.approx(0.2), pytest.approx(0.3))
    assert found.hidden == pytest.approx(1 / 3)
    assert set(found.operations) == {"ampere_gemm", "ncclDevKernel_AllReduce_Sum_f32"}
    text = page([found], range(10, 13))
    assert "# Steps 10 to 12" in text
    assert "| 0 | 0 | 0.0 | 20.0% | 30.0% | 33.3% | 10.0% |" in text


@pytest.mark.parametrize(("world", "flags", "recorded"), [(1, [], [0]), (4, ["--pp", "2"], [0, 1])])
def test_a_run_writes_what_its_steps_did(ranks, tmp_path, world, flags, recorded):
    """Steps that are not profiled, or all of them; every rank's trace of a thousand; a pipeline without its bubble."""
    argv = [*RUN, *flags, "--grad-accum-steps", "2", "--profile-steps", "3:5", "--output", str(tmp_path / "run")]
    results = ranks.run(world, run_quietly, argv)
    assert [code for code, _, _ in results] == [0] * world
    folder = tmp_path / "run" / "profile"
    assert f"steps 3 to 4 profiled: {folder / 'summary.md'}" in results[0][1]
    traces = {path.name: path for path in folder.glob("*.json")}
    assert sorted(traces) == [f"stage{stage}-rank{rank}.json" for stage, rank in enumerate(recorded)]
    for path in traces.values():
        names = [row.get("name") for row in json.loads(path.read_text())["traceEvents"]]
        updates = sum(name == "aten::_fused_adamw_" for name in names)
        assert updates in (2, 4), "two steps, of one or two groups of parameters"
        assert WAITING in names
    text = (folder / "summary.md").read_text()
    assert text.count("## Longest operations of stage") == len(recorded)
    assert ("pipeline bubble" in text) == (len(recorded) > 1)
    assert ("`gloo:" in text) == (world > 1)


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
        ("--profile-steps 5:5", "such as 10:13 for 10 to 12"),
        ("--profile-steps 5:8", "--profile-steps 5:8: the run has 6 steps"),
        ("--profile-steps 1:2 --eval-only --val-split validation", "--profile-steps has no effect with --eval-only"),
    ],
)
def test_steps_that_cannot_be_profiled_are_refused(capsys, tmp_path, words, said):
    """Before anything starts, with the numbers."""
    assert main([*RUN, *words.split(), "--output", str(tmp_path / "run")]) == 2
    assert said in capsys.readouterr().err
