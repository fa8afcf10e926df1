"""The embedded scenes with masks (`--dataset scenes`): handwritten digits on textures, without any download."""

from __future__ import annotations

from colorsys import hsv_to_rgb
from functools import cache, lru_cache
from typing import Any, ClassVar

import numpy as np
from PIL import Image

from ds_vit import randomness
from ds_vit.data.sources.datasets import DigitsSource
from ds_vit.data.sources.masks import IGNORED, default_palette, pixels_of_classes
from ds_vit.data.sources.source import Source

_NUM_TRAIN, _NUM_VAL = 1000, 200
_DIGITS = 5  # 0 to 4
_SIDES = (48, 96)  # of a scene in pixels, smallest and largest
_SIZES = (0.4, 0.7)  # of a digit, as a share of the scene's shorter side
_MOST = 3  # digits of a scene
_HUE_SPREAD = 0.05  # the five hues lie 0.2 apart
_INSIDE, _OUTSIDE = 0.4, 0.15  # of a digit's ink; what lies between is its outline, which is ignored


@cache
def _digits(train: bool) -> tuple[np.ndarray, np.ndarray]:
    """The digits of a split's scenes, uint8 [N, 8, 8], and their classes int64 [N]."""
    source = DigitsSource(train)
    targets = np.array([source.target(index) for index in range(len(source))])
    kept = np.flatnonzero(targets < _DIGITS)
    return np.stack([np.asarray(source.image(int(index)).convert("L")) for index in kept]), targets[kept]


@lru_cache(maxsize=1)  # a sample's image is read, then its mask
def _scene(train: bool, index: int) -> tuple[np.ndarray, np.ndarray]:
    """Pixels uint8 [H, W, 3] and classes int16 [H, W]."""
    digits, targets = _digits(train)
    key = randomness.mix(0, randomness.name_key("training scene" if train else "scene"), index)
    random = np.random.RandomState(key & 0xFFFFFFFF)  # its numbers are the same in every version
    height, width = random.randint(_SIDES[0], _SIDES[1] + 1, 2)
    rows, columns = np.mgrid[0:height, 0:width]
    waves = [np.sin(rows * y + columns * x + turn) for y, x, turn in random.uniform(0.05, 0.6, (2, 3))]
    first, second = random.uniform(0, 90, (2, 3))
    blend = (0.5 + 0.25 * (waves[0] + waves[1]))[..., None]
    pixels = first * blend + second * (1.0 - blend) + random.normal(0.0, 8.0, (height, width, 1))
    mask = np.zeros((height, width), dtype=np.int16)
    for number in random.randint(0, len(digits), random.randint(1, _MOST + 1)):
        side = round(min(height, width) * random.uniform(*_SIZES))
        top, left = (int(random.randint(0, length - side + 1)) for length in (height, width))
        here = slice(top, top + side), slice(left, left + side)
        enlarged = Image.fromarray(digits[number]).resize((side, side), Image.Resampling.BICUBIC)
        ink = np.asarray(enlarged, dtype=np.float64) / 255.0
        hue = targets[number] / _DIGITS + random.uniform(-_HUE_SPREAD, _HUE_SPREAD)
        colour = np.array(hsv_to_rgb(hue % 1.0, random.uniform(0.4, 0.7), random.uniform(0.8, 1.0))) * 255.0
        pixels[here] += ink[..., None] * (colour - pixels[here])
        part = mask[here]
        part[ink > _OUTSIDE] = IGNORED
        part[ink > _INSIDE] = 1 + targets[number]
    return np.clip(np.rint(pixels), 0, 255).astype(np.uint8), mask


class SceneSource(Source):
    """Digits 0 to 4 of both splits of `DigitsSource` on textures: 1,000 scenes for training, 200 for validation.

    A scene is a function of its number: 48 to 96 pixels high and wide, with one to three digits, of which the later
    lie above the earlier. The outline of a digit is ignored (-1). The splits share no digit. The ink is lighter than
    the texture and has the hue of its class, up to a draw, so that a small model learns the scenes in minutes.
    """

    multi_label = True
    class_names = ("background", "zero", "one", "two", "three", "four")
    entries: ClassVar = ("image", "mask", "mask_size", "values", "colours")

    def __init__(self, train: bool) -> None:
        self._train = train

    def __len__(self) -> int:
        return _NUM_TRAIN if self._train else _NUM_VAL

    def entry(self, name: str, index: int) -> Any:
        """As `Source.entry`: "mask" int16 [H, W], "mask_size" (H, W), "values" and "colours" of the classes."""
        if name in ("mask", "mask_size"):
            mask = _scene(self._train, index)[1]
            return mask if name == "mask" else mask.shape
        if name == "values":
            return np.arange(self.num_classes)
        return default_palette(self.num_classes) if name == "colours" else super().entry(name, index)

    def image(self, index: int) -> Image.Image:
        """As `Source.image`."""
        return Image.fromarray(_scene(self._train, index)[0])

    def target(self, index: int) -> np.ndarray:
        """The classes that the scene has, multi-hot."""
        return (pixels_of_classes(self.entry("mask", index), self.num_classes)[1:] > 0).astype(np.float32)

    def identity(self) -> tuple[np.ndarray, ...]:
        """As `Source.identity`."""
        return _digits(self._train)[::-1]

    def describe(self, index: int) -> str:
        """As `Source.describe`."""
        return f"scenes[{'train' if self._train else 'validation'}, {index}]"
