"""What a training step asks of the hardware, counted: operations, waits of the host, bytes, Python calls, kernel time.

On a GPU each operation is a launch and each wait an empty queue. The counts are the same on any machine and have no
noise, so they are compared where times cannot be.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.profiler import profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ds_vit.device import profiled_activities, synchronize

# What needs a number on the host before it can continue; item(), float(), bool() and `if tensor:` are the first one.
_WAITS = {
    torch.ops.aten._local_scalar_dense,
    torch.ops.aten.nonzero,
    torch.ops.aten.is_nonzero,
    torch.ops.aten.masked_select,
    torch.ops.aten.equal,
}
# Shares its input's memory, which torch's schema does not say.
_VIEWS = {torch.ops.aten._unsafe_view}
_COPIES = {torch.ops.aten._to_copy, torch.ops.aten.copy_}


@dataclass(frozen=True)
class StepCounts:
    """What one step dispatched.

    Attributes:
        operations: of aten that are not views; one fused or `_foreach_` operation is one.
        waits: how often the host waited for the device's numbers.
        allocated_bytes: of the tensors that the operations returned, without those that were theirs already.
        by_name: operations by name, the most frequent first.
    """

    operations: int
    waits: int
    allocated_bytes: int
    by_name: dict[str, int] = field(repr=False, compare=False)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [value for value in tree_iter(values) if isinstance(value, torch.Tensor)]


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.waits = self.allocated = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(kind not in (torch.Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # FSDP2's tensors come again as the plain ones in them
        out = func(*args, **(kwargs or {}))
        if func.namespace != "aten" or func.is_view or func.overloadpacket in _VIEWS:
            return out
        given, made = _tensors((args, kwargs)), _tensors(out)
        self.names[func.overloadpacket.__name__] += 1
        # copy_ returns its target, so that a copy to the host shows in what an operation gives.
        to_host = func.overloadpacket in _COPIES and made[0].device.type == "cpu" and given[-1].device.type != "cpu"
        if to_host and made[0].is_pinned() and True in (*args[2:3], (kwargs or {}).get("non_blocking")):
            to_host = False  # goes its own way
        self.waits += to_host or func.overloadpacket in _WAITS
        known = {tensor.untyped_storage().data_ptr() for tensor in given}
        fresh = {storage.data_ptr(): storage.nbytes() for storage in map(torch.Tensor.untyped_storage, made)}
        self.allocated += sum(size for place, size in fresh.items() if place not in known)
        return out


def count_step(step: Callable[[], object]) -> StepCounts:
    """Run a step once (forward, backward, update) and count it; operations of the backward pass are among them.

    On a CPU `tolist()` and `numpy()` read memory without any operation and are not seen; on a GPU they are copies.

    Args:
        step: that has run before: the first one makes what later ones keep.
    """
    with _Counting() as counting:
        step()
    names = dict(counting.names.most_common())
    return StepCounts(counting.names.total(), counting.waits, counting.allocated, names)


def count_calls(step: Callable[[], object]) -> int:
    """Run a step once and count its Python calls in this thread, which runs the backward pass too on a CPU."""
    number, before = 0, sys.getprofile()

    def hook(frame: Any, event: str, argument: Any) -> None:
        nonlocal number
        number += event == "call"

    sys.setprofile(hook)
    try:
        step()
    finally:
        sys.setprofile(before)
    return number


def device_seconds(step: Callable[[], object], device: torch.device, steps: int = 2) -> float | None:
    """Time of the device's kernels and copies in a step, added up; None where torch's profiler does not know them.

    A range such as "Optimizer.step" is reported on the device too; it would count its kernels twice.
    """
    activities = profiled_activities(device)
    if len(activities) == 1:
        return None
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # else it prints
    with profile(activities=activities) as watched:
        for _ in range(steps):
            step()
        synchronize(device)
    kernels = [e for e in watched.key_averages() if e.device_type != DeviceType.CPU and not e.is_user_annotation]
    return sum(kernel.self_device_time_total for kernel in kernels) / 1e6 / steps
