"""What tells two small models apart."""

from __future__ import annotations

from vits import small_spec, what_it_computes

from ds_vit.models.zoo import create_model


def key(name: str, **kwargs) -> object:
    return what_it_computes(create_model(small_spec(name, **kwargs), for_training=False))


KINDS = [{"qk_norm": True}, {"global_pool": "avg"}, {"no_embed_class": True}, {"act_layer": "gelu_tanh"}]
KINDS += [{"pre_norm": True}, {"reg_tokens": 4}, {"init_values": 0.1}, {"patch_drop_rate": 0.1}, {"img_size": 32}]


def test_what_makes_another_model():
    # Catches: a key that nothing shares (an address, a drawn number), which would spare no test anything; a key that
    # misses what the forward looks at, so that a name goes untested.
    assert key("vit_tiny_patch16_224") == key("vit_large_patch16_384", img_size=224), "they differ in size only"
    for kwargs in KINDS:
        assert key("vit_tiny_patch16_224", **kwargs) != key("vit_tiny_patch16_224"), kwargs
    assert key("vit_base_patch16_clip_224", pre_norm=False) != key("vit_base_patch16_224"), "another epsilon"
