"""What tells two small models apart."""

from __future__ import annotations

import pytest
from vits import small_spec, what_it_computes

from ds_vit.models import create_model


def key(name: str, **kwargs) -> object:
    return what_it_computes(create_model(small_spec(name, **kwargs), for_training=False))


def test_names_that_differ_in_size_alone_are_one_small_model():
    # Catches: a key that nothing shares (an address, a drawn number), which would spare no test anything.
    assert key("vit_tiny_patch16_224") == key("vit_tiny_patch16_224")
    assert key("vit_tiny_patch16_224") == key("vit_large_patch16_384", img_size=224)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"qk_norm": True},
        {"global_pool": "avg"},
        {"no_embed_class": True},
        {"act_layer": "gelu_tanh"},
        {"pre_norm": True},
        {"reg_tokens": 4},
        {"init_values": 0.1},
        {"patch_drop_rate": 0.1},
        {"img_size": 32},
    ],
    ids=str,
)
def test_a_setting_makes_another_model(kwargs):
    # Catches: a key that misses what the forward looks at, so that a name goes untested.
    assert key("vit_tiny_patch16_224", **kwargs) != key("vit_tiny_patch16_224")


def test_norms_of_another_epsilon_are_another_model():
    # Catches: the same, for a number deep inside.
    assert key("vit_base_patch16_clip_224", pre_norm=False) != key("vit_base_patch16_224")
