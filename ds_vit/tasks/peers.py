"""A training step without DeepSpeed, which `ds-vit bench step --against` measures next to a task's: what all share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import nn
from torch.optim import Optimizer

from ds_vit.config import RunConfig
from ds_vit.data.settings import ImageConfig
from ds_vit.models import compiled
from ds_vit.models.zoo import ModelSpec, TimmViT
from ds_vit.tasks.metrics import Batch


@dataclass(frozen=True)
class PeerRun:
    """What a peer takes of a run.

    Attributes:
        config: the flags.
        spec: how timm builds the main tower.
        whole: the description of all towers.
        image: size of the images.
        optimizer_of: makes the run's optimizer for a model, fused, with weight decay of matrices only.
        clip: largest norm of the gradient; 0 for no clipping.
        half: whether products are in bf16.
        accumulation: micro-batches of a step.
        compiles: whether the blocks are compiled, or all of timm's model.
    """

    config: RunConfig
    spec: ModelSpec
    whole: TimmViT
    image: ImageConfig
    optimizer_of: Callable[[nn.Module], Optimizer]
    clip: float
    half: bool
    accumulation: int
    compiles: bool


@dataclass(frozen=True)
class Peer:
    """A way to train without DeepSpeed, as a good engineer writes it.

    Attributes:
        make: (run, the batch of this rank for the whole step) → an optimizer step.
        spans_ranks: whether it trains on several ranks; else it is one process.
    """

    make: Callable[[PeerRun, Batch], Callable[[], None]]
    spans_ranks: bool = True


def compile_blocks(*stacks: Iterable[nn.Module]) -> None:
    """Compile each block of these stacks in place, as one graph without a break."""
    for block in itertools.chain(*stacks):
        block.compile(fullgraph=True, backend=compiled.BACKEND)


def replicated(model: nn.Module) -> nn.Module:
    """The model under torch's DistributedDataParallel."""
    return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
