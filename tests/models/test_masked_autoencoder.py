"""Masked autoencoding: transformers' ViTMAE number by number, every kind of encoder, stages, initial values, costs."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace

import pytest
import timm
import torch
from autoencoders import ENCODERS, SAMPLES, SETTINGS, autoencoder, batch_of, layers_of, spec_of
from torch import nn
from vits import timm_state_dict

from ds_vit import randomness
from ds_vit.engine.layer_norms import layers_of as health_layers
from ds_vit.models.keyed_drop import sample_keys
from ds_vit.models.keyed_init import initialise
from ds_vit.models.layers import BlockLayer, EmbedLayer, take_apart
from ds_vit.models.param_groups import frozen_names, no_weight_decay_names
from ds_vit.models.sequential import SequentialViT, timm_names
from ds_vit.models.zoo import ModelSpec, create_model
from ds_vit.optim.rate_factors import layer_scales
from ds_vit.planner.counting import count_flops, kept_by_layers, layer_flops
from ds_vit.planner.pipeline import balance
from ds_vit.tasks.mae.flags import MaskedAutoencoderSettings
from ds_vit.tasks.mae.task import MaskedAutoencoding, MaskedPatchLoss
from ds_vit.tasks.mae.towers import (
    BridgeLayer,
    DecoderBlockLayer,
    PixelHeadLayer,
    create_autoencoder,
    masked_patches,
)

DECODER = (*MaskedAutoencoding.parts,)
# What to replace in the name of one of our parameters for transformers'.
_THEIR_NAMES = {
    r"^blocks\.": "vit.layers.",
    r"^decoder_blocks\.": "decoder.decoder_layers.",
    r"\.norm1\.": ".layernorm_before.",
    r"\.norm2\.": ".layernorm_after.",
    r"attn\.proj": "attention.o_proj",
    r"^cls_token": "vit.embeddings.cls_token",
    r"^pos_embed": "vit.embeddings.position_embeddings",
    r"^patch_embed\.proj": "vit.embeddings.patch_embeddings.projection",
    r"^norm\.": "vit.layernorm.",
    r"^(?=mask_token|decoder_)": "decoder.",
}


def their_names(name: str) -> list[str]:
    """The names in transformers of what one of our parameters holds, packed along its first dimension."""
    for ours, theirs in _THEIR_NAMES.items():
        name = re.sub(ours, theirs, name)
    return [name.replace("attn.qkv", f"attention.{part}_proj") for part in ("qkv" if "attn.qkv" in name else "q")]


def their_model(model, layers):
    """transformers' model with our weights, and positions of its own."""
    transformers = pytest.importorskip("transformers")
    from transformers.models.vit_mae import modeling_vit_mae as theirs

    settings = model.settings
    config = transformers.ViTMAEConfig(
        hidden_size=model.embed_dim,
        num_hidden_layers=len(model.blocks),
        num_attention_heads=model.blocks[0].attn.num_heads,
        intermediate_size=4 * model.embed_dim,
        layer_norm_eps=model.norm.eps,
        image_size=model.patch_embed.img_size[0],
        patch_size=model.patch_embed.patch_size[0],
        decoder_hidden_size=settings.decoder_dim,
        decoder_num_hidden_layers=settings.decoder_depth,
        decoder_num_attention_heads=settings.decoder_heads,
        decoder_intermediate_size=4 * settings.decoder_dim,
        mask_ratio=settings.mask_ratio,
        norm_pix_loss=settings.norm_pix_loss,
    )
    reference = theirs.ViTMAEForPreTraining(config)
    parameters = dict(reference.named_parameters())
    given = {"vit.embeddings.position_embeddings", "decoder.decoder_pos_embed"}
    with torch.no_grad():
        for name, tensor in timm_state_dict(nn.ModuleList(layers)).items():
            names = their_names(name)
            for other, part in zip(names, tensor.chunk(len(names)), strict=True):
                if other not in given:
                    parameters[other].copy_(part)
        for name in given:
            grid, width = model.patch_embed.grid_size, parameters[name].shape[-1]
            table = theirs.build_2d_sinusoidal_position_embedding(*grid, width, cls_token=True)
            parameters[name].copy_(table.roll(width // 2, dims=-1))  # the paper's order of row and column
    return reference.train()


def noise_of(keys: torch.Tensor, num_patches: int) -> torch.Tensor:
    """The draws [B, N] by which patches are masked."""
    return randomness.uniform_of(randomness.mix_tensor(keys, randomness.name_key("mask")), (num_patches,))


def relative_errors(norm_pix_loss: bool) -> dict[str, float]:
    """The largest difference from transformers over the largest value: of the loss and of every gradient."""
    settings = SETTINGS.model_copy(update={"norm_pix_loss": norm_pix_loss})
    model = create_autoencoder(spec_of("vit_tiny_patch16_224", embed_dim=96, num_heads=3), settings)
    layers = layers_of(model)
    ours, theirs = SequentialViT(layers), their_model(model, layers)
    pixels, keys = batch_of(model)
    noise = noise_of(keys, model.patch_embed.num_patches)
    loss = MaskedPatchLoss(model)(ours(pixels, keys), pixels, keys)
    loss.backward()
    expected = theirs(pixels, noise=noise).loss
    expected.backward()
    errors = {"loss": abs(loss.item() - expected.item()) / expected.item()}
    gradients = {name: p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    names, compared = timm_names(ours), set()
    for local, parameter in ours.named_parameters():
        if not parameter.requires_grad:
            continue
        parts = their_names(names[local])
        compared |= set(parts)
        grad = torch.cat([gradients[part] for part in parts])
        if names[local].endswith("qkv.bias"):  # softmax does not feel the key's: zero but for rounding
            grad, own = (torch.cat([g.chunk(3)[i] for i in (0, 2)]) for g in (grad, parameter.grad))
        else:
            own = parameter.grad
        assert float(grad.abs().max()) > 1e-7, f"{names[local]} has no gradient: it would hide anything"
        errors[names[local]] = float((own - grad).abs().max() / grad.abs().max())
    assert compared == set(gradients), "a parameter of theirs that nothing was compared with"
    return errors


@pytest.mark.parametrize("norm_pix_loss", [False, True], ids=["pixels", "normalised"])
def test_loss_and_every_gradient_are_those_of_transformers(norm_pix_loss):
    """Another mask, order of pixels, position, norm or scale than the paper's."""
    errors = relative_errors(norm_pix_loss)
    assert max(errors.values()) < 1e-5, {name: error for name, error in errors.items() if error >= 1e-5}


def test_the_mask_is_a_function_of_the_key():
    """A mask that follows the place in the batch, another count than the paper's, a patch that is never masked."""
    keys = torch.arange(400) * 7919
    mask = masked_patches(keys, 196, 0.75)
    assert (mask.sum(dim=1) == 147).all()
    assert torch.equal(mask.flip(0), masked_patches(keys.flip(0), 196, 0.75))
    shares = mask.float().mean(dim=0)
    assert float((shares - 0.75).abs().max()) < 5 * math.sqrt(0.75 * 0.25 / 400)
    # By the paper's way, from the noise itself.
    ranks = noise_of(keys, 196).argsort(dim=1, stable=True).argsort(dim=1)
    assert torch.equal(mask, ranks >= 49)
    for ratio, patches in ((0.6, 196), (0.9, 256), (0.3, 10)):
        assert int((~masked_patches(keys[:1], patches, ratio)).sum()) == int(patches * (1 - ratio))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", ENCODERS)
def test_every_kind_of_encoder(kind):
    """Shapes between the layers, gradients to all that is trained, and an encoder that timm does not load as it is."""
    model = autoencoder(kind)
    layers = layers_of(model)
    pixels, keys = batch_of(model)
    prefix, patches = model.num_prefix_tokens, model.patch_embed.num_patches
    value = (pixels, keys)
    for layer in layers[:-1]:
        with sample_keys(layer.keyed_drops, keys):
            value = layer(value)
        short = isinstance(layer, EmbedLayer) or type(layer) is BlockLayer
        assert value[0].shape[1] == prefix + (patches // 4 if short else patches)
        assert torch.equal(value[1], keys)
        assert layer.num_tokens.count(training=True) == layer.num_tokens.count(training=False)
        # What crosses a stage: no float tensor without a gradient.
        assert all(tensor.requires_grad for tensor in value if tensor.is_floating_point())
    for layer, following in itertools.pairwise(layers):  # a layer's count is that of what it is given
        if not isinstance(layer, BridgeLayer):
            assert layer.num_tokens == following.num_tokens
    prediction = layers[-1](value)
    numbers = 3 * model.patch_embed.patch_size[0] ** 2
    assert prediction.shape == (SAMPLES, patches, numbers)
    MaskedPatchLoss(model)(prediction, pixels, keys).backward()
    fixed = frozen_names(model)
    assert {name.split(".")[0] for name in fixed} <= {"pos_embed", "attn_pool"}
    assert ("pos_embed" in fixed) == (model.pos_embed is not None)
    for layer in layers:
        for name, parameter in layer.named_parameters():
            assert (name in fixed) == (parameter.grad is None), name
            if parameter.grad is not None:
                assert parameter.grad.isfinite().all()
                assert float(parameter.grad.abs().max()) > 0, name
    state = timm_state_dict(nn.ModuleList(layers))
    spec = spec_of(ENCODERS[kind])
    encoder = timm.create_model(spec.name, num_classes=0, img_size=spec.img_size, **spec.model_kwargs)
    encoder.load_state_dict({name: state[name] for name in state if not name.startswith(DECODER)}, strict=True)
    if model.pos_embed is not None:
        assert encoder.pos_embed.std() > 0.1  # the sines', not timm's 0.02


def test_evaluation_masks_too():
    """A validation loss of an encoder that sees everything."""
    model = autoencoder("Eva with rotary tables")
    whole = SequentialViT(layers_of(model))
    pixels, keys = batch_of(model)
    with torch.no_grad():
        assert torch.equal(whole.train()(pixels, keys), whole.eval()(pixels, keys))
        with pytest.raises(ValueError, match="'mask' is random: give the model the samples' keys"):
            whole(pixels)


def test_the_loss_is_a_mean_over_samples():
    """A mean over patches that micro-batches would weigh otherwise."""
    model = autoencoder("class token", SETTINGS.model_copy(update={"norm_pix_loss": True}))
    pixels, keys = batch_of(model)
    prediction = SequentialViT(layers_of(model))(pixels, keys)
    loss = MaskedPatchLoss(model)
    each = loss.per_sample(prediction, pixels, keys)
    assert each.shape == (SAMPLES,)
    alone = [loss(prediction[i : i + 1], pixels[i : i + 1], keys[i : i + 1]) for i in range(SAMPLES)]
    torch.testing.assert_close(each, torch.stack(alone))
    torch.testing.assert_close(loss(prediction, pixels, keys), each.mean())
    # In fp32, whatever the model computes in; kept patches count for nothing.
    assert loss(prediction.bfloat16(), pixels.bfloat16(), keys).dtype == torch.float32
    mask = masked_patches(keys, prediction.shape[1], SETTINGS.mask_ratio)
    shouted = torch.where(mask.unsqueeze(-1), prediction, torch.tensor(1e6))
    assert torch.equal(loss.per_sample(shouted, pixels, keys), each)


def test_initial_values():
    """An encoder that starts elsewhere than timm's, a decoder that starts elsewhere than the paper's, or by rank."""
    model = autoencoder("class token")
    values = timm_state_dict(nn.ModuleList(layers_of(model, shaken=False)))
    plain = create_model(replace(spec_of("vit_tiny_patch16_224"), num_classes=0), for_training=False)
    layers = take_apart(plain)
    initialise(plain, layers, seed=0, device="cpu")
    for name, tensor in timm_state_dict(nn.ModuleList(layers)).items():
        assert torch.equal(values[name], tensor) == (name != "pos_embed"), name
    assert (values["pos_embed"][0, 0] == 0).all()
    for name in (name for name in values if name.startswith(DECODER)):
        tensor = values[name]
        if name == "mask_token":
            assert 0.01 < float(tensor.std()) < 0.03
        elif tensor.ndim == 2:
            bound = math.sqrt(6 / sum(tensor.shape))
            assert 0.95 * bound < float(tensor.abs().max()) <= bound, name
            assert float(tensor.std()) == pytest.approx(bound / math.sqrt(3), rel=0.1)
        else:
            assert (tensor == float("norm" in name and name.endswith("weight"))).all(), name
    assert not torch.equal(values["decoder_blocks.0.attn.qkv.weight"], values["decoder_blocks.1.attn.qkv.weight"])
    other = timm_state_dict(nn.ModuleList(layers_of(model, shaken=False, seed=1)))
    assert not torch.equal(values["decoder_pred.weight"], other["decoder_pred.weight"])
    assert all(parameter.is_meta for parameter in model.parameters())


def test_costs_of_a_short_encoder_and_a_full_decoder():
    """Stages balanced as if the encoder saw every patch."""
    settings = MaskedAutoencoderSettings(decoder_dim=64, decoder_depth=4, decoder_heads=4)
    spec = ModelSpec("vit_base_patch16_224", model_kwargs={"embed_dim": 96, "num_heads": 3, "depth": 4})
    model = create_autoencoder(spec, settings)

    def block(tokens, width):
        return 2 * tokens * 12 * width**2 + 4 * tokens**2 * width

    expected = [
        2 * 196 * 768 * 96,
        *[block(1 + 49, 96)] * 4,
        2 * 50 * 96 * 64,
        *[block(1 + 196, 64)] * 4,
        2 * 196 * 64 * 768,
    ]
    layers = take_apart(model)
    flops, kept = layer_flops(layers), [layer.bytes for layer in kept_by_layers(layers)]
    assert flops == expected
    assert count_flops(model).forward == sum(expected)
    assert kept[6] > 2 * kept[1]
    bounds = balance(flops, kept, 2)
    assert bounds[1] > 6, "the first half of the layers does a quarter of the work"


def test_what_goes_by_names():
    """Weight decay, layer-wise decay and the health of layers that take the decoder for something else."""
    model = autoencoder("class token")
    names = [name for name, _ in model.named_parameters()]
    undecayed = no_weight_decay_names(model)
    assert {"mask_token", "cls_token", "decoder_pred.bias", "decoder_norm.weight"} <= undecayed
    assert not {"decoder_pred.weight", "decoder_embed.weight"} & undecayed
    layers = health_layers(names)
    assert list(dict.fromkeys(layers.values())) == [
        *("embed", "blocks.0", "blocks.1", "head"),
        *("decoder_embed", "decoder_blocks.0", "decoder_blocks.1"),
    ]
    assert layers["mask_token"] == "decoder_embed"
    assert layers["norm.weight"] == layers["decoder_pred.bias"] == "head"
    scales = layer_scales(model, 0.5)
    assert {scales[name] for name in scales if name.startswith(DECODER)} == {1.0}
    # As far from the decoder as from a classifier.
    classifier = layer_scales(create_model(spec_of("vit_tiny_patch16_224"), for_training=False), 0.5)
    assert all(scales[name] == classifier[name] for name in scales if name in classifier)
    kinds = [type(layer) for layer in take_apart(model)[1:]]
    assert kinds == [BlockLayer, BlockLayer, BridgeLayer, DecoderBlockLayer, DecoderBlockLayer, PixelHeadLayer]


def test_freezing():
    """A linear probe of a model without a classifier; a frozen block that makes the positions trained again."""
    model = autoencoder("class token")
    assert {"pos_embed", "blocks.0.norm1.weight"} <= frozen_names(model, ["blocks.0"])
    with pytest.raises(ValueError, match="linear probing trains only the classifier, and this model has none"):
        frozen_names(model, linear_probe=True)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"decoder_dim": 500}, "--decoder-dim 500 must be a multiple of --decoder-heads 16, .* the nearest is 496"),
        ({"decoder_dim": 30, "decoder_heads": 3}, "--decoder-dim 30 .* the nearest is 24"),
    ],
)
def test_settings_that_do_not_fit(settings, message):
    """A decoder that fails in a reshape; a nearest width that is refused too."""
    with pytest.raises(ValueError, match=message) as error:
        autoencoder("class token", MaskedAutoencoderSettings(**settings))
    autoencoder(
        "class token", MaskedAutoencoderSettings(**{**settings, "decoder_dim": int(str(error.value).split()[-1])})
    )


@pytest.mark.parametrize(
    ("name", "kwargs", "ratio", "message"),
    [
        ("vit_tiny_r_s16_p8_224", {}, 0.75, "convolutional stem .* masked patches would leak .* vit_base_patch16_224"),
        (
            "vit_tiny_patch16_224",
            {"patch_drop_rate": 0.5},
            0.75,
            "patch_drop_rate 0.5 of .* leaves patches out",
        ),
        ("vit_tiny_patch16_224", {"img_size": 70}, 0.75, "of 70 pixels are no multiple of the patch size 16 .* 64"),
        ("vit_tiny_patch16_224", {"img_size": 32}, 0.8, "--mask-ratio 0.8 keeps 0 of 4 patches"),
        ("vit_tiny_patch16_224", {"attn_drop_rate": 0.1}, 0.75, "attention dropout happens inside the fused"),
    ],
)
def test_encoders_that_cannot_be_masked(name, kwargs, ratio, message):
    """A run that trains on what it sees, or on pixels of no patch."""
    img_size = kwargs.pop("img_size", None)
    spec = ModelSpec(name, img_size=img_size, model_kwargs=kwargs)
    with pytest.raises(ValueError, match=message):
        create_autoencoder(spec, MaskedAutoencoderSettings(mask_ratio=ratio))
