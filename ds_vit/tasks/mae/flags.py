"""The flags of `--task mae`."""

from __future__ import annotations

from ds_vit.config.flag import RECORDED, Blocks, Settings, Share, Width, flag


class MaskedAutoencoderSettings(Settings, section="model", scope=RECORDED):
    """The masks and the decoder of a masked autoencoder."""

    mask_ratio: Share = flag(0.75, "share of the patches that are masked")
    decoder_dim: Width = flag(512, "width of the decoder")
    decoder_depth: Blocks = flag(8, "blocks of the decoder")
    decoder_heads: Blocks = flag(16, "attention heads of the decoder")
    norm_pix_loss: bool = flag(False, "predict pixels normalised per patch")


SETTINGS = (MaskedAutoencoderSettings,)
