"""Races planted in ZeRO-3 by layer: the simulated device reports each, and the CPU trains on."""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from functools import partial
from unittest import mock

import pytest
import torch

from ds_vit.engine.zero3 import Unit, ZeroUnits
from simulated_device.test_whole_runs import CLASSIFICATION, NOTHING_STAYS, Planted, train, words_of


class Unrecorded(torch.Event):
    """An event that nobody has to wait for."""

    def record(self, stream=None) -> None:
        pass


def without_events(name: str, *events: str) -> AbstractContextManager:
    """In a method, the streams wait for no event of these names."""
    original = getattr(ZeroUnits, name)

    def careless(self, *args):
        kept = {event: getattr(self, event) for event in events} if self._gathering else {}
        vars(self).update({event: Unrecorded(self.device) for event in kept})
        try:
            return original(self, *args)
        finally:
            vars(self).update(kept)

    return mock.patch.object(ZeroUnits, name, careless)


def used_early() -> AbstractContextManager:
    """A unit is copied out of the landing buffer while it is being gathered."""
    wait = ZeroUnits._wait

    def impatient(self) -> None:
        if self._gathering is None:
            wait(self)
        self._coming = self._work = None

    return mock.patch.object(ZeroUnits, "_wait", impatient)


def freed_early() -> AbstractContextManager:
    """A unit's memory is the gathering stream's: freed, it is used again while the model still reads it."""
    stack, gather, wait, copy_out = contextlib.ExitStack(), ZeroUnits._gather, ZeroUnits._wait, Unit.copy_out

    def wait_there(self) -> None:
        with self._gathering or contextlib.nullcontext():
            wait(self)

    def gather_there(self, unit, following) -> None:
        def copy_there(unit) -> None:
            with self._gathering or contextlib.nullcontext():
                copy_out(unit)
            if self._gathering is not None:
                self._compute.wait_stream(self._gathering)

        with mock.patch.object(Unit, "copy_out", copy_there):
            gather(self, unit, following)

    stack.enter_context(mock.patch.object(ZeroUnits, "_wait", wait_there))
    stack.enter_context(mock.patch.object(ZeroUnits, "_gather", gather_there))
    return stack


RACES: dict[str, Planted] = {
    "none": contextlib.nullcontext,
    "a unit used before it is gathered": used_early,
    "a unit freed while its stream needs it": freed_early,
    "the landing buffer used again too early": partial(without_events, "_start", "_copied_out"),
    "a gradient reduced before it is complete": partial(without_events, "_reduce", "_filled"),
    "the leaving buffer used again too early": partial(without_events, "_reduce", "_sent"),
    "a sum used before it is there": partial(mock.patch.object, ZeroUnits, "_join", return_value=None),
}


def plant(race: str) -> AbstractContextManager:
    """On a rank: the race of this name."""
    return RACES[race]()


@pytest.mark.slow
@pytest.mark.parametrize("race", RACES)
def test_a_race_ends_the_run_on_the_device_only(ranks, device_library, tmp_path, race):
    """Two ranks, nothing stays gathered: every unit passes through the buffers in both directions."""
    words = words_of("cpu_zero3_fp32.json", *CLASSIFICATION, *NOTHING_STAYS, "--log-interval", 100)
    for library in (device_library, None):
        output = ["--output", str(tmp_path / ("cpu" if library is None else "device"))]
        found = ranks.run(2, partial(train, planted=partial(plant, race)), library, [*words, *output])
        codes, errors = zip(*found, strict=True)
        caught = race != "none" and library is not None
        assert (0 in codes) != caught, errors
        assert not caught or any("race: " in error or "still needs it" in error for error in errors), errors
