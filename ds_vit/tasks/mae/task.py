"""Masked autoencoding: the pixels of the patches that the model was not shown, no labels (He et al. 2022)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import ClassVar

import torch
import torch.nn.functional as F
from timm.models.naflexvit import batch_patchify
from torch import nn
from torchvision.utils import make_grid

from ds_vit.config.run_folder import RunFolder
from ds_vit.config.schema import RunConfig
from ds_vit.data.field import Derived, Field
from ds_vit.data.sampler import evaluation_keys
from ds_vit.data.settings import ImageConfig
from ds_vit.models.zoo import ModelSpec
from ds_vit.parallel.tensor.collectives import TensorParallel
from ds_vit.tasks.mae.flags import SETTINGS
from ds_vit.tasks.mae.towers import MaskedAutoencoder, create_autoencoder, masked_patches, unpatchify
from ds_vit.tasks.metrics import Batch, Figure, Means, Metrics, spread
from ds_vit.tasks.panels import Panel, pictures
from ds_vit.tasks.task import ChainTask, Loss

_NO_LABELS = "an image is its own target, and there are no labels to mix"
_PANEL = 96  # pixels across, at least half of it: smaller images are enlarged in the picture


class MaskedAutoencoding(ChainTask):
    """`--task mae`.

    A batch has "images" [B, 3, H, W] on the first stage and "pixels" [B, 3, H, W] on the last: the same normalised and
    augmented images, the latter in fp32 in any precision. Each of the two stages decodes them for itself, from the same
    draws. The mask follows from the samples' keys, in training and in evaluation.
    """

    name = "mae"
    not_replayed = ""
    settings = SETTINGS
    refused_flags: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("mixup", "cutmix", "cutmix_minmax"), _NO_LABELS),
        "drop": "its model has no classifier",
        **dict.fromkeys(("img_size_schedule", "train_img_sizes"), "its decoder's positions are of one size"),
    }
    has_classes = False
    parts: ClassVar = {"decoder_": "decoder", "mask_token": "mask token"}
    separate_files: ClassVar = {"decoder": (*parts,)}
    tower_files: ClassVar = {"decoder": "decoder"}
    figures = (Figure("loss", "loss", digits=5, higher_is_better=False),)

    model: MaskedAutoencoder

    @classmethod
    def create_model(cls, spec: ModelSpec, config: RunConfig, *, for_training: bool) -> MaskedAutoencoder:
        """As `Task.create_model`."""
        return create_autoencoder(spec, config, for_training=for_training)

    def supports(self, model: nn.Module) -> str | None:
        """As `Task.supports`; layer decay is refused, for the decoder has no place among the encoder's layers."""
        if self.config.layer_decay not in (None, 1.0):
            return (
                f"--layer-decay {self.config.layer_decay} is for fine-tuning a pretrained encoder: it has no rate for "
                "the decoder of --task mae, and the paper's pretraining has none; drop it"
            )
        return super().supports(model)

    def fields(self, *, training: bool) -> tuple[Field, ...]:
        """As `Task.fields`."""
        images = self.images(training=training)
        return images, Derived("pixels", images, dtype=torch.float32, stage="last")

    def loss(self, tp: TensorParallel | None) -> Loss:
        """As `Task.loss`; see `MaskedPatchLoss`."""
        loss = MaskedPatchLoss(self.model)
        return lambda prediction, batch: loss(prediction, batch["pixels"], batch["keys"])

    def metrics(self, device: torch.device) -> Metrics:
        """As `Task.metrics`."""
        return Reconstruction(device, MaskedPatchLoss(self.model), self.image)

    @classmethod
    def panels(cls, folder: RunFolder) -> Mapping[str, Sequence[Panel]]:
        """As `Task.panels`: the pictures of the reconstruction."""
        title = "Images, their visible patches, the prediction, and both together"
        return {"Images": pictures(folder, {"reconstruction": title})}


class MaskedPatchLoss:
    """The loss of masked autoencoding: mean squared error over the masked patches, in fp32 (He et al. 2022).

    Every sample has as many masked patches, so it is a plain mean over samples, and micro-batches add up exactly.

    Args:
        model: its patches and its --mask-ratio. With --norm-pix-loss the target of a patch is its pixels less their
            mean, over their standard deviation.
    """

    def __init__(self, model: MaskedAutoencoder) -> None:
        self.patch_size = model.patch_embed.patch_size
        self.mask_ratio, self.norm_pix_loss = model.settings.mask_ratio, model.settings.norm_pix_loss

    def per_sample(self, prediction: torch.Tensor, pixels: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """The loss of each sample, fp32 [B].

        Args:
            prediction: [B, N, P] of N patches.
            pixels: [B, C, height, width], as the model gets them.
            keys: int64 sample keys [B], from which the model drew its mask.
        """
        target, _ = batch_patchify(pixels.float(), self.patch_size)
        if self.norm_pix_loss:
            mean, deviation = self._statistics(target)
            target = (target - mean) / deviation
        error = (prediction.float() - target).square().mean(dim=-1)
        masked = masked_patches(keys, error.shape[1], self.mask_ratio).to(error.dtype)
        return (error * masked).sum(dim=1) / masked.sum(dim=1)

    @staticmethod
    def _statistics(patches: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        variance, mean = torch.var_mean(patches, dim=-1, keepdim=True)
        return mean, (variance + 1e-6).sqrt()

    def painted(self, prediction: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
        """The prediction as images [B, C, height, width] in the units of `pixels`.

        With `norm_pix_loss` each patch is given the mean and deviation of the true one.
        """
        prediction = prediction.float()
        if self.norm_pix_loss:
            mean, deviation = self._statistics(batch_patchify(pixels.float(), self.patch_size)[0])
            prediction = prediction * deviation + mean
        return unpatchify(prediction, self.patch_size, tuple(pixels.shape[-2:]))

    def hidden(self, pixels: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """The masked pixels: bool [B, 1, height, width]."""
        size, (p, q) = tuple(pixels.shape[-2:]), self.patch_size
        masked = masked_patches(keys, (size[0] // p) * (size[1] // q), self.mask_ratio)
        return unpatchify(masked.unsqueeze(-1).expand(-1, -1, p * q), self.patch_size, size)

    def __call__(self, prediction: torch.Tensor, pixels: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """The mean of `per_sample`, a fp32 scalar."""
        return self.per_sample(prediction, pixels, keys).mean()


class Reconstruction(Means):
    """The mean reconstruction loss over samples, each under the one mask that its key gives it; a picture of a few.

    Args:
        device: where the sums are kept.
        loss: of the task.
        image: size and normalisation.
    """

    num_shown = 8

    def __init__(self, device: torch.device, loss: MaskedPatchLoss, image: ImageConfig) -> None:
        super().__init__(device, "loss")
        self._loss = loss
        self._image = image
        # An image and its prediction.
        self.pixels: torch.Tensor = torch.zeros(self.num_shown, 2, 3, *image.img_size, device=device)

    @cached_property
    def _shown(self) -> torch.Tensor:
        """The keys of the samples in the picture, from all over the split: a folder's images lie class by class."""
        return torch.from_numpy(evaluation_keys(spread(self.num_shown, self.num_samples))).to(self.sums.device)

    def update(self, outputs: torch.Tensor, batch: Batch) -> None:
        """Predictions fp32 [B, N, P] of N patches."""
        self.count([self._loss.per_sample(outputs, batch["pixels"], batch["keys"])], batch)
        places, rows = ((self._shown[:, None] == batch["keys"]) & batch["valid"]).nonzero(as_tuple=True)
        images = batch["pixels"][rows]
        self.pixels[places] = torch.stack((images, self._loss.painted(outputs[rows], images)), dim=1)

    def pictures(self) -> dict[str, torch.Tensor]:
        """Original, masked, predicted and composite image of each sample, a row each."""
        keys = self._shown
        mean, std = (self.pixels.new_tensor(values).view(-1, 1, 1) for values in (self._image.mean, self._image.std))
        image, painted = (self.pixels[: len(keys)] * std + mean).clamp(0.0, 1.0).unbind(1)
        hidden = self._loss.hidden(image, keys)
        seen = torch.where(hidden, 0.5, image)
        panels = torch.stack((image, seen, painted, torch.where(hidden, painted, image)), dim=1).flatten(0, 1)
        enlarged = F.interpolate(panels, scale_factor=max(1, _PANEL // panels.shape[-1]))
        grid = make_grid(enlarged, nrow=4, padding=4, pad_value=1.0)
        return {"reconstruction": (grid * 255.0).round().to(torch.uint8)}
