"""Which checkpoint is marked as the best: decided without an engine, by a saver that is busy when the test says so."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from ds_vit.checkpoint.folder import Checkpoint
from ds_vit.checkpoint.snapshot import Save
from ds_vit.config.units import Interval
from ds_vit.data.sampler import SampleOrder
from ds_vit.fault_tolerance.signals import Interrupted, Signals
from ds_vit.monitoring.metrics import Throughput
from ds_vit.tasks.metrics import Figure
from ds_vit.training import checkpoint_manager, inputs
from ds_vit.training.checkpoint_manager import CheckpointManager
from ds_vit.training.inputs import SkippedImages


class NoDisk:
    """Takes note of what a `Saver` is asked for; a save lasts until it is waited for, or `busy` is cleared."""

    def __init__(self, *_: object, **__: object) -> None:
        self.busy = False
        self.best: dict[int, bool] = {}
        self.saves: dict[int, Save] = {}
        self.figures: dict[int, dict] = {}
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
        self.saves[save.step] = save
        self.busy = True

    def finished(self) -> list[Save]:
        done = self._under_way[: len(self._under_way) - self.busy]
        del self._under_way[: len(done)]
        return done

    def mark_best(self, step: int) -> str:
        assert not self.busy, "a checkpoint that may not be there yet"
        self.best[step] = True
        return ""

    def write_figures(self, step: int, figures: dict) -> None:
        assert not self.busy, "a checkpoint that may not be there yet"
        self.figures[step] = figures


def with_rollback(manager: CheckpointManager) -> CheckpointManager:
    """The same run with `--rollback 1`."""
    manager.run.config.rollback = 1
    return manager


@pytest.fixture
def said() -> list[str]:
    """What the manager has told people."""
    return []


@pytest.fixture
def manager(monkeypatch, tmp_path, said) -> CheckpointManager:
    """Of one rank with `--checkpoint-interval 4`."""
    stand_ins = {"Saver": NoDisk, "RankShare": lambda *_: None}
    stand_ins |= {name: lambda run: {} for name in ("rates_of", "identity_of", "origin_of", "settings_of")}
    stand_ins |= {"from_first_rank": lambda question: question(), "read_figures": lambda _: {}}
    for name in ("load_tensors", "first_step", "skipped_batches"):
        stand_ins[name] = (lambda state, order: state["step"]) if name == "first_step" else (lambda *_: 0)
    for name, stand_in in stand_ins.items():
        monkeypatch.setattr(checkpoint_manager, name, stand_in)
    monkeypatch.setattr(CheckpointManager, "_state", lambda self, step: {})
    figures = (Figure("top1", "top-1", "%"),)
    task = SimpleNamespace(
        weight_files=dict, average_files=dict, teachers=(), class_names=(), tokenizer=None, figures=figures
    )
    task.load_state_dict = lambda _: None
    run = SimpleNamespace(
        config=SimpleNamespace(keep_checkpoints=2, rollback=0),
        data=SimpleNamespace(order=SampleOrder(3, 1, 0)),
        model=SimpleNamespace(task=task, saved_shapes={}),
        output=SimpleNamespace(interval=Interval(steps=4), stop_at=math.inf, resume=None),
        has_best=True,
    )
    groups = SimpleNamespace(largest=list, files=None)
    engine = SimpleNamespace(groups=groups, zero_map=None, restore_progress=lambda *_: None)
    trainer = SimpleNamespace(conclude=lambda: None)
    reporter = SimpleNamespace(say=said.append, checkpoint=lambda _: None)
    made = CheckpointManager(run, tmp_path, engine, None, Throughput(), Signals(), reporter)
    made.trainer = trainer
    return made


def resume_from(manager: CheckpointManager, step: int, parent: Path | None = None, **state: object) -> None:
    """Resume from a checkpoint."""
    path = (parent or manager.parent) / f"step-{step:08d}"
    manager._load(Checkpoint(path, {}, {"step": step, "optimizer": {}, "engine": {}, "history": {}, **state}))


def test_the_best_step_is_saved_while_another_save_is_under_way(manager):
    # Catches: the best weights given up because the disk was slow, and those of a later step saved without the mark.
    manager.boundary(4)
    assert manager._saver.busy
    manager.evaluated(5, {}, is_best=True)
    manager.boundary(5)
    assert manager._saver.best == {4: False, 5: True}
    manager.boundary(8)  # no best one: it waits, and training continues
    assert 8 not in manager._saver.best


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_step_that_is_evaluated_after_it_was_saved(manager, tmp_path, elsewhere):
    # Catches: a run that was interrupted within the evaluation of its best step, whose checkpoint then never gets the
    # mark; one that resumes in another folder, where that step is still being saved.
    resume_from(manager, 8, tmp_path / "another" if elsewhere else None)
    manager.boundary(8)
    manager.evaluated(8, {}, is_best=True)
    assert manager._saver.best == {8: True}
    manager.evaluated(8, {}, is_best=False)
    manager.boundary(9)
    assert manager._saver.best == {8: True}


def test_figures_go_to_the_checkpoint_of_their_step_alone(manager):
    # Catches: figures of a step that is not saved, or put into a checkpoint that is still being written; figures lost
    # because the save took longer than the evaluation.
    manager.boundary(4)
    manager.evaluated(4, {"of": 4}, is_best=False)
    assert manager._saver.figures == {}
    manager._saver.wait()
    manager.boundary(5)
    manager.evaluated(6, {"of": 6}, is_best=False)
    manager.boundary(6)
    assert manager._saver.figures == {4: {"of": 4}}
    resume_from(manager, 4)
    manager.evaluated(4, {"of": "4 again"}, is_best=False)
    assert manager._saver.figures == {4: {"of": "4 again"}}


def test_what_was_the_best_before_a_rollback_is_forgotten(manager):
    # Catches: a step that is marked, or saved out of turn, because one of its number was the best before.
    manager.boundary(4)
    manager.evaluated(8, {}, is_best=True)
    manager._saver.wait()
    manager.parent.mkdir(parents=True, exist_ok=True)
    (manager.parent / "best").write_text("step-00000008\n")
    resume_from(manager, 4)
    assert not (manager.parent / "best").exists()
    manager.boundary(5)
    assert 5 not in manager._saver.best
    manager.boundary(8)
    assert manager._saver.best == {4: False, 8: False}


def test_a_step_of_another_folders_course_is_saved_again(manager, tmp_path):
    # Catches: a rollback past the run's own checkpoints, whose steps then count as saved.
    manager.boundary(8)
    manager._saver.wait()
    resume_from(manager, 4, tmp_path / "another")
    manager._saver.best.clear()
    manager.boundary(8)
    assert manager._saver.best == {8: False}


@pytest.mark.parametrize("free", [10**12, 10**10])
def test_what_the_disk_must_hold_is_told_once(manager, said, monkeypatch, free):
    # Catches: a count without the best one or the one that is being written, a need without the weights of the end, and
    # a disk that turns out to be full after a night.
    monkeypatch.setattr(checkpoint_manager.shutil, "disk_usage", lambda _: SimpleNamespace(free=free))
    manager.boundary(1)
    manager.boundary(2)
    [line] = said
    assert "4.0 GB each" in line
    assert "at most 4 at a time" in line
    assert f"with the weights of the end 18.0 GB, and {free // 10**9 if free < 10**12 else 1}.0 " in line
    assert ("WARNING" in line and "make room" in line) == (free < 18 * 10**9)


def test_under_rollback_a_slow_disk_does_not_choose_the_step_to_return_to(manager, said):
    # Catches: a checkpoint that is postponed because the one before is still being written, so that a rollback returns
    # to another step on a slow disk than on a fast one.
    for step in range(1, 13):
        with_rollback(manager).boundary(step)
    assert list(manager._saver.best) == [4, 8, 12]
    assert not [line for line in said if "still being written" in line]
    manager._saver.wait()
    manager._collect()
    assert manager._rollback_to == manager.parent / "step-00000012"


def test_an_interruption_does_not_choose_the_step_to_return_to(manager):
    # Catches: a rollback of a resumed run that returns to the step of the interruption, where the run without one
    # returns to the step before that fell due; that step's checkpoint, removed for the one of the interruption.
    with_rollback(manager).boundary(4)
    manager.signals.received = signal.SIGTERM
    with pytest.raises(Interrupted):
        manager.boundary(6)
    due, at_the_stop = manager._saver.saves[4], manager._saver.saves[6]
    assert due.state["rollback_step"] == at_the_stop.state["rollback_step"] == 4
    assert at_the_stop.spare == "step-00000004"
    (manager.parent / "step-00000004").mkdir(parents=True)
    resume_from(manager, 6, rollback_step=4)
    assert manager._rollback_to == manager.parent / "step-00000004"
    resume_from(manager, 6, rollback_step=5)  # which is not there any more
    assert manager._rollback_to == manager.parent / "step-00000006"


@pytest.fixture
def one_rank(monkeypatch):
    monkeypatch.setattr(inputs, "gather_objects", lambda own: [own])
    return SimpleNamespace(describe=lambda number: f"{number}.jpg")


@pytest.mark.parametrize(
    ("images", "most", "allowed"), [(6, 0.01, 1), (60, 0.01, 1), (300, 0.01, 3), (6, 0.0, 0), (6, 1.0, 6)]
)
def test_one_damaged_image_is_a_share_of_nothing(one_rank, images, most, allowed):
    # Catches: a run of few images that one missing caption ends by the default limit; a limit of 0 that allows one; a
    # count that begins again when a job is preempted, or does not after the limit ended the run.
    for number, ends in ((allowed, False), (allowed + 1, True)):
        skipped = SkippedImages(None, epoch_images=images, max_bad_images=most)
        skipped.add(one_rank, [(3, "broken")] * (number - 1), "training", epoch=0)
        preempted = skipped.state_dict()
        skipped = SkippedImages(None, epoch_images=images, max_bad_images=most)
        skipped.load_state_dict(preempted)
        skipped.add(one_rank, [(3, "broken")] * min(number, 1), "training", epoch=0)
        skipped.gather()
        assert ("(3.jpg: broken)" in skipped.too_many()) == ends
    skipped.load_state_dict(skipped.state_dict())  # the files may have been repaired
    assert not skipped.too_many()
