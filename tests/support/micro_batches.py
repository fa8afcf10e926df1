"""Micro-batches as the ranks of a layout read them, and their contents in the order of the global batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ds_vit.data.batches import MicroBatch
from ds_vit.data.image_sizes import ImageSizes
from ds_vit.data.loader import Loader, train_loader
from ds_vit.data.sampler import SampleOrder, Share
from ds_vit.data.settings import Data, SampleSpec, Workers
from ds_vit.data.sources.source import Source


def loader_of(
    source: Source,
    order: SampleOrder,
    share: Share,
    steps: range,
    *,
    num_workers: int = 0,
    sizes: ImageSizes | None = None,
    skipped_batches: int = 0,
    on_bad_image: str = "error",
    pin_memory: bool = False,
    **spec: Any,
) -> Loader:
    """A rank's loader; `spec` as for `SampleSpec`."""
    data = Data(source, order, share, sizes=sizes, workers=Workers(num_workers))
    options = {"skipped_batches": skipped_batches, "on_bad_image": on_bad_image, "pin_memory": pin_memory}
    return train_loader(data, SampleSpec(**spec), steps, **options)


def load(
    source: Source, share: Share, start: int = 0, stop: int = 6, repeats: int = 0, **options: Any
) -> list[MicroBatch]:
    """Each rank's micro-batches of some steps, one rank after the other; options as for `loader_of`."""
    order = SampleOrder(len(source), share.global_batch, seed=7, aug_repeats=repeats)
    batches: list[MicroBatch] = []
    for rank in range(share.dp_size):
        mine = Share(rank, share.dp_size, share.micro_batch, share.accumulation)
        batches += loader_of(source, order, mine, range(start, stop), **options)
    return batches


def in_global_order(
    batches: list[MicroBatch], share: Share, finish: Callable[[MicroBatch], torch.Tensor]
) -> torch.Tensor:
    """What `finish` makes of the batches, as [steps, global batch, ...]."""
    pieces = torch.stack([finish(batch) for batch in batches])
    per_rank = pieces.unflatten(0, (share.dp_size, -1, share.accumulation))
    return per_rank.transpose(0, 1).flatten(1, 3)
