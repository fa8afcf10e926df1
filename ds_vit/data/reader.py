"""Reads micro-batches: the fields of each sample, a replacement for a damaged one. Runs in the loader's processes."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.utils.data import Dataset, get_worker_info

from ds_vit import randomness
from ds_vit.data.augment.steps import shielded
from ds_vit.data.decode import ImageDecodeError
from ds_vit.data.field import Field, MicroBatch, Rows, Sample
from ds_vit.data.rows import EvalRows, TrainRows
from ds_vit.data.slots import Slots, aligned
from ds_vit.data.sources.source import Source
from ds_vit.fault_tolerance.errors import UserError

_REPLACEMENTS_TRIED = 16


class Reader(Dataset):
    """A map from a micro-batch's number to it, or to an error for people: torch would wrap one that is raised.

    Args:
        source: of the samples.
        fields: all that any rank reads of a sample (`origins`): with "skip" they decide together whether it is damaged.
        rows: the samples of a micro-batch.
        needed: names of the fields that this rank keeps; None for all. The others are read only with "skip", so that
            each rank replaces the same samples.
        on_bad_image: "error", or "replace" or "skip": in training a keyed replacement, in evaluation a row that is not
            valid. With "skip", files that a device decodes are checked first.

    Attributes:
        slots: shared memory where workers put tensors.
        reading: shared by the workers: the sample that each one is reading.
    """

    slots: Slots | None = None
    reading: torch.Tensor | None = None

    def __init__(
        self,
        source: Source,
        fields: Sequence[Field],
        rows: TrainRows | EvalRows,
        needed: Collection[str] | None = None,
        on_bad_image: str = "error",
    ) -> None:
        self.source, self.rows, self._on_bad_image = source, rows, on_bad_image
        self._skips = on_bad_image == "skip"
        self.needed = frozenset(field.name for field in fields if needed is None or field.name in needed)
        kept = [field for field in fields if self._skips or field.name in self.needed]
        self._fields = {side: [field.resized(side) if side else field for field in kept] for side in rows.sides}

    @property
    def most_bytes(self) -> int:
        """Of the tensors of the largest micro-batch, as far as their size is known."""

        def room(fields: Sequence[Field]) -> int:
            blanks = [field.blank() for field in fields if field.name in self.needed]
            return sum(aligned(self.rows.most * blank.untyped_storage().nbytes()) for blank in blanks)

        return max(map(room, self._fields.values()))

    def __getitem__(self, number: int) -> MicroBatch | Exception:
        worker = get_worker_info()
        if worker is not None and self.slots is not None:
            self.slots.begin(worker.id)
        try:
            with shielded():
                return self.read(self.rows.at(number))
        except (UserError, OSError) as error:
            return error

    def read(self, rows: Rows) -> MicroBatch:
        """Read the samples of some rows."""
        fields, worker = self._fields[rows.side], get_worker_info()
        valid, skipped = rows.valid.tolist(), []  # a tensor's single values cost microseconds
        values: list[Sequence[Any]] = []
        for row, (index, key) in enumerate(zip(rows.indices.tolist(), rows.keys.tolist(), strict=True)):
            found: Sequence[Any] | None = None
            if valid[row]:
                if self.reading is not None and worker is not None:
                    self.reading[worker.id] = index
                found, reason = self._sample(fields, index, key, replace=rows.training)
                if reason and row < rows.num_rows:
                    skipped.append((index, reason))
            valid[row] = found is not None
            values.append([field.blank() for field in fields] if found is None else found)
        rows = rows._replace(valid=torch.tensor(valid))
        packed = {
            field.name: field.collate(of_field, rows)
            for field, of_field in zip(fields, zip(*values, strict=True), strict=True)
            if field.name in self.needed
        }
        return MicroBatch(rows, packed, skipped)

    def _sample(
        self, fields: Sequence[Field], index: int, key: int, *, replace: bool
    ) -> tuple[Sequence[Any] | None, str]:
        """The values of a sample, or of the first of its keyed replacements that is not damaged; why it is replaced."""
        candidate, reason = index, ""
        for tried in itertools.count(1):
            sample = Sample(self.source, candidate, key, damage_counts=self._skips)
            try:
                return [field.checked(field.read(sample), sample) for field in fields], reason
            except ImageDecodeError as error:
                if self._on_bad_image == "error":
                    raise
                reason = reason or error.reason
                if not replace:
                    break
                if tried > _REPLACEMENTS_TRIED:
                    found = f"{sample.name}: {error.reason}; {_REPLACEMENTS_TRIED} other samples, tried in its place,"
                    raise ImageDecodeError(f"{found} are damaged too; repair the data") from error
            place = randomness.mix(key, randomness.name_key("replace bad image"), tried) & (2**63 - 1)
            candidate = place % len(self.source)
        return None, reason
