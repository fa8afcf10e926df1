"""Environment files, and the variables that go from the launching machine to every host.

`.deepspeed_env` is DeepSpeed's; unlike DeepSpeed 0.19, comments and blank lines in it are allowed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from ds_vit.fault_tolerance.errors import UserError, read_text
from ds_vit.launching.hosts import numbered_lines

_FORWARDED = """
    NCCL_ GLOO_ UCX_ FI_ SHARP_ MV2_ TORCH_ PYTORCH_ DS_ DEEPSPEED_ OMP_ MKL_ HF_ MLFLOW PYTHON LD_LIBRARY_PATH
"""
FORWARDED = tuple(_FORWARDED.split())
"""Beginnings of the names of variables that go from the launching machine to every host."""

_KEPT_HERE = ("DS_ENV_FILE",)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def parse(text: str, path: str = "environment file") -> dict[str, str]:
    """Read `NAME=VALUE` lines; lines of `#` and blank lines are left out, `export ` before a name too.

    A value is taken as it stands; one pair of quotes around all of it is removed. Nothing is expanded.

    Raises:
        UserError: a line of another form, or a name twice; with the line's number.
    """
    variables: dict[str, str] = {}
    for number, line in numbered_lines(text):
        name, equals, value = line.removeprefix("export ").partition("=")
        name, value = name.strip(), value.strip()
        if not equals or not _NAME.fullmatch(name):
            raise UserError(f"{path}, line {number}: {line!r} is not of the form NAME=VALUE")
        if name in variables:
            raise UserError(f"{path}, line {number}: {name} is set twice; keep one line")
        if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        variables[name] = value
    return variables


def read(path: str | Path) -> dict[str, str]:
    """`parse` a file.

    Raises:
        UserError: the file cannot be read, or a line is not of its form.
    """
    return parse(read_text(path, "environment file "), str(path))


def forwarded(environ: Mapping[str, str]) -> dict[str, str]:
    """What of an environment goes to every host: the variables that steer communication, DeepSpeed and Python."""
    return {name: value for name, value in environ.items() if name.startswith(FORWARDED) and name not in _KEPT_HERE}


def collected(environ: Mapping[str, str], cwd: Path, files: Sequence[str | Path] = ()) -> dict[str, str]:
    """The variables for every host; later ones win: the environment, `.deepspeed_env` (home, then `cwd`), `files`.

    Raises:
        UserError: a file that cannot be read or is not of its form.
    """
    variables = forwarded(environ)
    usual = environ.get("DS_ENV_FILE", ".deepspeed_env")
    places = [Path(environ["HOME"]) / usual] if environ.get("HOME") else []
    for path in dict.fromkeys([*places, cwd / usual]):
        if path.is_file():
            variables |= read(path)
    for file in files:
        variables |= read(file)
    return variables
