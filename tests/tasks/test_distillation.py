"""Distillation: the curve of timm's own task classes, and a teacher that is in no file."""

from __future__ import annotations

import functools
import itertools
from types import SimpleNamespace

import pytest
import timm
import torch
import torch.nn.functional as F
from curves import assert_same_curve, train_in
from project import write_config
from runs import refusal, resolved
from safetensors.torch import load_file, save_file
from timm.loss import SoftTargetCrossEntropy
from timm.models import save_for_hf
from timm.optim import param_groups_weight_decay
from timm.task import FeatureDistillationTask, LogitDistillationTask, TokenDistillationTask

from ds_vit.checkpoint.folder import newest, open_checkpoint
from ds_vit.models.keyed_init import initialise
from ds_vit.tasks.distillation.task import loss_weights
from ds_vit.training.inputs import InputPipeline

STEPS, BATCH, CLIP, TEMPERATURE = 10, 24, 0.1, 3.0
NAME, WITH_TOKEN = "vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"
STUDENT = {"patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2}
# Dropout that only evaluation mode switches off.
TEACHER = {"patch_size": 4, "embed_dim": 32, "depth": 3, "num_heads": 2, "proj_drop_rate": 0.3, "drop_path_rate": 0.3}
PIXELS = {"mean": (0.5, 0.4, 0.3), "std": (0.3, 0.2, 0.4)}  # of the teacher
NO_DECAY = [f"{prefix}{name}" for prefix in ("", "student.") for name in ("cls_token", "dist_token", "pos_embed")]
SGD = {"type": "SGD", "params": {"lr": 0.3, "momentum": 0.9, "weight_decay": 0.05}}
RUN = [
    *("--dataset", "digits", "--model", NAME, "--img-size", 16, "--workers", 0, "--val-split", ""),
    *("--model-kwargs", *(f"{key}={value}" for key, value in STUDENT.items())),
    *("--mixup", 0.4, "--sched", "constant", "--warmup-epochs", 0, "--epochs", 1, "--log-interval", 1),
    *("--max-steps", STEPS, "--checkpoint-interval", 0),
]
KINDS = {
    "soft": ["--kd-temperature", TEMPERATURE, "--task-loss-weight", 0.3],
    "hard": ["--kd-loss-type", "hard", "--distill-loss-weight", 0.7, "--task-loss-weight", 0.5],
    "feature": ["--kd-distill-type", "feature", "--distill-loss-weight", 5.0],
    "token": ["--kd-distill-type", "token", "--kd-temperature", TEMPERATURE, "--model", WITH_TOKEN],
    "hard token": [
        *("--kd-distill-type", "token", "--kd-token-distill-type", "hard", "--model", WITH_TOKEN),
        *("--task-loss-weight", 0.6),
    ],
}


def student_name(kind):
    """A kind's student."""
    return WITH_TOKEN if "token" in kind else NAME


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    """A folder with timm's random student, and a teacher in timm's own form with another normalisation."""
    folder = tmp_path_factory.mktemp("weights")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for name in (NAME, WITH_TOKEN):
            student = timm.create_model(name, num_classes=10, img_size=16, **STUDENT)
            save_file(student.state_dict(), str(folder / f"{name}.safetensors"))
        write_teacher(folder / "teacher")
    return folder


def write_teacher(folder, num_classes=10, **changes):
    """A random teacher that is sure of what it says, as timm saves a model."""
    kwargs = {**TEACHER, **changes}
    model = timm.create_model(NAME, num_classes=num_classes, img_size=16, **kwargs)
    torch.nn.init.normal_(model.head.weight, std=0.7)
    model.pretrained_cfg |= PIXELS
    save_for_hf(model, folder, safe_serialization=True, model_args={"img_size": 16, **kwargs})


def command(weights, output, kind, micro_batch, accumulation, stage, *words):
    """The command line of a run, except its ranks."""
    config = write_config(output.with_suffix(".json"), stage, optimizer=SGD, gradient_clipping=CLIP)
    argv = ["--deepspeed_config", config, *RUN, *KINDS[kind], "-b", micro_batch, "--grad-accum-steps", accumulation]
    argv += ["--initial-checkpoint", weights / f"{student_name(kind)}.safetensors", "--output", output]
    argv += ["--kd-model-name", f"local-dir:{weights / 'teacher'}"]
    return [str(word) for word in [*argv, *words]]


# ---- timm's task -----------------------------------------------------------------------------------------------------


class HardDistillationTask(LogitDistillationTask):
    """timm has hard targets for distillation tokens only."""

    def forward(self, input, target):
        logits = self.trainable_module(input)
        with torch.no_grad():
            taught = self.teacher(self.teacher.normalize_input(input, self.student_mean, self.student_std))
        loss = self.task_loss_weight * self.criterion(logits, target)
        return {"loss": loss + self.distill_loss_weight * F.cross_entropy(logits, taught.argmax(1))}


def timm_task(weights, kind):
    """timm's task of a kind, with the same weights."""
    name = student_name(kind)
    student = timm.create_model(name, num_classes=10, img_size=16, **STUDENT)
    student.load_state_dict(load_file(str(weights / f"{name}.safetensors")))
    teacher = timm.create_model(f"local-dir:{weights / 'teacher'}", pretrained=True)
    assert teacher.pretrained_cfg["mean"] != student.pretrained_cfg["mean"]
    shared = {"student_model": student, "teacher_model": teacher.requires_grad_(False), "verbose": False}
    shared |= {"criterion": SoftTargetCrossEntropy(), "device": torch.device("cpu")}
    if kind == "soft":
        return LogitDistillationTask(**shared, temperature=TEMPERATURE, task_loss_weight=0.3)
    if kind == "feature":
        return FeatureDistillationTask(**shared, distill_loss_weight=5.0)
    if kind == "token":
        return TokenDistillationTask(**shared, temperature=TEMPERATURE)
    if kind == "hard token":
        return TokenDistillationTask(**shared, distill_type="hard", task_loss_weight=0.6)
    return HardDistillationTask(**shared, distill_loss_weight=0.7, task_loss_weight=0.5)


@pytest.fixture(scope="module")
def expected(weights, tmp_path_factory):
    """Kind → loss and gradient norm of each step in torch and timm alone, on the run's own batches."""
    folder = tmp_path_factory.mktemp("expected")

    @functools.cache
    def curve(kind):
        plan = resolved(command(weights, folder / kind, kind, BATCH, 1, 1))
        engine = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32)
        batches = InputPipeline(plan, engine, SimpleNamespace(waited=lambda seconds: None)).training()
        task = timm_task(weights, kind).train()
        if kind == "feature":  # drawn by the run's seed
            whole = plan.model.whole
            [layer] = plan.model.task.towers(whole)["projection"]
            initialise(whole.projection, [layer], seed=plan.config.seed, device="cpu")
            task.trainable_module.projection.load_state_dict(layer.linear.state_dict())
        trained = dict(task.trainable_module.named_parameters())
        groups = param_groups_weight_decay(
            task.trainable_module, SGD["params"]["weight_decay"], no_weight_decay_list=NO_DECAY
        )
        optimizer, rows = torch.optim.SGD(groups, **SGD["params"]), []
        for step, batch in enumerate(itertools.islice(batches, STEPS), start=1):
            optimizer.zero_grad()
            loss = task(batch["images"], batch["targets"])["loss"]
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(trained.values(), CLIP)
            optimizer.step()
            rows.append({"kind": "train", "step": step, "loss": loss.item(), "grad_norm": norm.item()})
        assert all(row["grad_norm"] > 1.5 * CLIP for row in rows), "clipping does nothing"
        return rows

    return curve


# ---- our runs: tests/parallel/test_layouts.py has more layouts -------------------------------------------------------


def train(ranks, weights, output, kind, world, *layout):
    """All rows of a run; `layout` is the micro-batch, accumulation, the ZeRO stage and further flags."""
    return train_in(ranks, world, command(weights, output, kind, *layout))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", KINDS)
def test_the_curve_is_that_of_timms_task(ranks, weights, expected, tmp_path, kind):
    # Catches: a teacher in training mode, images normalised for the student, a temperature or a weight that is left
    # out, a mean over classes, a teacher that is trained.
    assert_same_curve(expected(kind), train(ranks, weights, tmp_path / "run", kind, 2, BATCH // 4, 2, 1), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["feature", "soft"])
def test_a_run_resumes_in_another_layout_without_the_teacher_in_its_files(ranks, weights, expected, tmp_path, kind):
    # Catches: a teacher in checkpoints or in the exported weights, one that is not loaded again after a resume, one
    # that has trained since the student began, and a way out that is none.
    words = ("--checkpoint-interval", 5)
    train(ranks, weights, tmp_path / "run", kind, 2, BATCH // 2, 1, 3, *words, "--max-steps", 5)
    write_teacher(tmp_path / "other")
    argv = command(weights, tmp_path / "run", kind, BATCH, 1, 1, "--resume", "auto")
    with pytest.raises(ValueError, match="teacher: its weights are others "):
        resolved([*argv, "--kd-model-name", f"local-dir:{tmp_path / 'other'}"])
    student = command(weights, tmp_path / "student", "soft", BATCH, 1, 1, "--kd-model-name", "", "--kd-checkpoint")
    student += [str(tmp_path / "run"), "--max-steps", "1", "--checkpoint-interval", "1", "--resume", "auto"]
    train_in(ranks, 1, student)
    rows = train(ranks, weights, tmp_path / "run", kind, 1, BATCH // 4, 4, 1, *words, "--resume", "auto")
    assert_same_curve(expected(kind), rows, rtol=1e-5)
    with pytest.raises(ValueError, match="name the checkpoint that this run named"):
        resolved(student)
    resolved([*student, "--kd-checkpoint", tmp_path / "run" / "checkpoints" / "step-00000005"])
    names = set(timm.create_model(NAME, num_classes=10, img_size=16, **STUDENT).state_dict())
    projection = {"projection.linear.weight", "projection.linear.bias"} if kind == "feature" else set()
    checkpoint, _ = newest(tmp_path / "run" / "checkpoints")
    assert set(open_checkpoint(checkpoint.path).tensors("model")) == names | projection
    assert set(load_file(str(tmp_path / "run" / "model.safetensors"))) == names
    if projection:
        assert set(load_file(str(tmp_path / "run" / "projection.safetensors"))) == projection
    # Both a run's folder and its checkpoint are weights to start from, and a teacher.
    for source in (tmp_path / "run" / "model.safetensors", checkpoint.path):
        argv = command(weights, tmp_path / "next", "soft", BATCH, 1, 1, "--initial-checkpoint", source)
        resolved([*argv, "--kd-model-name", "", "--kd-checkpoint", tmp_path / "run"])


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [*itertools.product((None, 0.0, 0.3), repeat=2)])
def test_the_weights_of_the_losses_are_timms(given):
    """One weight without the other: timm's three rules."""
    task, distill = given
    model = timm.create_model(NAME, num_classes=10, img_size=16, **STUDENT)
    theirs = LogitDistillationTask(model, model, task_loss_weight=task, distill_loss_weight=distill, verbose=False)
    assert loss_weights(task, distill) == (theirs.task_loss_weight, theirs.distill_loss_weight)


def test_a_teacher_of_other_classes_is_refused(capsys, weights, tmp_path):
    write_teacher(tmp_path / "other", num_classes=7)
    argv = command(weights, tmp_path / "run", "soft", BATCH, 1, 1, "--kd-model-name", f"local-dir:{tmp_path / 'other'}")
    assert "has 7 classes and the trained model 10: both need the same" in refusal(capsys, argv)


REFUSED = {
    "--pp": (("--pp", 2), "--pp 2: a student and its teacher are not split into pipeline stages"),
    "no name": (
        ("--kd-checkpoint", "{weights}/vit_tiny_patch16_224.safetensors", "--kd-model-name", ""),
        "give --kd-model-name",
    ),
    "no token": (("--kd-distill-type", "token"), "vit_tiny_patch16_224 has no distillation token"),
    "no such run": (("--kd-checkpoint", "{weights}/none"), "none does not exist"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(capsys, weights, tmp_path, case):
    words, said = REFUSED[case]
    words = [str(word).format(weights=weights) for word in words]
    argv = command(weights, tmp_path / "run", "soft", BATCH, 1, 1, *words)
    if case == "--pp":
        with pytest.raises(ValueError, match=said):
            resolved(argv, world=2)
    else:
        assert said in refusal(capsys, argv)


def test_flags_without_a_teacher_are_refused(capsys, weights, tmp_path):
    argv = command(weights, tmp_path / "run", "hard", BATCH, 1, 1, "--kd-model-name", "")
    argv = [word for word in argv if word not in ("--task-loss-weight", "0.5", "--distill-loss-weight", "0.7")]
    assert "without a teacher: --kd-model-name or --kd-checkpoint" in refusal(capsys, argv)
