"""Keyed randomness: 64-bit keys, counter-based draws and the sample permutation.

No random number of a training run comes from a process's own generator. Every draw is a pure function of a 64-bit key
and the draw's name, so recomputation, rank, stage, worker and resume cannot change it (Salmon et al. 2011, "Parallel
random numbers: as easy as 1, 2, 3"). The mixing function is the finaliser of SplitMix64 (Steele, Lea and Flood 2014).

The same arithmetic exists three times, for Python integers, NumPy arrays and torch tensors (any device); the tests
hold the three equal. Keys are stored as signed int64 because that is what torch can index, gather and send.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MUL1 = 0xBF58476D1CE4E5B9
_MUL2 = 0x94D049BB133111EB


def _signed(value: int) -> int:
    """The two's-complement int64 with the bits of the unsigned 64-bit `value`."""
    return value - (1 << 64) if value >> 63 else value


def _finalise(x: int) -> int:
    x ^= x >> 30
    x = (x * _MUL1) & _MASK
    x ^= x >> 27
    x = (x * _MUL2) & _MASK
    return x ^ (x >> 31)


def mix(*values: int) -> int:
    """Mix any number of integers, in order, into one signed 64-bit key."""
    state = 0
    for value in values:
        state = _finalise(((state ^ (value & _MASK)) + _GOLDEN) & _MASK)
    return _signed(state)


@cache
def name_key(name: str) -> int:
    """A signed 64-bit key for a draw's name (BLAKE2b, so that it never depends on PYTHONHASHSEED)."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little", signed=True)


def _finalise_numpy(x: np.ndarray) -> np.ndarray:
    x = x ^ (x >> np.uint64(30))
    x = x * np.uint64(_MUL1)
    x = x ^ (x >> np.uint64(27))
    x = x * np.uint64(_MUL2)
    return x ^ (x >> np.uint64(31))


def mix_array(keys: np.ndarray, value: int | np.ndarray) -> np.ndarray:
    """Mix one more value into int64 keys: `mix(a, b, value)` from `mix(a, b)`, elementwise with broadcasting."""
    if isinstance(value, int):
        value = np.array(_signed(value & _MASK), dtype=np.int64)
    with np.errstate(over="ignore"):
        return _finalise_numpy((keys ^ value).view(np.uint64) + np.uint64(_GOLDEN)).view(np.int64)


def sample_keys(
    seed: int, epoch: int, sample_index: Sequence[int] | np.ndarray, repeat: np.ndarray | int = 0
) -> np.ndarray:
    """The keys of samples: `mix(seed, epoch, sample_index, repeat)` for each.

    Args:
        seed: the run's seed.
        epoch: the epoch the samples are used in, from 0.
        sample_index: indices into the data set, shape [n].
        repeat: which copy under repeated augmentation, a number or shape [n].

    Returns:
        int64 array of shape [n].
    """
    of_epoch = np.array(mix(seed, epoch), dtype=np.int64)
    of_samples = mix_array(of_epoch, np.asarray(sample_index, dtype=np.int64))
    return mix_array(of_samples, np.asarray(repeat, dtype=np.int64))


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift of int64 (torch's own shift is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix_upper_bits(keys: torch.Tensor, value: int | torch.Tensor) -> torch.Tensor:
    """`mix_tensor` without its last step, which does not change the upper 31 bits."""
    if isinstance(value, int):
        value = _signed(value & _MASK)
    x = (keys ^ value) + _signed(_GOLDEN)
    x = (x ^ _shift_right(x, 30)) * _signed(_MUL1)
    return (x ^ _shift_right(x, 27)) * _signed(_MUL2)


def mix_tensor(keys: torch.Tensor, value: int | torch.Tensor) -> torch.Tensor:
    """Mix one more value into int64 keys: `mix(a, b, value)` from `mix(a, b)`, elementwise with broadcasting."""
    x = _mix_upper_bits(keys, value)
    return x ^ _shift_right(x, 31)


def uniform_of(bits: torch.Tensor, shape: Sequence[int] = ()) -> torch.Tensor:
    """Uniform float32 draws in [0, 1) with 24 random bits, a pure function of the bits and the place in the shape.

    Args:
        bits: keys into which the draw's name is mixed, int64, of any shape where the draw of one sample is one number,
            else [B].
        shape: of the draw of one sample.

    Returns:
        float32 tensor of shape [*bits.shape, *shape].
    """
    if shape:
        counter = torch.arange(math.prod(shape), dtype=torch.int64, device=bits.device)
        bits = _mix_upper_bits(bits[:, None], counter[None, :]).view(bits.shape[0], *shape)
    return _shift_right(bits, 40).to(torch.float32) * 2.0**-24


def normal_bits(keys: torch.Tensor, name: str) -> torch.Tensor:
    """Keys [B] with the names of the two uniform draws behind a normal one mixed into them, int64 [2, B]."""
    return torch.stack([mix_tensor(keys, name_key(f"{name}/{part}")) for part in ("radius", "angle")])


def normal(bits: torch.Tensor, shape: Sequence[int] = ()) -> torch.Tensor:
    """Standard normal float32 draws of shape [B, *shape] by Box and Muller (1958), from `normal_bits` on any device."""
    radius, angle = uniform_of(bits.flatten(), shape).unflatten(0, bits.shape)
    return torch.sqrt(-2.0 * torch.log1p(-radius)) * torch.cos((2.0 * math.pi) * angle)


def permute(positions: Sequence[int] | np.ndarray, size: int, key: int) -> np.ndarray:
    """Evaluate a keyed permutation of range(size) only at the given positions.

    An eight-round Feistel network on the smallest even number of bits that holds `size`, with cycle walking to stay
    inside it (Black and Rogaway 2002). No rank needs the whole permutation; any step can be computed first.

    Args:
        positions: integers in [0, size), shape [n].
        size: how many elements are permuted.
        key: a 64-bit key, for example `mix(seed, epoch)`.

    Returns:
        int64 array of shape [n], the permuted indices.

    Raises:
        ValueError: a position lies outside [0, size).
    """
    values = np.asarray(positions, dtype=np.int64)
    if values.size and (values.min() < 0 or values.max() >= size):
        raise ValueError(f"positions must lie in [0, {size}), not {values.min()}..{values.max()}")
    half = max(1, ((max(size - 1, 1)).bit_length() + 1) // 2)
    mask = np.uint64((1 << half) - 1)
    rounds = [np.uint64(mix(key, name_key("permute"), r) & _MASK) for r in range(8)]
    shift = np.uint64(half)

    def encrypt(x: np.ndarray) -> np.ndarray:
        left, right = x >> shift, x & mask
        for round_key in rounds:
            left, right = right, left ^ (_finalise_numpy(right + round_key) & mask)
        return (left << shift) | right

    with np.errstate(over="ignore"):
        out = encrypt(values.astype(np.uint64))
        outside = np.nonzero(out >= np.uint64(size))[0]
        while outside.size:
            out[outside] = encrypt(out[outside])
            outside = outside[out[outside] >= np.uint64(size)]
    return out.astype(np.int64)
