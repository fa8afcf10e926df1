"""What is recomputed in each mode, counted to the operation and to the byte, and that nothing else changes."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, set_checkpoint_early_stop
from torch.utils.flop_counter import FlopCounterMode
from vits import KINDS, images, our_model, shake, small_image_size, small_spec

from ds_vit.models.checkpointing import _policy, recompute_all, recompute_from_host_memory, recompute_selectively
from ds_vit.models.layers import BlockLayer, take_apart
from ds_vit.models.sequential import run_layers
from ds_vit.models.zoo import create_model
from ds_vit.planner.counting import kept_by_layers, layer_flops, saved_storages

MODES = {
    "none": (0, recompute_all),
    "full": (1, recompute_all),
    "two": (2, recompute_all),
    "selective": (1, recompute_selectively),
}
BATCH = 3
KEY = 8  # bytes


def small(kind, **kwargs):
    """The spec of a model with three blocks."""
    return small_spec(KINDS[kind], depth=3, img_size=small_image_size(KINDS[kind]), **kwargs)


def model_in(mode, spec):
    """The model of a spec, the same in each mode."""
    interval, function = MODES[mode]
    model = our_model(spec, recompute_interval=interval, checkpoint_function=function)
    shake(model)
    return model


def step(model, spec):
    """A forward and a backward pass: (FLOPs of both, the gradient)."""
    with FlopCounterMode(display=False) as counter, set_checkpoint_early_stop(False):
        model(images(spec, BATCH), torch.arange(BATCH)).square().sum().backward()
    return counter.get_total_flops(), torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.sampled(6)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_computed_twice(kind):
    """Full: the blocks' forward pass, once more. Selective: no product and no attention. To the last bit the same."""
    spec = small(kind, drop_path_rate=0.3, proj_drop_rate=0.1)
    found = {mode: step(model_in(mode, spec), spec) for mode in MODES}
    flops = {mode: total for mode, (total, _) in found.items()}
    described = create_model(spec)
    layers = take_apart(described)
    costs = zip(layers, layer_flops(layers), strict=True)
    blocks = BATCH * sum(cost for layer, cost in costs if isinstance(layer, BlockLayer))
    assert flops["selective"] == flops["none"]
    assert flops["full"] == flops["two"]
    # torch 2.14 does not count attention in the second forward pass on a CPU: up to 4 % here, less than any product.
    assert flops["full"] - flops["none"] == pytest.approx(blocks, rel=0.04)
    for _, gradient in found.values():
        assert torch.equal(gradient, found["none"][1])


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
def test_what_waits_is_what_was_counted(kind):
    """An estimate by another policy than the run's; what expensive operations give, not kept, or kept twice."""
    spec = small(kind)
    described = create_model(spec)
    layers = take_apart(described)
    kept = kept_by_layers(layers)
    blocks = [found for found, layer in zip(kept, layers, strict=True) if isinstance(layer, BlockLayer)]
    ends = sum(found.bytes for found in kept) - sum(found.bytes for found in blocks)
    counted = {
        "none": ends + sum(found.bytes for found in blocks),
        "full": ends + sum(found.given for found in blocks) + KEY,
        "selective": ends + sum(found.given + found.expensive for found in blocks) + KEY,
    }
    measured = {}
    for mode in counted:
        model = model_in(mode, spec)
        keys = torch.arange(BATCH)
        weights = (*model.parameters(), *model.buffers())
        saved, _ = saved_storages(lambda: model(images(spec, BATCH), keys), weights)  # noqa: B023
        measured[mode] = sum(storage.nbytes() for storage in saved.values())
    assert measured["full"] < measured["selective"] < measured["none"]
    # Of a stem's convolution and of learned frequencies a part is of the batch, and not of an image.
    of_a_batch = {"convolutional stem": 0.01, "learned rotary frequencies": 0.02}
    for mode, number in counted.items():
        assert measured[mode] == pytest.approx(BATCH * number, rel=of_a_batch.get(kind, 0)), mode
    for found in blocks:
        assert found.given_saved <= found.given <= found.bytes
        assert 0 < found.expensive_saved <= found.expensive


def test_the_second_run_may_cast_what_the_first_had_at_hand():
    """Blocks that are one and the same, as --auto-batch tries them: autocast has cast their weights for the first."""
    spec = small("class token")
    model = model_in("none", spec)
    embed, block, *_, head = model.layers

    def train(function):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = run_layers((embed, block, block, head), (images(spec), torch.arange(2)), 1, function)
        logits.float().square().sum().backward()

    def strictly(run, *tensors):
        return checkpoint(
            run, *tensors, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(_policy)
        )

    train(recompute_selectively)
    with pytest.raises(RuntimeError, match="encountered during backward but not found in storage"):
        train(strictly)


def test_host_memory_is_pinned_for_the_tensors_device_only(monkeypatch):
    """A run on the CPU of a machine with a GPU: page-locked memory for copies that no device makes."""
    pinned = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.autograd.graph, "save_on_cpu", lambda pin_memory: pinned.append(pin_memory) or nullcontext()
    )
    x = torch.ones(2, requires_grad=True)
    recompute_from_host_memory(torch.square, x).sum().backward()
    assert pinned == [False]
    assert x.grad.tolist() == [2.0, 2.0]
