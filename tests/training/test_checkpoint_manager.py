"""Which checkpoint is marked as the best: decided without an engine, by a saver that is busy when the test says so."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from ds_vit.checkpoint import Checkpoint
from ds_vit.checkpoint.snapshot import Save
from ds_vit.config.run_folder import RunFolder
from ds_vit.monitoring.throughput import Throughput
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

    def num_bytes(self) -> tuple[int, int]:
        return 4 * 10**9, 2 * 10**9

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
def said() -> list[str]:
    """What the manager has told people."""
    return []


@pytest.fixture
def manager(monkeypatch, tmp_path, said, request) -> CheckpointManager:
    """Of one rank with `--checkpoint-interval 4`, or what the test gives; an epoch is 3 steps."""
    stand_ins = {"Saver": NoDisk, "Holding": lambda *_: None, "names_and_shapes": lambda _: {}}
    stand_ins["together"] = lambda question: question()
    for name in ("load_tensors", "first_step", "skipped_batches"):
        stand_ins[name] = (lambda state, order: state["step"]) if name == "first_step" else (lambda *_: 0)
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(checkpoint_manager, name, stand_in)
    monkeypatch.setattr(CheckpointManager, "_state", lambda self, step: {})
    interval = getattr(request, "param", "4")
    config = SimpleNamespace(checkpoint_interval=interval, keep_checkpoints=2, stop_before_seconds=None)
    task = SimpleNamespace(weight_files=dict, class_names=())
    model, data = SimpleNamespace(whole=None, task=task), SimpleNamespace(order=SimpleNamespace(steps_per_epoch=3))
    plan = SimpleNamespace(config=config, model=model, data=data, stop_at=None, identity={})
    groups = SimpleNamespace(ballots=None, files=None)
    engine = SimpleNamespace(groups=groups, zero_map=None, restore_progress=lambda *_: None)
    reporter = SimpleNamespace(say=said.append, checkpoint=lambda _: None)
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


@pytest.mark.parametrize("manager", ["epoch"], indirect=True)
def test_by_default_each_epochs_end_is_saved(manager, said):
    # Catches: an epoch whose end is not saved; training that waits for the disk where epochs are shorter than a save,
    # and a line about it after each of them.
    for step in range(1, 7):
        manager.boundary(step)
    assert list(manager._saver.best) == [3], "the save of step 3 is still under way"
    manager._saver.wait()
    manager.boundary(7)
    for step in range(8, 13):
        manager.boundary(step)
    assert list(manager._saver.best) == [3, 7]
    assert len([line for line in said if "still being written" in line]) == 1


@pytest.mark.parametrize("free", [10**12, 10**10])
def test_what_the_disk_must_hold_is_told_once(manager, said, monkeypatch, free):
    # Catches: a count without the best one or the one that is being written, a need without the weights of the end, and
    # a disk that turns out to be full after a night.
    monkeypatch.setattr(checkpoint_manager.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    manager.boundary(1)
    manager.boundary(2)
    [line] = said
    assert "4 GB each" in line
    assert "at most 4 at a time" in line
    assert f"with the weights of the end 18 GB, and {free // 10**9 if free < 10**12 else 1} " in line
    assert ("WARNING" in line and "make room" in line) == (free < 18 * 10**9)
