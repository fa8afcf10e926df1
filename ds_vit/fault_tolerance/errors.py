"""Errors for people: a one-line message and an exit code.

Every other exception is a bug: it shows its traceback, and a launcher may restart the run.
"""

from __future__ import annotations

import contextlib
import difflib
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ds_vit.fault_tolerance import exit_codes

LATIN_1 = "if it is Latin-1, convert the file: iconv -f LATIN1 -t UTF-8 FILE > NEW"


def first_line(error: object) -> str:
    """The first line of a library's exception."""
    return (str(error).strip() or type(error).__name__).partition("\n")[0]


class UserError(ValueError):
    """Invalid input: what is wrong, with the numbers, and what to do. One line per problem.

    Attributes:
        problems: one line each.
    """

    exit_code = exit_codes.BAD_INPUT
    alike = False  # whether all ranks raise it together, so that one rank per host prints it

    def __init__(self, *problems: str, remedy: str = "") -> None:
        """`remedy`: a last line for all problems."""
        self.problems = tuple(dict.fromkeys(problems))
        head = (f"{len(self.problems)} things are wrong:",) if len(self.problems) > 1 else ()
        last = f"\n  ({remedy})" if remedy else ""
        super().__init__("\n  ".join((*head, *self.problems)) + last)


class EndedTogether(UserError):
    """All ranks end at the same place, with the same message."""

    alike = True


class OtherRun(UserError):
    """The place where the ranks meet belongs to another run.

    A rank may find that before the others begin. No launcher ends it then, and it prints the error itself.
    """


class NotSaved(UserError):
    """Weights or checkpoints could not be written; every rank raises it."""

    exit_code = exit_codes.UNSAVED


class WorkerLost(UserError):
    """A loader process was killed or ended by itself; the input is valid."""

    exit_code = exit_codes.LOST


class OutOfMemory(UserError):
    """The device or the host has too little memory; the first rank that finds this prints it for all."""

    exit_code = exit_codes.LOST


class ReplicasDiffer(UserError):
    """Replicas hold different weights: a machine or a reduction is faulty."""

    exit_code = exit_codes.DRIFTED


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether a library failed to allocate memory of the device or the host; each has its own class and words."""
    words = ("out of memory", "ALLOC_FAILED", "can't allocate memory", "not enough memory", "Cannot allocate memory")
    is_of_library = isinstance(error, (RuntimeError, OSError)) and any(word in str(error) for word in words)
    return isinstance(error, MemoryError) or is_of_library


@contextlib.contextmanager
def memory_errors(advise: Callable[[bool], str]) -> Iterator[None]:
    """Turn a library's failure to allocate memory in the block into one line.

    Args:
        advise: whether a loader process raised it → what to do, after the reason.

    Raises:
        OutOfMemory: with the bytes that were asked for, where they are known.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        asked = re.search(r"allocate ([\d.,]+ ?\w+)", str(error))
        of_loader = "DataLoader worker" in str(error)
        where = " in a loader process" if of_loader else ""
        size = f" (allocating {asked[1]})" if asked else ""
        raise OutOfMemory(f"out of memory{where}{size}: {advise(of_loader)}") from error


@contextlib.contextmanager
def written(named: str) -> Iterator[None]:
    """For the block, an error of the system is one line that begins with this name of a file or folder.

    Raises:
        UserError: it cannot be written.
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"{named}: {error.strerror or error}") from error


@contextlib.contextmanager
def require_package(package: str, feature: str, otherwise: str = "") -> Iterator[None]:
    """For the block, a package that cannot be imported is one line.

    Args:
        package: as pip names it.
        feature: what needs it, as in "--tokenizer clip".
        otherwise: the end of the message, after how to install it.

    Raises:
        UserError: it cannot be imported.
    """
    try:
        yield
    except ImportError as error:
        raise UserError(f"{feature} needs {package} ({first_line(error)}): pip install {package}{otherwise}") from None


def read_text(path: str | Path, named_by: str) -> str:
    """The text of a file.

    Args:
        path: of the file.
        named_by: prefix of its name in a message, such as "--recipe ".

    Raises:
        UserError: it cannot be read, or is not UTF-8.
    """
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        line = 1 + error.object[: error.start].count(b"\n")
        raise UserError(f"{named_by}{path}, line {line}: not a text file: it is not UTF-8; {LATIN_1}") from None
    except OSError as error:
        raise UserError(f"{named_by}{path}: {error.strerror or error}") from None


def parse_json(text: str | bytes, where: str) -> Any:
    """The value of a JSON text; UserError with `where` if it is not JSON."""
    try:
        return json.loads(text)
    except ValueError as error:
        raise UserError(f"{where} is not JSON: {first_line(error)}") from None


def read_object(path: str | Path, named_by: str) -> dict[str, Any]:
    """The JSON object in a file, empty where it holds another value; the arguments are those of `read_text`.

    Raises:
        UserError: it cannot be read, or is not JSON.
    """
    found = parse_json(read_text(path, named_by), f"{named_by}{path}")
    return found if isinstance(found, dict) else {}


def text_lines(text: str) -> list[str]:
    """The lines of a text. They end with \\n, \\r\\n or \\r; other separators (U+0085, U+2028, form feed) are text."""
    return io.StringIO(text, newline=None).read().split("\n")


def stripped_lines(text: str) -> tuple[str, ...]:
    """The lines of a text without blanks around them, and without empty ones."""
    return tuple(filter(None, map(str.strip, text_lines(text))))


def enumerate_some(names: Sequence[str], most: int = 5) -> str:
    """The first of some names, and how many more there are; "nothing" for none."""
    return (", ".join(names[:most]) or "nothing") + (f" and {len(names) - most} more" if len(names) > most else "")


def did_you_mean(word: str, known: Iterable[str], cutoff: float = 0.5, most: int = 1) -> str:
    """A clause that names the nearest known words, as in "; the nearest is --lr"; empty where none is near."""
    close = difflib.get_close_matches(word, sorted(known), n=most, cutoff=cutoff)
    return f"; the nearest {'is' if len(close) == 1 else 'are'} {', '.join(close)}" if close else ""
