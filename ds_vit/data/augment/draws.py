"""Letting library code draw from a sample's key."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from ds_vit import randomness

_MASK = (1 << 64) - 1
_shield = threading.local()


def uniform(key: int, name: str) -> float:
    """One uniform draw in [0, 1) with 53 random bits, a pure function of (key, name)."""
    return ((randomness.mix(key, randomness.name_key(name)) & _MASK) >> 11) * 2.0**-53


@contextmanager
def shielded() -> Iterator[None]:
    """Leave the global generators of `random`, NumPy and torch (CPU) as they were on entry.

    Saving and restoring them costs more than most draws; one shield around a batch makes the `seeded` blocks in it
    cheap.
    """
    if getattr(_shield, "up", False):
        yield
        return
    torch_state = torch.get_rng_state()
    _shield.up = True
    try:
        with randomness.keyed_global_rng(0, "shield"):
            yield
    finally:
        _shield.up = False
        torch.set_rng_state(torch_state)


@contextmanager
def seeded(key: int, name: str) -> Iterator[None]:
    """Let the global generators of `random`, NumPy and torch (CPU) be pure functions of (key, name) inside.

    All three, whichever a library is known to use: a change there must not make a draw depend on the process.
    """
    with shielded():
        seed = randomness.mix(key, randomness.name_key(name)) & _MASK
        random.seed(seed)
        np.random.seed(seed & 0xFFFFFFFF)
        torch.default_generator.manual_seed(seed)
        yield
