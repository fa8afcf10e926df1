"""A 16-bit run computes the same at every ZeRO stage: the arithmetic of its layers, its first weights, its sums."""

import contextlib
import itertools
from fnmatch import fnmatch
from unittest import mock

import pytest
import torch
from bridge_towers import write_folder
from curves import read_rows, train_main
from project import write_config
from runs import pretend_fp16, resolved
from safetensors.torch import load_file

SMALL = ("--model", "vit_tiny_patch16_224", "--img-size", 16, "--model-kwargs", "patch_size=4", "embed_dim=24")
SMALL = (*SMALL, "depth=2", "num_heads=2")
GLYPHS = ("--dataset", "glyphs", "--context-length", 24)
TEXT = (*GLYPHS, *SMALL, "--text-width", 24, "--text-depth", 2, "--text-heads", 2, "--embed-dim", 16)
TASKS = {
    "classification": ("--dataset", "digits", *SMALL),
    "mae": ("--task", "mae", "--dataset", "digits", *SMALL, "--decoder-dim", 24, "--decoder-depth", 2),
    "clip": ("--task", "clip", *TEXT),
    "siglip": ("--task", "siglip", *TEXT),
    "dino": (
        *("--task", "dino", "--dataset", "digits", *SMALL, "--local-crops-size", 8, "--local-crops-number", 2),
        *("--prototypes", 24, "--head-hidden-dim", 64, "--head-bottleneck-dim", 8),
    ),
    "distillation": ("--dataset", "digits", *SMALL, "--kd-model-name", "local-dir:{teacher}"),
    "bridgetower": ("--task", "bridgetower", "--model", "local-dir:{tower}", "--pretrained", *GLYPHS),
}
TASKS["mae"] = (*TASKS["mae"], "--decoder-heads", 2)
SIXTEEN = {"bf16": {"bf16": {"enabled": True}}, "fp16": {"fp16": {"enabled": True, "initial_scale_power": 8}}}
ADAMW = {"type": "AdamW", "params": {"lr": 0.001, "eps": 1e-6, "weight_decay": 0.05}}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A teacher and a BridgeTower by their placeholder."""
    import timm
    from timm.models import save_for_hf

    folder = tmp_path_factory.mktemp("weights")
    kwargs = {"img_size": 16, "patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        teacher = timm.create_model("vit_tiny_patch16_224", num_classes=10, **kwargs)
        with torch.no_grad():
            fill_biases(teacher)
        save_for_hf(teacher, folder / "teacher", safe_serialization=True, model_args=kwargs)
        write_folder(folder / "tower")
    return {name: folder / name for name in ("teacher", "tower")}


def fill_biases(module):
    """Values in all biases and norms, which start at 0 and 1."""
    for parameter in module.parameters():
        if parameter.dim() == 1:
            parameter += 0.1 * torch.sin(torch.arange(parameter.numel(), dtype=torch.float32))


@contextlib.contextmanager
def as_on_gpu(argv):
    """On a rank: biases are drawn too, and fp16 is allowed."""
    from ds_vit.models import keyed_init

    draw = keyed_init._draw_weights

    def draw_biases_too(model, layer, seed):
        draw(model, layer, seed)
        with torch.no_grad():
            fill_biases(layer)

    is_fp16 = any("fp16" in str(word) for word in argv)
    with (
        pretend_fp16() if is_fp16 else contextlib.nullcontext(),
        mock.patch.object(keyed_init, "_draw_weights", draw_biases_too),
    ):
        yield


def train_as_on_gpu(argv):
    """On a rank: the exit code of a run."""
    with as_on_gpu(argv):
        return train_main(argv)


def train(ranks, world, output, stage, kind, *words, blocks=None, steps=1):
    """The rows of a run in 16 bits."""
    blocks = {**SIXTEEN[kind], "optimizer": ADAMW, **(blocks or {})}
    config = write_config(output.with_name(f"{output.name}-{kind}.json"), stage, **blocks)
    argv = ["--deepspeed_config", config, "--output", output, "--workers", 0, "--val-split", "", "--epochs", 1]
    argv += ["--max-steps", steps, "--log-interval", 1, "--warmup-steps", 0, "--checkpoint-interval", 0, *words]
    assert ranks.run(world, train_as_on_gpu, [str(word) for word in argv]) == [0] * world
    return [row for row in read_rows(output) if row["kind"] == "train"]


CASES = [(task, kind, 1 + n % 2) for n, (task, kind) in enumerate(itertools.product(TASKS, SIXTEEN))]


@pytest.mark.one_in(3)
@pytest.mark.sampled(50)
@pytest.mark.parametrize(("task", "kind", "world"), CASES, ids=str)
def test_first_loss_is_equal_at_every_zero_stage(ranks, tmp_path, folders, task, kind, world):
    # Catches: a bias that is added to a rounded product, and anything else that a ZeRO stage computes in its own way.
    words = [str(word).format(**folders) for word in (*TASKS[task], "-b", 8 // world)]
    losses = [train(ranks, world, tmp_path / str(stage), stage, kind, *words)[0]["loss"] for stage in (1, 2, 3)]
    assert losses[0] == losses[1] == losses[2]


DEEP = ("--dataset", "digits", *SMALL, "-b", 2, "--epochs", 1, "--max-steps", 1)


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", SIXTEEN)
def test_several_micro_batches_are_summed_in_fp32(tmp_path, stage, kind):
    # Catches: a type of the sum that depends on the ZeRO stage, or one that is asked for and not followed, or not said.
    def types_and_notes(accumulation, **blocks):
        path = write_config(tmp_path / "config.json", stage, **SIXTEEN[kind], optimizer=ADAMW, **blocks)
        with pretend_fp16() if kind == "fp16" else contextlib.nullcontext():
            settings = resolved([*DEEP, "--deepspeed_config", path, "--grad-accum-steps", accumulation]).engine
        said = [note for note in settings.notes if "micro-batches" in note]
        return settings.json.dump().get("data_types"), said

    assert types_and_notes(1) == (None, [])
    assert types_and_notes(4) == ({"grad_accum_dtype": "fp32"}, [])
    explicit = {"grad_accum_dtype": kind}
    line = "micro-batches are summed in 16 bits, by data_types.grad_accum_dtype"
    assert types_and_notes(4, data_types=explicit) == (explicit, [line])
    assert types_and_notes(1, data_types=explicit) == (explicit, [])


def test_offloaded_masters_take_a_sum_in_16_bits(ranks, tmp_path):
    # Catches: masters in fp32 that are given the flat gradient, of another type, as theirs.
    words = (*TASKS["classification"], "-b", 4, "--grad-accum-steps", 2, "--set", "data_types.grad_accum_dtype=bf16")
    offloaded = ("zero_force_ds_cpu_optimizer=false", 'zero_optimization.offload_optimizer={"device":"cpu"}')
    here, there = (
        train(ranks, 1, tmp_path / str(len(more)), 3, "bf16", *words, *more, steps=3) for more in ((), offloaded)
    )
    assert [row["loss"] for row in here] == pytest.approx([row["loss"] for row in there], rel=1e-6)


# ---- the values that a run starts from -------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [1, 3])
def test_frozen_weights_leave_a_run_as_they_came(ranks, tmp_path, stage):
    # Catches: frozen weights that are written as the 16-bit model has them, at the end or after a resume elsewhere.
    names = ("*blocks.0.*", "*embed*")
    words = [*TASKS["classification"], "--freeze", *names, "--epochs", 2]
    train(ranks, 1, tmp_path / "first", 1, "bf16", *words, "-b", 8)
    given = tmp_path / "first" / "model.safetensors"
    words += ["--initial-checkpoint", given, "--checkpoint-interval", 1]
    train(ranks, 2, tmp_path / "run", stage, "bf16", *words, "-b", 4)
    train(ranks, 1, tmp_path / "run", 4 - stage, "bf16", *words, "-b", 8, "--resume", "auto", steps=2)
    before, after = load_file(given), load_file(tmp_path / "run" / "model.safetensors")
    frozen = [name for name in before if any(fnmatch(name, pattern) for pattern in names)]
    assert len(frozen) > 10
    assert all(torch.equal(before[name], after[name]) for name in frozen)
    assert any((before[name] != before[name].bfloat16().float()).any() for name in frozen)
    assert not torch.equal(before["blocks.1.attn.qkv.weight"], after["blocks.1.attn.qkv.weight"])
