"""Give a new environment what ds-vit needs, as links to the files that are installed here: seconds, and no gigabytes.

    python tests/support/linked_packages.py VENV

What ds-vit does not declare, and no package that it declares needs, is not there.
"""

from __future__ import annotations

import os
import shutil
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name


def needed() -> list[metadata.Distribution]:
    """The distributions of ds-vit's dependencies and of theirs, without anything optional that is not asked for."""
    seen: set[tuple[str, str]] = set()
    todo = [("ds-vit", "")]
    while todo:
        name, extra = todo.pop()
        if (name, extra) in seen:
            continue
        seen.add((name, extra))
        for text in metadata.distribution(name).requires or []:
            requirement = Requirement(text)
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                found = canonicalize_name(requirement.name)
                todo += [(found, asked) for asked in {"", *requirement.extras}]
    return [metadata.distribution(name) for name in sorted({name for name, _ in seen} - {"ds-vit"})]


def link(distribution: metadata.Distribution, venv: Path) -> None:
    """A distribution's files at the same places below `venv`; its programs name that environment's Python.

    Bytecode too: it is valid for a link, which has its file's time, and no process compiles torch and DeepSpeed again.
    """
    prefix = Path(sys.prefix)
    for file in distribution.files or []:
        source = Path(os.path.normpath(distribution.locate_file(file)))
        if not source.is_relative_to(prefix) or not source.is_file():
            continue
        target = venv / source.relative_to(prefix)
        if target.exists():
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.parent == venv / "bin":
            target.write_bytes(source.read_bytes().replace(os.fsencode(prefix), os.fsencode(venv)))
            shutil.copymode(source, target)
            continue
        try:
            os.link(source, target)
        except OSError:  # another file system
            target.symlink_to(source)


if __name__ == "__main__":
    for distribution in needed():
        link(distribution, Path(sys.argv[1]))
