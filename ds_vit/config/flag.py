"""One flag: a typed field of `RunConfig` with its help, its scope and the conditions under which it has an effect.

A condition is text, which the check and its message read: `"compile"` (it is on), `"sched=wsd"`, `"dataset=torch/*"`,
`"tp!=1"`, `"dataset=digits|glyphs"`, several joined by " or ". Where text cannot say it, it is a function of the
settings. Either may have the words of its message next to it.
"""

from __future__ import annotations

import enum
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from ds_vit.config.units import MOST_PIXELS, MOST_SECONDS, MOST_STEPS


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


SECTIONS = ("run", "task", "model", "data", "augmentation", "loss", "distillation", "optimizer", "schedule")
"""The groups of --help and of config.yaml, in their order."""
IDENTITY, FREE, NOTED, EVALUATION = Scope.IDENTITY, Scope.FREE, Scope.NOTED, Scope.EVALUATION
START = Scope.START | FREE
RECORDED = Scope.RECORDED | EVALUATION
WEIGHTS = Scope.WEIGHTS | RECORDED

Condition = str | tuple[str | Callable[[Any], Any], str]
"""Text as above; or text or a function, and the end of "--flag has no effect …"."""


@dataclass(frozen=True)
class Flag:
    """The metadata of one field.

    Attributes:
        text: its help.
        scope: see `Scope`; by default a resumed run keeps the value, and each reader of the run takes it.
        section: its group in --help and in config.yaml, of `SECTIONS`.
        needs: conditions that must all hold for it to have an effect.
        idle_if: conditions of which none may hold.
        excludes: condition on another flag that is an error with this one → why. Without a reason, the flag that is
            given replaces the other in a recipe.
        key: the dotted key of the DeepSpeed JSON that holds the same value.
        short: further spellings.
        neutral: values that switch nothing on, in addition to the default.
        const: the value of a flag that is written without one, and of a recipe's `true`.
        metavar: as argparse's.
    """

    text: str
    scope: Scope = WEIGHTS
    section: str = "task"
    needs: Sequence[Condition] = ()
    idle_if: Sequence[Condition] = ()
    excludes: Mapping[str, str] = field(default_factory=dict)
    key: str = ""
    short: Sequence[str] = ()
    neutral: Sequence[Any] = ()
    const: Any = None
    metavar: str | None = None

    def __post_init__(self) -> None:
        if self.section not in SECTIONS:
            raise ValueError(f"section {self.section!r} of a flag is none of {', '.join(SECTIONS)}")


def flag(default: Any, text: str, scope: Scope | None = None, **more: Any) -> Any:
    """A field that is also a flag.

    Args:
        default: its value if not given.
        text: its help.
        scope: see `Scope`; None for that of its class.
        more: further attributes of `Flag`; of conditions, one or a list.
    """
    own = {"text": text, **({} if scope is None else {"scope": scope}), **more}
    return Field(default, json_schema_extra=own)


def spelling(name: str) -> str:
    """A flag as it is written on the command line: `val_split` → `--val-split`."""
    # DeepSpeed's launchers and documentation write this one with an underscore.
    return "--" + (name if name == "deepspeed_config" else name.replace("_", "-"))


def texts_of(value: Any) -> list[str]:
    """A value, or each of several, as short as a person types it: 0.50 → "0.5", 1.0 → "1"."""
    items = value if isinstance(value, (list, tuple)) else [value]
    return [str(item).removesuffix(".0") if isinstance(item, float) else str(item) for item in items]


# ---- what a flag takes, from its annotation --------------------------------------------------------------------------


class Kind(NamedTuple):
    """One alternative of an annotation.

    Attributes:
        item: the type of a value, or of each of several.
        length: how many values: None for a single one, 0 for any number of them.
        words: the words that it takes; empty for all.
        bounds: "ge", "gt", "le", "lt" → the number.
    """

    item: type
    length: int | None
    words: tuple[str, ...]
    bounds: Mapping[str, float]

    @property
    def in_words(self) -> str:
        """For messages: "a whole number", "2 numbers"."""
        if self.words:
            return " or ".join(self.words)
        if self.item is bool:
            return "true or false"
        kind = {int: "whole number", float: "number", dict: "block"}.get(self.item, "word")
        return f"a {kind}" if self.length is None else f"{self.length or ''} {kind}s".strip()


def kinds_of(hint: Any, constraints: Sequence[Any] = ()) -> Iterator[Kind]:
    """The alternatives of an annotation: `Annotated[int, Field(ge=0)] | Literal["auto"]` has two."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        own = (one for item in arguments[1:] for one in getattr(item, "metadata", [item]))
        yield from kinds_of(arguments[0], (*constraints, *own))
    elif origin in (Union, UnionType):
        for one in arguments:
            yield from kinds_of(one, constraints)
    elif origin is tuple:
        for kind in kinds_of(arguments[0], constraints):
            yield kind._replace(length=0 if arguments[-1] is ... else len(arguments))
    elif origin is Literal:
        yield Kind(str, None, tuple(word for word in arguments if word), {})
    elif hint is not NoneType:
        bounds = [(name, getattr(one, name, None)) for one in constraints for name in ("ge", "gt", "le", "lt")]
        yield Kind(origin or hint, None, (), {name: bound for name, bound in bounds if bound is not None})


# ---- the base of all settings ----------------------------------------------------------------------------------------


class Settings(BaseModel):
    """Flags of one kind; what all of them share is said on the class: `class Loss(Settings, section="loss")`."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=(), defer_build=True
    )
    shared: ClassVar[Mapping[str, Any]] = {}
    """Attributes of `Flag` that the class's flags have in common."""

    def __init_subclass__(cls, **shared: Any) -> None:
        super().__init_subclass__()
        cls.shared = shared

    @classmethod
    @functools.cache
    def kinds(cls, name: str) -> tuple[Kind, ...]:
        """What a flag takes, from its annotation."""
        about = cls.model_fields[name]
        return tuple(kinds_of(about.annotation, about.metadata))

    @classmethod
    @functools.cache
    def flags(cls) -> Mapping[str, Flag]:
        """The flags of this class and its bases by their names in a recipe, in the order of --help."""
        found: dict[str, Flag] = {}
        for base in (one for one in cls.__mro__ if issubclass(one, Settings)):
            for name in inspect.get_annotations(base).keys() & cls.model_fields.keys():
                own: Any = cls.model_fields[name].json_schema_extra
                conditions: dict[str, Any] = {}
                for key in ("needs", "idle_if"):
                    common, more = base.shared.get(key, ""), own.get(key, [])
                    read = common if isinstance(common, str) else common[0]
                    is_exempt = not common or name in read.split(" or ")  # a flag that its class's condition reads
                    conditions[key] = [*([] if is_exempt else [common]), *(more if isinstance(more, list) else [more])]
                found[name] = Flag(**{**base.shared, **own, **conditions})
                if not base.__module__.startswith("ds_vit."):  # of a task from outside, which evaluation may need too
                    found[name] = replace(found[name], scope=found[name].scope | RECORDED)
        names = sorted(cls.model_fields, key=lambda name: SECTIONS.index(found[name].section))
        return {name: found[name] for name in names}

    @classmethod
    def names_with(cls, scope: Scope) -> tuple[str, ...]:
        """The recipe names of the flags that have this scope."""
        return tuple(name for name, meta in cls.flags().items() if scope in meta.scope)

    @classmethod
    def default_of(cls, name: str) -> Any:
        """The default of a flag, by its recipe name."""
        return cls.model_fields[name].get_default(call_default_factory=True)

    @classmethod
    def values_of(cls, name: str) -> str:
        """The values that a flag takes, for messages: "a whole number or auto", "one word or several"."""
        first, *others = cls.kinds(name)
        if [(kind.item, kind.length) for kind in others] == [(first.item, 0)]:
            return f"one {first.in_words.removeprefix('a ')} or several"
        return " or ".join(kind.in_words for kind in cls.kinds(name))

    @classmethod
    def range_of(cls, name: str) -> str:
        """As in "--epochs must be at least 1 and at most 1,000,000, not 0"; empty if the flag takes no numbers."""
        kind, *others = cls.kinds(name)
        words = {"ge": "at least", "gt": "above", "le": "at most", "lt": "below"}
        bounds = " and ".join(f"{words[limit]} {bound:,}" for limit, bound in kind.bounds.items())
        other = "".join(f"{one.in_words}, or " for one in others if one.words)
        return f"must be {other}{bounds}" if bounds else ""

    @field_validator("*", mode="before")
    @classmethod
    def _typed(cls, value: Any, info: ValidationInfo) -> Any:
        """A word of a command line, or a value of YAML or a program, with the type of its flag; None is the default.

        A value that has no such form is left to the checks of its type.
        """
        name = str(info.field_name)
        kinds, default = cls.kinds(name), cls.default_of(name)
        own: Any = cls.model_fields[name].json_schema_extra
        if value is None:
            return default
        if isinstance(value, bool) and own.get("const") is not None:
            return own["const"] if value else default
        if isinstance(value, bool) and "on" in kinds[0].words:
            return "on" if value else "off"  # what YAML makes of them without quotes
        if isinstance(value, Mapping) or kinds[0].item is dict:
            return dict(value) if isinstance(value, Mapping) else value
        if not isinstance(value, (list, tuple)):
            item = _convert(kinds[0].item, value)
            return item if kinds[0].length is None else (item,)
        if all(kind.length is None for kind in kinds):
            return value
        items = tuple(_convert(kinds[0].item, item) for item in value)
        return items if kinds[0].length is not None or len(items) > 1 else items[0] if items else default


def _convert(kind: type, value: Any) -> Any:
    if isinstance(value, (bool, list, tuple, Mapping)):
        return value
    try:
        if kind is str:
            return str(value)
        if kind is int and isinstance(value, (str, Integral)):
            return int(value)
        return float(value) if kind is float and isinstance(value, (str, Real)) else value
    except (ValueError, OverflowError):
        return value


def checked(words: str, holds: Callable[[Any], Any]) -> AfterValidator:
    """A further condition on a value: "--scale takes two numbers, the smaller first, not 1 0"."""

    def check(value: Any, info: ValidationInfo) -> Any:
        if value is not None and not holds(value):
            raise ValueError(f"{spelling(str(info.field_name))} {words}, not {' '.join(texts_of(value))}")
        return value

    return AfterValidator(check)


def read_by(read: Callable[[Any, str], Any], *, empty: bool = False) -> AfterValidator:
    """A value, or also an empty one, that this function reads; it receives the flag's spelling for its `UserError`."""

    def check(value: Any, info: ValidationInfo) -> Any:
        if value or empty:
            read(value, spelling(str(info.field_name)))
        return value

    return AfterValidator(check)


# ---- types that several flags have -----------------------------------------------------------------------------------

Probability = Annotated[float, Field(ge=0, le=1)]
Below1 = Annotated[float, Field(ge=0, lt=1)]
UpTo1 = Annotated[float, Field(gt=0, le=1)]
Share = Annotated[float, Field(gt=0, lt=1)]
Steps = Annotated[int, Field(ge=0, le=MOST_STEPS)]
StepsFrom1 = Annotated[int, Field(ge=1, le=MOST_STEPS)]
Epochs = Annotated[int, Field(ge=0, le=10**6)]
Images = Annotated[int, Field(ge=1, le=10**6)]
Pixels = Annotated[int, Field(ge=1, le=MOST_PIXELS)]
Rate = Annotated[float, Field(ge=0, le=10**9)]
Seconds = Annotated[float, Field(ge=0, le=MOST_SECONDS)]
ASCENDING = checked("takes two numbers, the smaller first", lambda pair: pair[0] <= pair[1])
Width = Annotated[int, Field(ge=1, le=2**16)]
Blocks = Annotated[int, Field(ge=1, le=1000)]
Weight = Annotated[float, Field(ge=0, le=10**6)]
