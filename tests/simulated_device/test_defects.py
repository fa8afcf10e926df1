"""Defects planted in ds_vit's own steps: the simulated device reports each, and the CPU none.

Numbers that arrive late are here too: what may be read when, and what comes of reading them early.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
from accidents import spoil_batches
from curves import read_rows
from picture_folders import write_photos

import simulated_device
from ds_vit.data import fields as inputs
from ds_vit.engine.flat_gradient import FlatGradient
from ds_vit.engine.plain import PlainEngine
from ds_vit.engine.step_guard import HostScalar
from ds_vit.monitoring.metrics import Lagging
from ds_vit.tasks.classification.task import Classification
from simulated_device import NAME, on_device
from simulated_device.test_inputs import stub_decoder
from simulated_device.test_whole_runs import MIXUP, Planted, buckets, train, words_of

# ---- Defects that end a run ----


def without_waits(defect: Planted) -> contextlib.ExitStack:
    """From the second step on the host must not wait."""
    take_step, calls, stack = PlainEngine.train_step, itertools.count(), contextlib.ExitStack()

    def watched(self, *args):
        first = next(calls) == 0
        with contextlib.nullcontext() if first else simulated_device.no_host_synchronisations():
            return take_step(self, *args)

    stack.enter_context(mock.patch.object(PlainEngine, "train_step", watched))
    stack.enter_context(defect())
    return stack


def hidden_item() -> AbstractContextManager:
    """The loss is read in each step."""
    make = Classification.loss

    def reading(self, tp):
        loss = make(self, tp)

        def fn(logits, batch):
            value = loss(logits, batch)
            return value * 1.0 if value.item() else value

        return fn

    return mock.patch.object(Classification, "loss", reading)


def host_tensor() -> AbstractContextManager:
    """The mean and the deviation of images are left on the host."""
    channels = inputs._channels
    return mock.patch.object(inputs, "_channels", lambda values, device: channels(values, torch.device("cpu")))


@contextlib.contextmanager
def decoded() -> Iterator[None]:
    """JPEG files are decoded by the stub."""
    with stub_decoder() as streams:
        yield
    assert bool(streams) == torch.accelerator.is_available(), "decoded on the device, if there is one"


def sums_not_awaited() -> AbstractContextManager:
    """ZeRO-1's gradients are used while their sums over the ranks are under way."""
    send, kept = FlatGradient._send, []

    def impatient(self, bucket):
        send(self, bucket)
        kept.extend(self._works)
        self._works = []

    return mock.patch.object(FlatGradient, "_send", impatient)


def buffers_not_awaited() -> AbstractContextManager:
    """ZeRO-2 reads and reuses a buffer whose sum is under way."""
    fold, kept = FlatGradient._fold, []

    def impatient(self, slot):
        if self._in_flight[slot] is not None:
            bucket, works = self._in_flight[slot]
            kept.extend(works)
            self._in_flight[slot] = bucket, []
        fold(self, slot)

    return mock.patch.object(FlatGradient, "_fold", impatient)


OVERLAP = ("cpu_zero2_fp32.json", 2, buckets(30_000))
PLAIN = ("cpu_zero1_fp32.json", 1, ())
DECODED = ("cpu_zero1_fp32.json", 1, ("--augment-on", "device", "--decode", "fast", "--grad-accum-steps", 2))
DEFECTS: dict[str, tuple[tuple, Planted, str]] = {
    "a hidden item": (PLAIN, hidden_item, "item waits for the device: a host synchronisation where none is allowed"),
    "a host tensor": (PLAIN, host_tensor, "but found at least two devices"),
    "none while decoding": (DECODED, decoded, ""),
    "sums that are not awaited": (("cpu_zero1_fp32.json", 2, buckets(30_000)), sums_not_awaited, "race: "),
    "buffers that are not awaited": (OVERLAP, buffers_not_awaited, "race: "),
}


@pytest.mark.parametrize("case", DEFECTS)
def test_a_defect_ends_the_run_on_the_device_only(ranks, device_library, tmp_path, case):
    (config, world_size, more), defect, message = DEFECTS[case]
    if "fast" in more:
        pytest.importorskip("simplejpeg")
        write_photos(tmp_path / "photos", 24, "jpg")
        more = (*more, "--dataset", "", "--data-dir", tmp_path / "photos")
    for library in (device_library, None):
        words = words_of(config, *MIXUP, "-b", 8, *more, "--log-interval", 100)
        words += ["--output", str(tmp_path / ("cpu" if library is None else "device"))]
        planted = partial(without_waits, defect) if library and world_size == 1 else defect
        codes, errors = zip(*ranks.run(world_size, train, library, words, planted), strict=True)
        assert set(codes) == ({1} if message and library else {0}), errors
        assert library is None or message in errors[0]
    if case == "none while decoding":
        summary = json.loads((tmp_path / "device" / "summary.json").read_text())
        assert summary["decoded_on_device"] == 1.0


# ---- Numbers that arrive late ----


@on_device
def test_a_number_can_be_read_when_it_has_arrived():
    scalar = HostScalar(torch.tensor(3.0).pin_memory().to(NAME, non_blocking=True))
    assert not scalar.arrived
    assert math.isnan(float(scalar._here)), "the copy has not landed"
    assert scalar.read() == 3.0


@on_device
def test_a_lagging_loss_is_that_of_an_earlier_step():
    late, shown = Lagging(), []
    with simulated_device.no_host_synchronisations():
        for step in range(8):
            shown.append(late.exchange(torch.full((), float(step), device=NAME)))
    # An event is complete at its third query: two exchanges are ignored after each copy.
    assert shown == [None, None, None, 0.0, None, None, 3.0, None]


def reads_early() -> AbstractContextManager:
    """The planted defect: the result of a step is read without waiting for its copy."""
    return mock.patch.object(HostScalar, "read", lambda self: float(self._here))


def spoiled() -> AbstractContextManager:
    """The images of the third step are not finite."""
    spoil_batches([2])
    return contextlib.nullcontext()


@pytest.mark.parametrize(
    ("planted", "skipped"),
    [(contextlib.nullcontext, []), (spoiled, [3]), (reads_early, [2, 3, 4, 5])],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_the_device_decides_and_the_host_reads_late(ranks, device_library, tmp_path, planted, skipped):
    """The first step is decided by the host; of the others it learns while the next is under way."""

    def run(library: Path | None) -> list[int]:
        output = tmp_path / str(library is None)
        words = words_of("cpu_zero1_fp32.json", *MIXUP, "-b", 8, "--on-nonfinite", "skip", "--max-steps", 6)
        [(code, errors)] = ranks.run(1, train, library, [*words, "--output", str(output)], planted)
        assert code == 0, errors
        return [row["step"] for row in read_rows(output) if row["kind"] == "skip" and row["step"] < 6]

    assert run(device_library) == skipped
    assert run(None) == ([3] if planted is spoiled else []), "a CPU's numbers are there at once"
