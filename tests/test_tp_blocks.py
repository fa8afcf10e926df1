"""Every kind of block, cut: its output, its input's gradient and its weights' gradients are the uncut block's.

In float64, where the order of a sum moves the result by 1e-15, so that 1e-11 leaves no room for an error.
"""

from __future__ import annotations

import pytest
import torch
from tp_models import (
    KINDS,
    all_tokens,
    cut_copies,
    own_tokens,
    run,
    spec_of,
    tensor_parallel,
    whole_gradients,
    whole_layers,
)

SAMPLES = 2


def close(actual: torch.Tensor, expected: torch.Tensor, what: str, rtol: float = 1e-11) -> None:
    """Equal within `rtol` of the largest element; timm computes differential attention's lambda in float32."""
    largest = float(expected.abs().max())
    if what.endswith("k_norm.bias") and largest < 1e-12:
        largest = 1.0  # softmax does not feel what is added to every key alike: zero but for rounding
    assert largest > 1e-9, f"{what} is zero: it would hide anything"
    tolerance = (1e-6 if "lambda" in what else rtol) * largest
    torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance, msg=lambda m: f"{what}: {m}")


def compare_block(kind: str, sequence_parallel: bool, recompute: bool) -> None:
    """Run a block whole and cut on the same tokens, backward from the same gradient, and compare everything."""
    tp = tensor_parallel(sequence_parallel)
    embed, block, *_ = whole_layers(spec_of(*KINDS[kind]), gated="gated" in kind)
    cut_embed, cut_block = cut_copies([embed, block], tp)
    count = block.num_tokens.training
    generator = torch.Generator().manual_seed(1)
    tokens, d_out = torch.randn(2, SAMPLES, count, embed.embed_dim, dtype=torch.float64, generator=generator)
    keys = torch.arange(SAMPLES)
    rope = getattr(embed, "rope", None)
    learned = [] if rope is None else [rope()]
    cut_learned = [] if rope is None else [cut_embed.rope()]

    x = tokens.clone().requires_grad_()
    out = run(block, (x, keys, *learned))
    out.backward(d_out)

    # What pads the sequence may be anything finite; it must not reach the result.
    cut_x = own_tokens(tokens, tp, fill=3.0)
    cut_out = run(cut_block, (cut_x, keys, *cut_learned), recompute)
    cut_out.backward(own_tokens(d_out, tp))

    close(all_tokens(cut_out, count, tp), out.detach(), "output")
    close(all_tokens(cut_x.grad, count, tp), x.grad, "input gradient")
    gradients = whole_gradients(cut_block)
    for name, parameter in block.named_parameters():
        close(gradients[name], parameter.grad, name)
    if learned:
        close(whole_gradients(cut_embed.rope)["freqs"], rope.freqs.grad, "freqs")


def compare_block_in_all_ways(kind: str) -> None:
    """With tokens whole and shared, activations kept and recomputed."""
    for sequence_parallel in (False, True):
        for recompute in (False, True):
            compare_block(kind, sequence_parallel, recompute)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_cut_block_is_the_block(ranks, kind, size):
    """A wrong slice, a doubled or lost bias, an unsummed gradient, a norm over a part, padding that leaks."""
    ranks.run(size, compare_block_in_all_ways, kind)
