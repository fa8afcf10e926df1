"""Augmentation: timm's transforms, drawn from keys.

A distribution is checked by one stream: where the global generators stand at the same place, the step (draw, then
apply) and timm's own transform must make the same pixels, bit by bit. The steps of each flag are those of timm's
factory, and each coin falls with its probability.
"""

from __future__ import annotations

import pickle
import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from picture_folders import smooth_photo
from PIL import Image
from scipy import stats
from timm.data import create_transform
from timm.data.auto_augment import (
    NAME_TO_OP,
    AugmentOp,
    AutoAugment,
    augment_and_mix_transform,
    auto_augment_transform,
    rand_augment_transform,
)
from timm.data.transforms import RandomResizedCropAndInterpolation
from torchvision import transforms

from ds_vit import randomness
from ds_vit.config.augmentation import AugmentConfig
from ds_vit.data.augment.steps import (
    KeepRatioCrop,
    Operation,
    RandomBlur,
    RandomResizedCrop,
    apply,
    as_image,
    draw,
    recording,
    seed_generators,
    shielded,
    uniform,
)
from ds_vit.data.augment.transforms import eval_transform, train_transform
from ds_vit.data.fields import normalised
from ds_vit.data.settings import ImageConfig


def _generator_states() -> tuple:
    _, numbers, place, *_ = np.random.get_state()
    return random.getstate(), numbers.tobytes(), place, torch.get_rng_state().tolist()


HPARAMS = {"translate_const": 14, "img_mean": (124, 116, 104), "interpolation": Image.Resampling.BICUBIC}
CROP = RandomResizedCropAndInterpolation
PAIRS = {  # name of the draw, a transform of timm or torchvision
    "crop": ("crop", lambda: CROP(24, (0.1, 0.9), (0.5, 2.0), "random")),
    "crop, one interpolation": ("crop", lambda: CROP((24, 16), interpolation="bicubic")),
    "color jitter": ("color jitter", lambda: transforms.ColorJitter(0.4, 0.3, 0.2, 0.1)),
    "blur": ("gaussian blur", lambda: transforms.GaussianBlur(23)),
    **{
        text: ("auto augment", lambda text=text, factory=factory: factory(text, dict(HPARAMS)))
        for factory, texts in (
            (rand_augment_transform, "rand-m9-mstd0.5-inc1 rand-n4-p1-mstd101 rand-m5-n3-tweights rand-t3a"),
            (auto_augment_transform, "original-mstd0.5 originalr v0 v0r-mstd2 3a"),
            (augment_and_mix_transform, "augmix-m5-w4-d2 augmix augmix-b1-mstd1"),
        )
        for text in texts.split()
    },
}


def _policy(name: str, magnitude: int) -> AutoAugment:
    return recording(AutoAugment([[AugmentOp(name, prob=1.0, magnitude=magnitude)]]))


@pytest.mark.parametrize("case", PAIRS)
def test_a_step_makes_timms_pixels_from_the_same_stream(case):
    """Would catch any draw, argument or order that differs from timm's: 60 images equal to the last bit."""
    name, make = PAIRS[case]
    transform, original = recording(make()), make()
    crop = RandomResizedCrop(transform)
    changed = 0
    for number in range(60):
        image, key = smooth_photo(seed=number % 7), randomness.mix(number)
        seed_generators(key, name)
        try:
            expected = original(image)
        except ValueError as error:  # Pillow 13 refuses the posterisation to no bits that timm asks for
            assert "bits must be" in str(error)  # noqa: PT017 - the loop continues
            continue
        if name == "crop":
            result = crop.apply(image, crop.draw(key, (image.height, image.width)))
        else:
            result = as_image(apply(image, draw(transform, key)))
        assert result.size == expected.size
        assert np.array_equal(np.asarray(result), np.asarray(expected)), number
        changed += np.asarray(result).tobytes() != np.asarray(image).tobytes()
    assert changed >= 25


def test_arithmetic_in_place_of_pillows_tables_is_pillows():
    """Would catch a threshold (256 is above every pixel) or mask that is one off, and Pillow 13's error at 0 bits."""
    image = Image.fromarray(np.random.default_rng(0).integers(0, 256, (13, 17, 3), dtype=np.uint8))

    def pixels(name: str, value: int) -> np.ndarray:
        return np.asarray(as_image(apply(image, [Operation(name, (value,))])))

    for name, values in {"Posterize": range(1, 9), "Solarize": (0, 1, 77, 255, 256)}.items():
        for value in values:
            assert np.array_equal(pixels(name, value), np.asarray(NAME_TO_OP[name](image, value))), (name, value)
    (drawn,) = draw(_policy("PosterizeIncreasing", 10), 1)
    assert drawn[:2] == ("Posterize", (0,))
    for bits in (0, -2):  # -2: of rand-m15-mmax15-inc1
        assert not pixels("Posterize", bits).any()


@pytest.mark.parametrize("name", NAME_TO_OP)
def test_applying_an_operation_draws_nothing(name):
    """Would catch an operation of timm, present or future, whose application reads a process's generator."""
    policy = _policy(name, 7)
    drawn = [draw(policy, randomness.mix(number)) for number in range(20)]
    before = _generator_states()
    first = [np.asarray(as_image(apply(smooth_photo(), operations))).tobytes() for operations in drawn]
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    assert [np.asarray(as_image(apply(smooth_photo(), operations))).tobytes() for operations in drawn] == first
    random.setstate(before[0])
    resamples = {o.keywords.get("resample") for operations in drawn for o in operations}
    assert all(resample is None or isinstance(resample, int) for resample in resamples)  # decided at draw time


def test_random_interpolation_of_a_policy_is_drawn_evenly():
    """Would catch geometric operations that always use one of timm's two interpolations."""
    hparams = {k: v for k, v in HPARAMS.items() if k != "interpolation"}
    policy = recording(rand_augment_transform("rand-p1-n1", hparams))
    resamples = [draw(policy, randomness.mix(number))[0].keywords["resample"] for number in range(1000)]
    assert set(resamples) == {Image.Resampling.BILINEAR, Image.Resampling.BICUBIC}
    assert stats.binomtest(resamples.count(Image.Resampling.BICUBIC), 1000, 0.5).pvalue > 1e-3


# The whole transform

CONFIGS = {
    "timm's defaults": {},
    "flips": {"hflip": 0.3, "vflip": 0.8, "color_jitter": 0.0},
    "crop": {"scale": (0.3, 0.6), "ratio": (0.5, 2.0), "train_interpolation": "nearest", "hflip": 0.0},
    "rkrc": {"train_crop_mode": "rkrc"},
    "rkrr": {"train_crop_mode": "rkrr", "scale": (0.5, 1.0), "ratio": (0.8, 1.25)},
    "RandAugment": {"aa": "rand-m6-mstd0.5-inc1"},
    "AutoAugment": {"aa": "original"},
    "AugMix": {"aa": "augmix-m3"},
    "3-Augment": {"aa": "3a", "color_jitter": 0.3},
    "SimCLR": {
        "color_jitter": (0.4, 0.4, 0.2, 0.1),
        "color_jitter_prob": 0.4,
        "grayscale_prob": 0.2,
        "gaussian_blur_prob": 0.1,
    },
}
IMAGE = ImageConfig(img_size=(24, 32))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_steps_are_those_of_timms_factory(name):
    """Would catch a flag that does not reach timm's factory, and a step that is lost, doubled or out of order."""
    flags = {"train_interpolation": "random", "scale": (0.08, 1.0), "ratio": (3 / 4, 4 / 3), **CONFIGS[name]}
    ours = train_transform(IMAGE, AugmentConfig(**flags))
    renamed = {{"aa": "auto_augment", "train_interpolation": "interpolation"}.get(k, k): v for k, v in flags.items()}
    renamed["color_jitter"] = renamed.get("color_jitter", 0.4) or None
    parts = create_transform((3, 24, 32), is_training=True, use_prefetcher=True, separate=True, **renamed)
    steps = [step for part in parts for step in part.transforms]
    crop = ours.crop._transforms if isinstance(ours.crop, KeepRatioCrop) else [ours.crop._transform]
    assert list(map(repr, [*crop, *ours.transforms])) == list(map(repr, steps[:-1]))


@pytest.mark.parametrize("mode", ["rkrc", "rkrr"])
def test_crops_that_keep_the_ratio_are_timms_from_the_same_stream(mode):
    """Would catch another draw or order of the two transforms."""
    crop = train_transform(IMAGE, AugmentConfig(**CONFIGS[mode])).crop
    for number in range(30):
        image, key = smooth_photo(seed=number % 7), randomness.mix(number)
        seed_generators(key, "crop")
        resize, crop_or_pad = crop._transforms
        expected = crop_or_pad(resize(image))
        assert np.array_equal(crop.apply(image, crop.draw(key, (40, 52))), expected)


def test_what_a_geometric_operation_uncovers_is_the_mean_colour():
    """Would catch --mean that does not reach the policy's fill colour."""
    image = ImageConfig(img_size=(24, 24), mean=(0.2, 0.4, 0.8))
    transform = train_transform(image, AugmentConfig(aa="rand-m9", hflip=0.0))
    drawn = [transform.draw(randomness.mix(number), (24, 24)) for number in range(50)]
    fills = {operation.keywords["fillcolor"] for _, operations in drawn for operation in operations}
    assert fills == {(51, 102, 204)}


EVERYTHING = AugmentConfig(
    vflip=0.5, color_jitter=(0.4, 0.4, 0.4, 0.1), color_jitter_prob=0.9, grayscale_prob=0.2, gaussian_blur_prob=0.5
)


@pytest.mark.parametrize(
    "augment", [EVERYTHING, AugmentConfig(aa="rand-m9"), AugmentConfig(aa="augmix")], ids=["all", "rand", "augmix"]
)
def test_pixels_are_a_function_of_the_key(augment):
    """Would catch a draw from the process, state that outlives a sample, or a key that is ignored."""
    transform = train_transform(IMAGE, augment)
    keys = [randomness.mix(number) for number in range(20)]
    first = [transform(smooth_photo(), key).numpy().tobytes() for key in keys]
    again = {key: transform(smooth_photo(), key).numpy().tobytes() for key in reversed(keys)}
    assert [again[key] for key in keys] == first
    fresh = pickle.loads(pickle.dumps(transform))  # as a spawned worker gets it
    assert [fresh(smooth_photo(), key).numpy().tobytes() for key in keys] == first
    assert len(set(first)) == len(keys)


def test_a_step_draws_the_same_whatever_stands_beside_it():
    """Would catch a flag that changes the draws of another: turning flips off must not move the crops."""
    plain = train_transform(IMAGE, AugmentConfig(hflip=0.0, color_jitter=0.0))
    full = train_transform(IMAGE, AugmentConfig(vflip=0.5, aa="rand-m9"))
    for number in range(10):
        assert plain.draw(randomness.mix(number), (40, 52))[0] == full.draw(randomness.mix(number), (40, 52))[0]


def test_a_transform_with_nothing_to_draw_has_no_steps():
    """Would catch coins thrown for probability 0, and colour steps of factor 0, which cost time on every image."""
    transform = train_transform(IMAGE, AugmentConfig(hflip=0.0, color_jitter=0.0))
    assert isinstance(transform.crop, RandomResizedCrop)
    assert not transform.transforms


def test_blur_needs_room():
    """Would catch torch's padding error in a worker, in place of one line before the start."""
    with pytest.raises(ValueError, match="kernel of 23 pixels and needs images of at least 12 pixels, not 11x32"):
        train_transform(ImageConfig(img_size=(11, 32)), AugmentConfig(gaussian_blur_prob=0.1))
    train_transform(ImageConfig(img_size=(12, 32)), AugmentConfig(gaussian_blur_prob=0.1))(smooth_photo(), 1)


# Without randomness


@pytest.mark.parametrize("size", [(24, 24), (24, 40)])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize(
    ("crop_pct", "crop_mode"), [(None, "no_aug"), (None, None), (0.7, None), (0.7, "center"), (None, "squash"),
                                (0.7, "squash"), (None, "border"), (0.7, "border")]
)  # fmt: skip
def test_without_randomness_pixels_are_timms_to_the_last_bit(size, interpolation, crop_pct, crop_mode):
    """Would catch a flag of evaluation that does not reach timm, and another rounding than ToTensor and Normalize."""
    image = ImageConfig(size, (0.4, 0.5, 0.6), (0.2, 0.3, 0.25), interpolation)
    options = {"mean": image.mean, "std": image.std, "interpolation": interpolation}
    if crop_mode == "no_aug":
        ours, options = (
            train_transform(image, AugmentConfig(no_aug=True)),
            options | {"is_training": True, "no_aug": True},
        )
    else:
        ours = eval_transform(replace(image, crop_pct=crop_pct, crop_mode=crop_mode))
        options |= {"crop_pct": crop_pct, "crop_mode": crop_mode}
    pixels = ours(smooth_photo(), key=3)
    assert pixels.dtype == torch.uint8
    expected = create_transform((3, *size), **options)(smooth_photo())
    assert torch.equal(normalised(pixels[None], image)[0], expected)


# Lending keys to libraries


def test_a_seed_reaches_all_three_generators_and_a_shield_restores_them():
    """Would catch a library's draw that no key reaches, and a generator that is moved by one."""

    def draw(key: int, name: str) -> tuple[float, ...]:
        seed_generators(key, name)
        return random.random(), np.random.rand(), torch.rand(()).item()

    before = _generator_states()
    with shielded():
        first, other_key, other_name = draw(1, "a"), draw(2, "a"), draw(1, "b")
        assert all(a != b and a != c for a, b, c in zip(first, other_key, other_name, strict=True))
        assert draw(1, "a") == first
    with pytest.raises(RuntimeError, match="inside"), shielded():
        raise RuntimeError(f"inside {draw(1, 'a')}")
    assert _generator_states() == before


def test_coins_are_uniform_and_fall_with_their_probability():
    """Would catch a biased coin, one that two names share, and p and 1 - p exchanged."""
    keys = randomness.sample_keys(0, 0, np.arange(5000)).tolist()
    first, second = (np.array([uniform(key, name) for key in keys]) for name in ("hflip", "b"))
    assert stats.kstest(first, "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.06
    for name, coin in {
        "hflip": transforms.RandomHorizontalFlip,
        "vflip": transforms.RandomVerticalFlip,
        "grayscale": transforms.RandomGrayscale,
        "solarize": partial(transforms.RandomSolarize, 128),
        "maybe RandomBlur": partial(transforms.RandomApply, [RandomBlur((0.1, 2.0))]),
    }.items():
        fallen = [uniform(key, name) for key in keys]
        for probability in (0.0, 0.1, 1.0):
            assert [bool(draw(coin(p=probability), key)) for key in keys] == [f < probability for f in fallen], name
    radii = [draw(RandomBlur((0.1, 2.0)), key)[0].arguments[0] for key in keys]
    assert stats.kstest(radii, "uniform", (0.1, 1.9)).pvalue > 1e-3
