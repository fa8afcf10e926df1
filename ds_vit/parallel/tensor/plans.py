"""The sharding plans: for each timm class, which of its weights are sharded along which axis.

A task adds the plans of its own modules to `PLANS`. A class without a plan is not sharded. In a block, where its
weights would silently stay whole, it is rejected by name (`shard.check_degree`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from timm.layers import Attention, AttentionPoolLatent, AttentionRope, DiffAttention, GluMlp, Mlp, SwiGLU
from timm.layers.norm import LayerNorm, LayerNormFp32, RmsNorm, RmsNormFp32
from timm.models.eva import EvaAttention
from timm.models.vision_transformer import DiffParallelScalingBlock, ParallelScalingBlock
from timm.models.vitamin import GeGluMlp
from torch import nn

from ds_vit.parallel.tensor.attention import (
    ShardedAttentionPoolLatent,
    ShardedDiffAttention,
    ShardedDiffParallelScalingBlock,
    ShardedEvaAttention,
    ShardedParallelScalingBlock,
)

Sections: TypeAlias = "int | Callable[[nn.Module], tuple[int, ...]]"
"""The matrices packed along the sharded axis: that many equal parts, or their lengths, given the whole module."""


@dataclass(frozen=True)
class ShardingPlan:
    """The sharding of a module of one class. All names are of the module's members; absent ones are ignored.

    Attributes:
        counts: what the degree must divide, by its name in messages.
        sharded_class: the subclass that the module becomes; None where its own forward suits a share (`Entered`).
        columns: linear maps whose output features are sharded, weight and bias.
        rows: linear maps whose input features are sharded; the bias is whole, and added once after the sum.
        summands: of the rows, those whose summands leave the region together.
        vectors: the module's own parameters and buffers whose first axis is over sharded features.
        norms: norms over sharded features.
        dropouts: dropouts over sharded features.
        partial: whole parameters and modules that act on this rank's heads or features or feed its columns (an
            activation may have a weight): their gradient on a rank is a summand.
        divided: attributes, numbers or lists of them, that hold whole counts and must hold this rank's.
    """

    counts: Callable[[nn.Module], dict[str, int]]
    sharded_class: type[nn.Module] | None = None
    columns: Mapping[str, Sections] = field(default_factory=dict)
    rows: Mapping[str, Sections] = field(default_factory=dict)
    summands: tuple[str, ...] = ()
    vectors: tuple[str, ...] = ()
    norms: tuple[str, ...] = ()
    dropouts: tuple[str, ...] = ()
    partial: tuple[str, ...] = ()
    divided: tuple[str, ...] = ()


_LAMBDAS = ("lambda_a", "lambda_b", "lambda_q1", "lambda_k1", "lambda_q2", "lambda_k2")


_ATTENTION = ShardingPlan(
    lambda module: {"num_heads": module.num_heads},
    columns={"qkv": 3, "q_proj": 1, "k_proj": 1, "v_proj": 1, "gate": 1},
    rows={"proj": 1},
    norms=("norm",),
    partial=("q_norm", "k_norm"),
    divided=("num_heads", "attn_dim"),
)
_MLP = ShardingPlan(
    lambda module: {"hidden size": module.fc2.in_features},
    columns={"fc1": 1},
    rows={"fc2": 1},
    norms=("norm",),
    dropouts=("drop1",),
    partial=("act",),
)
_PARALLEL = ShardingPlan(
    lambda block: {"num_heads": block.num_heads, "hidden size": block.in_split[0]},
    ShardedParallelScalingBlock,
    columns={"in_proj": lambda block: tuple(block.in_split)},
    # Its input is the attention's output before the hidden features; `in_split` has the latter first.
    rows={"out_proj": lambda block: (block.in_split[1], block.in_split[0]), "attn_out_proj": 1, "mlp_out_proj": 1},
    summands=("attn_out_proj", "mlp_out_proj"),
    vectors=("mlp_bias",),
    dropouts=("mlp_drop",),
    partial=("mlp_act", "q_norm", "k_norm"),
    divided=("num_heads", "in_split"),
)

PLANS: dict[type[nn.Module], ShardingPlan] = {
    Attention: _ATTENTION,
    AttentionRope: replace(
        _ATTENTION,
        counts=lambda module: {"num_heads": module.num_heads, "num_kv_heads": module.num_kv_heads},
        divided=("num_heads", "num_kv_heads", "attn_dim", "kv_dim"),
    ),
    EvaAttention: replace(
        _ATTENTION, sharded_class=ShardedEvaAttention, vectors=("q_bias", "k_bias", "v_bias"), divided=("num_heads",)
    ),
    DiffAttention: replace(
        _ATTENTION,
        sharded_class=ShardedDiffAttention,
        partial=("q_norm", "k_norm", "sub_norm", *_LAMBDAS),
        divided=("num_heads",),
    ),
    Mlp: _MLP,
    GluMlp: replace(_MLP, columns={"fc1": 2}),
    SwiGLU: replace(_MLP, columns={"fc1_g": 1, "fc1_x": 1}),
    GeGluMlp: replace(
        _MLP,
        counts=lambda module: {"hidden size": module.w2.in_features},
        columns={"w0": 1, "w1": 1},
        rows={"w2": 1},
        norms=(),
        partial=("act", "norm"),  # over whole features, but inside: it feeds this rank's columns only
    ),
    ParallelScalingBlock: _PARALLEL,
    DiffParallelScalingBlock: replace(
        _PARALLEL,
        sharded_class=ShardedDiffParallelScalingBlock,
        partial=("mlp_act", "q_norm", "k_norm", "sub_norm", *_LAMBDAS),
    ),
    AttentionPoolLatent: ShardingPlan(
        lambda module: {"attn_pool num_heads": module.num_heads},
        ShardedAttentionPoolLatent,
        columns={"q": 1, "kv": 2},
        rows={"proj": 1},
        partial=("q_norm", "k_norm"),
        divided=("num_heads",),
    ),
}

NORMS: dict[type[nn.Module], bool] = {
    nn.LayerNorm: True,
    LayerNorm: True,
    LayerNormFp32: True,
    RmsNorm: False,
    RmsNormFp32: False,
}
"""Norms that can act on sharded features, and whether they subtract the mean."""
