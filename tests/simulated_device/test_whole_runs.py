"""ds_vit on the simulated device: whole runs, with the curves of the CPU and no wait of the host in a step."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch
from curves import Row, assert_same_curve, read_rows
from project import ROOT
from runs import DIGITS, pretend_fp16, run_quietly

import simulated_device
from ds_vit.engine.plain import PlainEngine

RUN = [
    *(*DIGITS, "--model-kwargs", "patch_size=4", "depth=4", "embed_dim=48", "num_heads=2"),
    *("--max-steps", "3", "--log-interval", "1", "--drop-path", "0.2", "--warmup-epochs", "0", "--val-split", ""),
]
MIXUP = ("--mixup", "0.8")
MAE = ("--task", "mae", "--decoder-dim", 24, "--decoder-depth", 1, "--decoder-heads", 2)
DINO = [
    *("--task", "dino", "--local-crops-size", 8, "--local-crops-number", 2, "--prototypes", 24),
    *("--head-hidden-dim", 64, "--head-bottleneck-dim", 16, "--centering", "sinkhorn"),
]
Planted = Callable[[], AbstractContextManager]


def words_of(config: str, *more: object) -> list[str]:
    """A run's command line; later flags win."""
    return [*RUN, "--deepspeed_config", str(ROOT / "ds_configs" / config), *map(str, more)]


def train(library: Path | None, words: list[str], planted: Planted | None = None) -> tuple[int, str]:
    """On a rank: a run on the device or (without a library) on the CPU; its exit code and its errors."""
    if library:
        simulated_device.start(library)
    code, _, errors = run_quietly(words, planted)
    return code, errors


# ---- Curves ----

OVERFLOWS = ("--set", "fp16.initial_scale_power=24", "fp16.hysteresis=1", "--on-nonfinite", "skip", "--max-steps", 12)
RANDOM = ("--aa", "rand-m9-mstd0.5-inc1", "--cutmix", "1.0", "--reprob", "0.5")


def of_type(name: str) -> tuple[str, ...]:
    """An optimizer with its default settings."""
    return "--set", f"optimizer.type={name}", "optimizer.params={}"


def buckets(elements: int, *more: str) -> tuple[str, ...]:
    """Gradients are summed so many elements at a time."""
    return "--set", f"zero_optimization.reduce_bucket_size={elements}", *more


OFFLOADED = (
    *("--set", 'zero_optimization.offload_param={"device":"cpu","pin_memory":true}'),
    'zero_optimization.offload_optimizer={"device":"cpu","pin_memory":true}',
)
NOTHING_STAYS = ("--set", "zero_optimization.stage3_param_persistence_threshold=0")


# What is trained, and how far its losses may be from the CPU's: with 16 bits, sums in another order round otherwise.
RECIPES: dict[str, tuple[str, tuple[object, ...], float]] = {
    "fp32": ("cpu_zero1_fp32.json", MIXUP, 1e-4),
    "random on the device": ("cpu_zero1_fp32.json", (*MIXUP, *RANDOM, "--augment-on", "device"), 1e-4),
    "layer decay": ("cpu_zero0_fp32.json", (*MIXUP, "--layer-decay", 0.7), 1e-4),
    "lamb": ("cpu_zero3_fp32.json", (*MIXUP, *of_type("Lamb")), 1e-4),
    "muon": ("cpu_zero1_fp32.json", (*MIXUP, *of_type("Muon")), 1e-4),
    "mae": ("cpu_zero2_fp32.json", MAE, 1e-4),
    "dino": ("cpu_zero2_fp32.json", DINO, 1e-4),
    "bf16": ("zero2_bf16.json", (*MIXUP, *buckets(500_000)), 3e-3),
    "bf16 summed in fp32": ("zero1_bf16.json", (*MIXUP, "--grad-accum-steps", 2, "--grad-checkpointing"), 3e-3),
    "fp16": ("zero1_fp16.json", (*MIXUP, *OVERFLOWS), 3e-3),
}
IN_EACH_LAYOUT = {
    **{f"ZeRO-{stage}": (stage, 1, 16, ()) for stage in (0, 1)},
    **{f"ZeRO-{stage}, 2 ranks": (stage, 2, 8, ()) for stage in range(4)},
    "ZeRO-3, nothing stays": (3, 2, 8, NOTHING_STAYS),
    "ZeRO-3, accumulated": (3, 2, 4, (*NOTHING_STAYS, "--grad-accum-steps", 2)),
    "ZeRO-3, recomputed": (3, 2, 8, (*NOTHING_STAYS, "--grad-checkpointing", 2)),
    "ZeRO-3, offloaded": (3, 2, 8, (*NOTHING_STAYS, *OFFLOADED)),
    "ZeRO-3, offloaded, one rank": (3, 1, 8, (*OFFLOADED, "--grad-accum-steps", 2)),
    "accumulated": (2, 1, 8, ("--grad-accum-steps", 2)),
    "accumulated, 2 ranks": (1, 2, 4, ("--grad-accum-steps", 2)),
    "tp 2": (1, 2, 16, ("--tp", 2)),
    "pp 2": (1, 2, 8, ("--pp", 2, "--grad-accum-steps", 2)),
    "ZeRO-0, buckets of one gradient": (0, 2, 8, buckets(1)),
    "ZeRO-1, buckets of about a block": (1, 2, 8, buckets(30_000)),
    "ZeRO-2, buckets of one gradient": (2, 2, 8, buckets(1)),
}


@pytest.fixture(scope="module")
def of_the_cpu(ranks, tmp_path_factory) -> Callable[[str], list[Row]]:
    """A recipe's rows on the CPU, on one rank."""

    @cache
    def rows(recipe: str) -> list[Row]:
        config, more, _ = RECIPES[recipe]
        output = tmp_path_factory.mktemp("cpu")
        [(code, errors)] = ranks.run(
            1, train, None, words_of(config, "-b", 16, *more, "--output", output), pretend_fp16
        )
        assert code == 0, errors
        return read_rows(output)

    return rows


def on_the_device(ranks, library: Path, world_size: int, output: Path, *words: object) -> list[Row]:
    """The rows of a run there."""
    done = ranks.run(world_size, train, library, words_of(*words, "--output", output))
    assert [code for code, _ in done] == [0] * world_size, done
    return read_rows(output)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("layout", IN_EACH_LAYOUT)
def test_curve_of_the_cpu_in_each_layout(ranks, device_library, tmp_path, of_the_cpu, layout):
    """Catches: a read before its copy has landed, a gradient used before its sum, a block reused too early."""
    stage, world_size, micro_batch, more = IN_EACH_LAYOUT[layout]
    words = (f"cpu_zero{stage}_fp32.json", "-b", micro_batch, *MIXUP, *more)
    there = on_the_device(ranks, device_library, world_size, tmp_path, *words)
    assert_same_curve(of_the_cpu("fp32"), there, rtol=1e-4)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("recipe", RECIPES)
def test_curve_of_the_cpu(ranks, device_library, tmp_path, of_the_cpu, recipe):
    """Catches: another draw, a kernel that takes another path, a step that is skipped on one of the two only."""
    config, more, rtol = RECIPES[recipe]
    there = on_the_device(ranks, device_library, 1, tmp_path, config, "-b", 16, *more)
    on_cpu = of_the_cpu(recipe)
    assert_same_curve(on_cpu, there, rtol, keys=("loss", "grad_norm") if rtol < 1e-3 else ("loss",))
    skipped = [[row["step"] for row in rows if row["kind"] == "skip"] for rows in (on_cpu, there)]
    assert skipped[0] == skipped[1]
    assert bool(skipped[0]) == (recipe == "fp16")
    assert len(skipped[0]) < len([row for row in there if row["kind"] == "train"])


# ---- Waits of the host ----


def count_waits(library: Path, words: list[str]) -> list[dict[str, int]]:
    """On a rank: the host synchronisations of each step of a run."""
    take_step, waits = PlainEngine.train_step, []

    def counted(self, *args):
        simulated_device.reset()
        result = take_step(self, *args)
        waits.append(simulated_device.host_synchronisations())
        return result

    with mock.patch.object(PlainEngine, "train_step", counted):
        code, errors = train(library, words)
    assert code == 0, errors
    return waits


CLASSIFICATION = (*MIXUP, "-b", 8)
SCALED = ("--set", "fp16.initial_scale_power=8")
WITHOUT_WAITS = {
    **{f"classification, ZeRO-{stage}": (f"cpu_zero{stage}_fp32.json", 1, CLASSIFICATION) for stage in range(4)},
    "mae": ("cpu_zero3_fp32.json", 1, (*MAE, "-b", 8)),
    **{f"2 ranks, ZeRO-{stage}": (f"cpu_zero{stage}_fp32.json", 2, CLASSIFICATION) for stage in (1, 3)},
    "bf16": ("zero1_bf16.json", 1, (*CLASSIFICATION, *buckets(500_000))),
    "fp16": ("zero1_fp16.json", 1, (*CLASSIFICATION, *SCALED)),
    "fp16, ZeRO-3": ("zero1_fp16.json", 2, (*CLASSIFICATION, *SCALED, "zero_optimization.stage=3")),
    "bf16, ZeRO-3, accumulated": ("zero3_bf16.json", 2, (*CLASSIFICATION, *NOTHING_STAYS, "--grad-accum-steps", 2)),
    "accumulated": ("cpu_zero2_fp32.json", 2, (*CLASSIFICATION, "--grad-accum-steps", 2)),
    "average": ("cpu_zero1_fp32.json", 1, (*CLASSIFICATION, "--model-ema", "--grad-checkpointing")),
    "augmented there": ("cpu_zero1_fp32.json", 1, (*CLASSIFICATION, *RANDOM, "--augment-on", "device")),
    "layer decay": ("cpu_zero1_fp32.json", 1, (*CLASSIFICATION, "--layer-decay", 0.7)),
    "tp 2": ("cpu_zero1_fp32.json", 2, (*CLASSIFICATION, "--tp", 2)),
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", WITHOUT_WAITS)
def test_the_host_never_waits_in_a_step(ranks, device_library, tmp_path, case):
    """Catches: a hidden `.item()`, a copy from memory that is not pinned, a synchronisation of DeepSpeed's.

    Counted by the device and not by torch's fake mode: it is the run itself that is counted, with its loader, copies,
    streams, hooks and DeepSpeed's engine, none of which runs on fake tensors, and waits that are no reads are seen too
    (`synchronize`, events, copies). The first three steps may make what the others keep: torch's reducer takes over in
    the second and orders its buckets in the third.
    """
    config, world_size, more = WITHOUT_WAITS[case]
    words = words_of(config, *more, "--max-steps", 6, "--log-interval", 100, "--output", tmp_path)
    for waits in ranks.run(world_size, count_waits, device_library, words):
        assert len(waits) == 6
        assert not any(waits[3:]), waits


@pytest.mark.slow
@pytest.mark.parametrize("centering", ["ema", "sinkhorn"])
def test_the_host_waits_once_a_step_for_a_teacher(ranks, device_library, tmp_path, centering):
    """Whether the optimizer took its step. Catches: a number of masked patches that is read from the device, weights or
    places that are sent with a wait."""
    words = words_of("cpu_zero1_fp32.json", "-b", 8, *DINO, "--centering", centering, "--max-steps", 6)
    words += ["--log-interval", "100", "--output", str(tmp_path)]
    [waits] = ranks.run(1, count_waits, device_library, words)
    assert (len(waits), waits[3:]) == (6, [{"Event.synchronize": 1}] * 3)


@pytest.mark.slow
def test_waits_that_stay(ranks, device_library, tmp_path):
    """As docs/accelerators.md lists them, a step: the canary for what is to be removed from that page."""
    found = {}
    for name, config, more in (
        ("Lamb", "cpu_zero1_fp32.json", of_type("Lamb")),
        ("Muon", "cpu_zero1_fp32.json", of_type("Muon")),
    ):
        more = (*more, "--max-steps", 6, "--log-interval", 100, "--output", tmp_path / name)
        found[name] = ranks.run(1, count_waits, device_library, words_of(config, *CLASSIFICATION, *more))[0][-2]
    assert found == {name: {"item": 1} for name in ("Lamb", "Muon")}


# ---- Launches ----

DEEP = ["--model", "vit_tiny_patch16_224", "--img-size", "32", "-b", "1"]
DEEP += ["--model-kwargs", "patch_size=8", "depth=24", "embed_dim=64", "num_heads=2"]


def launches_of_a_step(library: Path, stages: tuple[int, ...]) -> list[int]:
    """On a rank: the kernels of timm's own bf16 step, and of ours at these ZeRO stages."""
    simulated_device.start(library)
    from ds_vit.launching.process import discover
    from ds_vit.tools import bench
    from ds_vit.tools.peers import peer_step

    process, found = discover(), []
    configs = [str(ROOT / "ds_configs" / f"zero{stage}_bf16.json") for stage in stages]
    with bench.ranks_met(process) as device, ExitStack() as stack:
        engines = [bench.resolve_engine([*DEEP, "--deepspeed_config", config], process) for config in configs]
        timms = peer_step("timm", engines[0], bench._random_batch(engines[0], 1, torch.float32, device))
        for step in (timms, *(bench.make_ours(engine, device, stack) for engine in engines)):
            for _ in range(4):
                step()
            simulated_device.reset()
            step()
            found.append(simulated_device.launches())
    return found


@pytest.mark.slow
def test_a_step_launches_no_more_than_timms(ranks, device_library):
    """A cast, a copy or a norm for each parameter, which a GPU spends its time on launching."""
    [[timms, *ours]] = ranks.run(1, launches_of_a_step, device_library, (0, 1, 2, 3))
    assert max(ours) <= timms, (timms, ours)
