"""Steps that were not applied, counted without an engine."""

import json
from types import SimpleNamespace

import pytest

from ds_vit.fault_tolerance.exit_codes import Diverged
from ds_vit.training.bad_steps import MAX_SKIPS, BadSteps


def test_an_interruption_does_not_begin_the_count_anew():
    """A run that is stopped every hour and would go on skipping for ever; an older checkpoint, which has no count."""
    config, overflow = SimpleNamespace(on_nonfinite="stop", rollback=0), SimpleNamespace(rejection=None)

    def skip(bad_steps, times):
        for step in range(times):
            bad_steps.skip(step, 1.0, overflow, 0.5, None)

    before = BadSteps(config, fp16=True)
    skip(before, MAX_SKIPS - 1)
    state = json.loads(json.dumps(before.state_dict()))
    going_on = BadSteps(config, fp16=True)
    going_on.load_state_dict(state)
    with pytest.raises(Diverged, match=f"{MAX_SKIPS} steps in a row"):
        skip(going_on, 1)
    del state["skipped_in_a_row"]
    older = BadSteps(config, fp16=True)
    older.load_state_dict(state)
    skip(older, MAX_SKIPS - 1)
    assert older.skipped == 2 * (MAX_SKIPS - 1)
