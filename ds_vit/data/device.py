"""From a micro-batch to the model's inputs, on its device: augment (with --augment-on device), normalise, erase, mix.

Everything random was drawn when the micro-batch was read or is keyed by its samples, so that a CPU and a GPU make the
same inputs up to rounding. The order is that of timm's Mixup: images are normalised, then erased, then mixed.
"""

from __future__ import annotations

from functools import cache

import torch
from torch.nn import functional as F

from ds_vit.config.augmentation import AugmentConfig, MixConfig
from ds_vit.data.augment.mixing import erase, mix_images, mix_targets
from ds_vit.data.augment.on_device import Crops, augmented
from ds_vit.data.batches import MicroBatch
from ds_vit.data.settings import ImageConfig

_IN_CACHE = 2**17  # values of float32


@cache
def _channels(values: tuple[float, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)[:, None, None]


def _on(pixels: torch.Tensor | Crops, device: torch.device) -> torch.Tensor:
    """The pixels of images on their device, not normalised."""
    return augmented(pixels, device) if isinstance(pixels, Crops) else pixels.to(device, non_blocking=True)


def _normalised(pixels: torch.Tensor, image: ImageConfig) -> torch.Tensor:
    """(pixels / 255 - mean) / std of [..., 3, H, W], in float32."""
    images = torch.empty(pixels.shape, dtype=torch.float32, device=pixels.device)
    # On a CPU a few rows at once: all four passes over them then find them in the cache.
    few = max(1, _IN_CACHE // pixels[0].numel()) if pixels.device.type == "cpu" else len(pixels)
    rows = zip(images.split(few), pixels.split(few), strict=True)
    mean, std = (_channels(values, pixels.device) for values in (image.mean, image.std))
    for out, row in rows:
        out.copy_(row).div_(255.0).sub_(mean).div_(std)
    return images


def finish_images(
    batch: MicroBatch,
    image: ImageConfig,
    augment: AugmentConfig | None = None,
    *,
    device: torch.device | str,
) -> torch.Tensor:
    """The normalised, erased and mixed images of a micro-batch's own rows, float32.

    Args:
        batch: with images.
        image: for mean and std.
        augment: for the mode of erasing; needed when the batch has boxes to erase.
        device: where to compute and return them.

    Returns:
        [B, 3, H, W]; with several crops of an image the global ones, [B, 2, 3, H, W].
    """
    assert batch.images is not None, "the micro-batch was loaded without images"
    images = _normalised(_on(batch.images, torch.device(device)), image)
    if batch.erase is not None:
        assert augment is not None, "the micro-batch has boxes to erase"
        images = erase(images, batch.erase, batch.keys, augment.remode)
    return images[: batch.num_rows] if batch.mix is None else mix_images(images, batch.num_rows, batch.mix)


def finish_local_images(batch: MicroBatch, image: ImageConfig, *, device: torch.device | str) -> torch.Tensor:
    """The normalised local crops of a micro-batch's own rows, float32: [B, n, 3, S, S].

    Args:
        batch: with local crops.
        image: for mean and std.
        device: where to compute and return them.
    """
    assert batch.local_images is not None, "the micro-batch has no local crops"
    return _normalised(_on(batch.local_images, torch.device(device)), image)[: batch.num_rows]


def finish_targets(
    batch: MicroBatch, num_classes: int, mix: MixConfig | None = None, *, device: torch.device | str
) -> torch.Tensor:
    """The targets of a micro-batch's own rows.

    Args:
        batch: with targets.
        num_classes: C of the model, at least the source's.
        mix: the mixing that the batch was loaded with; None in evaluation.
        device: where to compute and return them.

    Returns:
        Without mixing class numbers int64 [B], or multi-hot float32 [B, C]: smoothing is then the loss's to do. With
        mixing, in every epoch, soft float32 [B, C] with the smoothing in them.
    """
    assert batch.targets is not None, "the micro-batch was loaded without targets"
    targets = batch.targets.to(device, non_blocking=True)
    if targets.ndim == 2 and targets.shape[1] < num_classes:
        targets = F.pad(targets, (0, num_classes - targets.shape[1]))
    if mix is None or batch.mix is None:
        return targets[: batch.num_rows]
    return mix_targets(targets, batch.num_rows, batch.mix, num_classes, mix.smoothing)
