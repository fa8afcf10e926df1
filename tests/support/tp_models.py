"""Sharded models for the tests of tensor parallelism: the results of all ranks, compared with the whole layer's."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from vits import shake

from ds_vit.models.checkpointing import CheckpointFunction
from ds_vit.models.keyed_init import initialise
from ds_vit.models.layers import BlockLayer, Layer, take_apart
from ds_vit.models.zoo import ModelSpec, create_model
from ds_vit.parallel.tensor.collectives import TensorParallel
from ds_vit.parallel.tensor.shard import shard_layer
from ds_vit.parallel.tensor.slices import assemble

WIDTH = {"depth": 2, "embed_dim": 48, "num_heads": 6, "mlp_ratio": 3.0}  # heads and hidden size divide by 2 and by 3

# Every kind of block, by what is special about sharding it: timm's name and arguments.
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "Attention and Mlp": ("vit_tiny_patch16_224", {}),
    "activation with a weight": ("vit_tiny_patch16_224", {"act_layer": "prelu"}),
    "SwiGLU, activation with a weight": ("aimv2_large_patch14_224", {"act_layer": "prelu"}),
    "parallel scaling, activation with a weight": ("vit_base_patch16_xp_224", {"act_layer": "prelu"}),
    "layer scale": ("vit_small_patch14_reg4_dinov2", {}),
    "qk-norm": ("vit_tiny_patch16_224", {"qk_norm": True}),
    "norms over features": ("vit_tiny_patch16_224", {"scale_attn_norm": True, "scale_mlp_norm": True}),
    "packed SwiGLU": ("vit_giant_patch14_dinov2", {}),
    "SwiGLU, RMS norm, no bias": ("aimv2_large_patch14_224", {}),
    "parallel scaling, qk-norm, no bias": ("vit_base_patch16_xp_224", {}),
    "parallel scaling, qk-norm, MLP bias": ("vit_22b_patch14_224", {}),
    "parallel scaling, bias": ("vit_pwee_patch16_reg1_gap_256", {}),
    "two parallel branches": ("vit_small_patch16_18x2_224", {}),
    "residual post-norm": ("vit_base_patch16_rpn_224", {}),
    "differential": ("vit_dwee_patch16_reg1_gap_256", {}),
    "differential, parallel scaling": ("vit_dpwee_patch16_reg1_gap_256", {}),
    "differential, norms": ("vit_tiny_patch16_224", {"attn_layer": "diff", "qk_norm": True, "scale_attn_norm": True}),
    "beit3": ("beit3_base_patch16_224", {}),
    "ViTamin": ("vitamin_small_224", {"depth": 2}),
    "Eva, fused qkv, RoPE": ("eva02_tiny_patch14_224", {}),
    "Eva, separate qkv, norm in SwiGLU": ("eva02_base_patch14_224", {}),
    "Eva, norm in attention": ("eva02_base_patch16_clip_224", {}),
    "Eva, q and v biases": ("eva_giant_patch14_224", {}),
    "Eva, post-norm": ("eva02_enormous_patch14_clip_224", {}),
    "Eva, qk-norm": ("eva02_tiny_patch14_224", {"qk_norm": True}),
    "Attention, gated": ("vit_tiny_patch16_224", {}),
    "EvaAttention, gated": ("eva02_base_patch16_clip_224", {}),
    "AttentionRope, gated": ("vit_base_patch16_rope_224", {}),
    "AttentionRope": ("vit_pe_core_base_patch16_224", {"attn_pool_num_heads": 6}),
    "grouped queries": (
        "vit_base_patch16_sapiens2",
        {"num_heads": 12, "embed_dim": 96, "num_kv_heads": 6, "rope_rescale_coords": 1.0},
    ),
    "DINOv3": ("vit_small_patch16_dinov3_qkvb", {}),
    "DINOv3, SwiGLU, no bias": ("vit_7b_patch16_dinov3", {}),
    "learned rotary frequencies": ("vit_small_patch16_rope_mixed_ape_224", {}),
}

# Every kind of head.
HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "class token": ("vit_tiny_patch16_224", {}),
    "average pool": ("vit_base_patch16_gap_224", {}),
    "attention pool": ("vit_base_patch16_siglip_224", {}),
    "attention pool of Eva": ("vit_pe_core_base_patch16_224", {"attn_pool_num_heads": 6}),
}

SAMPLES = 2
NUM_CLASSES = 10  # three ranks hold 4, 4 and 2


def spec_of(name: str, kwargs: dict[str, Any], grid: int = 3, **more: Any) -> ModelSpec:
    """A small model of `grid` x `grid` patches (with a class token 10 of them, which 3 ranks do not share evenly)."""
    arguments = ({} if name.startswith("vitamin") else WIDTH) | kwargs
    patch = create_model(ModelSpec(name, model_kwargs=arguments), for_training=False).patch_embed.patch_size[0]
    return ModelSpec(name, NUM_CLASSES, img_size=grid * patch, model_kwargs=arguments, **more)


def whole_layers(spec: ModelSpec, dtype: torch.dtype = torch.float64, gated: bool = False) -> list[Layer]:
    """The whole layers, with weights away from their initial values: the same on every rank.

    `gated` gives the blocks' attention timm's output gate, which its models do not pass on to their blocks.
    """
    description = create_model(spec, for_training=False)
    layers = take_apart(description)
    initialise(description, layers, seed=0, device="cpu", dtype=dtype)
    for layer in layers[1:-1] if gated else ():
        attention = layer.block.attn
        attention.gate = torch.nn.Linear(attention.proj.out_features, attention.proj.in_features, dtype=dtype)
    for index, layer in enumerate(layers):
        shake(layer, seed=index)
    return layers


def tensor_parallel(sequence_parallel: bool = False) -> TensorParallel:
    """The whole world as one tensor-parallel group."""
    return TensorParallel(dist.get_rank(), dist.get_world_size(), dist.group.WORLD, sequence_parallel)


def sharded_copies(layers: list[Layer], tp: TensorParallel, class_parallel: bool = False) -> list[Layer]:
    """This rank's share of the layers, whose parameters are checked; the layers stay whole."""
    copies = copy.deepcopy(layers)
    for whole, layer in zip(layers, copies, strict=True):
        shard_layer(layer, tp, class_parallel=class_parallel)
        check_parameters(layer, whole, tp)
    return copies


def check_parameters(layer: Layer, whole: Layer, tp: TensorParallel) -> None:
    """Names, descriptions, DeepSpeed's tag and memory of a sharded layer's parameters; its slices make the whole."""
    wholes = whole.state_dict(keep_vars=True)
    assert list(wholes) == list(layer.state_dict()), "names or their order changed"
    everyone = from_all_ranks({name: parameter.detach() for name, parameter in layer.named_parameters()})
    for name, parameter in layer.named_parameters():
        full, description = wholes[name], parameter.tp_slice
        assert parameter.requires_grad == full.requires_grad
        assert parameter.is_contiguous()
        assert description.full_shape == tuple(full.shape)
        assert (description.rank, description.size) == (tp.rank, tp.size)
        is_sharded = description.dim is not None
        assert is_sharded == getattr(parameter, "tensor_model_parallel", False)
        if is_sharded:
            assert parameter.untyped_storage().nbytes() == parameter.nbytes, "the whole is still held"
        elif isinstance(layer, BlockLayer) or "attn_pool" in name:
            assert full.ndim < 2 or name.endswith("latent"), f"{name} is not sharded"
        assert torch.equal(assemble([of_rank[name] for of_rank in everyone], description), full)


def from_all_ranks(value: Any) -> list[Any]:
    """Every rank's value, in rank order."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def whole_gradients(layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The gradients of a sharded layer, assembled; AssertionError where what every rank holds differs bitwise."""
    mine = {name: parameter.grad for name, parameter in layer.named_parameters()}
    everyone = from_all_ranks(mine)
    out = {}
    for name, parameter in layer.named_parameters():
        slices = [gradients[name] for gradients in everyone]
        assert all(gradient is not None for gradient in slices), f"{name} has no gradient"
        if parameter.tp_slice.dim is None:
            assert all(torch.equal(slices[0], other) for other in slices), f"the ranks' gradients of {name} differ"
        out[name] = assemble(slices, parameter.tp_slice)
    return out


def own_tokens(tokens: torch.Tensor, tp: TensorParallel, fill: float = 0.0) -> torch.Tensor:
    """What a rank holds of tokens [B, S, D] outside a region, a leaf; `fill` where they pad."""
    if tp.sequence_parallel:
        share = -(-tokens.shape[1] // tp.size)
        padded = tokens.new_full((tokens.shape[0], share * tp.size, tokens.shape[2]), fill)
        padded[:, : tokens.shape[1]] = tokens
        tokens = padded[:, tp.rank * share : (tp.rank + 1) * share]
    return tokens.detach().clone().requires_grad_()


def all_tokens(own: torch.Tensor, count: int, tp: TensorParallel) -> torch.Tensor:
    """The inverse: [B, count, D]."""
    everyone = from_all_ranks(own.detach())
    if tp.sequence_parallel:
        return torch.cat(everyone, 1)[:, :count]
    assert all(torch.equal(everyone[0], other) for other in everyone), "the ranks' tokens differ"
    return everyone[0]


def run(layer: Layer, inputs: tuple[torch.Tensor, ...], recompute: CheckpointFunction | None = None) -> torch.Tensor:
    """The tokens or logits that a layer makes of its inputs, with or without activation checkpointing."""

    def forward(*inputs: torch.Tensor) -> torch.Tensor:
        out = layer(inputs)
        return out if isinstance(out, torch.Tensor) else out[0]

    return recompute(forward, *inputs) if recompute else forward(*inputs)


def run_block(
    embed: Layer, block: Layer, tokens: torch.Tensor, recompute: CheckpointFunction | None = None
) -> torch.Tensor:
    """The tokens that a block makes of others, with the frequencies that its embedding has learned."""
    rope = getattr(embed, "rope", None)
    return run(block, (tokens, torch.arange(SAMPLES), *([] if rope is None else [rope()])), recompute)


def close(actual: torch.Tensor, expected: torch.Tensor, what: str, rtol: float = 1e-11) -> None:
    """Equal within `rtol` of the largest element; timm computes differential attention's lambda in float32."""
    largest = float(expected.abs().max())
    if what.endswith("k_norm.bias") and largest < 1e-12:
        largest = 1.0  # softmax does not feel what is added to every key alike: zero but for rounding
    assert largest > 1e-9, f"{what} is zero: it would hide anything"
    tolerance = (1e-6 if "lambda" in what else rtol) * largest
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance, msg=lambda m: f"{what}: {m}")


def compare_block(kind: str, sequence_parallel: bool, recompute: CheckpointFunction | None = None) -> None:
    """Run a block whole and sharded on the same tokens, backward from the same gradient, and compare everything."""
    tp = tensor_parallel(sequence_parallel)
    embed, block, *_ = whole_layers(spec_of(*KINDS[kind]), gated="gated" in kind)
    own_embed, own_block = sharded_copies([embed, block], tp)
    count = block.num_tokens.count(training=True)
    generator = torch.Generator().manual_seed(1)
    tokens, d_out = torch.randn(2, SAMPLES, count, embed.embed_dim, dtype=torch.float64, generator=generator)

    x = tokens.clone().requires_grad_()
    out = run_block(embed, block, x)
    out.backward(d_out)

    # What pads the sequence may be anything finite; it must not reach the result.
    own_x = own_tokens(tokens, tp, fill=3.0)
    own_out = run_block(own_embed, own_block, own_x, recompute)
    own_out.backward(own_tokens(d_out, tp))

    close(all_tokens(own_out, count, tp), out.detach(), "output")
    close(all_tokens(own_x.grad, count, tp), x.grad, "input gradient")
    gradients = whole_gradients(own_block)
    for name, parameter in block.named_parameters():
        close(gradients[name], parameter.grad, name)
    if getattr(embed, "rope", None) is not None:
        close(whole_gradients(own_embed.rope)["freqs"], embed.rope.freqs.grad, "freqs")
