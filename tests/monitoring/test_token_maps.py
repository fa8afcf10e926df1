"""The pictures of norms and attention: timm's own numbers, the same in each layout, or a line why there are none."""

from __future__ import annotations

import itertools
from unittest import mock

import numpy as np
import oracle
import pytest
import timm
import torch
from curves import train_in
from PIL import Image
from project import ROOT

from ds_vit.data.sources.combined import across_classes
from ds_vit.data.sources.source import Source
from ds_vit.models import compiled
from ds_vit.models.layers import take_apart
from ds_vit.models.sequential import SequentialViT
from ds_vit.monitoring import token_maps

RUN = [*("--model", oracle.MODEL, *oracle.kwargs_words(), "--img-size", 16, "--dataset", "digits", "--workers", 0)]
RUN += ["--max-steps", 1, "--warmup-steps", 0, "-b", 16, "--model-kwargs", "patch_size=4", "embed_dim=32", "depth=2"]
RUN += ["num_heads=2", "--deepspeed_config", ROOT / "ds_configs" / "cpu_zero1_fp32.json"]


SMALL = {"patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 4, "num_classes": 3, "img_size": 32}


def maps_of(theirs, images, valid, convert=lambda layer: None):
    """What is seen of batches of images, the rows of which count or do not."""
    model = SequentialViT(take_apart(theirs)).eval()
    for layer in model.layers:
        convert(layer)
    batches = [{"images": batch, "valid": torch.tensor(rows)} for batch, rows in zip(images, valid, strict=True)]
    with torch.no_grad(), token_maps.watched(model) as seen:
        for batch in seen.passing(iter(batches)):
            model(batch["images"])
    return seen, seen.maps(model, None)


@pytest.mark.parametrize(
    "name", ["vit_small_patch14_reg4_dinov2", "vit_small_patch16_rope_224", "vit_base_patch16_siglip_224"]
)
def test_maps_are_those_of_timm(name):
    # Catches: a register that is taken for a patch, tokens behind the last norm, another query than the classifier's,
    # padding in the picture, a batch that is left out, logits without their scale.
    theirs = timm.create_model(name, **SMALL).eval()
    looking, weights = theirs.attn_pool or theirs.blocks[-1].attn, []
    for key, weight in looking.named_parameters():  # at timm's initial values every map is almost uniform
        if key in ("qkv.weight", "q.weight", "kv.weight"):
            weight.data.mul_(20)
    images = torch.randn(3, 4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    padding = [False] * 4
    seen, maps = maps_of(theirs, images, [[True, False, False, False], padding, [True, False, True, False]])
    shown = torch.cat((images[0][:1], images[2][[0, 2]]))
    torch.testing.assert_close(torch.cat(seen.images), shown)
    expected = theirs.forward_intermediates(shown, indices=1, norm=False, intermediates_only=True)[0].norm(dim=1)
    torch.testing.assert_close(maps["token-norms"], expected.detach())

    looking.fused_attn = False  # timm's own softmax then
    with mock.patch.object(torch.Tensor, "softmax", softmax_into(weights)):
        theirs(shown)
    prefix = theirs.num_prefix_tokens
    queries = slice(None) if theirs.attn_pool is not None else slice(0, 1) if theirs.global_pool == "token" else None
    of_tokens = weights[-1].mean(1)[:, slice(prefix, None) if queries is None else queries].mean(1)
    of_patches = of_tokens[:, prefix:].reshape(3, 4, 4)
    torch.testing.assert_close(maps["attention"], of_patches.detach())


def test_principal_components_colour_patches_that_are_alike():
    # Catches: other directions than those of the largest variance, components of one image only, colours out of range,
    # a sign that changes.
    generator = torch.Generator().manual_seed(0)
    directions = torch.linalg.qr(torch.randn(16, 4, generator=generator))[0].T
    directions = torch.linalg.qr((directions - directions.mean(1, keepdim=True)).T)[0].T
    kinds = torch.randint(0, 4, (2, 5, 5), generator=generator)
    # A norm without weights keeps rows of mean 0 and equal length.
    tokens = directions[kinds] * 7.0 + 1e-3 * torch.randn(2, 5, 5, 16, generator=generator)
    colours = token_maps.principal_components(tokens)
    assert colours.shape == (2, 3, 5, 5)
    torch.testing.assert_close(colours.amin((0, 2, 3)), torch.zeros(3))
    torch.testing.assert_close(colours.amax((0, 2, 3)), torch.ones(3))
    of_kinds = torch.stack([colours.movedim(1, -1)[kinds == kind].mean(0) for kind in range(4)])
    assert (colours.movedim(1, -1) - of_kinds[kinds]).abs().max() < 0.01, "patches alike have one colour"
    assert torch.pdist(of_kinds).min() > 0.3, "and others another"
    torch.testing.assert_close(token_maps.principal_components(tokens), colours)


def softmax_into(found, softmax=torch.Tensor.softmax):
    def noting(self, dim):
        found.append(softmax(self, dim))
        return found[-1]

    return noting


def test_a_compiled_block_is_seen_too(monkeypatch):
    # Catches: a graph's attention, which no Python sees; a graph that is made for the few images of a picture.
    graphs = []
    monkeypatch.setattr(compiled, "BACKEND", lambda graph, inputs: graphs.append(graph) or graph.forward)
    theirs = timm.create_model("vit_small_patch14_reg4_dinov2", **SMALL).eval()
    images = torch.randn(1, 2, 3, 32, 32)
    _, plain = maps_of(theirs, images, [[True, True]])
    function = compiled.compile_function()
    _, seen = maps_of(theirs, images, [[True, True]], lambda layer: compiled.compile_block(layer, function))
    assert torch.equal(seen["attention"], plain["attention"])
    assert not graphs


def test_a_difference_of_attentions_is_not_drawn_and_no_image_is_nothing():
    theirs = timm.create_model("vit_dlittle_patch16_reg1_gap_256", **SMALL | {"class_token": True}).eval()
    images = torch.randn(1, 2, 3, 32, 32)
    assert list(maps_of(theirs, images, [[True, True]])[1]) == ["token-norms", "patch-pca"]
    seen, maps = maps_of(theirs, images, [[False, False]])
    assert not seen.images
    assert maps == {}


@pytest.mark.parametrize("name", ["token-norms", "attention"])
def test_every_layout_draws_the_same_or_says_why_not(layouts, name):
    # Catches: slices of tokens taken for tokens, some of the heads for all; a run that ends because its picture cannot
    # be drawn.
    pictures = {}
    said = {"token-norms": "the norms of their patch tokens", "attention": "the attention to their patches"}[name]
    for layout, folder in layouts.items():
        path, page = folder / f"{name}.png", (folder / "report.html").read_text()
        pictures[layout] = np.asarray(Image.open(path)).astype(int) if path.exists() else None
        assert (said in page) == path.exists()
        assert ("with --pp or --sequence-parallel" in page) != path.exists()
    assert pictures["pp"] is None
    assert pictures["one"].shape == (2 * 116 - 4, 8 * 116 - 4, 3)
    assert pictures["one"].std() > 20
    assert np.abs(pictures["one"] - pictures["tp"]).max() <= 1


class Labels(Source):
    """Class numbers without images."""

    def __init__(self, targets, num_classes):
        self.targets, self.class_names = targets, tuple(map(str, range(num_classes)))

    def __len__(self):
        return len(self.targets)

    def target(self, index):
        return self.targets[index]

    def describe(self, index):
        return str(index)


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([90, 5, 5], [3, 3, 2]),  # sorted by class: the first eight are of one
        ([30, 0, 1, 30], [4, 0, 1, 3]),
        ([4] * 8, [1] * 8),
        ([2, 1], [2, 1]),
    ],
)
def test_images_are_drawn_across_classes(counts, expected):
    # Catches: the first images of a folder, which are of one class; a class that fills the picture by its size.
    source = Labels(np.repeat(np.arange(len(counts)), counts).tolist(), len(counts))
    shown = across_classes(source, 8)
    assert np.bincount([shown.target(at) for at in range(len(shown))], minlength=len(counts)).tolist() == expected


@pytest.mark.parametrize(("world", "words"), [(1, ["-vb", 16]), (2, ["-vb", 3])])
def test_a_run_draws_images_of_all_classes_in_any_layout(ranks, tmp_path, world, words):
    # Catches: images of one class, or other images with another batch of evaluation or another number of ranks.
    colours = {"blue": (0, 0, 255), "green": (0, 255, 0), "red": (255, 0, 0)}
    for split, (name, colour), number in itertools.product(("train", "val"), colours.items(), range(12)):
        path = tmp_path / split / name / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (16, 16), colour).save(path)
    output = tmp_path / "run"
    argv = [word for word in RUN if word not in ("--dataset", "digits")]
    train_in(ranks, world, [*argv, "--data-dir", tmp_path, "-b", 4, *words, "--output", output])
    pixels = np.asarray(Image.open(output / "attention.png"))
    centres = pixels[56, 56::116]
    shown = [name for centre in centres for name, colour in colours.items() if np.abs(centre - [*colour]).max() < 3]
    assert shown == [*["blue"] * 3, *["green"] * 3, *["red"] * 2]


@pytest.fixture(scope="module")
def layouts(ranks, tmp_path_factory):
    """The folder of a run in each layout."""
    folders = {}
    for name, world, words in (("one", 1, []), ("tp", 2, ["--tp", 2]), ("pp", 2, ["--pp", 2])):
        folders[name] = tmp_path_factory.mktemp(name) / "run"
        train_in(ranks, world, [*RUN, *words, "--output", folders[name]])
    return folders
