"""Files that are made once beside a data set's own, whichever of a run's ranks and hosts comes first."""

from __future__ import annotations

import contextlib
import fcntl
import uuid
from collections.abc import Iterator


@contextlib.contextmanager
def one_at_a_time(path: str) -> Iterator[None]:
    """Hold the lock of a file that is there, so that of many processes the first does the work and the others see it.

    A file system without locks lets all of them work, each in a file of its own.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            file = stack.enter_context(open(path, "rb"))
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def partial_name(path: str) -> str:
    """A name beside a file that no other process has, on any host."""
    return f"{path}.{uuid.uuid4().hex[:16]}.partial"
