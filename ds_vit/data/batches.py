"""What a rank reads for each micro-step: rows of images, targets and texts, a pure function of the step's number.

Shapes: B own rows of a micro-batch, R >= B rows read (the own rows, then partners that other micro-batches own),
C classes, L tokens of a caption, n local crops of S x S.
"""

from __future__ import annotations

import itertools
import math
import shutil
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from ds_vit import randomness
from ds_vit.data.augment.crops import MultiCrop
from ds_vit.data.augment.mixing import ErasingBoxes, PairDraws, PairMix
from ds_vit.data.augment.on_device import Crops, Cut, CuttingTransform, packed
from ds_vit.data.augment.steps import shielded, uniform
from ds_vit.data.augment.transforms import FixedTransform, TrainTransform
from ds_vit.data.decode import ImageDecodeError
from ds_vit.data.sampler import Share, evaluation_keys, evaluation_rows
from ds_vit.data.settings import Data, SampleSpec
from ds_vit.data.sources.source import Source
from ds_vit.fault_tolerance.errors import UserError, WorkerLost, first_line

_REPLACEMENTS_TRIED = 16


class MicroBatch(NamedTuple):
    """The rows of one micro-batch, on the CPU; device.py makes the model's inputs of it.

    Attributes:
        keys: sample keys, int64 [R].
        indices: the samples' numbers in the source, int64 [R].
        images: augmented pixels, uint8 [R, 3, H, W]; with --augment-on device the crops to be augmented there; or None
            when not loaded. With several crops of an image the two global ones, uint8 [R, 2, 3, H, W].
        targets: class numbers int64 [R], multi-hot float32 [R, C], or None when not loaded.
        valid: bool [R]; False where an evaluation row is padding or could not be decoded. Such an image is black.
        erase: boxes to erase (top, left, bottom, right), int32 [R, N, 4], or None.
        mix: how the own rows are mixed, or None when mixing is not configured.
        num_rows: B.
        skipped: (number in the source, reason) of each own row whose image could not be decoded. Every rank that reads
            a row counts it.
        texts: token ids of a caption, int64 [R, L], or None when not loaded.
        local_images: the local crops, uint8 [R, n, 3, S, S], or what the device makes them of; None if there are none.
    """

    keys: torch.Tensor
    indices: torch.Tensor
    images: torch.Tensor | Crops | None
    targets: torch.Tensor | None
    valid: torch.Tensor
    erase: torch.Tensor | None
    mix: PairMix | None
    num_rows: int
    skipped: Sequence[tuple[int, str]] = ()
    texts: torch.Tensor | None = None
    local_images: torch.Tensor | Crops | None = None

    @property
    def num_skipped(self) -> int:
        """Own rows whose image could not be decoded."""
        return len(self.skipped)


# ---- memory of images ------------------------------------------------------------------------------------------------

# The shared memory through which a loader's workers pass images on is allocated once for an iteration. New memory for
# each micro-batch would cost both processes a file that is made, passed on and mapped, and a page fault for each of
# its pages in both: on two cores an eighth of all the work on JPEG files at 224. Here the images are copied out
# instead, and the place is reused.

PREFETCHED = 2  # batches requested of a worker beyond the current one
# Torch requests the next batch of a worker when it has received one, before that one is copied out. So a worker may
# hold one that is being copied and PREFETCHED others; the next is requested when the first one's place is free.
_PLACES = PREFETCHED + 1

_numbers = itertools.count()
_slots: weakref.WeakValueDictionary[int, Slots] = weakref.WeakValueDictionary()


class Slots:
    """Places for the images of each worker's next few batches.

    Args:
        num_workers: how many there are.
        num_bytes: of the largest batch.
    """

    def __init__(self, num_workers: int, num_bytes: int) -> None:
        """Raises:
        WorkerLost: there is too little shared memory.
        """
        self._number = next(_numbers)
        self._turn = 0
        total = num_workers * _PLACES * num_bytes
        try:  # pages are taken when they are first written to
            storage = torch.UntypedStorage._new_shared(total)
        except RuntimeError as error:
            raise WorkerLost(
                f"{num_workers} loader processes need {total / 2**20:,.0f} MiB of shared memory ({first_line(error)}): "
                f"{shared_memory_advice()}"
            ) from error
        self._memory = torch.empty(0, dtype=torch.uint8).set_(storage).view(num_workers, _PLACES, num_bytes)
        _slots[self._number] = self

    def zeros(self, worker: int, shape: Sequence[int]) -> torch.Tensor:
        """A worker's next place, uint8 of this shape."""
        self._turn = (self._turn + 1) % _PLACES
        return self._memory[worker, self._turn, : math.prod(shape)].view(*shape).zero_()

    def hold(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in one of the places."""
        return tensor.untyped_storage().data_ptr() == self._memory.untyped_storage().data_ptr()

    def sent(self, tensor: torch.Tensor) -> InSlot:
        """A tensor of `zeros` in the form in which a worker sends it."""
        return InSlot(self._number, tensor.storage_offset(), tuple(tensor.shape))

    def part(self, offset: int, shape: tuple[int, ...]) -> torch.Tensor:
        """A view of a place, valid until it is reused."""
        return self._memory.view(-1)[offset : offset + math.prod(shape)].view(shape)


def shared_memory_advice() -> str:
    """How large /dev/shm is, and what to do if it is full."""
    try:
        usage = shutil.disk_usage("/dev/shm")
        size = f"{usage.total / 2**20:,.0f} MiB, {usage.free / 2**20:,.0f} MiB of which are free now"
    except OSError as error:
        size = error.strerror or str(error)
    return (
        f"images are passed on through /dev/shm ({size}): if it was full, make it larger (docker run --shm-size 8g, or "
        "--ipc=host; in Kubernetes an emptyDir of medium Memory), or use fewer --workers or a smaller micro-batch"
    )


class InSlot:
    """Where a tensor lies in the slots of an iteration: sent through a worker's pipe in place of it."""

    def __init__(self, slots: int, offset: int, shape: tuple[int, ...]) -> None:
        self._slots, self._offset, self._shape = slots, offset, shape

    def _part(self) -> torch.Tensor:
        return _slots[self._slots].part(self._offset, self._shape)

    def copied(self) -> torch.Tensor:
        """A copy of the tensor."""
        return self._part().clone()

    def pin_memory(self) -> torch.Tensor:
        """A copy in page-locked memory; called by torch's pinning thread."""
        return self._part().pin_memory()


Transform = TrainTransform | FixedTransform | CuttingTransform | MultiCrop
Pixels = Sequence[torch.Tensor | list[Cut]]
"""Of a sample: its image, or its global crops and its local ones."""


@dataclass
class Reader:
    """Reads rows of a source: decoded and transformed images, targets, captions, and which images are damaged.

    Attributes:
        source: of the samples.
        spec: what is read of them.
        transform: of an image; it and `img_size`, the (height, width) that it gives, change with --train-img-sizes.
        decoder: one of `decode.DECODERS`.
        on_bad_image: "error", or for a keyed replacement "replace" or "skip". Under "skip" the targets of ranks that
            load no images follow the replacement too, and files that a device decodes are checked first.
        slots: shared memory where workers put images.
        reading: shared by the workers: the sample that each one is reading.
    """

    source: Source
    spec: SampleSpec
    transform: Transform
    decoder: str
    on_bad_image: str
    slots: Slots | None = None
    reading: torch.Tensor | None = None

    def __post_init__(self) -> None:
        spec, transform = self.spec, self.transform
        self.img_size, self.tokenizer = spec.image.img_size, spec.tokenizer
        self.loads_images = "images" in spec.reads
        self.skips = self.on_bad_image == "skip"
        self.cuts = transform.cuts if isinstance(transform, MultiCrop) else isinstance(transform, CuttingTransform)
        self.has_text = self.tokenizer is not None and self.source.has_captions

    @property
    def shapes(self) -> Sequence[tuple[int, ...]]:
        """Of a sample's pixels: [3, H, W], or its global crops [2, 3, H, W] and its local ones [n, 3, S, S]."""
        return self.transform.shapes if isinstance(self.transform, MultiCrop) else [(3, *self.img_size)]

    def read(self, indices: np.ndarray, keys: np.ndarray, num_rows: int, valid: np.ndarray | None = None) -> MicroBatch:
        """Read a micro-batch, without erasing and mixing.

        Args:
            indices: int64 [R].
            keys: int64 [R].
            num_rows: B.
            valid: of an evaluation's rows, bool [R]; one whose image is skipped is not valid either. In training None:
                every row is valid, and another sample takes the place of one that is skipped.
        """
        parts: list[torch.Tensor | list[Cut]] = []
        targets: torch.Tensor | None = None
        is_valid = np.ones(len(indices), dtype=bool) if valid is None else valid.copy()
        if self.loads_images:
            parts += [[] for _ in self.shapes] if self.cuts else self._zeros(len(indices))
        if "targets" in self.spec.reads and self.source.multi_label:
            targets = torch.zeros((len(indices), self.source.num_classes), dtype=torch.float32)
        elif "targets" in self.spec.reads:
            targets = torch.zeros(len(indices), dtype=torch.int64)
        texts = None
        if self.tokenizer is not None and "texts" in self.spec.reads:
            texts = torch.from_numpy(self.tokenizer.encode("")).repeat(len(indices), 1)
        skipped: list[tuple[int, str]] = []
        for row, (index, key) in enumerate(zip(indices.tolist(), keys.tolist(), strict=True)):
            if not is_valid[row]:
                continue
            if self.reading is not None:
                self.reading[get_worker_info().id] = index
            # Which sample replaces a bad image decides target and text too, so that skipping always decodes.
            read_index: int | None = index
            if self.loads_images or self.skips:
                pixels, read_index, reason = self._image(index, key, replace=valid is None)
                if read_index != index and row < num_rows:
                    skipped.append((index, reason))
                for part, own in zip(parts, pixels, strict=True) if pixels else ():
                    if isinstance(part, list):
                        part += own
                    else:
                        part[row] = own
            if read_index is None:
                is_valid[row] = False
                continue
            if targets is not None:
                targets[row] = torch.as_tensor(self.source.target(read_index))
            if texts is not None:
                texts[row] = self._text(read_index, key if valid is None else None)
        images, local_images, *_ = (*map(self._packed, parts, self.shapes), None, None)
        return MicroBatch(
            keys=torch.from_numpy(keys),
            indices=torch.from_numpy(indices),
            images=images,
            targets=targets,
            valid=torch.from_numpy(is_valid),
            erase=None,
            mix=None,
            num_rows=num_rows,
            skipped=skipped,
            texts=texts,
            local_images=local_images,
        )

    def _zeros(self, num_rows: int) -> Sequence[torch.Tensor]:
        """Black pixels of rows, uint8 [num_rows, *shape] for each of `shapes`: one place of the slots holds them."""
        sizes = [num_rows * math.prod(shape) for shape in self.shapes]
        worker, total = get_worker_info(), (sum(sizes),)
        memory = _zeros(total) if worker is None or self.slots is None else self.slots.zeros(worker.id, total)
        return [part.view(num_rows, *shape) for part, shape in zip(memory.split(sizes), self.shapes, strict=True)]

    def _packed(self, part: torch.Tensor | list[Cut], shape: tuple[int, ...]) -> torch.Tensor | Crops:
        if isinstance(part, torch.Tensor):
            return part
        memory = _zeros((sum(cut.data.size for cut in part),))
        return packed(part, (shape[-2], shape[-1]), memory, num_views=shape[0] if len(shape) == 4 else 0)

    def _text(self, index: int, key: int | None) -> torch.Tensor:
        """Token ids [L] of one of a sample's captions: drawn by the key, or the first without one."""
        assert self.tokenizer is not None, "this reader has no tokenizer"
        captions = self._captions(index)
        drawn = 0 if key is None else int(uniform(key, "caption") * len(captions))
        return torch.from_numpy(self.tokenizer.encode(captions[drawn]))

    def _captions(self, index: int) -> tuple[str, ...]:
        if captions := self.source.captions(index):
            return captions
        reason = "its caption is empty or not UTF-8"
        error = ImageDecodeError(f"{self.source.describe(index)}: {reason}; repair it, or pass --on-bad-image skip")
        error.reason = reason
        raise error

    def _image(self, index: int, key: int, replace: bool) -> tuple[Pixels | None, int | None, str]:
        """The pixels of a sample, or of the first of its keyed replacements that can be decoded; its number; why."""
        candidate, reason = index, ""
        for tried in itertools.count(1):
            try:
                return self._pixels(candidate, key), candidate, reason
            except ImageDecodeError as error:
                if self.on_bad_image == "error":
                    raise
                reason = reason or error.reason
                if not replace:
                    break
                if tried > _REPLACEMENTS_TRIED:
                    raise ImageDecodeError(f"{error}; so are {_REPLACEMENTS_TRIED} replacements") from error
            place = randomness.mix(key, randomness.name_key("replace bad image"), tried) & (2**63 - 1)
            candidate = place % len(self.source)
        return None, None, reason

    def _pixels(self, index: int, key: int) -> Pixels | None:
        """A sample's pixels; if no images are loaded None, of an image whose crop can be decoded all the same."""
        if self.has_text:
            self._captions(index)  # on the stages without texts too, so that all of them skip the same samples
        # A file that a device decodes would show its damage there, too late for a replacement.
        whole = self.skips and self.cuts
        image = self.source.opened(index, self.decoder, whole=whole, exif_rotation=self.spec.image.exif_rotation)
        pixels = self.transform(image, key)
        if not self.loads_images:
            return None
        return [[pixels]] if isinstance(pixels, Cut) else [pixels] if isinstance(pixels, torch.Tensor) else pixels


def _zeros(shape: tuple[int, ...]) -> torch.Tensor:
    """Zeros uint8; in a worker in shared memory from the start, so that passing them on copies nothing."""
    if get_worker_info() is None:
        return torch.zeros(shape, dtype=torch.uint8)
    storage = torch.UntypedStorage._new_shared(math.prod(shape))  # as torch's default_collate does
    return torch.empty(0, dtype=torch.uint8).set_(storage).view(shape)


class Batches(Dataset):
    """A map from a batch's number to the batch, or to an error for people: torch would wrap one that is raised.

    Args:
        reader: of its rows.
        most_rows: of a batch.
        most_bytes: of the pixels of a sample.
    """

    def __init__(self, reader: Reader, most_rows: int, most_bytes: int) -> None:
        self.reader = reader
        self._most_bytes = most_rows * most_bytes

    def __getitem__(self, number: int) -> MicroBatch | Exception:
        try:
            with shielded():
                return self.load(number)
        except (UserError, OSError) as error:
            return error

    def load(self, number: int) -> MicroBatch:
        """Read a batch."""
        raise NotImplementedError

    def slots(self, num_workers: int) -> Slots | None:
        """Places for the images of this many workers; None if they differ in size, or there are none."""
        fills_rows = self.reader.loads_images and not self.reader.cuts
        return Slots(num_workers, self._most_bytes) if fills_rows else None


class TrainBatches(Batches):
    """By the number of a micro-step t = step * accumulation + index; the image size may follow from the step's."""

    def __init__(
        self, reader: Reader, data: Data, transforms: Mapping[int, Transform], skipped_batches: int = 0
    ) -> None:
        most_bytes = max((3 * side**2 for side in transforms), default=sum(map(math.prod, reader.shapes)))
        super().__init__(reader, data.share.micro_batch + 2, most_bytes)  # two partners that other micro-batches own
        self._sizes = data.sizes
        self._skipped_batches = skipped_batches
        self._transforms = dict(transforms)  # by the side of the images
        self._order = data.order
        self._share = data.share
        self._mix = reader.spec.mix
        self._pairs = PairDraws(self._mix)
        augment = reader.spec.augment
        erases = augment.reprob > 0.0 and not augment.no_aug and reader.loads_images
        self._boxes = ErasingBoxes(augment) if erases else None

    def load(self, number: int) -> MicroBatch:
        step, micro_index = divmod(number, self._share.accumulation)
        if self._sizes is not None:
            size = self._sizes.at(step - self._skipped_batches)  # of the optimizer step
            self.reader.img_size, self.reader.transform = (size, size), self._transforms[size]
        own = self._share.rows(micro_index)
        mixes = self._mix.mixes_in(self._order.epoch_of(step - self._skipped_batches))
        # Partners that other micro-batches own: at most one before the first row and one after the last.
        partners = [own.start - 1] * (own.start % 2) + [own.stop] * (own.stop % 2)
        rows = [*own, *(partners if mixes else ())]
        indices, keys = self._order.rows(step, rows)
        batch = self.reader.read(indices, keys, len(own))
        if self._boxes is not None:
            boxes = np.stack([self._boxes.draw(key, self.reader.img_size) for key in keys.tolist()])
            batch = batch._replace(erase=torch.from_numpy(boxes))
        if self._mix.active:
            batch = batch._replace(mix=self._draw_mix(rows, len(own), keys.tolist(), mixes))
        return batch

    def _draw_mix(self, rows: list[int], num_rows: int, keys: list[int], mixes: bool) -> PairMix:
        if not mixes:  # after --mixup-off-epoch
            return PairMix(torch.arange(num_rows), torch.ones(num_rows), torch.zeros((num_rows, 4), dtype=torch.int32))
        place = {row: number for number, row in enumerate(rows)}
        drawn = {row: self._pairs.draw(keys[place[row]], self.reader.img_size) for row in rows if row % 2 == 0}
        own = rows[:num_rows]
        return PairMix(
            partner=torch.tensor([place[row ^ 1] for row in own]),
            lam=torch.tensor([drawn[row - row % 2][0] for row in own], dtype=torch.float32),
            box=torch.tensor([drawn[row - row % 2][1] for row in own], dtype=torch.int32),
        )


class EvalBatches(Batches):
    """By the number of a rank's batch of an evaluation."""

    def __init__(self, reader: Reader, share: Share) -> None:
        super().__init__(reader, share.micro_batch, sum(map(math.prod, reader.shapes)))
        self._share = share

    def load(self, number: int) -> MicroBatch:
        indices, valid = evaluation_rows(len(self.reader.source), self._share, number)
        return self.reader.read(indices, evaluation_keys(indices), len(indices), valid)
