"""Small masked autoencoders for tests, on a grid of 4 x 4 patches, of which 4 are kept."""

from __future__ import annotations

from typing import Any

import torch
from vits import KINDS, shake, small_kwargs

from ds_vit.models.keyed_init import initialise
from ds_vit.models.layers import Layer, take_apart
from ds_vit.models.zoo import ModelSpec, create_model
from ds_vit.tasks.mae.flags import MaskedAutoencoderSettings
from ds_vit.tasks.mae.towers import MaskedAutoencoder, create_autoencoder

SETTINGS = MaskedAutoencoderSettings(decoder_dim=48, decoder_depth=2, decoder_heads=6)
ENCODERS = {kind: name for kind, name in KINDS.items() if kind != "convolutional stem"}
SAMPLES = 3


def spec_of(name: str, grid: int = 4, drop_path_rate: float | None = None, **kwargs: Any) -> ModelSpec:
    """A name at depth 2 (or as `kwargs` say) on `grid` x `grid` patches."""
    arguments = small_kwargs(name) | kwargs
    patch = create_model(ModelSpec(name, model_kwargs=arguments), for_training=False).patch_embed.patch_size[0]
    return ModelSpec(name, img_size=grid * patch, drop_path_rate=drop_path_rate, model_kwargs=arguments)


def layers_of(
    model: MaskedAutoencoder, dtype: torch.dtype = torch.float32, shaken: bool = True, seed: int = 0
) -> list[Layer]:
    """Its layers with values, by default away from the initial ones; fixed positions stay."""
    layers = take_apart(model)
    initialise(model, layers, seed=seed, device="cpu", dtype=dtype)
    for index, layer in enumerate(layers if shaken else ()):
        fixed = {name: p.clone() for name, p in layer.named_parameters() if not p.requires_grad}
        shake(layer, seed=index)
        with torch.no_grad():
            for name, value in fixed.items():
                layer.get_parameter(name).copy_(value)
    return layers


def batch_of(model: MaskedAutoencoder, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Pixels and sample keys."""
    generator = torch.Generator().manual_seed(1)
    pixels = torch.randn(SAMPLES, 3, *model.patch_embed.img_size, generator=generator, dtype=dtype)
    return pixels, torch.arange(SAMPLES) * 1_000_003 - 7


def autoencoder(kind: str, settings: MaskedAutoencoderSettings = SETTINGS, **kwargs: Any) -> MaskedAutoencoder:
    """The description of a small one of `ENCODERS`."""
    return create_autoencoder(spec_of(ENCODERS[kind], **kwargs), settings)
