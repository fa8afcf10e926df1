"""`torch.sim`: the functions that torch and DeepSpeed look for in a device's module, named as in torch.cuda."""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from simulated_device import NAME

_module = types.ModuleType(f"torch.{NAME}", __doc__)


def register() -> None:
    """Name the backend, and give it its module and its methods of tensors, modules and storages."""
    torch.utils.rename_privateuse1_backend(NAME)
    sys.modules[_module.__name__] = _module
    torch._register_device_module(NAME, _module)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


def _export(function):
    setattr(_module, function.__name__, function)
    return function


for _name in (
    *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_stats"),
    *("reset_peak_memory_stats", "empty_cache", "current_stream", "synchronize"),
):
    setattr(_module, _name, getattr(torch.accelerator, _name))
_module.current_device = torch.accelerator.current_device_index
_module.set_device = torch.accelerator.set_device_index
_module.mem_get_info = torch.accelerator.get_memory_info
_module.is_available = _module.is_initialized = lambda: True
_module.device_count = torch.ops.simulated.device_count
_module._is_in_bad_fork = lambda: False
_module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
_module.is_bf16_supported = lambda: True
_module.is_current_stream_capturing = torch.ops.simulated.is_capturing
_module.graph_pool_handle = torch.ops.simulated.new_pool
_module.manual_seed = _module.manual_seed_all = torch.ops.simulated.seed


@_export
def get_device_name(device=None) -> str:
    return "Simulated accelerator"


@_export
def get_device_properties(device=None) -> types.SimpleNamespace:
    _, total = torch.accelerator.get_memory_info(_index(device))
    return types.SimpleNamespace(name=get_device_name(), total_memory=total, multi_processor_count=1)


@_export
def device(device) -> AbstractContextManager:
    """Within it, a device is the current one."""
    return torch.accelerator.device_index(_index(device))


@_export
def Stream(device=None, priority: int = 0) -> torch.Stream:
    return torch.Stream(_device(device), priority=priority)


@_export
def Event(enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> torch.Event:
    return torch.Event(NAME, enable_timing=enable_timing)


@_export
def stream(stream: torch.Stream) -> AbstractContextManager:
    """Within it, `stream` is the current one: a torch.Stream is such a context already."""
    return stream


@_export
def default_stream(device=None) -> torch.Stream:
    current = torch.accelerator.current_stream(_index(device))
    return torch.Stream(stream_id=0, device_index=current.device_index, device_type=current.device_type)


@_export
def default_generator(device=None) -> torch.Generator:
    return torch.ops.simulated.default_generator(_device(device).index)


@_export
def get_rng_state(device=None) -> torch.Tensor:
    return default_generator(device).get_state()


@_export
def set_rng_state(state: torch.Tensor, device=None) -> None:
    default_generator(device).set_state(state)


@_export
def initial_seed() -> int:
    return default_generator().initial_seed()


def _index(device) -> int:
    if device is None:
        return torch.accelerator.current_device_index()
    index = device if isinstance(device, int) else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


def _device(device) -> torch.device:
    return torch.device(NAME, _index(device))


# ---- Graphs ----

FOREIGN: list[Callable[[], object]] = []
"""What graphs run that is no operation of the device: collectives."""
_numbers = itertools.count(1)
_capture_streams: list[torch.Stream] = []


@_export
class CUDAGraph:
    """Operations that `graph` has recorded; as torch.cuda's."""

    def __init__(self) -> None:
        self._number = next(_numbers)

    def capture_begin(self, pool: int, capture_error_mode: str = "global") -> None:
        torch.ops.simulated.capture_begin(self._number, pool)

    def capture_end(self) -> None:
        torch.ops.simulated.capture_end()

    def replay(self) -> None:
        place = 0
        while place >= 0:
            place, foreign = torch.ops.simulated.replay(self._number, place)
            if place >= 0:
                FOREIGN[foreign]()

    def reset(self) -> None:
        torch.ops.simulated.delete_graph(self._number)

    def __del__(self) -> None:
        if torch is not None:  # else the process ends
            self.reset()


@_export
@contextmanager
def graph(graph: CUDAGraph, pool: int, capture_error_mode: str = "global") -> Iterator[None]:
    """Within it, operations are recorded, on a separate stream, and not run."""
    torch.accelerator.synchronize()
    if not _capture_streams:
        _capture_streams.append(Stream())
    stream = _capture_streams[0]
    stream.__enter__()
    graph.capture_begin(pool, capture_error_mode)
    try:
        yield
    except BaseException:
        graph.capture_end()
        # As torch's, which is then still on the stream.
        raise RuntimeError("operation failed due to a previous error during capture") from None
    graph.capture_end()
    stream.__exit__(None, None, None)
