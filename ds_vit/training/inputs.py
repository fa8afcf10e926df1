"""The model's inputs on this rank: who loads what, finished on the device.

Images are decoded on the first pipeline stage alone, targets are read on the last alone, and of the ranks that share
a layer's tensor slices one loads and the others receive.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from ds_vit.data import (
    AugmentConfig,
    Loader,
    MicroBatch,
    MixConfig,
    eval_loader,
    finish_images,
    finish_keys,
    finish_targets,
    finish_valid,
    train_loader,
)
from ds_vit.engine.base import Engine, EvalInputs, Inputs
from ds_vit.monitoring.metrics import Throughput
from ds_vit.training.plan import Plan


class InputPipeline:
    """Inputs of training and evaluation for one rank.

    Args:
        plan: the run.
        engine: its device, type and process groups.
        throughput: is told how long the loop waited for data.
        samples: folder for files of the samples that each step used (--log-samples), or None.
    """

    def __init__(self, plan: Plan, engine: Engine, throughput: Throughput, samples: Path | None = None) -> None:
        self.plan = plan
        self.engine = engine
        self.throughput = throughput
        self.loads = plan.layout.tp_rank(plan.process.rank) == 0
        self.samples = samples
        self.skipped_images = 0
        """Images of this rank that could not be decoded and were replaced; a row is counted by one rank alone."""

    def training(self, first_step: int = 0, skipped_batches: int = 0) -> Iterator[Inputs]:
        """The micro-batches of the run from a step on; the time they are waited for is counted.

        Args:
            first_step: optimizer steps that are done.
            skipped_batches: global batches that were left out before this step.
        """
        plan = self.plan
        if not self.loads:
            rows, soft = plan.batch.micro_batch, plan.mix.active or plan.train_source.multi_label
            for _ in range(max(0, plan.total_steps - first_step) * plan.batch.accumulation):
                yield self._receive(rows, soft)
            return
        batches = iter(
            train_loader(
                plan.train_source,
                order=plan.order,
                share=plan.share,
                augment=plan.augment,
                mix=plan.mix,
                start_step=first_step + skipped_batches,
                stop_step=max(first_step, plan.total_steps) + skipped_batches,
                **self._loading(),
            )
        )
        for number in itertools.count(first_step * plan.batch.accumulation):
            before = time.perf_counter()
            batch = next(batches, None)
            self.throughput.waited(time.perf_counter() - before)
            if batch is None:
                return
            if plan.has_images:
                self.skipped_images += batch.num_skipped
                self._log_samples(number, batch)
            yield self._share(self._finish(batch, plan.augment, plan.mix))

    def _log_samples(self, number: int, batch: MicroBatch) -> None:
        """Write down which samples a micro-batch is made of, counted over the run from 0."""
        if self.samples is None:
            return
        step, micro_index = divmod(number, self.plan.batch.accumulation)
        rows = self.plan.share.rows(micro_index)
        line = {"step": step + 1, "first_row": rows.start, "samples": batch.indices[: batch.num_rows].tolist()}
        self.samples.mkdir(parents=True, exist_ok=True)
        with (self.samples / f"rank-{self.plan.process.rank:05d}.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def evaluation(self) -> tuple[Iterator[EvalInputs], int]:
        """The batches of the validation split, and how many: the same number on every rank."""
        plan = self.plan
        rows = plan.config.validation_batch_size or plan.batch.micro_batch
        share = plan.share
        loader = eval_loader(
            plan.val_source, batch=rows, dp_rank=share.dp_rank, dp_size=share.dp_size, **self._loading()
        )
        return self._evaluation(loader, rows), len(loader)

    def _evaluation(self, loader: Loader, rows: int) -> Iterator[EvalInputs]:
        if not self.loads:
            for _ in range(len(loader)):
                yield (*self._receive(rows, self.plan.val_source.multi_label), self._valid_of_others(rows))
            return
        for batch in loader:
            valid = finish_valid(batch, device=self.engine.device)
            inputs = self._share(self._finish(batch))
            if self.plan.layout.tp > 1:
                self._broadcast(valid)
            yield (*inputs, valid)

    def _loading(self) -> dict[str, object]:
        plan = self.plan
        return {
            "image": plan.image,
            "load_images": plan.has_images,
            "load_targets": plan.has_targets,
            "on_bad_image": plan.config.on_bad_image,
            "num_workers": plan.config.workers,
            "pin_memory": self.engine.device.type == "cuda",
        }

    def _finish(self, batch: MicroBatch, augment: AugmentConfig | None = None, mix: MixConfig | None = None) -> Inputs:
        """The model's inputs; no pixels behind the first pipeline stage, no targets before the last."""
        plan, device = self.plan, self.engine.device
        images = targets = None
        if plan.has_images:
            images = finish_images(batch, plan.image, augment, device=device, dtype=self.engine.dtype)
        if plan.has_targets:
            targets = finish_targets(batch, plan.config.num_classes, mix, device=device)
        return images, finish_keys(batch, device=device), targets

    # ---- one rank of a tensor-parallel group loads, the others receive --------------------------------------------

    def _broadcast(self, tensor: torch.Tensor) -> None:
        rank = self.plan.process.rank
        leader = rank - self.plan.layout.tp_rank(rank)
        dist.broadcast(tensor, leader, group=self.engine.groups.tp)

    def _share(self, inputs: Inputs) -> Inputs:
        """Hand the inputs to the ranks that hold the other slices."""
        if self.plan.layout.tp > 1:
            for tensor in inputs:
                if tensor is not None:
                    self._broadcast(tensor)
        return inputs

    def _receive(self, rows: int, soft: bool) -> Inputs:
        """The counterpart of `_share`: `rows` samples, targets float32 [B, C] where `soft`, else int64 [B]."""
        plan, device = self.plan, self.engine.device
        images = targets = None
        keys = torch.empty(rows, dtype=torch.int64, device=device)
        if plan.has_images:
            images = torch.empty(rows, 3, *plan.image.img_size, dtype=self.engine.dtype, device=device)
        if plan.has_targets and soft:
            targets = torch.empty(rows, plan.config.num_classes, dtype=torch.float32, device=device)
        elif plan.has_targets:
            targets = torch.empty(rows, dtype=torch.int64, device=device)
        for tensor in (images, keys, targets):
            if tensor is not None:
                self._broadcast(tensor)
        return images, keys, targets

    def _valid_of_others(self, rows: int) -> torch.Tensor:
        valid = torch.empty(rows, dtype=torch.bool, device=self.engine.device)
        self._broadcast(valid)
        return valid
