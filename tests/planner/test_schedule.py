"""The pipeline played in time, against DeepSpeed's own schedule and closed forms."""

from __future__ import annotations

import pytest

from ds_vit.planner.schedule import StageCost, play

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


def test_a_transfer_keeps_both_ends():
    # Catches: sends that cost nothing. With two stages each micro-batch crosses twice.
    free, dear = (play([StageCost(1.0, 2.0, send)] * 2, 8).seconds for send in (0.0, 0.5))
    assert dear - free == pytest.approx(2 * 8 * 0.5, rel=0.15)
