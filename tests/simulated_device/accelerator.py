"""DeepSpeed's accelerator for the simulated device: the device through `torch.sim`, the rest as on the CPU."""

from __future__ import annotations

import torch
from deepspeed.accelerator import DeepSpeedAccelerator, set_accelerator
from deepspeed.accelerator.cpu_accelerator import CPU_Accelerator

from simulated_device import NAME


class SimulatedAccelerator(CPU_Accelerator):
    """Asynchronous like a GPU. Its operators are those for the CPU, so that the JSON needs `"torch_adam": true`."""

    def __init__(self) -> None:
        super().__init__()
        self._name = NAME
        self._communication_backend_name = f"cpu:gloo,{NAME}:simulated"

    def is_synchronized_device(self) -> bool:
        return False

    def device_name(self, device_index=None) -> str:
        return NAME if device_index is None else f"{NAME}:{device_index}"

    def device(self, device_index=None) -> torch.device:
        return torch.device(NAME, self.current_device() if device_index is None else device_index)

    def current_device_name(self) -> str:
        return self.device_name(self.current_device())

    def stream(self, stream):
        return stream

    @property
    def Stream(self):
        return torch.sim.Stream

    @property
    def Event(self):
        return torch.sim.Event

    def total_memory(self, device_index=None) -> int:
        return torch.sim.get_device_properties(device_index).total_memory

    def available_memory(self, device_index=None) -> int:
        return torch.sim.mem_get_info(device_index)[0]

    def is_fp16_supported(self) -> bool:
        return True

    def on_accelerator(self, tensor) -> bool:
        return tensor.device.type == NAME

    # Pinned memory as on CUDA; the CPU's accelerator has none.
    _torch_pins_host_memory = True
    pin_memory = DeepSpeedAccelerator.pin_memory

    def _torch_pin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory()

    def _torch_empty_pinned(self, tensor: torch.Tensor, shape) -> torch.Tensor:
        return torch.empty(shape, dtype=tensor.dtype, pin_memory=True)


def _from_module(name: str, of_torch: str | None = None):
    def call(self, *args, **kwargs):
        return getattr(torch.sim, of_torch or name)(*args, **kwargs)

    setattr(SimulatedAccelerator, name, call)


for _name in (
    *("current_device", "set_device", "device_count", "is_available", "synchronize", "empty_cache"),
    *("current_stream", "default_stream", "default_generator", "initial_seed", "manual_seed", "manual_seed_all"),
    *("get_rng_state", "set_rng_state", "memory_stats", "reset_peak_memory_stats"),
    *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
):
    _from_module(_name)
_from_module("memory_cached", "memory_reserved")
_from_module("max_memory_cached", "max_memory_reserved")
_from_module("reset_max_memory_allocated", "reset_peak_memory_stats")
_from_module("reset_max_memory_cached", "reset_peak_memory_stats")


def register() -> None:
    """Make it DeepSpeed's accelerator in this process."""
    set_accelerator(SimulatedAccelerator())
