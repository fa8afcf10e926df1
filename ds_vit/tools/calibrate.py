"""`ds-vit plan --calibrate FILE`: what this machine's accelerator reaches, measured, as a file for `--gpu FILE`.

Each figure is the best of several runs: products of matrices by their width in fp32 and bf16, fused attention, a copy,
and the host's time for one small operation. A busy machine makes all of them worse.
"""

from __future__ import annotations

import platform
from pathlib import Path

import psutil
import torch
import yaml
from torch.nn import functional as F

from ds_vit.fault_tolerance.errors import UserError
from ds_vit.planner.hardware import accelerator, accelerator_of_device
from ds_vit.tools.doctor.measure import fastest

_ROWS = {"cpu": 512, "cuda": 16384}
_WIDTHS = {"cpu": (64, 192, 384, 768, 1536), "cuda": (512, 1024, 2048, 4096, 8192)}
_COPY = {"cpu": 2**26, "cuda": 2**32}


def calibrate(path: Path, *, widths: tuple[int, ...] = (), times: int = 5) -> dict[str, object]:
    """Measure, and write the file.

    Args:
        path: of the file.
        widths: of the products of matrices; those of the device's kind where empty.
        times: that each is run; the fastest counts.

    Raises:
        UserError: the file cannot be written.
    """
    kind = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(kind)
    rows, widths = _ROWS[kind], widths or _WIDTHS[kind]
    rates = {
        dtype: {width: _product(rows, width, dtype, device, times) for width in widths}
        for dtype in (torch.float32, torch.bfloat16)
    }
    name = torch.cuda.get_device_name(device) if kind == "cuda" else platform.processor() or "cpu"
    known = accelerator_of_device(name) if kind == "cuda" else accelerator("cpu")
    peaks = {dtype: max(of.values()) for dtype, of in rates.items()}
    half = rates[torch.bfloat16] if kind == "cuda" else rates[torch.float32]
    memory = torch.cuda.get_device_properties(device).total_memory if kind == "cuda" else psutil.virtual_memory().total
    attention = _attention(device, times) / (peaks[torch.bfloat16] if kind == "cuda" else peaks[torch.float32])
    found = {
        "name": name,
        "memory_bytes": float(memory),
        "bf16_tflops": peaks[torch.bfloat16] / 1e12,
        "fp32_tflops": peaks[torch.float32] / 1e12,
        "memory_bytes_per_second": _copy(_COPY[kind], device, times),
        "memory_efficiency": 1.0,
        "watts": known.watts if known else 0.0,
        "gpus_per_node": torch.cuda.device_count() if kind == "cuda" else 1,  # all threads were one accelerator
        "inside": known.inside if known else "nvlink4",
        "matmul_efficiency": {width: rate / max(half.values()) for width, rate in half.items()},
        "attention_efficiency": attention,
        "seconds_per_operation": _operation(device),
        "reserved_bytes": known.reserved_bytes if known else 0.0,
    }
    source = f"measured by ds-vit plan --calibrate, torch {torch.__version__}, {torch.get_num_threads()} threads"
    taken = f"not measured: as {known.name}" if known else "not measured, and not known of this accelerator"
    not_measured = dict.fromkeys(("watts", "inside", "reserved_bytes"), taken)
    not_measured["memory_efficiency"] = "the rate beside it is a copy's own"
    table = {
        key: value if key == "name" else {"value": value, "source": not_measured.get(key, source)}
        for key, value in found.items()
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(table, sort_keys=False))
    except OSError as error:
        raise UserError(f"--calibrate {path}: {error.strerror or error}") from None
    return found


def _product(rows: int, width: int, dtype: torch.dtype, device: torch.device, times: int) -> float:
    """FLOPs a second of [rows, width] x [width, 4 width]."""
    a = torch.randn(rows, width, device=device, dtype=dtype)
    b = torch.randn(width, 4 * width, device=device, dtype=dtype)
    return 8 * rows * width**2 / fastest(lambda: a @ b, device, times)


def _attention(device: torch.device, times: int) -> float:
    """FLOPs a second of fused attention with 16 images, 6 heads of 64 and 197 tokens, forward."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    q = torch.randn(16, 6, 197, 64, device=device, dtype=dtype)
    return 4 * 16 * 6 * 197**2 * 64 / fastest(lambda: F.scaled_dot_product_attention(q, q, q), device, times)


def _copy(size: int, device: torch.device, times: int) -> float:
    """Bytes a second that a copy reads and writes together."""
    source = torch.zeros(size // 4, device=device)
    target = torch.empty_like(source)
    return 2 * size / fastest(lambda: target.copy_(source), device, times)


def _operation(device: torch.device, number: int = 2000) -> float:
    """The host's seconds for one small operation."""
    small = torch.zeros(8, device=device)

    def many() -> None:
        for _ in range(number):
            small.add_(1.0)

    return fastest(many, device, 3) / number
