"""Run a function on every rank of a launch in fresh processes, as often as wanted: one world after another.

DeepSpeed cannot be started twice in one process: 0.19.8 keeps process groups in `utils/groups.py` and
`runtime/pipe/p2p.py`, parameter and module counters of ZeRO-3, the autocast type and the settings of activation
checkpointing in module globals, and what is forgotten in a reset shows as a run that differs. So each job runs in a
new process of each rank, which takes over the rank's place in the launch and meets its peers at a port of its own.
The ranks themselves build no process group and touch no accelerator; they talk through a key-value store.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.distributed import Store, rendezvous

from ds_vit.fault_tolerance.errors import UserError
from ds_vit.launching.ports import free_port
from ds_vit.launching.process import Process, port_in_words
from ds_vit.launching.process import rendezvous as launcher_rendezvous

GRACE_SECONDS = 10.0
"""What the processes of a job get to end by themselves once one of them has failed."""

_MEETING_SECONDS = 300.0
_POLL_SECONDS = 0.1
_OUTPUT_CHARS = 4000

# Imported once a rank, by the server that the processes are forked from. DeepSpeed looks for GPUs while it is
# imported, after which CUDA does not survive a fork: it is among them on machines without accelerator alone.
_PRELOAD = ["torch", "torchvision", "timm"]


class Failure(Exception):
    """A job failed on some rank; every process of it has ended. The text is the first failure, for people.

    Attributes:
        refused: it was a UserError, which is input that cannot be, not an accident.
    """

    def __init__(self, text: str, *, refused: bool) -> None:
        super().__init__(text)
        self.refused = refused


@dataclass(frozen=True)
class _Ended:
    """How the process of this rank ended: with a value, or with a text that says what went wrong."""

    value: Any = None
    failure: str | None = None
    refused: bool = False


class Relauncher:
    """The ranks of one launch, which run jobs together.

    Args:
        process: this rank.
        verbose: let rank 0's jobs write to the terminal; else what they write is shown only where they fail.
    """

    def __init__(self, process: Process, *, verbose: bool = False) -> None:
        arguments = launcher_rendezvous(process)
        if arguments["auto_mpi_discovery"]:
            from deepspeed.comm import mpi_discovery

            mpi_discovery(distributed_port=arguments["distributed_port"], verbose=False)
        self.process = process
        self.silent = not (verbose and process.rank == 0)
        self._address = os.environ["MASTER_ADDR"]
        with port_in_words():
            self._store: Store = next(rendezvous("env://"))[0]
        self._jobs = 0
        self._context = multiprocessing.get_context("forkserver")
        accelerated = torch.accelerator.is_available()
        self._context.set_forkserver_preload(_PRELOAD if accelerated else [*_PRELOAD, "deepspeed"])

    def run(self, fn: Callable[..., Any], /, *args: Any, meanwhile: Callable[[], None] = lambda: None) -> Any:
        """Run `fn(*args)` in a new process of every rank (all ranks call this, with the same function).

        In `fn` the launch's environment variables stand as a launcher would set them, with a free MASTER_PORT; no
        process group exists.

        Args:
            fn: a function at the top level of a module.
            args: what it is given on this rank; must be picklable, as its result.
            meanwhile: is called here, ten times a second, while it runs.

        Returns:
            What `fn` returned on this rank.

        Raises:
            Failure: on every rank, where any rank's process raised or died.
        """
        self._jobs += 1
        job = f"parity/{self._jobs}"
        port = self._agree(f"{job}/port", free_port)
        environ = {
            "RANK": self.process.rank,
            "WORLD_SIZE": self.process.world_size,
            "LOCAL_RANK": self.process.local_rank,
            "MASTER_ADDR": self._address,
            "MASTER_PORT": port,
        }
        if self.process.local_world_size is not None:
            environ["LOCAL_WORLD_SIZE"] = self.process.local_world_size
        ended = self._supervise(job, {name: str(value) for name, value in environ.items()}, fn, args, meanwhile)
        if ended.failure is not None:
            # The first to write is the first to have failed; the others fail because it is gone.
            self._store.compare_set(f"{job}/failed", "", f"{int(ended.refused)}{ended.failure}")
        self._meet(f"{job}/ended")
        if self._store.check([f"{job}/failed"]):
            text = self._store.get(f"{job}/failed").decode()
            raise Failure(text[1:], refused=text[0] == "1")
        return ended.value

    def agree(self, name: str, value: Any) -> Any:
        """Rank 0's value of something, on every rank."""
        return self._agree(f"parity/{name}", lambda: value)

    def close(self) -> None:
        """Leave together, after rank 0 has said what it has to say (all ranks call this, once).

        The store lives in rank 0, and a launcher ends all ranks with the first that exits with another code than 0.
        """
        self.agree("said", True)
        self._store.add("parity/left", 1)
        deadline = time.monotonic() + GRACE_SECONDS
        while self.process.rank == 0 and self._store.add("parity/left", 0) < self.process.world_size:
            if time.monotonic() > deadline:
                return
            time.sleep(_POLL_SECONDS)

    def _agree(self, key: str, value: Callable[[], Any]) -> Any:
        if self.process.rank == 0:
            own = value()
            self._store.set(key, pickle.dumps(own).hex())
            return own
        deadline = time.monotonic() + _MEETING_SECONDS
        while not self._store.check([key]):
            if time.monotonic() > deadline:
                raise RuntimeError(f"rank {self.process.rank} waited {_MEETING_SECONDS:.0f} s for rank 0")
            time.sleep(_POLL_SECONDS)
        return pickle.loads(bytes.fromhex(self._store.get(key).decode()))

    def _meet(self, key: str) -> None:
        self._store.add(key, 1)
        while self._store.add(key, 0) < self.process.world_size:
            time.sleep(_POLL_SECONDS)

    def _supervise(
        self, job: str, environ: Mapping[str, str], fn: Callable[..., Any], args: tuple, meanwhile: Callable[[], None]
    ) -> _Ended:
        """Start this rank's process and wait for its end, or for the failure of another rank's."""
        with tempfile.TemporaryDirectory(prefix="ds_vit-") as folder:
            output = Path(folder) / "output" if self.silent else None
            receiver, sender = self._context.Pipe(duplex=False)
            child = self._context.Process(target=_child, args=(sender, environ, output, fn, args))
            child.start()
            sender.close()
            deadline: float | None = None
            try:
                while not receiver.poll(_POLL_SECONDS):
                    meanwhile()
                    if deadline is None and self._store.check([f"{job}/failed"]):
                        deadline = time.monotonic() + GRACE_SECONDS
                    if deadline is not None and time.monotonic() > deadline:
                        return _Ended(failure=f"rank {self.process.rank} was ended after another rank's failure")
                try:
                    ended: _Ended = receiver.recv()
                except EOFError:
                    child.join()
                    ended = _Ended(failure=f"its process died (exit code {child.exitcode})")
                if ended.failure is not None and not ended.refused:
                    text = f"rank {self.process.rank}: {ended.failure}"
                    return _Ended(failure=f"{text}\n{_tail(output)}".rstrip())
                if ended.failure is None:
                    child.join()
                return ended
            finally:
                child.kill()
                child.join()
                receiver.close()


def _tail(output: Path | None) -> str:
    if output is None or not output.exists():
        return ""
    text = output.read_text(errors="replace").rstrip()
    return text[-_OUTPUT_CHARS:]


# What follows runs in the new processes.


def _child(
    sender: Connection, environ: Mapping[str, str], output: Path | None, fn: Callable[..., Any], args: tuple
) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # torchrun's own store is not at the new port
    os.environ.update(environ)
    if output is not None:
        with output.open("wb") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
    try:
        ended = _Ended(value=fn(*args))
    except UserError as error:
        ended = _Ended(failure=str(error), refused=True)
    except BaseException:
        ended = _Ended(failure=traceback.format_exc())
    sys.stdout.flush()
    sys.stderr.flush()
    sender.send(ended)
    sender.close()
    # Not an orderly end: that may wait for threads that wait for other ranks.
    os._exit(0)


def _end_with_parent() -> None:
    """End when the rank is killed, whatever this process is waiting for."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "this process was not started by a rank"
    parent.join()
    os._exit(1)
