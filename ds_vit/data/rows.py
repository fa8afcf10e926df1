"""The samples of a micro-batch, by its number: pure functions of the number and this rank's share."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch

from ds_vit.config.augmentation import MixConfig
from ds_vit.data.augment.mixing import PairDraws, PairMix
from ds_vit.data.field import Rows
from ds_vit.data.image_sizes import ImageSizes
from ds_vit.data.sampler import SampleOrder, Share, evaluation_keys


@dataclass(frozen=True)
class TrainRows:
    """By the number of a micro-step t = step * accumulation + index, steps counted from 0 in the order of samples.

    Attributes:
        order: the samples of a step.
        share: this rank's rows of a step.
        mix: what is drawn for each pair of rows, which takes an even global batch.
        img_size: of the images, on which the share of a CutMix box depends.
        sizes: the side of a step's images, where it is not always that.
        skipped_batches: how far the order is ahead of the optimizer steps, which sizes and the end of mixing follow.
    """

    order: SampleOrder
    share: Share
    mix: MixConfig = field(default_factory=MixConfig)
    img_size: tuple[int, int] = (224, 224)
    sizes: ImageSizes | None = None
    skipped_batches: int = 0

    def __post_init__(self) -> None:
        order, share = self.order, self.share
        assert share.global_batch == order.global_batch, f"{share} does not cut a global batch of {order.global_batch}"

    @cached_property
    def _pairs(self) -> PairDraws:
        return PairDraws(self.mix)

    @property
    def most(self) -> int:
        """Rows of the largest micro-batch: two partners that other micro-batches own."""
        return self.share.micro_batch + 2

    @property
    def sides(self) -> tuple[int, ...]:
        """All values of `Rows.side`."""
        return self.sizes.sizes if self.sizes else (0,)

    def at(self, number: int) -> Rows:
        """The rows of a micro-step."""
        step, micro_index = divmod(number, self.share.accumulation)
        optimizer_step = step - self.skipped_batches
        side = self.sizes.at(optimizer_step) if self.sizes else 0
        own = self.share.rows(micro_index)
        mixes = self.mix.mixes_in(self.order.epoch_of(optimizer_step))
        # Partners that other micro-batches own: at most one before the first row and one after the last.
        partners = [own.start - 1] * (own.start % 2) + [own.stop] * (own.stop % 2)
        rows = [*own, *(partners if mixes else ())]
        indices, keys = self.order.rows(step, rows)
        mix = None
        if self.mix.active:
            mix = self._draw_mix(rows, len(own), keys.tolist(), (side, side) if side else self.img_size, mixes)
        valid = torch.ones(len(rows), dtype=torch.bool)
        return Rows(
            torch.from_numpy(keys), torch.from_numpy(indices), len(own), valid, training=True, mix=mix, side=side
        )

    def _draw_mix(self, rows: list[int], num_rows: int, keys: list[int], size: tuple[int, int], mixes: bool) -> PairMix:
        if not mixes:  # after --mixup-off-epoch
            return PairMix(torch.arange(num_rows), torch.ones(num_rows), torch.zeros((num_rows, 4), dtype=torch.int32))
        place = {row: number for number, row in enumerate(rows)}
        drawn = {row: self._pairs.draw(keys[place[row]], size) for row in rows if row % 2 == 0}
        own = rows[:num_rows]
        return PairMix(
            partner=torch.tensor([place[row ^ 1] for row in own]),
            lam=torch.tensor([drawn[row - row % 2][0] for row in own], dtype=torch.float32),
            box=torch.tensor([drawn[row - row % 2][1] for row in own], dtype=torch.int32),
        )


@dataclass(frozen=True)
class EvalRows:
    """By the number of a rank's batch of an evaluation; the rows that pad the end are not valid.

    Over all ranks and batches each sample is valid once. Every rank has the same number of batches, because evaluation
    holds collectives.

    Attributes:
        num_samples: of the split.
        share: this rank's rows of the batches that all ranks evaluate at a time.
    """

    num_samples: int
    share: Share
    sides = (0,)

    def __len__(self) -> int:
        return -(-self.num_samples // self.share.global_batch)

    @property
    def most(self) -> int:
        """Rows of a batch."""
        return self.share.micro_batch

    def at(self, number: int) -> Rows:
        """The rows of a batch."""
        places = number * self.share.global_batch + np.asarray(self.share.rows(0), dtype=np.int64)
        valid = places < self.num_samples
        indices = np.where(valid, places, 0)
        keys = evaluation_keys(indices)
        return Rows(
            torch.from_numpy(keys), torch.from_numpy(indices), self.most, torch.from_numpy(valid), training=False
        )
