"""Which checkpoint is marked as the best: decided without an engine, by a saver that is busy when the test says so."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from ds_vit.checkpoint import Checkpoint
from ds_vit.checkpoint.snapshot import Save
from ds_vit.config.run_folder import RunFolder
from ds_vit.monitoring.metrics import Throughput
from ds_vit.training import checkpoint_manager
from ds_vit.training.checkpoint_manager import CheckpointManager


class NoDisk:
    """Takes note of what a `Saver` is asked for; a save lasts until it is waited for, or `busy` is cleared."""

    def __init__(self, *_: object, **__: object) -> None:
        self.busy = False
        self.best: dict[int, bool] = {}
        self._under_way: list[Save] = []

    def wait(self) -> None:
        self.busy = False

    def reserve(self) -> None:
        pass

    def start(self, save: Save) -> None:
        self.wait()
        self._under_way.append(save)
        self.best[save.step] = save.best
        self.busy = True

    def finished(self) -> list[Save]:
        done = self._under_way[: len(self._under_way) - self.busy]
        del self._under_way[: len(done)]
        return done

    def mark_best(self, step: int) -> str:
        assert not self.busy, "a checkpoint that may not be there yet"
        self.best[step] = True
        return ""


@pytest.fixture
def manager(monkeypatch, tmp_path) -> CheckpointManager:
    """Of one rank with `--checkpoint-interval 4`."""
    stand_ins = {"Saver": NoDisk, "Holding": lambda *_: None, "names_and_shapes": lambda _: {}}
    for name in ("load_tensors", "first_step", "skipped_batches"):
        stand_ins[name] = (lambda state, order: state["step"]) if name == "first_step" else (lambda *_: 0)
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(checkpoint_manager, name, stand_in)
    monkeypatch.setattr(CheckpointManager, "_state", lambda self, step: {})
    config = SimpleNamespace(checkpoint_interval="4", keep_checkpoints=2, stop_before_seconds=None)
    task = SimpleNamespace(weight_files=dict)
    model, data = SimpleNamespace(whole=None, task=task), SimpleNamespace(order=None)
    plan = SimpleNamespace(config=config, model=model, data=data, stop_at=None, identity={})
    groups = SimpleNamespace(ballots=None, files=None)
    engine = SimpleNamespace(groups=groups, zero_map=None, restore_progress=lambda *_: None)
    reporter = SimpleNamespace(say=lambda _: None, checkpoint=lambda _: None)
    return CheckpointManager(plan, RunFolder(tmp_path), engine, None, Throughput(), None, None, reporter)


def taken_up(manager: CheckpointManager, step: int, parent: Path | None = None) -> None:
    """Go on from a checkpoint."""
    path = (parent or manager.parent) / f"step-{step:08d}"
    manager._take(Checkpoint(path, {}, {"step": step, "optimizer": {}, "engine": {}, "history": {}}))


def test_the_best_step_is_saved_while_another_save_is_under_way(manager):
    # Catches: the best weights given up because the disk was slow, and those of a later step saved without the mark.
    manager.boundary(4)
    assert manager._saver.busy
    manager.evaluated(5, is_best=True)
    manager.boundary(5)
    assert manager._saver.best == {4: False, 5: True}
    manager.boundary(8)  # no best one: it waits, and training goes on
    assert 8 not in manager._saver.best


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_step_that_is_evaluated_after_it_was_saved(manager, tmp_path, elsewhere):
    # Catches: a run that was interrupted within the evaluation of its best step, whose checkpoint then never gets the
    # mark; one that goes on in another folder, where that step is still being saved.
    taken_up(manager, 8, tmp_path / "another" if elsewhere else None)
    manager.boundary(8)
    manager.evaluated(8, is_best=True)
    assert manager._saver.best == {8: True}
    manager.evaluated(8, is_best=False)
    manager.boundary(9)
    assert manager._saver.best == {8: True}


def test_what_was_the_best_before_a_rollback_is_forgotten(manager):
    # Catches: a step that is marked, or saved out of turn, because one of its number was the best before.
    manager.boundary(4)
    manager.evaluated(8, is_best=True)
    manager._saver.wait()
    taken_up(manager, 4)
    manager.boundary(5)
    assert 5 not in manager._saver.best
    manager.boundary(8)
    assert manager._saver.best == {4: False, 8: False}


def test_a_step_of_another_folders_course_is_saved_again(manager, tmp_path):
    # Catches: a rollback past the run's own checkpoints, whose steps then count as saved.
    manager.boundary(8)
    manager._saver.wait()
    taken_up(manager, 4, tmp_path / "another")
    manager._saver.best.clear()
    manager.boundary(8)
    assert manager._saver.best == {8: False}
