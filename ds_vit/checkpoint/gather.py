"""From segments that are spread over ranks to files of whole tensors, each written by one rank.

Which rank writes which file, and who sends which segment to whom, follows from what each rank holds; it is worked out
once, by every rank for itself, and then carried out in rounds. In a round every writer receives one parameter (or a
bucket of small ones), puts it together and appends it to its file, so that it holds no more than that beside its own
share. All ranks write at the same time.

The traffic goes through a gloo group of its own, from host memory, and may run in a thread beside training.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from ds_vit.checkpoint.tensors import FileEntry, TensorSpec, TensorWriter, split_files
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.parallel.segment import Segment
from ds_vit.parallel.tensor import assemble_flat

BUCKET_BYTES = 32 * 2**20
"""Small parameters travel together up to this size, or up to that of the largest one where it is smaller."""


@dataclass(frozen=True)
class _Transfer:
    """A segment on its way: from one rank's flat tensor into a buffer of the writer."""

    kind: str
    segment: Segment
    source: int
    writer: int
    tag: int


@dataclass(frozen=True)
class _Arrival:
    """A whole tensor that this rank writes, and where its segments come from."""

    file: str
    kind: str
    spec: TensorSpec
    last: bool  # of its file
    transfers: tuple[_Transfer, ...]


class Gather:
    """The plan of who sends what to whom, and its execution.

    Args:
        held: for every rank the segments that it shall give; each element of each tensor is given once.
        specs: kind → the whole tensors of that kind, in the order of the files. A kind is a file's name without
            its ending: "model", "optimizer-exp_avg", "ema".
        max_bytes: kind → largest size of a file.
        rank: this rank.

    Raises:
        UserError: the segments of a tensor do not make the whole of it.
    """

    def __init__(
        self,
        held: Sequence[Sequence[Segment]],
        specs: Mapping[str, Sequence[TensorSpec]],
        max_bytes: Mapping[str, int],
        rank: int,
    ) -> None:
        self.rank = rank
        self.files = {kind: split_files(kind, tensors, max_bytes[kind]) for kind, tensors in specs.items()}
        by_name: dict[str, list[tuple[int, Segment]]] = defaultdict(list)
        for source, segments in enumerate(held):
            for segment in segments:
                by_name[segment.name].append((source, segment))
        for tensors in specs.values():
            for spec in tensors:
                _check_whole(spec, by_name.get(spec.name, []))
        self._sends: dict[int, list[_Transfer]] = defaultdict(list)
        self._arrivals: dict[int, list[_Arrival]] = defaultdict(list)
        tag = 0
        largest = max((spec.num_bytes for tensors in specs.values() for spec in tensors), default=0)
        for writer, queue in self._queues(len(held)).items():
            for number, bucket in enumerate(_buckets(queue, min(BUCKET_BYTES, largest))):
                for file, kind, spec, last in bucket:
                    sources = by_name[spec.name]
                    transfers = tuple(_Transfer(kind, p, s, writer, tag + i) for i, (s, p) in enumerate(sources))
                    tag += len(sources)
                    self._sends[number] += [t for t in transfers if t.source == rank != writer]
                    if writer == rank:
                        self._arrivals[number].append(_Arrival(file, kind, spec, last, transfers))
        self.num_rounds = 1 + max([-1, *self._sends, *self._arrivals])

    def _queues(self, world_size: int) -> dict[int, list[tuple[str, str, TensorSpec, bool]]]:
        """Writer → (file, kind, tensor, last of its file) in order.

        The files of a kind are spread over the ranks in order, so that a file is written near those who hold it; the
        kinds begin one rank apart, so that a model of one file is written by several ranks.
        """
        queues: dict[int, list[tuple[str, str, TensorSpec, bool]]] = defaultdict(list)
        for shift, (kind, files) in enumerate(self.files.items()):
            for number, (file, tensors) in enumerate(files.items()):
                writer = (number * world_size // len(files) + shift) % world_size
                queues[writer] += [(file, kind, spec, spec is tensors[-1]) for spec in tensors]
        return queues

    def run(
        self,
        host: Mapping[str, Sequence[torch.Tensor]],
        folder: Path,
        group: dist.ProcessGroup | None,
        metadata: Mapping[str, Mapping[str, str]] | None = None,
    ) -> tuple[list[FileEntry], str]:
        """Send this rank's segments, and write this rank's files (a collective of all ranks).

        A rank that cannot write goes on receiving and throws away, so that the others are not held up.

        Args:
            host: kind → this rank's flat tensors, fp32 on the CPU, by `Segment.block`.
            folder: where the files go; it exists.
            group: a gloo group of all ranks that nothing else uses meanwhile.
            metadata: kind → further words of the header of its files.

        Returns:
            The files that this rank has written, and what went wrong ("" where nothing did).
        """
        files = _Files(folder, self.files, metadata or {})
        for number in range(self.num_rounds):
            # Nothing of a round is held on to, or there would be two parameters beside the share.
            files.write(self._round(number, host, group))
        return files.end()

    def collect(
        self, host: Mapping[str, Sequence[torch.Tensor]], group: dist.ProcessGroup | None
    ) -> dict[str, dict[str, torch.Tensor]]:
        """As `run`, but what this rank would write is given back in its place: kind → name → whole tensor, fp32."""
        whole: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
        for number in range(self.num_rounds):
            for arrival, slices in self._round(number, host, group):
                whole[arrival.kind][arrival.spec.name] = _whole(arrival, slices)
        return dict(whole)

    def _round(
        self, number: int, host: Mapping[str, Sequence[torch.Tensor]], group: dist.ProcessGroup | None
    ) -> list[tuple[_Arrival, list[torch.Tensor]]]:
        """Send and receive what is due in a round; gives each tensor of it with the flat slices that make it."""
        works = [
            dist.isend(t.segment.of(host[t.kind][t.segment.block]), t.writer, group=group, tag=t.tag)
            for t in self._sends.get(number, ())
        ]
        arrived = []
        for arrival in self._arrivals.get(number, ()):
            slices = _empty_slices(arrival)
            arrived.append((arrival, slices))
            for t in arrival.transfers:
                place = slices[t.segment.tp_slice.slice_rank].narrow(0, t.segment.start, t.segment.length)
                if t.source == self.rank:
                    place.copy_(t.segment.of(host[t.kind][t.segment.block]))
                else:
                    works.append(dist.irecv(place, t.source, group=group, tag=t.tag))
        for work in works:
            work.wait()
        return arrived


class _Files:
    """The files of this rank, one after the other; after an error nothing more is written.

    Args:
        folder: where they go.
        files: kind → file → its tensors.
        metadata: kind → further words of the header.
    """

    def __init__(
        self,
        folder: Path,
        files: Mapping[str, Mapping[str, Sequence[TensorSpec]]],
        metadata: Mapping[str, Mapping[str, str]],
    ) -> None:
        self._folder = folder
        self._files = files
        self._metadata = metadata
        self._entries: list[FileEntry] = []
        self._error = ""
        self._writer: TensorWriter | None = None

    def write(self, arrived: list[tuple[_Arrival, list[torch.Tensor]]]) -> None:
        """Append the tensors of a round; the list is emptied, so that each is given back once it is written."""
        while arrived:
            arrival, slices = arrived.pop(0)
            if self._error:
                continue
            try:
                if self._writer is None:
                    path, tensors = self._folder / arrival.file, self._files[arrival.kind][arrival.file]
                    self._writer = TensorWriter(path, tensors, self._metadata.get(arrival.kind))
                self._writer.write(arrival.spec.name, _whole(arrival, slices))
                del slices  # the file is read back below
                if arrival.last:
                    self._entries.append(self._writer.close())
                    self._writer = None
            except OSError as problem:
                self._error = f"{arrival.file}: {problem.strerror or problem}"

    def end(self) -> tuple[list[FileEntry], str]:
        """The files that are whole, and what went wrong."""
        if self._writer is not None:
            self._writer.abandon()
        return self._entries, self._error


def _check_whole(spec: TensorSpec, sources: Sequence[tuple[int, Segment]]) -> None:
    """Every element of every tensor slice is given by one rank."""
    segments = sorted((segment for _, segment in sources), key=lambda p: (p.tp_slice.slice_rank, p.start))
    given: dict[int, int] = defaultdict(int)
    for segment in segments:
        fits = segment.tp_slice.full_shape == spec.shape and segment.start == given[segment.tp_slice.slice_rank]
        if not fits:
            raise UserError(
                f"{spec.name} {spec.shape}: elements {given[segment.tp_slice.slice_rank]} on are not where {segment} is"
            )
        given[segment.tp_slice.slice_rank] += segment.length
    slices = segments[0].tp_slice.num_slices if segments else 1
    sizes = {math.prod(segment.tp_slice.local_shape) for segment in segments}
    if spec.numel and (len(given) != slices or set(given.values()) != sizes):
        raise ValueError(f"{spec.name} {spec.shape}: ranks hold {dict(given)} elements of its {slices} slices")


def _buckets(
    queue: Sequence[tuple[str, str, TensorSpec, bool]], max_bytes: int
) -> list[list[tuple[str, str, TensorSpec, bool]]]:
    buckets: list[list[tuple[str, str, TensorSpec, bool]]] = []
    size = 0
    for item in queue:
        if not buckets or size + item[2].num_bytes > max_bytes:
            buckets.append([])
            size = 0
        buckets[-1].append(item)
        size += item[2].num_bytes
    return buckets


def _empty_slices(arrival: _Arrival) -> list[torch.Tensor]:
    """A flat buffer for each tensor slice of a parameter."""
    if not arrival.transfers:
        return [torch.empty(0)]
    segment = arrival.transfers[0].segment
    return [torch.empty(math.prod(segment.tp_slice.local_shape)) for _ in range(segment.tp_slice.num_slices)]


def _whole(arrival: _Arrival, slices: Sequence[torch.Tensor]) -> torch.Tensor:
    if not arrival.transfers:
        return slices[0].view(arrival.spec.shape)
    return assemble_flat(slices, arrival.transfers[0].segment.tp_slice)
