"""RandAugment, AutoAugment, 3-Augment and AugMix, each split into a draw and its application.

timm's policies draw while they change the image. Here timm's own policy object runs at draw time on an image of one
pixel, with the function of each of its operations replaced by a recorder; what was recorded is applied later, by
timm's functions. So the distribution is timm's by construction, whatever it draws from.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from timm.data.auto_augment import NAME_TO_OP, AugmentOp, AugMixAugment, AutoAugment, RandAugment, gaussian_blur_rand

from ds_vit.data.augment.draws import seeded
from ds_vit.data.augment.steps import Size


def _posterized(pixels: np.ndarray, bits: int) -> np.ndarray:
    # Keeping 0 bits, or fewer beyond magnitude 10, is black. Pillow 13 refuses it, and timm 1.0.31 then fails.
    return np.bitwise_and(pixels, np.uint8(256 - 2 ** (8 - bits) if bits > 0 else 0), out=pixels)


def _solarized(pixels: np.ndarray, threshold: int) -> np.ndarray:
    return np.bitwise_xor(pixels, np.negative((pixels >= threshold).view(np.int8)).view(np.uint8), out=pixels)


# Pillow makes tables of 768 Python numbers for these, which takes longer than a small image.
_ON_ARRAYS: dict[str, Callable[..., np.ndarray]] = {
    "Invert": np.invert,
    **dict.fromkeys(("Posterize", "PosterizeIncreasing", "PosterizeOriginal"), _posterized),
    **dict.fromkeys(("Solarize", "SolarizeIncreasing"), _solarized),
}


class Operation(NamedTuple):
    """One drawn operation: timm's name of it, its arguments, and those for the geometric ones alone."""

    name: str
    arguments: tuple[float, ...]
    keywords: dict[str, Any]

    def apply(self, image: Image.Image) -> Image.Image:
        """Run timm's function of the name, or what gives the same bits in less time."""
        if self.name in _ON_ARRAYS:
            return Image.fromarray(_ON_ARRAYS[self.name](np.array(image), *self.arguments))
        return NAME_TO_OP[self.name](image, *self.arguments, **self.keywords)


class _Recorder:
    """Stands in for the function of a timm AugmentOp and notes its call; the image stays as it is."""

    def __init__(self, op: AugmentOp, note: Callable[[Image.Image, Operation], Image.Image]) -> None:
        self._name = op.name
        self._rerolls_radius = op.aug_fn is gaussian_blur_rand
        self._note = note

    def __call__(self, image: Image.Image, *arguments: float, **keywords: Any) -> Image.Image:
        # Two kinds of timm's functions draw by themselves: the geometric ones an interpolation, 3-Augment's blur its
        # radius. Both are drawn here, so that nothing is left to draw when the operation is applied.
        if isinstance(keywords.get("resample"), (list, tuple)):
            keywords["resample"] = random.choice(keywords["resample"])
        if self._rerolls_radius:
            return self._note(image, Operation("GaussianBlur", (random.uniform(0.1, 2.0 * arguments[0]),), {}))
        return self._note(image, Operation(self._name, arguments, keywords))


def _record(ops: Sequence[AugmentOp], note: Callable[[Image.Image, Operation], Image.Image]) -> None:
    for op in ops:
        op.aug_fn = _Recorder(op, note)


class Policy:
    """timm's RandAugment (Cubuk et al. 2019) or AutoAugment (Cubuk et al. 2018; 3-Augment, Touvron et al. 2022).

    Args:
        transform: the policy; it is taken over and is of no other use afterwards.
    """

    def __init__(self, transform: RandAugment | AutoAugment) -> None:
        self._transform = transform
        self._drawn: list[Operation] = []
        self._pixel = Image.new("RGB", (1, 1))
        ops = transform.ops if isinstance(transform, RandAugment) else [op for sub in transform.policy for op in sub]
        _record(ops, self._note)

    def _note(self, image: Image.Image, operation: Operation) -> Image.Image:
        self._drawn.append(operation)
        return image

    def draw(self, key: int, size: Size) -> list[Operation] | None:
        """The operations to apply, in order."""
        self._drawn = []
        with seeded(key, "auto augment"):
            self._transform(self._pixel)
        return self._drawn or None

    def apply(self, image: Image.Image, parameters: list[Operation]) -> Image.Image:
        for operation in parameters:
            image = operation.apply(image)
        return image


class AugMixParameters(NamedTuple):
    """What AugMix draws: a weight and a chain of operations for each branch, and the weight of their mixture."""

    weights: np.ndarray
    chains: list[list[Operation]]
    mixture: np.float32


class AugMix:
    """timm's AugMix (Hendrycks et al. 2019): a weighted mean of chains of operations, blended with the image.

    Args:
        transform: the policy; it is taken over and is of no other use afterwards.
    """

    def __init__(self, transform: AugMixAugment) -> None:
        self._transform = transform
        self._pixel = Image.new("RGB", (1, 1))
        self._in_chain = Image.new("RGB", (1, 1))
        self._chains: list[list[Operation]] = []
        self._weights: tuple[np.ndarray, np.float32] | None = None
        _record(transform.ops, self._note)
        transform._apply_basic = transform._apply_blended = self._note_weights

    def _note(self, image: Image.Image, operation: Operation) -> Image.Image:
        if image is not self._in_chain:  # a chain starts from the image itself
            self._chains.append([])
        self._chains[-1].append(operation)
        return self._in_chain

    def _note_weights(self, image: Image.Image, weights: np.ndarray, mixture: np.float32) -> Image.Image:
        self._weights = (weights, mixture)
        # timm's loop over the chains, with random depths and operations; the blended variant draws the same.
        return AugMixAugment._apply_basic(self._transform, image, weights, mixture)

    def draw(self, key: int, size: Size) -> AugMixParameters:
        """The chains and their weights."""
        self._chains = []
        with seeded(key, "auto augment"):
            self._transform(self._pixel)
        weights, mixture = self._weights
        return AugMixParameters(weights, self._chains, mixture)

    def apply(self, image: Image.Image, parameters: AugMixParameters) -> Image.Image:
        branches = []
        for chain in parameters.chains:
            branch = image
            for operation in chain:
                branch = operation.apply(branch)
            branches.append(branch)
        if self._transform.blended:
            mixed = image
            weights = self._transform._calc_blended_weights(parameters.weights, parameters.mixture)
            for weight, branch in zip(weights, branches, strict=True):
                mixed = Image.blend(mixed, branch, weight)
            return mixed
        total = np.zeros((*image.size[::-1], 3), dtype=np.float32)
        for weight, branch in zip(parameters.weights, branches, strict=True):
            total += weight * np.asarray(branch, dtype=np.float32)
        mixed = Image.fromarray(np.clip(total, 0.0, 255.0).astype(np.uint8))
        return Image.blend(image, mixed, parameters.mixture)
