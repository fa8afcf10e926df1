"""A pipeline's step played in time: DeepSpeed's own schedule objects, with what each stage takes for its part.

A transfer is a meeting: the sender waits for the receiver and the receiver for the sender, as DeepSpeed's do. So with
equal stages and transfers that take no time a step of m micro-batches through p stages takes m + p - 1 times what one
takes in a stage, of which (p - 1) / (m + p - 1) is bubble (Narayanan et al. 2021, section 2.2.1).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from ds_vit.models import balance


@dataclass(frozen=True)
class StageCost:
    """Seconds of a micro-batch in a stage.

    Attributes:
        forward: pass.
        backward: pass, with what it runs again.
        send: of its tokens to the next stage, or of their gradient back to it.
        load: of its part of a batch, in the first and the last stage.
    """

    forward: float
    backward: float
    send: float = 0.0
    load: float = 0.0


class Span(NamedTuple):
    """What a stage does from when to when: "forward", "backward", "transfer" or "load", of which micro-batch."""

    stage: int
    kind: str
    micro_batch: int
    start: float
    end: float


@dataclass(frozen=True)
class Played:
    """A step.

    Attributes:
        seconds: that it takes.
        spans: of all stages.
        live: for each stage, how many micro-batches it holds activations of at most.
        buffers: for each stage, how many DeepSpeed's engine allocates.
        loads: for each stage, how often it takes a part of a batch.
        sends: for each stage, how many tensors of tokens or gradients it sends.
    """

    seconds: float
    spans: tuple[Span, ...]
    live: tuple[int, ...]
    buffers: tuple[int, ...]
    loads: tuple[int, ...]
    sends: tuple[int, ...]

    def bubble(self, stage: int) -> float:
        """Share of the step in which a stage does not compute."""
        busy = sum(s.end - s.start for s in self.spans if s.stage == stage and s.kind in ("forward", "backward"))
        return 1 - busy / self.seconds


def play(stages: Sequence[StageCost], micro_batches: int) -> Played:
    """Play the training schedule of DeepSpeed's pipeline engine.

    Args:
        stages: what each takes.
        micro_batches: m.
    """
    from deepspeed.runtime.pipe import schedule as deepspeed_schedule  # takes seconds, and talks

    schedules = [deepspeed_schedule.TrainSchedule(micro_batches, len(stages), i) for i in range(len(stages))]
    game = _Game(stages, [[command for step in one.steps() for command in step] for one in schedules])
    game.run()
    counts = [[type(command).__name__ for command in of] for of in game.commands]
    return Played(
        seconds=max(game.clock),
        spans=tuple(game.spans),
        live=tuple(game.most),
        buffers=tuple(one.num_pipe_buffers() for one in schedules),
        loads=tuple(of.count("LoadMicroBatch") for of in counts),
        sends=tuple(of.count("SendActivation") + of.count("SendGrad") for of in counts),
    )


def seconds_of_step(stages: Sequence[tuple[float, float]], micro_batches: int) -> float:
    """What `play` gives where transfers take no time, without DeepSpeed and in a hundredth of the time.

    Stage s runs micro-batch i forward as the (2i + s)th, and back as the (2i + 2p - 1 - s)th of the schedule's ticks.

    Args:
        stages: seconds of a micro-batch in each, forward and back.
        micro_batches: m.
    """
    p = len(stages)
    # In its middle part a step goes on at the pace of the slowest stage.
    m = min(micro_batches, 2 * p)
    clock = [0.0] * p
    forward, backward = ([[0.0] * m for _ in stages] for _ in range(2))  # when each is over
    for tick in range(2 * (m + p - 1)):
        for s, (ahead, back) in enumerate(stages):
            if (tick + s) % 2 == 0:
                i = (tick - s) // 2
                if 0 <= i < m:
                    clock[s] = max(clock[s], forward[s - 1][i] if s else 0.0) + ahead
                    forward[s][i] = clock[s]
            else:
                i = (tick + s + 1) // 2 - p
                if 0 <= i < m:
                    clock[s] = max(clock[s], backward[s + 1][i] if s < p - 1 else 0.0) + back
                    backward[s][i] = clock[s]
    return max(clock) + (micro_batches - m) * max(map(sum, stages))


def stage_costs(layers: Sequence[StageCost], bounds: Sequence[int]) -> list[StageCost]:
    """What each stage takes: its layers together, and the sending of the last of them."""
    parts = [layers[start:stop] for start, stop in itertools.pairwise(bounds)]
    return [
        StageCost(sum(one.forward for one in part), sum(one.backward for one in part), part[-1].send) for part in parts
    ]


_ALL_CUTS = 1000


def fastest_bounds(
    layers: Sequence[StageCost],
    kept: Sequence[float],
    stages: int,
    micro_batches: int,
    is_legal: Callable[[Sequence[int]], bool] = lambda bounds: True,
) -> list[int]:
    """Where to cut layers into stages so that a step, played, is over first.

    Of equally fast cuts the one is taken whose fullest stage has the least activations. Up to a thousand cuts are all
    tried (12 blocks in up to 4 stages). Of more, the bounds of the balanced cut (`balance`) move by a layer, alone or
    with their neighbour, for as long as that helps.

    Args:
        layers: what each takes of a micro-batch, `send` as the last layer of a stage.
        kept: bytes that each keeps of a micro-batch for its backward pass.
        stages: p.
        micro_batches: m.
        is_legal: whether bounds may be taken.

    Returns:
        p + 1 numbers, as `balance` gives them.

    Raises:
        UserError: fewer layers than stages.
    """
    # In its middle part a step goes on at the pace of the slowest stage.
    played = min(micro_batches, 2 * stages)

    @cache
    def judge(bounds: tuple[int, ...]) -> tuple[float, float]:
        if not is_legal(bounds):
            return math.inf, math.inf
        costs = stage_costs(layers, bounds)
        step = play(costs, played)
        slowest = max(cost.forward + cost.backward for cost in costs)
        sizes = (sum(kept[start:stop]) for start, stop in itertools.pairwise(bounds))
        peak = max(live * size for live, size in zip(step.live, sizes, strict=True))
        return step.seconds + (micro_batches - played) * slowest, peak

    best = tuple(balance([one.forward + one.backward for one in layers], kept, stages))
    if math.comb(len(layers) - 1, stages - 1) <= _ALL_CUTS:
        inner = itertools.combinations(range(1, len(layers)), stages - 1)
        best = min(((0, *bounds, len(layers)) for bounds in inner), key=judge)
        return list(best)
    while True:
        found = min(_moved(best), key=judge, default=best)
        if judge(found) >= judge(best):
            return list(best)
        best = found


def _moved(bounds: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    """Bounds of which one, or two neighbours, lie a layer further on or back."""
    inner = range(1, len(bounds) - 1)
    moves = [{place: step} for place in inner for step in (-1, 1)]
    pairs = itertools.product(itertools.pairwise(inner), itertools.product((-1, 1), repeat=2))
    moves += [dict(zip(places, steps, strict=True)) for places, steps in pairs]
    for move in moves:
        moved = tuple(bound + move.get(place, 0) for place, bound in enumerate(bounds))
        if all(a < b for a, b in itertools.pairwise(moved)):
            yield moved


# What a stage sends, by the name of the instruction: (what the neighbour does meanwhile, where the neighbour is).
_MEETINGS = {"SendActivation": ("RecvActivation", 1), "SendGrad": ("RecvGrad", -1)}


class _Game:
    """The stages' clocks, and how far each has come."""

    def __init__(self, stages: Sequence[StageCost], commands: list[list[Any]]) -> None:
        self.stages, self.commands = stages, commands
        number = len(stages)
        self.clock, self.at = [0.0] * number, [0] * number
        self.done = [{"forward": 0, "backward": 0} for _ in stages]
        self.most = [0] * number
        self.spans: list[Span] = []

    def run(self) -> None:
        """Until every stage is through."""
        while any(at < len(of) for at, of in zip(self.at, self.commands, strict=True)):
            before = list(self.at)
            for stage in range(len(self.stages)):
                while self._step(stage):
                    pass
            assert self.at != before, "stages wait for each other for ever"

    def _name(self, stage: int) -> str:
        at, of = self.at[stage], self.commands[stage]
        return type(of[at]).__name__ if at < len(of) else ""

    def _step(self, stage: int) -> bool:
        """Carry out a stage's next command; False where it has to wait, or is through."""
        name, cost = self._name(stage), self.stages[stage]
        if not name or name.startswith("Recv"):
            return False  # the sender's turn does both
        if name in _MEETINGS:
            meanwhile, way = _MEETINGS[name]
            other = stage + way
            if self._name(other) != meanwhile:
                return False
            start = max(self.clock[stage], self.clock[other])
            # The tokens' and their gradient's way is the same: that between a stage and the next.
            end = start + self.stages[min(stage, other)].send
            for one in (stage, other):
                self._take(one, "transfer", start, end)
            return True
        start = self.clock[stage]
        if name == "LoadMicroBatch":
            self._take(stage, "load", start, start + cost.load)
        elif name in ("ForwardPass", "BackwardPass"):
            kind = name.removesuffix("Pass").lower()
            self._take(stage, kind, start, start + getattr(cost, kind))
            self.done[stage][kind] += 1
            under_way = self.done[stage]["forward"] - self.done[stage]["backward"]
            self.most[stage] = max(self.most[stage], under_way)
        else:  # what comes after the last micro-batch is no part of the pipeline's course
            self.at[stage] += 1
        return True

    def _take(self, stage: int, kind: str, start: float, end: float) -> None:
        number = self.done[stage].get(kind, 0)
        self.spans.append(Span(stage, kind, number, start, end))
        self.clock[stage] = end
        self.at[stage] += 1
