"""The pipeline played in time, against DeepSpeed's own schedule and closed forms."""

from __future__ import annotations

import itertools
import random

import pytest

from ds_vit.models import balance
from ds_vit.planner import schedule
from ds_vit.planner.schedule import StageCost, fastest_bounds, play, seconds_of_step

PAIRS = [(1, 1), (2, 2), (2, 8), (3, 4), (4, 4), (4, 16), (6, 5), (8, 32)]


@pytest.mark.parametrize(("p", "m"), PAIRS)
def test_equal_stages(p, m):
    # Catches: a transfer that waits for nobody, a stage that runs ahead, a micro-batch that is left out.
    played = play([StageCost(1.0, 2.0)] * p, m)
    assert played.seconds == pytest.approx(3.0 * (m + p - 1))
    for stage in range(p):
        assert played.bubble(stage) == pytest.approx((p - 1) / (m + p - 1))
    assert len([span for span in played.spans if span.kind == "backward"]) == m * p


@pytest.mark.parametrize(("p", "m"), PAIRS)
def test_what_is_held_and_sent_is_what_deepspeed_holds_and_sends(p, m):
    # Catches: activations that are counted once too often. DeepSpeed allocates two buffers at least.
    played = play([StageCost(1.0, 2.0)] * p, m)
    assert played.live == tuple(min(p - stage, m) for stage in range(p))
    assert played.buffers == tuple(max(2, live) for live in played.live)
    assert played.sends == tuple(m * ((stage < p - 1) + (stage > 0)) for stage in range(p))
    assert played.loads == tuple(m if stage in (0, p - 1) else 0 for stage in range(p))


def test_the_slowest_stage_sets_the_pace():
    # Catches: a mean where there is a maximum. m times the slow stage, after the first forward pass (1), before the
    # last backward pass (2); and once it waits (1) for the first gradient, with its two micro-batches under way.
    played = play([StageCost(1.0, 2.0), StageCost(2.0, 4.0), StageCost(1.0, 2.0)], 8)
    assert played.seconds == pytest.approx(8 * 6.0 + 1.0 + 2.0 + 1.0)
    assert played.bubble(1) == pytest.approx(4 / 52)


@pytest.mark.parametrize(("p", "m"), [*PAIRS, (3, 1), (5, 40), (4, 9)])
def test_the_quick_way_gives_the_same_seconds(p, m):
    # Catches: a tick too early, a stage that waits for the wrong neighbour, a middle part at another pace.
    rng = random.Random(p * 100 + m)
    stages = [(rng.uniform(0.5, 2.0), rng.uniform(1.0, 4.0)) for _ in range(p)]
    played = play([StageCost(*stage) for stage in stages], m).seconds
    assert seconds_of_step(stages, m) == pytest.approx(played, rel=1e-9 if m <= 2 * p else 0.01)


def test_a_transfer_keeps_both_ends():
    # Catches: sends that cost nothing. With two stages each micro-batch crosses twice.
    free, dear = (play([StageCost(1.0, 2.0, send)] * 2, 8).seconds for send in (0.0, 0.5))
    assert dear - free == pytest.approx(2 * 8 * 0.5, rel=0.15)


def step_of(layers, bounds, m):
    """Seconds of a step, played whole."""
    parts = [layers[start:stop] for start, stop in itertools.pairwise(bounds)]
    return play([StageCost(sum(a.forward for a in p), sum(a.backward for a in p)) for p in parts], m).seconds


def cases():
    """Layers of any kind; and blocks that are alike between an embedding and a head that are not."""
    rng = random.Random(0)
    for _ in range(60):
        p, m = rng.choice((2, 3, 4)), rng.choice((1, 2, 3, 6, 12))
        layers = [StageCost(rng.randint(1, 9), rng.randint(1, 18)) for _ in range(rng.randint(p, 8))]
        yield layers, p, m
        ends = [StageCost(rng.randint(1, 20), rng.randint(1, 40)) for _ in range(2)]
        yield [ends[0], *[StageCost(4, 8)] * (len(layers) - 2), ends[1]][: len(layers)], p, m


def test_no_cut_is_faster_than_the_one_that_is_taken(monkeypatch):
    """A cut that is balanced and waits: the slowest stage alone says little of few micro-batches."""
    faster = 0
    for layers, p, m in cases():
        every = [(0, *inner, len(layers)) for inner in itertools.combinations(range(1, len(layers)), p - 1)]
        best = min(step_of(layers, bounds, m) for bounds in every)
        kept = [1.0] * len(layers)
        assert step_of(layers, fastest_bounds(layers, kept, p, m), m) == pytest.approx(best)
        balanced = step_of(layers, balance([a.forward + a.backward for a in layers], kept, p), m)
        faster += balanced > best
        with monkeypatch.context() as context:  # more layers than all cuts of are tried: never worse than balanced
            context.setattr(schedule, "_ALL_CUTS", 0)
            climbed = step_of(layers, fastest_bounds(layers, kept, p, m), m)
        assert best <= climbed <= balanced
    assert faster > 10


def test_an_illegal_cut_is_not_taken():
    """A stage with nothing to train."""
    layers = [StageCost(1.0, 2.0)] * 6
    assert fastest_bounds(layers, [1.0] * 6, 2, 4) == [0, 3, 6]
    assert fastest_bounds(layers, [1.0] * 6, 2, 4, is_legal=lambda bounds: bounds[1] > 4) == [0, 5, 6]


def test_of_equally_fast_cuts_the_one_with_less_memory_is_taken():
    """The first stage holds two micro-batches: the layer that takes no time but much memory goes to the last."""
    layers = [StageCost(1.0, 2.0), StageCost(0.0, 0.0), StageCost(1.0, 2.0)]
    assert fastest_bounds(layers, [1.0, 9.0, 1.0], 2, 4) == [0, 1, 3]
