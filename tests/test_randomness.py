"""Keyed randomness: equal in all three arithmetics, well distributed, stable across releases."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from ds_vit import randomness


def uniform(keys: torch.Tensor, name: str, shape: tuple[int, ...] = ()) -> torch.Tensor:
    return randomness.uniform_of(randomness.mix_tensor(keys, randomness.name_key(name)), shape)


def normal(keys: torch.Tensor, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    return randomness.normal(randomness.normal_bits(keys, name), shape)


INT64 = st.integers(-(2**63), 2**63 - 1)
MANY = torch.from_numpy(randomness.sample_keys(0, 0, np.arange(20_000)))


# The same arithmetic three times


@pytest.mark.parametrize(
    ("seed", "outputs"),
    [
        (0, [0xE220A8397B1DCDAF]),
        (1234567, [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]),
    ],
)
def test_mix_is_the_published_splitmix64(seed, outputs):
    """Would catch a wrong constant or shift: SplitMix64's known outputs for these seeds (Steele et al. 2014)."""
    golden = 0x9E3779B97F4A7C15
    assert [randomness.mix(seed + i * golden) % 2**64 for i in range(len(outputs))] == outputs


@given(
    seed=INT64, epoch=st.integers(0, 10**6), indices=st.lists(INT64, min_size=1, max_size=5), repeat=st.integers(0, 9)
)
def test_numpy_keys_equal_python_keys(seed, epoch, indices, repeat):
    """Would catch a difference between the scalar and the vectorised keys."""
    keys = randomness.sample_keys(seed, epoch, indices, repeat)
    assert keys.tolist() == [randomness.mix(seed, epoch, index, repeat) for index in indices]


@given(values=st.lists(INT64, min_size=1, max_size=4), last=INT64)
def test_mixing_of_arrays_and_tensors_equals_python_mixing(values, last):
    """Would catch a lost sign, an arithmetic shift (torch's), and an array of values that is not mixed one by one."""
    key, expected = randomness.mix(*values), randomness.mix(*values, last)
    both = [[randomness.mix(*values, 0), expected]]
    assert randomness.mix_array(np.array([key]), last).item() == expected
    assert randomness.mix_array(np.array([[key]]), np.array([0, last])).tolist() == both
    assert randomness.mix_tensor(torch.tensor([key]), last).item() == expected
    assert randomness.mix_tensor(torch.tensor([[key]]), torch.tensor([0, last])).tolist() == both


def test_sample_keys_take_a_repeat_for_each_sample():
    """Would catch the repeats of repeated augmentation being dropped or broadcast the wrong way."""
    keys = randomness.sample_keys(1, 2, [5, 5, 6], np.array([0, 1, 1]))
    assert keys.tolist() == [randomness.mix(1, 2, 5, 0), randomness.mix(1, 2, 5, 1), randomness.mix(1, 2, 6, 1)]


@given(key=INT64, place=st.integers(0, 5))
def test_uniform_is_the_top_24_bits(key, place):
    """Would catch a draw that is not the documented function of (key, name, position)."""
    bits = randomness.mix_tensor(torch.tensor([key]), randomness.name_key("u"))
    assert uniform(torch.tensor([key]), "u").item() == ((bits.item() >> 40) & 0xFFFFFF) * 2.0**-24
    bits = randomness.mix_tensor(bits, place).item()
    assert uniform(torch.tensor([key]), "u", (2, 3)).flatten()[place].item() == ((bits >> 40) & 0xFFFFFF) * 2.0**-24


def test_keys_stay_the_same_across_releases():
    """Would catch any change of the arithmetic: a run resumed under another release must go on with the same draws."""
    assert randomness.mix(1, 2, 3) == -3426316478316322125
    assert randomness.name_key("drop") == 7508919393090751231
    assert randomness.permute(range(10), 10, key=7).tolist() == [1, 6, 4, 0, 9, 8, 2, 3, 5, 7]


# Distributions. All of these are fixed draws: they pass always or never.


def test_uniform_draws_are_uniform_and_independent():
    """Would catch a bias, and a correlation between neighbouring keys, places or names."""
    draws = uniform(MANY, "a", (4,)).double().numpy()
    assert draws.min() >= 0.0
    assert draws.max() < 1.0
    assert stats.kstest(draws.ravel(), "uniform").pvalue > 1e-3
    other = uniform(MANY, "b", (4,)).double().numpy()
    bound = 4.5 / math.sqrt(draws.size)  # 4.5 standard deviations of a correlation of independent draws
    for first, second in ((draws[1:], draws[:-1]), (draws[:, 1:], draws[:, :-1]), (draws, other)):
        assert abs(np.corrcoef(first.ravel(), second.ravel())[0, 1]) < bound * 1.2


def test_normal_draws_are_normal():
    """Would catch a wrong Box-Muller (scale, lost tail, infinite values)."""
    draws = normal(MANY, "n", (5,)).double().numpy()
    assert np.isfinite(draws).all()
    assert stats.kstest(draws.ravel(), "norm").pvalue > 1e-3
    assert 4.0 < np.abs(draws).max() < 6.0  # of 100,000


@pytest.mark.parametrize("draw", [uniform, normal])
def test_a_draw_does_not_depend_on_the_rest_of_the_batch(draw):
    """Would catch a draw that changes with the micro-batch, down to the last bit."""
    keys = MANY[:13]
    whole = draw(keys, "x", (3, 7, 5))
    for start, stop in ((0, 1), (3, 4), (5, 12), (1, 3)):
        assert torch.equal(draw(keys[start:stop], "x", (3, 7, 5)), whole[start:stop])


def test_scalar_draws_have_no_extra_dimension():
    """Would catch a change of shape for one draw a sample."""
    assert uniform(MANY[:3], "x").shape == (3,)
    assert normal(MANY[:3], "x", (2, 2)).shape == (3, 2, 2)


# The permutation


@settings(deadline=None)
@given(size=st.integers(1, 3000), key=INT64)
def test_permute_is_a_permutation(size, key):
    """Would catch an index that is used twice or never in an epoch."""
    assert sorted(randomness.permute(range(size), size, key).tolist()) == list(range(size))


@settings(deadline=None)
@given(size=st.integers(1, 2**40), key=INT64, data=st.data())
def test_permute_evaluates_single_positions(size, key, data):
    """Would catch a permutation that depends on which positions are asked together, at any size."""
    positions = data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=6))
    together = randomness.permute(positions, size, key)
    assert together.dtype == np.int64
    assert 0 <= together.min() <= together.max() < size
    assert [randomness.permute([position], size, key)[0] for position in positions] == together.tolist()


def test_permutations_are_uniform_and_independent_over_keys():
    """Would catch a biased shuffle: where an index lands, and what follows it, must be uniform over epochs."""
    size, epochs = 50, 2000
    orders = np.stack([randomness.permute(range(size), size, randomness.mix(3, epoch)) for epoch in range(epochs)])
    for position in (0, 17, 49):
        assert stats.chisquare(np.bincount(orders[:, position], minlength=size)).pvalue > 1e-3
    steps = (orders[:, 1:] - orders[:, :-1]) % size
    assert stats.chisquare(np.bincount(steps.ravel(), minlength=size)[1:]).pvalue > 1e-3


def test_permute_of_a_real_data_set_mixes_neighbours():
    """Would catch a permutation that keeps runs of neighbours (classes are stored together) at ImageNet's size."""
    size = 1_281_167
    order = randomness.permute(range(100_000), size, randomness.mix(0, 0))
    assert abs(np.corrcoef(np.arange(100_000), order)[0, 1]) < 4.5 / math.sqrt(100_000)
    assert (np.abs(np.diff(order)) < 1300).mean() < 0.01  # by chance 0.002: the same class


@pytest.mark.parametrize("positions", [[5], [-1], [0, 7]])
def test_permute_refuses_positions_outside(positions):
    """Would catch cycle walking from outside the range, which repeats indices in silence."""
    with pytest.raises(ValueError, match=r"must lie in \[0, 5\)"):
        randomness.permute(positions, 5, 1)
