"""Throughput of a run: images per second, the share of time spent waiting for data, the accelerator's peak."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

from ds_vit.device import hardware_name
from ds_vit.engine.step_guard import HostScalar
from ds_vit.planner.hardware import accelerator_of_device

# Accelerators without a file in ds_vit/planner/data/: dense bf16/fp16 tensor-core peak and fp32 peak outside the tensor
# cores in TFLOP/s, from NVIDIA's datasheets. The longest name contained in the device's name counts.
_UNPLANNED_TFLOPS = {
    "H20": (148.0, 44.0),
    "A40": (149.7, 37.4),
    "A30": (165.0, 10.3),
    "A10": (125.0, 31.2),
    "L40S": (362.0, 91.6),
    "L40": (181.0, 90.5),
    "L4": (121.0, 30.3),
    "V100": (125.0, 15.7),
    "T4": (65.0, 8.1),
}


def peak_tflops(device: torch.device, precision: str) -> float | None:
    """Peak TFLOP/s of the accelerator for this precision, or None if unknown (CPUs, other GPUs)."""
    name = hardware_name(device)
    if planned := accelerator_of_device(name):
        return planned.fp32_tflops if precision == "fp32" else planned.bf16_tflops
    known = [key for key in _UNPLANNED_TFLOPS if key in name]
    if not known:
        return None
    half, single = _UNPLANNED_TFLOPS[max(known, key=len)]
    return single if precision == "fp32" else half


class Throughput:
    """Images per second and the share of time spent waiting for data, since the last call of `window`.

    Read it when the device is synchronised; exclude evaluation with `pause` and `resume`.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self.total_images = 0
        self.total_seconds = 0.0
        self._paused = 0.0
        self.restart()

    def restart(self) -> None:
        """Start a new window and discard the old one."""
        self._start = self._clock()
        self._waited = 0.0
        self._images = 0

    def waited(self, seconds: float) -> None:
        """Time that the training loop spent waiting for a batch."""
        self._waited += seconds

    def step(self, images: int) -> None:
        """An optimizer step over a global batch of `images` has been launched."""
        self._images += images

    def pause(self) -> None:
        """Time from here to `resume` is not training."""
        self._paused = self._clock()

    def resume(self) -> None:
        """Resume the window."""
        self._start += self._clock() - self._paused

    def window(self, *, count: bool = True) -> tuple[float, float]:
        """(images per second, share of time waiting for data) since the last call; starts a new window.

        Args:
            count: add the window to the run's totals (not done for the first step, which warms up).
        """
        seconds = max(self._clock() - self._start, 1e-9)
        rate, waiting = self._images / seconds, min(1.0, self._waited / seconds)
        if count:
            self.total_images += self._images
            self.total_seconds += seconds
        self.restart()
        return rate, waiting


class Lagging:
    """A device scalar from a step or more ago, so that reading it does not synchronise."""

    def __init__(self) -> None:
        self._sent: HostScalar | None = None

    def exchange(self, figure: torch.Tensor) -> float | None:
        """Start copying a scalar tensor; returns the one copied before, or None.

        While that copy is in progress, the new scalar is ignored.
        """
        if self._sent is not None and not self._sent.arrived:
            return None
        before = self._sent.read() if self._sent is not None else None
        self._sent = HostScalar(figure)
        return before
