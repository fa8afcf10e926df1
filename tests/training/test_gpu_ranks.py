"""Ranks that share one GPU over NCCL have the curve of one rank; `pytest -m gpu` on a machine that has one.

The same bodies run over gloo on the CPU: one of them always, the others with `--exhaustive`.
"""

import json
import subprocess
import sys

import pytest
import torch
from curves import assert_same_curve, read_rows, train_in
from project import ROOT

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
ON_BOTH = ["cpu", pytest.param("gpu", marks=[pytest.mark.gpu, NO_GPU])]
ON_GPU = [pytest.param("cpu", marks=pytest.mark.exhaustive), pytest.param("gpu", marks=[pytest.mark.gpu, NO_GPU])]
# Two of them, or one rank with as many micro-batches: kernels of a GPU depend on the size of a micro-batch.
MICRO_BATCH, STEPS = 8, 4
WORDS = [
    *("--model", "vit_tiny_patch16_224", "--img-size", 16, "--drop-path", 0.2, "--workers", 0, "--val-split", ""),
    *("--model-kwargs", "patch_size=4", "embed_dim=64", "depth=4", "num_heads=4", "-b", MICRO_BATCH),
    *("--sched", "constant", "--warmup-epochs", 0, "--epochs", 1, "--max-steps", STEPS, "--log-interval", 1),
]
TEXT = ["--text-width", 64, "--text-depth", 2, "--text-heads", 2, "--context-length", 24, "--embed-dim", 16]
CROPS = ["--local-crops-size", 8, "--local-crops-number", 2, "--prototypes", 64, "--head-hidden-dim", 32]
DECODER = ["--decoder-depth", 2, "--decoder-dim", 32, "--decoder-heads", 2]
TASKS = {
    "classification": ["--dataset", "digits", "--mixup", 0.8],
    "clip": ["--dataset", "glyphs", *TEXT],
    "dino": ["--dataset", "digits", "--head-bottleneck-dim", 16, *CROPS],
    "mae": ["--dataset", "digits", *DECODER],
}
# ZeRO stage, flags; two ranks.
LAYOUTS = {"zero1": (1, []), "zero3": (3, []), "tp2": (1, ["--tp", 2]), "pp2": (1, ["--pp", 2])}
LAYOUTS["zero3 tp2"] = (3, ["--tp", 2])
CASES = [(task, layout) for task in TASKS for layout in LAYOUTS if (task, layout) != ("dino", "pp2")]
# Large rates of SGD show a constant factor in a gradient, which Adam hides.
SGD = {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.05}}}


def train(ranks, device, world, words):
    """The rows of a run on so many ranks: of the pool, or on the GPU as users start them."""
    if device == "cpu":
        return train_in(ranks, world, words)
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", world]
    program = [*torchrun, ROOT / "docs" / "benchmarks" / "one_gpu.py"] if world > 1 else []
    argv = [sys.executable, *program, ROOT / "launch" / "train.py", *words]
    done = subprocess.run([*map(str, argv)], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    said = " ".join((done.stdout + done.stderr).split())
    assert "cannot be captured" not in said, "eager steps, which follow a failed capture, have the curve too"
    return read_rows(words[words.index("--output") + 1])


def command(output, task="classification", layout="zero1", world=2, further=(), file="cpu_zero{}_fp32", blocks=SGD):
    """The words of a run in a layout, whose step has two micro-batches."""
    stage, flags = LAYOUTS[layout] if world > 1 else (1, [])
    config = json.loads((ROOT / "ds_configs" / f"{file.format(stage)}.json").read_text())
    config["zero_optimization"] |= {"reduce_bucket_size": 50_000}  # several buckets
    path = output.with_suffix(".json")
    path.write_text(json.dumps(config | blocks))
    replicas = 1 if flags else world
    words = ["--deepspeed_config", path, "--task", task, *WORDS, *TASKS[task], *flags, *further]
    return [str(word) for word in [*words, "--grad-accum-steps", 2 // replicas, "--output", output]]


@pytest.fixture(scope="module")
def one_rank(ranks, tmp_path_factory):
    """The rows of a task's run on one rank of a device, trained once."""
    folder, known = tmp_path_factory.mktemp("one-rank"), {}

    def rows(device, task, **options):
        key = "-".join((device, task, *options))
        if key not in known:
            known[key] = train(ranks, device, 1, command(folder / key, task, world=1, **options))
        return known[key]

    return rows


@pytest.mark.parametrize("device", ON_GPU)
@pytest.mark.parametrize(("task", "layout"), CASES)
def test_two_ranks_have_the_curve_of_one(ranks, one_rank, tmp_path, task, layout, device):
    """A collective on a stream that nobody waits for, in a group of other ranks, before its input is there."""
    two = train(ranks, device, 2, command(tmp_path / "run", task, layout))
    assert_same_curve(one_rank(device, task), two, rtol=1e-4)


BF16 = {"file": "zero{}_bf16", "blocks": {}}


@pytest.mark.parametrize("device", ON_BOTH)
def test_reductions_overlap_in_bf16(ranks, one_rank, tmp_path, device):
    """A bucket that is reduced before its last gradient is written."""
    overlap = json.loads((ROOT / "ds_configs" / "zero1_bf16.json").read_text())["zero_optimization"]
    overlap |= {"overlap_comm": True, "reduce_bucket_size": 50_000}
    options = BF16 | {"blocks": {"zero_optimization": overlap}}
    two = train(ranks, device, 2, command(tmp_path / "run", **options))
    assert_same_curve(one_rank(device, "classification", **BF16), two, rtol=3e-3, keys=("loss",))


@pytest.mark.parametrize("device", ON_GPU)
@pytest.mark.parametrize(("first", "second"), [("zero3", "tp2"), ("tp2", "zero1"), ("zero1", "pp2"), ("pp2", "zero3")])
def test_a_run_resumes_in_another_layout(ranks, one_rank, tmp_path, first, second, device):
    """A shard of weights or of the optimizer's state that is read at another rank's place."""
    half = ["--max-steps", STEPS // 2, "--checkpoint-interval", STEPS // 2]
    train(ranks, device, 2, command(tmp_path / "first", layout=first, further=half))
    further = ["--resume", tmp_path / "first"]
    rows = train(ranks, device, 2, command(tmp_path / "second", layout=second, further=further))
    later = [row for row in one_rank(device, "classification") if row["step"] > STEPS // 2]
    assert_same_curve(later, rows, rtol=1e-4)


# Logged steps of dino are measured, and run eagerly: of eight, five are replayed.
REPLAYED = {"dino": ["--max-steps", 8, "--log-interval", 8]}


@pytest.mark.gpu
@NO_GPU
@pytest.mark.parametrize("task", TASKS)
def test_two_ranks_replay_a_graph(ranks, one_rank, tmp_path, task):
    """A reduction that is left out of the graph, or one that is captured before the ranks have met."""
    own = REPLAYED.get(task, [])
    two = train(ranks, "gpu", 2, command(tmp_path / "run", task, further=[*own, "--cuda-graph", "on"]))
    one = one_rank("gpu", task, further=own) if own else one_rank("gpu", task)
    assert_same_curve(one, two, rtol=1e-4)


GRAPHS = [("classification", "zero0_bf16"), *((task, "zero1_bf16") for task in TASKS)]


@pytest.mark.gpu
@NO_GPU
@pytest.mark.parametrize("compiles", [False, True])
@pytest.mark.parametrize(("task", "file"), GRAPHS)
def test_a_replayed_step_has_the_curve_of_an_eager_one(ranks, tmp_path, task, file, compiles):
    """A value of the captured step that a later one reads; what a row of RECORDED_GRAPHS needs before it is added."""
    own = [*REPLAYED.get(task, []), *(["--compile"] if compiles else [])]
    rows = []
    for graph in ("off", "on"):
        further = [*own, "--cuda-graph", graph]
        words = command(tmp_path / graph, task, world=1, further=further, file=file, blocks={})
        rows.append(train(ranks, "gpu", 1, words))
    assert_same_curve(*rows, rtol=3e-3, keys=("loss",))
