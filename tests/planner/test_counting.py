"""Costs counted on the meta device, against what autograd keeps on the CPU."""

from __future__ import annotations

import itertools

import pytest
import torch

from ds_vit.models.conversions import cast_block_buffers, norms_in_fp32
from ds_vit.models.layers import take_apart
from ds_vit.models.sequential import SequentialViT
from ds_vit.models.zoo import ModelSpec, create_model
from ds_vit.planner import counting
from ds_vit.planner.counting import count_flops, kept_by_layers, layer_flops, saved_storages

MICRO_BATCH = 6


def in_type(layers, dtype):
    """The layers as DeepSpeed and our converters leave them."""
    for layer in layers:
        layer.to(dtype)
        if dtype != torch.float32:
            cast_block_buffers(layer, dtype)
            norms_in_fp32(layer)
    return layers


def measured(model, dtype):
    """Bytes that autograd saves of a micro-batch on the CPU, weights aside."""
    vit = SequentialViT([layer.to_empty(device="cpu") for layer in take_apart(model)]).train()
    for tensor in (*vit.parameters(), *vit.buffers()):
        torch.nn.init.constant_(tensor, 0.1)
    in_type(vit.layers, dtype)
    height, width = model.patch_embed.img_size
    images = torch.zeros(MICRO_BATCH, 3, height, width, dtype=dtype)
    keys = torch.arange(MICRO_BATCH)
    saved, _ = saved_storages(lambda: vit(images, keys), (*vit.parameters(), *vit.buffers()))
    return sum(storage.nbytes() for storage in saved.values())


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("vit_tiny_patch16_224", {"drop_path_rate": 0.1, "model_kwargs": {"depth": 3, "proj_drop_rate": 0.1}}),
        ("eva02_tiny_patch14_224", {"model_kwargs": {"depth": 2}}),
        ("vit_dwee_patch16_reg1_gap_256", {"model_kwargs": {"depth": 2}}),
        ("vit_small_patch16_rope_mixed_224", {"model_kwargs": {"depth": 2}}),
        ("vit_tiny_patch16_224", {"model_kwargs": {"depth": 2, "patch_drop_rate": 0.5}}),
    ],
)
def test_what_is_kept_is_what_autograd_saves(name, kwargs, dtype):
    # Catches: scores that a fused kernel never writes, q, k and v of one storage counted as one, dropout's masks and
    # dropped patches left out, norms in fp32 taken for bf16.
    model = create_model(ModelSpec(name, num_classes=10, **kwargs))
    kept = kept_by_layers(in_type(take_apart(model), dtype))
    assert MICRO_BATCH * sum(layer.bytes for layer in kept) == pytest.approx(measured(model, dtype), rel=0.1)


def test_what_is_frozen_keeps_nothing():
    # Catches: a linear probe with the memory of full training.
    model = create_model(ModelSpec("vit_tiny_patch16_224", num_classes=10))
    layers = take_apart(model)
    for layer in layers[:8]:
        layer.requires_grad_(False)
    kept = [layer.bytes for layer in kept_by_layers(layers)]
    assert kept[:8] == [0] * 8
    assert 0 < kept[8] <= kept[9] == kept[10]


def test_layer_costs_add_up():
    """Costs that miss a layer would unbalance the stages."""
    model = create_model(ModelSpec("vit_base_patch16_siglip_224"))
    layers = take_apart(model)
    flops = layer_flops(layers)
    assert sum(flops) == count_flops(model).forward
    assert len(flops) == len(model.blocks) + 2
    # sbd(20 + 4r) bytes in fp32 with r = 4 and no fused layers below, within a factor: attention's tables aside.
    tokens, width = 196, 768
    assert 0.5 < kept_by_layers(layers)[1].bytes / (2 * tokens * width * 34) < 2.0


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_small_patch16_rope_mixed_224"])
def test_blocks_that_are_alike_are_counted_once(name, monkeypatch):
    """A block that costs something else and is taken for its neighbour; and blocks that are all counted."""
    model = create_model(ModelSpec(name, num_classes=10, drop_path_rate=0.1))
    count, counted = counting._count_forward, []
    monkeypatch.setattr(counting, "_count_forward", lambda layer, value: counted.append(layer) or count(layer, value))
    layer_flops(take_apart(model))
    assert len(counted) == 3
    wide = model.blocks[5].mlp
    wide.fc1 = torch.nn.Linear(wide.fc1.in_features, 7, device="meta")
    wide.fc2 = torch.nn.Linear(7, wide.fc2.out_features, device="meta")
    layers, numbers = take_apart(model), itertools.count()
    once, kept_once = layer_flops(layers), kept_by_layers(layers)
    monkeypatch.setattr(counting, "cost_key", lambda block: next(numbers))
    assert once == layer_flops(layers)
    # A first block without drop-path lacks its mask of four bytes an image.
    kept_each = kept_by_layers(layers)
    assert [one.bytes for one in kept_once] == pytest.approx([one.bytes for one in kept_each], abs=8)
    assert once[6] != once[5] == once[7]
