"""Pipeline stages: the time of a step against DeepSpeed's own schedule and closed forms, and the fastest bounds."""

from __future__ import annotations

import itertools
import random

import pytest

from ds_vit.planner import pipeline
from ds_vit.planner.pipeline import balance, check_bounds, fastest_bounds, pipeline_time, stage_costs

PAIRS = [(1, 1), (2, 2), (2, 8), (3, 4), (4, 4), (4, 16), (6, 5), (8, 32), (3, 1), (5, 40), (4, 9)]
MEETINGS = {"SendActivation": ("RecvActivation", 1), "SendGrad": ("RecvGrad", -1)}


def play(stages, m):
    """Run DeepSpeed's schedule: (seconds, most micro-batches held by each stage). A sender waits for its receiver."""
    from deepspeed.runtime.pipe.schedule import TrainSchedule

    p = len(stages)
    schedules = [TrainSchedule(m, p, stage).steps() for stage in range(p)]
    commands = [[type(command).__name__ for step in one for command in step] for one in schedules]
    clock, at, under_way, most = ([0] * p for _ in range(4))

    def command(stage):
        return commands[stage][at[stage]] if at[stage] < len(commands[stage]) else ""

    while any(map(command, range(p))):
        before = list(at)
        for stage in range(p):
            name, other = command(stage), stage
            if not name or name.startswith("Recv"):
                continue
            if name in MEETINGS:
                meanwhile, way = MEETINGS[name]
                other = stage + way
                if command(other) != meanwhile:
                    continue
                clock[stage] = clock[other] = max(clock[stage], clock[other])
                at[other] += 1
            elif name in ("ForwardPass", "BackwardPass"):
                is_backward = name == "BackwardPass"
                clock[stage] += stages[stage][is_backward]
                under_way[stage] += -1 if is_backward else 1
                most[stage] = max(most[stage], under_way[stage])
            at[stage] += 1
        assert at != before, "stages wait for each other for ever"
    return max(clock), most


@pytest.mark.parametrize(("p", "m"), PAIRS)
def test_a_step_takes_what_deepspeeds_schedule_takes(p, m):
    # Catches: a tick too early, a stage that waits for the wrong neighbour, activations counted once too often.
    rng = random.Random(p * 100 + m)
    assert pipeline_time([(1.0, 2.0)] * p, m) == pytest.approx(3.0 * (m + p - 1))
    stages = [(rng.uniform(0.5, 2.0), rng.uniform(1.0, 4.0)) for _ in range(p)]
    seconds, most = play(stages, m)
    assert pipeline_time(stages, m) == pytest.approx(seconds, rel=1e-9 if m <= 2 * p else 0.01)
    assert most == [min(p - stage, m) for stage in range(p)]


def test_the_slowest_stage_sets_the_pace():
    # Catches: a mean where there is a maximum. m times the slow stage, after the first forward pass (1), before the
    # last backward pass (2); and once it waits (1) for the first gradient, with its two micro-batches under way.
    assert pipeline_time([(1.0, 2.0), (2.0, 4.0), (1.0, 2.0)], 8) == pytest.approx(8 * 6.0 + 1.0 + 2.0 + 1.0)


def seconds_with(layers, bounds, m):
    return pipeline_time(stage_costs(layers, bounds), m)


def cases():
    """Layers of any kind; and blocks that are alike between an embedding and a head that are not."""
    rng = random.Random(0)
    for _ in range(60):
        p, m = rng.choice((2, 3, 4)), rng.choice((1, 2, 3, 6, 12))
        layers = [(rng.randint(1, 9), rng.randint(1, 18)) for _ in range(rng.randint(p, 8))]
        yield layers, p, m
        ends = [(rng.randint(1, 20), rng.randint(1, 40)) for _ in range(2)]
        yield [ends[0], *[(4, 8)] * (len(layers) - 2), ends[1]][: len(layers)], p, m


def test_no_bounds_are_faster_than_those_that_are_taken(monkeypatch):
    # Catches: balanced stages that wait: the slowest stage says little of few micro-batches.
    faster = 0
    for layers, p, m in cases():
        every = [(0, *inner, len(layers)) for inner in itertools.combinations(range(1, len(layers)), p - 1)]
        best = min(seconds_with(layers, bounds, m) for bounds in every)
        kept = [1.0] * len(layers)
        assert seconds_with(layers, fastest_bounds(layers, kept, p, m), m) == pytest.approx(best)
        balanced = seconds_with(layers, balance([sum(one) for one in layers], kept, p), m)
        faster += balanced > best
        with monkeypatch.context() as context:  # more bounds than are all tried: never slower than balanced
            context.setattr(pipeline, "_MAX_EXHAUSTIVE", 0)
            climbed = seconds_with(layers, fastest_bounds(layers, kept, p, m), m)
        assert best <= climbed <= balanced
    assert faster > 10


def test_illegal_bounds_are_not_taken():
    # Catches: a stage with nothing to train.
    layers = [(1.0, 2.0)] * 6
    assert fastest_bounds(layers, [1.0] * 6, 2, 4) == [0, 3, 6]
    assert fastest_bounds(layers, [1.0] * 6, 2, 4, is_allowed=lambda bounds: bounds[1] > 4) == [0, 5, 6]


def test_of_equally_fast_bounds_those_with_less_memory_are_taken():
    # Catches: a layer that takes no time but much memory on the first stage, which holds two micro-batches.
    assert fastest_bounds([(1.0, 2.0), (0.0, 0.0), (1.0, 2.0)], [1.0, 9.0, 1.0], 2, 4) == [0, 1, 3]


def busiest(flops, bounds):
    return max(sum(flops[a:b]) for a, b in itertools.pairwise(bounds))


@pytest.mark.parametrize("seed", range(5))
def test_stages_are_balanced(seed):
    """A cut that is not the best one: the slowest stage sets the pace of a pipeline."""
    draw = random.Random(seed)
    layers, stages = draw.randint(2, 9), draw.randint(1, 4)
    stages = min(stages, layers)
    flops = [draw.randint(0, 5) for _ in range(layers)]
    bounds = balance(flops, [draw.randint(0, 5) for _ in range(layers)], stages)
    assert (bounds[0], bounds[-1], len(bounds)) == (0, layers, stages + 1)
    assert all(a < b for a, b in itertools.pairwise(bounds))
    every = itertools.combinations(range(1, layers), stages - 1)
    assert busiest(flops, bounds) == min(busiest(flops, (0, *inner, layers)) for inner in every)


def test_check_bounds():
    """Explicit bounds that lose a layer."""
    check_bounds([0, 2, 5], 5, 2)
    for bad in ([0, 5], [0, 2, 4], [1, 2, 5], [0, 3, 3, 5], [0, 4, 2, 5]):
        with pytest.raises(ValueError, match="rising numbers"):
            check_bounds(bad, 5, 2)
