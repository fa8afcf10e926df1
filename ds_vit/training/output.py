"""The run's output folder: one run at a time writes to it, all hosts share it, and no other run is overwritten."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ds_vit.checkpoint.folder import checkpoints
from ds_vit.fault_tolerance import exit_codes
from ds_vit.fault_tolerance.errors import UserError, written
from ds_vit.launching.host_identity import identity
from ds_vit.launching.process import Process
from ds_vit.run_folder import RunFolder, weights_in

DEFAULT_PARENT = "runs"

_BEAT_SECONDS = 5.0  # a lock is renewed this often
_DEAD_SECONDS = 60.0  # without a renewal, the owner of a lock on another host is dead
_GRACE_SECONDS = 10.0  # the owner of a lock may be about to end
_SETTLE_SECONDS = 0.5  # of two that replace the lock of a dead owner at the same time, the second one has it


def default_folder(model: str) -> str:
    """`runs/<time>-<model>`; of a folder or a repository with its own name."""
    return f"{DEFAULT_PARENT}/{time.strftime('%Y%m%d-%H%M%S')}-{Path(model.partition(':')[2] or model).name}"


def make_default_folder(model: str) -> str:
    """Create the default folder, with a number appended where another run started in the same second."""
    name = default_folder(model)
    for folder in itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2))):
        try:
            Path(folder).mkdir(parents=True)
            break
        except FileExistsError:
            continue
        except OSError as error:
            raise UserError(f"{folder} cannot be made: {error.strerror or error}; give --output") from None
    return folder


def check_folder(output: str, *, resumes: bool = False) -> None:
    """Reject a folder that holds a run already, or that cannot be written.

    Args:
        output: the folder.
        resumes: the run in the folder is the one to resume.

    Raises:
        UserError: says which and what to do.
    """
    folder = Path(output)
    try:
        holds_run = RunFolder(folder).metrics.exists() and has_saved(folder)
        parent = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        str(folder.absolute()).encode()
    except OSError as error:  # a name that is too long, a folder that cannot be read
        raise UserError(f"--output {output}: {error.strerror or error}") from None
    except UnicodeEncodeError:
        raise UserError(f"--output {output}: not UTF-8, and TensorBoard writes to no such folder; rename it") from None
    if holds_run and not resumes:
        raise UserError(
            f"--output {output} already holds a run; choose another folder, remove it, or resume the run with "
            "--resume auto"
        )
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(f"--output {output}: {parent} is not a folder that can be written to")


def has_saved(folder: Path) -> bool:
    """Whether a run has saved anything here that it, or another one, could resume from."""
    run = RunFolder(folder)
    return run.summary.exists() or weights_in(folder, "raw") is not None or bool(checkpoints(run.checkpoints))


def move_unsaved_run(folder: Path) -> str:
    """Move away the files of a run that saved nothing, so that its rows do not mix with those of the next one.

    Returns:
        A note for people; "" if there is no such run.
    """
    run = RunFolder(folder)
    if not run.metrics.exists() or has_saved(folder):
        return ""
    aside = next(path for n in itertools.count(1) if not (path := folder / f"unsaved-{n}").exists())
    aside.mkdir()
    for path in (run.metrics, run.tensorboard, run.samples, run.skipped, run.starts, run.profile):
        if path.exists():
            path.rename(aside / path.name)
    return f"{folder} holds a run that saved nothing: its files are moved to {aside}, and this run begins at step 0"


def check_shared(output: str, process: Process, environ: Mapping[str, str] = os.environ, timeout: float = 90.0) -> None:
    """On several hosts, check that `output` is one folder: rank 0 writes a mark there, each host answers with another.

    Plain files, because no process group exists yet; rank 0 removes them. Does nothing on one host.

    Raises:
        UserError: a host does not see rank 0's folder (or did not start) within `timeout` seconds.
    """
    if not process.spans_hosts or process.local_rank != 0:
        return
    address = f"{environ.get('MASTER_ADDR', '')}:{environ.get('MASTER_PORT', '')}:{process.world_size}"
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / f".host-check-{hashlib.blake2b(address.encode(), digest_size=6).hexdigest()}"
    hosts = process.world_size // (process.local_world_size or 1)
    started = time.time()

    def wait(is_seen: Callable[[], bool], problem: str) -> None:
        deadline = time.monotonic() + timeout
        while not is_seen():
            if time.monotonic() > deadline:
                raise UserError(
                    f"--output {output} on host {socket.gethostname()} {problem} after {timeout:.0f} s; give a path on "
                    "a file system that all hosts share"
                )
            time.sleep(0.1)

    def call() -> bool:
        mark.touch()
        answers = folder.glob(f"{mark.name}-*")
        return sum(path.stat().st_mtime > time.time() - timeout for path in answers) >= hosts - 1

    if process.rank != 0:
        # The mark of a killed run is old; rank 0 renews its mark until every host has answered.
        wait(
            lambda: mark.exists() and mark.stat().st_mtime > started - 5,
            "is not the folder that rank 0 writes to: it has no mark of rank 0",
        )
        mark.with_name(f"{mark.name}-{process.rank}").touch()
        return
    try:
        wait(call, f"(rank 0's) was not seen by all {hosts - 1} other hosts")
    finally:
        for path in folder.glob(f"{mark.name}*"):
            path.unlink(missing_ok=True)


class FolderLock:
    """Lets one run at a time write into a folder: a file that rank 0 creates, renews and removes (a context manager).

    It works on file systems that hosts share: the file is created exclusively. An owner on this machine is alive while
    its process is. An owner elsewhere is alive while the file's time keeps changing; the clocks of two hosts are never
    compared.

    Args:
        folder: of the run; created if it is missing.
        made: whether this run created the folder already. A folder that the run created is removed if it stays empty.
        end: ends the process with a code (replaced in tests).
    """

    def __init__(self, folder: str, made: bool = False, end: Callable[[int], Any] = os._exit) -> None:
        self._path = RunFolder(Path(folder)).lock
        self._end = end
        owner = {"id": uuid.uuid4().hex, "host": socket.gethostname(), "pid": os.getpid(), "machine": _machine()}
        owner |= {"started": _started(os.getpid()), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
        self._text = json.dumps(owner)
        self._made = made
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="folder lock", daemon=True)

    def __enter__(self) -> FolderLock:
        """Take the lock.

        Raises:
            UserError: another run has it, or the folder cannot be written to.
        """
        folder = self._path.parent
        with written(f"--output {folder} cannot be written to"):
            self._made = self._made or not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            self._acquire()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Remove the lock, and the folder if this run created it and wrote nothing to it."""
        self._released.set()
        self._thread.join(_BEAT_SECONDS)
        with contextlib.suppress(OSError):
            if _read(self._path)[0] == self._text:
                self._path.unlink()
            if self._made:
                self._path.parent.rmdir()  # which fails unless it is empty

    def _acquire(self) -> None:
        seen = None
        begun = changed = 0.0
        while not self._create():
            try:
                lock, now = _read(self._path), time.monotonic()
            except FileNotFoundError:
                if seen is None:
                    continue
                # The files that this start has read may have changed.
                raise UserError(f"{_in_use(self._path, seen[0])} until just now; start this one again") from None
            renewed = seen is not None and lock != seen
            is_new = seen is None or lock[0] != seen[0]
            if is_new:
                begun, renewed = now, False
            if lock != seen:
                seen, changed = lock, now
            alive = _is_alive(lock[0])
            if alive is False or (alive is None and now - changed >= _DEAD_SECONDS):
                if self._take_over(lock[0]):
                    return
            elif now - begun >= _GRACE_SECONDS and (alive or renewed):
                raise UserError(f"{_in_use(self._path, lock[0])}; wait for its end, stop it, or give another --output")
            elif is_new:
                waiting = "waiting to see whether it is alive, or ends"
                print(f"train.py: {_in_use(self._path, lock[0])}; {waiting}", file=sys.stderr, flush=True)
            time.sleep(0.1)

    def _create(self) -> bool:
        """Create the lock, unless there is one."""
        try:
            with self._path.open("x") as file:
                file.write(self._text)
        except FileExistsError:
            return False
        return True

    def _take_over(self, dead: str) -> bool:
        """Replace the lock of a dead owner; returns whether this process has it then."""
        if _read(self._path)[0] != dead:
            return False
        own = self._path.with_name(f"{self._path.name}-{uuid.uuid4().hex}")
        own.write_text(self._text)
        own.replace(self._path)
        time.sleep(_SETTLE_SECONDS)
        return _read(self._path)[0] == self._text

    def _renew(self) -> None:
        while not self._released.wait(_BEAT_SECONDS):
            with contextlib.suppress(OSError):
                text, _ = _read(self._path)
                if text != self._text:
                    print(
                        f"train.py: error: {_in_use(self._path, text)}, which found this one dead: its lock was not "
                        f"renewed for {_DEAD_SECONDS:g} s; this run ends with code {exit_codes.LOST}",
                        file=sys.stderr,
                        flush=True,
                    )
                    self._end(exit_codes.LOST)
                    return
                os.utime(self._path)


def _read(path: Path) -> tuple[str, int]:
    """A lock's text and time; NFS asks the server whenever a file is opened."""
    with path.open() as file:
        return file.read(), os.fstat(file.fileno()).st_mtime_ns


def _owner(text: str) -> Mapping[str, Any]:
    try:
        owner = json.loads(text)
    except ValueError:
        return {}
    return owner if isinstance(owner, dict) else {}


def _in_use(lock: Path, text: str) -> str:
    owner = _owner(text)
    of = f"process {owner['pid']} on host {owner['host']}, since {owner['since']}" if owner else f"see {lock}"
    return f"--output {lock.parent} is in use by another run ({of})"


def _is_alive(text: str) -> bool | None:
    """Whether a lock's owner is alive; None where this machine cannot see it."""
    owner = _owner(text)
    if not owner or not owner["machine"] or owner["machine"] != _machine():
        return None
    started = _started(owner["pid"])
    if started:
        return started == owner["started"]
    try:  # a process of another user may be hidden
        os.kill(owner["pid"], 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return False  # a zombie


def _machine() -> str:
    """Equal for two processes that can see each other's process numbers; "" if unknown."""
    try:
        return f"{identity()}-{os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


def _started(pid: int) -> str:
    """When a process started, in the kernel's ticks; "" if it has ended or is hidden."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] in "ZX" else fields[19]
