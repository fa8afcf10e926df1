"""The JSON files and recipes that come with ds_vit, found from any folder: `ds_configs/zero1_bf16.json` is enough."""

from __future__ import annotations

from pathlib import Path

import ds_vit

_PACKAGE = Path(ds_vit.__file__).resolve().parent
_ROOTS = (_PACKAGE / "shipped", _PACKAGE.parent)
"""Of a wheel (setup.py puts them there), and of a clone."""
_FOLDERS = ("ds_configs", "launch")


def or_shipped(path: str) -> str:
    """The path as it is, where such a file lies or none is shipped; else that of the file that comes with ds_vit.

    Args:
        path: as a person wrote it.
    """
    if not path or Path(path).exists() or Path(path).parts[:1] not in [(name,) for name in _FOLDERS]:
        return path
    return next((str(root / path) for root in _ROOTS if (root / path).is_file()), path)
