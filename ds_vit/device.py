"""The device that a process computes on: the only module that names CUDA.

`torch.accelerator` covers every kind of accelerator that torch knows. The functions here add the answer for a CPU, and
small tables for what differs between accelerators.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.profiler import ProfilerActivity
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

_WITHOUT_PINNED_MEMORY = ("cpu", "meta", "mps")

_PROFILED = {"cuda": ProfilerActivity.CUDA, "xpu": ProfilerActivity.XPU}


def is_accelerator(device: torch.device) -> bool:
    """Whether the device has its own memory and runs asynchronously."""
    return device.type != "cpu"


def pins_memory(device: torch.device) -> bool:
    """Whether copies between the device and page-locked memory of the host are asynchronous."""
    return device.type not in _WITHOUT_PINNED_MEMORY


def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor on the device, by way of pinned memory: from other memory the host would wait for the copy."""
    if pins_memory(device) and tensor.device.type == "cpu" and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def send_all(device: torch.device, *arrays: np.ndarray | torch.Tensor) -> list[torch.Tensor]:
    """Arrays of the host on the device, by one copy."""
    known = [np.asarray(array) for array in arrays]
    blocks = [np.frombuffer(array.tobytes() + bytes(-array.nbytes % 8), dtype=np.uint8) for array in known]
    parts = send(torch.from_numpy(np.concatenate(blocks)), device).split([len(block) for block in blocks])
    return [p[: a.nbytes].view(getattr(torch, a.dtype.name)).view(a.shape) for p, a in zip(parts, known, strict=True)]


@contextlib.contextmanager
def matmul_precision(name: str) -> Iterator[None]:
    """Multiply fp32 matrices by torch's "highest" (fp32) or "high" (TF32) for the block, in the whole process."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(name)
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done everything that was queued; nothing on a CPU."""
    if is_accelerator(device):
        torch.accelerator.synchronize(device)


def hardware_name(device: torch.device) -> str:
    """The product's name, such as NVIDIA H100 80GB HBM3; the kind of device where torch knows none, "" for a CPU."""
    if not is_accelerator(device):
        return ""
    named = getattr(torch.get_device_module(device), "get_device_name", None)
    return named(device) if named else device.type


def free_bytes(device: torch.device) -> int:
    """Memory of an accelerator that no process holds."""
    return torch.accelerator.get_memory_info(device)[0]


def allocated_bytes(device: torch.device) -> int:
    """Bytes that tensors of this process hold on an accelerator; 0 for a CPU."""
    return torch.accelerator.memory_allocated(device) if is_accelerator(device) else 0


def peak_bytes(device: torch.device) -> int:
    """The most bytes that tensors of this process held on an accelerator since the last call of `reset_peak_bytes`.

    The memory pool of its graphs is in use all the time.
    """
    return max(_pool.peak_before, torch.accelerator.max_memory_allocated(device) + _pool.bytes)


def reset_peak_bytes(device: torch.device) -> None:
    """Start a new measurement of `peak_bytes`."""
    _pool.peak_before = 0
    torch.accelerator.reset_peak_memory_stats(device)


# ---- graphs ----------------------------------------------------------------------------------------------------------


@dataclass
class _Pool:
    """The memory pool of this process's graphs; the allocator does not count what only replays write.

    Attributes:
        bytes: that it holds.
        peak_before: of the measurement under way, before it had them.
    """

    bytes: int = 0
    peak_before: int = 0


_pool = _Pool()


def count_pool(device: torch.device, size: int) -> None:
    """Set the number of bytes that the graphs' pool holds."""
    before = peak_bytes(device)
    reset_peak_bytes(device)
    _pool.bytes, _pool.peak_before = size, before


def has_graphs() -> bool:
    """Whether this machine's accelerator captures CUDA graphs; that of Intel has another interface."""
    return hasattr(torch.get_device_module(), "CUDAGraph")


def graph_pool(device: torch.device) -> Any:
    """The name of a new memory pool for graphs, which lives as long as one of them."""
    return torch.get_device_module(device).graph_pool_handle()


@contextlib.contextmanager
def capture(device: torch.device, pool: Any) -> Iterator[Any]:
    """Record the operations of this thread in a graph, on a separate stream, without running them.

    Other threads work as always: the loader's pins memory.

    Yields:
        The graph; `replay()` repeats it.
    """
    module, stream = torch.get_device_module(device), torch.accelerator.current_stream(device)
    graph = module.CUDAGraph()
    try:
        with module.graph(graph, pool=pool, capture_error_mode="thread_local"):
            before = torch.accelerator.memory_reserved(device)  # torch has emptied its cache by now
            yield graph
        count_pool(device, _pool.bytes + torch.accelerator.memory_reserved(device) - before)
    except BaseException:
        # Where CUDA has given up the capture, torch raises before it leaves the stream and closes the pool. Blocks that
        # several streams use are not freed while a pool is open.
        torch.accelerator.set_stream(stream)
        if device.type == "cuda":
            with contextlib.suppress(RuntimeError):  # torch has closed it
                torch._C._cuda_endAllocateToPool(device.index, pool)
                torch._C._cuda_releasePool(device.index, pool)
        raise


def record_event(device: torch.device) -> torch.Event | None:
    """An event behind what the current stream of an accelerator has queued; None for a CPU, which has no queue."""
    if not is_accelerator(device):
        return None
    event = torch.Event(device)
    event.record()
    return event


def has_fused_step(device: torch.device) -> bool:
    """Whether torch's optimizers have a fused step there, with a flag for a step to be skipped."""
    return device.type in _get_fused_kernels_supported_devices()


def decodes_jpeg(device: torch.device) -> bool:
    """Whether torchcodec decodes JPEG files there (nvJPEG)."""
    return device.type == "cuda"


def profiled_activities(device: torch.device) -> list[ProfilerActivity]:
    """What torch.profiler records for a device: the host, and its kernels where the profiler knows them."""
    own = _PROFILED.get(device.type)
    return [ProfilerActivity.CPU, *([own] if own else [])]


def cuda_of_torch() -> str:
    """The CUDA version that torch was built for; "" for a build without."""
    return torch.version.cuda or ""
