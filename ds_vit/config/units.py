"""Readers of values as people write them: times (90s), intervals (500, epoch), steps (10:13), memory (8GiB), sizes of
images (128:0,224:0.8) and KEY=VALUE.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.filesize import decimal

from ds_vit.fault_tolerance.errors import UserError

MOST_STEPS, MOST_SECONDS, MOST_PIXELS = 10**9, 10**8, 2**14
"""Larger numbers are errors."""
_SECONDS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}

_BYTES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}

# A smaller number without a unit is rejected: its unit was probably left out.
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
    if not 0 < seconds <= MOST_SECONDS:
        raise UserError(f"{flag} {text}: a time must be above 0 and at most {MOST_SECONDS:,} seconds")
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
            if len(text) > len(str(MOST_STEPS)) or int(text) > MOST_STEPS:
                raise UserError(f"{flag} must be at least 0 and at most {MOST_STEPS:,} steps, not {text}; 0 is never")
            return cls(steps=int(text))
        if text == "epoch":
            return cls(epochs=1)
        if not re.fullmatch(r"\d+(?:\.\d+)?[smhd]", text):
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
        out.pop(key, None)  # a block replaces what was set in an earlier one
        try:
            out[key] = json.loads(text)
        except ValueError:
            out[key] = text
    return out


def all_sizes(schedule: str, drawn: Sequence[int]) -> tuple[str, list[int]]:
    """The flag that has several sizes of images, and its sizes, the last the largest; none where neither is given.

    Raises:
        UserError: as `parse_schedule`.
    """
    if schedule:
        return "--img-size-schedule", [size for size, _ in parse_schedule(schedule)]
    return "--train-img-sizes", sorted({*drawn})


def parse_schedule(text: str, flag: str = "--img-size-schedule") -> tuple[tuple[int, float], ...]:
    """`128:0,160:0.4,224:0.8` → ((128, 0.0), (160, 0.4), (224, 0.8)): a side, and from which share of the run on.

    Raises:
        UserError: another form, a share that does not grow from 0 on, or a size larger than the last.
    """
    try:
        pairs = [part.split(":") for part in text.split(",")]
        parts = tuple((int(size), float(share)) for size, share in pairs)
    except ValueError:
        raise UserError(f"{flag} takes SIZE:SHARE,… such as 128:0,160:0.4,224:0.8, not {text!r}") from None
    shares = [share for _, share in parts]
    if shares[0] != 0 or not all(0 <= share < 1 for share in shares) or sorted({*shares}) != shares:
        raise UserError(f"{flag} {text}: the shares of the run must begin with 0 and grow, all below 1")
    sizes = [size for size, _ in parts]
    if not all(1 <= size <= MOST_PIXELS for size in sizes):
        raise UserError(f"{flag} {text}: a size must be at least 1 and at most {MOST_PIXELS:,} pixels")
    if max(sizes) != sizes[-1]:
        raise UserError(f"{flag} {text}: the last size is the model's own: no other may be larger")
    return parts


def parse_kwargs(pairs: str | Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """`["patch_size=4", "act_layer=gelu"]` → `{"patch_size": 4, "act_layer": "gelu"}`, as timm's --model-kwargs.

    true and false are booleans in any case; timm reads "false" as a true string.

    Raises:
        UserError: a piece without `=`.
    """
    if isinstance(pairs, Mapping):
        return dict(pairs)
    out: dict[str, Any] = {}
    for pair in pairs if isinstance(pairs, (list, tuple)) else [pairs]:
        key, equals, text = str(pair).partition("=")
        if not equals or not key:
            raise UserError(f"--model-kwargs takes key=value pieces, not {pair!r}")
        out[key.replace("-", "_")] = parse_literal(text.title() if text.lower() in ("true", "false") else text)
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
