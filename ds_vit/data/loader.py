"""Micro-batches: what a rank reads for each micro-step, in worker processes, and the loaders that deliver it.

A training loader lives for the whole run: its sampler is the range of micro-steps t = step * accumulation + index,
across epochs. What a micro-batch holds is a pure function of t and the rank's share, so that neither the number of
workers nor the step a run starts from can change it.

Shapes: B own rows of a micro-batch, R >= B rows read (partners of rows whose pair is cut in two stand behind the own
rows), C classes.
"""

from __future__ import annotations

import contextlib
import gc
import math
import multiprocessing
import multiprocessing.connection
import multiprocessing.util
import os
import signal
import weakref
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from ds_vit import randomness
from ds_vit.config.augmentation import AugmentConfig, MixConfig
from ds_vit.data.augment.draws import shielded
from ds_vit.data.augment.erasing import ErasingBoxes
from ds_vit.data.augment.mixing import PairDraws, PairMix
from ds_vit.data.augment.transforms import FixedTransform, TrainTransform, eval_transform, train_transform
from ds_vit.data.decode import ImageDecodeError, open_image
from ds_vit.data.sampler import SampleOrder, Share, evaluation_keys, evaluation_rows, num_evaluation_batches
from ds_vit.data.settings import ImageConfig
from ds_vit.data.sources.source import Source
from ds_vit.fault_tolerance.errors import UserError, WorkerLost
from ds_vit.fault_tolerance.signals import ignore_in_worker

_REPLACEMENTS_TRIED = 16


class MicroBatch(NamedTuple):
    """The rows of one micro-batch, on the CPU; device.py makes the model's inputs of it.

    Attributes:
        keys: sample keys, int64 [R].
        indices: the samples' numbers in the source, int64 [R].
        images: augmented pixels, uint8 [R, 3, H, W], or None when not loaded.
        targets: class numbers int64 [R], multi-hot float32 [R, C], or None when not loaded.
        valid: bool [R]; False where an evaluation row is padding or could not be decoded. Such an image is black.
        erase: boxes to erase (top, left, bottom, right), int32 [R, N, 4], or None.
        mix: how the own rows are mixed, or None when mixing is not configured.
        num_rows: B.
        skipped: (number in the source, reason) of each own row whose image could not be decoded. Every rank that reads
            a row counts it.
    """

    keys: torch.Tensor
    indices: torch.Tensor
    images: torch.Tensor | None
    targets: torch.Tensor | None
    valid: torch.Tensor
    erase: torch.Tensor | None
    mix: PairMix | None
    num_rows: int
    skipped: Sequence[tuple[int, str]] = ()

    @property
    def num_skipped(self) -> int:
        """Own rows whose image could not be decoded."""
        return len(self.skipped)


class _Reader:
    """Reads rows of a source: decoded and transformed images, targets, and which images could not be decoded."""

    def __init__(
        self,
        source: Source,
        transform: TrainTransform | FixedTransform,
        image: ImageConfig,
        load_images: bool,
        load_targets: bool,
        on_bad_image: str,
        how: str = "exact",
    ) -> None:
        if on_bad_image not in ("error", "skip"):
            raise UserError(f"--on-bad-image {on_bad_image} is none of error, skip")
        self.source = source
        self.img_size = image.img_size
        self.load_images = load_images
        self._load_targets = load_targets
        self._skip = on_bad_image == "skip"
        self._transform = transform
        self.reading: torch.Tensor | None = None  # shared: which sample each worker is at
        self._how = how  # one of decode.DECODERS

    def read(
        self, indices: Sequence[int], keys: Sequence[int], valid: Sequence[bool], replace: bool
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, dict[int, str]]:
        """Read the valid rows.

        Args:
            indices, keys, valid: [R] each.
            replace: take another sample for an image that cannot be decoded (when such ones are skipped at all).

        Returns:
            images uint8 [R, 3, H, W] or None, targets or None, and, of rows whose own image was bad, the reason.
        """
        images = _black((len(indices), 3, *self.img_size)) if self.load_images else None
        targets = self._no_targets(len(indices)) if self._load_targets else None
        bad: dict[int, str] = {}
        for row, (index, key, is_valid) in enumerate(zip(indices, keys, valid, strict=True)):
            if not is_valid:
                continue
            if self.reading is not None:
                self.reading[get_worker_info().id] = index
            # Which sample stands in for a bad image decides the target too, so that skipping has to decode always.
            if self.load_images or self._skip:
                pixels, read_index, reason = self._image(index, key, replace)
                if read_index != index:
                    bad[row] = reason
                if self.load_images and pixels is not None:
                    images[row] = pixels
                index = read_index
            if targets is not None and index is not None:
                target = self.source.target(index)
                targets[row] = torch.from_numpy(target) if isinstance(target, np.ndarray) else target
        return images, targets, bad

    def _no_targets(self, num_rows: int) -> torch.Tensor:
        if self.source.multi_label:
            return torch.zeros((num_rows, self.source.num_classes), dtype=torch.float32)
        return torch.zeros(num_rows, dtype=torch.int64)

    def _image(self, index: int, key: int, replace: bool) -> tuple[torch.Tensor | None, int | None, str]:
        """The pixels of a sample, or of the first of its keyed replacements that can be decoded; its number; why."""
        tried = 0
        reason = ""
        candidate = index
        while True:
            try:
                return self._pixels(candidate, key), candidate, reason
            except ImageDecodeError as error:
                if not self._skip:
                    raise
                reason = reason or error.reason
                if not replace:
                    return None, None, reason
                if tried == _REPLACEMENTS_TRIED:
                    raise ImageDecodeError(
                        f"{error}; nor can the {tried} others that were tried in its place"
                    ) from error
            tried += 1
            candidate = (randomness.mix(key, randomness.name_key("replace bad image"), tried) & (2**63 - 1)) % len(
                self.source
            )

    def _pixels(self, index: int, key: int) -> torch.Tensor | None:
        """A sample's pixels; without images to load None, of an image that can be decoded all the same."""
        if not self.load_images:
            self.source.image(index)
            return None
        data = self.source.encoded(index)
        if data is None:
            return self._transform(self.source.image(index), key)
        # Whether an image is bad must not depend on the crop where another rank decodes it for its target alone.
        return self._transform(open_image(data, self.source.describe(index), self._how, whole=self._skip), key)


def _black(shape: tuple[int, ...]) -> torch.Tensor:
    """Zeros uint8; in a worker in shared memory from the start, so that handing them over copies nothing."""
    if get_worker_info() is None:
        return torch.zeros(shape, dtype=torch.uint8)
    storage = torch.UntypedStorage._new_shared(math.prod(shape))  # as torch's own default_collate does
    return torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)


class _Failure:
    """An error for people on its way out of a worker, as a value: raised there, torch would wrap it in a traceback."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class _Batches(Dataset):
    """A map from a batch's number to the batch, or to the failure to read it."""

    def __init__(self, reader: _Reader) -> None:
        self.reader = reader

    def __getitem__(self, number: int) -> MicroBatch | _Failure:
        try:
            with shielded():
                return self.load(number)
        except (UserError, OSError) as error:
            return _Failure(error)

    def load(self, number: int) -> MicroBatch:
        raise NotImplementedError


class _TrainBatches(_Batches):
    def __init__(
        self, reader: _Reader, order: SampleOrder, share: Share, augment: AugmentConfig, mix: MixConfig
    ) -> None:
        super().__init__(reader)
        self._order = order
        self._share = share
        self._mix = mix
        self._pairs = PairDraws(mix)
        erases = augment.reprob > 0.0 and not augment.no_aug and reader.load_images
        self._boxes = ErasingBoxes(augment) if erases else None

    def load(self, number: int) -> MicroBatch:
        step, micro_index = divmod(number, self._share.accumulation)
        own = self._share.rows(micro_index)
        mixes = self._mix.mixes_in(self._order.epoch_of(step))
        rows = [*own, *_cut_off_partners(own)] if mixes else [*own]
        indices, keys = self._order.rows(step, rows)
        valid = np.ones(len(rows), dtype=bool)
        images, targets, bad = self.reader.read(indices.tolist(), keys.tolist(), valid, replace=True)
        erase = None
        if self._boxes is not None:
            erase = torch.from_numpy(np.stack([self._boxes.draw(key, self.reader.img_size) for key in keys.tolist()]))
        return MicroBatch(
            keys=torch.from_numpy(keys),
            indices=torch.from_numpy(indices),
            images=images,
            targets=targets,
            valid=torch.from_numpy(valid),
            erase=erase,
            mix=self._draw_mix(rows, len(own), keys.tolist(), mixes) if self._mix.active else None,
            num_rows=len(own),
            skipped=[(int(indices[row]), reason) for row, reason in bad.items() if row < len(own)],
        )

    def _draw_mix(self, rows: list[int], num_rows: int, keys: list[int], mixes: bool) -> PairMix:
        if not mixes:  # after --mixup-off-epoch
            return PairMix(torch.arange(num_rows), torch.ones(num_rows), torch.zeros((num_rows, 4), dtype=torch.int32))
        place = {row: number for number, row in enumerate(rows)}
        pairs = {row // 2 for row in rows}
        drawn = {pair: self._pairs.draw(keys[place[2 * pair]], self.reader.img_size) for pair in pairs}
        own = rows[:num_rows]
        return PairMix(
            partner=torch.tensor([place[row ^ 1] for row in own]),
            lam=torch.tensor([drawn[row // 2][0] for row in own], dtype=torch.float32),
            box=torch.tensor([drawn[row // 2][1] for row in own], dtype=torch.int32),
        )


def _cut_off_partners(own: range) -> list[int]:
    """The partners of own rows that other micro-batches own: at most one before the first and one after the last."""
    return [own.start - 1] * (own.start % 2) + [own.stop] * (own.stop % 2)


class _EvalBatches(_Batches):
    def __init__(self, reader: _Reader, batch: int, dp_rank: int, dp_size: int) -> None:
        super().__init__(reader)
        self._batch = batch
        self._dp_rank = dp_rank
        self._dp_size = dp_size

    def load(self, number: int) -> MicroBatch:
        num_samples = len(self.reader.source)
        indices, valid = evaluation_rows(num_samples, self._batch, self._dp_rank, self._dp_size, number)
        keys = evaluation_keys(indices)
        images, targets, bad = self.reader.read(indices.tolist(), keys.tolist(), valid, replace=False)
        return MicroBatch(
            keys=torch.from_numpy(keys),
            indices=torch.from_numpy(indices),
            images=images,
            targets=targets,
            valid=torch.from_numpy(valid & ~np.isin(np.arange(len(valid)), list(bad))),
            erase=None,
            mix=None,
            num_rows=self._batch,
            skipped=[(int(indices[row]), reason) for row, reason in bad.items()],
        )


class Loader:
    """Delivers micro-batches in order.

    Iterating raises the UserError or OSError that a worker met, as it was: one line that names the file; and WorkerLost
    where a worker was killed, which names the file that it was at.
    """

    def __init__(self, batches: _Batches, numbers: range, num_workers: int, pin_memory: bool) -> None:
        self._reader = batches.reader
        if num_workers:
            self._reader.reading = torch.full((num_workers,), -1, dtype=torch.int64).share_memory_()
        self._loader = DataLoader(
            batches,
            batch_size=None,
            sampler=numbers,
            num_workers=num_workers,
            collate_fn=_as_it_is,
            worker_init_fn=ignore_in_worker if num_workers else None,
            pin_memory=pin_memory,
            generator=torch.Generator(),  # else each iteration draws a seed from the process's generator
        )

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[MicroBatch]:
        others = set(multiprocessing.active_children())
        # An iterator that was given up may still wait for the garbage collector. Collected in a worker, it would close
        # files whose numbers are those of the worker's own queues. What is frozen here, no worker collects.
        gc.freeze()
        items = iter(self._loader)
        gc.unfreeze()
        workers = sorted(set(multiprocessing.active_children()) - others, key=lambda worker: worker.pid)
        _end_with_this_process(workers)
        if workers:
            with contextlib.suppress(ValueError):  # this is not the main thread
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch would raise an error wherever the run is
        while True:
            self._check(workers)
            try:
                item = next(items)
            except StopIteration:
                return
            except Exception:  # torch waits for a worker that is no more, or finds its end of a socket closed
                multiprocessing.connection.wait([worker.sentinel for worker in workers], timeout=1)
                self._check(workers)
                raise
            if isinstance(item, _Failure):
                raise item.error
            yield item

    def _check(self, workers: Sequence[BaseProcess]) -> None:
        """Raise WorkerLost if a worker has ended, which none does before the last batch is out."""
        for number, worker in enumerate(workers):
            if worker.is_alive():
                continue
            at = int(self._reader.reading[number])
            last = f"; it had begun to read {self._reader.source.describe(at)}" if at >= 0 else ""
            code = worker.exitcode
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"has ended with code {code}"
            raise WorkerLost(
                f"loader process {number} (pid {worker.pid}) {how}{last}; where the machine had no memory left (dmesg "
                "says), use fewer --workers; start again with --resume auto"
            )


_workers: weakref.WeakSet[BaseProcess] = weakref.WeakSet()
_workers_of = 0  # the process that they are to end with


def _end_with_this_process(workers: Iterable[BaseProcess]) -> None:
    """Have worker processes killed when this process ends.

    An iteration that is given up in the middle, and still held (by DeepSpeed's pipeline), leaves workers
    behind. Python would send them SIGTERM, which they ignore, and wait for them for ever.
    """
    global _workers_of
    _workers.update(workers)
    if _workers and _workers_of != os.getpid():
        _workers_of = os.getpid()
        # Before Python's own SIGTERM, which comes after all that has a priority.
        multiprocessing.util.Finalize(None, _kill_workers, exitpriority=10)


def _kill_workers() -> None:
    with contextlib.suppress(ValueError):  # this is not the main thread
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch would raise an error for each
    for worker in list(_workers):
        worker.kill()
        worker.join()


def _as_it_is(item: Any) -> Any:
    return item


def train_loader(
    source: Source,
    *,
    order: SampleOrder,
    share: Share,
    image: ImageConfig,
    augment: AugmentConfig,
    mix: MixConfig,
    start_step: int = 0,
    stop_step: int,
    load_images: bool = True,
    load_targets: bool = True,
    on_bad_image: str = "error",
    num_workers: int = 0,
    pin_memory: bool = False,
) -> Loader:
    """The micro-batches of a rank for the optimizer steps [start_step, stop_step), counted from 0 over all epochs.

    Args:
        source: the training split.
        order: which samples a step uses.
        share: which of a step's rows this rank holds.
        image, augment, mix: what happens to them.
        load_images, load_targets: a pipeline's first stage needs the one, its last stage the other. Without images
            nothing is decoded, unless bad images are skipped: then a target depends on what can be decoded.
        on_bad_image: "error", or "skip" for a keyed replacement.
        num_workers: processes that read; 0 reads in this one.
        pin_memory: page-locked memory for fast copies to a GPU.

    Raises:
        UserError: settings that cannot work together, with the numbers. Iterating raises ImageDecodeError.
    """
    assert order.num_samples == len(source), f"an order of {order.num_samples} samples for {len(source)}"
    assert share.global_batch == order.global_batch, f"{share} does not cut a global batch of {order.global_batch}"
    if mix.active and order.global_batch % 2:
        raise UserError(
            f"--mixup and --cutmix mix pairs, which a global batch of {order.global_batch} rows "
            f"({share.dp_size} ranks x {share.accumulation} micro-batches x {share.micro_batch}) does not divide into; "
            "make one of the three even, or turn mixing off"
        )
    transform = train_transform(image, augment)
    reader = _Reader(source, transform, image, load_images, load_targets, on_bad_image, augment.decode)
    numbers = range(start_step * share.accumulation, stop_step * share.accumulation)
    return Loader(_TrainBatches(reader, order, share, augment, mix), numbers, num_workers, pin_memory)


def eval_loader(
    source: Source,
    *,
    image: ImageConfig,
    batch: int,
    dp_rank: int = 0,
    dp_size: int = 1,
    load_images: bool = True,
    load_targets: bool = True,
    on_bad_image: str = "error",
    num_workers: int = 0,
    pin_memory: bool = False,
) -> Loader:
    """A rank's share of an evaluation, to be iterated as often as wanted; each image is valid on one rank, once.

    Every rank gets the same number of batches of `batch` rows. Under `on_bad_image="skip"` a row that cannot be
    decoded is not valid, and counted. The other arguments are those of `train_loader`.
    """
    reader = _Reader(source, eval_transform(image), image, load_images, load_targets, on_bad_image)
    numbers = range(num_evaluation_batches(len(source), batch, dp_size))
    return Loader(_EvalBatches(reader, batch, dp_rank, dp_size), numbers, num_workers, pin_memory)
