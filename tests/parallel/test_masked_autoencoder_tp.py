"""A masked autoencoder, cut: its output, loss and every gradient are the uncut one's, on tokens whole and shared."""

from __future__ import annotations

import copy

import pytest
import torch
from autoencoders import SETTINGS, autoencoder, batch_of, layers_of, loss_of
from tp_models import close, sharded_copies, tensor_parallel, whole_gradients

from ds_vit.models.layers import DecoderBlockLayer
from ds_vit.models.sequential import SequentialViT
from ds_vit.parallel.tensor.shard import check_degree

# 4 kept of 16 patches, and 0, 1 or 5 tokens before them: 2 and 3 ranks share hardly any of these counts evenly.
KINDS = {
    "class token": {"num_heads": 6},
    "registers and layer scale": {"num_heads": 6},
    "attention pool": {"num_heads": 6},
    "Eva with rotary tables": {"num_heads": 6, "mlp_ratio": 3.0},
    "learned rotary frequencies": {"num_heads": 6},
}


def compare(kind: str, sequence_parallel: bool, interval: int) -> None:
    """In float64, where the order of a sum moves the result by 1e-15, so that 1e-11 leaves no room for an error."""
    tp = tensor_parallel(sequence_parallel)
    model = autoencoder(kind, SETTINGS, **KINDS[kind])
    check_degree(model, tp.size)
    layers = layers_of(model, torch.float64)
    cut = SequentialViT(sharded_copies(copy.deepcopy(layers), tp), checkpoint_interval=interval)
    whole = SequentialViT(layers)
    for one, other in zip(layers, cut.layers, strict=True):
        if isinstance(one, DecoderBlockLayer):
            assert other.block.mlp.fc1.weight.numel() * tp.size == one.block.mlp.fc1.weight.numel()
    pixels, keys = batch_of(model, torch.float64)
    loss, predictions = loss_of(model), []
    for run in (whole, cut):
        predictions.append(run(pixels, keys))
        loss(predictions[-1], pixels, keys).backward()
    close(predictions[1].detach(), predictions[0].detach(), "prediction")
    for parameter in cut.parameters():
        if not parameter.requires_grad:
            assert parameter.grad is None
            parameter.grad = torch.zeros_like(parameter)
    gradients = whole_gradients(cut)
    for name, parameter in whole.named_parameters():
        if parameter.requires_grad:  # the loss is in fp32, and so is what comes back into float64 from it
            close(gradients[name], parameter.grad, f"{kind}: {name}", 1e-6)
    with torch.no_grad():
        close(cut.eval()(pixels, keys), predictions[0].detach(), "prediction in evaluation")


def compare_all(kinds: list[str], sequence_parallel: bool) -> None:
    for number, kind in enumerate(kinds):
        compare(kind, sequence_parallel, interval=2 * (number % 2))


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("size", "sequence_parallel"), [(3, True), (2, False)])
def test_a_cut_autoencoder_is_the_autoencoder(ranks, size, sequence_parallel):
    """A decoder left whole, a bridge whose gradients differ between ranks, tokens joined by the other half's count."""
    ranks.run(size, compare_all, list(KINDS), sequence_parallel, timeout=400)
