"""Errors for people: what is said in one line, and the exit code of a program that ends by it.

Every other exception is a bug: it shows its traceback, and a launcher may start the run again.
"""

from __future__ import annotations

from pathlib import Path

from ds_vit.fault_tolerance import exit_codes


def first_line(error: object) -> str:
    """What a library's exception says first: some go on with a page."""
    return (str(error).strip() or type(error).__name__).partition("\n")[0]


class UserError(ValueError):
    """Input that cannot be. The message is one line: what is wrong, with the numbers, and what to do."""

    exit_code = exit_codes.BAD_INPUT


class NotSaved(UserError):
    """What was trained could not be written, on any rank alike."""

    exit_code = exit_codes.UNSAVED


class WorkerLost(UserError):
    """A process that loads images was killed, or ended by itself; nothing is wrong with what was given."""

    exit_code = exit_codes.LOST


class ReplicasDiffer(UserError):
    """Ranks that should hold the same weights do not: the machine or a reduction is at fault, and the run with it."""

    exit_code = exit_codes.DRIFTED


def read_text(path: str | Path, named_by: str) -> str:
    """The text of a file that somebody named.

    Args:
        path: of the file.
        named_by: what stands before it in a message, such as "--recipe ".

    Raises:
        UserError: it cannot be read, or is no text.
    """
    try:
        return Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror or error if isinstance(error, OSError) else "not a text file: it is not UTF-8"
        raise UserError(f"{named_by}{path}: {reason}") from None
