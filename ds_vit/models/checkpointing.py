"""Activation checkpointing: running blocks whose activations are recomputed in the backward pass.

A checkpoint function is `function(run, *tensors) -> tensor`: `run(*tensors)` now, and again when its gradients are
asked for. None is reentrant (a reentrant one gives the blocks no gradient when the embedding is frozen), and none
keeps the state of a random generator: every draw is keyed.

`recompute_all` keeps the inputs only. `recompute_selectively` also keeps the outputs of expensive operations (matrix
products and attention: everything that torch counts FLOPs of), so that the second run repeats none of them. Cheap
operations run again: norms, activation functions, sums, masks, and the collectives of tensor parallelism, which write
into their input and so have no output to keep.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import (
    CheckpointPolicy,
    _CachedTorchDispatchMode,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import flop_registry

from ds_vit.device import pins_memory

CheckpointFunction = Callable[..., torch.Tensor]

recompute_all: CheckpointFunction = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)


def recompute_from_host_memory(function: Callable, *tensors: torch.Tensor) -> torch.Tensor:
    """As `recompute_all`, with the kept tensors in host memory, pinned if they come from an accelerator."""
    with torch.autograd.graph.save_on_cpu(pin_memory=any(pins_memory(tensor.device) for tensor in tensors)):
        return recompute_all(function, *tensors)


def is_expensive(operation: Any) -> bool:
    """Whether an operation of torch's dispatcher is one whose FLOPs torch counts."""
    return getattr(operation, "overloadpacket", operation) in flop_registry


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if is_expensive(operation) else CheckpointPolicy.PREFER_RECOMPUTE


class _SecondRun(_CachedTorchDispatchMode):
    """torch's, which reads what the first run kept, but allows other cheap operations in the second run.

    Autocast may reuse a weight's cast in the first run and repeat it in the second, and ZeRO-3 chooses in each run
    which parameters it prefetches.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_expensive(func):
            return func(*args, **(kwargs or {}))
        return super().__torch_dispatch__(func, types, args, kwargs)


def _contexts() -> tuple[Any, Any]:
    first, second = create_selective_checkpoint_contexts(_policy)
    return first, _SecondRun(_policy, second.storage, False)


# Hooks on saved tensors, which count what is kept, see these tensors only from torch 2.15 on.
_SEEN_BY_HOOKS = {
    name: True for name in inspect.signature(checkpoint).parameters if name == "respect_saved_tensors_hooks"
}

recompute_selectively: CheckpointFunction = partial(recompute_all, context_fn=_contexts, **_SEEN_BY_HOOKS)

Storages = dict[int, torch.UntypedStorage]
"""Memory by its address in the program."""


def storages_of(tensors: Iterable[torch.Tensor]) -> Storages:
    """The storages of tensors, each once."""
    found = [tensor.untyped_storage() for tensor in tensors]
    return {storage._cdata: storage for storage in found}


class ExpensiveOutputs(TorchDispatchMode):
    """While entered, records the outputs of expensive operations: what `recompute_selectively` would keep.

    Attributes:
        storages: of these outputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.storages: Storages = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if is_expensive(func):
            self.storages |= storages_of(leaf for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor))
        return out
