"""--compile: the curve of a run without it, in every layout, from graphs that are made once."""

import json
import re
import time
from unittest import mock

import pytest
from compiling import train_counting
from curves import assert_same_curve, evals, read_rows, train_in
from project import ROOT
from runs import refusal, resolved
from safetensors.torch import load_file
from vits import write_teacher

from ds_vit.fault_tolerance.errors import UserError
from ds_vit.tasks.classification.task import Classification
from ds_vit.training.resolve import engine

RTOL = 1e-5
# Two steps are an epoch, and evaluation's last batch is not full. The first block has no drop-path: another kind.
BASE = [
    *("--model", "vit_tiny_patch16_224", "--img-size", 16, "--dataset", "digits", "--workers", 0),
    *("--model-kwargs", "patch_size=8", "embed_dim=48", "depth=3", "num_heads=6", "proj_drop_rate=0.1"),
    *("--drop-path", 0.3, "--mixup", 0.8, "--lr", 1e-3, "--warmup-epochs", 0, "--epochs", 2, "--log-interval", 1),
    *("--validation-batch-size", 100, "--checkpoint-interval", 0),
]
GLOBAL_BATCH = 512
# name: ranks, ZeRO stage, accumulation, further flags
LAYOUTS = {
    "ZeRO-0": (2, 0, 1, ()),
    "ZeRO-3, recomputed": (2, 3, 2, ("--grad-checkpointing",)),
    "pp2, recomputed": (2, 1, 2, ("--pp", 2, "--grad-checkpointing")),
    "tp2": (2, 1, 1, ("--tp", 2)),
    "tp2, sequence": (2, 3, 1, ("--tp", 2, "--sequence-parallel")),
}


def words(output, stage=1, world=1, accumulation=1, changes=()):
    """The command line of a run."""
    data = json.loads((ROOT / "ds_configs" / f"cpu_zero{stage}_fp32.json").read_text()) | dict(changes)
    if stage == 3:  # nothing is small enough to stay whole, nothing is gathered ahead
        names = ("param_persistence_threshold", "prefetch_bucket_size")
        data["zero_optimization"] |= {f"stage3_{name}": 0 for name in names}
    config = output.with_suffix(".json")
    config.write_text(json.dumps(data))
    micro = GLOBAL_BATCH // world // accumulation
    argv = ["--deepspeed_config", config, "-b", micro, "--grad-accum-steps", accumulation, "--output", output]
    return [str(word) for word in (*BASE, *argv)]


@pytest.fixture(scope="module")
def reference(ranks, tmp_path_factory):
    """One rank, eager."""
    output = tmp_path_factory.mktemp("reference") / "run"
    return train_in(ranks, 1, words(output)), load_file(output / "model.safetensors")


@pytest.mark.one_in(2)
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_curve_is_that_of_eager_blocks(ranks, reference, tmp_path, layout):
    """A mask of another block or step, a weight that is gone, a graph that is made at every step or for every block."""
    world, stage, accumulation, flags = LAYOUTS[layout]
    dp = 1 if {"--pp", "--tp"} & set(flags) else world
    argv = [*words(tmp_path / "run", stage, dp, accumulation), *map(str, flags), "--compile"]
    for counts in ranks.run(world, train_counting, argv):
        names, graphs = zip(*counts, strict=True)
        assert names == 2 * ("train_step", "train_step", "evaluate")
        kinds = graphs[0]
        assert kinds == 2 or ("--pp" in flags and kinds == 1), "with drop-path and without"
        assert graphs == (kinds, kinds, *4 * (2 * kinds,)), "in training and in evaluation"
    rows, weights = read_rows(tmp_path / "run"), load_file(tmp_path / "run" / "model.safetensors")
    assert_same_curve(reference[0], rows, rtol=RTOL)
    assert evals(rows) == evals(reference[0])
    assert {n: t.shape for n, t in weights.items()} == {n: t.shape for n, t in reference[1].items()}


SMALL = [
    *("--model", "vit_tiny_patch16_224", "--img-size", 16, "--workers", 0, "--val-split", "", "-b", 8),
    *("--model-kwargs", "patch_size=4", "embed_dim=48", "depth=2", "num_heads=6", "--drop-path", 0.3),
    *("--max-steps", 4, "--log-interval", 1, "--warmup-epochs", 0, "--checkpoint-interval", 0),
    *("--deepspeed_config", ROOT / "ds_configs" / "cpu_zero1_fp32.json"),
]
TEXT = ["--dataset", "glyphs", "--text-width", 24, "--text-depth", 2, "--text-heads", 2, "--context-length", 24]
DINO = ["--local-crops-size", 8, "--local-crops-number", 2, "--prototypes", 32, "--head-hidden-dim", 32]
# name: graphs, flags. A tower with drop-path has two, for its first block and the others, and dino's student two more
# for local crops. A teacher draws nothing; distillation's has two, because its last block is of another class.
TASKS = {
    "dino": (5, ["--task", "dino", "--dataset", "digits", *DINO, "--head-bottleneck-dim", 16]),
    "clip": (4, ["--task", "clip", *TEXT]),
    "siglip": (4, ["--task", "siglip", *TEXT]),
    "distillation": (4, ["--dataset", "digits", "--mixup", 0.4, "--kd-model-name", "local-dir:{teacher}"]),
}
COMPILERS = [
    *(pytest.param(task, "aot_eager", marks=pytest.mark.slow) for task in ("dino", "clip", "distillation")),
    pytest.param("siglip", "aot_eager", marks=pytest.mark.exhaustive),
    *(pytest.param(task, "inductor", marks=pytest.mark.exhaustive) for task in TASKS),
]


@pytest.mark.parametrize(("task", "backend"), COMPILERS)
def test_each_tower_is_compiled(ranks, tmp_path, task, backend):
    """A graph that serves crops of another size; a text tower or a teacher that stays eager, draws or is trained."""
    kinds, flags = TASKS[task]
    write_teacher(tmp_path / "teacher", img_size=16, patch_size=4, embed_dim=32, depth=3, num_heads=2)
    argv = [str(word).format(teacher=tmp_path / "teacher") for word in [*SMALL, *flags]]
    eager = train_in(ranks, 1, [*argv, "--output", str(tmp_path / "eager")])
    argv += ["--output", str(tmp_path / "run"), "--compile"]
    [counts] = ranks.run(1, train_counting, argv, backend, timeout=600)
    assert {graphs for _, graphs in counts} == {kinds}, "all graphs are made in the first step"
    assert_same_curve(eager, read_rows(tmp_path / "run"), rtol=RTOL)


def slow_compiler(argv):
    """On a rank: train with a compiler that takes twice as long as a rank may stand still."""
    slept = []

    def sleep():
        if not slept:
            time.sleep(4.0)
        slept.append(1)

    return train_counting(argv, before=sleep)


@pytest.mark.slow
def test_the_watchdog_waits_for_the_compiler(ranks, tmp_path):
    """A run that is ended as stalled while it compiles."""
    argv = [*words(tmp_path / "run"), "--compile", "--max-steps", "1", "--stall-seconds", "2"]
    assert ranks.run(1, slow_compiler, argv)


GRAPH_REFUSALS = {
    ("cpu_zero3_fp32", ()): "ZeRO stage 3 gathers weights by hooks",
    ("cpu_zero1_fp32", ("--pp", 2)): "--pp 2 exchanges activations between replays",
    ("cpu_zero1_fp32", ("--set", 'zero_optimization.offload_optimizer={"device":"cpu"}')): "the JSON offloads the opt",
    ("zero1_bf16_checkpointing", ("--set", "activation_checkpointing.cpu_checkpointing=true")): "keeps activations in",
    (
        "cpu_zero1_fp32",
        ("--task", "dino", "--local-crops-size", 8, "--koleo-weight", 0, "--centering", "ema"),
    ): "--task dino is not replayed: its centres need",
    ("cpu_zero1_fp32", ("--set", "flops_profiler.enabled=true")): "the JSON's flops_profiler counts by hooks",
}


def test_graphs_are_refused_where_they_cannot_be(capsys):
    """A flag that would do nothing, or something wrong; `auto` is on where a GPU has shown it, and only there."""
    base = ["--model", "vit_tiny_patch16_224", "--img-size", 16, "--dataset", "digits", "--max-steps", 2]
    base += ["--model-kwargs", "patch_size=4", "depth=2", "embed_dim=24", "num_heads=2", "-b", 4]
    at = {name: ("--deepspeed_config", ROOT / "ds_configs" / f"{name}.json") for name, _ in GRAPH_REFUSALS}
    argv = [*base, *at["cpu_zero1_fp32"]]
    assert "--cuda-graph on: a CPU has no CUDA graphs; drop it" in refusal(capsys, [*argv, "--cuda-graph", "on"])
    for (name, more), why in GRAPH_REFUSALS.items():
        words = [*base, *at[name], *more]
        with pytest.raises(UserError, match=f"--cuda-graph on: .*{re.escape(why)}"):
            resolved([*words, "--cuda-graph", "on"], world=2, on_cpu=False)
        assert not resolved(words, world=2, on_cpu=False).engine.graphs
    assert resolved([*argv, "--cuda-graph", "on"], on_cpu=False).engine.graphs
    assert not resolved(argv, on_cpu=False).engine.graphs
    with mock.patch.object(engine, "RECORDED_GRAPHS", {("classification", 1, "fp32", False, False)}):
        assert resolved(argv, on_cpu=False).engine.graphs
        assert not resolved(argv, on_cpu=True).engine.graphs
        assert not resolved(argv, world=2, on_cpu=False).engine.graphs, "another row"
        assert not resolved([*argv, "--cuda-graph", "off"], on_cpu=False).engine.graphs
        with mock.patch.object(engine, "_missing_for_compiling", return_value=""):
            assert not resolved([*argv, "--compile"], on_cpu=False).engine.graphs, "another row"
        with mock.patch.object(Classification, "fixed_towers", ("teacher",)):
            assert not resolved(argv, on_cpu=False).engine.graphs, "a distilled step"


def test_refused(tmp_path, capsys):
    """A mode that does nothing, a machine without a compiler, DeepSpeed's compiler beside ours or instead of it."""
    from torch._inductor import cpp_builder, exc

    argv = [*words(tmp_path / "run"), "--compile"]
    assert "a CPU has no CUDA graphs" in refusal(capsys, [*argv, "--compile-mode", "reduce-overhead"])
    with mock.patch.object(cpp_builder, "get_cpp_compiler", side_effect=exc.InvalidCxxCompiler):
        line = refusal(capsys, argv)
    assert "--compile: there is no C++ compiler (g++ or clang++)" in line
    assert "install it or drop --compile" in line
    assert "use --compile" in refusal(capsys, words(tmp_path / "run", changes={"compile": {"deepcompile": True}}))
    assert not (tmp_path / "run").exists()
    resolved(words(tmp_path / "run", changes={"compile": {"deepcompile": False}}))


@pytest.mark.slow
def test_inductor(ranks, tmp_path):
    """The compiler itself: blocks of one kind, with keyed dropout inside."""
    one_kind = ["--dataset", "digits", "--drop-path", 0, "--model-kwargs", "patch_size=8", "embed_dim=24", "depth=2"]
    argv = [*SMALL, *one_kind, "num_heads=2", "proj_drop_rate=0.1"]
    eager = train_in(ranks, 1, [*argv, "--output", tmp_path / "eager"])
    compiled = train_in(ranks, 1, [*argv, "--output", tmp_path / "run", "--compile"])
    assert_same_curve(eager, compiled, rtol=RTOL)
