"""The batches of this rank: loaded by its loader processes, and finished on the device.

The task's fields decide what is loaded: a pipeline stage decodes images, or reads targets, only if one of its fields
needs them. In a tensor-parallel group one rank loads and the others receive.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ds_vit.config.run_folder import LineLog, RunFolder
from ds_vit.data.augment.on_device import Crops
from ds_vit.data.batches import MicroBatch
from ds_vit.data.loader import eval_loader, train_loader
from ds_vit.data.sampler import Share, evaluation_keys, evaluation_rows, num_evaluation_batches
from ds_vit.data.settings import Workers
from ds_vit.data.sources.source import Source
from ds_vit.device import pins_memory
from ds_vit.engine.base import Engine
from ds_vit.launching.process import Process
from ds_vit.monitoring.metrics import Throughput
from ds_vit.parallel.groups import gather_objects
from ds_vit.parallel.layout import Layout
from ds_vit.tasks.metrics import Batch
from ds_vit.tasks.task import Field
from ds_vit.training.run import Run


def stages_of(layout: Layout, rank: int) -> set[str]:
    """The words of `Field.stage` that name a rank's pipeline stage: "first", which takes images, "last", or both."""
    return {word for word, stage in (("first", 0), ("last", layout.pp - 1)) if stage == layout.stage(rank)}


@dataclass
class EvaluationInputs:
    """One pass over a split as evaluation sees it, on one rank.

    Attributes:
        batches: with "valid"; rows that are not valid are padding or could not be decoded, and count nowhere. Whoever
            reads them closes them: until then the loader's processes and their shared memory stay.
        num_batches: how many; the same number on every rank.
        num_samples: in the split.
        num_skipped: samples of this rank that could not be decoded, so far.
    """

    batches: Generator[Batch, None, None]
    num_batches: int
    num_samples: int
    num_skipped: int = 0


class InputPipeline:
    """Inputs of training and evaluation for one rank.

    Args:
        run: of this rank.
        engine: its device, type and process groups.
        throughput: counts how long the loop waited for data.
        folder: of the run, for the samples that each step used (--log-samples) and the names of images that could not
            be decoded; None to write neither.

    Attributes:
        data: the samples, and this rank's part of them.
        task: makes the tensors of a batch.
        stages: of this rank, as `stages_of`.
        leader: the rank that loads for this rank's tensor-parallel group.
        decoded: images of training that the loader decoded ("loader"), and the counts of `decode_on`.
        look: receives the micro-batches of a new run, as read and as the model gets them; or None.
    """

    def __init__(self, run: Run, engine: Engine, throughput: Throughput, folder: RunFolder | None = None) -> None:
        config, layout, rank = run.config, run.layout, run.process.rank
        self.run, self.data, self.task = run, run.data, run.model.task
        self.engine = engine
        self.throughput = throughput
        self.stages, self.leader = stages_of(layout, rank), rank - layout.tp_rank(rank)
        self.loads = rank == self.leader
        self.samples = LineLog(folder.samples / f"rank-{rank:05d}.jsonl") if folder and config.log_samples else None
        self.look: Callable[[MicroBatch, Batch], None] | None = None
        order = self.data.order
        epoch_images = order.steps_per_epoch * order.global_batch
        may_be_bad = config.max_bad_images if config.on_bad_image == "skip" else 0.0
        self.skipped = SkippedImages(folder.skipped if folder else None, epoch_images, may_be_bad)
        self.decoded: Counter[str] = Counter()
        self._pins = pins_memory(engine.device)
        self._stream = torch.Stream(engine.device) if self._pins else None

    def training(self, first_step: int = 0, skipped_batches: int = 0) -> Generator[Batch, None, None]:
        """The micro-batches of the run from a step on; counts the time that the loop waits for them.

        Args:
            first_step: optimizer steps that are done.
            skipped_batches: global batches that were left out before this step.
        """
        data, task, share = self.data, self.task, self.data.share
        fields = self._here(task.fields(training=True))
        steps = range(first_step, max(first_step, self.run.total_steps))
        read: Iterator[MicroBatch] = iter(())
        if self.loads:
            loader = train_loader(
                data,
                task.samples(fields),
                range(steps.start + skipped_batches, steps.stop + skipped_batches),
                skipped_batches=skipped_batches,
                on_bad_image="skip" if self.run.config.on_bad_image == "skip" else "replace",
                pin_memory=self._pins,
            )
            read = iter(loader)
        for number in range(steps.start * share.accumulation, steps.stop * share.accumulation):
            step, micro_index = divmod(number, share.accumulation)
            rows = share.rows(micro_index)
            if not self.loads:
                _, keys = data.order.rows(step + skipped_batches, rows)
                sized = _of_size(fields, data.sizes.at(step)) if data.sizes else fields
                yield {**self._receive(sized, len(rows)), "keys_on_host": torch.from_numpy(keys)}
                continue
            before = time.perf_counter()
            batch = next(read)
            self.throughput.waited(time.perf_counter() - before)
            if "first" in self.stages:
                # Noted only here: a row is read on several ranks.
                self.skipped.add(data.train_source, batch.skipped, "training", data.order.epoch_of(step))
                if isinstance(batch.images, Crops) and task.augment.decode == "fast":
                    self.decoded["loader"] += sum(crop.file is None for crop in batch.images.crops)
                    batch = batch._replace(images=batch.images._replace(tally=self.decoded))
                if self.samples is not None:
                    indices = batch.indices[: batch.num_rows].tolist()
                    self.samples.add({"step": step + 1, "first_row": rows.start, "samples": indices})
            shared = self._share(self._finish(fields, batch, training=True))
            if first_step == 0 and self.look is not None:
                self.look(batch, shared)
            # On the CPU too: masks are drawn there, without a wait for the device.
            yield {**shared, "keys_on_host": batch.keys[: batch.num_rows]}

    def evaluation(
        self, source: Source | None = None, fields: Sequence[Field] | None = None, *, on_every_rank: bool = False
    ) -> EvaluationInputs:
        """The batches of a split, each image once and without augmentation.

        Args:
            source: the split; None for the validation split.
            fields: of a batch; None for those of the task's evaluation.
            on_every_rank: a small split, all of it on every data-parallel rank; damaged images do not count.
        """
        data = self.data
        source = data.validation if source is None else source
        fields = self._here(self.task.fields(training=False) if fields is None else fields)
        share, on_bad_image, num_workers = data.eval_share, self.run.config.on_bad_image, data.workers.number
        if on_every_rank:
            share, on_bad_image, num_workers = Share(0, 1, min(data.eval_rows, len(source))), "skip", 0
        loader = eval_loader(
            source,
            self.task.samples(fields),
            share,
            on_bad_image=on_bad_image,
            num_workers=num_workers,
            pin_memory=self._pins,
        )
        counts = "last" in self.stages and not on_every_rank  # once a row
        split = "training" if source is data.train_source else "evaluation"

        def read() -> Generator[Batch, None, None]:
            if not self.loads:
                for _ in range(len(loader)):
                    yield self._with_blanks(self._receive(fields, share.micro_batch, valid=True))
                return
            with contextlib.closing(iter(loader)) as batches:
                for batch in batches:
                    if counts:
                        inputs.num_skipped += batch.num_skipped
                        self.skipped.add(source, batch.skipped, split)
                    valid = batch.valid[: batch.num_rows].to(self.engine.device, non_blocking=True)
                    shared = self._share({**self._finish(fields, batch, training=False), "valid": valid})
                    yield self._with_blanks(shared)

        inputs = EvaluationInputs(read(), len(loader), len(source))
        return inputs

    @cached_property
    def further_texts(self) -> tuple[torch.Tensor, list[str]]:
        """`Task.further_texts` of the validation split: the sample of each, int64 [M], and the texts."""
        found = self.task.further_texts(self.data.validation)
        return torch.tensor([sample for sample, _ in found], dtype=torch.int64), [text for _, text in found]

    def texts(self, texts: Sequence[str]) -> EvaluationInputs:
        """The batches of some texts, each on one data-parallel rank, with the "number" of each, int64 [B]."""
        tokenizer, device, share = self.task.tokenizer, self.engine.device, self.data.eval_share
        num_batches = num_evaluation_batches(len(texts), share)
        assert tokenizer is not None, f"--task {self.task.name} reads no texts"

        def encode() -> Generator[Batch, None, None]:
            for index in range(num_batches):
                numbers, valid = evaluation_rows(len(texts), share, index)
                batch = {"number": numbers, "keys": evaluation_keys(numbers), "valid": valid}
                if "first" in self.stages:
                    batch["texts"] = np.stack([tokenizer.encode(texts[number]) for number in numbers])
                yield self._with_blanks({name: torch.from_numpy(array).to(device) for name, array in batch.items()})

        return EvaluationInputs(encode(), num_batches, len(texts))

    def _with_blanks(self, batch: Batch) -> Batch:
        """A batch with zeros for missing inputs of a pipeline, which runs all towers."""
        if self.run.layout.pp == 1 or "first" not in self.stages:
            return batch
        rows = len(batch["keys"])
        blanks = {
            field.name: torch.zeros(1, *field.shape, dtype=field.dtype, device=self.engine.device)
            for field in self._here(self.task.fields(training=False))
            if field.stage == "first" and field.name not in batch
        }
        return {**batch, **{name: blank.expand(rows, *blank.shape[1:]) for name, blank in blanks.items()}}

    def _here(self, fields: Iterable[Field]) -> tuple[Field, ...]:
        """The fields of this rank's stage, with their type there."""
        own = (field for field in fields if field.stage in self.stages)
        return tuple(dataclasses.replace(field, dtype=field.dtype or self.engine.dtype) for field in own)

    def _finish(self, fields: Sequence[Field], batch: MicroBatch, *, training: bool) -> Batch:
        """The tensors of a micro-batch that this rank's stage needs, and its keys.

        Nothing waits for the step before, which the device may still compute.
        """
        device = self.engine.device
        with self._stream or contextlib.nullcontext():
            tensors = self.task.tensors(fields, batch, training=training, device=device)
            tensors["keys"] = batch.keys[: batch.num_rows].to(device, non_blocking=True)
        if self._stream is not None:
            current = torch.accelerator.current_stream(device)
            current.wait_stream(self._stream)
            for tensor in tensors.values():
                tensor.record_stream(current)
        return tensors

    # ---- one rank of a tensor-parallel group loads, the others receive --------------------------------------------

    def _share(self, batch: Batch) -> Batch:
        """Send or receive each tensor, in the order of their names (the same on both sides)."""
        for name in sorted(batch) if self.run.layout.tp > 1 else ():
            dist.broadcast(batch[name], self.leader, group=self.engine.groups.tp)
        return batch

    def _receive(self, fields: Sequence[Field], rows: int, *, valid: bool = False) -> Batch:
        """The counterpart of `_share`: a batch of `rows` samples, in evaluation with what is valid of it."""

        def empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(rows, *shape, dtype=dtype, device=self.engine.device)

        batch = {field.name: empty(field.shape, field.dtype) for field in fields}
        batch["keys"] = empty((), torch.int64)
        if valid:
            batch["valid"] = empty((), torch.bool)
        return self._share(batch)


def _of_size(fields: Sequence[Field], size: int) -> tuple[Field, ...]:
    """The fields with square images of another size."""
    return tuple(
        dataclasses.replace(field, shape=(*field.shape[:-2], size, size)) if field.reads == "images" else field
        for field in fields
    )


# ---- --workers auto --------------------------------------------------------------------------------------------------

MAX_WORKERS = 16
"""Of a rank: at some 500 images per second per core, more than any model takes that is worth sharing over GPUs."""


def with_workers(run: Run) -> Run:
    """The run with the loader processes of `--workers auto`, resolved by `count_workers`; another run as it is."""
    if run.config.workers != "auto":
        return run
    workers = count_workers(partial(decodes_images, run), run.process)
    return dataclasses.replace(run, data=dataclasses.replace(run.data, workers=workers))


def decodes_images(run: Run, rank: int) -> bool:
    """Whether a rank decodes images: a field of its stage needs them, and it loads for its tensor-parallel group."""
    fields, stages = run.model.task.fields(training=run.optimizer is not None), stages_of(run.layout, rank)
    needed = any(field.reads == "images" and field.stage in stages for field in fields)
    return needed and run.layout.tp_rank(rank) == 0


def count_workers(decodes: Callable[[int], bool], process: Process) -> Workers:
    """Loader processes of this rank: its equal part of the cores that the training processes of this host leave.

    Once the ranks have met this is a collective: ranks that are bound to separate cores do not share them. Before, all
    ranks of this host count.

    Args:
        decodes: whether a rank decodes images.
        process: this rank.
    """
    own = (socket.gethostname(), os.sched_getaffinity(0))
    first = process.rank - process.local_rank
    here = list(range(first, min(first + (process.local_world_size or 1), process.world_size)))
    if dist.is_initialized():
        here = [rank for rank, (host, cores) in enumerate(gather_objects(own)) if host == own[0] and cores & own[1]]
    num_cores, num_loaders = min(len(own[1]), cpu_quota()), sum(map(decodes, here))
    number = max(1, min(MAX_WORKERS, (num_cores - len(here)) // num_loaders)) if decodes(process.rank) else 1
    trained = f"{len(here)} training process{'es' if len(here) > 1 else ''}"
    return Workers(number, f"{num_cores} cores for {trained}, {num_loaders} of which load images")


def cpu_quota(limit_file: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """The number of cores that the container's quota allows; affinity does not show it."""
    words = limit_file.read_text().split() if limit_file.is_file() else []
    if len(words) != 2 or not words[0].isdigit():  # "max 100000"
        return 2**31
    return max(1, int(words[0]) // int(words[1]))


@dataclass(eq=False)
class SkippedImages:
    """Images that could not be decoded: in training replaced by others, in evaluation left out of the count.

    Attributes:
        log: file that rank 0 writes each of them to once, a JSON object per line; None to write none.
        epoch_images: images in an epoch of training.
        max_bad_images: the share of them that may be replaced, and at least one if it is above 0.
    """

    log: Path | None
    epoch_images: int = 0
    max_bad_images: float = 1.0

    def __post_init__(self) -> None:
        # Of this rank since the last exchange: file, reason, split, epoch.
        self._new: list[tuple[str, str, str, int | None]] = []
        self._number = 0
        self._by_epoch: Counter[int] = Counter()
        self._first = ""  # file and reason
        self._logged: set[str] = set()
        self._lines = LineLog(self.log) if self.log is not None else None
        if self.log is not None and self.log.exists():  # of the run that is resumed
            for line in self.log.read_text().splitlines():
                with contextlib.suppress(ValueError):  # a line that a full disk or a kill cut off
                    self._logged.add(json.loads(line)["file"])

    def add(self, source: Source, skipped: Sequence[tuple[int, str]], split: str, epoch: int | None = None) -> None:
        """Add the skipped images of a `MicroBatch` of this rank.

        Args:
            source: of the batch.
            skipped: as `MicroBatch.skipped`.
            split: "training" or "evaluation", for the log.
            epoch: that the image was replaced in; None for evaluation, which only leaves it out.
        """
        self._new += [(source.describe(number), reason, split, epoch) for number, reason in skipped]

    @property
    def has_new(self) -> bool:
        """Whether this rank has skipped images since the last `gather`."""
        return bool(self._new)

    def gather(self) -> int:
        """How many training samples were replaced so far, on all ranks (a collective)."""
        everywhere = itertools.chain.from_iterable(gather_objects(self._new))
        self._new = []
        for file, reason, split, epoch in sorted(everywhere, key=itemgetter(0)):
            if epoch is not None:
                self._number += 1
                self._by_epoch[epoch] += 1
                self._first = self._first or f"{file}: {reason}"
            if self._lines is not None and file not in self._logged and dist.get_rank() == 0:
                self._lines.add({"file": file, "split": split, "reason": reason})
            self._logged.add(file)
        return self._number

    def too_many(self) -> str:
        """An error message if an epoch has had more of them than it may, else ""; as of the last `gather`."""
        epoch, number = max(self._by_epoch.items(), key=itemgetter(1), default=(0, 0))
        share = self.max_bad_images
        if number <= max(share * self.epoch_images, share > 0):  # one of a few images is a large share
            return ""
        self._by_epoch.clear()  # the run ends, and counts anew when it resumes: the files may have been repaired
        allowed = f"--max-bad-images allows {share:g}" if share else "none is allowed"
        return (
            f"{number:,} of the {self.epoch_images:,} images of epoch {epoch} ({number / self.epoch_images:.2g}) "
            f"are damaged{self._first and f' ({self._first})'}, and {allowed}; "
            f"{self.log} names those found so far, and ds-vit doctor --images DATA_DIR all damaged files; repair or "
            "replace them, or allow more by --on-bad-image skip and --max-bad-images"
        )

    def state_dict(self) -> dict[str, Any]:
        """Of training, as plain data (a collective)."""
        state: dict[str, Any] = {"skipped_images": self.gather()}
        if self._by_epoch:
            state["skipped_towards_limit"] = {str(epoch): number for epoch, number in self._by_epoch.items()}
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._number = state.get("skipped_images", 0)
        self._by_epoch = Counter({int(epoch): n for epoch, n in state.get("skipped_towards_limit", {}).items()})
