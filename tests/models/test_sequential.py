"""The layer list as one module: names, state, precision, activation checkpointing, pipelines to come."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from vits import KINDS, images, our_model, small_spec, timm_model, timm_state_dict

from ds_vit.models.keyed_init import initialise
from ds_vit.models.layers import BlockLayer, EmbedLayer, HeadLayer, take_apart
from ds_vit.models.param_groups import freeze, frozen_names
from ds_vit.models.sequential import timm_names
from ds_vit.models.zoo import create_model

TINY = small_spec("vit_tiny_patch16_224")


def test_names_are_timms_in_every_container():
    """A container whose prefix stays in a checkpoint's names."""
    model = our_model(TINY)
    expected = [name for name, _ in create_model(TINY).named_parameters()]
    names = timm_names(model)
    assert list(names) == [name for name, _ in model.named_parameters()]
    assert sorted(names.values()) == sorted(expected)
    assert names["layers.2.blocks.1.attn.qkv.weight"] == "blocks.1.attn.qkv.weight"
    # As DeepSpeed's PipelineModule holds its stage: children named by their place in the whole list.
    stage = nn.Module()
    for index in (2, 3):
        stage.add_module(str(index), model.layers[index])
    assert timm_names(stage)["2.blocks.1.attn.qkv.weight"] == "blocks.1.attn.qkv.weight"
    assert timm_names(stage)["3.head.bias"] == "head.bias"
    assert timm_names(model.layers[0])["pos_embed"] == "pos_embed"


def test_state_goes_to_timm_and_back():
    """Weights that timm cannot load as they are, buffers included."""
    for name in ("vit_tiny_patch16_224", "vit_base_resnet26d_224", KINDS["learned rotary frequencies"]):
        spec = small_spec(name)
        theirs = timm_model(spec)
        model = our_model(spec, for_training=False)
        theirs.load_state_dict(timm_state_dict(model))
        assert torch.equal(theirs.eval()(images(spec)), model.eval()(images(spec)))
    state = timm_state_dict(model, keep_vars=True)
    assert all(isinstance(tensor, nn.Parameter) for tensor in state.values())


def test_the_list_is_an_embedding_blocks_and_a_head():
    """A stage boundary somewhere else than between timm's modules."""
    layers = take_apart(create_model(small_spec("eva02_tiny_patch14_224", depth=3)))
    assert [type(layer).__mro__[1] for layer in (layers[0], layers[-1])] == [EmbedLayer, HeadLayer]
    assert all(isinstance(layer, BlockLayer) for layer in layers[1:-1])
    assert [layer.index for layer in layers[1:-1]] == [0, 1, 2]


@pytest.mark.parametrize("kind", KINDS)
def test_what_crosses_a_stage_can_cross_a_pipeline(kind):
    """DeepSpeed's pipeline sends tensors of constant shape, and breaks on a float tensor without gradient."""
    model = our_model(small_spec(KINDS[kind]))
    keys = torch.arange(2)
    stream = model.layers[0]((images(small_spec(KINDS[kind])), keys))
    for block in model.layers[1:-1]:
        assert all(isinstance(tensor, torch.Tensor) for tensor in stream)
        assert all(tensor.requires_grad for tensor in stream if tensor.is_floating_point())
        assert torch.equal(stream[1], keys)
        following = block(stream)
        assert [(t.shape, t.dtype) for t in following] == [(t.shape, t.dtype) for t in stream]
        stream = following
    assert len(stream) == (3 if kind == "learned rotary frequencies" else 2)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16(kind):
    """An image, a table or a frequency of another type than the weights."""
    spec = small_spec(KINDS[kind])
    reference = timm_model(spec)
    model = our_model(spec, weights_of=reference)
    expected = model(images(spec), torch.arange(2))
    logits = model.to(torch.bfloat16)(images(spec), torch.arange(2))
    assert logits.dtype == torch.bfloat16
    assert (logits.float() - expected).abs().max() < 0.1 * expected.abs().max()


def test_images_are_cast_to_the_weights():
    """fp32 pixels against 16-bit weights, or the other way about."""
    model = our_model(TINY)
    assert model(images(TINY).double()).dtype == torch.float32
    assert model.to(torch.bfloat16)(images(TINY)).dtype == torch.bfloat16


@pytest.mark.parametrize("interval", [0, 1])
def test_a_frozen_part_gets_no_gradient_and_the_rest_does(interval):
    """Recomputation behind a frozen embedding, where no input of the first group needs a gradient."""
    model = our_model(TINY, recompute_interval=interval)
    frozen = frozen_names(create_model(TINY), ["patch_embed", "cls_token", "pos_embed", "blocks.0"])
    freeze(model, frozen)
    model(images(TINY)).sum().backward()
    names = timm_names(model)
    assert {names[name] for name, p in model.named_parameters() if p.grad is None} == frozen


def test_blocks_share_one_rotary_table():
    """A table for each block: 48 of them at high resolution are gigabytes."""
    description = create_model(small_spec("eva02_tiny_patch14_224", depth=3))
    layers = take_apart(description)
    initialise(description, layers, seed=0, device="cpu")
    assert len({layer.rope.pos_embed.data_ptr() for layer in layers[1:-1]}) == 1
    assert "rope" not in {name.split(".")[0] for layer in layers for name in layer.state_dict()}
