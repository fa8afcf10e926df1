"""f, g and their counterparts along the tokens, on inputs whose answers are known in closed form; and slices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tp_models import tensor_parallel

from ds_vit.parallel.tensor.collectives import (
    copy_to_region,
    gather_to_region,
    join_tokens,
    reduce_from_region,
    scatter_from_region,
    split_tokens,
)
from ds_vit.parallel.tensor.slices import TensorSlice, assemble

TOKENS = 7  # 3 ranks hold 3, 3 and 1


def rows(rank: int, padded: bool = True) -> torch.Tensor:
    """[1, 3, 2]: the rank's tokens of 0, 1, …, 6, zero where they pad (7, 8, … where `padded` is False)."""
    numbers = torch.arange(3 * rank, 3 * rank + 3, dtype=torch.float64)
    numbers = torch.where(numbers < TOKENS, numbers, 0.0) if padded else numbers
    return numbers[None, :, None].expand(1, 3, 2).clone()


def whole() -> torch.Tensor:
    return torch.arange(TOKENS, dtype=torch.float64)[None, :, None].expand(1, TOKENS, 2).clone()


def known_answers() -> None:
    tp = tensor_parallel(sequence_parallel=True)
    assert tp.size == 3
    mine = tp.rank + 1.0  # over the ranks 1 + 2 + 3 = 6

    def check(function, x, forward, d_out, backward):
        x = x.requires_grad_()
        kept = x.detach().clone()
        out = function(x)
        kept_gradient = d_out.clone()
        out.backward(d_out)
        assert torch.equal(out, forward)
        assert torch.equal(x.grad, backward)
        assert torch.equal(x, kept), "the input was changed"
        assert torch.equal(d_out, kept_gradient), "the gradient was changed"

    four = torch.full((4,), mine, dtype=torch.float64)
    check(lambda x: copy_to_region(x, tp), four.clone(), four, four.clone(), torch.full_like(four, 6))
    check(lambda x: reduce_from_region(x, tp), four.clone(), torch.full_like(four, 6), four.clone(), four)

    share, own = rows(tp.rank, padded=False), rows(tp.rank)
    check(lambda x: gather_to_region(x, TOKENS, tp), share.clone(), whole(), mine * whole(), 6 * own)
    check(lambda x: join_tokens(x, TOKENS, tp), share.clone(), whole(), 5 * whole(), 5 * own)
    check(lambda x: scatter_from_region(x, tp), mine * whole(), 6 * own, share.clone(), whole())
    check(lambda x: split_tokens(x, tp), whole(), own, share.clone(), whole())


def test_every_function_and_its_dual(ranks):
    """A reduce that is missing or doubled on either way, padding that counts, an input changed in place."""
    ranks.run(3, known_answers)


@given(st.lists(st.integers(1, 7), min_size=1, max_size=4), st.integers(1, 5), st.integers(0, 2))
def test_slices_make_the_whole(sections, size, dim):
    """A section cut across its border, padding that stays, a share that is lost or doubled."""
    shape = [2, 3, 4]
    shape[dim] = sum(sections)
    full = torch.arange(1.0, 1 + shape[0] * shape[1] * shape[2]).view(shape)
    descriptions = [TensorSlice(tuple(shape), dim, tuple(sections), rank, size) for rank in range(size)]
    slices = [description.take(full) for description in descriptions]
    assert all(tuple(piece.shape) == descriptions[0].local_shape for piece in slices)
    assert torch.equal(assemble(slices, descriptions[-1]), full)
    assert sum(int((piece != 0).sum()) for piece in slices) == full.numel()


def test_a_slice_is_memory_of_its_own():
    """A slice that keeps the whole tensor alive, or writes into it."""
    full = torch.zeros(4, 4)
    piece = TensorSlice((4, 4), 0, (4,), 0, 2).take(full)
    assert piece.untyped_storage().nbytes() == full.nbytes // 2


def test_a_tensor_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"\(5,\) is no whole of shape \(4,\)"):
        TensorSlice((4,), 0, (4,), 0, 2).take(torch.zeros(5))
