"""The seam of a task: another metric, another rule for the best weights; scheduled values against DINOv2's."""

import json

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from curves import read_rows
from runs import DIGITS

from ds_vit.tasks.classification.task import Classification
from ds_vit.tasks.metrics import Figure, Metrics
from ds_vit.tasks.task import Horizon, cosine, linear_warmup

STAMP = {"kind", "step", "epoch", "wall_seconds"}
WORDS = [
    *(*DIGITS, "-b", 16, "--train-split", "train[:10%]"),
    *("--model-kwargs", "patch_size=4", "embed_dim=24", "depth=2", "num_heads=2", "--no-aug", "--sched", "constant"),
    *("--max-steps", 18, "--epochs", 2, "--lr", 0.02, "--checkpoint-interval", 9, "--task", "test_task:ByLoss"),
]


class Margin(Metrics):
    """The mean loss, and the mean margin of the right class over the best wrong one."""

    def update(self, outputs, batch):
        """As `Metrics.update`."""
        targets = batch["targets"]
        right = outputs.gather(1, targets[:, None])[:, 0]
        wrong = outputs.scatter(1, targets[:, None], -torch.inf).amax(1)
        rows = torch.stack([F.cross_entropy(outputs, targets, reduction="none"), right - wrong, torch.ones_like(right)])
        self.sums += torch.where(batch["valid"], rows.double(), 0.0).sum(1)

    def compute(self):
        """As `Metrics.compute`."""
        loss, margin, images = self.sums.tolist()
        return {"loss": loss / images, "margin": margin / images, "images": int(images)}


class ByLoss(Classification):
    """Classification whose best weights are those of the least loss."""

    figures = (
        Figure("loss", "loss", digits=5, higher_is_better=False),
        Figure("margin", "margin of the class", "nats", digits=3),
    )

    def metrics(self, device):
        """As `Task.metrics`."""
        return Margin(3, device)


def train_by_loss(argv):
    """On a rank: train with the task above."""
    from ds_vit.train import main

    return main([str(word) for word in argv])


def test_a_metric_of_its_own(ranks, tmp_path):
    # Catches: a list of metrics' names in the trainer, the reporter, the report, the summary or the checkpoints; a
    # "best" that is always the largest.
    config = "ds_configs/cpu_zero1_fp32.json"
    argv = [*WORDS, "--deepspeed_config", config, "--output", tmp_path / "run", "--pp", 2]
    assert ranks.run(2, train_by_loss, argv) == [0, 0]
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
