"""Environment files: read them with their comments, write the `.deepspeed_env` that DeepSpeed can parse.

    python -m ds_vit.launching.environment launch/infiniband.env > .deepspeed_env

DeepSpeed 0.19 splits every line of `.deepspeed_env` at its first `=` (a comment or a blank line stops it), strips the
value, puts double quotes around it where it holds anything unusual, and gives `export NAME=VALUE;` to the remote shell.
Nothing inside the quotes is escaped, so that is done here.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ds_vit.fault_tolerance.errors import UserError, read_text

_FORWARDED = """
    NCCL_ GLOO_ UCX_ FI_ SHARP_ MV2_ TORCH_ PYTORCH_ DS_ DEEPSPEED_ OMP_ MKL_ HF_ MLFLOW PYTHON LD_LIBRARY_PATH
"""
FORWARDED = tuple(_FORWARDED.split())
"""Beginnings of the names of variables that go from the launching machine to every host."""

_KEPT_HERE = ("DS_ENV_FILE",)
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_PLAIN = re.compile(r"[\w@%+=:,./-]*", re.ASCII)  # what DeepSpeed does not put quotes around (multinode_runner.py)


def parse(text: str, path: str = "environment file") -> dict[str, str]:
    """Read `NAME=VALUE` lines; lines of `#` and blank lines are left out, `export ` before a name too.

    A value is taken as it stands; one pair of quotes around all of it is removed. Nothing is expanded.

    Raises:
        UserError: a line of another form, or a name twice; with the line's number.
    """
    variables: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
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


def render(variables: Mapping[str, str]) -> str:
    """The text of a `.deepspeed_env` after which a shell on every host has exactly these values.

    Raises:
        UserError: a value with a line break, or with blanks at its ends: DeepSpeed would lose them.
    """
    lines = []
    for name, value in variables.items():
        if not _NAME.fullmatch(name):
            raise UserError(f"{name!r} is not the name of a variable")
        if value != value.strip() or len(value.splitlines()) > 1:
            raise UserError(f"{name}={value!r}: DeepSpeed cannot carry a line break or blanks at the ends of a value")
        if not _PLAIN.fullmatch(value):
            value = re.sub(r'([\\"$`])', r"\\\1", value)
        lines.append(f"{name}={value}\n")
    return "".join(lines)


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


def main(argv: Sequence[str] | None = None) -> int:
    """Print FILE as a `.deepspeed_env`; 2 where it cannot be one, with one line that says why."""
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1:
        print("usage: python -m ds_vit.launching.environment FILE > .deepspeed_env", file=sys.stderr)
        return 2
    try:
        sys.stdout.write(render(read(arguments[0])))
    except UserError as error:
        print(f"environment: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
