"""Masked autoencoding: a timm ViT on a keyed quarter of the patches, and a decoder that predicts the others.

He et al. 2022, "Masked Autoencoders Are Scalable Vision Learners", https://arxiv.org/abs/2111.06377, and its code,
whose names the decoder's parameters have (`decoder_embed`, `mask_token`, `decoder_blocks.<i>`, `decoder_norm`,
`decoder_pred`); the encoder's are timm's. The decoder is made of timm's own `Block`.

The mask is patch dropout that is on in evaluation too (`KeyedPatchDropout`). Which patches stay is a pure function of
the sample's key: the embedding, the rotary tables, the decoder and the loss each compute it, and pipeline stages
exchange no mask.

Shapes: B samples, S tokens, D width, N patches, P numbers of a patch (its height * width * channels).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from timm.layers import LayerNorm, PatchEmbed
from timm.models import Eva
from timm.models.vision_transformer import Block
from torch import nn

from ds_vit.fault_tolerance.errors import UserError
from ds_vit.models.keyed_drop import KeyedPatchDropout, mix_in, sample_keys
from ds_vit.models.layers import BlockLayer, Layer, TokenCount, encoder_layers, part_of_model, take_apart
from ds_vit.models.zoo import ModelSpec, TimmViT, create_model, require_all_patches
from ds_vit.parallel.tensor.collectives import split_tokens
from ds_vit.parallel.tensor.shard import TOKEN_SHARING, Joining
from ds_vit.tasks.mae.flags import MaskedAutoencoderSettings


def _masking(mask_ratio: float, num_prefix_tokens: int = 0, with_indices: bool = False) -> KeyedPatchDropout:
    """The mask as a module. Kept patches stay in the order of their noise, as in the paper's code."""
    return KeyedPatchDropout(
        "mask", mask_ratio, num_prefix_tokens, ordered=False, with_indices=with_indices, always=True
    )


def masked_patches(keys: torch.Tensor, num_patches: int, mask_ratio: float) -> torch.Tensor:
    """The patches of each sample that the encoder does not see: bool [B, N], the same number in every row.

    All but the int(N * (1 - mask_ratio)) with the least noise, which is drawn from (sample key, "mask", patch).

    Args:
        keys: int64 sample keys [B].
        num_patches: N.
        mask_ratio: --mask-ratio.
    """
    masking = _masking(mask_ratio)
    with sample_keys([masking], keys):
        kept = masking.keep_indices(num_patches)
    return torch.ones(len(keys), num_patches, dtype=torch.bool, device=keys.device).scatter(1, kept, False)


def unpatchify(patches: torch.Tensor, patch_size: tuple[int, int], img_size: tuple[int, int]) -> torch.Tensor:
    """The inverse of timm's `batch_patchify`: [B, N, P] -> [B, C, height, width]; a patch's channels are innermost."""
    (height, width), (p, q) = img_size, patch_size
    channels = patches.shape[-1] // (p * q)
    parts = patches.reshape(len(patches), height // p, width // q, p, q, channels)
    return parts.permute(0, 5, 1, 3, 2, 4).reshape(len(patches), channels, height, width)


def sine_cosine_positions(grid_size: tuple[int, int], width: int, num_prefix_tokens: int) -> torch.Tensor:
    """The paper's fixed position embedding, float32 [1, num_prefix_tokens + N, width]; that of prefix tokens is zero.

    A quarter of the features each: sines and cosines of the column, sines and cosines of the row (the order of the
    paper's code, in which "h" is the column).

    Args:
        grid_size: patches in (height, width).
        width: a multiple of 4.
        num_prefix_tokens: class and register tokens, before the patches.
    """
    quarter = width // 4
    frequencies = 10000.0 ** -(torch.arange(quarter, dtype=torch.float64) / quarter)
    rows, columns = (torch.arange(size, dtype=torch.float64) for size in grid_size)
    row, column = (place.flatten().outer(frequencies) for place in torch.meshgrid(rows, columns, indexing="ij"))
    table = torch.cat((column.sin(), column.cos(), row.sin(), row.cos()), dim=1)
    return torch.cat((torch.zeros(num_prefix_tokens, width), table.float())).unsqueeze(0)


class MaskedAutoencoder(nn.Module):
    """Mixed in before the class of a timm ViT by `create_autoencoder`: the description of a masked autoencoder.

    The encoder's members keep their timm names; the decoder's are added. What is not trained has
    `requires_grad` off: the encoder's fixed positions, and attention pooling, which pretraining does not reach and
    which is there so that timm can load the encoder as it is.

    Attributes:
        settings: of masked autoencoding.
    """

    settings: MaskedAutoencoderSettings

    def add_decoder(self, settings: MaskedAutoencoderSettings) -> None:
        """Add the decoder to a model from `create_model`, and freeze what is not trained."""
        self.settings = settings
        width = settings.decoder_dim
        eps = next(module.eps for module in self.modules() if hasattr(module, "eps"))
        norm = partial(LayerNorm, eps=eps)
        self.decoder_embed = nn.Linear(self.embed_dim, width)
        self.mask_token = nn.Parameter(torch.empty(1, 1, width))
        self.decoder_blocks = nn.ModuleList(
            Block(width, settings.decoder_heads, mlp_ratio=4.0, qkv_bias=True, norm_layer=norm)
            for _ in range(settings.decoder_depth)
        )
        self.decoder_norm = norm(width)
        numbers = self.patch_embed.patch_size[0] * self.patch_embed.patch_size[1] * self.in_chans
        self.decoder_pred = nn.Linear(width, numbers)
        if self.pos_embed is not None:
            self.pos_embed.requires_grad_(False)
        if self.attn_pool is not None:
            self.attn_pool.requires_grad_(False)

    def init_weights(self, needs_reset: bool = True) -> None:
        """timm's initial values for the encoder; the paper's for its positions and for the decoder."""
        super().init_weights(needs_reset=needs_reset)
        if self.pos_embed is not None:
            _, tokens, width = self.pos_embed.shape
            grid = self.patch_embed.grid_size
            with torch.no_grad():
                self.pos_embed.copy_(sine_cosine_positions(grid, width, tokens - self.patch_embed.num_patches))
        nn.init.normal_(self.mask_token, std=0.02)
        for part in (self.decoder_embed, self.decoder_blocks, self.decoder_norm, self.decoder_pred):
            for module in part.modules():
                if isinstance(module, nn.Linear):
                    nn.init.xavier_uniform_(module.weight)
                    nn.init.zeros_(module.bias)
                elif isinstance(module, nn.LayerNorm):
                    module.reset_parameters()


def _check_sizes(model: TimmViT, spec: ModelSpec, settings: MaskedAutoencoderSettings) -> None:
    """Reject a decoder whose numbers are incompatible, and an encoder whose patches cannot be masked or predicted."""
    width, heads = settings.decoder_dim, settings.decoder_heads
    if width % heads or width % 4:
        step = heads if heads % 4 == 0 else heads * 4
        raise UserError(
            f"--decoder-dim {width} must be a multiple of --decoder-heads {heads}, and of 4 for its sine-cosine "
            f"positions; the nearest is {max(step, round(width / step) * step)}"
        )
    embed = model.patch_embed
    if not isinstance(embed, PatchEmbed):
        raise UserError(
            f"model {spec.name!r} has a convolutional stem ({type(embed).__name__}), through which masked patches "
            "would leak into those that are kept; take a name whose patches do not overlap, as vit_base_patch16_224"
        )
    require_all_patches(model, spec.name)
    patches = embed.num_patches
    kept = int(patches * (1.0 - settings.mask_ratio))
    if not 0 < kept < patches:
        raise UserError(
            f"--mask-ratio {settings.mask_ratio} keeps {kept} of {patches} patches of {spec.name!r}; at least one must "
            "be kept and one masked"
        )
    if model.pos_embed is not None and model.embed_dim % 4:
        raise UserError(f"width {model.embed_dim} of {spec.name!r} must be a multiple of 4 for fixed positions")


def create_autoencoder(
    spec: ModelSpec, settings: MaskedAutoencoderSettings, *, for_training: bool = True
) -> MaskedAutoencoder:
    """The description of a masked autoencoder, on the meta device its structure, names and shapes without memory.

    `take_apart`, `initialise`, `layer_flops`, `check_degree` and `shard_layer` accept it and its layers like timm's.

    Args:
        spec: the encoder. Its number of classes is ignored: there is no classifier.
        settings: of mask and decoder.
        for_training: as in `create_model`.

    Raises:
        UserError: as `create_model`; a convolutional stem, patch dropout, pixels outside all patches, a mask that
            leaves nothing on one side, or a width that the decoder's heads or positions do not divide.
    """
    model = create_model(replace(spec, num_classes=0), for_training=for_training, classifier=False)
    _check_sizes(model, spec, settings)
    mix_in(model, MaskedAutoencoder)
    with torch.device("meta"):
        model.add_decoder(settings)
    return model


class BridgeLayer(Layer):
    """From the encoder to the decoder: final norm, projection to the decoder's width, mask tokens, positions.

    The features of an image are the mean of its patch tokens after the norm, without a mask.

    `num_tokens` counts its input; its output has all patches. A model that norms after pooling (`fc_norm`) has that
    norm here. Attention pooling is kept, unused.
    """

    def __init__(self, model: MaskedAutoencoder, masking: KeyedPatchDropout) -> None:
        """Args: a copy that `take_apart` made, and the mask that its embedding has too."""
        super().__init__()
        self.norm = model.norm
        self.attn_pool = model.attn_pool
        self.fc_norm = model.fc_norm
        self.decoder_embed = model.decoder_embed
        self.mask_token = model.mask_token
        self.masking = masking
        self.num_prefix_tokens = model.num_prefix_tokens
        self.num_patches = model.patch_embed.num_patches
        self.grid_size = model.patch_embed.grid_size
        positions = model.mask_token.new_empty(
            1, self.num_prefix_tokens + self.num_patches, model.settings.decoder_dim, requires_grad=False
        )
        self.register_buffer("positions", positions, persistent=False)
        if not positions.is_meta:
            self.init_non_persistent_buffers()

    def init_non_persistent_buffers(self) -> None:
        """Compute the decoder's fixed positions (timm's name for this, which `initialise` calls)."""
        self.positions.copy_(sine_cosine_positions(self.grid_size, self.positions.shape[-1], self.num_prefix_tokens))

    def fill_in(self, tokens: torch.Tensor) -> torch.Tensor:
        """Prefix tokens and kept patches [B, S, decoder D] -> prefix tokens and all patches, in their places."""
        dtype = self.mask_token.dtype  # fp32 under autocast: the residual stream is as wide as the encoder's
        prefix, kept = tokens.to(dtype).tensor_split((self.num_prefix_tokens,), dim=1)
        places = self.masking.keep_indices(self.num_patches)
        assert places is not None, "the mask is lifted, and features go by the decoder"
        places = places.unsqueeze(-1).expand_as(kept)
        patches = self.mask_token.expand(len(kept), self.num_patches, -1).scatter(1, places, kept)
        return torch.cat((prefix, patches), dim=1) + self.positions.to(dtype)

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """(tokens [B, S kept, D], keys int64 [B], ...) -> (tokens [B, S, decoder D], keys)."""
        tokens, keys, *_ = inputs
        tokens = self.fc_norm(self.norm(tokens))
        if self.gives_features:
            return tokens[:, self.num_prefix_tokens :].mean(dim=1), keys
        return self.fill_in(self.decoder_embed(tokens)), keys


class DecoderBlockLayer(BlockLayer):
    """One timm block of the decoder, `decoder_blocks.<index>.…`; it does not change features."""

    stack = "decoder_blocks"

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """As `BlockLayer.forward`."""
        return inputs if self.gives_features else super().forward(inputs)


class PixelHeadLayer(Layer):
    """The end of the decoder: tokens to the pixels of each patch."""

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """(tokens [B, S, decoder D], keys int64 [B], ...) -> [B, N, P]; masked and kept patches alike."""
        if self.gives_features:
            return inputs[0]
        return self.decoder_pred(self.decoder_norm(inputs[0][:, self.num_prefix_tokens :]))


class _JoiningPixelHead(Joining, PixelHeadLayer):
    def forward(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return PixelHeadLayer.forward(self, inputs) if self.gives_features else super().forward(inputs)


class _SharingBridge(Joining, BridgeLayer):
    def forward(self, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        tokens, *rest = super().forward(inputs)
        return tokens if self.gives_features else split_tokens(tokens, self.tp), *rest


TOKEN_SHARING[PixelHeadLayer] = _JoiningPixelHead
TOKEN_SHARING[BridgeLayer] = _SharingBridge


@take_apart.register
def _(model: MaskedAutoencoder) -> list[Layer]:
    """An `EmbedLayer` that masks, a `BlockLayer` for each block, a `BridgeLayer`, a `DecoderBlockLayer` for each of the
    decoder's, a `PixelHeadLayer`; depth + decoder depth + 3 layers."""
    masking = _masking(model.settings.mask_ratio, model.num_prefix_tokens, with_indices=isinstance(model, Eva))
    model.patch_drop = masking
    encoder, bridge = encoder_layers(model), BridgeLayer(model, masking)
    bridge.num_tokens = encoder[-1].num_tokens
    decoder = [
        *(DecoderBlockLayer(index, block) for index, block in enumerate(model.decoder_blocks)),
        part_of_model(model, PixelHeadLayer, ("decoder_norm", "decoder_pred")),
    ]
    for layer in decoder:
        layer.num_tokens = TokenCount(model.num_prefix_tokens, model.patch_embed.num_patches)
    return [*encoder, bridge, *decoder]
