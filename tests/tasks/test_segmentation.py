"""`--task segmentation`: the loss of a plain loop in every layout, masks in which little counts, and class weights."""

from __future__ import annotations

import json
from collections import namedtuple
from functools import partial
from unittest import mock

import numpy as np
import oracle
import pytest
import torch
from curves import assert_same_curve, read_rows, train_main
from PIL import Image
from plain_segmenter import CLASSES, KWARGS, NAME, SIDE, blocks, on_grid, rated, read_split, segmenter, write_split
from project import write_config
from runs import KINDS, resolved
from safetensors.torch import load_file, save_file
from sklearn.metrics import jaccard_score
from sklearn.utils.class_weight import compute_class_weight
from torch import nn

from ds_vit.data.sources.masks import default_palette
from ds_vit.fault_tolerance import exit_codes
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.models.keyed_init import initialise
from ds_vit.models.layers import take_apart
from ds_vit.models.sequential import SequentialViT, giving_features
from ds_vit.models.zoo import ModelSpec
from ds_vit.tasks.segmentation.task import balanced_weights, read_class_weights
from ds_vit.tasks.segmentation.towers import create_segmenter

STEPS, STOP, RTOL = 4, 2, 1e-5
WIDE = (SIDE, 28)  # of an image of evaluation
WORDS = [
    *("--task", "segmentation", "--model", NAME, "--img-size", SIDE, *oracle.kwargs_words(KWARGS), "--workers", 0),
    *("--no-aug", "--mean", 0.5, 0.5, 0.5, "--std", 0.5, 0.5, 0.5, "--sched", "constant", "--warmup-epochs", 0),
    *("--log-interval", 1, "--num-classes", CLASSES),
]
BLOCKS = {"optimizer": oracle.BLOCKS["sgd"], "gradient_clipping": oracle.CLIP}
WEIGHTS = (0.5, 3.0, 1.0, 0.0, 2.0)


def masks_of(number, ignored, seed, size=(SIDE, SIDE)):
    """Masks; of image i the share `ignored(i)` of the pixels does not count."""
    return [blocks(size, 100 * seed + index, ignored(index)) for index in range(number)]


def tensors_of(folder, split):
    """All images of a split as a run with mean and std of 0.5 has them, and their masks."""
    images, masks = read_split(folder, split)
    pixels = torch.from_numpy(np.stack([np.asarray(image) for image in images])).permute(0, 3, 1, 2)
    return pixels.float() / 127.5 - 1.0, torch.from_numpy(np.stack(masks))


Curve = namedtuple("Curve", "rows weights miou predicted", defaults=((),))
"""A run's training rows; its weights, its mIoU and the classes of the pixels of evaluation in the end."""


def plainly(folder, head="linear", weights=None, frozen=False):
    """Train on all images in each step, in one process."""
    model = segmenter(head)
    model.load_state_dict(load_file(folder / f"{head}.safetensors"))
    model.requires_grad_(not frozen).seg_head.requires_grad_()
    criterion = nn.CrossEntropyLoss(None if weights is None else torch.tensor(weights), ignore_index=-1)
    batches = [tensors_of(folder, "train")] * STEPS
    rows = oracle.train_model(model, oracle.timm_optimizer("sgd", model), batches, criterion).rows
    assert min(row["grad_norm"] for row in rows) > 1.5 * oracle.CLIP, "a wrong factor on the gradient would not show"
    pairs, predicted = rated(model, folder)
    miou = 100 * jaccard_score(*pairs, average="macro")
    return Curve(rows, model.state_dict(), miou, predicted)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """24 training images: all of image 0's pixels are ignored, all but one of image 1's; and 7 of evaluation."""
    made = tmp_path_factory.mktemp("scenes")
    shares = {0: 1.0, 1: 1.0 - 1.0 / SIDE**2}
    write_split(made, "train", masks_of(24, lambda index: shares.get(index, index / 30), 0))
    write_split(made, "val", masks_of(7, lambda index: index / 10, 1, WIDE))
    generator = torch.Generator().manual_seed(1)
    for head in ("linear", "conv"):
        values = segmenter(head).state_dict()
        values = {name: at + 0.05 * torch.randn(at.shape, generator=generator) for name, at in values.items()}
        save_file(values, str(made / f"{head}.safetensors"))
    (made / "weights.txt").write_text(" ".join(map(str, WEIGHTS)))
    return made


@pytest.fixture(params=[1])
def six(request, tmp_path, folder):
    """Six images, of which so many pixels of one image count: most micro-batches and ranks have none."""
    write_split(tmp_path, "train", masks_of(6, lambda index: 1.0 - request.param * (index == 2) / SIDE**2, 0))
    write_split(tmp_path, "val", masks_of(3, lambda index: 0.0, 1, WIDE))
    (tmp_path / "linear.safetensors").write_bytes((folder / "linear.safetensors").read_bytes())
    return tmp_path


BREAKAGES = {
    # Each rank's own mean.
    "StepContext.sum": lambda context, own: own * torch.distributed.get_world_size(context.groups.dp),
    # Ignored pixels count in the denominator.
    "Segmentation._weight": lambda self, masks: torch.tensor(float(masks.numel())),
}


def train_broken(breakage, argv):
    """On a rank: the exit code of a run with a planted error."""
    with mock.patch(f"ds_vit.tasks.segmentation.task.{breakage}", BREAKAGES[breakage]):
        return train_main(argv)


Case = namedtuple("Case", "pp dp tp stage accumulation words", defaults=(1, 1, 1, 1, 1, ()))
"""A layout and what differs from a linear head."""


def words_of(folder, output, case, *words, images=24):
    """The command line of our run in a layout, which later words override."""
    config = write_config(output.with_name(f"{output.name}.json"), case.stage, **BLOCKS)
    argv = [*WORDS, "--deepspeed_config", config, "--data-dir", folder, "--output", output, *case.words]
    argv += ["--pp", case.pp, "--tp", case.tp, "-b", images // case.dp // case.accumulation]
    argv += ["--grad-accum-steps", case.accumulation, "--max-steps", STEPS, "--checkpoint-interval", 0]
    return [str(word) for word in [*argv, "--initial-checkpoint", folder / "linear.safetensors", *words]]


def train(ranks, folder, output, case, *words, main=train_main, **more):
    """What our run in a layout writes."""
    world, argv = case.pp * case.dp * case.tp, words_of(folder, output, case, *words, **more)
    assert ranks.run(world, main, argv, timeout=300) == [0] * world
    rows = read_rows(output)
    weights = load_file(output / "model.safetensors") | load_file(output / "seg_head.safetensors")
    return Curve(rows, weights, [row for row in rows if row["kind"] == "eval"][-1]["miou"])


def shown(output):
    """The classes of all pixels of the masks and of the predictions in a run's picture, -1 for white."""
    sheet, parts = Image.open(output / "segmentation.png"), ([], [], [])
    colours = np.array([*default_palette(CLASSES), (255,) * 3])
    for at in range(3 * 7):
        left, top = 4 + 196 * (at % 6), 45 + 196 * (at // 6)  # 110 x 192 pixels in the middle of a square
        tile = sheet.resize(WIDE[::-1], Image.Resampling.NEAREST, (left, top, left + 192, top + 110))
        classes = (np.asarray(tile)[..., None, :] == colours).all(-1).argmax(-1)
        parts[at % 3].append(np.where(classes == CLASSES, -1, classes))
    return parts[1:]


def assert_same(expected, found):
    """Losses, gradient norms, weights and mIoU."""
    assert_same_curve(expected.rows, found.rows, RTOL)
    part, tensor = oracle.furthest(found.weights, expected.weights)
    assert part <= RTOL, f"the weights part: {tensor} by {part:.2e} of its norm"
    assert found.miou == pytest.approx(expected.miou, rel=1e-5)


CASES = {
    "1 rank": Case(stage=0),
    "x4": Case(stage=3, accumulation=4),
    "dp2 ZeRO-3": Case(dp=2, stage=3),
    "dp2 x4 ZeRO-0": Case(dp=2, stage=0, accumulation=4),
    "dp2 x4 ZeRO-2, recomputed": Case(dp=2, stage=2, accumulation=4, words=("--grad-checkpointing",)),
    "dp3 ZeRO-2": Case(dp=3, stage=2),
    "dp3 x4 ZeRO-3": Case(dp=3, stage=3, accumulation=4),
    "dp3 x4 ZeRO-1": Case(dp=3, stage=1, accumulation=4),
    "tp2": Case(tp=2, stage=2),
    "tp2 x4, sequence": Case(tp=2, accumulation=4, words=("--sequence-parallel",)),
    "pp2 x4": Case(pp=2, accumulation=4),
    "pp2 dp2 x4 ZeRO-0": Case(pp=2, dp=2, stage=0, accumulation=4),
    "pp2, head apart, recomputed": Case(pp=2, words=("--pp-partition", "0,4,5", "--grad-checkpointing", "2")),
}


@pytest.fixture(scope="module")
def expected(folder):
    """The plain curve."""
    return plainly(folder)


@pytest.mark.sampled(20)
@pytest.mark.parametrize("case", CASES)
def test_the_curve_is_that_of_a_plain_loop(ranks, folder, expected, case, tmp_path):
    """A mean that follows micro-batches or ranks; a factor; the first pass of a pipeline; a head that is not shared."""
    assert_same(expected, train(ranks, folder, tmp_path / "run", CASES[case]))


@pytest.mark.slow
@pytest.mark.parametrize("case", [Case(dp=2, stage=2, accumulation=3), Case(pp=2, dp=2, accumulation=3)], ids=str)
def test_a_conv_head_with_class_weights(ranks, folder, case, tmp_path):
    """A head or a weight that only the plain loss has, one of them zero; the weights in the denominator."""
    words = ["--seg-head", "conv", "--class-weights", folder / "weights.txt"]
    words += ["--initial-checkpoint", folder / "conv.safetensors"]
    assert_same(plainly(folder, "conv", WEIGHTS), train(ranks, folder, tmp_path / "run", case, *words))


def test_a_frozen_backbone_and_balanced_weights(ranks, folder, tmp_path):
    """Weights of a rank's own share of the masks, or other ones than scikit-learn's; a backbone that is trained.

    In the picture the mask or prediction of another sample, another palette, ignored pixels in the colour of a class.
    """
    labels = tensors_of(folder, "train")[1]
    counted = labels[labels >= 0].numpy()
    weights = compute_class_weight("balanced", classes=np.arange(CLASSES), y=counted).tolist()
    words = ["--freeze-backbone", "--class-weights", "balanced"]
    found = train(ranks, folder, tmp_path / "run", Case(dp=3, stage=1, accumulation=2), *words)
    expected = plainly(folder, weights=weights, frozen=True)
    assert_same(expected, found)
    masks, predicted = shown(tmp_path / "run")
    assert np.array_equal(masks, read_split(folder, "val")[1])
    assert np.mean(np.equal(predicted, expected.predicted)) > 0.999, "rounding may turn a tie"
    before = load_file(str(folder / "linear.safetensors"))
    assert all(torch.equal(found.weights[name], before[name]) for name in before if not name.startswith("seg_head."))


@pytest.mark.slow
def test_a_mask_that_one_rank_cannot_read_for_the_weights_ends_all(ranks, six):
    """Ranks that wait for the sum of one that has ended."""
    Image.fromarray(np.full((SIDE, SIDE), 9, dtype=np.uint8)).save(six / "train" / "masks" / "n.0.png")
    argv = words_of(six, six / "run", Case(dp=3), "--class-weights", "balanced", images=6)
    assert ranks.run(3, train_main, argv, timeout=120) == [exit_codes.BAD_INPUT] * 3


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", [Case(dp=3, stage=2), Case(dp=3, accumulation=2), Case(pp=2, accumulation=3)], ids=str)
def test_one_pixel_counts(ranks, six, case):
    """Ranks and micro-batches without a pixel that counts: no number divided by their own count."""
    assert_same(plainly(six), train(ranks, six, six / "run", case, images=6))


@pytest.mark.parametrize("six", [0], indirect=True)
def test_no_pixel_counts(ranks, six):
    """A division by zero: the loss is 0 and only weight decay moves the weights."""
    found = train(ranks, six, six / "run", Case(dp=2, accumulation=3), images=6)
    steps = [row for row in found.rows if row["kind"] == "train"]
    assert [(row["loss"], row["grad_norm"]) for row in steps] == [(0.0, 0.0)] * STEPS
    assert all(tensor.isfinite().all() for tensor in found.weights.values())


@pytest.mark.parametrize("breakage", BREAKAGES)
def test_a_wrong_mean_is_seen(ranks, folder, expected, breakage, tmp_path):
    """The curves must be able to part."""
    found = train(ranks, folder, tmp_path / "run", Case(dp=2, accumulation=2), main=partial(train_broken, breakage))
    with pytest.raises(AssertionError, match="the curves part"):
        assert_same(expected, found)


# ---- the model -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", ["linear", "conv"])
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_layers_compute_what_timm_does(kind, head):
    """A norm that is left out, tokens that are no patches, a grid in the wrong order; windows that mix."""
    name, kwargs = KINDS[kind]
    small = {"embed_dim": 24, "depth": 2, "num_heads": 2, "patch_size": 4} | kwargs
    whole = create_segmenter(ModelSpec(name, CLASSES, img_size=(8, 12), model_kwargs=small), head)
    layers = take_apart(whole)
    initialise(whole, layers, seed=1, device="cpu")
    plain = segmenter(head, name, (8, 12), **small).eval()
    plain.load_state_dict({key: value for layer in layers for key, value in layer.state_dict().items()})
    model, images = SequentialViT(layers).eval(), torch.randn(2, 3, 3, 8, 12)
    logits, patches = on_grid(plain, plain.forward_features(images.flatten(0, 1)))
    torch.testing.assert_close(model(images, torch.arange(2)), logits, rtol=1e-4, atol=1e-5)
    with giving_features(model):
        torch.testing.assert_close(model(images[:, 0], torch.arange(2)), patches.mean(1)[::3])


def test_a_model_that_drops_patches_is_refused():
    """Pixels without logits."""
    with pytest.raises(UserError, match="leaves patches out"):
        create_segmenter(ModelSpec(NAME, CLASSES, model_kwargs={"patch_drop_rate": 0.5}), "linear")


def test_weights_with_another_head_start_a_segmenter(folder, tmp_path):
    """A classifier, or a segmenter's head of other classes or another kind, that is in the way; a head not drawn; rows
    of classes in another order."""
    oracle.write_weights(tmp_path / "classifier.safetensors", img_size=SIDE, num_classes=10, **KWARGS)
    argv = words_of(folder, tmp_path / "run", Case())
    for file, classes in ((tmp_path / "classifier", CLASSES), (folder / "conv", CLASSES), (folder / "linear", 6)):
        found = resolved([*argv, "--num-classes", classes, "--initial-checkpoint", f"{file}.safetensors"])
        assert found.model.towers["image"].newly_initialised == ("seg_head.bias", "seg_head.weight")
    words = ["--seg-head", "conv", "--num-classes", 6, "--initial-checkpoint", folder / "conv.safetensors"]
    assert resolved([*argv, *words]).model.towers["image"].newly_initialised == ("seg_head.6.bias", "seg_head.6.weight")
    file, names = tmp_path / "linear.safetensors", [f"class {number}" for number in reversed(range(CLASSES))]
    save_file(load_file(folder / file.name), file, {"class_names": json.dumps(names)})
    found = resolved([*argv, "--initial-checkpoint", file])
    assert found.model.towers["image"].summary.endswith("rows reordered by the names of the classes")


def test_masks_whose_class_is_the_ignored_value_are_noted(tmp_path):
    """Masks of 0 and 255, of which only the background counts: 100 % mIoU without a line."""
    write_split(tmp_path, "train", [np.array([[0, 255, 0, 255]], dtype=np.uint8).repeat(4, 0)] * 3, noise=0)
    json = write_config(tmp_path / "1.json", **BLOCKS)
    argv = [*WORDS, "--deepspeed_config", json, "--data-dir", tmp_path, "--val-split", "", "-b", 3, "--max-steps", 1]
    assert any("24 pixels are ignored" in note for note in resolved([*argv, "--num-classes", 2]).model.notes)
    (tmp_path / "labels.csv").write_text("index,name\n0,rest\n255,object\n")
    assert not any("are ignored" in note for note in resolved([*argv, "--num-classes", 2]).model.notes)


# ---- flags -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["1 2", "1,2,-1", "1,2,nan", "x y z"])
def test_class_weights_that_are_none(text, tmp_path):
    """Numbers that would make a loss of another sign, or none."""
    path = tmp_path / "weights.txt"
    path.write_text(text)
    with pytest.raises(UserError, match=r"must have 3 numbers of at least 0, one for each class; it has . words: "):
        read_class_weights(str(path), 3)


def test_a_class_without_pixels_is_balanced_too():
    """A division by zero."""
    assert balanced_weights([4, 0]) == (0.5, 1.0)


@pytest.mark.slow
def test_a_run_resumed_in_another_layout_keeps_the_curve(ranks, folder, expected, tmp_path):
    """State that a layout does not hand on."""
    words = ["--checkpoint-interval", STOP, "--max-steps", STOP, "--epochs", STEPS]
    train(ranks, folder, tmp_path / "run", Case(dp=2, stage=3, accumulation=4), *words)
    words = ["--resume", "auto", "--epochs", STEPS]
    assert_same(expected, train(ranks, folder, tmp_path / "run", Case(pp=2), *words))
