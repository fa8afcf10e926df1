"""`ds-vit plan --calibrate FILE`: what this machine's accelerator reaches, measured, as a file for `--gpu FILE`.

Products of matrices by their least dimension, fused attention, a copy, everything else of a block of timm's, the host's
time for one small operation, and what a worker of the loader gives. Started with several ranks (`torchrun -m ds_vit.cli
plan --calibrate …`) all of them measure at the same time, as they compute at the same time in a run and share memory
and caches; and the link between them is measured too. A busy machine makes all figures worse.
"""

from __future__ import annotations

import dataclasses
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import yaml

from ds_vit.fault_tolerance.errors import UserError
from ds_vit.planner.hardware import Accelerator, Link, accelerator, accelerator_of_device
from ds_vit.tools import kernels
from ds_vit.tools.loader_rate import images_per_worker
from ds_vit.tools.measure import mean_over_ranks

_MESSAGES = (2**12, 2**18, 2**21, 2**24)  # bytes


def calibrate(path: Path, device: torch.device, *, widths: tuple[int, ...] = (), turns: int = 5) -> dict[str, Any]:
    """Measure, and write the file; of several ranks also a file of their link beside it (a collective).

    Args:
        path: of the file.
        device: that this rank computes on.
        widths: of the products of matrices; those of the device's kind where empty.
        turns: how often each figure is measured; the fastest turn counts, as machines are noisy.

    Returns:
        The figures, of the mean rank.

    Raises:
        UserError: the device is neither a CPU nor a CUDA GPU; a file cannot be written.
    """
    of_worker = images_per_worker(device)
    calibration = Calibration(device, widths=widths)
    seconds = calibration.turn()
    for _ in range(turns - 1):
        seconds = {key: min(value, seconds[key]) for key, value in calibration.turn().items()}
    return calibration.write(path, seconds, of_worker)


class Calibration:
    """Everything that is measured, ready to be run in turns with something else.

    Args:
        device: that this rank computes on.
        widths: of the products of matrices; those of the device's kind where empty.

    Raises:
        UserError: the device is neither a CPU nor a CUDA GPU.
    """

    def __init__(self, device: torch.device, *, widths: tuple[int, ...] = ()) -> None:
        self.device, kind = device, device.type
        if kind not in kernels.ROWS:
            raise UserError(
                f"--calibrate measures {' and '.join(kernels.ROWS)}, and this device is {kind}; write its file by hand"
            )
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.widths = widths or kernels.WIDTHS[kind]
        # What a run here computes in; of the other type a peak is enough: a CPU without such products takes minutes.
        self.own, other = (torch.bfloat16, torch.float32) if kind == "cuda" else (torch.float32, torch.bfloat16)
        self._block = kernels.Block(self.own, device)
        self._calls: dict[str, Callable[[], object]] = {
            **{
                f"product {least}": kernels.products(*kernels.shape(least, kind), self.own, device)
                for least in self.widths
            },
            "other": kernels.products(*kernels.shape(kernels.OTHER[kind], kind), other, device),
            "attention": kernels.attention(*kernels.ATTENTION[kind], self.own, device),
            "copy": kernels.copy(kernels.COPY[kind], device),
            "operation": kernels.operations(device),
            "block": self._block.step,
        }

    def turn(self, seconds: float = 0.2) -> dict[str, float]:
        """Seconds of a call of each, of messages between the ranks too (a collective).

        Args:
            seconds: that each is measured for.
        """
        found = {key: _seconds(call, self.device, seconds) for key, call in self._calls.items()}
        if self.ranks > 1:
            import deepspeed.comm as of_zero

            for size in _MESSAGES:
                whole = torch.zeros(size // 4 // self.ranks * self.ranks, device=self.device)
                share = whole.chunk(self.ranks)[dist.get_rank()]  # in its place, as ZeRO has it
                for kind, call in {
                    "sum": partial(dist.all_reduce, whole),
                    "gather": partial(of_zero.all_gather_into_tensor, whole, share),
                    "scatter": partial(of_zero.reduce_scatter_fn, share, whole),
                }.items():
                    found[f"{kind} {size}"] = _seconds_of_collective(call, self.device, seconds / 3)
        return found

    def accelerator(self, seconds: Mapping[str, float], inside: str = "") -> Accelerator:
        """The figures that these seconds come to.

        Args:
            seconds: from `turn`.
            inside: the link inside a host; the usual one where empty.
        """
        kind = self.device.type
        rates = {
            least: kernels.product_flops(*kernels.shape(least, kind)) / seconds[f"product {least}"]
            for least in self.widths
        }
        peaks = {self.own: max(rates.values())}
        other = torch.float32 if self.own == torch.bfloat16 else torch.bfloat16
        # As if it reached the same shares of its peak.
        share = rates[kernels.OTHER[kind]] / peaks[self.own] if kernels.OTHER[kind] in rates else 1.0
        peaks[other] = kernels.product_flops(*kernels.shape(kernels.OTHER[kind], kind)) / seconds["other"] / share
        known = self.known
        if kind == "cuda":
            memory, hosts = torch.cuda.get_device_properties(self.device).total_memory, torch.cuda.device_count()
        else:
            memory, hosts = psutil.virtual_memory().total // self.ranks, self.ranks
        copy = 2 * kernels.COPY[kind] / seconds["copy"]
        found = Accelerator(
            name=self.name,
            memory_bytes=float(memory),
            bf16_tflops=peaks[torch.bfloat16] / 1e12,
            fp32_tflops=peaks[torch.float32] / 1e12,
            memory_bytes_per_second=copy,
            memory_efficiency=1.0,
            watts=known.watts if known else 0.0,
            gpus_per_node=hosts,
            inside=inside or (known.inside if known else "nvlink4"),
            matmul_efficiency={width: rate / peaks[self.own] for width, rate in rates.items()},
            attention_efficiency=kernels.attention_flops(*kernels.ATTENTION[kind])
            / seconds["attention"]
            / peaks[self.own],
            elementwise_efficiency=1.0,
            hidden_share=known.hidden_share if known else 0.8,
            seconds_per_operation=seconds["operation"] / kernels.OPERATIONS,
            reserved_bytes=known.reserved_bytes if known else 0.0,
            images_per_worker=(known or accelerator("cpu")).images_per_worker,
        )
        return dataclasses.replace(found, elementwise_efficiency=self._block.rest(found, seconds["block"]) / copy)

    def link(self, seconds: Mapping[str, float]) -> Link:
        """The link between the ranks: lines through the times of messages of several sizes.

        A ring of n ranks sends 2 (n - 1) / n of a message over each link to sum it, in 2 (n - 1) waits, and half of
        both to gather it, or to sum it for one rank a share (docs/planning.md).
        """
        n = self.ranks
        of = {
            kind: _line([(size, seconds[f"{kind} {size}"]) for size in _MESSAGES])
            for kind in ("sum", "gather", "scatter")
        }
        (by_sum, wait), (by_gather, to_gather), (by_scatter, to_scatter) = of.values()
        return Link(
            name=f"between {n} ranks on {self.name}",
            bytes_per_second=2 * (n - 1) / n / by_sum,
            efficiency=1.0,
            latency_seconds=wait / (2 * (n - 1)),
            gather_share=by_sum / 2 / by_gather,
            scatter_share=by_sum / 2 / by_scatter,
            gather_latency_seconds=to_gather / (n - 1),
            scatter_latency_seconds=to_scatter / (n - 1),
        )

    @property
    def name(self) -> str:
        """Of the device."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else platform.processor() or "cpu"

    @property
    def known(self) -> Accelerator | None:
        """What the planner knows of it."""
        return accelerator_of_device(self.name) if self.device.type == "cuda" else accelerator("cpu")

    def write(self, path: Path, seconds: Mapping[str, float], images_per_worker: float) -> dict[str, Any]:
        """Write the file, or of several ranks both, and give the figures.

        Args:
            path: of the file.
            seconds: from `turn`.
            images_per_worker: a figure of its own.

        Raises:
            UserError: a file cannot be written.
        """
        source = f"measured by ds-vit plan --calibrate, torch {torch.__version__}, {torch.get_num_threads()} threads"
        source += f", {self.ranks} ranks at the same time" if self.ranks > 1 else ""
        taken = f"not measured: as {self.known.name}" if self.known else "not measured, and not known of this one"
        others = dict.fromkeys(("watts", "inside", "reserved_bytes", "hidden_share"), taken)
        others["memory_efficiency"] = "the rate beside it is a copy's own"
        inside = ""
        if self.ranks > 1:
            of_link = path.with_name(f"{path.stem}_link.yaml")
            inside, others["inside"] = of_link.name, "the file beside this one"
            _write(of_link, dataclasses.asdict(self.link(seconds)), source, {})
        found = {**dataclasses.asdict(self.accelerator(seconds, inside)), "images_per_worker": images_per_worker}
        _write(path, found, source, others)
        return found


def _write(path: Path, figures: Mapping[str, Any], source: str, others: Mapping[str, str]) -> None:
    """A file of figures with their sources, by rank 0."""
    table = {
        key: value if key == "name" else {"value": value, "source": others.get(key, source)}
        for key, value in figures.items()
    }
    if dist.is_initialized() and dist.get_rank():
        return
    try:
        path.write_text(yaml.safe_dump(table, sort_keys=False))
    except OSError as error:
        raise UserError(f"--calibrate {path}: {error.strerror or error}") from None


def _seconds(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    """What a call takes while all ranks make the same calls: the median on a rank, the mean of the ranks.

    Not the fastest call: that may have met no other rank.
    """
    call()
    times: list[float] = []
    if dist.is_initialized():
        dist.barrier()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or len(times) < 3:
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - start)
    return mean_over_ranks(statistics.median(times), device)


def _seconds_of_collective(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    """The median of as many calls as fit in the time, the same number on every rank."""

    def once() -> float:
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    once()
    times = [once() for _ in range(max(3, min(200, int(seconds / mean_over_ranks(once(), device)))))]
    return mean_over_ranks(statistics.median(times), device)


def _line(points: list[tuple[int, float]]) -> tuple[float, float]:
    """(seconds a byte, seconds of a message of nothing), by least squares of the relative error."""
    of = torch.tensor(points, dtype=torch.float64)
    sizes, times = of[:, 0], of[:, 1]
    rows = torch.stack([sizes / times, 1 / times], dim=1)
    slope, wait = torch.linalg.lstsq(rows, torch.ones(len(points), 1, dtype=torch.float64)).solution.flatten().tolist()
    return max(slope, 1e-15), max(wait, 1e-9)
