"""Steps that were not applied, counted without an engine."""

import json
from types import SimpleNamespace

import pytest

from ds_vit.fault_tolerance.exit_codes import Diverged
from ds_vit.training.callbacks import MAX_SKIPS, BadSteps, Step


def test_an_interruption_does_not_begin_the_count_anew():
    """A run that is stopped every hour and would go on skipping for ever; an older checkpoint, which has no count."""
    guard = SimpleNamespace(recent=list, remember=lambda values: None)
    engine = SimpleNamespace(mean=float, guard=guard)
    overflow = SimpleNamespace(applied=False, rejection=None, loss=0.5)

    def make():
        return BadSteps(engine, None, stop=True, max_rollbacks=0, fp16=True)

    def skip(bad_steps, times):
        for step in range(times):
            bad_steps.after_result(Step(step, 0.1, 1.0, overflow))

    before = make()
    skip(before, MAX_SKIPS - 1)
    state = json.loads(json.dumps(before.state_dict()))
    resumed = make()
    resumed.load_state_dict(state)
    with pytest.raises(Diverged, match=f"{MAX_SKIPS} steps in a row"):
        skip(resumed, 1)
    del state["skipped_in_a_row"]
    older = make()
    older.load_state_dict(state)
    skip(older, MAX_SKIPS - 1)
    assert older.skipped == 2 * (MAX_SKIPS - 1)
