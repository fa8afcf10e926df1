"""The first error in what a rank prints: a traceback, else a message that says error, else its last words."""

from __future__ import annotations

import re
import time
from collections import deque

MAX_LINES = 30
MAX_CHARS = 3000
"""How much is kept: the report is one line, and one write of up to 4 kB does not mix with the others' on a pipe."""

_PREFIX = re.compile(r"^\[rank\d+\]:\s?")  # torch puts it before the lines of a traceback
_TRACEBACK = re.compile(r"^Traceback \(most recent call last\):")
_ERROR = re.compile(
    r"\berror\b[^:]{0,40}: |\w(Error|Exception): |^Fatal |terminate called|Segmentation fault", re.IGNORECASE
)


class ErrorFinder:
    """Fed with a rank's output as it comes; `lines` is what its reader should see first.

    Attributes:
        first_seen: when the first error was printed, in seconds since the epoch; None while there is none.
    """

    def __init__(self) -> None:
        self.first_seen: float | None = None
        self._rest = b""
        self._tail: deque[str] = deque(maxlen=MAX_LINES)
        self._found: deque[str] = deque(maxlen=MAX_LINES)
        self._inside = ""  # "traceback" or "message"; further lines of either are indented
        self._has_traceback = False

    def feed(self, chunk: bytes) -> None:
        """Take the next bytes of the output."""
        *lines, self._rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            self._take(_PREFIX.sub("", line.decode(errors="replace").rstrip("\r")))

    def _take(self, line: str) -> None:
        if line:
            self._tail.append(line)
        if self._inside and line.startswith(" "):
            self._found.append(line)
        elif self._inside == "traceback":
            self._found.append(line)
            self._inside = "message" if line else "traceback"  # the exception itself stands at the margin
        elif not self._has_traceback and _TRACEBACK.match(line):
            self._found = deque([line], maxlen=MAX_LINES)
            self._inside, self._has_traceback = "traceback", True
        elif not self._found and _ERROR.search(line):
            self._found.append(line)
            self._inside = "message"
        else:
            self._inside = ""
        if self._found and self.first_seen is None:
            self.first_seen = time.time()

    @property
    def lines(self) -> list[str]:
        """The first traceback; else the first message that says error; else the last lines. `MAX_CHARS` at most."""
        found = list(self._found or [*self._tail, self._rest.decode(errors="replace")])
        while sum(map(len, found)) > MAX_CHARS:
            found = found[1:] if len(found) > 1 else [found[0][-MAX_CHARS:]]
        return [line for line in found if line]
