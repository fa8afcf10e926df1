"""Ways around DeepSpeed that need no ranks to be tried."""

from types import SimpleNamespace

from ds_vit.engine.workarounds import advance_where_applied


def test_a_scheduler_waits_for_a_step_that_was_turned_down():
    # Catches: learning rates of two layouts that part after a skipped step; a resume that cannot set the scheduler.
    steps, applied = [], True
    scheduler = SimpleNamespace(step=lambda at=None: steps.append(at))
    advance_where_applied(scheduler, lambda: applied)
    scheduler.step()
    applied = False
    scheduler.step()
    scheduler.step(7)
    assert steps == [None, 7]
