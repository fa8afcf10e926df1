"""Amounts of memory as people write them: 8GiB, 500MB, 1e9; and as they read them: 8.6 GB."""

from __future__ import annotations

import re

from ds_vit.fault_tolerance.errors import UserError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(text: str, flag: str) -> int:
    """`"8GiB"`, `"500 MB"`, `"1.5g"` or `"1000000"` in bytes.

    Raises:
        UserError: names the flag and what it takes.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", str(text).strip().lower())
    if match is None or not (found := round(float(match[1]) * _UNITS[match[2] or ""])):
        raise UserError(f"{flag} {text}: write a number of bytes above 0, or 500MB, 8GB, 8GiB")
    return found


def in_words(num_bytes: float) -> str:
    """1234567 → "1.2 MB"."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.0f} B" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.1f} TB"
