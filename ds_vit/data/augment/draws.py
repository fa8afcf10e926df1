"""Letting library code draw from a sample's key."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

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


class seeded:  # a class, since a generator would take as long as some draws
    """Let the global generators of `random`, NumPy and torch (CPU) be pure functions of (key, name) inside.

    All three, whichever a library is known to use: a change there must not make a draw depend on the process.

    Args:
        key: of the sample.
        name: of the draw.
        torch_only: seed torch's generator only: torchvision asks no other one, as a test verifies, and seeding `random`
            takes as long as the draws themselves.
    """

    def __init__(self, key: int, name: str, *, torch_only: bool = False) -> None:
        self._seed = randomness.mix(key, randomness.name_key(name)) & _MASK
        self._torch_only = torch_only
        self._own_shield: AbstractContextManager[None] | None = None

    def __enter__(self) -> None:
        if not getattr(_shield, "up", False):
            self._own_shield = shielded()
            self._own_shield.__enter__()
        torch.default_generator.manual_seed(self._seed)
        if not self._torch_only:
            random.seed(self._seed)
            np.random.seed(self._seed & 0xFFFFFFFF)

    def __exit__(self, *error: Any) -> None:
        if self._own_shield is not None:
            self._own_shield.__exit__(*error)
