"""A segmenter of timm's and torch's modules with its windows written out, and folders of images with masks."""

from __future__ import annotations

import numpy as np
import timm
import torch
import torch.nn.functional as F
from picture_folders import made
from PIL import Image
from timm.layers import LayerNorm2d
from torch import nn

CLASSES, SIDE = 5, 16
NAME = "vit_tiny_patch16_224"
KWARGS = {"patch_size": 4, "embed_dim": 24, "depth": 3, "num_heads": 6}


def blocks(size, seed, ignored=0.0, values=range(CLASSES), side=4):
    """A mask of square blocks; a share of the pixels, to the nearest one, does not count."""
    draw = np.random.default_rng(seed)
    coarse = draw.choice(np.array(values, dtype=np.uint8), [-(-length // side) for length in size])
    mask = coarse.repeat(side, axis=0).repeat(side, axis=1)[: size[0], : size[1]].copy()
    mask.reshape(-1)[draw.permutation(mask.size)[: round(ignored * mask.size)]] = 255
    return mask


def write_split(folder, split, masks, form="{split}/{kind}", noise=40):
    """Masks, and images whose colours follow them up to noise, some of them in a folder of their own."""
    draw = np.random.default_rng(len(masks))
    for number, mask in enumerate(masks):
        pixels = 40 * (mask[..., None] % 7) + draw.integers(0, noise + 1, (*mask.shape, 3))
        for kind, picture in (("images", pixels.astype(np.uint8)), ("masks", mask)):
            path = folder / form.format(split=split, kind=kind) / f"{'ab' if number % 2 else '.'}/n.{number}.png"
            Image.fromarray(picture).save(made(path))


def read_split(folder, split, skip=None):
    """The images of a split, and their masks, -1 where ignored, in the order of a run; without number `skip`."""
    paths = [*sorted(folder.glob(f"{split}/images/ab/*")), *sorted(folder.glob(f"{split}/images/*.png"))]
    paths = [path for path in paths if path.stem != f"n.{skip}"]
    masks = [np.asarray(Image.open(str(path).replace("/images/", "/masks/"))).astype(int) for path in paths]
    return [Image.open(path) for path in paths], [np.where(mask == 255, -1, mask) for mask in masks]


def segmenter(head="linear", name=NAME, img_size=SIDE, **kwargs):
    """timm's ViT whose head gives the logits of each pixel: images [B, 3, h, w] → [B, CLASSES, h, w]."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = timm.create_model(name, img_size=img_size, num_classes=0, **{**KWARGS, **kwargs})
        model.seg_head = nn.Linear(model.embed_dim, CLASSES) if head == "linear" else conv_head(model.embed_dim)
    model.forward_head = lambda tokens: F.interpolate(on_grid(model, tokens)[0], img_size, mode="bilinear")
    return model


def on_grid(model, tokens):
    """The logits of the patches on their grid, and their normed tokens."""
    patches, grid = model.fc_norm(tokens[:, model.num_prefix_tokens :]), model.patch_embed.grid_size
    if isinstance(model.seg_head, nn.Linear):
        return model.seg_head(patches).transpose(1, 2).unflatten(2, grid), patches
    return model.seg_head(patches.transpose(1, 2).unflatten(2, grid)), patches


def conv_head(width):
    """The paper's two transposed convolutions, normed over channels."""
    layers = []
    for inputs in (width, 256):
        layers += [nn.ConvTranspose2d(inputs, 256, 2, 2), LayerNorm2d(256), nn.GELU()]
    return nn.Sequential(*layers, nn.Conv2d(256, CLASSES, 1))


@torch.no_grad()
def classes_of(model, image, window=(SIDE, SIDE), stride=None):
    """The class of each pixel of an image, by windows 2/3 or a stride apart; of stride 0 by one of the whole image."""
    size = image.size[::-1]
    cover = max(side / length for side, length in zip(window, size, strict=True))
    canvas = [max(side, round(length * cover)) for side, length in zip(window, size, strict=True)]
    canvas = window if stride == 0 else canvas
    tops, lefts = (
        [*range(0, length - side, stride or round(2 * side / 3)), length - side]
        for length, side in zip(canvas, window, strict=True)
    )
    resized = np.array(image.resize(canvas[::-1], Image.Resampling.BILINEAR))
    pixels = (torch.from_numpy(resized).permute(2, 0, 1)[None].float() / 255 - 0.5) / 0.5
    scores, times = torch.zeros(1, CLASSES, *canvas), torch.zeros(canvas)
    for top in tops:
        for left in lefts:
            here = ..., slice(top, top + window[0]), slice(left, left + window[1])
            scores[here] += F.interpolate(model(pixels[here]), window, mode="bilinear")
            times[here] += 1
    return F.interpolate(scores / times, size, mode="bilinear").argmax(1)[0].numpy()


def rated(model, folder, window=(SIDE, SIDE), stride=None, skip=None):
    """The classes and the predicted classes of all pixels of evaluation that count, and those of each image."""
    images, masks = read_split(folder, "val", skip)
    predicted = [classes_of(model, image, window, stride) for image in images]
    pairs = [np.stack([mask, of])[:, mask >= 0] for mask, of in zip(masks, predicted, strict=True)]
    return np.concatenate(pairs, axis=1), predicted
