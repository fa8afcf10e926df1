"""The scheduled values of tasks, step by step, against DINOv2's scheduler."""

import numpy as np
import pytest

from ds_vit.tasks.task import Horizon, cosine, linear_warmup


def dinov2_cosine(base, final, total, warmup=0, start=0.0):
    """The values of DINOv2's CosineScheduler by iteration, by its formula (dinov2/utils/utils.py)."""
    i = np.arange(total - warmup)
    decay = final + 0.5 * (base - final) * (1 + np.cos(np.pi * i / len(i))) if len(i) else i
    return [*np.linspace(start, base, warmup), *decay]


@pytest.mark.parametrize(("start", "end"), [(0.992, 1.0), (0.04, 0.4)])
@pytest.mark.parametrize("total", [1, 2, 10])
def test_cosine_is_dinov2s(start, end, total):
    # Catches: a schedule that is one step off at either end.
    values = [cosine(step, start, end, total) for step in range(1, total + 3)]
    assert values == pytest.approx([*dinov2_cosine(start, end, total), end, end], rel=1e-12)
    assert values[0] == pytest.approx(start, rel=1e-12)


@pytest.mark.parametrize("warmup", [0, 1, 2, 30])
def test_warmup_is_dinov2s(warmup):
    # Their teacher temperature: a schedule of nothing but warm-up, and its final value afterwards.
    values = [linear_warmup(step, 0.04, 0.07, warmup) for step in range(1, warmup + 3)]
    assert values == pytest.approx([*dinov2_cosine(0.07, 0.07, warmup, warmup, 0.04), 0.07, 0.07], rel=1e-12)


def test_epochs_are_counted_in_steps():
    horizon = Horizon(total_steps=100, steps_per_epoch=4, weight_decay=0.04)
    assert [horizon.is_within(step, 2) for step in (1, 8, 9)] == [True, True, False]
    assert not horizon.is_within(1, 0)
