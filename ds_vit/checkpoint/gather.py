"""The share of a checkpoint that each rank holds, gathered into files of whole tensors, each written by one rank.

Which rank writes which file, and which rank sends which segment to whom, follows from the segments that each rank
holds. Every rank computes it once, and then all carry it out in rounds. In a round every writer receives one parameter,
assembles it and appends it to its file, and holds no more than that in addition to its share. All ranks write at the
same time.

The traffic uses a separate gloo group, from host memory, and may run in a thread during training.
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
from ds_vit.parallel.groups import gather_objects
from ds_vit.parallel.tensor.slices import Segment, TensorSlice, assemble_flat
from ds_vit.parallel.zero_map import Shard, ZeroMap

OPTIMIZER = "optimizer-"
"""Prefix of the kinds of the optimizer's states."""


class RankShare:
    """The segments of the model, its optimizer state and its average that this rank holds, and those that it saves.

    A collective where the optimizer keeps different states for different parameters (Muon).

    Args:
        zero_map: the map of this rank.
        ema: one tensor for each of the map's shards, or None without an average.
        shapes: timm name → whole shape, of all parameters in the model's order.
    """

    def __init__(
        self, zero_map: ZeroMap, ema: Sequence[torch.Tensor] | None, shapes: Mapping[str, Sequence[int]]
    ) -> None:
        self.zero_map = zero_map
        self.ema = ema
        self.shapes = {name: tuple(shape) for name, shape in shapes.items()}
        self.trained = [*zero_map.shards]
        self.blocks: list[Shard] = [*self.trained, *zero_map.frozen]
        self.saved = tuple(s for shard in self.blocks for s in shard.segments if zero_map.saves(shard, s))
        """The segments that this rank saves."""
        self._saved_blocks = {segment.block for segment in self.saved}
        declared = {shard: zero_map.declared_keys(shard) for shard in self.trained}
        self._declared = {name: keys for shard, keys in declared.items() if keys is not None for name in shard.names}
        """timm name → its optimizer states; empty if all parameters have the same."""
        if self._declared:
            self._declared = {name: keys for own in gather_objects(self._declared) for name, keys in own.items()}

    def kinds(self) -> tuple[str, ...]:
        """The kinds that have tensors now, the same on every rank."""
        keys = self.zero_map.state_keys()
        if keys and self._declared:  # a pipeline stage may lack states that only some parameters have
            keys = tuple(sorted({key for declared in self._declared.values() for key in declared}))
        states = tuple(OPTIMIZER + key for key in keys)
        return ("model", *states, *(("ema",) if self.ema is not None else ()))

    def specs(self, kind: str) -> list[TensorSpec]:
        """The whole tensors of a kind: weights of all parameters, optimizer state of the trained ones."""
        names = frozenset(self.shapes)
        if kind.startswith(OPTIMIZER):
            names = frozenset(name for name in self.zero_map.names if self._has_state(name, kind))
        return [TensorSpec(name, shape) for name, shape in self.shapes.items() if name in names]

    def _has_state(self, name: str, kind: str) -> bool:
        """Whether there is a state of this kind for a trained parameter."""
        return not self._declared or kind.removeprefix(OPTIMIZER) in self._declared[name]

    def tensors(self, kind: str) -> list[torch.Tensor | None]:
        """This rank's flat tensors of a kind, a block each, in place; None where this rank saves nothing."""
        out: list[torch.Tensor | None] = []
        for block, shard in enumerate(self.blocks):
            is_trained = block < len(self.trained)
            if block not in self._saved_blocks:
                out.append(None)
            elif kind.startswith(OPTIMIZER):
                has_state = is_trained and self._has_state(shard.names[0], kind)
                out.append(self.zero_map.state(shard, kind.removeprefix(OPTIMIZER)) if has_state else None)
            else:
                # A parameter that is not trained is its own average.
                out.append(self.ema[block] if kind == "ema" and self.ema and is_trained else shard.saved)
        return out


@dataclass(frozen=True)
class _Transfer:
    """A segment sent from one rank's flat tensor into a buffer of the writer."""

    kind: str
    segment: Segment
    source: int
    writer: int
    tag: int


@dataclass(frozen=True)
class _Arrival:
    """A whole tensor that this rank writes, how it is sliced, and the transfers that bring its segments."""

    file: str
    kind: str
    spec: TensorSpec
    tp_slice: TensorSlice
    transfers: tuple[_Transfer, ...]


class Gather:
    """The schedule of transfers between ranks, and its execution.

    Args:
        held: for every rank the segments that it sends; each element of each tensor is in one of them.
        specs: kind → the whole tensors of that kind, in the order of the files. A kind is a file's name without
            its ending: "model", "optimizer-exp_avg", "ema".
        max_bytes: kind → largest size of a file.
        rank: this rank.

    Raises:
        ValueError: the segments of a tensor leave a gap or overlap (a bug).
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
        queues = self._queues(len(held))
        self._rounds: list[tuple[list[_Transfer], _Arrival | None]] = []
        tag = 0
        for number in range(max(map(len, queues.values()), default=0)):
            sends: list[_Transfer] = []
            own: _Arrival | None = None
            for writer, (file, kind, spec) in ((w, q[number]) for w, q in queues.items() if number < len(q)):
                sources = by_name[spec.name]
                transfers = tuple(_Transfer(kind, s, source, writer, tag + i) for i, (source, s) in enumerate(sources))
                tag += len(sources)
                sends += [t for t in transfers if t.source == rank != writer]
                if writer == rank:
                    # Nobody holds a segment of a tensor without elements.
                    tp_slice = sources[0][1].tp_slice if sources else TensorSlice(spec.shape, None, (), 0, 1)
                    own = _Arrival(file, kind, spec, tp_slice, transfers)
            self._rounds.append((sends, own))

    def _queues(self, world_size: int) -> dict[int, list[tuple[str, str, TensorSpec]]]:
        """Writer → (file, kind, tensor) in order.

        The files of a kind are spread over the ranks in order, so that a file is written near those who hold it; the
        kinds begin one rank apart, so that a model of one file is written by several ranks.
        """
        queues: dict[int, list[tuple[str, str, TensorSpec]]] = defaultdict(list)
        for shift, (kind, files) in enumerate(self.files.items()):
            for number, (file, tensors) in enumerate(files.items()):
                writer = (number * world_size // len(files) + shift) % world_size
                queues[writer] += [(file, kind, spec) for spec in tensors]
        return queues

    def run(
        self,
        host: Mapping[str, Sequence[torch.Tensor]],
        folder: Path,
        group: dist.ProcessGroup | None,
        metadata: Mapping[str, Mapping[str, str]] | None = None,
    ) -> tuple[list[FileEntry], str]:
        """Send this rank's segments, and write this rank's files (a collective of all ranks).

        A rank that cannot write keeps receiving and discards, so that the others are not held up.

        Args:
            host: kind → this rank's flat tensors, fp32 on the CPU, by `Segment.block`.
            folder: where the files go; it exists.
            group: a gloo group of all ranks that nothing else uses at the same time.
            metadata: kind → further entries of the header of its files.

        Returns:
            The files that this rank has written, and the error ("" for none).
        """
        entries: list[FileEntry] = []
        writer: TensorWriter | None = None
        error = ""
        for sends, arrival in self._rounds:
            tensor = self._exchange(sends, arrival, host, group)
            if arrival is None or error:
                continue
            tensors = self.files[arrival.kind][arrival.file]
            try:
                if writer is None:
                    writer = TensorWriter(folder / arrival.file, tensors, (metadata or {}).get(arrival.kind))
                writer.write(arrival.spec.name, tensor)
                tensor = torch.empty(0)  # released before the file is read back and before the next one arrives
                if arrival.spec is tensors[-1]:
                    entries.append(writer.close())
                    writer = None
            except OSError as problem:
                error = f"{arrival.file}: {problem.strerror or problem}"
        if writer is not None:
            writer.abandon()
        return entries, error

    def _exchange(
        self,
        sends: Sequence[_Transfer],
        arrival: _Arrival | None,
        host: Mapping[str, Sequence[torch.Tensor]],
        group: dist.ProcessGroup | None,
    ) -> torch.Tensor:
        """Send and receive one round; returns the whole tensor that this rank writes, empty for none."""
        works = [
            dist.isend(t.segment.of(host[t.kind][t.segment.block]), t.writer, group=group, tag=t.tag) for t in sends
        ]
        slices: list[torch.Tensor] = []
        if arrival is not None:
            size, number = math.prod(arrival.tp_slice.local_shape), arrival.tp_slice.num_slices
            slices = [torch.empty(size) for _ in range(number)]
            for t in arrival.transfers:
                place = slices[t.segment.tp_slice.slice_rank].narrow(0, t.segment.start, t.segment.length)
                if t.source == self.rank:
                    place.copy_(t.segment.of(host[t.kind][t.segment.block]))
                else:
                    works.append(dist.irecv(place, t.source, group=group, tag=t.tag))
        for work in works:
            work.wait()
        return assemble_flat(slices, arrival.tp_slice) if arrival is not None else torch.empty(0)


def _check_whole(spec: TensorSpec, sources: Sequence[tuple[int, Segment]]) -> None:
    """Check that the segments have as many elements as the tensor's slices."""
    slices = {segment.tp_slice.num_slices * math.prod(segment.tp_slice.local_shape) for _, segment in sources}
    held, wanted = sum(segment.length for _, segment in sources), next(iter(slices), math.prod(spec.shape))
    if held != wanted or any(segment.tp_slice.full_shape != spec.shape for _, segment in sources):
        raise ValueError(f"{spec.name} {spec.shape}: ranks hold {held} elements of its {wanted}")
