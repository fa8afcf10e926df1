"""Times, intervals, steps, memory and values as people write them: 90s; 500 or epoch; 10:13; 8GiB; KEY=VALUE."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.filesize import decimal

from ds_vit.config.flag import SECONDS, STEPS
from ds_vit.fault_tolerance.errors import UserError

_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

_BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

# Less than this in a number without a unit is a unit that was left out.
_LEAST_SECONDS, _LEAST_BYTES = 60, 10**6


def parse_seconds(text: str, flag: str) -> float:
    """`"90"`, `"90s"`, `"15m"`, `"2h"` or `"1d"` in seconds; below 60 only with a unit.

    Raises:
        UserError: names the flag and what it takes.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", str(text).strip())
    if match is None:
        raise UserError(f"{flag} {text}: write a number of seconds, or 90s, 15m, 2h, 1d")
    seconds = float(match[1]) * _SECONDS[match[2]]
    if not seconds or not SECONDS.holds(seconds):
        raise UserError(f"{flag} {text}: a time must be above 0 and at most {SECONDS.high:,} seconds")
    if not match[2] and seconds < _LEAST_SECONDS:
        raise UserError(f"{flag} {text} means {text} seconds; write {text}h, {text}m or {text}s")
    return seconds


def parse_steps(text: str, flag: str) -> range:
    """`"10:13"` → the steps 10, 11 and 12, counted from 1; "" → none.

    Raises:
        UserError: names the flag and what it takes.
    """
    if not text:
        return range(0)
    first, colon, end = text.partition(":")
    if not colon or not first.isdigit() or not end.isdigit() or not 1 <= int(first) < int(end):
        raise UserError(f"{flag} {text}: write the first step and the one behind the last, such as 10:13 for 10 to 12")
    return range(int(first), int(end))


@dataclass(frozen=True)
class Interval:
    """Every so many optimizer steps, seconds or epochs; one of them at most is not 0."""

    steps: int = 0
    seconds: float = 0.0
    epochs: int = 0

    @classmethod
    def parse(cls, text: str, flag: str) -> Interval:
        """`"500"` (steps), `"30m"` (a time with its unit), `"epoch"` for the end of each, `"0"` for never.

        Raises:
            UserError: names the flag and what it takes.
        """
        text = str(text).strip()
        if text.isdecimal():
            if len(text) > len(str(STEPS.high)) or not STEPS.holds(int(text)):
                raise UserError(f"{flag} {STEPS.words} steps, not {text}; 0 is never")
            return cls(steps=int(text))
        if text == "epoch":
            return cls(epochs=1)
        if not text[-1:].isalpha():
            raise UserError(f"{flag} {text}: write a number of optimizer steps, a time such as 90s, 15m, 2h, or epoch")
        return cls(seconds=parse_seconds(text, flag))

    def __bool__(self) -> bool:
        return bool(self.steps or self.seconds or self.epochs)

    def __str__(self) -> str:
        if self.epochs:
            return "at each epoch's end"
        return f"every {self.steps} steps" if self.steps else f"every {self.seconds:g} s"


def parse_bytes(text: str, flag: str) -> int:
    """`"8GiB"`, `"500 MB"`, `"1.5g"` or `"1000000"` in bytes; below 1,000,000 only with a unit.

    Raises:
        UserError: names the flag and what it takes.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", str(text).strip().lower())
    found = float(match[1]) * _BYTES[match[2] or ""] if match else 0
    if not 0.5 < found <= 2**60:
        raise UserError(f"{flag} {text}: write a number of bytes above 0, at most 2^60, or 500MB, 8GB, 8GiB")
    if match is not None and text.strip().isdecimal() and found < _LEAST_BYTES:
        raise UserError(f"{flag} {text} means {text} bytes; write {text}GB, {text}MB or {text}B")
    return round(found)


def parse_set(pairs: Sequence[str], flag: str = "--set") -> dict[str, Any]:
    """`["optimizer.type=SGD", "optimizer.params.lr=0.1"]` → `{"optimizer.type": "SGD", "optimizer.params.lr": 0.1}`.

    A value is read as JSON, else as a word: `true`, `1e-3` and `[0.9,0.95]` have the types that they have in a file.
    The last value of a key wins.

    Raises:
        UserError: a piece without `=`, or a key with an empty part.
    """
    out: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals or not all(key.split(".")):
            raise UserError(f"{flag} takes KEY.PATH=VALUE, such as zero_optimization.stage=2, not {pair!r}")
        try:
            out[key] = json.loads(text)
        except ValueError:
            out[key] = text
    return out


def parse_literal(text: str) -> Any:
    """A Python literal, else the text itself: `"4"` → 4, `"gelu"` → `"gelu"`."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def in_words(num_bytes: float) -> str:
    """1234567 → "1.2 MB"."""
    return decimal(round(num_bytes))
