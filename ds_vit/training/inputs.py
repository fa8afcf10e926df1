"""The batches of this rank: loaded by its loader processes, and finished on the device.

The task's fields decide what is loaded: a pipeline stage decodes images, or reads targets, only if one of its fields
needs them. In a tensor-parallel group one rank loads and the others receive, except what follows from the keys: that
each rank makes for itself.
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
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ds_vit.config.augmentation import MixConfig
from ds_vit.config.run_folder import LineLog, RunFolder
from ds_vit.data.field import Field, MicroBatch, derived, on_device, origins, types_of_origins
from ds_vit.data.fields import ImageField
from ds_vit.data.loader import Loader
from ds_vit.data.reader import Reader
from ds_vit.data.rows import EvalRows, TrainRows
from ds_vit.data.sampler import Share
from ds_vit.data.settings import Workers
from ds_vit.data.sources.source import Source
from ds_vit.device import pins_memory
from ds_vit.engine.base import Engine
from ds_vit.launching.process import Process
from ds_vit.monitoring.metrics import Throughput
from ds_vit.parallel.groups import gather_objects
from ds_vit.parallel.layout import Layout
from ds_vit.tasks.metrics import Batch
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
        data: the samples.
        task: makes the tensors of a batch.
        stages: of this rank, as `stages_of`.
        leader: the rank that loads for this rank's tensor-parallel group.
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
        self._pins = pins_memory(engine.device)
        self._stream = torch.Stream(engine.device) if self._pins else None

    @property
    def decoded(self) -> Counter[str]:
        """Images of training by where they were decoded (`ImageField.decoded`)."""
        fields = origins(self.task.training_fields)
        return sum((field.decoded for field in fields if isinstance(field, ImageField)), Counter())

    def training(self, first_step: int = 0, skipped_batches: int = 0) -> Generator[Batch, None, None]:
        """The micro-batches of the run from a step on; counts the time that the loop waits for them.

        Args:
            first_step: optimizer steps that are done.
            skipped_batches: global batches that were left out before this step.
        """
        data, task, share, config = self.data, self.task, self.run.share, self.run.config
        mix = config if self.loads else MixConfig()  # others read keyed fields only, which are not mixed
        rows = TrainRows(data.order, share, mix, task.image.img_size, data.sizes, skipped_batches)
        on_bad_image = "skip" if config.on_bad_image == "skip" else "replace"
        reader = self._reader(task.training_fields, data.train_source, rows, on_bad_image)
        here = self._here(task.training_fields)
        sized = {side: [field.resized(side) if side else field for field in here] for side in rows.sides}
        first, last = (step + skipped_batches for step in (first_step, max(first_step, self.run.total_steps)))
        numbers = range(first * share.accumulation, last * share.accumulation)
        read = iter(Loader(reader, numbers, data.workers.number * self.loads, self._pins))
        for number in numbers:
            step, micro_index = divmod(number - skipped_batches * share.accumulation, share.accumulation)
            before = time.perf_counter()
            batch = next(read)
            self.throughput.waited(time.perf_counter() - before)
            if self.loads and "first" in self.stages:
                # Noted only here: a row is read on several ranks.
                self.skipped.add(data.train_source, batch.skipped, "training", data.order.epoch_of(step))
                if self.samples is not None:
                    indices = batch.rows.indices[: batch.rows.num_rows].tolist()
                    first_row = share.rows(micro_index).start
                    self.samples.add({"step": step + 1, "first_row": first_row, "samples": indices})
            tensors = self._finish(sized[batch.rows.side], batch)
            if first_step == 0 and self.loads and self.look is not None:
                self.look(batch, tensors)
            yield tensors

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
        fields = self.task.evaluation_fields if fields is None else fields
        share, on_bad_image, num_workers = self.run.eval_share, self.run.config.on_bad_image, data.workers.number
        if on_every_rank:
            share, on_bad_image, num_workers = Share(0, 1, min(share.micro_batch, len(source))), "skip", 0
        rows = EvalRows(len(source), share)
        reader = self._reader(fields, source, rows, on_bad_image)
        loader = Loader(reader, range(len(rows)), num_workers * self.loads, self._pins)
        counts = self.loads and "last" in self.stages and not on_every_rank  # once a row
        split = "training" if source is data.train_source else "evaluation"
        here = self._here(fields)

        def read() -> Generator[Batch, None, None]:
            with contextlib.closing(iter(loader)) as batches:
                for batch in batches:
                    if counts:
                        inputs.num_skipped += len(batch.skipped)
                        self.skipped.add(source, batch.skipped, split)
                    yield self._with_blanks(self._finish(here, batch))

        inputs = EvaluationInputs(read(), len(loader), len(source))
        return inputs

    @cached_property
    def further_texts(self) -> tuple[torch.Tensor, list[str]]:
        """`Task.further_texts`: the sample of each, int64 [M], and the texts."""
        found = self.task.further_texts()
        return torch.tensor([sample for sample, _ in found], dtype=torch.int64), [text for _, text in found]

    def texts(self, texts: Sequence[str]) -> EvaluationInputs:
        """The batches of some texts, each on one data-parallel rank, with the "number" of each, int64 [B]."""
        tokenizer, device, share = self.task.tokenizer, self.engine.device, self.run.eval_share
        rows = EvalRows(len(texts), share)
        assert tokenizer is not None, f"--task {self.task.name} reads no texts"

        def encode() -> Generator[Batch, None, None]:
            for number in range(len(rows)):
                at = rows.at(number)
                batch = {"number": at.indices, "keys": at.keys, "valid": at.valid}
                if "first" in self.stages:
                    ids = [tokenizer.encode(texts[index]) for index in at.indices.tolist()]
                    batch["texts"] = torch.from_numpy(np.stack(ids))
                yield self._with_blanks({name: tensor.to(device) for name, tensor in batch.items()})

        return EvaluationInputs(encode(), len(rows), len(texts))

    def _with_blanks(self, batch: Batch) -> Batch:
        """A batch with zeros for missing inputs of a pipeline, which runs all towers."""
        if self.run.layout.pp == 1 or "first" not in self.stages:
            return batch
        rows = len(batch["keys"])
        blanks = {
            field.name: torch.zeros(1, *field.shape, dtype=field.dtype or self.engine.dtype, device=self.engine.device)
            for field in self._here(self.task.evaluation_fields)
            if field.stage == "first" and field.name not in batch
        }
        return {**batch, **{name: blank.expand(rows, *blank.shape[1:]) for name, blank in blanks.items()}}

    def _here(self, fields: Iterable[Field]) -> list[Field]:
        """The fields of this rank's stage."""
        return [field for field in fields if field.stage in self.stages]

    def _reader(self, fields: Sequence[Field], source: Source, rows: TrainRows | EvalRows, on_bad_image: str) -> Reader:
        """Of the fields of this rank's stage, in a rank that does not load only those that follow from the keys."""
        read, needed = origins(fields), origins(self._here(fields))
        if not self.loads:
            read = needed = [field for field in needed if not field.entry]
        return Reader(source, read, rows, {field.name for field in needed}, on_bad_image)

    def _finish(self, fields: Sequence[Field], batch: MicroBatch) -> dict[str, torch.Tensor]:
        """The tensors of a micro-batch that this rank's stage needs, its keys, and in evaluation which rows count.

        Nothing waits for the step before, which the device may still compute.
        """
        rows, device, dtype = batch.rows, self.engine.device, self.engine.dtype
        own, types = slice(rows.num_rows), types_of_origins(fields, dtype)
        is_shared = self.run.layout.tp > 1
        with self._stream or contextlib.nullcontext():
            read = {field: kind for field, kind in types.items() if self.loads or not field.entry}
            tensors = on_device(read, batch, device)
            if not is_shared:
                tensors = derived(fields, tensors, dtype)
            of_rows = {"keys": rows.keys[own].to(device, non_blocking=True)}
            if not rows.training:
                of_rows["valid"] = rows.valid[own].to(device, non_blocking=True)
        if self._stream is not None:
            current = torch.accelerator.current_stream(device)
            current.wait_stream(self._stream)
            for tensor in (*tensors.values(), *of_rows.values()):
                if tensor.device.type == device.type:  # a field may stay on the host
                    tensor.record_stream(current)
        if is_shared:
            self._share(types, tensors, of_rows)
            tensors = derived(fields, tensors, dtype)
        return tensors | of_rows

    def _share(self, types: Mapping[Field, torch.dtype], tensors: dict[str, torch.Tensor], of_rows: Batch) -> None:
        """Send the tensors that do not follow from the keys to the tensor-parallel group, or receive them."""
        num_rows, device = len(of_rows["keys"]), self.engine.device
        for field, dtype in types.items():
            if field.entry and not self.loads:
                tensors[field.name] = torch.empty((num_rows, *field.shape), dtype=dtype, device=device)
        sent = {field.name: tensors[field.name] for field in types if field.entry}
        sent |= {"valid": of_rows["valid"]} if "valid" in of_rows else {}
        for name in sorted(sent):
            dist.broadcast(sent[name], self.leader, group=self.engine.groups.tp)


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
    task, stages = run.model.task, stages_of(run.layout, rank)
    fields = task.evaluation_fields if run.optimizer is None else task.training_fields
    needed = any(field.is_heavy and field.stage in stages for field in fields)
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
