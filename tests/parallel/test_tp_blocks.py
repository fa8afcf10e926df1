"""Every kind of block, cut: its output, its input's gradient and its weights' gradients are the uncut block's.

In float64, where the order of a sum moves the result by 1e-15, so that 1e-11 leaves no room for an error.
"""

from __future__ import annotations

import pytest
import torch
from tp_models import (
    KINDS,
    SAMPLES,
    all_tokens,
    compare_block,
    cut_copies,
    own_tokens,
    run,
    spec_of,
    tensor_parallel,
    whole_gradients,
    whole_layers,
)

from ds_vit.models import recompute_all, recompute_selectively

pytestmark = pytest.mark.slow


def compare_blocks(sequence_parallel: bool) -> None:
    """Every kind, activations kept and recomputed, all and some; the traceback of a failure shows its `kind`."""
    for kind in KINDS:
        for recompute in (None, recompute_all, recompute_selectively):
            compare_block(kind, sequence_parallel, recompute)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("size", [2, 3])
def test_a_cut_block_is_the_block(ranks, size, sequence_parallel):
    """A wrong slice, a doubled or lost bias, an unsummed gradient, a norm over a part, padding that leaks."""
    ranks.run(size, compare_blocks, sequence_parallel, timeout=400)


def compare_in_half_precision() -> None:
    """Types and rough values in bfloat16, by parameters and by autocast."""
    for kind in KINDS:
        for sequence_parallel, autocast in ((False, False), (True, False), (False, True)):
            tp = tensor_parallel(sequence_parallel)
            dtype = torch.float32 if autocast else torch.bfloat16
            embed, block, *_ = whole_layers(spec_of(*KINDS[kind]), dtype, gated="gated" in kind)
            cut_embed, cut_block = cut_copies([embed, block], tp)
            count = block.num_tokens.training
            tokens = torch.randn(SAMPLES, count, embed.embed_dim, generator=torch.Generator().manual_seed(1))
            outs = []
            for front, layer, x in (
                (embed, block, tokens.to(dtype).requires_grad_()),
                (cut_embed, cut_block, own_tokens(tokens.to(dtype), tp)),
            ):
                rope = getattr(front, "rope", None)
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    out = run(layer, (x, torch.arange(SAMPLES), *([] if rope is None else [rope()])))
                out.float().square().sum().backward()
                outs.append(out)
                assert x.grad.dtype == dtype
                assert all(p.grad.dtype == p.dtype for p in layer.parameters())
            whole, own = outs
            assert own.dtype == whole.dtype, kind
            error = (all_tokens(own, count, tp) - whole).float().norm() / whole.float().norm()
            assert error < 0.02, f"{kind}: off by {error:.3f}"


def test_types_in_half_precision(ranks):
    """A sum in another type, a bias or a norm that widens what follows."""
    ranks.run(2, compare_in_half_precision)


def compare_integers(sequence_parallel: bool) -> None:
    """An MLP of small integers: every sum is exact in any order, so that all must be equal bit for bit."""
    tp = tensor_parallel(sequence_parallel)
    layers = whole_layers(spec_of(*KINDS["Attention and Mlp"]))
    generator = torch.Generator().manual_seed(2)
    block = layers[1]
    block.block.mlp.act = torch.nn.ReLU()
    with torch.no_grad():
        for parameter in block.block.mlp.parameters():
            parameter.copy_(torch.randint(-3, 4, parameter.shape, generator=generator))
    (cut_block,) = cut_copies([block], tp)
    count = block.num_tokens.training
    tokens, d_out = torch.randint(-3, 4, (2, SAMPLES, count, 48), generator=generator).double()

    x = tokens.clone().requires_grad_()
    out = block.block.mlp(x)
    out.backward(d_out)
    cut_x = own_tokens(tokens, tp)
    cut_out = cut_block.block.mlp(cut_x)
    cut_out.backward(own_tokens(d_out, tp))

    assert torch.equal(all_tokens(cut_out, count, tp), out)
    assert torch.equal(all_tokens(cut_x.grad, count, tp), x.grad)
    gradients = whole_gradients(cut_block.block.mlp)
    for name, parameter in block.block.mlp.named_parameters():
        assert torch.equal(gradients[name], parameter.grad), name


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence"])
def test_integers_are_exact(ranks, sequence_parallel):
    """Anything that a tolerance would hide: a bias added once a rank is off by whole numbers, a rounding by none."""
    ranks.run(3, compare_integers, sequence_parallel)
