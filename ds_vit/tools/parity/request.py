"""What is to be compared: the layouts as people write them, and the command line of launch/parity.py."""

from __future__ import annotations

import argparse
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from ds_vit import config as flags
from ds_vit.fault_tolerance.errors import UserError

DESCRIPTION = (
    "Train a few steps in each layout, and compare loss, gradient norm and weights with one reference. "
    "Takes the flags of train.py too."
)

_WORD = re.compile(r"(pp|tp|zero)(\d+)")
_LAYOUT_NAMES = """
    sequence_parallel class_parallel pp_partition grad_checkpointing drop_path_compute batch_size workers
"""
_LAYOUT_FLAGS = tuple(_LAYOUT_NAMES.split())


@dataclass(frozen=True)
class Cut:
    """A layout as people write it: "pp2 tp2 --sequence-parallel", "zero3", "zero1 fp32".

    Attributes:
        text: as written.
        flags: flags of train.py, by their recipe names, that differ in this layout.
        stage: ZeRO stage, or None for the JSON's.
        fp32: whether the JSON's 16-bit type is switched off.
    """

    text: str
    flags: Mapping[str, Any]
    stage: int | None
    fp32: bool


@dataclass(frozen=True)
class Request:
    """What is asked for on the command line.

    Attributes:
        values: flags of train.py that were written down, by their recipe names.
        layouts: what to compare; None for the default list.
        reference: what to compare with; None for the default.
        steps: optimizer steps in each layout.
        rtol: largest relative deviation that passes; None for that of the number format.
        own_optimizer: train with the JSON's optimizer, schedule and clipping instead of the probe.
    """

    values: Mapping[str, Any]
    layouts: tuple[Cut, ...] | None
    reference: Cut | None
    steps: int
    rtol: float | None
    own_optimizer: bool


def parse_cut(text: str) -> Cut:
    """Read one layout.

    Raises:
        UserError: a word that is none of ppN, tpN, zeroN, fp32 and the flags that a layout may have.
    """
    values: dict[str, Any] = {}
    stage, fp32, rest = None, False, []
    for word in shlex.split(text):
        match = _WORD.fullmatch(word)
        if match and match[1] == "zero":
            stage = int(match[2])
        elif match:
            values[match[1]] = int(match[2])
        elif word == "fp32":
            fp32 = True
        else:
            rest.append(word)
    try:
        given, unknown = flags.build_parser().parse_known_args(rest)
    except UserError as error:
        raise UserError(f"layout {text!r}: {error}") from None
    foreign = [*unknown, *(flags.spelling(name) for name in vars(given) if name not in _LAYOUT_FLAGS)]
    if foreign or not text.strip():
        hint = " (dp follows from the number of ranks)" if foreign and foreign[0].startswith("dp") else ""
        raise UserError(
            f"layout {text!r}: {foreign[0] if foreign else 'nothing'} is not part of a layout{hint}; it is made of "
            f"ppN, tpN, zeroN, fp32, {', '.join(map(flags.spelling, _LAYOUT_FLAGS))}"
        )
    return Cut(text, {**values, **vars(given)}, stage, fp32)


def parse_layouts(text: str) -> tuple[Cut, ...]:
    """Read a list of layouts, commas between them; a comma before a digit is part of `--pp-partition 0,2,7`.

    Raises:
        UserError: as `parse_cut`, or a layout stands twice.
    """
    cuts = tuple(parse_cut(piece.strip()) for piece in re.split(r",(?!\s*\d)", text))
    for i, cut in enumerate(cuts):
        if cut.text in [other.text for other in cuts[:i]]:
            raise UserError(f"layout {cut.text!r} stands twice; drop one")
    return cuts


def default_layouts(world_size: int, *, stage: int) -> tuple[Cut, ...]:
    """What is compared by default: ZeRO stages, then degrees of 2, 3, 4 and 8 that divide the world.

    Args:
        world_size: number of ranks.
        stage: the JSON's ZeRO stage; a pipeline gets stage 1 where that does not go with one.
    """
    degrees = [d for d in (2, 3, 4, 8) if world_size % d == 0]
    pipeline = "" if stage <= 1 else " zero1"
    texts = [*(f"zero{s}" for s in range(4)), "--grad-checkpointing"]
    texts += [f"tp{d}" for d in degrees]
    texts += [f"tp{d} --sequence-parallel" for d in degrees[:1]]
    texts += [f"pp{d}{pipeline}" for d in degrees]
    if world_size % 4 == 0:
        texts += [f"pp2 tp2{pipeline}", f"pp2 tp2{pipeline} --sequence-parallel"]
    return tuple(map(parse_cut, texts))


def parse(argv: Sequence[str] | None = None) -> Request:
    """Read the command line.

    Raises:
        UserError: as `config.parse`, a layout that is none, or a flag that the layouts decide.
    """
    parser = _Parser(prog="parity.py", allow_abbrev=False, description=DESCRIPTION)
    parser.add_argument("--layouts", metavar="LIST", help='"pp2 tp2, tp2 --sequence-parallel, pp2, zero3"')
    parser.add_argument("--reference", metavar="LAYOUT", help="what they are compared with [zero1 fp32; fp16: zero1]")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps in each [5]")
    parser.add_argument("--rtol", type=float, help="largest relative deviation that passes [fp32: 1e-5; bf16: 3e-2]")
    parser.add_argument("--own-optimizer", action="store_true", help="the JSON's optimizer instead of clipped SGD")
    own, rest = parser.parse_known_args(argv)
    if own.steps < 1:
        raise UserError(f"--steps must be at least 1, not {own.steps}")
    if own.rtol is not None and not 0 <= own.rtol < math.inf:
        raise UserError(f"--rtol must be a number >= 0, not {own.rtol}")
    config, explicit = flags.parse(rest)
    values = {name: getattr(config, name) for name in explicit}
    for name in ("pp", "tp", "sequence_parallel", "class_parallel", "pp_partition"):
        if name in values:
            raise UserError(f"{flags.spelling(name)} is part of a layout here: write it in --layouts")
    for name, instead in (("max_steps", "--steps"), ("eval_only", "train.py"), ("check_replicas", "train.py")):
        if values.get(name):
            raise UserError(f"{flags.spelling(name)} has no place in parity.py; use {instead}")
    return Request(
        values=values,
        layouts=parse_layouts(own.layouts) if own.layouts is not None else None,
        reference=parse_cut(own.reference) if own.reference is not None else None,
        steps=own.steps,
        rtol=own.rtol,
        own_optimizer=own.own_optimizer,
    )


class _Parser(argparse.ArgumentParser):
    """Raises what argparse would print."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message)
