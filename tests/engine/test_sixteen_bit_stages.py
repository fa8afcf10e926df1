"""A 16-bit run computes the same at every ZeRO stage: the arithmetic of its layers, its first weights, its sums."""

import contextlib
import itertools
from unittest import mock

import pytest
import torch
from bridge_towers import write_folder
from curves import read_rows
from project import write_config
from runs import pretend_fp16, resolved

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


def train_as_on_gpu(argv):
    """On a rank: the exit code of a run with biases that are not zero, and where fp16 is allowed."""
    from ds_vit.models import keyed_init
    from ds_vit.train import main

    draw = keyed_init._draw_weights

    def draw_biases_too(model, layer, seed):
        draw(model, layer, seed)
        with torch.no_grad():
            fill_biases(layer)

    with pretend_fp16() if any("fp16" in word for word in argv) else contextlib.nullcontext():
        with mock.patch.object(keyed_init, "_draw_weights", draw_biases_too):
            return main(argv)


def train(ranks, world, output, stage, kind, *words, blocks=None, steps=1):
    """The rows of a run in 16 bits."""
    blocks = {**SIXTEEN[kind], "optimizer": ADAMW, **(blocks or {})}
    config = write_config(output.with_name(f"{output.name}-{kind}.json"), stage, **blocks)
    argv = ["--deepspeed_config", config, "--output", output, "--workers", 0, "--val-split", "", "--epochs", 1]
    argv += ["--max-steps", steps, "--log-interval", 1, "--warmup-steps", 0, "--checkpoint-interval", 0, *words]
    assert ranks.run(world, train_as_on_gpu, [str(word) for word in argv]) == [0] * world
    return [row for row in read_rows(output) if row["kind"] == "train"]


CASES = list(itertools.product(TASKS, SIXTEEN, (1, 2)))


@pytest.mark.one_in(3)
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
            settings = resolved([*DEEP, "--deepspeed_config", path, "--grad-accum-steps", accumulation]).deepspeed
        said = [note for note in settings.notes if "micro-batches" in note]
        return settings.json.get("data_types"), said

    assert types_and_notes(1) == (None, [])
    assert types_and_notes(4) == ({"grad_accum_dtype": "fp32"}, [])
    explicit = {"grad_accum_dtype": kind}
    line = "micro-batches are summed in 16 bits, by data_types.grad_accum_dtype"
    assert types_and_notes(4, data_types=explicit) == (explicit, [line])
    assert types_and_notes(1, data_types=explicit) == (explicit, [])
