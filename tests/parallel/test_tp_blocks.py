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
    own_tokens,
    run_block,
    sharded_copies,
    spec_of,
    tensor_parallel,
    whole_layers,
)

from ds_vit.models.checkpointing import recompute_all, recompute_selectively

pytestmark = pytest.mark.slow


def compare_blocks(sequence_parallel: bool) -> None:
    """Every kind, activations kept and recomputed, all and some; the traceback of a failure shows its `kind`."""
    for kind in KINDS:
        for recompute in (None, recompute_all, recompute_selectively):
            compare_block(kind, sequence_parallel, recompute)


@pytest.mark.parametrize(("size", "sequence_parallel"), [(2, False), (3, True)])
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
            cut_embed, cut_block = sharded_copies([embed, block], tp)
            count = block.num_tokens.training
            tokens = torch.randn(SAMPLES, count, embed.embed_dim, generator=torch.Generator().manual_seed(1))
            outs = []
            for front, layer, x in (
                (embed, block, tokens.to(dtype).requires_grad_()),
                (cut_embed, cut_block, own_tokens(tokens.to(dtype), tp)),
            ):
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    out = run_block(front, layer, x)
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
