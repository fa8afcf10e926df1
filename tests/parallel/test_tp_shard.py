"""What a cut leaves behind on the parameters, what it moves, and that the checks of the cut can fail."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import RankFailure
from tp_models import (
    HEADS,
    KINDS,
    compare_block,
    from_all_ranks,
    own_tokens,
    run,
    sharded_copies,
    spec_of,
    tensor_parallel,
    whole_layers,
)

from ds_vit.models.checkpointing import CheckpointFunction, recompute_all
from ds_vit.models.layers import BlockLayer
from ds_vit.models.sequential import SequentialViT
from ds_vit.parallel.tensor import region, shard
from ds_vit.parallel.tensor.collectives import TensorParallel
from ds_vit.parallel.tensor.shard import shard_layer
from ds_vit.parallel.tensor.slices import assemble

# Whole on every rank, of all that is two-dimensional in a block or a pooling head.
WHOLE_MATRICES = ("latent",)


def inspect_cut(name: str, kwargs: dict[str, Any], gated: bool) -> None:
    layers = whole_layers(spec_of(name, kwargs), gated=gated)
    layers[1].block.requires_grad_(False)  # frozen before the cut: stays so
    tp = tensor_parallel()
    cut_layers = sharded_copies(layers, tp, class_parallel=True)
    for layer, cut_one in zip(layers, cut_layers, strict=True):
        wholes = layer.state_dict(keep_vars=True)
        cuts = cut_one.state_dict(keep_vars=True)
        assert list(wholes) == list(cuts), "names or their order changed"
        for parameter_name, parameter in cut_one.named_parameters():
            whole, description = wholes[parameter_name], parameter.tp_slice
            assert parameter.requires_grad == whole.requires_grad
            assert parameter.is_contiguous()
            assert description.full_shape == tuple(whole.shape)
            assert (description.rank, description.size) == (tp.rank, tp.size)
            assert tuple(parameter.shape) == description.local_shape
            sharded = description.dim is not None
            assert sharded == getattr(parameter, "tensor_model_parallel", False)
            if sharded:
                assert parameter.untyped_storage().nbytes() == parameter.nbytes, "the whole is still held"
            elif isinstance(cut_one, BlockLayer) or "attn_pool" in parameter_name:
                assert whole.ndim < 2 or parameter_name.endswith(WHOLE_MATRICES), f"{parameter_name} was not cut"
            assert torch.equal(assemble(from_all_ranks(parameter.detach()), description), whole)
    assert cut_layers[-1].head.weight.tensor_model_parallel


def inspect_cuts() -> None:
    for kind, (name, kwargs) in (KINDS | HEADS).items():
        inspect_cut(name, kwargs, gated="gated" in kind)


@pytest.mark.slow
def test_every_parameter_is_described_and_tagged(ranks):
    """A shard without DeepSpeed's tag, a whole one with it, slices that do not make the file's tensor, a lost name."""
    ranks.run(3, inspect_cuts)


def cut_of_size_one() -> None:
    layers = whole_layers(spec_of(*KINDS["beit3"]))
    kinds = [type(module) for layer in layers for module in layer.modules()]
    alone = TensorParallel(0, 1, dist.group.WORLD, sequence_parallel=True)
    for layer in layers:
        shard_layer(layer, alone, class_parallel=True)
    assert kinds == [type(module) for layer in layers for module in layer.modules()]
    for parameter in SequentialViT(layers).parameters():
        assert parameter.tp_slice.dim is None
        assert not hasattr(parameter, "tensor_model_parallel")


def test_size_one_changes_nothing(ranks):
    """Collectives of one rank in every layer of a run without tensor parallelism."""
    ranks.run(1, cut_of_size_one)


# Broken cuts. Each must be caught by the comparison that the other tests rely on.


def bias_on_every_rank(self, x):
    return self.region.leave(torch.nn.functional.linear(x, self.weight, self.bias))


def with_a_doubled_bias() -> None:
    with mock.patch.object(region.RowLinear, "forward", bias_on_every_rank):
        compare_block("Attention and Mlp", sequence_parallel=False)


def without_gradient_sums(kind: str, sequence_parallel: bool) -> None:
    with mock.patch.object(shard, "_sum_gradient", return_value=None):
        compare_block(kind, sequence_parallel)


def with_local_norms() -> None:
    with mock.patch.object(shard, "_shard_norm", local_norm):
        compare_block("norms over features", sequence_parallel=False)


def local_norm(norm, tp) -> None:
    for name in ("weight", "bias"):
        shard._shard_tensor(norm, name, 0, tuple(getattr(norm, name).shape), tp)
    norm.normalized_shape = tuple(norm.weight.shape)


def with_qkv_in_one_piece() -> None:
    with mock.patch.object(shard, "_lengths", lambda sections, module, total: (total,)):
        compare_block("Attention and Mlp", sequence_parallel=False)


@pytest.mark.parametrize(
    ("broken", "arguments", "message"),
    [
        (with_a_doubled_bias, (), "AssertionError: output"),
        (without_gradient_sums, ("qk-norm", False), "gradients of blocks.0.attn.q_norm.weight differ"),
        (without_gradient_sums, ("differential", False), "gradients of blocks.0.attn.lambda_q1 differ"),
        (without_gradient_sums, ("Attention and Mlp", True), "gradients of blocks.0.norm1.weight differ"),
        (with_local_norms, (), "AssertionError: output"),
        (with_qkv_in_one_piece, (), "AssertionError: output"),
    ],
    ids=["doubled bias", "q_norm", "lambda", "norm on shared tokens", "local norm", "qkv in one piece"],
)
def test_a_broken_cut_is_caught(ranks, broken, arguments, message):
    """A comparison that nothing can fail."""
    with pytest.raises(RankFailure, match=message):
        ranks.run(2, broken, *arguments)


SAMPLES = 2


def bytes_sent(kind: str, sequence_parallel: bool, recompute: CheckpointFunction | None = None) -> int:
    """Bytes that a rank sends in a block's forward and backward, if every collective is a ring (as NCCL's)."""
    tp = tensor_parallel(sequence_parallel)
    layers = whole_layers(spec_of(*KINDS[kind]))
    (block,) = sharded_copies([layers[1]], tp)
    block.requires_grad_(False)  # the activations alone; sums of small replicated gradients come on top
    tokens = torch.randn(SAMPLES, block.num_tokens.training, layers[0].embed_dim, dtype=torch.float64)
    own = own_tokens(tokens, tp)
    sent = 0

    def counting(collective, ring):
        def call(output, *args, **kwargs):
            nonlocal sent
            sent += ring(output, *args)
            return collective(output, *args, **kwargs)

        return call

    others = tp.size - 1
    rings = {
        "all_reduce": lambda x: 2 * others * x.nbytes // tp.size,
        "all_gather_into_tensor": lambda out, own: others * own.nbytes,
        "reduce_scatter_tensor": lambda own, whole: others * own.nbytes,
    }
    with mock.patch.multiple(dist, **{name: counting(getattr(dist, name), ring) for name, ring in rings.items()}):
        out = run(block, (own, torch.arange(SAMPLES)), recompute)
        out.backward(torch.ones_like(out))
    return sent


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize(("kind", "regions"), [("Attention and Mlp", 2), ("parallel scaling, bias", 1)])
def test_bytes_moved(ranks, kind, regions, sequence_parallel):
    """A collective too many: each region costs one all-reduce (or gather and scatter) forward and one backward."""
    size = 2
    (name, kwargs) = KINDS[kind]
    tokens = whole_layers(spec_of(name, kwargs))[1].num_tokens.training
    if sequence_parallel:
        tokens += -tokens % size
    activation = SAMPLES * tokens * 48 * 8
    # A ring all-reduce of n bytes sends 2 (t - 1) / t n; a gather or scatter (t - 1) / t n.
    expected = regions * 2 * 2 * (size - 1) * activation // size
    assert ranks.run(size, bytes_sent, kind, sequence_parallel) == [expected] * size
    # Recomputing sends the forward pass's again; torch may stop before the block's last sum, which nothing needs.
    again = expected // 2
    last = again // regions // (2 if sequence_parallel else 1)
    (found, *_) = ranks.run(size, bytes_sent, kind, sequence_parallel, recompute_all)
    assert found in (expected + again, expected + again - last)
