"""`ds-vit bench ladder`: what each published step towards a fast ViT brings here, added one after the other.

The rungs are those of Meta AI's account of faster ViT training (PyCls, 2022: automatic mixed precision, sharding, an
average-pooled classifier, a larger batch), with compiled blocks behind them. Its multi-tensor optimizer is no rung:
ours always are.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ds_vit.fault_tolerance.errors import UserError
from ds_vit.launching.process import discover
from ds_vit.tools.measure import (
    Candidate,
    Ratio,
    Report,
    Side,
    machine,
    make_ours,
    measure,
    plan_of,
    ranks_met,
    ratio,
    versions,
)


@dataclass(frozen=True)
class Rung:
    """A step of the ladder.

    Attributes:
        name: what it adds.
        words: flags of training that do it, beside those of the rungs before.
        larger_batch: how many times the images of a micro-batch.
    """

    name: str
    words: tuple[str, ...] = ()
    larger_batch: int = 1


RUNGS = (
    Rung("fp32, ZeRO-0", ("--set", "zero_optimization.stage=0")),
    Rung(
        "bf16 by autocast",
        ("--set", "torch_autocast.enabled=true", "--set", "torch_autocast.dtype=bfloat16"),
    ),
    Rung("ZeRO-1", ("--set", "zero_optimization.stage=1")),
    Rung("average-pooled classifier", ("--model-kwargs", "class_token=false", "global_pool=avg")),
    Rung("twice the batch", larger_batch=2),
    Rung("compiled blocks", ("--compile",)),
)


@dataclass(frozen=True)
class Ladder(Report):
    """The rungs as they were measured: name → side, and name → ratio to the rung before and to the first."""

    sides: dict[str, Side]
    to_the_one_before: dict[str, Ratio]
    to_the_first: dict[str, Ratio]


def climb(words: Sequence[str], batch_size: int, *, turns: int = 12, steps: int = 3) -> Ladder:
    """Time and count the steps of all rungs, which take turns (a collective).

    Args:
        words: flags of a training run for all rungs, with --deepspeed_config.
        batch_size: images of a rank's micro-batch on the first rungs.
        turns: how often each rung is measured.
        steps: steps a turn.

    Raises:
        UserError: --model-kwargs, which a rung sets; or what training with these flags would raise.
    """
    if "--model-kwargs" in words:
        raise UserError("bench ladder sets --model-kwargs on its way; choose another --model instead")
    process = discover()
    candidates, added = {}, list(words)
    for rung in RUNGS:
        added += rung.words
        batch_size *= rung.larger_batch
        candidates[rung.name] = Candidate(plan_of([*added, "-b", str(batch_size)], process), make_ours)
    with ranks_met(process) as device:
        sides = measure(candidates, device, turns, steps)
        name, threads = machine(device)
    names = list(sides)
    plan = candidates[names[0]].plan
    return Ladder(
        model=plan.config.model,
        options=" ".join(words),
        layout=str(plan.parallel.layout),
        device=name,
        threads=threads,
        versions=versions(),
        sides=sides,
        to_the_one_before={b: ratio(sides[b], sides[a]) for a, b in itertools.pairwise(names)},
        to_the_first={name: ratio(sides[name], sides[names[0]]) for name in names[1:]},
    )


def title(ladder: Ladder) -> str:
    """What was measured, on what."""
    return f"{ladder.model}, {ladder.layout}; {ladder.where}"


def table(ladder: Ladder) -> list[tuple[str, ...]]:
    """A header and a line a rung."""
    lines: list[tuple[str, ...]] = [
        ("", "images a step", "images/s", "of the one before", "of the first", "operations", "MB allocated")
    ]
    for name, side in ladder.sides.items():
        before, first = ladder.to_the_one_before.get(name), ladder.to_the_first.get(name)
        lines.append(
            (
                f"+ {name}" if before else name,
                str(side.images),
                f"{side.images_per_second:.2f}",
                f"{before.images_per_second:.3f} ({before.low:.2f} to {before.high:.2f})" if before else "",
                f"{first.images_per_second:.3f}" if first else "",
                str(side.counts.operations),
                f"{side.counts.allocated_bytes / 1e6:.0f}",
            )
        )
    return lines
