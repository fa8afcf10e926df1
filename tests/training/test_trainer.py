"""The training loop without an engine: when which hook of a callback is called, and which steps are counted."""

import json
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

from ds_vit.engine.step_guard import SkippedStep
from ds_vit.fault_tolerance.exit_codes import Diverged
from ds_vit.training.callbacks import MAX_SKIPS, BadSteps, Callback, RollBack, Step
from ds_vit.training.trainer import Trainer


class Recorder(Callback):
    """Writes down which hook was called for which step; reads the results of even steps, and rejects some."""

    def __init__(self, rejected=()):
        self.events, self.rejected = [], list(rejected)

    def before_training(self, step):
        self.events.append(("start", step))

    def before_step(self, step):
        self.events.append(("before", step))

    def needs_result(self, step):
        return step % 2 == 0

    def after_step(self, step):
        self.events.append(("after", step.number))

    def after_result(self, step):
        if step.number in self.rejected:
            self.rejected.remove(step.number)
            raise RollBack(step.number, MagicMock(SkippedStep), Diverged("planted"))
        self.events.append(("result", step.number))

    def after_rollback(self, bad, step, skipped_batches, state):
        self.events.append(("rollback", bad.step, step, skipped_batches))


def make(recorder, saved=1):
    """A trainer of four steps on nothing, with a checkpoint of one of them."""

    def train_step(batches, meanwhile):
        meanwhile()
        return SimpleNamespace(applied=True)

    task = SimpleNamespace(schedules=lambda step, horizon: {}, held_names=lambda step, horizon: frozenset())
    schedule = SimpleNamespace(total_steps=4, rate=None, horizon=4)
    skipped = MagicMock(most=0.0, has_new=False, too_many=str, state_dict=dict)
    inputs = SimpleNamespace(task=task, skipped=skipped, training=lambda *_: iter(()))
    checkpoints = MagicMock(skipped_batches=0, num_failed=0, roll_back=lambda: (saved, {}) if saved else None)
    evaluations = MagicMock(is_due=lambda step: False, state_dict=dict)
    engine = MagicMock(train_step=train_step)
    engine.groups.largest = list
    folder = SimpleNamespace(path=None)
    return Trainer(schedule, engine, inputs, evaluations, [recorder], checkpoints, MagicMock(), folder)


def test_a_result_comes_late_unless_it_is_needed():
    # Catches: a wait for the device at every step, by a read or by the names of damaged images; a row written before a
    # rejected step is known.
    recorder = Recorder()
    trainer = make(recorder)
    trainer.train()
    trainer.inputs.skipped.gather.assert_not_called()
    one_and_two = [("before", 1), ("after", 1), ("before", 2), ("result", 1), ("result", 2), ("after", 2)]
    three_and_four = [("before", 3), ("after", 3), ("before", 4), ("result", 3), ("result", 4), ("after", 4)]
    assert recorder.events == [("start", 0), *one_and_two, *three_and_four]


def test_a_rollback_leaves_out_the_samples_since_the_checkpoint():
    # Catches: the batch of the bad step trained on again; counts that start anew in a second rollback.
    recorder = Recorder(rejected=[3, 3])
    trainer = make(recorder)
    trainer.train()
    back = [event for event in recorder.events if event[0] in ("start", "rollback")]
    assert back == [("start", 0), ("rollback", 3, 1, 2), ("start", 1), ("rollback", 3, 1, 2), ("start", 1)]
    assert trainer.checkpoints.skipped_batches == 4
    with pytest.raises(Diverged, match="planted; there is no checkpoint yet"):
        make(Recorder(rejected=[1]), saved=None).train()


def test_an_interruption_does_not_begin_the_count_anew():
    """A run that is stopped every hour and would go on skipping for ever; an older checkpoint, which has no count."""
    guard = SimpleNamespace(recent=list, remember=lambda values: None)
    run = SimpleNamespace(config=None, engine=SimpleNamespace(precision=SimpleNamespace(name="fp16")))
    engine = SimpleNamespace(mean=float, guard=guard)
    outcome = SimpleNamespace(applied=False, skipped=None)
    overflow = SimpleNamespace(outcome=lambda: outcome, loss=0.5)

    def make():
        return BadSteps(run, engine, None)

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
