"""The step benchmark: what a step asks of the hardware, ours beside plain timm's, and limits that it must not pass."""

import contextlib
import functools
import io
import itertools
import json
import re
from types import SimpleNamespace

import pytest
import torch
from project import ROOT

from ds_vit.tools.bench import RUNGS, Ratio, table
from ds_vit.tools.counting import count_step


def test_operations_waits_and_bytes_are_counted():
    """A view that counts, a backward pass that does not, memory of an operation in place, a wait unseen."""
    x = torch.ones(8, 4, requires_grad=True)

    def step():
        y = (x.view(4, 8) * 2.0).sum()  # mul, sum
        y.backward()  # ones_like, mul; sum's backward is a view
        x.grad.add_(1.0)
        float(y.detach())
        bool(y > 0)  # gt
        x.grad.nonzero()
        x.grad = None

    counts = count_step(step)
    assert counts.waits == 3
    names = ("mul", "sum", "ones_like", "add_", "gt", "nonzero", "_local_scalar_dense")
    assert {name: counts.by_name[name] for name in names} == dict.fromkeys(names, 1) | {
        "mul": 2,
        "_local_scalar_dense": 2,
    }
    assert counts.operations == sum(counts.by_name.values())
    assert set(counts.by_name) - set(names) <= {"is_nonzero"}
    mul, total, ones, grad, greater, places = 32 * 4, 4, 4, 32 * 4, 1, 32 * 2 * 8
    assert counts.allocated_bytes == mul + total + ones + grad + greater + places


# On one rank, vit_tiny/16, batch 4, drop-path 0.1: operations over plain timm's, waits, bytes over plain timm's.
LIMITS = {
    "fp32 ZeRO-0": (0.95, 0, 0.97),
    "fp32 ZeRO-1": (1.92, 0, 1.15),
    "fp32 ZeRO-3": (2.66, 1, 1.22),
    "bf16 ZeRO-0": (0.98, 0, 0.98),
    "bf16 ZeRO-1": (1.47, 0, 1.01),
    "bf16 ZeRO-2": (1.77, 0, 1.26),
    "bf16 ZeRO-3": (2.18, 1, 1.25),
}
BF16 = {
    0: {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    1: {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"},
    2: {"bf16": {"enabled": True}, "communication_data_type": "fp32"},
    3: {"bf16": {"enabled": True}, "communication_data_type": "fp32"},
}


WORDS = ["--model", "vit_tiny_patch16_224", "-b", "4", "--drop-path", "0.1", "--turns", "1", "--steps", "1"]


def run_bench(*words, kind="step"):
    """On a rank: the command's exit code, and what it prints."""
    from ds_vit.cli import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(["bench", kind, *map(str, words)])
    return code, out.getvalue(), err.getvalue()


# Measured in one run, beside the same plain timm.
RUNS = (
    ("fp32 ZeRO-0", "fp32 ZeRO-1", "fp32 ZeRO-3"),
    ("bf16 ZeRO-0",),  # autocast, another precision than bf16 weights
    ("bf16 ZeRO-1", "bf16 ZeRO-2", "bf16 ZeRO-3"),
)
COUNTED = [pytest.param(case, marks=() if "fp32" in case else pytest.mark.slow) for run in RUNS for case in run]


@pytest.fixture(scope="module")
def counted(ranks, tmp_path_factory):
    """What the command prints as JSON in the run that a case belongs to, and the name of the case there."""

    @functools.cache
    def of_run(run):
        paths = [tmp_path_factory.mktemp("counted") / f"{case.replace(' ', '-')}.json" for case in run]
        for case, path in zip(run, paths, strict=True):
            stage = int(case[-1])
            config = json.loads((ROOT / "ds_configs" / f"cpu_zero{stage}_fp32.json").read_text())
            path.write_text(json.dumps(config | (BF16[stage] if case.startswith("bf16") else {})))
        [(code, out, said)] = ranks.run(1, run_bench, "--json", "--deepspeed_config", *paths, *WORDS)
        assert code == 0, said
        return json.loads(out.splitlines()[-1])

    return lambda case: (of_run(next(run for run in RUNS if case in run)), case.replace(" ", "-"))


def test_every_limit_is_held():
    """A case that no run measures."""
    assert [case for run in RUNS for case in run] == list(LIMITS)


@pytest.mark.parametrize("case", COUNTED)
def test_a_step_stays_within_its_counts(counted, case):
    """An operation for each parameter or layer, or a read by the host, that creeps back."""
    operations, waits, allocated = LIMITS[case]
    result, name = counted(case)
    ours, plain = result["ours"][name], result["peers"]["timm"]
    ratio = result["ratios"][name]["timm"]
    assert plain["counts"]["waits"] == 0
    assert ours["counts"]["waits"] <= waits
    assert ratio["operations"] <= operations
    assert ratio["allocated"] <= allocated
    assert ratio["operations"] == pytest.approx(ours["counts"]["operations"] / plain["counts"]["operations"])


# Operations that a block of vit_large's width adds, over those of plain timm's; ZeRO-3 with the bucket of a GPU's file.
OF_A_LARGE_BLOCK = {"zero0": 0.9, "zero1": 1.8, "zero3": 2.6}


@pytest.mark.slow
def test_a_block_of_a_large_model_stays_within_its_counts(ranks, tmp_path):
    """An operation for each weight that is larger than a bucket. Of one patch: the counts are those of 196."""
    for name in OF_A_LARGE_BLOCK:
        config = json.loads((ROOT / "ds_configs" / f"cpu_{name}_fp32.json").read_text())
        if name == "zero3":
            config["zero_optimization"]["reduce_bucket_size"] = 30_000_000
        (tmp_path / f"{name}.json").write_text(json.dumps(config))
    words = ["--json", "--model", "vit_large_patch16_224", "--img-size", "16", "-b", "4", "--drop-path", "0.1"]
    words += ["--turns", 1, "--steps", 1]
    words += ["--deepspeed_config", *(tmp_path / f"{name}.json" for name in OF_A_LARGE_BLOCK)]

    def operations(depth):
        [(code, out, _)] = ranks.run(1, run_bench, *words, "--model-kwargs", f"depth={depth}")
        assert code == 0
        result = json.loads(out.splitlines()[-1])
        return {name: side["counts"]["operations"] for name, side in (result["ours"] | result["peers"]).items()}

    less, more = operations(2), operations(3)
    of_a_block = {name: more[name] - less[name] for name in more}
    for name, most in OF_A_LARGE_BLOCK.items():
        assert 0 < of_a_block[name] <= most * of_a_block["timm"], name


@pytest.mark.sampled(2)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_ours_and_its_peers_take_turns_on_two_ranks(ranks, tmp_path, precision):
    """A peer that trains something else, a side that is not measured, two ranks that both speak, no picture."""
    configs = [tmp_path / f"zero{stage}.json" for stage in (1, 3)]
    for stage, path in zip((1, 3), configs, strict=True):
        config = json.loads((ROOT / "ds_configs" / f"cpu_zero{stage}_fp32.json").read_text())
        path.write_text(json.dumps(config | (BF16[stage] if precision == "bf16" else {})))
    words = [*WORDS, "--model", "test_vit", "--img-size", 32, "--turns", 2, "--output", tmp_path / "rates.png"]
    words += ["--against", "ddp", "fsdp2"]
    (code, out, _), (code_too, nothing, _) = ranks.run(2, run_bench, "--json", "--deepspeed_config", *configs, *words)
    assert (code, code_too, nothing) == (0, 0, "")
    result = json.loads(out.splitlines()[-1])
    assert (result["global_batch"], result["layout"], result["precision"]) == (8, "pp 1 x dp 2 x tp 1", precision)
    assert list(result["peers"]) == ["ddp", "fsdp2"]
    assert list(result["ours"]) == ["zero1", "zero3"]
    for side in (*result["peers"].values(), *result["ours"].values()):
        assert side["images_per_second"] == pytest.approx(8 / min(side["seconds"]))
        assert len(side["seconds"]) == 2
        assert side["counts"]["operations"] > 150
        assert side["counts"]["by_name"].get("addmm", 0) + side["counts"]["by_name"].get("mm", 0) > 40
    for name, ratios in result["ratios"].items():
        for peer, ratio in ratios.items():
            assert ratio["low"] <= ratio["high"]
            rates = [result[kind][side]["images_per_second"] for kind, side in (("ours", name), ("peers", peer))]
            assert ratio["images_per_second"] == pytest.approx(rates[0] / rates[1])
    assert (tmp_path / "rates.png").stat().st_size > 5000


def test_an_invalid_comparison_is_refused(ranks, tmp_path):
    """A peer of one process among two ranks, one that there is not, files of two precisions: in one line."""
    fp32, bf16 = ROOT / "ds_configs" / "cpu_zero1_fp32.json", tmp_path / "bf16.json"
    bf16.write_text(json.dumps(json.loads(fp32.read_text()) | BF16[1]))
    [(code, _, said), _] = ranks.run(2, run_bench, "--deepspeed_config", fp32, "--against", "timm", *WORDS)
    assert (code, "the launcher started 2; use ddp or fsdp2" in said) == (2, True)
    [(code, _, said)] = ranks.run(1, run_bench, "--deepspeed_config", fp32, "--against", "megatron", *WORDS)
    assert (code, "choose among timm, timm-compiled, ddp, fsdp2" in said) == (2, True)
    [(code, _, said)] = ranks.run(1, run_bench, "--deepspeed_config", fp32, "--linear-probe", "--bce-loss", *WORDS)
    assert (code, "the peers know nothing of --linear-probe, --bce-loss; drop it" in said) == (2, True)
    [(code, _, said)] = ranks.run(1, run_bench, "--deepspeed_config", fp32, bf16, *WORDS)
    assert (code, "files of one precision can be compared, not of bf16, fp32" in said) == (2, True)


@pytest.mark.slow
def test_each_rung_of_the_ladder_adds_to_the_one_before(ranks):
    """A rung that does nothing, a ratio to another rung, a batch that is not counted."""
    config = ROOT / "ds_configs" / "cpu_zero1_fp32.json"
    words = ["--model", "test_vit", "-b", 2, "--img-size", 32, "--turns", 1, "--steps", 1]
    run = functools.partial(run_bench, kind="ladder")
    [(code, out, said)] = ranks.run(1, run, "--json", "--deepspeed_config", config, *words, timeout=300)
    assert code == 0, said
    result = json.loads(out.splitlines()[-1])
    sides = list(result["ours"].items())
    assert [name for name, _ in sides] == [rung.name for rung in RUNGS]
    assert [side["images"] for _, side in sides] == [2] * 4 + [4] * 2
    names = [side["counts"]["by_name"] for _, side in sides]
    assert names[1].get("_to_copy", 0) > names[0].get("_to_copy", 0) + 20, "casts of autocast"
    for (_, before), (b, side) in itertools.pairwise(sides):
        rate = side["images_per_second"] / before["images_per_second"]
        assert result["ratios"][b]["the one before"]["images_per_second"] == pytest.approx(rate)
    assert [name for name, ratios in result["ratios"].items() if "the first" in ratios] == [
        rung.name for rung in RUNGS[1:]
    ]


def test_the_ladder_refuses_what_its_rungs_set(ranks):
    """Flags that a rung would silently replace."""
    config = ROOT / "ds_configs" / "cpu_zero1_fp32.json"
    [(code, _, said)] = ranks.run(
        1, functools.partial(run_bench, kind="ladder"), "--deepspeed_config", config, "--model-kwargs", "depth=2"
    )
    assert (code, "bench ladder sets --model-kwargs" in said) == (2, True)


def test_a_ratio_is_printed_within_its_range():
    """1.047 (1.05 to 1.07): the bound rounded up, and the figure not."""
    counts = SimpleNamespace(operations=1, waits=0, allocated_bytes=1)
    side = SimpleNamespace(images=1, images_per_second=1.0, counts=counts, memory_bytes=None, mfu=None)
    ratios = {"ours": {"timm": Ratio(1.047, 1.0468, 1.0712, 1.0, 1.0)}}
    printed = " ".join(table(SimpleNamespace(ours={"ours": side}, peers={"timm": side}, ratios=ratios))[-1])
    figure, low, high = map(float, re.search(r"([\d.]+) \(([\d.]+) to ([\d.]+)\)", printed).groups())
    assert low <= figure <= high
