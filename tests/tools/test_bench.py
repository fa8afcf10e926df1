"""The step benchmark: what a step asks of the hardware, ours beside plain timm's, and limits that it must not pass."""

import contextlib
import functools
import json
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from compiling import counting_graphs
from project import write_config
from runs import run_quietly

from ds_vit.cli import main
from ds_vit.launching.process import Process
from ds_vit.tools import counting
from ds_vit.tools.bench import Ratio, _random_batch, resolve_engine, table
from ds_vit.tools.counting import count_calls, count_step
from ds_vit.tools.peers import _MultiCrop, _open_clip_model, peer_step


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


def test_ranges_on_the_device_are_no_kernels(monkeypatch):
    """A range such as "Optimizer.step", which the profiler reports next to its kernels; the host's time."""
    on_gpu, on_cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
    events = [(on_gpu, False, 3000.0), (on_gpu, False, 1000.0), (on_gpu, True, 4000.0), (on_cpu, False, 0.0)]
    names = ("device_type", "is_user_annotation", "self_device_time_total")
    found = [SimpleNamespace(**dict(zip(names, event, strict=True))) for event in events]
    steps = []
    watched = contextlib.nullcontext(SimpleNamespace(key_averages=lambda: found))
    monkeypatch.setattr(counting, "profile", lambda activities: watched)
    monkeypatch.setattr(counting, "profiled_activities", lambda device: ["CPU", "CUDA"])
    assert counting.device_seconds(lambda: steps.append(1), torch.device("cpu"), 2) == pytest.approx(2e-3)
    assert len(steps) == 2
    monkeypatch.setattr(counting, "profiled_activities", lambda device: ["CPU"])
    assert counting.device_seconds(lambda: steps.append(1), torch.device("cpu")) is None


def test_calls_are_counted():
    """Calls of C, or of the counting itself, among Python's; a profiler that is gone afterwards."""

    def leaf():
        return abs(-1)

    def step():
        return [leaf(), leaf(), len("ab")]

    before = sys.getprofile()
    assert count_calls(step) == 3
    assert sys.getprofile() is before


# On one rank, vit_tiny/16, batch 4, drop-path 0.1: operations over plain timm's, waits, bytes over plain timm's. The
# cases of a row are measured in one run, next to the same plain timm.
LIMITS = (
    {"fp32 ZeRO-0": (0.97, 0, 0.96), "fp32 ZeRO-1": (0.99, 0, 0.96), "fp32 ZeRO-3": (1.05, 0, 0.96)},
    {"bf16 ZeRO-0": (0.98, 0, 0.97)},  # autocast, another precision than bf16 weights
    {"bf16 ZeRO-1": (0.9, 0, 0.83), "bf16 ZeRO-2": (0.9, 0, 0.92), "bf16 ZeRO-3": (0.94, 0, 0.92)},
)
COUNTED = [
    pytest.param(row, case, marks=() if row == 1 else pytest.mark.slow)
    for row, cases in enumerate(LIMITS)
    for case in cases
]
BF16 = {
    0: {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    1: {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"},
    2: {"bf16": {"enabled": True}, "communication_data_type": "fp32"},
    3: {"bf16": {"enabled": True}, "communication_data_type": "fp32"},
}
ONCE = ["--turns", "1", "--steps", "1"]
WORDS = ["--model", "vit_tiny_patch16_224", "-b", "4", "--drop-path", "0.1", *ONCE]


def config_of(path, case):
    """A file with the JSON of a case, such as "bf16 ZeRO-1"."""
    stage = int(case[-1])
    return write_config(path, stage, **(BF16[stage] if case.startswith("bf16") else {}))


def run_counting_graphs(argv):
    """On a rank: exit code, stdout, stderr, and how many graphs were compiled."""
    graphs = []
    with counting_graphs(graphs):
        return (*run_quietly(argv, None, main), len(graphs))


def bench(ranks, world, *words):
    """What the command says on each rank: exit code, stdout, stderr, and how many graphs it compiled."""
    return ranks.run(world, run_counting_graphs, ["bench", "step", *map(str, words)], timeout=300)


def measured(ranks, world, *words):
    """What the command prints as JSON; the graphs of rank 0."""
    (code, out, said, graphs), *_ = bench(ranks, world, "--json", *words)
    assert code == 0, said
    return json.loads(out.splitlines()[-1]), graphs


def compared_with_compiled(ranks, peers, *words):
    """What is measured of these peers, eager and compiled, on two ranks."""
    result, graphs = measured(ranks, 2, *words, "--against", *peers, *(f"{peer}-compiled" for peer in peers))
    for peer in peers:
        eager, compiled = (result["peers"][name] for name in (peer, f"{peer}-compiled"))
        assert eager["counts"] == compiled["counts"], "counted without the compiler"
        assert 0 < compiled["calls"] != eager["calls"] > 0
        assert 0 < min(compiled["host_seconds"]) <= min(compiled["seconds"])
    return result, graphs


@pytest.fixture(scope="module")
def counted(ranks, tmp_path_factory):
    """What the command measures of the cases of a row."""

    @functools.cache
    def of_row(row):
        folder = tmp_path_factory.mktemp("counted")
        paths = [config_of(folder / f"{case}.json", case) for case in LIMITS[row]]
        return measured(ranks, 1, "--deepspeed_config", *paths, *WORDS)[0]

    return of_row


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("row", "case"), COUNTED)
def test_a_step_stays_within_its_counts(counted, row, case):
    """An operation for each parameter or layer, or a read by the host, that creeps back."""
    operations, waits, allocated = LIMITS[row][case]
    result = counted(row)
    ours, plain = result["ours"][case], result["peers"]["timm"]
    ratio = result["ratios"][case]["timm"]
    assert plain["counts"]["waits"] == 0
    assert ours["counts"]["waits"] <= waits
    assert ratio["operations"] <= operations
    assert ratio["allocated"] <= allocated
    assert ratio["operations"] == pytest.approx(ours["counts"]["operations"] / plain["counts"]["operations"])


@pytest.mark.slow
def test_ours_and_its_peers_take_turns_on_two_ranks(ranks, tmp_path):
    """A peer that trains something else, a side that is not measured, two ranks that both speak."""
    configs = [config_of(tmp_path / f"zero{stage}.json", f"bf16 ZeRO-{stage}") for stage in (1, 3)]
    words = [*WORDS, "--model", "test_vit", "--model-kwargs", "depth=2", "--img-size", 32, "--turns", 2]
    result, graphs = compared_with_compiled(ranks, ("ddp", "fsdp2"), "--deepspeed_config", *configs, *words)
    assert graphs == 2 * 2, "a rate of drop-path is a constant in a graph of timm's blocks"
    assert (result["global_batch"], result["layout"], result["precision"]) == (8, "pp 1 x dp 2 x tp 1", "bf16")
    assert list(result["peers"]) == ["ddp", "fsdp2", "ddp-compiled", "fsdp2-compiled"]
    assert list(result["ours"]) == ["zero1", "zero3"]
    for side in (*result["peers"].values(), *result["ours"].values()):
        assert side["images_per_second"] == pytest.approx(8 / min(side["seconds"]))
        assert len(side["seconds"]) == 2
        assert side["counts"]["operations"] > 75
        products = side["counts"]["by_name"].get("addmm", 0) + side["counts"]["by_name"].get("mm", 0)
        assert products >= 3 * (2 * 4 + 1), "forward and both gradients of two blocks and a head"
    for name, ratios in result["ratios"].items():
        for peer, ratio in ratios.items():
            assert ratio["low"] <= ratio["high"]
            rates = [result[kind][side]["images_per_second"] for kind, side in (("ours", name), ("peers", peer))]
            assert ratio["images_per_second"] == pytest.approx(rates[0] / rates[1])


def test_peers_have_torchs_linear_map(tmp_path, monkeypatch):
    """That of an engine of ours at ZeRO-3 under autocast, which replaces it for the whole process."""
    words = ["--deepspeed_config", str(config_of(tmp_path / "zero1.json", "fp32 ZeRO-1")), "--model", "test_vit"]
    engine, device = resolve_engine([*words, "-b", "2"], Process("env", 0, 1, 0, 1)), torch.device("cpu")
    step = peer_step("timm", engine, _random_batch(engine, 2, torch.float32, device))

    def ours(*args):
        raise AssertionError("a peer with the linear map of ours")

    monkeypatch.setattr(torch.nn.functional, "linear", ours)
    step()
    assert torch.nn.functional.linear is ours


PAIRS = ["--task", "clip", "--model", "test_vit", "-b", "4", "--context-length", "24"]
PAIRS += ["--text-width", "32", "--text-depth", "2", "--text-heads", "2", "--embed-dim", "16"]


@pytest.mark.slow
def test_pairs_are_compared_with_open_clip(ranks, tmp_path):
    # Catches: a peer with other towers, or one that sees a part of the global batch.
    pytest.importorskip("open_clip")
    config = config_of(tmp_path / "zero1.json", "fp32 ZeRO-1")
    words = ["--deepspeed_config", config, *PAIRS, *ONCE, "--grad-accum-steps", 2]
    result, graphs = compared_with_compiled(ranks, ("open_clip",), *words)
    assert graphs > 0
    assert result["global_batch"] == 16
    assert result["peers"]["open_clip"]["images_per_second"] > 0


@pytest.mark.parametrize("task", ["clip", "siglip"])
def test_open_clips_towers_are_ours(tmp_path, task):
    # Catches: a bias, an embedding or a block that one side lacks.
    pytest.importorskip("open_clip")
    words = ["--deepspeed_config", str(config_of(tmp_path / "zero1.json", "fp32 ZeRO-1")), *PAIRS, "--task", task]
    engine = resolve_engine(words, Process("env", 0, 1, 0, 1))
    theirs = sum(parameter.numel() for parameter in _open_clip_model(engine).parameters())
    assert theirs == sum(parameter.numel() for parameter in engine.model.whole.parameters())


CROPS = ["--task", "dino", "--ibot-weight", "0", "--koleo-weight", "0", "--model", "test_vit", "-b", "2"]
CROPS += ["--model-kwargs", "depth=2", "--img-size", "32", "--local-crops-number", "2", "--local-crops-size", "16"]
CROPS += ["--prototypes", "64", "--head-hidden-dim", "32", "--head-bottleneck-dim", "16"]


@pytest.mark.slow
def test_crops_are_compared_with_lightly(ranks, tmp_path):
    # Catches: a schedule that is not set, a peer that sees other crops or a part of the batch.
    pytest.importorskip("lightly")
    config = config_of(tmp_path / "zero1.json", "fp32 ZeRO-1")
    result, graphs = compared_with_compiled(ranks, ("lightly",), "--deepspeed_config", config, *CROPS, *ONCE)
    assert graphs > 0
    assert result["global_batch"] == 4
    products = [side["counts"]["by_name"]["addmm"] for side in (result["ours"]["zero1"], result["peers"]["lightly"])]
    assert products[0] == products[1]


def test_lightlys_student_is_ours(tmp_path):
    # Catches: a bias, an embedding or a block that one side lacks.
    pytest.importorskip("lightly")
    words = ["--deepspeed_config", str(config_of(tmp_path / "zero1.json", "fp32 ZeRO-1")), *CROPS]
    model = resolve_engine(words, Process("env", 0, 1, 0, 1)).model
    lengths = model.task.config.prototypes  # parameters of lightly's, fixed at 1
    theirs = (
        sum(parameter.numel() for parameter in _MultiCrop(model.task.config, model.spec.img_size, 0.0).parameters())
        - lengths
    )
    ours = {name: parameter.numel() for name, parameter in model.whole.named_parameters()}
    assert theirs == sum(ours[name] for name in ours if not name.startswith("teacher")) - ours["mask_token"]


@pytest.mark.parametrize(
    ("world", "words", "message"),
    [
        (2, ["--against", "timm"], "the launcher started 2; use ddp or fsdp2"),
        (1, ["--against", "megatron"], "choose among timm, timm-compiled, ddp, ddp-compiled, fsdp2,"),
        (1, ["--linear-probe", "--bce-loss"], "the peers know nothing of --linear-probe, --bce-loss; drop it"),
        (1, ["--deepspeed_config", "fp32", "bf16"], "one precision can be compared, not of bf16, fp32"),
        (1, ["--against", "open_clip"], "open_clip cannot train --task classification; choose among timm, "),
        (1, [*CROPS, "--against", "timm"], "timm cannot train --task dino; choose among lightly"),
        (1, [*CROPS, "--koleo-weight", "0.1"], "know nothing of --koleo-weight 0.1; pass --ibot-weight 0"),
    ],
)
def test_an_invalid_comparison_is_refused(ranks, tmp_path, world, words, message):
    """A peer that cannot train so, and one that there is not."""
    files = {precision: config_of(tmp_path / precision, f"{precision} ZeRO-1") for precision in ("fp32", "bf16")}
    words = [*WORDS, "--deepspeed_config", files["fp32"], *(files.get(word, word) for word in words)]
    (code, _, said, _), *_ = bench(ranks, world, *words)
    assert (code, message in said) == (2, True), said


def test_a_ratio_is_printed_within_its_range():
    """1.047 (1.05 to 1.07): the bound rounded up, and the figure not."""
    counts = SimpleNamespace(operations=1, waits=0, allocated_bytes=1)
    side = SimpleNamespace(images=1, images_per_second=1.0, counts=counts, memory_bytes=None, mfu=None)
    side.calls, side.seconds, side.host_seconds, side.device_seconds = None, (0.04, 0.05), (0.03, 0.02), 0.038
    ratios = {"ours": {"timm": Ratio(1.047, 1.0468, 1.0712, 1.0, 1.0)}}
    rows = table(SimpleNamespace(ours={"ours": side}, peers={"timm": side}, ratios=ratios))
    printed = " ".join(rows[-1])
    figure, low, high = map(float, re.search(r"([\d.]+) \(([\d.]+) to ([\d.]+)\)", printed).groups())
    assert low <= figure <= high
    columns = dict(zip(*rows[::2], strict=True))
    assert [columns[f"{what} ms"] for what in ("wall", "host", "device")] == ["40.0", "20.0", "38.0"]
