"""Measure the rates of this machine's accelerator, and write them as a file for `ds-vit plan --gpu FILE`.

    python docs/benchmarks/calibrate.py FILE.yaml

Products of matrices by their least dimension, fused attention, a copy, everything else of a timm block, the host's time
for one small operation, and the rate of a loader's worker. With several ranks (`torchrun --nproc_per_node 2
docs/benchmarks/calibrate.py FILE.yaml`) all of them measure at the same time, because they share memory and caches in a
run too, and the link between them is measured as well. A busy machine makes all figures worse. Each measured call is
long compared with the host's time for it.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
import torch.distributed as dist
import yaml
from PIL import Image
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ds_vit.device import hardware_name, is_accelerator
from ds_vit.launching.process import Process, discover
from ds_vit.models.layers import take_apart
from ds_vit.models.zoo import ModelSpec, create_model
from ds_vit.planner.counting import Pass, work_of_layers
from ds_vit.planner.hardware import Accelerator, Link, accelerator, accelerator_of_device
from ds_vit.tools.bench import device_name, ranks_met, seconds_of

Call = Callable[[], object]


class _Sizes(NamedTuple):
    """What is measured on a kind of device.

    Attributes:
        own: the type that a run computes in.
        widths: least dimensions of the products of matrices.
        width: least one of a ViT worth planning; a lesser dimension is the rows of a few images.
        rows: of the other products.
        other: least dimension of the product in the other of bf16 and fp32, of which only a peak is needed.
        attention: images and heads.
        copied: bytes.
        block: model and images.
    """

    own: torch.dtype
    widths: tuple[int, ...]
    width: int
    rows: int
    other: int
    attention: tuple[int, int]
    copied: int
    block: tuple[str, int]


_ON_CPU = _Sizes(torch.float32, (64, 192, 384, 768), 384, 1024, 64, (4, 6), 2**26, ("vit_small_patch16_224", 2))
_ON_ACCELERATOR = _Sizes(
    torch.bfloat16, (512, 1024, 2048, 4096, 8192), 512, 16384, 512, (64, 16), 2**32, ("vit_large_patch16_224", 64)
)
_OPERATIONS = 200  # for one wait of the host
_MESSAGES = (2**12, 2**18, 2**21, 2**24)  # bytes
_PICTURES = 32


def calibrate(path: Path, device: torch.device, *, widths: tuple[int, ...] = (), turns: int = 5) -> dict[str, Any]:
    """Measure, and write the file; with several ranks also a file of their link next to it (a collective).

    Args:
        path: of the file.
        device: that this rank computes on.
        widths: of the products of matrices; those of the device's kind where empty.
        turns: how often each figure is measured; the fastest turn counts, as machines are noisy.

    Returns:
        The figures, of the mean rank.
    """
    of_worker = images_per_worker(device)
    calibration = Calibration(device, widths=widths)
    found = [calibration.turn() for _ in range(turns)]
    return calibration.write(path, {key: min(turn[key] for turn in found) for key in found[0]}, of_worker)


class Calibration:
    """Everything that is measured; a turn can alternate with other measurements.

    Args:
        device: that this rank computes on.
        widths: of the products of matrices; those of the device's kind where empty.
    """

    def __init__(self, device: torch.device, *, widths: tuple[int, ...] = ()) -> None:
        self.device, self.sizes = device, _ON_ACCELERATOR if is_accelerator(device) else _ON_CPU
        self.ranks = dist.get_world_size() if dist.is_initialized() else 1
        self.widths, own = widths or self.sizes.widths, self.sizes.own
        self._other = torch.float32 if own == torch.bfloat16 else torch.bfloat16
        block, self._passes = _block(*self.sizes.block, own, device)
        multiplying = {
            **{f"product {least}": _products(least, self.sizes, own, device) for least in self.widths},
            "other": _products(self.sizes.other, self.sizes, self._other, device),
            "attention": _attention(*self.sizes.attention, own, device),
        }
        self._flops = {key: flops for key, (_, flops) in multiplying.items()}
        source, small = torch.zeros(self.sizes.copied // 4, device=device), torch.zeros(8, device=device)
        target = torch.empty_like(source)
        self._calls: dict[str, Call] = {
            **{key: call for key, (call, _) in multiplying.items()},
            "copy": lambda: target.copy_(source),
            "operation": lambda: [small.add_(1.0) for _ in range(_OPERATIONS)],
            "block": block,
        }

    def turn(self, seconds: float = 0.2) -> dict[str, float]:
        """Seconds of a call of each, and of messages between the ranks (a collective).

        Args:
            seconds: that each is measured for.
        """
        found = {key: _seconds(call, self.device, seconds) for key, call in self._calls.items()}
        if self.ranks > 1:
            import deepspeed.comm as of_zero

            for size in _MESSAGES:
                whole = torch.zeros(size // 4 // self.ranks * self.ranks, device=self.device)
                share = whole.chunk(self.ranks)[dist.get_rank()]  # in place, as ZeRO has it
                for kind, call in {
                    "sum": partial(dist.all_reduce, whole),
                    "gather": partial(of_zero.all_gather_into_tensor, whole, share),
                    "scatter": partial(of_zero.reduce_scatter_fn, share, whole),
                }.items():
                    found[f"{kind} {size}"] = _seconds(call, self.device, seconds / 3)
        return found

    def accelerator(self, seconds: Mapping[str, float], inside: str = "") -> Accelerator:
        """The figures that follow from these seconds.

        Args:
            seconds: from `turn`.
            inside: the link inside a host; the usual one where empty.
        """
        sizes, known = self.sizes, self.known
        reached = {key: flops / seconds[key] for key, flops in self._flops.items()}
        rates = {least: reached[f"product {least}"] for least in self.widths}
        peak = max(rates.values())
        # The other type is taken to reach the same shares of its peak.
        peaks = {sizes.own: peak, self._other: reached["other"] / (rates.get(sizes.other, peak) / peak)}
        if is_accelerator(self.device):
            memory = torch.accelerator.get_memory_info(self.device)[1]
            per_node = torch.accelerator.device_count()
        else:
            memory, per_node = psutil.virtual_memory().total // self.ranks, self.ranks
        copy = 2 * sizes.copied / seconds["copy"]
        found = Accelerator(
            name=device_name(self.device),
            memory_bytes=float(memory),
            bf16_tflops=peaks[torch.bfloat16] / 1e12,
            fp32_tflops=peaks[torch.float32] / 1e12,
            memory_bytes_per_second=copy,
            memory_efficiency=1.0,
            watts=known.watts if known else 0.0,
            gpus_per_node=per_node,
            inside=inside or (known.inside if known else "nvlink4"),
            matmul_efficiency={width: rate / peak for width, rate in rates.items()},
            attention_efficiency=reached["attention"] / peak,
            elementwise_efficiency=1.0,
            hidden_share=known.hidden_share if known else 0.8,
            seconds_per_operation=seconds["operation"] / _OPERATIONS,
            reserved_bytes=known.reserved_bytes if known else 0.0,
            images_per_worker=(known or accelerator("cpu")).images_per_worker,
        )
        # Everything in a block that is no product: norms, GELU, sums, copies, new memory. Another program between the
        # measurements could leave nothing or less for it: it takes more.
        images = sizes.block[1]
        products = [product for one in self._passes for product in one.products]
        multiplying = sum(product.seconds(found, sizes.own.itemsize, images) for product in products)
        rest = max(seconds["block"] - multiplying, 0.1 * seconds["block"])
        moved = images * sum(one.bytes for one in self._passes)
        return dataclasses.replace(found, elementwise_efficiency=moved / rest / copy)

    def link(self, seconds: Mapping[str, float]) -> Link:
        """The link between the ranks: lines through the times of messages of several sizes.

        A ring of n ranks sends 2 (n - 1) / n of a message over each link to sum it, in 2 (n - 1) waits, and half of
        both to gather it, or to sum it for one rank a share (docs/planning.md).
        """
        n = self.ranks
        (by_sum, wait), (by_gather, to_gather), (by_scatter, to_scatter) = (
            _line([(size, seconds[f"{kind} {size}"]) for size in _MESSAGES]) for kind in ("sum", "gather", "scatter")
        )
        return Link(
            name=f"between {n} ranks on {device_name(self.device)}",
            bytes_per_second=2 * (n - 1) / n / by_sum,
            efficiency=1.0,
            latency_seconds=wait / (2 * (n - 1)),
            gather_share=by_sum / 2 / by_gather,
            scatter_share=by_sum / 2 / by_scatter,
            gather_latency_seconds=to_gather / (n - 1),
            scatter_latency_seconds=to_scatter / (n - 1),
        )

    @property
    def known(self) -> Accelerator | None:
        """The planner's own figures of it."""
        return accelerator_of_device(hardware_name(self.device)) if is_accelerator(self.device) else accelerator("cpu")

    def write(self, path: Path, seconds: Mapping[str, float], images_per_worker: float) -> dict[str, Any]:
        """Write the file, with several ranks both files, and return the figures.

        Args:
            path: of the file.
            seconds: from `turn`.
            images_per_worker: measured separately.
        """
        source = f"measured by calibrate.py, torch {torch.__version__}, {torch.get_num_threads()} threads"
        source += f", {self.ranks} ranks at the same time" if self.ranks > 1 else ""
        taken = f"not measured: as {self.known.name}" if self.known else "not measured, and not known of this one"
        others = dict.fromkeys(("watts", "inside", "reserved_bytes", "hidden_share"), taken)
        others["memory_efficiency"] = "part of the measured rate"
        inside = ""
        if self.ranks > 1:
            of_link = path.with_name(f"{path.stem}_link.yaml")
            inside, others["inside"] = of_link.name, "the file next to this one"
            _write(of_link, dataclasses.asdict(self.link(seconds)), source, {})
        found = {**dataclasses.asdict(self.accelerator(seconds, inside)), "images_per_worker": images_per_worker}
        _write(path, found, source, others)
        return found


def _write(path: Path, figures: Mapping[str, Any], source: str, others: Mapping[str, str]) -> None:
    """Write figures with their sources, on rank 0."""
    table = {
        key: value if key == "name" else {"value": value, "source": others.get(key, source)}
        for key, value in figures.items()
    }
    if dist.is_initialized() and dist.get_rank():
        return
    path.write_text(yaml.safe_dump(table, sort_keys=False))


def _seconds(call: Call, device: torch.device, seconds: float) -> float:
    """The median of as many calls as fit in the time, all ranks making the same calls; the mean of the ranks.

    Not the fastest call: the other ranks may have been idle during it.
    """
    call()
    calls = max(3, min(200, int(seconds / mean_over_ranks(seconds_of(call), device))))
    return mean_over_ranks(statistics.median(seconds_of(call) for _ in range(calls)), device)


def mean_over_ranks(value: float, device: torch.device) -> float:
    """Of all ranks; the value itself where they have not met (a collective)."""
    if not dist.is_initialized():
        return value
    together = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(together)
    return float(together) / dist.get_world_size()


def _line(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """(seconds a byte, seconds of an empty message), by least squares of the relative error."""
    sizes, times = np.array(points, dtype=float).T
    slope, wait = np.polyfit(sizes, times, 1, w=1 / times).tolist()
    return max(slope, 1e-15), max(wait, 1e-9)


# What is measured: a call, and its floating-point operations


def _products(least: int, sizes: _Sizes, dtype: torch.dtype, device: torch.device) -> tuple[Call, int]:
    """[rows, width] x [width, 4 width] and the two products of its backward pass, whose least dimension is given."""
    width = max(least, sizes.width)
    rows = sizes.rows if least == width else least
    # Several layers in a row where there are few rows: the weights decide, and come from memory, as in a model.
    layers = 4 if rows < width else 1
    a = torch.randn(rows, width, device=device, dtype=dtype)
    weights = [torch.randn(width, 4 * width, device=device, dtype=dtype) for _ in range(layers)]
    back = torch.randn(rows, 4 * width, device=device, dtype=dtype)
    flops = layers * 3 * 2 * rows * width * 4 * width
    return lambda: [(a @ b, back @ b.t(), a.t() @ back) for b in weights], flops


def _attention(images: int, heads: int, dtype: torch.dtype, device: torch.device) -> tuple[Call, int]:
    """Fused attention with heads of 64 and 197 tokens, forward and backward: two products and five."""
    q, k, v = (torch.randn(images, heads, 197, 64, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    back = torch.randn_like(q)
    flops = (2 + 5) * 2 * images * heads * 197**2 * 64
    return lambda: torch.autograd.grad(F.scaled_dot_product_attention(q, k, v), (q, k, v), back), flops


def _block(name: str, images: int, dtype: torch.dtype, device: torch.device) -> tuple[Call, tuple[Pass, Pass]]:
    """Both passes of a block of a timm model with 197 tokens, and what they ask for."""
    spec = ModelSpec(name, model_kwargs={"depth": 2})  # the last block computes less
    model = create_model(spec).to(dtype)
    work = work_of_layers(take_apart(model))[1]
    block = create_model(spec, device=str(device)).blocks[0].to(dtype)
    tokens = torch.randn(images, 197, model.embed_dim, device=device, dtype=dtype, requires_grad=True)
    back, inputs = torch.randn_like(tokens), (tokens, *block.parameters())
    return lambda: torch.autograd.grad(block(tokens), inputs, back), (work.forward, work.backward)


def images_per_worker(device: torch.device) -> float:
    """Images per second of one loader process while every rank runs one (a collective).

    From JPEG files of ImageNet's mean size, 500 x 375 pixels and about 110 kB, cropped to 224 and flipped.

    Args:
        device: that this rank computes on.
    """
    from ds_vit.config.parser import or_shipped
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
    return 1 / mean_over_ranks(sum(seconds[stage] for stage in STAGES[:-1]), device)


def _picture(seed: int) -> Image.Image:
    """Shapes at several scales and grain, whose files are as large as photographs'."""
    draws = np.random.default_rng(seed)
    pixels = np.zeros((375, 500, 3))
    for scale, weight in ((8, 60.0), (32, 30.0), (125, 12.0)):
        small = Image.fromarray(draws.integers(0, 256, (scale, scale, 3), dtype=np.uint8)).resize((500, 375))
        pixels += weight / 128 * (np.asarray(small) - 128.0)
    pixels += draws.normal(128.0, 19.0, pixels.shape)
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def main() -> None:
    """Measure on all ranks of this host, write, and print what was written."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", metavar="FILE.yaml", type=Path)
    path, process = parser.parse_args().file, discover()
    if path.suffix != ".yaml":
        parser.error(f"{path}: the name of a file for --gpu ends in .yaml")
    if process.spans_hosts:
        parser.error(f"{process.world_size} ranks on several hosts: measure those of one; --link is between hosts")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    with ranks_met(process) as device:
        found = calibrate(path, device)
    if not process.rank:
        print("\n".join(f"{name}: {value}" for name, value in found.items()))


if __name__ == "__main__":
    main()
