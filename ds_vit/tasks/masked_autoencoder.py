"""Masked autoencoding: the pixels of the patches that the model was not shown, no labels (He et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch

from ds_vit.config import RunConfig
from ds_vit.data import MicroBatch, finish_images
from ds_vit.models import AutoencoderSettings, MaskedAutoencoder, ModelSpec, create_autoencoder, decoder_names
from ds_vit.parallel.tensor import TensorParallel
from ds_vit.tasks.losses import MaskedPatchLoss
from ds_vit.tasks.metrics import Batch, Figure, Metrics
from ds_vit.tasks.task import Field, Loss, Task

_NO_CLASSES = "its loss is over pixels and its model has no classes"
_NO_LABELS = "an image is its own target, and there are no labels to mix"


class MaskedAutoencoding(Task):
    """`--task mae`.

    A batch has "images" [B, 3, H, W] on the first stage and "pixels" [B, 3, H, W] on the last: the same normalised and
    augmented images, the latter in fp32 in any precision. Each of the two stages decodes them for itself, from the same
    draws. The mask follows from the samples' keys, in training and in evaluation.
    """

    name = "mae"
    flags = frozenset({"mask_ratio", "decoder_dim", "decoder_depth", "decoder_heads", "norm_pix_loss"})
    refused_flags: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("mixup", "cutmix", "cutmix_minmax"), _NO_LABELS),
        **dict.fromkeys(("smoothing", "bce_loss", "bce_sum", "bce_target_thresh", "num_classes"), _NO_CLASSES),
        **dict.fromkeys(("linear_probe", "class_parallel", "drop"), "its model has no classifier"),
    }
    has_classes = False
    figures = (Figure("loss", "loss", digits=5, higher_is_better=False),)

    model: MaskedAutoencoder

    @classmethod
    def create_model(cls, spec: ModelSpec, config: RunConfig, *, for_training: bool) -> MaskedAutoencoder:
        """As `Task.create_model`."""
        settings = AutoencoderSettings(
            mask_ratio=config.mask_ratio,
            decoder_dim=config.decoder_dim,
            decoder_depth=config.decoder_depth,
            decoder_heads=config.decoder_heads,
            norm_pix_loss=config.norm_pix_loss,
        )
        return create_autoencoder(spec, settings, for_training=for_training)

    def fields(self, *, training: bool) -> tuple[Field, ...]:
        """As `Task.fields`."""
        shape = (3, *self.image.img_size)
        return (
            Field("images", "first", "images", shape),
            Field("pixels", "last", "images", shape, torch.float32),
        )

    def tensor(self, field: Field, micro_batch: MicroBatch, *, training: bool, device: torch.device) -> torch.Tensor:
        """As `Task.tensor`."""
        augment = self.augment if training else None
        return finish_images(micro_batch, self.image, augment, device=device, dtype=field.dtype)

    def loss(self, tp: TensorParallel | None) -> Loss:
        """As `Task.loss`; see `MaskedPatchLoss`."""
        loss = self._patch_loss()
        return lambda prediction, batch: loss(prediction, batch["pixels"], batch["keys"])

    def _patch_loss(self) -> MaskedPatchLoss:
        settings = self.model.settings
        return MaskedPatchLoss(self.model.patch_embed.patch_size, settings.mask_ratio, settings.norm_pix_loss)

    def metrics(self, device: torch.device) -> Metrics:
        """As `Task.metrics`."""
        return MeanLoss(device, self._patch_loss())

    def weight_files(self) -> dict[str, frozenset[str]]:
        """As `Task.weight_files`: the decoder apart, so that what is left is timm's model."""
        return {"decoder": decoder_names(self.model)}


class MeanLoss(Metrics):
    """The mean reconstruction loss over samples, each under the one mask that its key gives it.

    Args:
        device: where the sums are kept.
        loss: of the task.
    """

    def __init__(self, device: torch.device, loss: MaskedPatchLoss) -> None:
        super().__init__(2, device)  # loss, images
        self._loss = loss

    def update(self, outputs: torch.Tensor, batch: Batch) -> None:
        """Predictions fp32 [B, N, P] of N patches."""
        losses = self._loss.per_sample(outputs, batch["pixels"], batch["keys"])
        rows = torch.stack([losses, torch.ones_like(losses)], dim=1).double()
        self.sums += torch.where(batch["valid"][:, None], rows, 0.0).sum(0)

    def compute(self) -> dict[str, float]:
        """As `Metrics.compute`."""
        loss, images = self.sums.tolist()
        return {"loss": loss / max(images, 1), "images": int(images)}
