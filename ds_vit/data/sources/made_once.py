"""Files that are derived from a data set's own and kept next to them, made by one of a run's ranks and hosts."""

from __future__ import annotations

import contextlib
import fcntl
import os
import uuid
from collections.abc import Iterator


@contextlib.contextmanager
def one_at_a_time(path: str) -> Iterator[None]:
    """Hold the lock of an existing file, so that of many processes the first does the work and the others see it.

    On a file system without locks all of them work, each in a separate file.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            file = stack.enter_context(open(path, "rb"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def written_whole(path: str) -> Iterator[str]:
    """A name to write to that no other process has, on any host; at the end of the block the file is renamed."""
    partial = f"{path}.{uuid.uuid4().hex[:16]}.partial"
    try:
        yield partial
        os.replace(partial, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(partial)
