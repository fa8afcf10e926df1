"""`--task mae`: the curve of a plain loop, exact evaluation, and files that other tools take."""

from __future__ import annotations

import functools
import json
import shutil
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import timm
import torch
from curves import train_in, train_rows
from picture_folders import write_images
from PIL import Image
from project import write_config
from runs import resolved
from safetensors.torch import load_file
from timm.models.naflexvit import batch_patchify
from vits import timm_state_dict

from ds_vit.config import parser as flags
from ds_vit.data.fields import ImageField
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.models.keyed_init import initialise
from ds_vit.models.layers import take_apart
from ds_vit.models.param_groups import no_weight_decay_names
from ds_vit.models.sequential import SequentialViT, timm_names
from ds_vit.tasks.mae.task import MaskedPatchLoss
from ds_vit.tasks.mae.towers import masked_patches, unpatchify
from ds_vit.tools.evaluate import evaluate_weights
from ds_vit.tools.evaluate import main as evaluate_main
from ds_vit.training.inputs import InputPipeline
from ds_vit.weights.export import export

STEPS, BATCH, CLIP = 10, 16, 0.1
NAME = "vit_tiny_patch16_224"
KWARGS = {"patch_size": 4, "embed_dim": 24, "depth": 3, "num_heads": 6}
DECODER = ["--decoder-dim", 24, "--decoder-depth", 2, "--decoder-heads", 6]
MODEL = ["--model", NAME, "--img-size", 16, "--model-kwargs", *(f"{k}={v}" for k, v in KWARGS.items()), "--workers", 0]
MAE = ["--task", "mae", *MODEL, *DECODER]
RUN = ["--drop-path", 0.1, "--sched", "constant", "--warmup-epochs", 0, "--epochs", 1, "--log-interval", 1]
OPTIMIZERS = {
    "SGD": {"type": "SGD", "params": {"lr": 0.3, "momentum": 0.9, "weight_decay": 0.05}},
    "AdamW": {"type": "AdamW", "params": {"lr": 2e-3, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.05}},
}
# What is painted differs between the two, so that both targets are tried.
WORDS = {"SGD": ["--norm-pix-loss"], "AdamW": []}


def command(folder, words, stage=1, optimizer="SGD"):
    """The command line of a run on the digits, but for its ranks."""
    blocks = {"gradient_clipping": CLIP, "optimizer": OPTIMIZERS[optimizer]}
    path = write_config(folder / f"zero{stage}-{optimizer}.json", stage, **blocks)
    return [str(word) for word in ["--deepspeed_config", path, "--dataset", "digits", *words]]


def inputs(plan, dtype=torch.float32):
    """The run's own batches."""
    engine = SimpleNamespace(device=torch.device("cpu"), dtype=dtype, groups=SimpleNamespace(tp=None))
    return InputPipeline(plan, engine, SimpleNamespace(waited=lambda seconds: None))


def plain_model(plan):
    """The model as it begins, and its loss."""
    layers = take_apart(plan.model.whole)
    initialise(plan.model.whole, layers, seed=plan.config.seed, device="cpu")
    return SequentialViT(layers), MaskedPatchLoss(plan.model.whole)


def plain(plan, optimizer):
    """(loss, gradient norm) of each step in torch alone, whole batches in one process."""
    whole, loss_of = plain_model(plan)
    names, free = timm_names(whole), no_weight_decay_names(plan.model.whole)
    trained = {names[local]: p for local, p in whole.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p for name, p in trained.items() if name not in free]},
        {"params": [p for name, p in trained.items() if name in free], "weight_decay": 0.0},
    ]
    how = OPTIMIZERS[optimizer]
    stepper = getattr(torch.optim, how["type"])(groups, **how["params"])
    rows = []
    for _, batch in zip(range(STEPS), inputs(plan).training(), strict=False):
        assert torch.equal(batch["images"], batch["pixels"])
        stepper.zero_grad()
        loss = loss_of(whole(batch["images"], batch["keys"]), batch["pixels"], batch["keys"])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), CLIP)
        stepper.step()
        rows.append((loss.item(), norm.item()))
    assert all(norm > 1.5 * CLIP for _, norm in rows), "clipping does nothing: a wrong factor would not show"
    assert min(loss for loss, _ in rows[5:]) < rows[0][0] - 0.02, "nothing is learned"
    return rows


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The plain curve for each optimizer."""

    @functools.cache
    def curve(optimizer):
        words = [*MAE, *RUN, *WORDS[optimizer], "-b", BATCH, "--max-steps", STEPS]
        return plain(resolved(command(tmp_path_factory.mktemp("plain"), words, optimizer=optimizer)), optimizer)

    return curve


# name: (ranks, ZeRO stage, micro-batch, accumulation, optimizer, further flags)
LAYOUTS = {
    "dp2": (2, 1, 8, 1, "AdamW", []),
    "pp2, the bridge ends the first stage": (2, 1, 8, 2, "SGD", ["--pp", 2, "--pp-partition", "0,5,8"]),
}


def assert_curve(rows, expected):
    """Losses to 1e-5 and norms to 1e-4, at every step."""
    rows = train_rows(rows)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["loss"] for row in rows] == pytest.approx([loss for loss, _ in expected], rel=1e-5)
    assert [row["grad_norm"] for row in rows] == pytest.approx([norm for _, norm in expected], rel=1e-4)


def train(ranks, folder, layout, *words):
    """Our run in a layout: its rows."""
    world, stage, micro, accumulation, optimizer, flags_of_layout = LAYOUTS[layout]
    batch = ["-b", micro, "--grad-accum-steps", accumulation, "--max-steps", STEPS]
    words = [*MAE, *RUN, *WORDS[optimizer], *flags_of_layout, *batch, *words]
    return train_in(ranks, world, command(folder, words, stage, optimizer))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_curve_is_that_of_a_plain_loop(ranks, expected, tmp_path, layout):
    """Other pixels at the end of the pipeline than at its start; a mask, a mean or a factor that follows the ranks."""
    assert_curve(train(ranks, tmp_path, layout), expected(LAYOUTS[layout][4]))


EVAL = [*MAE, "--eval-only", "--norm-pix-loss"]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("world", "rows", "words"), [(1, 355, []), (3, 7, []), (2, 6, ["--pp", 2])])
def test_every_image_of_the_validation_split_counts_once(ranks, tmp_path, world, rows, words):
    """A mask that follows the batch, a padding row that counts, pixels that the last stage does not have."""
    plan = resolved(command(tmp_path, [*EVAL, "-vb", 355]))
    whole, loss_of = plain_model(plan)
    [batch] = inputs(plan).evaluation().batches
    with torch.no_grad():
        losses = loss_of.per_sample(whole.eval()(batch["images"], batch["keys"]), batch["pixels"], batch["keys"])
    argv = command(tmp_path, [*EVAL, *words, "-vb", rows, "--output", tmp_path / "run"])
    [row] = [row for row in train_in(ranks, world, argv) if row["kind"] == "eval"]
    assert (row["loss"], row["images"]) == (pytest.approx(losses.double().mean().item(), rel=1e-6), 355)
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["best_loss"], summary["last_loss"]) == (row["loss"], row["loss"])
    assert_picture(Image.open(tmp_path / "run" / "reconstruction.png"), whole, batch)


def assert_picture(picture, whole, batch):
    """Eight rows of the image, what the encoder saw, what is painted, and that between what was seen."""
    side, gap = 16 * (96 // 16), 4
    assert picture.size == (4 * side + 5 * gap, 8 * side + 9 * gap)
    panels = torch.from_numpy(np.asarray(picture).astype(np.float32)[gap:, gap:])
    shown = np.linspace(0, 354, 8).round().astype(int)
    pixels, keys = batch["pixels"][shown], batch["keys"][shown]
    with torch.no_grad():
        prediction = whole.eval()(pixels, keys)
    variance, mean = torch.var_mean(batch_patchify(pixels, (4, 4))[0], -1, keepdim=True)
    painted = unpatchify(prediction * (variance + 1e-6).sqrt() + mean, (4, 4), (16, 16))
    image, painted = (((x * 0.5 + 0.5) * 255).clip(0, 255).permute(0, 2, 3, 1) for x in (pixels, painted))
    masked = masked_patches(keys, 16, 0.75).view(8, 4, 4, 1).repeat_interleave(4, 1).repeat_interleave(4, 2)
    columns = image, torch.where(masked, 127.5, image), painted, torch.where(masked, painted, image)
    for column, expected in enumerate(columns):
        for row in range(8):
            top, left = row * (side + gap), column * (side + gap)
            tile = panels[top : top + side : side // 16, left : left + side : side // 16]
            assert (tile - expected[row]).abs().max() <= (1 if column > 1 else 0.51)


def test_a_bad_image_is_counted_once_where_two_stages_decode_it(ranks, tmp_path):
    """A count for each stage that reads the image; another stand-in at the end of the pipeline than at its start."""
    data = tmp_path / "data"
    for split, count in (("train", 6), ("validation", 4)):
        write_images(data / split, *(f"{name}/{number}.png" for name in "ab" for number in range(count)))
        (data / split / "a" / "1.png").write_bytes(b"no image")
    words = [*MAE, *RUN, "--max-bad-images", 1, "-b", 4, "--max-steps", 3, "-vb", 3]
    seen = []
    for world, layout in ((1, []), (2, ["--pp", 2, "--pp-partition", "0,5,8"])):
        output = tmp_path / f"run{world}"
        argv = command(tmp_path, [*words, *layout, "--output", output])
        argv[argv.index("--dataset") : argv.index("--dataset") + 2] = ["--data-dir", str(data)]
        rows = train_in(ranks, world, argv)
        summary = json.loads((output / "summary.json").read_text())
        [figures] = [row for row in rows if row["kind"] == "eval"]
        assert (summary["skipped_images"], figures["images"]) == (1, 7)
        seen.append([row["loss"] for row in [*train_rows(rows), figures]])
    assert seen[1] == pytest.approx(seen[0], rel=1e-5)


@pytest.mark.slow
def test_files(ranks, tmp_path):
    """An encoder that timm cannot load, a decoder that is lost, a file that no run can start from."""
    words = [*MAE, *RUN, "-b", 16, "--max-steps", 2, "--output", tmp_path / "run", "--model-ema"]
    rows = train_in(ranks, 2, command(tmp_path, [*words, "--checkpoint-interval", 2], stage=3))
    shutil.copytree(tmp_path / "run", tmp_path / "alone", ignore=shutil.ignore_patterns("*decoder*", "checkpoints"))
    with pytest.raises(UserError, match=r"has no whole model \(decoder_.* more\).*--checkpoint latest"):
        evaluate_weights(tmp_path / "alone")
    assert ranks.run(1, evaluate_main, [str(tmp_path / "run")]) == [0]
    [evaluated] = [row["loss"] for row in rows if row["kind"] == "eval"]
    assert json.loads((tmp_path / "run" / "eval.json").read_text())["loss"] == pytest.approx(evaluated, rel=1e-6)
    settings = flags.load_recipe(str(tmp_path / "run" / "config.yaml"))
    assert "num_classes" not in settings
    assert settings["mask_ratio"] == 0.75
    encoder = timm.create_model(NAME, num_classes=0, img_size=16, **KWARGS)
    names = {name for name, _ in resolved(command(tmp_path, MAE)).model.whole.named_parameters()}
    for prefix in ("", "ema-"):
        weights = load_file(tmp_path / "run" / f"{prefix.strip('-') or 'model'}.safetensors")
        encoder.load_state_dict(weights, strict=True)
        decoder = load_file(tmp_path / "run" / f"{prefix}decoder.safetensors")
        assert decoder.keys() == names - weights.keys()
        assert {name for name in decoder if not name.startswith("decoder_")} == {"mask_token"}

    checkpoint = tmp_path / "run" / "checkpoints" / "step-00000002" / "model.safetensors"
    for name in ("", "latest"):
        found = export(tmp_path / "run", "timm", checkpoint=name, output=tmp_path / f"timm-{name}")
        assert found.largest == 0.0
        exported = timm.create_model(f"local-dir:{found.folder}", pretrained=True).state_dict()
        assert exported.keys() == encoder.state_dict().keys()
        assert all(torch.equal(load_file(checkpoint)[name], tensor) for name, tensor in exported.items())
    whole_file = resolved(command(tmp_path, [*MODEL, *RUN, "--initial-checkpoint", checkpoint, "-b", 8]))
    assert any(f"has a decoder of {len(decoder) - 1} tensors, which is not loaded" in note for note in whole_file.notes)

    start = ["--initial-checkpoint", tmp_path / "alone" / "model.safetensors"]
    fine_tune = command(tmp_path, [*MODEL, *RUN, *start, "-b", 8, "--max-steps", 2])
    assert any("newly initialised: head.bias, head.weight" in note for note in resolved(fine_tune).notes)
    rows = train_in(ranks, 1, fine_tune)
    assert [row["step"] for row in train_rows(rows)] == [1, 2]
    assert "top1" in rows[-1]
    plan = resolved(command(tmp_path, [*MAE, *RUN, *start, "-b", 8]))
    assert any("newly initialised: decoder_" in note for note in plan.notes)
    layers = take_apart(plan.model.whole)
    initialise(plan.model.whole, layers, seed=0, device="cpu", checkpoint=plan.model.towers["image"])
    whole = timm_state_dict(SequentialViT(layers))
    raw = load_file(tmp_path / "run" / "model.safetensors")
    assert all(torch.equal(whole[name], tensor) for name, tensor in raw.items())


def test_another_mask_is_another_run(ranks, tmp_path):
    """A run that goes on under another loss, or is refused for a shape that says nothing."""
    words = [*MAE, *RUN, "-b", 16, "--checkpoint-interval", 1, "--output", tmp_path / "run"]
    train_in(ranks, 1, command(tmp_path, [*words, "--max-steps", 1]))
    go_on = [*words, "--max-steps", 2, "--resume", "auto"]
    assert resolved(command(tmp_path, go_on)).output.resume is not None
    for flag, value, there, here in (
        ("--mask-ratio", [0.5], "0.75", "0.5"),
        ("--decoder-depth", [3], "2", "3"),
        ("--decoder-dim", [48], "24", "48"),
        ("--decoder-heads", [3], "6", "3"),
        ("--norm-pix-loss", [], "False", "True"),
    ):
        with pytest.raises(UserError, match=f"{there} there and {here} here; give the same {flag},"):
            resolved(command(tmp_path, [*go_on, flag, *value]))


def test_layer_decay_has_no_place_for_a_decoder(tmp_path):
    """A decoder that learns at the rate of some layer of the encoder."""
    argv = command(tmp_path, [*MAE, *RUN, "-b", 8], optimizer="AdamW")
    with pytest.raises(UserError, match=r"--layer-decay 0\.65 is for fine-tuning a pretrained encoder"):
        resolved([*argv, "--layer-decay", "0.65"])
    assert resolved([*argv, "--layer-decay", "1"]).optimizer is not None


def test_images_are_finished_and_sent_once(tmp_path):
    """The same pixels normalised for the model, and again for the loss; pixels that are rounded or sent for both."""
    plan = resolved(command(tmp_path, [*MAE, *RUN, "-b", 8, "--tp", 2]), 2)
    with (
        mock.patch.object(ImageField, "to_device", autospec=True, side_effect=ImageField.to_device) as finish,
        mock.patch("torch.distributed.broadcast") as send,
    ):
        batch = next(inputs(plan, torch.bfloat16).training())
    assert (finish.call_count, send.call_count) == (1, 1)
    assert batch["images"].shape == batch["pixels"].shape == (8, 3, 16, 16)
    assert torch.equal(batch["pixels"].bfloat16(), batch["images"])
    assert batch["pixels"].dtype == torch.float32 != batch["images"].dtype


def test_a_run_without_classes(tmp_path):
    """A recipe that turns mixing and smoothing off is rejected; a classifier over the data's classes, or sharded."""
    plan = resolved([*command(tmp_path, [*MAE, *RUN, "-b", 8]), "--mixup", "0", "--smoothing", "0"])
    assert (plan.model.task.num_classes, plan.model.class_parallel, plan.config.active) == (0, False, False)
    assert plan.data.train_source.num_classes == 10
