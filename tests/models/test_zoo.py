"""Specs to timm models on the meta device: what is refused, in which words; sizes, FLOPs, weight decay, freezing."""

from __future__ import annotations

import time

import pytest
import timm
import torch
from timm.optim import param_groups_weight_decay
from vits import KINDS, our_model, small_spec, timm_model

from ds_vit.models.large_sizes import SIZES
from ds_vit.models.layers import take_apart
from ds_vit.models.param_groups import classifier_names, freeze, frozen_names, no_weight_decay_names
from ds_vit.models.zoo import ModelSpec, create_model, image_size, names_and_shapes, num_parameters
from ds_vit.parallel.tensor.shard import legal_degrees
from ds_vit.planner.counting import count_flops


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (ModelSpec("vit_bse_patch16_224"), r"no model named 'vit_bse_patch16_224'; the nearest are vit_base"),
        (ModelSpec("hf-hub:a/b/c"), "in no repository"),
        (ModelSpec("timm/vit"), r"Use 'hf-hub:timm/vit' to load from the Hub"),
        (ModelSpec("local-dir:/nowhere"), r"--model local-dir:/nowhere: there is no /nowhere/config.json"),
        (ModelSpec("resnet50"), r"'resnet50' is of timm's 'resnet' family; .* classes VisionTransformer and Eva only"),
        (ModelSpec("vit_tiny_patch16_224", num_classes=0), r"num_classes 0 has no classifier to train"),
        (ModelSpec("vit_tiny_patch16_224", img_size=8), r"img_size 8 is smaller than one patch"),
        (ModelSpec("vit_tiny_patch16_224", model_kwargs={"detph": 2}), r"no argument 'detph'.*nearest is depth"),
        (ModelSpec("vit_tiny_patch16_224", model_kwargs={"img_size": 32}), r"'img_size': use --img-size"),
        (ModelSpec("vit_tiny_patch16_224", model_kwargs={"dynamic_img_size": True}), r"image size of a run is fixed"),
        (
            ModelSpec("vit_tiny_patch16_224", model_kwargs={"num_heads": 5}),
            r"timm cannot build .*num_heads=5.*divisible",
        ),
        (ModelSpec("vit_tiny_patch16_224", model_kwargs={"attn_drop_rate": 0.1}), r"attn_drop_rate 0\.1 \(blocks\.0"),
        (ModelSpec("vit_tiny_patch16_224", model_kwargs={"proj_drop_rate": 1.0}), r"dropout rate 1\.0 \(blocks\.0"),
        (ModelSpec("vit_tiny_patch16_224", model_kwargs={"global_pool": ""}), r"logits for every token"),
        (
            ModelSpec("vit_tiny_patch16_224", model_kwargs={"qkv_bias": "no"}),
            r"model_kwargs qkv_bias='no': it is true or false",
        ),
        (ModelSpec("vit_tiny_patch16_224", model_kwargs={"fc_norm": "flase"}), r"fc_norm='flase': it is true or false"),
        (ModelSpec("eva02_tiny_patch14_224", model_kwargs={"rope_shift_coords": 0.5}), r"rope_shift_coords=0\.0"),
        (ModelSpec("eva02_tiny_patch14_224", model_kwargs={"reg_tokens": 4}), r"Eva has no argument.*num_reg_tokens"),
        (ModelSpec("vit_base_resnet26d_224"), r"BatchNorm \(patch_embed\.backbone.*micro-batch"),
    ],
    ids=lambda value: value.name if isinstance(value, ModelSpec) else "",
)
def test_refusals_say_what_and_what_instead(spec, message):
    """A traceback from inside timm, or a model that trains differently in each layout."""
    with pytest.raises(ValueError, match=message):
        create_model(spec)


@pytest.mark.parametrize("attn_layer", ["attn", "diff"])
def test_attention_dropout_is_found_in_every_attention(attn_layer):
    """Attention classes keep their rate under different names."""
    kwargs = {"attn_drop_rate": 0.1, "attn_layer": attn_layer}
    with pytest.raises(ValueError, match="attention dropout"):
        create_model(small_spec("vit_tiny_patch16_224", **kwargs))
    for name in (KINDS["parallel scaling"], KINDS["two parallel branches"], KINDS["Eva with rotary tables"]):
        with pytest.raises(ValueError, match="attention dropout"):
            create_model(small_spec(name, attn_drop_rate=0.1))
    create_model(small_spec("vit_tiny_patch16_224", **kwargs), for_training=False)


def test_a_spec_reaches_timm():
    """A flag that is lost on its way."""
    spec = ModelSpec(
        "vit_tiny_patch16_224.augreg_in21k",
        num_classes=7,
        img_size=(32, 64),
        drop_path_rate=0.2,
        model_kwargs={"depth": 3},
    )
    model = create_model(spec)
    assert all(parameter.is_meta for parameter in model.parameters())
    assert image_size(model) == (32, 64)
    assert model.patch_embed.grid_size == (2, 4)
    assert len(model.blocks) == 3
    assert model.head.out_features == 7
    assert model.blocks[2].drop_path1.drop_prob == pytest.approx(0.2)
    with_default = create_model(ModelSpec("vit_tiny_patch16_224"))
    assert isinstance(with_default.blocks[2].drop_path1, torch.nn.Identity)


def test_the_image_size_is_fixed():
    """Rotary tables computed anew at every call, or images of another size that pass."""
    spec = small_spec("vit_small_patch16_dinov3", img_size=64)
    assert create_model(spec).rope.feat_shape == (4, 4)
    with pytest.raises(AssertionError, match="80"):
        our_model(spec)(torch.zeros(1, 3, 80, 80))


def test_neutral_rope_settings_draw_nothing():
    """A model that is called random because a setting without effect is written down."""
    name = "vit_base_patch16_sapiens2"
    model = create_model(small_spec(name, rope_rescale_coords=1.0))
    assert not model.rope.aug_active


def test_flops_follow_the_cost_model():
    """A count that misses a kind of product: compared with the closed form of a plain ViT."""
    model = create_model(ModelSpec("vit_tiny_patch16_224", num_classes=10, img_size=64, model_kwargs={"depth": 5}))
    d, s, patches, blocks = 192, 17, 16, 5
    macs = blocks * (s * (4 * d * d + 2 * d * 4 * d) + 2 * s * s * d) + patches * 16 * 16 * 3 * d + d * 10
    assert count_flops(model).forward == 2 * macs


def test_flops_of_the_largest_take_no_memory():
    """A count that runs the model: 26 GB of weights would not fit here."""
    assert count_flops(create_model(ModelSpec("vit_7b_patch16_dinov3"))).forward > 3e12


@pytest.mark.parametrize("kind", KINDS)
def test_no_weight_decay_is_timms(kind):
    """A vector, a position embedding or a rotary frequency that decays."""
    spec = small_spec(KINDS[kind])
    theirs = timm_model(spec)
    groups = param_groups_weight_decay(theirs, 0.1, no_weight_decay_list=theirs.no_weight_decay())
    named = {id(parameter): name for name, parameter in theirs.named_parameters()}
    expected = {named[id(p)] for group in groups if not group["weight_decay"] for p in group["params"]}
    names = no_weight_decay_names(create_model(spec))
    assert names == expected
    assert {"cls_token", "pos_embed", "rope.freqs", "head.bias"} & set(named.values()) <= names
    assert "head.weight" not in names


def test_freezing():
    """A pattern that freezes too much, too little, or nothing in silence."""
    model = create_model(small_spec("vit_tiny_patch16_224"))
    everything = set(dict(model.named_parameters()))
    assert frozen_names(model) == frozenset()
    assert frozen_names(model, linear_probe=True) == everything - {"head.weight", "head.bias"}
    assert classifier_names(model) == {"head.weight", "head.bias"}
    stem = {"patch_embed.proj.weight", "patch_embed.proj.bias"}
    assert frozen_names(model, ["patch_embed"]) == frozen_names(model, ["patch_embed.*"]) == stem
    assert frozen_names(model, ["blocks.[0]"]) == {name for name in everything if name.startswith("blocks.0.")}
    assert frozen_names(model, ["*.bias", "pos_embed"]) == {n for n in everything if n.endswith("bias")} | {"pos_embed"}
    with pytest.raises(ValueError, match=r"--freeze 'block\.0' matches no parameter; the nearest are blocks\.0"):
        frozen_names(model, ["patch_embed", "block.0"])
    pooled = create_model(small_spec("vit_tiny_patch16_224", global_pool="avg"))  # its `norm` has no parameters
    with pytest.raises(ValueError, match=r"--freeze 'norm' matches no parameter; the nearest are (?!norm,)"):
        frozen_names(pooled, ["norm"])
    with pytest.raises(ValueError, match="leaves none of the"):
        frozen_names(model, ["*"])
    layers = take_apart(model)
    for layer in layers:
        freeze(layer, frozen_names(model, ["blocks.0", "head.bias"]))
    frozen = {name for layer in layers for name, p in layer.named_parameters() if not p.requires_grad}
    assert frozen == {name for name in everything if name.startswith("blocks.0.")} | {"head.bias"}


def test_names_and_shapes_are_the_state_dict():
    """A file that lacks a buffer or has another order than timm's."""
    spec = small_spec("vit_base_resnet26d_224")
    theirs = timm.create_model(spec.name, num_classes=10, **spec.model_kwargs).state_dict()
    ours = names_and_shapes(create_model(spec, for_training=False))
    assert list(ours.items()) == [(name, tensor.shape) for name, tensor in theirs.items()]


# Parameters that the name or its paper says, in billions; ViT-22B's 21.743 count no attention pool (12 D^2 here).
PUBLISHED = {"vit_e_patch14_224": 3.926, "vit_10b_patch14_224": 10.078, "vit_22b_patch14_224": 21.743 + 0.453}


@pytest.mark.parametrize("name", SIZES)
def test_a_size_is_what_its_name_says(name):
    # Catches: a width or a depth that was typed wrong; a description that takes the memory of the model.
    start = time.process_time()
    model = create_model(ModelSpec(name))
    assert time.process_time() - start < 5
    said = PUBLISHED.get(name) or float(name.removeprefix("vit_").partition("b_")[0])
    assert num_parameters(model) / 1e9 == pytest.approx(said, rel=0.02)
    assert {2, 4, 8} <= set(legal_degrees(model)), "one host's GPUs share a block"
