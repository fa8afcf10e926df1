"""One flag: a dataclass field that says how it is written, what it is for and which values it takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ds_vit.fault_tolerance.errors import UserError


class Rule(NamedTuple):
    """Which values a flag takes: in words, as in "--epochs must be at least 1, not 0", and as a test."""

    words: str
    holds: Callable[[Any], bool]


AT_LEAST_0 = Rule("must be at least 0", lambda x: x >= 0)
AT_LEAST_1 = Rule("must be at least 1", lambda x: x >= 1)
FROM_0_BELOW_1 = Rule("must be at least 0 and below 1", lambda x: 0 <= x < 1)
ABOVE_0_TO_1 = Rule("must be above 0 and at most 1", lambda x: 0 < x <= 1)
NOT_NEGATIVE = Rule("must be a number >= 0", lambda x: 0 <= x < float("inf"))
PROBABILITY = Rule("is a probability between 0 and 1", lambda x: 0 <= x <= 1)
RANGE = Rule("takes two positive numbers, the smaller first", lambda pair: len(pair) == 2 and 0 < pair[0] <= pair[1])


def flag(
    default: Any,
    section: str,
    text: str,
    *,
    rule: Rule | None = None,
    short: Sequence[str] = (),
    neutral: Sequence[Any] = (),
    nargs: int | str | None = None,
    choices: Sequence[str] | None = None,
    spelling: str | None = None,
    metavar: str | None = None,
    const: Any = None,
) -> Any:
    """A field that is also a flag; its default and `neutral` values may be written even where they do nothing.

    `const` is the value of a flag that is written without one, and of a recipe's `true`.
    """
    meta = {
        "section": section,
        "help": text,
        "rule": rule,
        "short": tuple(short),
        "neutral": tuple(neutral),
        "nargs": nargs,
        "choices": choices,
        "spelling": spelling,
        "metavar": metavar,
        "const": const,
    }
    if isinstance(default, (dict, list)):
        return dataclasses.field(default_factory=lambda: default.copy(), metadata=meta)
    return dataclasses.field(default=default, metadata=meta)


def spelling_of(field: dataclasses.Field) -> str:
    """How a flag is written on the command line: `drop_path` → `--drop-path`."""
    return field.metadata["spelling"] or "--" + field.name.replace("_", "-")


def check_values(settings: Any) -> None:
    """Hold each field of a dataclass of flags to its rule and its choices; None and the default always pass.

    Raises:
        UserError: names the flag, what it takes and what it got.
    """
    for field in dataclasses.fields(settings):
        rule, choices, value = field.metadata["rule"], field.metadata["choices"], getattr(settings, field.name)
        if value is None or value == field.default:
            continue
        if choices and value not in choices:
            raise UserError(f"{spelling_of(field)} {value} is none of {', '.join(choices)}")
        if rule and not rule.holds(value):
            shown = " ".join(map(str, value)) if isinstance(value, (tuple, list)) else value
            raise UserError(f"{spelling_of(field)} {rule.words}, not {shown}")
