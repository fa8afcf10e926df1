"""The commands of README and docs, and what tests/doc_commands.yaml says of each."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import yaml
from project import ROOT

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    ROOT / "ds_configs/README.md",
]
ROWS = yaml.safe_load((ROOT / "tests" / "doc_commands.yaml").read_text())
ANSWERS = ("quick", "slow", "by", "hand", "never")
_PROGRAM = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?(?:deepspeed|torchrun|python|bash|ds-vit|mpirun|srun|tensorboard) .*"
)
_ASSIGNMENT = re.compile(r'\w+="[^"]*"$')


class Command(NamedTuple):
    """One command of a page.

    Attributes:
        page: its path below the project's root.
        text: on one line, without what a # says behind it.
        assignments: the shell's variables that stand above it on the page.
        words: of its row.
        how: one of `ANSWERS`.
        small: what the row says there.
    """

    page: str
    text: str
    assignments: tuple[str, ...]
    words: str = ""
    how: str = ""
    small: str = ""


def commands(page: Path) -> list[Command]:
    """The commands of a page: lines of an indented or a fenced block."""
    name = str(page.relative_to(ROOT)) if page.is_relative_to(ROOT) else page.name
    found, assignments, fenced = [], [], False
    for line in re.sub(r"\\\n\s*", " ", page.read_text()).splitlines():
        if line.startswith("```"):
            fenced = not fenced
        if not (fenced or line.startswith("    ")):
            continue
        text = re.split(r"\s+#\s|\s{6,}", line.strip())[0].strip()
        if _ASSIGNMENT.match(text):
            assignments.append(text)
        elif _PROGRAM.fullmatch(text) and ": error: " not in text:
            found.append(Command(name, text, tuple(assignments)))
    return found


def with_rows(found: list[Command], rows: list[Mapping] | Mapping) -> Iterator[Command]:
    """The commands of a page with what their rows say.

    Raises:
        ValueError: another number of rows than of commands, or a row that speaks of another command.
    """
    if isinstance(rows, Mapping):
        rows = [{"": rows}] * len(found)
    for command, row in zip(found, rows, strict=True):
        [(words, answer)] = row.items()
        [(how, small)] = answer.items()
        if words not in command.text or how not in ANSWERS:
            raise ValueError(f"{command.page}: {row} is the row of: {command.text}")
        yield command._replace(words=words, how=how, small=small)


COMMANDS = [one for page in PAGES for one in with_rows(commands(page), ROWS.get(str(page.relative_to(ROOT)), []))]
