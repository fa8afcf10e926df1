"""The seam of a task: another metric, another rule for the best weights; scheduled values against DINOv2's."""

import json
import re
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from curves import read_rows
from runs import DIGITS, refusal, resolved, run_quietly

from ds_vit.checkpoint.folder import Checkpoint
from ds_vit.config.flag import spelling
from ds_vit.config.schema import RunConfig
from ds_vit.data.field import Field
from ds_vit.data.sources.source import fingerprint_of
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.tasks.classification.task import Classification
from ds_vit.tasks.distillation.task import Distillation
from ds_vit.tasks.metrics import Figure, Means
from ds_vit.tasks.registry import all_tasks, find_task, idle_flags
from ds_vit.tasks.task import Horizon, cosine, linear_warmup
from ds_vit.training.resolve.record import identity_of
from ds_vit.training.resume import Resume, check_same_run

STAMP = {"kind", "step", "epoch", "wall_seconds"}
WORDS = [
    *(*DIGITS, "-b", 16, "-vb", 60, "--train-split", "train[:10%]"),
    *("--model-kwargs", "patch_size=4", "embed_dim=24", "depth=2", "num_heads=2", "--no-aug", "--sched", "constant"),
    *("--max-steps", 18, "--epochs", 2, "--lr", 0.02, "--checkpoint-interval", 9, "--task", "test_task:ByLoss"),
]


class Margin(Means):
    """The mean loss, and the mean margin of the right class over the best wrong one."""

    def update(self, outputs, batch):
        """As `Metrics.update`."""
        targets = batch["targets"]
        right = outputs.gather(1, targets[:, None])[:, 0]
        wrong = outputs.scatter(1, targets[:, None], -torch.inf).amax(1)
        self.count((F.cross_entropy(outputs, targets, reduction="none"), right - wrong), batch)


class ByLoss(Classification):
    """Classification whose best weights are those of the least loss."""

    figures = (
        Figure("loss", "loss", digits=5, higher_is_better=False),
        Figure("margin", "margin of the class", "nats", digits=3),
    )

    def metrics(self, device):
        """As `Task.metrics`."""
        return Margin(device, "loss", "margin")

    def concerns(self, figures, step, steps_per_epoch):
        """As `Task.concerns`."""
        return {"margin": f"at step {step} the margin is small"} if "margin" in figures else {}


@pytest.mark.slow
def test_a_metric_of_its_own(ranks, tmp_path):
    # Catches: a list of metrics' names in the trainer, the reporter, the report, the summary or the checkpoints; a
    # "best" that is always the largest; a warning that is lost, or printed at each evaluation.
    config = "ds_configs/cpu_zero1_fp32.json"
    argv = [*WORDS, "--deepspeed_config", config, "--output", tmp_path / "run", "--pp", 2]
    codes, out, err = zip(*ranks.run(2, run_quietly, argv), strict=True)
    assert codes == (0, 0)
    assert re.findall(r"WARNING: at step (\d+) the margin is small", "".join(out + err)) == ["8"]
    rows = [row for row in read_rows(tmp_path / "run") if row["kind"] == "eval"]
    assert [set(row) for row in rows] == [STAMP | {"loss", "margin", "images", "skipped_images"}] * 2
    losses = {row["step"]: row["loss"] for row in rows}
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["best_loss"], summary["last_loss"]) == (min(losses.values()), rows[-1]["loss"])
    assert (summary["last_margin"], "best_top1" in summary) == (rows[-1]["margin"], False)
    assert "margin of the class on the validation split" in (tmp_path / "run" / "report.html").read_text()
    best = (tmp_path / "run" / "checkpoints" / "best").read_text().strip()
    assert int(best.removeprefix("step-")) == min(losses, key=losses.get)


def test_a_word_that_is_no_task(capfd):
    # Catches: a KeyError for a typing mistake.
    from ds_vit.train import main

    argv = [*WORDS[:-1], "by-loss", "--deepspeed_config", "ds_configs/cpu_zero1_fp32.json"]
    assert main([str(word) for word in argv]) == 2
    assert "there is no --task by-loss; there is classification" in capfd.readouterr().err


@pytest.mark.parametrize("task", all_tasks(), ids=lambda task: task.__name__)
def test_each_flag_without_effect_is_an_error_with_its_reason(task):
    # Catches: a flag that is taken and forgotten: one that the task rejects, one of a classifier, one of another task.
    config = RunConfig(task=task.name, kd_model_name="a teacher" if task is Distillation else "")
    assert find_task(config) is task
    for flag, reason in idle_flags(task).items():
        said = f"{spelling(flag)} has no effect with --task {task.name}{reason}"
        requested = mock.patch.object(RunConfig, "is_requested", lambda _, name, flag=flag: name == flag)
        with requested, pytest.raises(UserError, match=re.escape(said)):
            find_task(config)


class Numbers(Field):
    """Two numbers of each image, from a table."""

    def __init__(self, table, entry, name):
        super().__init__(name, (2,), torch.float32, stage="last", entry=entry)
        self.table = table

    def read(self, sample):
        """As `Field.read`."""
        return self.table[sample.index]

    def identity(self):
        """As `Field.identity`."""
        return fingerprint_of([self.table])


class WithNumbers(Classification):
    """Classification with a table of numbers next to the images."""

    name = "with-numbers"
    table, entry, field = np.zeros((1797, 2), dtype=np.float32), "image", "numbers"

    def fields(self, *, training):
        """As `Task.fields`."""
        return *super().fields(training=training), Numbers(self.table, self.entry, self.field)


def test_a_field_of_its_own_is_part_of_the_run(monkeypatch, capsys):
    # Catches: another table on resume that goes unseen, a source without the entry that shows in a loader's process,
    # numbers of one image next to two that are mixed, and those that a rank makes which is not sent the pairs; a field
    # that takes the place of another.
    argv = [*WORDS[:-2], "--task", "test_task:WithNumbers", "--deepspeed_config", "ds_configs/cpu_zero1_fp32.json"]
    before = identity_of(resolved(argv))
    resume = Resume(Checkpoint(Path("x"), {}, {"run": before, "config": {}}), falls_back=True)
    assert check_same_run(resume, identity_of(resolved(argv)), {}) == []
    with monkeypatch.context() as patch:
        patch.setattr(WithNumbers, "table", WithNumbers.table + 1)
        with pytest.raises(UserError, match=r"fields: numbers is \w+ there and \w+ here; give the same"):
            check_same_run(resume, identity_of(resolved(argv)), {})
    with monkeypatch.context() as patch:
        patch.setattr(WithNumbers, "entry", "depth")
        assert "needs the entry 'depth' for each image; the data of digits" in refusal(capsys, argv)
    assert "cannot mix numbers of --task test_task:WithNumbers" in refusal(capsys, [*argv, "--mixup", 0.5])
    for name in ("keys", "images"):
        with monkeypatch.context() as patch:
            patch.setattr(WithNumbers, "field", name)
            assert f"has a second field '{name}': names are unique" in refusal(capsys, argv)
    with monkeypatch.context() as patch:
        patch.setattr(WithNumbers, "entry", "")
        patch.setattr(Numbers, "mixes", True)
        assert "cannot mix numbers of --task test_task:WithNumbers" in refusal(capsys, [*argv, "--mixup", 0.5])


def test_no_number_is_never_the_best():
    # Catches: one evaluation that is nan, after which no weights are the best any more.
    lower, higher = ByLoss.figures
    assert lower.best(float("nan"), 0.5, 0.7) == 0.5
    assert higher.best(0.1, float("nan"), 0.3) == 0.3


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
