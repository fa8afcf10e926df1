"""Goodput of many hosts: against Young's and Daly's formula, and in which direction each figure moves it."""

from __future__ import annotations

import dataclasses
import math

import pytest

from ds_vit.planner.goodput import Reliability, simulate, slowest, young_daly

HOW = Reliability()


@pytest.mark.parametrize("hosts", [1, 64, 2048])
@pytest.mark.parametrize("checkpoint_seconds", [5.0, 60.0, 300.0])
def test_the_best_interval_is_dalys(hosts, checkpoint_seconds):
    # Catches: work that is lost twice, a restart that costs nothing. Within two per cent.
    found = simulate(hosts, dataclasses.replace(HOW, checkpoint_seconds=checkpoint_seconds))
    assert found.interval_seconds == pytest.approx(found.young_daly_seconds, rel=0.02)


def test_dalys_formula_begins_with_youngs():
    # Catches: a formula that was typed wrong.
    assert young_daly(1.0, 1e8) == pytest.approx(math.sqrt(2e8) - 1 + 1 / 3, rel=1e-6)


def test_every_trouble_costs():
    # Catches: a figure that nothing hangs on.
    base = simulate(512, HOW).share
    for worse in (
        {"host_hours": 1000.0},
        {"checkpoint_seconds": 60.0},
        {"restart_seconds": 1200.0},
        {"repair_hours": 4.0},
        {"spread": 0.05},
    ):
        assert simulate(512, dataclasses.replace(HOW, **worse)).share < base - 1e-6, worse
    waits, goes_on = (simulate(512, dataclasses.replace(HOW, repair_hours=4.0, elastic=e)).share for e in (False, True))
    assert waits < goes_on
    assert slowest(1, 0.1) == 1.0
