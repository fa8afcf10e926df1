"""The run's output folder: one run at a time writes to it, all hosts share it, and no other run is overwritten."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import json
import os
import socket
import sys
import time
import uuid
from pathlib import Path
from typing import TextIO

from ds_vit.checkpoint.folder import checkpoints
from ds_vit.config.run_folder import RunFolder, weights_in
from ds_vit.fault_tolerance.errors import EndedTogether, UserError, written
from ds_vit.launching.process import Process
from ds_vit.parallel.groups import gather_objects

DEFAULT_PARENT = "runs"

_GRACE_SECONDS = 10.0  # the owner of a lock may be about to end


def default_folder(model: str) -> str:
    """`runs/<time>-<model>`; of a folder or a repository with its own name."""
    return f"{DEFAULT_PARENT}/{time.strftime('%Y%m%d-%H%M%S')}-{Path(model.partition(':')[2] or model).name}"


def make_default_folder(model: str) -> str:
    """Create the default folder, with a number appended where another run started in the same second."""
    name = folder = default_folder(model)
    for number in itertools.count(2):
        with written(f"{folder} cannot be made; give --output"), contextlib.suppress(FileExistsError):
            Path(folder).mkdir(parents=True)
            break
        folder = f"{name}-{number}"
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
        raise UserError(f"--output {output} already holds a run; choose another folder, or resume it by --resume auto")
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
    pictures = [*folder.glob("*.png")]  # of which the next run would continue those that show several steps
    files = (run.metrics, run.tensorboard, run.samples, run.skipped, run.starts, run.profile)
    for path in (*files, *pictures, *(path.with_suffix(".json") for path in pictures)):
        if path.exists():
            path.rename(aside / path.name)
    return f"{folder} holds a run that saved nothing: its files are moved to {aside}, and this run begins at step 0"


def check_shared(folder: Path, process: Process, seconds: float = 90.0) -> None:
    """On several hosts, check that the output is one folder: every rank waits for a mark of rank 0 (a collective).

    Raises:
        UserError: on every rank: a host does not see rank 0's folder within `seconds`.
    """
    if not process.spans_hosts:
        return
    own = folder / f".host-check-{uuid.uuid4().hex}"
    with contextlib.suppress(OSError):  # no rank sees the mark then
        folder.mkdir(parents=True, exist_ok=True)  # a network file system asks the server, though it has seen none
        if process.rank == 0:
            own.touch()
    mark = folder / gather_objects(own.name)[0]
    deadline = time.monotonic() + seconds
    while not (seen := os.path.exists(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    blind = sorted(set(gather_objects("" if seen else socket.gethostname())) - {""})
    if process.rank == 0:
        mark.unlink(missing_ok=True)
    if blind:
        raise EndedTogether(
            f"--output {folder} on {', '.join(blind)} is not the folder that rank 0 writes to: after {seconds:.0f} s "
            "it has no mark of rank 0; give a path on a file system that all hosts share"
        )


class FolderLock:
    """Lets one run at a time write into a folder: rank 0 holds `flock` on a file that names it (a context manager).

    The kernel releases the lock when the process ends. A file that a run on another host left gives one warning, as
    does a file system without locks.

    Args:
        folder: of the run; created if it is missing.
        made: whether this run created the folder already. A folder that the run created is removed if it stays empty.
    """

    def __init__(self, folder: str, made: bool = False) -> None:
        self._path = RunFolder(Path(folder)).lock
        self._made = made
        self._file: TextIO | None = None

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
        os.register_at_fork(after_in_child=self._close)  # a loader worker may outlive the run
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def release(self) -> None:
        """Remove the lock, and the folder if this run created it and wrote nothing to it."""
        if self._file is None:
            return
        with contextlib.suppress(OSError):
            self._path.unlink()  # while the lock is held, so that a run that waits for it notices
        self._close()
        if self._made:
            with contextlib.suppress(OSError):
                self._path.parent.rmdir()  # which fails unless it is empty

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _acquire(self) -> None:
        """Wait for the lock, then write this process into it."""
        in_use, deadline = "", time.monotonic() + _GRACE_SECONDS
        while not _lock(file := self._path.open("a+")):
            owner = _owner(file)
            file.close()
            if not in_use:
                in_use = f"--output {self._path.parent} is in use by another run ({owner})"
                print(f"train.py: {in_use}; waiting for its end", file=sys.stderr, flush=True)
            elif time.monotonic() > deadline:
                raise UserError(f"{in_use}; wait for its end, stop it, or give another --output")
            time.sleep(0.1)
        self._file, left = file, _owner(file)
        is_removed = not self._path.exists() or not os.path.samestat(os.fstat(file.fileno()), self._path.stat())
        if is_removed or (in_use and not left):
            # The other run ended, and the files that this start has read may have changed.
            self._close() if is_removed else self.release()
            raise UserError(f"{in_use or f'another run wrote to {self._path.parent}'} until just now; start again")
        if left and f" on host {socket.gethostname()}," not in left:
            warning = f"{self._path.parent} was in use by another run ({left}); make sure that it has ended"
            print(f"train.py: warning: {warning}", file=sys.stderr, flush=True)
        file.truncate(0)
        json.dump({"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}, file)
        file.flush()


def _lock(file: TextIO) -> bool:
    """Whether this process has the lock of an open file now."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP):
            raise
        warning = "its file system has no locks, and nothing keeps another run from writing there"
        print(f"train.py: warning: {Path(file.name).parent}: {warning}", file=sys.stderr, flush=True)
    return True


def _owner(file: TextIO) -> str:
    """The process that a lock names; "" for a new lock."""
    file.seek(0)
    try:
        owner = json.load(file)
        return f"process {owner['pid']} on host {owner['host']}, since {owner['since']}"
    except (ValueError, LookupError, TypeError):
        return ""
