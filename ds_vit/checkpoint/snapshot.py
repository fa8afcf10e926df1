"""Checkpoints of a running engine, copied to host memory and written by a thread during training.

Training waits only while this rank's share is copied. The thread sends segments to their writers through a separate
process group, so that it never meets training's collectives.
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ds_vit.checkpoint import folder as folders
from ds_vit.checkpoint.gather import OPTIMIZER, Gather, RankShare
from ds_vit.checkpoint.load import from_first_rank
from ds_vit.checkpoint.tensors import (
    WEIGHT_BYTES,
    FileEntry,
    TensorSpec,
    index_files,
    make_empty,
    move_files,
    remove,
    save_weights,
)
from ds_vit.config.run_folder import BEST, WEIGHTS
from ds_vit.device import pins_memory, synchronize
from ds_vit.fault_tolerance.errors import NotSaved, UserError
from ds_vit.parallel.groups import gather_objects
from ds_vit.parallel.tensor.slices import Segment

STATE_BYTES = 2**30
"""Largest file of optimizer state: small enough for many ranks to write at once."""


class HostCopy:
    """Host memory for this rank's share: page-locked with a GPU, and reused by every save."""

    def __init__(self, share: RankShare) -> None:
        self._share = share
        self._buffers: dict[tuple[str, int], torch.Tensor] = {}
        self._reserving: threading.Thread | None = None

    def reserve(self, kinds: Sequence[str]) -> None:
        """Allocate the memory for these kinds in a thread, so that the first copy does not wait for it."""
        sources = {kind: self._share.tensors(kind) for kind in kinds}

        def fill() -> None:
            for kind, tensors in sources.items():
                for block, source in enumerate(tensors):
                    if source is not None:
                        self._buffer(kind, block, source).zero_()  # the system gives memory when it is written to

        self._reserving = threading.Thread(target=fill, name="checkpoint memory", daemon=True)
        self._reserving.start()

    def take(self, kinds: Sequence[str]) -> dict[str, list[torch.Tensor]]:
        """Copy the tensors of these kinds; waits until they have arrived.

        Returns:
            kind → flat fp32 CPU tensors by block, empty ones where this rank saves nothing.
        """
        if self._reserving is not None:
            self._reserving.join()
            self._reserving = None
        sources = {kind: self._share.tensors(kind) for kind in kinds}
        out = {
            kind: [self._copy(kind, block, source) for block, source in enumerate(blocks)]
            for kind, blocks in sources.items()
        }
        for device in {source.device for blocks in sources.values() for source in blocks if source is not None}:
            synchronize(device)
        return out

    def _copy(self, kind: str, block: int, source: torch.Tensor | None) -> torch.Tensor:
        if source is None:
            return torch.empty(0)
        return self._buffer(kind, block, source).copy_(source.detach().view(-1), non_blocking=True)

    def _buffer(self, kind: str, block: int, source: torch.Tensor) -> torch.Tensor:
        # A parameter that is not trained is its own average: one copy serves both.
        key = ("model" if block >= len(self._share.trained) else kind, block)
        if key not in self._buffers:
            pinned = pins_memory(source.device)
            self._buffers[key] = torch.empty(source.numel(), dtype=torch.float32, pin_memory=pinned)
        return self._buffers[key]


@dataclass
class Save:
    """One checkpoint that is being saved.

    Attributes:
        step: optimizer steps that are done.
        state: state.json.
        best: whether to mark it as the best one.
        spare: name of an older checkpoint to keep in any case; "" for none.
        pause_seconds: how long training waited for it.
        write_seconds: how long the files took, during training.
        num_bytes: of all its files.
        error: which rank failed and why; "" for a complete one.
    """

    step: int
    state: Mapping[str, Any]
    best: bool = False
    spare: str = ""
    pause_seconds: float = 0.0
    write_seconds: float = 0.0
    num_bytes: int = 0
    error: str = ""


class Saver:
    """Saves checkpoints of one engine; every rank has one and calls the same methods in the same order.

    Args:
        parent: the folder `checkpoints`, the same one on all ranks; created by the first save.
        share: the tensors of this rank.
        keep: checkpoints to keep in addition to the best one; 0 keeps all.
        group: of all ranks, over gloo; used for nothing else during a save.
        apart: file name → parameters that `save_weights` writes into that file; a checkpoint has all in one.
        averages: file name → parameters whose average `save_weights` writes into that file, in place of
            `ema.safetensors`; None for that file. `save_best` writes the first one's parameters.
        left_out: parameters that `save_weights` writes into no file.
        metadata: further entries of the header of every file of weights, averaged ones too.
    """

    def __init__(
        self,
        parent: Path,
        share: RankShare,
        keep: int,
        group: dist.ProcessGroup,
        apart: Mapping[str, Collection[str]] | None = None,
        metadata: Mapping[str, str] | None = None,
        averages: Mapping[str, Collection[str]] | None = None,
        left_out: Collection[str] = (),
    ) -> None:
        self.parent = parent
        self.share = share
        self.keep = keep
        self.rank = dist.get_rank()
        self._group = group
        self._host = HostCopy(share)
        self._held: list[Sequence[Segment]] | None = None
        self._checkpoint: Gather | None = None  # of the last save
        # Of `save_weights`: name → kind in a checkpoint, and its parameters.
        separate = {name: frozenset(names) for name, names in (apart or {}).items()}
        of_model = {"model": frozenset(share.shapes).difference(left_out, *separate.values()), **separate}
        self._files = {name: ("model", names) for name, names in of_model.items()}
        if averages is not None:
            self._files |= {name: ("ema", frozenset(names)) for name, names in averages.items()}
        elif share.ema is not None:
            self._files |= {f"ema-{name}".removesuffix("-model"): ("ema", names) for name, names in of_model.items()}
        self._best = (next(iter(averages or ()), "model"), *separate)  # of `save_best`
        self._metadata = dict.fromkeys((*WEIGHTS.values(), *(averages or ())), metadata or {})
        self._thread: threading.Thread | None = None
        self._crash: BaseException | None = None
        self._finished: list[Save] = []

    @property
    def busy(self) -> bool:
        """Whether this rank is still writing the last checkpoint."""
        return self._thread is not None and self._thread.is_alive()

    def finished(self) -> list[Save]:
        """The saves that have finished since the last call.

        Raises:
            RuntimeError: the thread itself failed: another rank is gone.
        """
        if self._crash is not None:
            crash, self._crash = self._crash, None
            raise RuntimeError(f"a checkpoint could not be completed: {crash}") from crash
        done, self._finished = self._finished, []
        return done

    def num_bytes(self) -> tuple[int, int]:
        """The size of a checkpoint, once the optimizer has its states, and of what `save_weights` and `save_best` write
        (the same on every rank)."""
        sizes = {kind: sum(spec.num_bytes for spec in self.share.specs(kind)) for kind in self.share.kinds()}
        return sum(sizes.values()), 2 * sizes["model"] + sizes.get("ema", 0)

    def reserve(self) -> None:
        """Allocate the memory for a save during training, once the optimizer has its states; needs no other rank."""
        self._host.reserve(self.share.kinds())

    def start(self, save: Save) -> None:
        """Copy this rank's share, and write it during training (all ranks, none of them `busy`)."""
        self.wait()
        begun = time.perf_counter()
        kinds = self.share.kinds()
        host = self._host.take(kinds)
        save.pause_seconds = time.perf_counter() - begun
        self._thread = threading.Thread(target=self._save, args=(save, host, kinds), name="checkpoint", daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until this rank is no longer `busy`."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def mark_best(self, step: int) -> str:
        """Mark the complete checkpoint of a step as the best one; returns the error on every rank (a collective)."""
        return self._on_first_rank(lambda: folders.mark_best(self.parent, folders.folder_name(step)))

    def write_figures(self, step: int, figures: Mapping[str, Any]) -> None:
        """Add an evaluation's figures to the complete checkpoint of a step (only rank 0 writes)."""
        if self.rank == 0:
            with contextlib.suppress(OSError):  # a run that resumes there evaluates again
                folders.write_figures(self.parent, step, figures)

    def save_weights(self, folder: Path, step: int) -> None:
        """Write the weights, and their average where there is one, into a folder: `model.safetensors` and
        `ema.safetensors`, or shards with an index (all ranks). Parameters with a separate file go to
        `<name>.safetensors` and `ema-<name>.safetensors`. The headers have the step.

        Raises:
            NotSaved: on every rank; names the ranks that failed.
        """
        self.wait()
        taken = self._host.take(sorted({kind for kind, _ in self._files.values()}))
        host = {name: taken[kind] for name, (kind, _) in self._files.items()}
        gather = self._plan({name: self._specs(name) for name in host})
        temporary = folder / ".weights.partial"
        entries, error = self._write(temporary, gather, host, step=str(step))
        if not error:
            names = [entry.name for entry in entries]
            error = self._on_first_rank(lambda: move_files(temporary, folder, names, index_files(gather.files)))
        if error:
            self._on_first_rank(lambda: remove(temporary))
            raise NotSaved(f"the weights could not be written to {folder}: {error}")

    def save_best(self, folder: Path) -> None:
        """Write the weights of the best checkpoint as `best.safetensors`, or shards with an index, and parameters
        with a separate file as `best-<name>.safetensors`; the headers have the step. Without a best checkpoint, old
        files are removed (a collective; only rank 0 reads and writes).

        Raises:
            NotSaved: on every rank, with the error.
        """
        if error := self._on_first_rank(lambda: self._copy_best(folder)):
            raise NotSaved(f"{BEST}.safetensors could not be written to {folder}: {error}")

    def _copy_best(self, folder: Path) -> None:
        name = folders.marked(self.parent, "best")
        if name is None:
            for stale in folder.glob(f"{BEST}*.safetensors*"):  # from before a rollback or a resume
                stale.unlink()
            return
        try:
            weights = folders.open_checkpoint(self.parent / name).tensors(self._files[self._best[0]][0])
        except UserError as damage:
            raise OSError(str(damage)) from None
        metadata = {**self._metadata["model"], "step": str(folders.step_of(name))}
        for file in self._best:
            state = {spec.name: weights[spec.name] for spec in self._specs(file)}
            save_weights(folder, state, name=BEST if file == self._best[0] else f"{BEST}-{file}", metadata=metadata)

    def _specs(self, file: str) -> list[TensorSpec]:
        """The tensors of a file of `save_weights`."""
        kind, names = self._files[file]
        return [spec for spec in self.share.specs(kind) if spec.name in names]

    # ---- in the thread -----------------------------------------------------------------------------------------

    def _save(self, save: Save, host: Mapping[str, Sequence[torch.Tensor]], kinds: tuple[str, ...]) -> None:
        try:
            begun = time.perf_counter()
            temporary = folders.partial_folder(self.parent, save.step)
            if self._checkpoint is None or tuple(self._checkpoint.files) != kinds:
                self._checkpoint = self._plan({kind: self.share.specs(kind) for kind in kinds})
            indices = index_files(self._checkpoint.files)
            entries, save.error = self._write(temporary, self._checkpoint, host)
            if not save.error:
                save.error = self._on_first_rank(lambda: self._commit(save, entries, indices))
            if save.error:
                self._on_first_rank(lambda: remove(temporary))
            save.num_bytes = sum(entry.num_bytes for entry in entries)
            save.write_seconds = time.perf_counter() - begun
            self._finished.append(save)
        except Exception as error:  # `finished` raises it in the main thread
            self._crash = error

    def _commit(self, save: Save, entries: Sequence[FileEntry], indices: Mapping[str, str]) -> None:
        texts = {"state.json": json.dumps(save.state, indent=1) + "\n", **indices}
        path = folders.commit(self.parent, save.step, entries, texts)
        if save.best:
            folders.mark_best(self.parent, path.name)
        folders.prune(self.parent, self.keep, save.spare)

    def _write(
        self, temporary: Path, gather: Gather, host: Mapping[str, Sequence[torch.Tensor]], **more: str
    ) -> tuple[list[FileEntry], str]:
        """All files of a gather in a temporary folder, with `more` in the headers of weights (a collective).

        Returns:
            On every rank: the files of all ranks, and the errors by rank.
        """
        error = self._on_first_rank(lambda: make_empty(temporary))
        if error:
            return [], error
        metadata = {kind: {**entries, **more} for kind, entries in self._metadata.items()}
        results = gather_objects(gather.run(host, temporary, self._group, metadata), self._group)
        errors = [f"rank {rank}: {error}" for rank, (_, error) in enumerate(results) if error]
        return [entry for entries, _ in results for entry in entries], "; ".join(errors)

    def _plan(self, specs: Mapping[str, Sequence[TensorSpec]]) -> Gather:
        """The transfers of these tensors; the ranks exchange once which segments they hold."""
        if self._held is None:
            self._held = gather_objects(self.share.saved, self._group)
        limits = {kind: STATE_BYTES if kind.startswith(OPTIMIZER) else WEIGHT_BYTES for kind in specs}
        return Gather(self._held, specs, limits, self.rank)

    def _on_first_rank(self, action: Callable[[], None]) -> str:
        """Do something on rank 0; returns the error on every rank (a collective)."""

        def attempt() -> str:
            try:
                action()
            except OSError as problem:
                where = f" ({problem.filename})" if problem.filename else ""
                return f"rank 0: {problem.strerror or problem}{where}"
            return ""

        return from_first_rank(attempt, self._group)
