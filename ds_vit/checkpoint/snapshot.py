"""Checkpoints of a running engine, copied to host memory and written by a thread beside training.

The pause is the copy of this rank's share alone. The thread moves segments to their writers through a process group of
its own, so that it never meets training's collectives.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ds_vit.checkpoint import folder as folders
from ds_vit.checkpoint.gather import Gather
from ds_vit.checkpoint.holding import OPTIMIZER, Holding
from ds_vit.checkpoint.tensors import FileEntry, TensorSpec, TensorWriter, index_of, split_files
from ds_vit.config.run_folder import BEST, WEIGHTS
from ds_vit.fault_tolerance.errors import NotSaved, UserError
from ds_vit.parallel.segment import Segment

WEIGHT_BYTES = 5 * 10**9
"""Largest file of weights, as Hugging Face has it: timm and others read one file most easily."""
STATE_BYTES = 2**30
"""Largest file of optimizer state: small enough for many ranks to write at once."""

_EMA_PREFIX = "ema-"


class HostCopy:
    """Host memory for this rank's share: page-locked beside a GPU, and used again by every save."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, int], torch.Tensor] = {}
        self._reserving: threading.Thread | None = None

    def reserve(self, holding: Holding, kinds: Sequence[str]) -> None:
        """Have a thread get the memory for these kinds, page by page, so that the first copy does not wait for it."""
        sizes = {}
        for kind in kinds:
            for block, source in enumerate(holding.tensors(kind)):
                if source is not None and _owner(holding, kind, block) == kind:
                    sizes[kind, block] = source.numel(), source.device.type == "cuda"

        def get() -> None:
            for key, (numel, pin) in sizes.items():
                # Filled, because the system gives memory only when it is written to.
                self._buffers[key] = torch.empty(numel, dtype=torch.float32, pin_memory=pin).zero_()

        self._reserving = threading.Thread(target=get, name="checkpoint memory", daemon=True)
        self._reserving.start()

    def take(self, holding: Holding, kinds: Sequence[str]) -> dict[str, list[torch.Tensor]]:
        """Copy the tensors of these kinds; waits until they have arrived.

        Returns:
            kind → flat fp32 CPU tensors by block, empty ones where this rank gives nothing.
        """
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None
        out: dict[str, list[torch.Tensor]] = {}
        devices = set()
        for kind in kinds:
            out[kind] = []
            for block, source in enumerate(holding.tensors(kind)):
                owner = _owner(holding, kind, block)
                if source is None:
                    out[kind].append(torch.empty(0))
                    continue
                buffer = self._buffers.get((owner, block))
                if buffer is None:
                    pin = source.device.type == "cuda"
                    buffer = torch.empty(source.numel(), dtype=torch.float32, pin_memory=pin)
                    self._buffers[owner, block] = buffer
                if owner == kind:
                    buffer.copy_(source.detach().view(-1), non_blocking=True)
                    devices.add(source.device)
                out[kind].append(buffer)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return out


def _owner(holding: Holding, kind: str, block: int) -> str:
    """The kind whose copy of a block serves: a parameter that is not trained is its own average."""
    return "model" if block >= len(holding.trained) else kind


@dataclass
class Save:
    """One checkpoint, from the decision to save it to its end.

    Attributes:
        step: optimizer steps that are done.
        state: state.json.
        best: it shall be marked as the best one.
        pause_seconds: how long training stood still for it.
        write_seconds: how long the files took, beside training.
        num_bytes: of all its files.
        error: what went wrong on which rank; "" for a complete one.
        removed: names of the older checkpoints that were removed for it.
    """

    step: int
    state: Mapping[str, Any]
    best: bool = False
    pause_seconds: float = 0.0
    write_seconds: float = 0.0
    num_bytes: int = 0
    error: str = ""
    removed: list[str] = field(default_factory=list)


class Saver:
    """Saves checkpoints of one engine; every rank has one and calls the same methods in the same order.

    Args:
        parent: the folder `checkpoints`, the same one on all ranks; made when it is needed.
        holding: what this rank holds.
        keep: checkpoints to keep beside the best one; 0 keeps all.
        group: of all ranks, over gloo; nobody else uses it while a save is under way.
        apart: parameters that `save_weights` writes into files of their own, by the file's name; in a checkpoint all
            are together.
        metadata: further words of the header of every file of weights, averaged ones too.
    """

    def __init__(
        self,
        parent: Path,
        holding: Holding,
        keep: int,
        group: dist.ProcessGroup,
        apart: Mapping[str, Collection[str]] | None = None,
        metadata: Mapping[str, str] | None = None,
    ) -> None:
        self.parent = parent
        self.holding = holding
        self.keep = keep
        self.rank = dist.get_rank()
        self._group = group
        self._host = HostCopy()
        self._held: list[Sequence[Segment]] | None = None
        self._gathers: dict[tuple[str, ...], Gather] = {}
        self._apart = {
            f"{prefix}{name}": frozenset(names) for name, names in (apart or {}).items() for prefix in ("", _EMA_PREFIX)
        }
        self._metadata = dict.fromkeys(WEIGHTS.values(), metadata or {})
        self._thread: threading.Thread | None = None
        self._crash: BaseException | None = None
        self._finished: list[Save] = []

    @property
    def busy(self) -> bool:
        """Whether this rank is still writing the last checkpoint."""
        return self._thread is not None and self._thread.is_alive()

    def finished(self) -> list[Save]:
        """The saves that have come to their end since the last call.

        Raises:
            RuntimeError: the thread itself failed: another rank is gone.
        """
        if self._crash is not None:
            crash, self._crash = self._crash, None
            raise RuntimeError(f"a checkpoint could not be brought to its end: {crash}") from crash
        done, self._finished = self._finished, []
        return done

    def num_bytes(self) -> tuple[int, int]:
        """The size of a checkpoint, once the optimizer has its states, and of what `save_weights` and `save_best` write
        (the same on every rank)."""
        sizes = {kind: sum(spec.num_bytes for spec in self.holding.specs(kind)) for kind in self.holding.kinds()}
        return sum(sizes.values()), 2 * sizes["model"] + sizes.get("ema", 0)

    def reserve(self) -> None:
        """Get the memory for a save ready beside training, once the optimizer has its states; needs no other rank."""
        self._host.reserve(self.holding, self.holding.kinds())

    def start(self, save: Save) -> None:
        """Copy this rank's share, and write it beside training (all ranks, none of them `busy`)."""
        self.wait()
        begun = time.perf_counter()
        kinds = self.holding.kinds()
        host = self._host.take(self.holding, kinds)
        save.pause_seconds = time.perf_counter() - begun
        self._thread = threading.Thread(target=self._guarded, args=(save, host, kinds), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until this rank is no longer `busy`."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def mark_best(self, step: int) -> str:
        """Mark the complete checkpoint of a step as the best one; what went wrong, on every rank (a collective)."""
        return self._on_first_rank(lambda: folders.mark_best(self.parent, folders.folder_name(step)))

    def save_weights(self, folder: Path) -> None:
        """Write the weights, and their average where there is one, into a folder: `model.safetensors` and
        `ema.safetensors`, or shards with an index (all ranks). What has a file of its own goes to `<name>.safetensors`
        and `ema-<name>.safetensors` beside them.

        Raises:
            NotSaved: on every rank, with what went wrong on which.
        """
        self.wait()
        kinds = tuple(kind for kind in self.holding.kinds() if not kind.startswith(OPTIMIZER))
        host = self._host.take(self.holding, kinds)
        for name in self._apart:
            source = "ema" if name.startswith(_EMA_PREFIX) else "model"
            if source in host:
                host[name] = host[source]
        kinds = tuple(host)
        temporary = folder / ".weights.partial"
        entries, error = self._write(temporary, kinds, host)
        if not error:
            error = self._on_first_rank(lambda: _place(temporary, folder, entries, self._indices(kinds)))
        if error:
            self._on_first_rank(lambda: folders.remove(temporary))
            raise NotSaved(f"the weights could not be written to {folder}: {error}")

    def save_best(self, folder: Path) -> None:
        """Write the weights of the best checkpoint as `best.safetensors`, or shards with an index; what has a file of
        its own is left out. Where no checkpoint is marked, none stays (a collective; rank 0 alone reads and writes).

        Raises:
            NotSaved: on every rank, with what went wrong.
        """
        temporary = folder / ".best.partial"
        if error := self._on_first_rank(lambda: self._copy_best(temporary, folder)):
            self._on_first_rank(lambda: folders.remove(temporary))
            raise NotSaved(f"{BEST}.safetensors could not be written to {folder}: {error}")

    def _copy_best(self, temporary: Path, folder: Path) -> None:
        name = folders.marked(self.parent, "best")
        if name is None:
            for stale in folder.glob(f"{BEST}*.safetensors*"):  # of a course that was given up
                stale.unlink()
            return
        try:
            weights = folders.open_checkpoint(self.parent / name).tensors("model")
        except UserError as damage:
            raise OSError(str(damage)) from None
        elsewhere = frozenset().union(*self._apart.values())
        specs = [spec for spec in self.holding.specs("model") if spec.name not in elsewhere]
        files = split_files(BEST, specs, WEIGHT_BYTES)
        folders.make_empty(temporary)
        entries = []
        for file, tensors in files.items():
            writer = TensorWriter(temporary / file, tensors, self._metadata["model"])
            for spec in tensors:
                writer.write(spec.name, weights[spec.name])
            entries.append(writer.close())
        _place(temporary, folder, entries, _indices({BEST: files}))

    # ---- in the thread -----------------------------------------------------------------------------------------

    def _guarded(self, save: Save, host: Mapping[str, Sequence[torch.Tensor]], kinds: tuple[str, ...]) -> None:
        try:
            self._save(save, host, kinds)
        except Exception as error:  # it has no other way out of a thread
            self._crash = error

    def _save(self, save: Save, host: Mapping[str, Sequence[torch.Tensor]], kinds: tuple[str, ...]) -> None:
        begun = time.perf_counter()
        temporary = folders.partial_folder(self.parent, save.step)
        entries, save.error = self._write(temporary, kinds, host)
        if not save.error:
            save.error = self._on_first_rank(lambda: self._commit(save, kinds, entries))
        if save.error:
            self._on_first_rank(lambda: folders.discard(self.parent, save.step))
        save.num_bytes = sum(entry.num_bytes for entry in entries)
        save.write_seconds = time.perf_counter() - begun
        self._finished.append(save)

    def _commit(self, save: Save, kinds: tuple[str, ...], entries: Sequence[FileEntry]) -> None:
        texts = {"state.json": json.dumps(save.state, indent=1) + "\n", **self._indices(kinds)}
        path = folders.commit(self.parent, save.step, entries, texts)
        if save.best:
            folders.mark_best(self.parent, path.name)
        save.removed = folders.prune(self.parent, self.keep)

    def _indices(self, kinds: Sequence[str]) -> dict[str, str]:
        """The index files of those kinds that take more than one file."""
        return _indices({kind: self._gather(tuple(kinds)).files[kind] for kind in kinds})

    def _write(
        self, temporary: Path, kinds: tuple[str, ...], host: Mapping[str, Sequence[torch.Tensor]]
    ) -> tuple[list[FileEntry], str]:
        """All files of these kinds in a temporary folder (a collective).

        Returns:
            On every rank: the files of all ranks, and what went wrong on which rank.
        """
        error = self._on_first_rank(lambda: folders.make_empty(temporary))
        if error:
            return [], error
        own, own_error = self._gather(kinds).run(host, temporary, self._group, self._metadata)
        results: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(results, (own, own_error), group=self._group)
        errors = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(results) if error]
        return [entry for entries, _ in results for entry in entries], "; ".join(errors)

    def _gather(self, kinds: tuple[str, ...]) -> Gather:
        """The plan for these kinds; the ranks tell each other once what they hold."""
        if self._held is None:
            held: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(held, self.holding.given, group=self._group)
            self._held = held
        if kinds not in self._gathers:
            specs = self._specs(kinds)
            limits = {kind: STATE_BYTES if kind.startswith(OPTIMIZER) else WEIGHT_BYTES for kind in kinds}
            self._gathers[kinds] = Gather(self._held, specs, limits, self.rank)
        return self._gathers[kinds]

    def _specs(self, kinds: tuple[str, ...]) -> dict[str, list[TensorSpec]]:
        """The whole tensors of each of these kinds; what is among them with a file of its own is in no other."""
        out = {}
        for kind in kinds:
            if kind in self._apart:
                out[kind] = [spec for spec in self.holding.specs("model") if spec.name in self._apart[kind]]
            else:
                elsewhere = frozenset().union(*(self._apart[name] for name in kinds if name in self._apart))
                out[kind] = [spec for spec in self.holding.specs(kind) if spec.name not in elsewhere]
        return out

    def _on_first_rank(self, action: Callable[[], None]) -> str:
        """Do something on rank 0; what went wrong with it, on every rank (a collective)."""
        error = [""]
        if self.rank == 0:
            try:
                action()
            except OSError as problem:
                where = f" ({problem.filename})" if problem.filename else ""
                error = [f"rank 0: {problem.strerror or problem}{where}"]
        dist.broadcast_object_list(error, src=0, group=self._group)
        return error[0]


def _place(temporary: Path, folder: Path, entries: Sequence[FileEntry], indices: Mapping[str, str]) -> None:
    """Move what was written, and its index, to where a reader looks for it."""
    for name, text in indices.items():
        entries = [*entries, folders.write_bytes(temporary / name, text.encode())]
    for entry in entries:
        (temporary / entry.name).replace(folder / entry.name)
    temporary.rmdir()
    folders.sync_folder(folder)


def _indices(files: Mapping[str, Mapping[str, Sequence[TensorSpec]]]) -> dict[str, str]:
    return {
        f"{kind}.safetensors.index.json": json.dumps(index_of(parts), indent=1) + "\n"
        for kind, parts in files.items()
        if len(parts) > 1
    }


def collect_weights(holding: Holding, group: dist.ProcessGroup) -> dict[str, torch.Tensor] | None:
    """All weights on rank 0's CPU, whole, fp32; None on the others (a collective). For models that one host can hold.

    Args:
        holding: what this rank holds.
        group: of all ranks, over gloo.
    """
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, holding.given, group=group)
    specs = holding.specs("model")
    one_file = sum(spec.num_bytes for spec in specs)  # which rank 0 would write
    gather = Gather(held, {"model": specs}, {"model": one_file}, dist.get_rank())
    whole = gather.collect(HostCopy().take(holding, ("model",)), group)
    return whole.get("model", {}) if dist.get_rank() == 0 else None
