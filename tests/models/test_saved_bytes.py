"""What a layer is said to keep for its backward pass, against what autograd keeps of it on the CPU."""

from __future__ import annotations

import pytest
import torch

from ds_vit.models import (
    ModelSpec,
    SequentialViT,
    cast_block_buffers,
    create_model,
    kept_by_layers,
    norms_in_fp32,
    saved_bytes,
    take_apart,
)

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
    return saved_bytes(lambda: vit(images, keys), (*vit.parameters(), *vit.buffers()))[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "kwargs"),
    [
        ("vit_tiny_patch16_224", {"drop_path": 0.1, "model_kwargs": {"depth": 3, "proj_drop_rate": 0.1}}),
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
    kept = kept_by_layers(model, in_type(take_apart(model), dtype), dtype)
    assert MICRO_BATCH * sum(layer.bytes for layer in kept) == pytest.approx(measured(model, dtype), rel=0.1)


def test_what_is_frozen_keeps_nothing():
    # Catches: a linear probe that is told to need what training the whole needs.
    model = create_model(ModelSpec("vit_tiny_patch16_224", num_classes=10))
    layers = take_apart(model)
    for layer in layers[:8]:
        layer.requires_grad_(False)
    kept = [layer.bytes for layer in kept_by_layers(model, layers)]
    assert kept[:8] == [0] * 8
    assert 0 < kept[8] <= kept[9] == kept[10]
