"""Settings are checked, with messages for people."""

from __future__ import annotations

import pytest
from timm.data.auto_augment import augment_and_mix_transform, auto_augment_transform, rand_augment_transform

from ds_vit.config import augmentation
from ds_vit.config import parser as flags
from ds_vit.config.augmentation import MixConfig


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"std": (0.5, 0.5, 0.0)}, "--std must be above 0"),
        ({"interpolation": "random"}, "--interpolation random is none of nearest, "),
        ({"crop_pct": 1.5}, "--crop-pct must be above 0 and at most 1, not 1.5"),
        ({"crop_mode": "corner"}, "--crop-mode corner is none of center"),
        ({"scale": (1.0, 0.08)}, "--scale takes two numbers, the smaller first, not 1 0.08"),
        ({"ratio": (0.0, 1.0)}, "--ratio must be above 0 and at most 100, not 0 1"),
        ({"train_crop_mode": "center"}, "--train-crop-mode center is none of rrc"),
        ({"color_jitter": (0.1, 0.2)}, "--color-jitter takes 1, 3"),
        (
            {"color_jitter": (0.1, 0.1, 0.1, 0.9)},
            "--color-jitter takes 1, 3 or 4 numbers .the last is the hue, at most 0.5",
        ),
        ({"aa": "randaugment"}, "'randaugment' is none of rand, augmix, v0"),
        ({"aa": "rand-m9-foo"}, "rand has no section 'foo'; it has m9"),
        ({"aa": "rand-m9-tweight"}, "has no section 'tweight'"),
        ({"aa": "rand-mstdinf"}, "has no section 'mstdinf'"),  # timm passes over it
        ({"aa": "rand-p1.5"}, "has no section 'p1.5'"),
        ({"aa": "original-m9"}, "original has no section 'm9'"),
        ({"smoothing": 1.0}, "--smoothing must be at least 0 and below 1, not 1"),
    ],
)
def test_bad_values_are_refused_by_flag_and_value(values, message):
    """Would catch a value that timm accepts in silence or answers with an assertion."""
    with pytest.raises(ValueError, match=message):
        flags.from_values(values)


@pytest.mark.parametrize(
    "text",
    [
        *("rand", "rand-m9-mstd0.5-inc1", "rand-m7-n4-p0.5-mstd101", "rand-m10-mmax12-tweights", "rand-n3-t3a"),
        *("augmix", "augmix-m5-w4-d2", "augmix-a0.5-b1-mstd1", "v0", "v0r", "original-mstd0.5", "originalr", "3a"),
    ],
)
def test_timms_policy_strings_are_accepted(text):
    """Would catch our check refusing a string that timm's recipes use."""
    assert flags.read_values({"aa": text}) == ({"aa": text}, [])
    factory = {"rand": rand_augment_transform, "augmix": augment_and_mix_transform}.get(text.split("-")[0])
    (factory or auto_augment_transform)(text)


def test_mixing_is_on_by_any_of_its_three_flags_until_it_is_turned_off():
    """Would catch soft targets where nothing is mixed, or mixing that outlives --mixup-off-epoch."""
    assert not MixConfig().active
    assert all(c.active for c in (MixConfig(mixup=0.1), MixConfig(cutmix=1.0), MixConfig(cutmix_minmax=(0.2, 0.8))))
    forever, until_two = MixConfig(mixup=1.0), MixConfig(mixup=1.0, mixup_off_epoch=2)
    assert [forever.mixes_in(epoch) for epoch in range(4)] == [True] * 4
    assert [until_two.mixes_in(epoch) for epoch in range(4)] == [True, True, False, False]
    assert until_two.active


@pytest.mark.parametrize("family", augmentation._AA_WORDS)
def test_the_sections_that_a_refusal_names_are_taken(family):
    """An example in the message that is refused as well."""
    named = augmentation._AA_WORDS[family].replace(", 1 to 14", "").split(", ")
    words = [piece.split()[0] for piece in named]
    assert words
    for word in words:
        assert not flags.read_values({"aa": f"{family}-{word}"})[1]
