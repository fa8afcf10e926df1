"""What torch allocates on the CPU: the peak of a run; the largest tensor and the saved bytes of some operations."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


def train_and_watch(argv: list[str]) -> tuple[int, dict[str, int]]:
    """On a rank: train, and give the most bytes that torch's CPU allocator had out, and by which operations."""
    import gc
    from unittest import mock

    import torch
    from torch.profiler import ProfilerActivity, profile

    from ds_vit.models.layers import BlockLayer
    from ds_vit.train import main
    from ds_vit.training import build_engine as module
    from ds_vit.training.trainer import Trainer

    watched = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
    build_engine, train = module.build_engine, Trainer.train

    def build_watched(*args: Any) -> Any:
        watched.start()
        return build_engine(*args)

    def tidy(module: Any, inputs: Any) -> None:
        """What lies in cycles goes when Python comes to it, else at another moment each time."""
        if isinstance(module, BlockLayer):
            gc.collect()

    def train_watched(trainer: Trainer) -> None:
        gc.collect()
        gc.freeze()
        hook = torch.nn.modules.module.register_module_forward_pre_hook(tidy)
        try:
            train(trainer)
        finally:
            hook.remove()
            watched.stop()

    with mock.patch.object(module, "build_engine", build_watched), mock.patch.object(Trainer, "train", train_watched):
        assert main(argv) == 0
    return peak(watched.profiler.kineto_results.events())


def peak(events: Any) -> tuple[int, dict[str, int]]:
    """The highest sum of all allocations so far, and what was running then, outermost first."""
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    held, most, moment = 0, 0, 0
    for time, size in changes:
        held += size
        if held > most:
            most, moment = held, time
    running = [
        (event.start_ns(), event.name())
        for event in events
        if event.name() != "[memory]" and event.start_ns() <= moment <= event.start_ns() + event.duration_ns()
    ]
    return most, [name for _, name in sorted(running)]


class LargestTensor(TorchDispatchMode):
    """Notes the largest number of elements that an operation returns.

    Attributes:
        numbers: that number.
    """

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.numel())
        return out


class SavedBytes(torch.autograd.graph.saved_tensors_hooks):
    """Notes the bytes of the storages that are saved for the backward pass, each once."""

    def __init__(self) -> None:
        self._storages: dict[int, int] = {}
        super().__init__(self._note, lambda tensor: tensor)

    def __enter__(self) -> SavedBytes:
        super().__enter__()
        return self

    @property
    def total(self) -> int:
        """Their sum."""
        return sum(self._storages.values())

    def _note(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        self._storages[storage.data_ptr()] = storage.nbytes()
        return tensor
