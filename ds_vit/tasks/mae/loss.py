"""What `--task mae` minimises over the masked patches, and how predictions are shown as images."""

from __future__ import annotations

import torch

from ds_vit.tasks.mae.towers import MaskedAutoencoder, masked_patches, patchify, unpatchify


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
        target = patchify(pixels.float(), self.patch_size)
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
            mean, deviation = self._statistics(patchify(pixels.float(), self.patch_size))
            prediction = prediction * deviation + mean
        return unpatchify(prediction, self.patch_size, tuple(pixels.shape[-2:]))

    def hidden(self, pixels: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Which pixels are masked: bool [B, 1, height, width]."""
        size, (p, q) = tuple(pixels.shape[-2:]), self.patch_size
        masked = masked_patches(keys, (size[0] // p) * (size[1] // q), self.mask_ratio)
        return unpatchify(masked.unsqueeze(-1).expand(-1, -1, p * q), self.patch_size, size)

    def __call__(self, prediction: torch.Tensor, pixels: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """The mean of `per_sample`, a fp32 scalar."""
        return self.per_sample(prediction, pixels, keys).mean()
