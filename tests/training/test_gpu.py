"""What only a GPU can show; `pytest -m gpu` on a machine that has one."""

import json
import os
import subprocess
import sys

import oracle
import pytest
import torch
from curves import assert_same_curve, read_rows, train_rows
from project import ROOT
from runs import resolved
from safetensors.torch import load_file

from ds_vit.models.conversions import norms_in_fp32

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
TRAIN = [
    *("--model", oracle.MODEL, *oracle.kwargs_words(), "--img-size", oracle.IMG_SIZE, "--no-aug", "--smoothing", 0),
    *("--lr", oracle.LR, "--sched", "constant", "--warmup-epochs", 0, "--max-steps", oracle.STEPS),
    *("--log-interval", 1, "--workers", 2, "--mean", 0.5, 0.5, 0.5, "--std", 0.5, 0.5, 0.5, "--val-split", ""),
]


def train_alone(argv):
    """Plain python on one GPU."""
    command = [sys.executable, str(ROOT / "launch" / "train.py"), *map(str, argv)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.fixture(scope="module")
def cifar(tmp_path_factory, real_images):
    """64 images, random weights, and the plain loop's curve on the CPU."""
    folder = oracle.cifar_with_weights(real_images, tmp_path_factory.mktemp("gpu"), 64)
    return folder, oracle.train_plainly(folder).rows


def config_file(folder, base, **changes):
    """A shipped file with the oracle's clipping and weight decay."""
    data = json.loads((ROOT / "ds_configs" / base).read_text())
    data["gradient_clipping"] = oracle.CLIP
    data["optimizer"]["params"]["weight_decay"] = oracle.WEIGHT_DECAY
    data.update(changes)
    path = folder / base
    path.write_text(json.dumps(data))
    return path


# Shipped files, and how far their losses may be from the CPU's in fp32.
SHIPPED = {
    **{f"cpu_zero{stage}_fp32.json": 1e-4 for stage in range(4)},
    **{f"zero{stage}_bf16.json": 3e-3 for stage in range(4)},
    **dict.fromkeys(("zero3_offload_bf16.json", "zero1_bf16_checkpointing.json", "zero1_fp16.json"), 3e-3),
}


@pytest.mark.parametrize("base", SHIPPED)
def test_shipped_files_have_the_cpus_curve(cifar, tmp_path, base):
    """TF32 in fp32's matrix products; 16 bits that part by more than 0.3 %, except that fp16 may skip its first steps
    while its scale settles."""
    folder, plain = cifar
    argv = [*TRAIN, "--data-dir", folder, "--initial-checkpoint", folder / "weights.safetensors", "-b", 64]
    changes = {"fp16": {"enabled": True, "initial_scale_power": 12}} if "fp16" in base else {}
    train_alone([*argv, "--deepspeed_config", config_file(tmp_path, base, **changes), "--output", tmp_path / "run"])
    rows = read_rows(tmp_path / "run")
    assert_same_curve(plain, rows, rtol=SHIPPED[base], keys=("loss", "grad_norm") if "fp32" in base else ("loss",))
    assert all(row["mfu"] is None or 0 < row["mfu"] < 1 for row in train_rows(rows))


def test_everything_random_is_the_cpus(cifar, tmp_path):
    """Augmentation, mixing, erasing and drop-path from keys: the same curve on the GPU as on the CPU."""
    folder, _ = cifar
    argv = ["--model", oracle.MODEL, *oracle.kwargs_words(), "--img-size", 32, "--data-dir", folder, "-b", 32]
    argv += ["--aa", "rand-m9-mstd0.5-inc1", "--mixup", 0.8, "--cutmix", 1.0, "--reprob", 0.5, "--drop-path", 0.2]
    argv += ["--max-steps", 4, "--warmup-steps", 1, "--log-interval", 1, "--val-split", "", "--workers", 2]
    argv += ["--deepspeed_config", ROOT / "ds_configs" / "cpu_zero1_fp32.json"]
    train_alone([*argv, "--output", tmp_path / "gpu"])
    command = [sys.executable, str(ROOT / "launch" / "train.py"), *map(str, argv), "--output", str(tmp_path / "cpu")]
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run(command, env=environment, check=True, timeout=300)
    assert_same_curve(read_rows(tmp_path / "cpu"), read_rows(tmp_path / "gpu"), rtol=1e-4)


def test_auto_batch_keeps_the_curve(cifar, tmp_path):
    """A trial that leaves the device, a random state or the batch otherwise than it was."""
    folder, plain = cifar
    argv = [*TRAIN, "--data-dir", folder, "--initial-checkpoint", folder / "weights.safetensors"]
    argv += ["--set", "train_batch_size=64", "--auto-batch", "--output", tmp_path / "run"]
    train_alone([*argv, "--deepspeed_config", config_file(tmp_path, "cpu_zero1_fp32.json")])
    assert json.loads((tmp_path / "run" / "deepspeed.json").read_text())["train_micro_batch_size_per_gpu"] == 64
    assert_same_curve(plain, read_rows(tmp_path / "run"), rtol=1e-4)


def test_auto_batch_finds_the_edge_by_trying():
    """A trial that takes another memory than training, an error not caught, and memory that is not given back."""
    from ds_vit.training.auto_batch import TrialStep, by_trying, legal, memory_of_rank

    argv = ["--dataset", "digits", "--model", "vit_small_patch16_224", "--set", "train_batch_size=128", "--auto-batch"]
    argv += ["--warmup-steps", 2, "--max-steps", 8, "--deepspeed_config", ROOT / "ds_configs" / "cpu_zero1_fp32.json"]
    plan = resolved(argv, on_cpu=False)
    batches = {batch.micro_batch: batch for batch in legal(plan)}
    trial = TrialStep(plan, torch.device("cuda", 0))
    few, many = trial(batches[1]), trial(batches[8])
    assert many - few == pytest.approx(7 * trial.stage.waiting, rel=0.25)
    torch.cuda.set_per_process_memory_fraction(0.05 + 0.02)  # what stays free, and little more
    try:
        found = by_trying(plan, memory_of_rank("", plan.process, on_cpu=False), trial)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert found.how == "measured"
    assert 0 < found.micro_batch < 128
    assert found.larger_needs > found.needs
    del trial
    assert torch.cuda.memory_allocated() < 100e6


OFFLOAD = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 100_000}}


@pytest.mark.parametrize(("stage", "blocks"), [(0, None), (1, None), (3, None), (2, OFFLOAD)])
@pytest.mark.parametrize("kind", ["lamb", "muon", "layer decay"])
def test_optimizers_are_timms(cifar32, tmp_path, kind, stage, blocks):
    """The GPU's own way of arithmetic by parameter, its fused kernels, and what travels to it from offloaded memory."""
    rows, weights, average = oracle.train_plainly(cifar32, kind, model_kwargs=oracle.DEEP_KWARGS)
    output = tmp_path / "run"
    train_alone(oracle.command(cifar32, kind, (1, 1, 1, stage), output, blocks=blocks, model_kwargs=oracle.DEEP_KWARGS))
    assert_same_curve(rows, read_rows(output), rtol=1e-3, keys=("loss",))
    for name, ours in (("model", weights), ("ema", average)):
        theirs = load_file(str(output / f"{name}.safetensors"))
        assert oracle.furthest(theirs, ours)[0] < 1e-2


@pytest.mark.parametrize("kind", ["lamb", "muon", "layer decay"])
def test_optimizers_go_on(cifar32, tmp_path, kind):
    """An optimizer's count of steps that comes back on another device than its kernel wants it on."""
    rows = oracle.train_plainly(cifar32, kind, model_kwargs=oracle.DEEP_KWARGS).rows
    first, second = tmp_path / "first", tmp_path / "second"
    stop = ["--max-steps", 5, "--checkpoint-interval", 5]
    model = {"model_kwargs": oracle.DEEP_KWARGS}
    train_alone(oracle.command(cifar32, kind, (1, 1, 1, 1), first, *stop, **model))
    train_alone(oracle.command(cifar32, kind, (1, 1, 1, 3), second, "--resume", first, **model))
    assert_same_curve(rows[5:], read_rows(second), rtol=1e-3, keys=("loss",))


@pytest.mark.parametrize("rows", [788, 100_000])
def test_norms_lose_one_rounding(rows):
    """Weights' gradients that the kernel adds up in 16 bits, as torch's does for many rows of few features."""
    torch.manual_seed(0)
    x, gradient = (torch.randn(rows, 192, device="cuda").bfloat16() for _ in range(2))
    exact, ours = torch.nn.LayerNorm(192).cuda().double(), torch.nn.LayerNorm(192).cuda().bfloat16()
    assert norms_in_fp32(ours) == 1
    found = []
    for norm in (exact, ours):
        given = x.to(norm.weight.dtype, copy=True).requires_grad_()
        out = norm(given)
        out.backward(gradient.to(norm.weight.dtype))
        found.append((out.detach(), given.grad, norm.weight.grad, norm.bias.grad))
    for wanted, actual in zip(*found, strict=True):
        assert ((actual.double() - wanted).abs() <= wanted.abs() * 2**-8 + wanted.abs().max() * 2**-20).all()
