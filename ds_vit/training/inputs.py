"""The batches of this rank: who loads what, finished on the device.

What is loaded follows from the task's fields: a pipeline stage decodes images, or reads targets, only where a field of
its own needs them. Of the ranks that share a layer's tensor slices one loads and the others receive.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ds_vit.data import Loader, MicroBatch, Source, eval_loader, finish_keys, finish_valid, train_loader
from ds_vit.engine.base import Engine
from ds_vit.launching.numa import addresses_of_ranks, cores_to_share, pci_address
from ds_vit.monitoring.throughput import Throughput
from ds_vit.tasks import Batch, Field
from ds_vit.training.plan import Plan
from ds_vit.training.skipped_images import SkippedImages


@dataclass
class EvaluationInputs:
    """One pass over a split as evaluation sees it, on one rank.

    Attributes:
        batches: with "valid"; rows that are not valid are padding or could not be decoded, and count nowhere.
        num_batches: how many; the same number on every rank.
        num_samples: in the split.
        num_skipped: samples of this rank that could not be decoded, so far.
    """

    batches: Iterator[Batch]
    num_batches: int
    num_samples: int
    num_skipped: int = 0


class InputPipeline:
    """Inputs of training and evaluation for one rank.

    Args:
        plan: the run.
        engine: its device, type and process groups.
        throughput: is told how long the loop waited for data.
        samples: folder for files of the samples that each step used (--log-samples), or None.
        skipped: file that images are named in that could not be decoded, or None.

    Attributes:
        look: is shown the micro-batches of the run from its first one on, as read and as the model gets them; or None.
    """

    def __init__(
        self,
        plan: Plan,
        engine: Engine,
        throughput: Throughput,
        samples: Path | None = None,
        skipped: Path | None = None,
    ) -> None:
        self.plan = plan
        self.engine = engine
        self.throughput = throughput
        self.loads = plan.parallel.layout.tp_rank(plan.parallel.process.rank) == 0
        self.samples = samples
        self.look: Callable[[MicroBatch, Batch], None] | None = None
        self.skipped = SkippedImages(skipped, active=plan.config.on_bad_image == "skip")

    def training(self, first_step: int = 0, skipped_batches: int = 0) -> Generator[Batch, None, None]:
        """The micro-batches of the run from a step on; the time they are waited for is counted.

        Args:
            first_step: optimizer steps that are done.
            skipped_batches: global batches that were left out before this step.
        """
        plan = self.plan
        fields, sizes = self._here(plan.model.task.fields(training=True)), plan.image_sizes
        if not self.loads:
            for number in range(max(0, plan.training.total_steps - first_step) * plan.data.batch.accumulation):
                step, micro_index = divmod(number, plan.data.batch.accumulation)
                rows = plan.share.rows(micro_index)
                _, keys = plan.data.order.rows(first_step + skipped_batches + step, rows)
                sized = _of_size(fields, sizes.at(first_step + step)) if sizes else fields
                yield _with_host_keys(self._receive(sized, plan.data.batch.micro_batch), torch.from_numpy(keys))
            return
        batches = iter(
            train_loader(
                plan.data.train_source,
                order=plan.data.order,
                share=plan.share,
                augment=plan.config.augment,
                mix=plan.config.mix,
                start_step=first_step + skipped_batches,
                stop_step=max(first_step, plan.training.total_steps) + skipped_batches,
                sizes=sizes and sizes.later(skipped_batches),
                **self._loading(fields),
            )
        )
        for number in itertools.count(first_step * plan.data.batch.accumulation):
            before = time.perf_counter()
            batch = next(batches, None)
            self.throughput.waited(time.perf_counter() - before)
            if batch is None:
                return
            if plan.parallel.has_images:
                # Noted here alone: a row is read on several ranks.
                step = number // plan.data.batch.accumulation
                self.skipped.found(plan.data.train_source, batch.skipped, step // plan.data.order.steps_per_epoch)
                self._log_samples(number, batch)
            shared = self._share(self._finish(fields, batch, training=True))
            if first_step == 0 and self.look is not None:
                self.look(batch, shared)
            yield _with_host_keys(shared, batch.keys[: batch.num_rows])

    def _log_samples(self, number: int, batch: MicroBatch) -> None:
        """Write down which samples a micro-batch is made of, counted over the run from 0."""
        if self.samples is None:
            return
        step, micro_index = divmod(number, self.plan.data.batch.accumulation)
        rows = self.plan.share.rows(micro_index)
        line = {"step": step + 1, "first_row": rows.start, "samples": batch.indices[: batch.num_rows].tolist()}
        self.samples.mkdir(parents=True, exist_ok=True)
        with (self.samples / f"rank-{self.plan.parallel.process.rank:05d}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def evaluation(self, source: Source | None = None, fields: Sequence[Field] | None = None) -> EvaluationInputs:
        """The batches of a split, each image once and without augmentation.

        Args:
            source: the split; None for the validation split.
            fields: what a batch has; None for what the task's evaluation takes.
        """
        plan = self.plan
        source = plan.data.validation if source is None else source
        rows = plan.config.validation_batch_size or plan.data.batch.micro_batch
        share = plan.share
        fields = self._here(plan.model.task.fields(training=False) if fields is None else fields)
        loader = eval_loader(source, batch=rows, dp_rank=share.dp_rank, dp_size=share.dp_size, **self._loading(fields))
        inputs = EvaluationInputs(iter(()), len(loader), len(source))
        inputs.batches = self._evaluation(inputs, fields, loader, rows)
        return inputs

    def _evaluation(
        self, inputs: EvaluationInputs, fields: Sequence[Field], loader: Loader, rows: int
    ) -> Iterator[Batch]:
        if not self.loads:
            for _ in range(len(loader)):
                yield self._receive(fields, rows, valid=True)
            return
        for batch in loader:
            if self.plan.parallel.has_targets:  # once a row: where it is counted
                inputs.num_skipped += batch.num_skipped
                self.skipped.found(self.plan.data.validation, batch.skipped, None)
            valid = finish_valid(batch, device=self.engine.device)
            yield self._share({**self._finish(fields, batch, training=False), "valid": valid})

    def _here(self, fields: Iterable[Field]) -> tuple[Field, ...]:
        """The fields of this rank's stage, in the type that they have there."""
        here = {"first": self.plan.parallel.has_images, "last": self.plan.parallel.has_targets}
        own = (field for field in fields if here[field.stage])
        return tuple(dataclasses.replace(field, dtype=field.dtype or self.engine.dtype) for field in own)

    def _loading(self, fields: Sequence[Field]) -> dict[str, Any]:
        plan = self.plan
        return {
            "image": plan.model.image,
            "load_images": any(field.reads == "images" for field in fields),
            "load_targets": any(field.reads == "targets" for field in fields),
            "on_bad_image": plan.config.on_bad_image,
            "num_workers": plan.workers,
            "pin_memory": self.engine.device.type == "cuda",
            "cores": self._cores(),
        }

    def _cores(self) -> frozenset[int]:
        """Where the loader's processes are to run; none: anywhere."""
        device, process = self.engine.device, self.plan.parallel.process
        of_ranks = addresses_of_ranks(device, process.local_world_size)
        return cores_to_share(pci_address(device), of_ranks, self.plan.workers, os.sched_getaffinity(0))

    def _finish(self, fields: Sequence[Field], batch: MicroBatch, *, training: bool) -> Batch:
        """The tensors of a micro-batch that this rank's stage needs, and its keys."""
        device = self.engine.device
        tensors = self.plan.model.task.tensors(fields, batch, training=training, device=device)
        return {**tensors, "keys": finish_keys(batch, device=device)}

    # ---- one rank of a tensor-parallel group loads, the others receive --------------------------------------------

    def _broadcast(self, batch: Batch) -> Batch:
        """Send or receive each tensor, in the order of their names (the same on both sides)."""
        rank = self.plan.parallel.process.rank
        leader = rank - self.plan.parallel.layout.tp_rank(rank)
        for name in sorted(batch):
            dist.broadcast(batch[name], leader, group=self.engine.groups.tp)
        return batch

    def _share(self, batch: Batch) -> Batch:
        """Hand a batch to the ranks that hold the other slices."""
        return self._broadcast(batch) if self.plan.parallel.layout.tp > 1 else batch

    def _receive(self, fields: Sequence[Field], rows: int, *, valid: bool = False) -> Batch:
        """The counterpart of `_share`: a batch of `rows` samples, in evaluation with what is valid of it."""

        def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(rows, *shape, dtype=dtype, device=self.engine.device)

        batch = {field.name: empty(field.shape, field.dtype) for field in fields}
        batch["keys"] = empty((), torch.int64)
        if valid:
            batch["valid"] = empty((), torch.bool)
        return self._broadcast(batch)


def _of_size(fields: Sequence[Field], size: int) -> tuple[Field, ...]:
    """The fields where images are squares of another side."""
    return tuple(
        dataclasses.replace(field, shape=(*field.shape[:-2], size, size)) if field.reads == "images" else field
        for field in fields
    )


def _with_host_keys(batch: Batch, keys: torch.Tensor) -> Batch:
    """A batch of training with its samples' keys on the CPU too, so that the host need not wait for the device's."""
    return {**batch, "keys_on_host": keys}
