"""One flag: a dataclass field with its spelling, help, valid values and scope."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any, NamedTuple

from ds_vit.fault_tolerance.errors import UserError, did_you_mean


class Scope(enum.Flag):
    """What a flag is part of. Without FREE and NOTED it belongs to the run: a resumed run must keep its value."""

    IDENTITY = 0
    FREE = enum.auto()
    """It may change when a run is resumed."""
    NOTED = enum.auto()
    """It may change, and a line says so: the curve does not depend on it, or what it resolves to is compared instead
    (data, teacher, trained parameters, batch, learning rates)."""
    START = enum.auto()
    """It belongs to one start of the run and is not written to config.yaml."""
    EVALUATION = enum.auto()
    """Evaluation reads it; --eval-only rejects the other flags."""
    RECORDED = enum.auto()
    """`ds-vit eval` takes it from the run's config.yaml."""
    WEIGHTS = enum.auto()
    """Readers of trained weights (predict, embed, export) take it from the run's config.yaml."""


FREE, NOTED, START, EVALUATION = Scope.FREE, Scope.NOTED, Scope.START | Scope.FREE, Scope.EVALUATION
RECORDED = Scope.RECORDED | EVALUATION
WEIGHTS = Scope.WEIGHTS | RECORDED


class Rule(NamedTuple):
    """A condition on a flag's value: its words, as in "--epochs must be at least 1, not 0", and its test."""

    words: str
    holds: Callable[[Any], bool]


class Range(NamedTuple):
    """The numbers that a flag takes: finite ones between two bounds, and optionally one word."""

    low: float
    high: float
    above: bool = False
    below: bool = False
    word: str = ""

    @property
    def words(self) -> str:
        """As in "--epochs must be at least 1 and at most 1,000,000, not 0"."""
        low = f"{'above' if self.above else 'at least'} {_format(self.low)}"
        high = f"{'below' if self.below else 'at most'} {_format(self.high)}"
        return f"must be {self.word and f'{self.word}, or '}{low} and {high}"

    def holds(self, value: Any) -> bool:
        """Whether a number, or each of several, lies within the bounds."""
        if isinstance(value, (tuple, list)):
            return all(self.holds(item) for item in value)
        is_number: bool = isinstance(value, Real) and not isinstance(value, bool)
        if not is_number:
            return bool(self.word) and value == self.word
        over = self.low < value if self.above else self.low <= value
        return over and (value < self.high if self.below else value <= self.high)


def _format(number: float) -> str:
    return f"{number:,}" if isinstance(number, int) else f"{number:g}"


PROBABILITY = Range(0, 1)
FROM_0_BELOW_1 = Range(0, 1, below=True)
ABOVE_0_TO_1 = Range(0, 1, above=True)
SHARE = Range(0, 1, above=True, below=True)
STEPS = Range(0, 10**9)
STEPS_FROM_1 = Range(1, 10**9)
EPOCHS = Range(0, 10**6)
EPOCHS_FROM_1 = Range(1, 10**6)
IMAGES = Range(1, 10**6)
PIXELS = Range(1, 2**14)
RATE = Range(0, 10**9)
SECONDS = Range(0, 10**8)
_ASCENDING = Rule("takes two numbers, the smaller first", lambda pair: len(pair) == 2 and pair[0] <= pair[1])
PAIR: Mapping[str, Any] = {"rule": _ASCENDING, "nargs": 2}
"""Of a flag that takes two numbers, the smaller first."""


def flag(
    default: Any,
    text: str,
    scope: Scope = Scope.IDENTITY,
    *,
    section: str = "",
    span: Range | None = None,
    rule: Rule | None = None,
    read: Callable[[str, str], Any] | None = None,
    short: Sequence[str] = (),
    neutral: Sequence[Any] = (),
    nargs: int | str | None = None,
    choices: Sequence[str] | None = None,
    metavar: str | None = None,
    const: Any = None,
    task: str = "",
    key: str = "",
) -> Any:
    """A dataclass field that is also a flag; its default and `neutral` values are valid even where it has no effect.

    Args:
        default: its value if not given; it need not lie in `span` nor follow `rule`.
        text: its help.
        scope: see `Scope`.
        section: its group in --help, if not the one of its class.
        span: the numbers it takes, each of several; every flag of numbers has one.
        rule: a further condition.
        read: reads its text; it receives the flag's spelling too, for the `UserError` of an invalid text.
        short: further spellings.
        neutral: values that ask for nothing.
        nargs: as argparse's.
        choices: its valid words.
        metavar: as argparse's.
        const: the value of a flag that is written without one, and of a recipe's `true`.
        task: the tasks that it belongs to, separated by spaces; empty for all.
        key: the dotted key of the DeepSpeed JSON that holds the same value.
    """
    meta: dict[str, Any] = {"help": text, "scope": scope, "section": section, "span": span, "rule": rule, "read": read}
    meta |= {"short": tuple(short), "neutral": tuple(neutral), "nargs": nargs, "choices": choices}
    meta |= {"metavar": metavar, "const": const, "task": task, "key": key}
    if isinstance(default, (dict, list)):
        return dataclasses.field(default_factory=lambda: default.copy(), metadata=meta)
    return dataclasses.field(default=default, metadata=meta)


def flag_of(task: str, default: Any, text: str, scope: Scope = Scope.IDENTITY, **more: Any) -> Any:
    """`flag` of some tasks only, which its help begins with."""
    return flag(default, f"--task {', '.join(task.split())}: {text}", scope, task=task, **more)


def spelling_of(field: dataclasses.Field) -> str:
    """A flag as it is written on the command line: `drop_path` → `--drop-path`."""
    # DeepSpeed's launchers and documentation write this one with an underscore.
    return "--" + (field.name if field.name == "deepspeed_config" else field.name.replace("_", "-"))


def problem_of(field: dataclasses.Field, value: Any) -> str:
    """Why a flag rejects a value of its type, for people; empty if it is valid, as None and the default are."""
    if value is None or value == field.default:
        return ""
    choices = field.metadata["choices"]
    if choices and value not in choices:
        near = did_you_mean(str(value), choices)
        return f"{spelling_of(field)} {value} is none of {', '.join(choices)}{near}"
    for rule in (field.metadata["span"], field.metadata["rule"]):
        if rule and not rule.holds(value):
            items = value if isinstance(value, (tuple, list)) else [value]
            shown = " ".join(f"{item:g}" if isinstance(item, float) else str(item) for item in items)
            return f"{spelling_of(field)} {rule.words}, not {shown}"
    try:
        if field.metadata["read"]:
            field.metadata["read"](value, spelling_of(field))
    except UserError as error:
        return str(error)
    return ""
