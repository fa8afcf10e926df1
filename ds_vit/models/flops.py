"""Floating-point operations of a timm ViT, counted on the meta device from the shapes of its matrix products."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from ds_vit.models.zoo import TimmViT, image_size


def forward_flops(model: TimmViT) -> int:
    """Floating-point operations of the forward pass of one image: 2 for each multiply-add.

    Matrix products, convolutions and attention are counted; normalisation, activations and sums, a fraction of a per
    cent, are not. Half of it is what timm publishes as MACs; a training step costs three times as much.

    Args:
        model: from `create_model`, on the meta device; nothing is computed and no memory is used.
    """
    height, width = image_size(model)
    image = torch.empty(1, model.in_chans, height, width, device="meta")
    training = model.training
    model.eval()
    try:
        # With gradients on: without, torch 2.15's module tracker fails on the expanded latent of attention pooling.
        with FlopCounterMode(display=False) as counter:
            model(image)
    finally:
        model.train(training)
    return counter.get_total_flops()
