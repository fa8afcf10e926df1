"""--cuda-graph on the simulated device: replayed runs equal eager ones bit for bit, and each planted error is seen."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
from pathlib import Path
from unittest import mock

import pytest
import torch
from pairwise import cover
from project import ROOT
from runs import DIGITS, pretend_fp16, run_quietly
from safetensors.torch import load_file

import simulated_device
from ds_vit.device import allocated_bytes, peak_bytes, reset_peak_bytes
from ds_vit.engine.flat_gradient import FlatGradient
from ds_vit.engine.graph import StepGraphs
from ds_vit.engine.plain import PlainEngine
from ds_vit.tasks.classification.task import Classification
from ds_vit.tasks.dino.rope import CoordinateDraws

RUN = [
    *(*DIGITS, "--model-kwargs", "patch_size=4", "depth=2", "embed_dim=24", "num_heads=2", "--log-interval", 1),
    *("--drop-path", 0.2, "--warmup-epochs", 0, "--val-split", "", "-b", 4),
]
MIXED = ("--mixup", 0.8, "--layer-decay", 0.7, "--model-ema")
TASKS = {
    "classification": MIXED,
    "mae": ("--task", "mae", "--model-ema", "--decoder-dim", 24, "--decoder-depth", 1, "--decoder-heads", 2),
    "clip": (
        *("--task", "clip", "--model-ema", "--dataset", "glyphs", "--context-length", 12),
        *("--text-width", 24, "--text-depth", 1, "--text-heads", 2),
    ),
    "dino": (  # logged steps are measured, and run eagerly
        *("--task", "dino", "--log-interval", 10, "--local-crops-size", 8, "--local-crops-number", 2),
        *("--prototypes", 24, "--head-hidden-dim", 64, "--head-bottleneck-dim", 16),
    ),
}
FP16 = ("--on-nonfinite", "skip", "--set", "fp16.hysteresis=1")


@dataclasses.dataclass
class Trained:
    """What a run left: rows of metrics.jsonl, weights by file and name, its output, and replays."""

    rows: list[tuple]
    weights: dict[str, dict[str, torch.Tensor]]
    output: str
    replays: int

    def __eq__(self, other):
        return self.rows == other.rows and all(
            torch.equal(tensor, other.weights[file][name])
            for file, tensors in self.weights.items()
            for name, tensor in tensors.items()
        )


def trained(folder, words, planted=contextlib.nullcontext):
    """On a rank with the device: a run."""
    replays, replay = [], torch.sim.CUDAGraph.replay
    counted = mock.patch.object(torch.sim.CUDAGraph, "replay", lambda graph: replays.append(replay(graph)))
    fp16 = pretend_fp16() if "fp16" in " ".join(map(str, words)) else contextlib.nullcontext()
    with counted, fp16, planted():
        code, *output = run_quietly([*RUN, *words, "--output", folder])
    assert code == 0, output
    rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    rows = [
        tuple(row.get(key) for key in ("step", "loss", "grad_norm", "loss_scale"))
        for row in rows
        if row["kind"] == "train"
    ]
    weights = {file.name: load_file(file) for file in sorted(Path(folder).glob("*.safetensors"))}
    return Trained(rows, weights, "".join(output), len(replays))


def file_of(stage, precision="fp32"):
    name = f"cpu_zero{stage}_fp32" if precision == "fp32" else f"zero{stage}_{precision}"
    return "--deepspeed_config", ROOT / "ds_configs" / f"{name}.json"


def without_replays():
    """All passes run eagerly, on what replays get: masks of patches that are filled up."""
    return mock.patch.object(StepGraphs, "run", lambda graphs, name, function, *given: function(*given))


def both_ways(library, folder, words, steps, resumed_at=0):
    """On a rank: a run without graphs, and the same with them, perhaps from a checkpoint of the first."""
    simulated_device.start(library)
    words = [*words, "--max-steps", steps]
    off = [*words, "--cuda-graph", "on" if "dino" in words else "off", "--checkpoint-interval", resumed_at or steps]
    eager = trained(f"{folder}/off", off, without_replays if "dino" in words else contextlib.nullcontext)
    assert eager.replays == 0
    if resumed_at:
        words = [*words, "--resume", f"{folder}/off/checkpoints/step-{resumed_at:08d}"]
        eager.rows = [row for row in eager.rows if row[0] > resumed_at]
    replayed = trained(f"{folder}/on", [*words, "--cuda-graph", "on"])
    assert "cuda-graph" not in replayed.output
    assert replayed == eager
    return replayed.replays


# ---- Equality ----

FACTORS = {
    "task": ("classification", "mae", "clip", "dino"),
    "stage": (0, 1, 2),
    "accumulation": (1, 4),
    "resumed": (False, True),
    "precision": ("fp32", "bf16", "fp16"),
}
PRODUCT = [dict(zip(FACTORS, choices, strict=True)) for choices in itertools.product(*FACTORS.values())]
LEGAL = [case for case in PRODUCT if case["stage"] > 0 or case["precision"] != "fp16"]
CHOSEN = cover(LEGAL)
MARKS = [[], [pytest.mark.slow], [pytest.mark.exhaustive]]


def marked(case):
    kind = 2 if case not in CHOSEN else CHOSEN.index(case) > 1
    return pytest.param(case, marks=MARKS[kind], id="-".join(map(str, case.values())))


@pytest.mark.parametrize("task", ["siglip", "distillation"])
def test_tasks_that_share_the_steps_of_others_are_replayed(ranks, device_library, tmp_path, task):
    """A loss whose bias, or whose teacher's outputs, are burnt in."""
    words = [*file_of(1), *(("--task", "siglip", *TASKS["clip"][2:]) if task == "siglip" else MIXED)]
    if task == "distillation":
        ranks.run(1, run_quietly, [*RUN, *words, "--max-steps", 1, "--output", tmp_path / "teacher"])
        words += ["--kd-checkpoint", tmp_path / "teacher"]
    assert ranks.run(1, both_ways, device_library, tmp_path, words, 6, timeout=300) == [5]


@pytest.mark.parametrize("case", [marked(case) for case in [*CHOSEN, *(case for case in LEGAL if case not in CHOSEN)]])
def test_a_replayed_run_is_the_eager_one_bit_for_bit(ranks, device_library, tmp_path, case):
    """Losses, norms, loss scales, weights and their average, with drop-path, mixup, layer decay and overflows."""
    fp16 = case["precision"] == "fp16"
    words = [*file_of(1 if fp16 else case["stage"], case["precision"]), *TASKS[case["task"]]]
    words += ["--grad-accum-steps", case["accumulation"]]
    words += [*FP16, "fp16.initial_scale_power=24", f"zero_optimization.stage={case['stage']}"] if fp16 else []
    steps, resumed = 12, 6 if case["resumed"] else 0
    [replays] = ranks.run(1, both_ways, device_library, tmp_path, words, steps, resumed, timeout=600)
    coupled, accumulated = case["task"] in ("clip", "dino"), case["accumulation"] > 1
    passes = case["accumulation"] * (2 if coupled and accumulated else 1)
    kinds = (3 if coupled else 2) if accumulated else 1
    measured = (2 if resumed else 3) if case["task"] == "dino" else 0  # steps 1, 10 and the last
    assert replays == passes * (steps - resumed - measured) - kinds, "all but the first pass of each kind are replays"


def two_ranks(library, folder, words):
    simulated_device.start(library)
    runs = [trained(f"{folder}/{choice}", [*words, "--cuda-graph", choice]) for choice in ("off", "on")]
    assert runs[0].rows == runs[1].rows
    assert runs[0] == runs[1]
    return runs[1].replays


@pytest.mark.parametrize(("stage", "accumulation"), [(1, 1), pytest.param(2, 3, marks=pytest.mark.slow)])
def test_reductions_are_in_the_graph(ranks, device_library, tmp_path, stage, accumulation):
    words = [*file_of(stage), *MIXED, "--max-steps", 4, "--grad-accum-steps", accumulation]
    replays = ranks.run(2, two_ranks, device_library, tmp_path, words, timeout=600)
    assert replays == [4 - 1 if accumulation == 1 else 3 * 4 - 3] * 2


def test_each_image_size_has_a_graph(ranks, device_library, tmp_path):
    words = [*file_of(1), *MIXED, "--img-size-schedule", "8:0,16:0.5"]
    assert ranks.run(1, both_ways, device_library, tmp_path, words, 6) == [4]


def burnt_in_step():
    """Replays draw the coordinates of the step in which they were captured."""
    draw = CoordinateDraws.draw

    def drawn(own, seed, step, *more):
        return draw(own, seed, 3 if isinstance(step, torch.Tensor) else step, *more)

    return mock.patch.object(CoordinateDraws, "draw", drawn)


def drawn_both_ways(library, folder, words, burnt_in):
    with burnt_in_step() if burnt_in else contextlib.nullcontext():
        try:
            return both_ways(library, folder, words, 6)
        except AssertionError:
            return "different"


@pytest.mark.slow
@pytest.mark.parametrize("burnt_in", [False, True])
def test_each_replay_draws_its_rotary_coordinates(ranks, device_library, tmp_path, burnt_in):
    kwargs = ("patch_size=4", "depth=2", "embed_dim=24", "num_heads=2", "global_pool=token")
    words = [*file_of(1), *TASKS["dino"], "--model", "vit_small_patch16_dinov3", "--model-kwargs", *kwargs]
    words += ["--rope-shift-coords", 0.2, "--rope-jitter-coords", 1.2, "--rope-rescale-coords", 2]
    result = ranks.run(1, drawn_both_ways, device_library, tmp_path, words, burnt_in, timeout=300)
    assert result == ["different" if burnt_in else 3]


# ---- Host state that hooks advance ----


def plain_values(thing):
    """Its numbers, flags and texts."""
    own = {name: value for name, value in vars(thing).items() if isinstance(value, int | float | str | None)}
    own.pop("post_backward_callback_graph_task_id", None)  # autograd's number of a pass: each pass has another
    return own


def states_of(library, folder, words, forgotten):
    """On a rank: after each micro-batch, the state on the host: of DeepSpeed and of the flat gradient."""
    simulated_device.start(library)
    found, add = [], PlainEngine._add

    def noted(engine, loss):
        optimizer = engine.engine.optimizer
        parts = [engine.engine, optimizer, optimizer._backward_hook_state, engine.flat, engine.engine.tput_timer]
        own = {f"{type(part).__name__}.{name}": v for part in parts for name, v in plain_values(part).items()}
        found.append({**own, "taken": [bucket.taken for bucket in engine.flat._buckets]})
        add(engine, loss)

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(PlainEngine, "_add", noted))
        if forgotten:
            stack.enter_context(mock.patch.object(FlatGradient, "end_replay"))
        trained(folder, words)
    return found


@pytest.mark.parametrize("forgotten", [False, True])
def test_a_replay_leaves_the_counters_and_flags_of_an_eager_pass(ranks, device_library, tmp_path, forgotten):
    """A replay runs no hook. When DeepSpeed's set anything else, this fails: `FlatGradient.end_replay` has to, too."""
    words = [*file_of(1), "--max-steps", 4, "--grad-accum-steps", 2, "--cuda-graph"]
    eager, replayed = (
        ranks.run(1, states_of, device_library, tmp_path / choice, [*words, choice], forgotten)[0]
        for choice in ("off", "on")
    )
    other = {
        name for before, after in zip(eager, replayed, strict=True) for name in before if before[name] != after[name]
    }
    boundary = "DeepSpeedZeroOptimizer._is_gradient_accumulation_boundary"
    assert other == ({"FlatGradient.fresh", boundary} if forgotten else set())


# ---- Planted errors ----


def burnt_in_scale():
    return mock.patch.object(StepGraphs, "_reading_scalars", return_value=contextlib.nullcontext())


def no_copies_of_outputs():
    return mock.patch.object(torch.Tensor, "clone", lambda tensor, **_: tensor)


def with_side_stream():
    """Inputs are filled on another stream, which does not wait for the replay before."""
    filled, side = StepGraphs._filled, []

    def on_side_stream(self, given):
        if not side:
            side.append(torch.Stream("sim"))
        with side[0]:
            return filled(self, given)

    return mock.patch.object(StepGraphs, "_filled", on_side_stream)


def planted_run(library, folder, words, plant):
    simulated_device.start(library)
    eager = trained(f"{folder}/off", [*words, "--cuda-graph", "off"])
    try:
        return "same" if trained(f"{folder}/on", [*words, "--cuda-graph", "on"], plant) == eager else "different"
    except (AssertionError, RuntimeError) as error:
        return str(error)


PLANTS = {
    "a loss scale burnt in": (burnt_in_scale, (*file_of(1, "fp16"), *FP16, "fp16.initial_scale_power=18"), "different"),
    "an input overwritten early": (with_side_stream, file_of(1), "race: "),
    "an output that the next graph overwrites": (
        no_copies_of_outputs,
        (*file_of(1), "--grad-accum-steps", 3),
        "different",
    ),
}


@pytest.mark.parametrize(("plant", "words", "seen"), PLANTS.values(), ids=PLANTS)
def test_a_planted_error_is_seen(ranks, device_library, tmp_path, plant, words, seen):
    words = [*words, "--max-steps", 4]
    [result] = ranks.run(1, planted_run, device_library, tmp_path, words, plant)
    assert seen in result


# ---- Steps that cannot be captured ----


def reads_on_the_host(of_gradient=False):
    """In images of 16 pixels the host reads the logits, or in the backward pass their gradient."""
    loss = Classification.loss

    def reading(task, tp):
        own = loss(task, tp)

        def read(logits, batch):
            if batch["images"].shape[-1] < 16:
                return own(logits, batch)
            if of_gradient:
                logits.register_hook(lambda gradient: print(end="", flush=gradient.sum().item() > 0))
            else:
                logits.sum().item()
            return own(logits, batch)

        return read

    return mock.patch.object(Classification, "loss", reading)


def failing_run(library, folder, words, of_gradient):
    simulated_device.start(library)
    eager = trained(f"{folder}/off", [*words, "--cuda-graph", "off"])
    failing = trained(f"{folder}/on", [*words, "--cuda-graph", "on"], functools.partial(reads_on_the_host, of_gradient))
    assert failing == eager
    assert torch.accelerator.memory_reserved() == torch.accelerator.memory_allocated(), "the pool is given back"
    return failing.replays, [line for line in failing.output.splitlines() if "cuda-graph" in line]


@pytest.mark.parametrize(("sizes", "replays"), [((), 0), (("--img-size-schedule", "8:0,16:0.5"), 4)])
def test_a_step_that_cannot_be_captured_runs_eagerly_after_one_line(ranks, device_library, tmp_path, sizes, replays):
    """At once, or in the middle of a run that has replayed steps: losses, norms and weights stay the eager run's."""
    words = [*file_of(2), *MIXED, "--max-steps", 6, "--grad-accum-steps", 2, *sizes]
    [(done, lines)] = ranks.run(1, failing_run, device_library, tmp_path, words, bool(sizes))
    assert (done, len(lines)) == (replays, 1)
    assert "this step cannot be captured, and runs eagerly: item: operation not permitted" in lines[0]


# ---- Memory and the host's work ----

DEEP = ("patch_size=8", "embed_dim=64", "num_heads=2")


def cost_of(library, depths):
    """On a rank: Python calls of a replayed step by depth, and its peak of memory, the graphs' pool included."""
    from ds_vit.launching.process import discover
    from ds_vit.tools import bench
    from ds_vit.tools.counting import count_calls

    simulated_device.start(library)
    calls = []
    with contextlib.ExitStack() as stack:
        for depth in depths:
            words = ["--model", "vit_tiny_patch16_224", "--img-size", 32, "--model-kwargs", *DEEP, f"depth={depth}"]
            words += ["-b", 1, "--cuda-graph", "on", "--deepspeed_config", ROOT / "ds_configs" / "zero1_bf16.json"]
            config = bench.resolve_engine([str(word) for word in words], discover())
            device = torch.device("sim", 0)
            step = bench.make_ours(config, device, stack)
            for _ in range(4):
                step()
            calls.append(count_calls(step))
            reset_peak_bytes(device)
            step()
            counted = peak_bytes(device) - allocated_bytes(device)
            pool = torch.accelerator.memory_reserved() - allocated_bytes(device)
    return calls, counted, pool


@pytest.mark.slow
def test_a_replayed_step_costs_the_host_the_same_at_any_depth(ranks, device_library):
    [(calls, counted, pool)] = ranks.run(1, cost_of, device_library, (24, 48), timeout=300)
    print(calls)
    assert max(calls) <= 400
    assert abs(calls[0] - calls[1]) <= 10
    assert counted >= pool > 100_000, "the peak counts what replays write"
