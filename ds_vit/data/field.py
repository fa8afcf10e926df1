"""A sample is a dict; a field makes one tensor of a batch of it, and owns its way from the source to the device.

    source ──read──> a value per sample ──collate──> what a loader's process sends ──to_device──> [B, *shape]

A task lists its fields. The reader (reader.py) calls `read` and `collate` in the loader's processes, and the input
pipeline calls `to_device`. Order, replacement of damaged samples, shared memory, pipeline stages and tensor-parallel
ranks are theirs. A field draws nothing from a process's generator: a draw is a hash of (sample key, name), so that two
fields that draw by the same name get the same draw, on any rank, without a message.

Shapes: B own rows of a micro-batch, R >= B rows read (the own rows, then partners that other micro-batches own).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal, NamedTuple, TypeVar

import torch

from ds_vit.data.augment.mixing import PairMix
from ds_vit.data.decode import ImageDecodeError
from ds_vit.data.slots import empty
from ds_vit.data.sources.source import Source
from ds_vit.fault_tolerance.errors import UserError

T = TypeVar("T")
Made = Callable[[torch.Tensor], torch.Tensor]
Shape = tuple[int, ...]
Stage = Literal["first", "last"]


class Sample:
    """One sample while it is read: a mapping from the names of the source's entries to their values.

    Args:
        source: of the sample.
        index: its number there. Where a damaged sample is replaced, that of the replacement.
        key: of its row, from which everything random is drawn.
        damage_counts: whether all of a file is checked now, because damage skips the sample (--on-bad-image skip).
    """

    def __init__(self, source: Source, index: int, key: int, *, damage_counts: bool = False) -> None:
        self.source, self.index, self.key, self.damage_counts = source, index, key, damage_counts
        self._made: dict[Hashable, Any] = {}

    def __getitem__(self, entry: str) -> Any:
        """An entry as the source has it, read once: "image", "target", "captions" or one of the source's own."""
        return self.once(entry, partial(self.source.entry, entry, self.index))

    @property
    def name(self) -> str:
        """Where the sample comes from, for messages and for tables by file name."""
        return self.source.describe(self.index)

    def once(self, owner: Hashable, make: Callable[[], T]) -> T:
        """The result of `make`, made once per sample however many fields ask for it."""
        if owner not in self._made:
            self._made[owner] = make()
        return self._made[owner]

    def damaged(self, reason: str) -> ImageDecodeError:
        """The error to raise for an entry that cannot be used: another sample then takes the place of this one."""
        error = ImageDecodeError(f"{self.name}: {reason}; repair it, or pass --on-bad-image skip")
        error.reason = reason
        return error


class Rows(NamedTuple):
    """The samples of a micro-batch, a pure function of its number (rows.py).

    Attributes:
        keys: int64 [R], on the CPU.
        indices: numbers in the source, int64 [R].
        num_rows: B.
        valid: bool [R]; False where an evaluation row is padding or damaged.
        training: whether a damaged sample is replaced; in evaluation its row is not valid.
        mix: how pairs of rows are mixed, or None.
        side: of the images of this step with --train-img-sizes or --img-size-schedule, else 0.
    """

    keys: torch.Tensor
    indices: torch.Tensor
    num_rows: int
    valid: torch.Tensor
    training: bool
    mix: PairMix | None = None
    side: int = 0


class MicroBatch(NamedTuple):
    """What a loader's process sends.

    Attributes:
        rows: of the micro-batch.
        packed: the results of `Field.collate`, by the names of the fields that were read.
        skipped: (number in the source, reason) of each own row that was damaged. Every rank that reads a row counts it.
    """

    rows: Rows
    packed: Mapping[str, Any]
    skipped: Sequence[tuple[int, str]] = ()


class Field:
    """One tensor of a batch; this class is the whole way of an array of fixed shape.

    Args:
        name: its key in a batch.
        shape: of one sample on the device.
        dtype: on the device; None for the type that the model takes its input in.
        stage: the pipeline stage that needs it: the first (the model's input) or the last (the loss's).
        entry: the entry of the source that it reads. "" for a function of the keys, which each tensor-parallel rank
            makes for itself; a field with an entry is read by one rank, which sends it to the others.

    Attributes:
        of: the field from whose tensor this one is made on the device, or None.
        is_heavy: whether reading takes a core's time, which decides on the number of loader processes.
        mixes: whether mixup and CutMix are supported, which takes an entry.
    """

    of: Field | None = None
    is_heavy: bool = False
    mixes: bool = False

    def __init__(
        self, name: str, shape: Shape = (), dtype: torch.dtype | None = None, *, stage: Stage = "first", entry: str = ""
    ) -> None:
        self.name, self.shape, self.dtype, self.stage, self.entry = name, tuple(shape), dtype, stage, entry

    def read(self, sample: Sample) -> Any:
        """The value of one sample, in a loader's process: by default its entry; None without one.

        Raises:
            ImageDecodeError: from `sample.damaged`.
        """
        return sample[self.entry] if self.entry else None

    def checked(self, value: Any, sample: Sample) -> Any:
        """A value that was read, if a batch can have it; the reader calls this where the sample is known.

        Raises:
            UserError: it cannot.
        """
        return value

    def blank(self) -> torch.Tensor:
        """The value of a row that is not valid. The loader's shared memory has room for rows of its storage."""
        return torch.zeros(self.shape, dtype=self.dtype or torch.float32)

    def collate(self, values: Sequence[Any], rows: Rows) -> Any:
        """The values of R rows as they are sent: tensors, also in a NamedTuple, a dict or a list.

        What depends on the keys only can be drawn here, for all rows at once. By default they are stacked in the type
        of `blank`.

        Raises:
            UserError: the field reads nothing.
        """
        if any(value is None for value in values):
            raise UserError(f"the field {self.name} reads no values: give it an entry, or override read or collate")
        return stacked(values, self.dtype or torch.float32)

    def to_device(self, packed: Any, rows: Rows, device: torch.device) -> torch.Tensor:
        """The tensor of the own rows [B, *shape], in any type: the caller casts it to `dtype`.

        A field without an entry may keep it on the host.
        """
        return packed[: rows.num_rows].to(device, non_blocking=True)

    def resized(self, side: int) -> Field:
        """The field where images are squares of another side; itself where it does not depend on that."""
        return self

    def identity(self) -> str:
        """A hash of what else decides on the values, such as a table (`fingerprint_of`); another one on resume is
        refused. "" for a field that follows from the flags and the source."""
        return ""

    def device_bytes(self) -> int:
        """Bytes of the device's memory that `to_device` takes for a sample, in addition to the result."""
        return 0

    def example(self, num_rows: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Values like real ones [num_rows, *shape], for benchmarks.

        Args:
            num_rows: of the micro-batch.
            dtype: of the model's input.
            device: of the result.
        """
        dtype = self.dtype or dtype
        if not dtype.is_floating_point:
            return torch.zeros(num_rows, *self.shape, dtype=dtype, device=device)
        return torch.randn(num_rows, *self.shape, device=device).to(dtype)


class RaggedField(Field):
    """Any number of items per sample, padded on the device: [B, most, *item]. Only the items themselves are sent.

    `read` returns [n, *item] with n at most `most`; `shape` is (most, *item).
    """

    padding: float = 0.0
    """The value of the places without an item."""

    def checked(self, value: Any, sample: Sample) -> torch.Tensor:
        """As `Field.checked`: items [n, *item], at most the declared number of them."""
        items, (most, *item) = torch.as_tensor(value, dtype=self.dtype or torch.float32), self.shape
        if items.numel() == 0:
            return self.blank()
        if not items.dim() or list(items.shape[1:]) != item:
            raise UserError(f"{self.name}: {sample.name} has items {list(items.shape)}, which must be [n, *{item}]")
        if len(items) > most:
            found = f"{sample.name} has {len(items)}"
            raise UserError(f"{self.name} has room for {most} items of a sample, and {found}; raise its maximum")
        return items

    def blank(self) -> torch.Tensor:
        """No item, with room for all."""
        return super().blank()[:0]

    def collate(self, values: Sequence[torch.Tensor], rows: Rows) -> dict[str, torch.Tensor]:
        """The items of all rows one after the other, and the number of each row's."""
        counts = torch.tensor([len(of_row) for of_row in values])
        items = empty((int(counts.sum()), *self.shape[1:]), values[0].dtype)
        return {"items": torch.cat([*values], out=items), "counts": counts}

    def to_device(self, packed: Mapping[str, torch.Tensor], rows: Rows, device: torch.device) -> torch.Tensor:
        """As `Field.to_device`."""
        counts, most = packed["counts"][: rows.num_rows], self.shape[0]
        row = torch.repeat_interleave(torch.arange(len(counts)), counts)  # on the CPU: the device is not waited for
        place = row * most + torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]
        items = packed["items"][: len(row)].to(device, non_blocking=True)
        padded = items.new_full((len(counts) * most, *self.shape[1:]), self.padding)
        padded[place.to(device, non_blocking=True)] = items
        return padded.view(len(counts), *self.shape)


class Derived(Field):
    """A tensor that is made on the device of another field's, which is read and finished once for both.

    Args:
        name: as for `Field`.
        of: the other field, which is read.
        function: of its tensor; None for the tensor itself. Its result for zeros has the shape.
        dtype: as for `Field`.
        stage: as for `Field`.

    Raises:
        UserError: the other field is derived itself.
    """

    of: Field

    def __init__(
        self,
        name: str,
        of: Field,
        function: Made | None = None,
        *,
        dtype: torch.dtype | None = None,
        stage: Stage = "first",
    ) -> None:
        if of.of is not None:
            raise UserError(f"the field {name} is derived from {of.name}, which is itself: derive it from {of.of.name}")
        super().__init__(name, of.shape, dtype, stage=stage, entry=of.entry)
        self.of, self.function, self.is_heavy = of, function, of.is_heavy
        if function is not None:
            zeros = torch.zeros(1, *of.shape, dtype=of.dtype or torch.float32)
            self.shape = tuple(function(zeros).shape[1:])

    def made_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor, computed from the other field's, which is float32 unless that field declares a type."""
        return tensor if self.function is None else self.function(tensor)

    def resized(self, side: int) -> Derived:
        """As `Field.resized`."""
        return type(self)(self.name, self.of.resized(side), self.function, dtype=self.dtype, stage=self.stage)


def origins(fields: Iterable[Field]) -> list[Field]:
    """The fields that are read for some fields, each once."""
    return [*{field.name: field for field in (field.of or field for field in fields)}.values()]


def finished(
    fields: Sequence[Field], batch: MicroBatch, *, device: torch.device | str, dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """The tensors of a micro-batch's own rows on the device, by the names of the fields.

    Args:
        fields: those of the batch that are wanted.
        batch: with what was read for them.
        device: of the tensors.
        dtype: of the model's input.

    Raises:
        UserError: as `on_device`.
    """
    return derived(fields, on_device(types_of_origins(fields, dtype), batch, torch.device(device)), dtype)


def types_of_origins(fields: Sequence[Field], dtype: torch.dtype) -> dict[Field, torch.dtype]:
    """The type of each of `origins` on the device: float32 where others are made of it before the model's input."""
    kept = {field.of.name for field in fields if field.of}
    return {origin: origin.dtype or (torch.float32 if origin.name in kept else dtype) for origin in origins(fields)}


def on_device(types: Mapping[Field, torch.dtype], batch: MicroBatch, device: torch.device) -> dict[str, torch.Tensor]:
    """The tensors of a micro-batch's own rows that were read, by the names of their fields.

    Raises:
        UserError: a tensor is not what its field declares, by which other ranks receive it.
    """
    made = {}
    for field, dtype in types.items():
        tensor = field.to_device(batch.packed[field.name], batch.rows, device)
        made[field.name] = _as_declared(field, tensor, batch.rows.num_rows, device).to(dtype)
    return made


def derived(fields: Sequence[Field], made: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors of some fields, from those of `on_device`.

    Raises:
        UserError: the function of a field made another shape than of zeros.
    """
    tensors = {}
    for field in fields:
        tensor = made[field.of.name if field.of else field.name]
        if isinstance(field, Derived):
            tensor = _as_declared(field, field.made_of(tensor), len(tensor), tensor.device)
        tensors[field.name] = tensor.to(field.dtype or dtype)
    return tensors


def _as_declared(field: Field, tensor: torch.Tensor, num_rows: int, device: torch.device) -> torch.Tensor:
    """The tensor of a field; UserError where it has another shape or, with an entry, another device."""
    if tensor.shape[1:] != field.shape or (field.entry and tensor.device.type != device.type):
        declared = f"{[num_rows, *field.shape]} on {device.type}"
        raise UserError(f"the field {field.name} made {list(tensor.shape)} on {tensor.device.type}, not {declared}")
    return tensor


def stacked(values: Sequence[Any], dtype: torch.dtype | None = None) -> torch.Tensor:
    """Values of one shape as one tensor [R, ...], in memory that a loader's process sends without a copy."""
    tensors = [torch.as_tensor(value, dtype=dtype) for value in values]
    return torch.stack(tensors, out=empty((len(tensors), *tensors[0].shape), tensors[0].dtype))
