"""Micro-batches as the ranks of a layout read them, and their tensors in the order of the global batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from ds_vit.config.augmentation import AugmentConfig, MixConfig
from ds_vit.data.field import Field, MicroBatch, finished, origins
from ds_vit.data.fields import ImageField, LabelField, TextField
from ds_vit.data.image_sizes import ImageSizes
from ds_vit.data.loader import Loader
from ds_vit.data.reader import Reader
from ds_vit.data.rows import EvalRows, TrainRows
from ds_vit.data.sampler import SampleOrder, Share
from ds_vit.data.settings import ImageConfig
from ds_vit.data.sources.source import Source
from ds_vit.data.text import Tokenizer
from ds_vit.training.run import Run


def fields_of(
    source: Source,
    image: ImageConfig,
    augment: AugmentConfig | None = None,
    mix: MixConfig | None = None,
    tokenizer: Tokenizer | None = None,
    num_classes: int = 0,
) -> list[Field]:
    """ "images", "targets", and with a tokenizer "texts"; without `augment` those of an evaluation."""
    classes = num_classes or max(1, source.num_classes)
    targets = LabelField("targets", classes, multi_label=source.multi_label, mix=mix)
    texts = [TextField("texts", tokenizer, draws=augment is not None)] if tokenizer else []
    return [ImageField("images", image, augment), targets, *texts]


def loader_of(
    source: Source,
    fields: Sequence[Field],
    rows: TrainRows | EvalRows,
    numbers: range | None = None,
    *,
    reads: Sequence[str] | None = None,
    on_bad_image: str = "error",
    **processes: Any,
) -> Loader:
    """A rank's loader of the micro-batches of these numbers; by default all batches of an evaluation.

    `reads` are the names of the fields that the rank keeps (None: all), `processes` further arguments of `Loader`.
    """
    reader = Reader(source, origins(fields), rows, reads, on_bad_image)
    return Loader(reader, range(len(rows)) if numbers is None else numbers, **processes)


class Loaded(list[MicroBatch]):
    """Each rank's micro-batches, one rank after the other.

    Args:
        batches: all of them.
        fields: that finish them.
        share: of the first rank.
    """

    def __init__(self, batches: Sequence[MicroBatch], fields: Sequence[Field], share: Share) -> None:
        super().__init__(batches)
        self.fields, self.share = [f for f in fields if (f.of or f).name in batches[0].packed], share

    def tensors(self, device: str = "cpu") -> dict[str, torch.Tensor]:
        """All tensors of the own rows, their keys and indices: [steps, global batch, ...] on the CPU."""
        finished_here = [
            {
                **finished(self.fields, batch, device=device),
                "keys": batch.rows.keys[: batch.rows.num_rows],
                "indices": batch.rows.indices[: batch.rows.num_rows],
            }
            for batch in self
        ]
        return {name: self.in_global_order([made[name].cpu() for made in finished_here]) for name in finished_here[0]}

    def in_global_order(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """One tensor a micro-batch as [steps, global batch, ...]."""
        per_rank = torch.stack([*tensors]).unflatten(0, (self.share.dp_size, -1, self.share.accumulation))
        return per_rank.transpose(0, 1).flatten(1, 3)

    @property
    def num_skipped(self) -> int:
        """Own rows whose sample was damaged."""
        return sum(len(batch.skipped) for batch in self)


def load(
    source: Source,
    share: Share,
    start: int = 0,
    stop: int = 6,
    repeats: int = 0,
    *,
    image: ImageConfig,
    augment: AugmentConfig = AugmentConfig(),  # noqa: B008 - frozen
    mix: MixConfig = MixConfig(),  # noqa: B008
    tokenizer: Tokenizer | None = None,
    fields: Sequence[Field] | None = None,
    sizes: ImageSizes | None = None,
    skipped_batches: int = 0,
    **options: Any,
) -> Loaded:
    """Each rank's micro-batches of some steps, by default of the fields of `fields_of`; options as for `loader_of`."""
    if fields is None:
        fields = fields_of(source, image, augment, mix, tokenizer)
    order = SampleOrder(len(source), share.global_batch, seed=7, aug_repeats=repeats)
    numbers, batches = range(start * share.accumulation, stop * share.accumulation), []
    for rank in range(share.dp_size):
        rows = TrainRows(order, replace(share, dp_rank=rank), mix, image.img_size, sizes, skipped_batches)
        batches += loader_of(source, fields, rows, numbers, **options)
    return Loaded(batches, fields, share)


def tensors_of(run: Run, steps: int) -> Iterator[dict[str, torch.Tensor]]:
    """The first micro-batches of a run on one rank as its task's fields make them, with the keys."""
    task, data = run.model.task, run.data
    rows = TrainRows(data.order, run.share, run.config, task.image.img_size)
    for batch in loader_of(data.train_source, task.training_fields, rows, range(steps)):
        yield {**finished(task.training_fields, batch, device="cpu"), "keys": batch.rows.keys}
