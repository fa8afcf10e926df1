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
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
import yaml
from PIL import Image
from torch.nn import functional as F

from ds_vit.fault_tolerance.errors import UserError
from ds_vit.launching.process import Process
from ds_vit.models import ModelSpec, create_model, take_apart
from ds_vit.planner.hardware import Accelerator, Link, accelerator, accelerator_of_device
from ds_vit.planner.layers import as_a_rank_has_them
from ds_vit.planner.work import work_of_layers

_ROWS = {"cpu": 1024, "cuda": 16384}
_OTHER = {"cpu": 64, "cuda": 512}  # least dimension of the products of the type that runs here do not compute in
_LEAST_WIDTH = {"cpu": 384, "cuda": 512}  # of a ViT worth planning: a lesser dimension is a few images' rows
_WIDTHS = {"cpu": (64, 192, 384, 768), "cuda": (512, 1024, 2048, 4096, 8192)}
_COPY = {"cpu": 2**26, "cuda": 2**32}
_BLOCK = {"cpu": ("vit_small_patch16_224", 2), "cuda": ("vit_large_patch16_224", 64)}  # and images
_ATTENTION = {"cpu": (4, 6), "cuda": (64, 16)}  # images and heads
_OPERATIONS = 200  # for one wait of the host
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
        if kind not in _ROWS:
            raise UserError(
                f"--calibrate measures {' and '.join(_ROWS)}, and this device is {kind}; write its file by hand"
            )
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.widths = widths or _WIDTHS[kind]
        # What a run here computes in; of the other type a peak is enough: a CPU without such products takes minutes.
        self.own, other = (torch.bfloat16, torch.float32) if kind == "cuda" else (torch.float32, torch.bfloat16)
        self._block = _Block(self.own, device)
        self._calls: dict[str, Callable[[], object]] = {
            **{f"product {least}": _products(*_shape(least, kind), self.own, device) for least in self.widths},
            "other": _products(*_shape(_OTHER[kind], kind), other, device),
            "attention": _attention(*_ATTENTION[kind], self.own, device),
            "copy": _copy(_COPY[kind], device),
            "operation": _operation(device),
            "block": self._block.step,
        }

    def turn(self, seconds: float = 0.2) -> dict[str, float]:
        """Seconds of a call of each, of messages between the ranks too (a collective).

        Args:
            seconds: that each is measured for.
        """
        found = {key: _seconds(call, self.device, seconds) for key, call in self._calls.items()}
        if self.ranks > 1:
            for size in _MESSAGES:
                whole = torch.zeros(size // 4 // self.ranks * self.ranks, device=self.device)
                share = torch.zeros(whole.numel() // self.ranks, device=self.device)
                for kind, call in {
                    "sum": partial(dist.all_reduce, whole),
                    "gather": partial(dist.all_gather_into_tensor, whole, share),
                    "scatter": partial(dist.reduce_scatter_tensor, share, whole),
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
        rates = {least: _product_flops(*_shape(least, kind)) / seconds[f"product {least}"] for least in self.widths}
        peaks = {self.own: max(rates.values())}
        other = torch.float32 if self.own == torch.bfloat16 else torch.bfloat16
        # As if it reached the same shares of its peak.
        share = rates[_OTHER[kind]] / peaks[self.own] if _OTHER[kind] in rates else 1.0
        peaks[other] = _product_flops(*_shape(_OTHER[kind], kind)) / seconds["other"] / share
        known = self.known
        if kind == "cuda":
            memory, hosts = torch.cuda.get_device_properties(self.device).total_memory, torch.cuda.device_count()
        else:
            memory, hosts = psutil.virtual_memory().total // self.ranks, self.ranks
        copy = 2 * _COPY[kind] / seconds["copy"]
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
            attention_efficiency=_attention_flops(*_ATTENTION[kind]) / seconds["attention"] / peaks[self.own],
            elementwise_efficiency=1.0,
            hidden_share=known.hidden_share if known else 0.8,
            seconds_per_operation=seconds["operation"] / _OPERATIONS,
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


def images_per_worker(device: torch.device) -> float:
    """Images that one process of a loader makes ready in a second while all ranks have one (a collective).

    Of JPEG files of ImageNet's mean size, 500 x 375 pixels and about 110 kB, cropped to 224 and flipped.

    Args:
        device: that this rank computes on.
    """
    from ds_vit.config.shipped import or_shipped
    from ds_vit.tools.bench_data import STAGES, bench_data

    with tempfile.TemporaryDirectory() as folder:
        files = Path(folder, "train", "pictures")
        files.mkdir(parents=True)
        for number in range(_PICTURES):
            _picture(number).save(files / f"{number}.jpg", quality=90)
        words = ["--deepspeed_config", or_shipped("ds_configs/cpu_zero0_fp32.json"), "--data-dir", folder]
        words += ["--model", "vit_tiny_patch16_224", "-b", "8", "--val-split", "", "--workers", "0"]
        seconds = bench_data(
            [*words, "--color-jitter", "0"], _PICTURES, Process("none", 0, 1, device.index or 0, 1)
        ).seconds
    return 1 / _mean(sum(seconds[stage] for stage in STAGES[:-1]), device)


_PICTURES = 32


def _picture(seed: int) -> Image.Image:
    """Shapes at several scales and grain, whose files are as long as photographs'."""
    draws = np.random.default_rng(seed)
    pixels = np.zeros((375, 500, 3))
    for scale, weight in ((8, 60.0), (32, 30.0), (125, 12.0)):
        small = Image.fromarray(draws.integers(0, 256, (scale, scale, 3), dtype=np.uint8)).resize((500, 375))
        pixels += weight / 128 * (np.asarray(small) - 128.0)
    pixels += draws.normal(128.0, 19.0, pixels.shape)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


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
    return _mean(statistics.median(times), device)


def _seconds_of_collective(call: Callable[[], object], device: torch.device, seconds: float) -> float:
    """The median of as many calls as fit in the time, the same number on every rank."""

    def once() -> float:
        start = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    once()
    times = [once() for _ in range(max(3, min(200, int(seconds / _mean(once(), device)))))]
    return _mean(statistics.median(times), device)


def _mean(value: float, device: torch.device) -> float:
    """Of all ranks."""
    if not dist.is_initialized():
        return value
    together = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(together)
    return float(together) / dist.get_world_size()


def _layers(rows: int, width: int) -> int:
    """Products one after the other: where rows are few the weights decide, and come from memory, as in a model."""
    return 4 if rows < width else 1


def _shape(least: int, kind: str) -> tuple[int, int]:
    """(rows, width) of the products whose least dimension is measured."""
    width = max(least, _LEAST_WIDTH[kind])
    return (_ROWS[kind] if least == width else least), width


def _products(rows: int, width: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    """[rows, width] x [width, 4 width] and the two products of its backward pass, in several layers."""
    a = torch.randn(rows, width, device=device, dtype=dtype)
    layers = [torch.randn(width, 4 * width, device=device, dtype=dtype) for _ in range(_layers(rows, width))]
    back = torch.randn(rows, 4 * width, device=device, dtype=dtype)
    return lambda: [(a @ b, back @ b.t(), a.t() @ back) for b in layers]


def _product_flops(rows: int, width: int) -> int:
    """FLOPs of `_products`."""
    return _layers(rows, width) * 3 * 2 * rows * width * 4 * width


def _attention(images: int, heads: int, dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    """Fused attention with heads of 64 and 197 tokens, forward and back."""
    q, k, v = (torch.randn(images, heads, 197, 64, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    back = torch.randn_like(q)
    return lambda: torch.autograd.grad(F.scaled_dot_product_attention(q, k, v), (q, k, v), back)


def _attention_flops(images: int, heads: int) -> int:
    """FLOPs of `_attention`: its backward pass has five products for the forward pass's two."""
    return (2 + 5) * 2 * images * heads * 197**2 * 64


def _copy(size: int, device: torch.device) -> Callable[[], object]:
    """A copy of so many bytes."""
    source = torch.zeros(size // 4, device=device)
    target = torch.empty_like(source)
    return lambda: target.copy_(source)


def _operation(device: torch.device) -> Callable[[], object]:
    """Small operations, one after the other."""
    small = torch.zeros(8, device=device)
    return lambda: [small.add_(1.0) for _ in range(_OPERATIONS)]


class _Block:
    """A block of timm's, for what is no product of matrices in it: norms, GELU, sums, copies, and new memory for each.

    Args:
        dtype: of weights and tokens.
        device: that computes.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        name, self.images = _BLOCK[device.type]
        spec = ModelSpec(name, model_kwargs={"depth": 2})  # the last block computes less
        model = create_model(spec)
        compute = str(dtype).removeprefix("torch.")
        layers = as_a_rank_has_them(
            take_apart(model), tp=1, sequence_parallel=False, class_parallel=False, compute=compute, norms_fp32=False
        )
        work = work_of_layers(model, layers, dtype)[1]
        self._passes = work.forward, work.backward
        self.block = create_model(spec, device=str(device)).blocks[0].to(dtype)
        self._tokens = torch.randn(self.images, 197, model.embed_dim, device=device, dtype=dtype, requires_grad=True)
        self._back = torch.randn_like(self._tokens)

    def step(self) -> object:
        """Forward and back."""
        return torch.autograd.grad(self.block(self._tokens), (self._tokens, *self.block.parameters()), self._back)

    def rest(self, products: Accelerator, seconds: float) -> float:
        """Bytes a second of what is no product.

        Args:
            products: whose products of matrices and attention have been measured.
            seconds: of a step of the block.
        """
        of_type = self._tokens.element_size()
        multiplying = sum(
            product.seconds(products, of_type, self.images) for one in self._passes for product in one.products
        )
        # Where another program came between the measurements, nothing or less would be left: a block's rest takes more.
        rest = max(seconds - multiplying, 0.1 * seconds)
        return self.images * sum(one.bytes for one in self._passes) / rest


def _line(points: list[tuple[int, float]]) -> tuple[float, float]:
    """(seconds a byte, seconds of a message of nothing), by least squares of the relative error."""
    of = torch.tensor(points, dtype=torch.float64)
    sizes, times = of[:, 0], of[:, 1]
    rows = torch.stack([sizes / times, 1 / times], dim=1)
    slope, wait = torch.linalg.lstsq(rows, torch.ones(len(points), 1, dtype=torch.float64)).solution.flatten().tolist()
    return max(slope, 1e-15), max(wait, 1e-9)
