"""What a rank reads for each micro-step: rows of images and targets, a pure function of the step's number.

Shapes: B own rows of a micro-batch, R >= B rows read (partners of rows whose pair is cut in two stand behind the own
rows), C classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset, get_worker_info

from ds_vit import randomness
from ds_vit.config.augmentation import AugmentConfig, MixConfig
from ds_vit.config.image_sizes import ImageSizes
from ds_vit.data.augment.draws import shielded
from ds_vit.data.augment.erasing import ErasingBoxes
from ds_vit.data.augment.handover import Crops, Cut, CuttingTransform, packed
from ds_vit.data.augment.mixing import PairDraws, PairMix
from ds_vit.data.augment.transforms import FixedTransform, TrainTransform
from ds_vit.data.decode import ImageDecodeError, open_image
from ds_vit.data.sampler import SampleOrder, Share, evaluation_keys, evaluation_rows
from ds_vit.data.settings import ImageConfig
from ds_vit.data.slots import Slots
from ds_vit.data.sources.source import Source
from ds_vit.fault_tolerance.errors import UserError

_REPLACEMENTS_TRIED = 16


class MicroBatch(NamedTuple):
    """The rows of one micro-batch, on the CPU; device.py makes the model's inputs of it.

    Attributes:
        keys: sample keys, int64 [R].
        indices: the samples' numbers in the source, int64 [R].
        images: augmented pixels, uint8 [R, 3, H, W]; with --augment-on device what they are made of there; or None when
            not loaded.
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
    images: torch.Tensor | Crops | None
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


class Reader:
    """Reads rows of a source: decoded and transformed images, targets, and which images could not be decoded."""

    def __init__(
        self,
        source: Source,
        transform: TrainTransform | FixedTransform | CuttingTransform,
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
        self.slots: Slots | None = None  # shared: where workers put images
        self.reading: torch.Tensor | None = None  # shared: which sample each worker is at
        self._how = how  # one of decode.DECODERS

    def resize(self, img_size: tuple[int, int], transform: TrainTransform | FixedTransform | CuttingTransform) -> None:
        """Read at another size from now on, with a transform of that size."""
        self.img_size, self._transform = img_size, transform

    @property
    def fills_rows(self) -> bool:
        """Whether images are read, all of one size."""
        return self.load_images and not isinstance(self._transform, CuttingTransform)

    def read(
        self, indices: Sequence[int], keys: Sequence[int], valid: Sequence[bool] | np.ndarray, replace: bool
    ) -> tuple[torch.Tensor | Crops | None, torch.Tensor | None, dict[int, str]]:
        """Read the valid rows.

        Args:
            indices, keys, valid: [R] each.
            replace: take another sample for an image that cannot be decoded (when such ones are skipped at all).

        Returns:
            images uint8 [R, 3, H, W], Crops or None, targets or None, and, of rows whose own image was bad, the reason.
        """
        # Of training alone, where every row is valid.
        cuts: list[Cut] | None = [] if isinstance(self._transform, CuttingTransform) else None
        black = self.load_images and cuts is None
        images = self._black((len(indices), 3, *self.img_size)) if black else None
        targets = self._no_targets(len(indices)) if self._load_targets else None
        bad: dict[int, str] = {}
        for row, (index, key, is_valid) in enumerate(zip(indices, keys, valid, strict=True)):
            if not is_valid:
                continue
            if self.reading is not None:
                self.reading[get_worker_info().id] = index
            # Which sample stands in for a bad image decides the target too, so that skipping has to decode always.
            read_index: int | None = index
            if self.load_images or self._skip:
                pixels, read_index, reason = self._image(index, key, replace)
                if read_index != index:
                    bad[row] = reason
                if cuts is not None and isinstance(pixels, Cut):
                    cuts.append(pixels)
                elif images is not None and isinstance(pixels, torch.Tensor):
                    images[row] = pixels
            if targets is not None and read_index is not None:
                target = self.source.target(read_index)
                targets[row] = torch.from_numpy(target) if isinstance(target, np.ndarray) else target
        if self.load_images and cuts is not None:
            return packed(cuts, self.img_size, _black((sum(cut.num_bytes for cut in cuts),))), targets, bad
        return images, targets, bad

    def _black(self, shape: tuple[int, ...]) -> torch.Tensor:
        worker = get_worker_info()
        return _black(shape) if worker is None or self.slots is None else self.slots.zeros(worker.id, shape)

    def _no_targets(self, num_rows: int) -> torch.Tensor:
        if self.source.multi_label:
            return torch.zeros((num_rows, self.source.num_classes), dtype=torch.float32)
        return torch.zeros(num_rows, dtype=torch.int64)

    def _image(self, index: int, key: int, replace: bool) -> tuple[torch.Tensor | Cut | None, int | None, str]:
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

    def _pixels(self, index: int, key: int) -> torch.Tensor | Cut | None:
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


class Failure:
    """An error for people on its way out of a worker, as a value: raised there, torch would wrap it in a traceback."""

    def __init__(self, error: Exception) -> None:
        self.error = error


class Batches(Dataset):
    """A map from a batch's number to the batch, or to the failure to read it."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    def __getitem__(self, number: int) -> MicroBatch | Failure:
        try:
            with shielded():
                return self.load(number)
        except (UserError, OSError) as error:
            return Failure(error)

    def load(self, number: int) -> MicroBatch:
        raise NotImplementedError

    def slots(self, num_workers: int) -> Slots | None:
        """Places for the images of this many workers; None where they differ in size, or there are none."""
        if not self.reader.fills_rows:
            return None
        return Slots(num_workers, self.most_rows * 3 * self.most_pixels)

    @property
    def most_rows(self) -> int:
        """Of a batch."""
        raise NotImplementedError

    @property
    def most_pixels(self) -> int:
        """Of an image."""
        return math.prod(self.reader.img_size)


class TrainBatches(Batches):
    """By the number of a micro-step t = step * accumulation + index; of a size that may follow from the step's."""

    def __init__(
        self,
        reader: Reader,
        order: SampleOrder,
        share: Share,
        augment: AugmentConfig,
        mix: MixConfig,
        sizes: ImageSizes | None = None,
        transforms: Mapping[int, TrainTransform | FixedTransform | CuttingTransform] = MappingProxyType({}),
    ) -> None:
        super().__init__(reader)
        self._sizes = sizes
        self._transforms = dict(transforms)  # by the side of the images
        self._order = order
        self._share = share
        self._mix = mix
        self._pairs = PairDraws(mix)
        erases = augment.reprob > 0.0 and not augment.no_aug and reader.load_images
        self._boxes = ErasingBoxes(augment) if erases else None

    @property
    def most_rows(self) -> int:
        return self._share.micro_batch + 2  # partners that other micro-batches own

    @property
    def most_pixels(self) -> int:
        return max((side**2 for side in self._transforms), default=super().most_pixels)

    def load(self, number: int) -> MicroBatch:
        step, micro_index = divmod(number, self._share.accumulation)
        if self._sizes is not None:
            size = self._sizes.at(step)
            self.reader.resize((size, size), self._transforms[size])
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


class EvalBatches(Batches):
    """By the number of a rank's batch of an evaluation."""

    def __init__(self, reader: Reader, batch: int, dp_rank: int, dp_size: int) -> None:
        super().__init__(reader)
        self._batch = batch
        self._dp_rank = dp_rank
        self._dp_size = dp_size

    @property
    def most_rows(self) -> int:
        return self._batch

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
