"""The sample order: every sample once an epoch, every row on one rank, whatever the layout."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_vit import randomness
from ds_vit.data.rows import EvalRows
from ds_vit.data.sampler import SampleOrder, Share

ORDERS = st.builds(
    lambda batch, extra, seed: SampleOrder(batch + extra, batch, seed),
    st.integers(1, 40),
    st.integers(0, 200),
    st.integers(0, 2**40),
)


def _step(order: SampleOrder, step: int) -> tuple[list[int], list[int]]:
    indices, keys = order.rows(step, range(order.global_batch))
    return indices.tolist(), keys.tolist()


@given(order=ORDERS, epoch=st.integers(0, 3))
def test_an_epoch_uses_each_sample_at_most_once(order, epoch):
    """Would catch a sample used twice in an epoch, or an epoch that drops more than the incomplete batch."""
    steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
    used = [index for step in steps for index in _step(order, step)[0]]
    assert len(set(used)) == len(used) == order.num_samples - order.num_samples % order.global_batch
    assert {order.epoch_of(step) for step in steps} == {epoch}


@given(order=ORDERS, step=st.integers(0, 500))
def test_keys_are_those_of_seed_epoch_and_sample(order, step):
    """Would catch keys that miss the epoch (the same augmentation in each) or the seed."""
    indices, keys = _step(order, step)
    assert keys == [randomness.mix(order.seed, order.epoch_of(step), index, 0) for index in indices]


def test_epochs_and_seeds_have_orders_of_their_own():
    """Would catch an order that repeats in each epoch or ignores the seed."""
    order = SampleOrder(100, 100, seed=1)
    first = _step(order, 0)[0]
    assert first != _step(order, 1)[0]
    assert first != _step(SampleOrder(100, 100, seed=2), 0)[0]
    assert sorted(first) == sorted(_step(order, 1)[0]) == list(range(100))


@given(
    dp_size=st.integers(1, 5),
    accumulation=st.integers(1, 4),
    micro_batch=st.integers(1, 5),
    extra=st.integers(0, 99),
    step=st.integers(0, 50),
    weights=st.booleans(),
)
def test_ranks_and_micro_batches_cut_the_global_batch_in_order(
    dp_size, accumulation, micro_batch, extra, step, weights
):
    """Would catch rows that are lost, doubled or reordered by a layout, or a rank that needs the others' rows."""
    shares = [Share(rank, dp_size, micro_batch, accumulation) for rank in range(dp_size)]
    size = shares[0].global_batch + extra
    mixture = ((7, size // 2), (5, size - size // 2)) if weights else ()
    order = SampleOrder(size, shares[0].global_batch, 3, 0, mixture)
    pieces = [order.rows(step, share.rows(micro)) for share in shares for micro in range(accumulation)]
    together = [np.concatenate(part).tolist() for part in zip(*pieces, strict=True)]
    assert tuple(together) == _step(order, step)


def test_a_global_batch_above_an_epoch_is_refused():
    """Would catch an epoch of no steps, which would never end."""
    with pytest.raises(ValueError, match="global batch of 64 is larger than the 63 training images"):
        SampleOrder(63, 64, seed=0)


# Repeated augmentation


@pytest.mark.parametrize("off", [0, 1])
def test_one_copy_is_no_repetition(off):
    """Would catch --aug-repeats 0 or 1 changing the order."""
    assert _step(SampleOrder(37, 12, 5, aug_repeats=off), 4) == _step(SampleOrder(37, 12, 5), 4)


@given(repeats=st.integers(2, 4), batch=st.integers(1, 40), extra=st.integers(0, 100), epoch=st.integers(0, 2))
def test_repeats_stand_in_one_step_with_keys_of_their_own(repeats, batch, extra, epoch):
    """Would catch copies that are augmented alike, or another count of them than timm's sampler gives."""
    order = SampleOrder(batch + extra, batch, seed=1, aug_repeats=repeats)
    steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
    rows = [row for step in steps for row in zip(*_step(order, step), strict=True)]
    assert len(set(rows)) == len(rows) == order.steps_per_epoch * batch
    plain = SampleOrder(order.num_samples, 1, seed=1)
    first = [_step(plain, epoch * order.num_samples + number)[0][0] for number in range(math.ceil(len(rows) / repeats))]
    # The epoch's first samples in the order without repeats, each `repeats` times, the last as often as there is room.
    expected = sorted((index, randomness.mix(1, epoch, index, copy)) for index in first for copy in range(repeats))
    assert set(rows) <= set(expected)
    assert len(expected) - len(rows) < repeats


@pytest.mark.parametrize("repeats", [2, 3, 4])
def test_copies_are_no_mixing_partners(repeats):
    """Would catch mixup of an image with itself: copies are neighbours by position, partners are neighbours by row."""
    for batch in range(2 * repeats, 50, 2):
        order = SampleOrder(200, batch, seed=2, aug_repeats=repeats)
        for step in range(order.steps_per_epoch):
            indices = np.array(_step(order, step)[0])
            assert (indices[0::2] != indices[1::2]).all(), (batch, step)


# Evaluation


@given(num_samples=st.integers(1, 300), batch=st.integers(1, 20), dp_size=st.integers(1, 6))
def test_evaluation_counts_every_sample_exactly_once(num_samples, batch, dp_size):
    """Would catch samples lost or counted twice where the ranks do not divide the validation split."""
    batches = len(EvalRows(num_samples, Share(0, dp_size, batch)))
    seen = []
    for rank in range(dp_size):
        for number in range(batches):
            rows = EvalRows(num_samples, Share(rank, dp_size, batch)).at(number)
            indices, valid = rows.indices, rows.valid
            assert len(indices) == len(valid) == batch  # the same shape everywhere: there are collectives behind it
            assert 0 <= indices.min() <= indices.max() < num_samples
            seen += indices[valid].tolist()
    assert sorted(seen) == list(range(num_samples))
    assert batches * batch * dp_size - num_samples < batch * dp_size
