"""What a run says of its data and of itself, with numbers: nothing is left out or held out in silence."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from curves import read_rows
from deepspeed.accelerator import get_accelerator
from picture_folders import CPU, TINY, make_folder, picture
from runs import ONE_BLOCK, refusal, resolved, run_quietly

from ds_vit.planner.counting import count_flops
from ds_vit.train import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path / "data")


def words(*more: object) -> list[str]:
    return [str(word) for word in (*TINY, "--deepspeed_config", CPU, *more)]


def dry_run(capsys: pytest.CaptureFixture[str], *more: object) -> str:
    """The output of a --dry-run, its tables' lines joined."""
    assert main([*words(*more), "--dry-run"]) == 0
    return " ".join(capsys.readouterr().out.split())


def files_of(source) -> set[str]:
    return {source.describe(number) for number in range(len(source))}


def test_skipped_images(ranks, tmp_path, folder):
    # Catches: a file that is logged at each epoch or by each rank, a count that a resumed run loses or doubles,
    # a bad image of evaluation that nobody is told of.
    for name in ("train/cat/1.png", "val/dog/0.png"):
        (folder / name).write_bytes(b"not a picture")
    run = tmp_path / "run"
    argv = words("--data-dir", folder, "--max-bad-images", 1, "--log-interval", 1, "-b", 3, "--output", run)
    argv += ["--epochs", "3", "--checkpoint-interval", "1", "--resume", "auto", "--max-steps"]
    code, out, err = ranks.run(2, run_quietly, [*argv, "1"])[0]
    assert code == 0, err
    assert f"--resume auto: there is no checkpoint in {run} yet; the run begins at step 0" in out
    code, out, err = ranks.run(2, run_quietly, [*argv, "3"])[0]
    assert code == 0, err
    assert "there is no checkpoint" not in out
    bad = str(folder / "train" / "cat" / "1.png")
    log = [json.loads(line) for line in (run / "skipped_images.jsonl").read_text().splitlines()]
    assert sorted((line["split"], line["file"]) for line in log) == [
        ("evaluation", str(folder / "val" / "dog" / "0.png")),
        ("training", bad),
    ]
    assert {line["reason"] for line in log} == {"13 bytes; not an image that Pillow knows"}
    assert [row["skipped_images"] for row in read_rows(run) if row["kind"] == "train"] == [1, 2, 3]
    assert {row["skipped_images"] for row in read_rows(run) if row["kind"] == "eval"} == {1}
    assert ", 1 skipped" in out
    said = [line.split("  ")[-1] for line in out.splitlines() if line.startswith("step ")]
    assert said == ["skipped images 2", "skipped images 3"]
    summary = json.loads((run / "summary.json").read_text())
    assert summary["skipped_images"] == 3
    assert "skipped_towards_limit" not in summary
    assert "3 are damaged and were replaced (skipped_images.jsonl names them)" in out


def test_counts_beyond_what_is_there(folder, capsys):
    # Catches: outputs that no image is of, top-5 of three classes, a step or an epoch that the run does not reach.
    argv = words("--data-dir", folder, "-b", 1, "--epochs", 2, "--mixup", 0.8)
    classes = sum(path.is_dir() for path in (folder / "train").iterdir())
    run = resolved(argv, world=2)
    epoch, steps = run.data.order.steps_per_epoch, 2 * run.data.order.steps_per_epoch
    more = ("--max-steps", steps + 1, "--check-replicas", steps + 1, "--mixup-off-epoch", 2, "--num-classes", 5)
    length = f"is not reached: the run has {steps} steps, 2 epochs"
    assert set(resolved([*argv, *more], world=2).notes) - set(run.notes) == {
        f"--num-classes 5: the data has {classes} classes, and no image belongs to the other outputs",
        f"--max-steps {steps + 1} {length}",
        f"--check-replicas {steps + 1} {length}",
        f"--mixup-off-epoch 2 {length}",
    }
    within = ("--max-steps", steps, "--check-replicas", steps, "--mixup-off-epoch", 1, "--num-classes", classes)
    assert epoch > 1
    assert resolved([*argv, *within], world=2).notes == run.notes
    argv += ["-b", "2"]  # on one rank
    line = refusal(capsys, [*argv, "--num-classes", classes - 1])
    assert f"--num-classes {classes - 1} is smaller than the {classes} classes of the data" in line
    for number, label in ((classes, f"top-5 of {classes}"), (5, "top-5 of 5"), (6, "top-5")):
        figures = resolved([*argv, "--num-classes", number]).model.task.figures
        assert [(figure.name, figure.label) for figure in figures[:2]] == [("top1", "top-1"), ("top5", label)]


def test_class_folders_without_images(folder, capsys):
    # Catches: a class that vanishes and shifts the numbers of the others; a folder of notes taken for a class.
    argv = words("--data-dir", folder)
    (folder / "train" / "cat" / "notes").mkdir()
    (folder / "train" / ".cache").mkdir()
    assert resolved(argv).data.train_source.class_names == ("cat", "dog")
    for split in ("train", "val"):
        (folder / split / "cow").mkdir()
        (folder / split / "cow" / "1.heic").touch()
    line = refusal(capsys, argv)
    assert "without images: cow (files in there: 1 .heic)" in line
    data = resolved([*argv, "--allow-empty-classes"]).data
    assert data.train_source.class_names == data.val_source.class_names == ("cat", "cow", "dog")
    assert [data.train_source.target(number) for number in (0, 5)] == [0, 2]
    for split in ("train", "val"):
        shutil.move(folder / split, folder / "deeper" / "animals" / "x")
        shutil.move(folder / "deeper", folder / split)
    assert "without images: animals/x/cow" in refusal(capsys, argv)


def test_held_out_images(folder, capsys):
    # Catches: images that are trained on and evaluated, a class that loses its only image, another part at each run.
    shutil.rmtree(folder / "val")
    line = refusal(capsys, words("--data-dir", folder))
    assert "has no validation/" in line
    assert "hold out a tenth of the 6 training images by --val-fraction 0.1, or train without evaluation by" in line
    picture(folder / "train" / "rare" / "0.png")
    for number in range(17):
        picture(folder / "train" / "dog" / f"more{number}.png", seed=number)
    argv = words("--data-dir", folder, "--val-fraction", 0.1)
    plan = resolved(argv)
    train, val = files_of(plan.data.train_source), files_of(plan.data.val_source)
    assert (len(train), len(val)) == (21, 3)
    assert not train & val
    assert train | val == {str(path) for path in (folder / "train").rglob("*.png")}
    targets = [plan.data.val_source.target(number) for number in range(3)]
    assert np.bincount(targets).tolist() == [1, 2]
    assert (
        "--val-fraction 0.1: 3 of the 24 images of train are held out for evaluation, the same ones in every run, from "
        "2 classes (1 have one image only and keep it)"
    ) in plan.notes
    assert files_of(resolved([*argv, "--seed", "7"]).data.val_source) == val
    tenth = resolved(words("--data-dir", folder, "--train-split", "train[:10%]", "--val-split", "", "-b", 1)).data
    assert not files_of(tenth.train_source) & val
    evaluation = [*argv, "--eval-only"]
    for flag in ("--max-steps", "--warmup-steps"):
        place = evaluation.index(flag)
        del evaluation[place : place + 2]
    assert resolved(evaluation).data.val_source.fingerprint == plan.data.val_source.fingerprint


def test_what_is_trained(capsys):
    # Catches: a linear probe that is told to cost as much as training all.
    argv = ("--dataset", "digits", "--linear-probe", "--eval-interval", 0)
    assert "250 of them trained" in dry_run(capsys, *argv)
    model = resolved(words(*argv)).model
    forward = count_flops(model.whole).forward
    assert forward < count_flops(model.whole, model.frozen).training < 1.1 * forward
    assert count_flops(model.whole).training == 3 * forward


def test_files_that_are_left_out(folder):
    (folder / "train" / "cat" / "README").touch()
    (folder / "train" / "cat" / "0.heic").touch()
    said = "train: files of kinds that are not read are left out: 1 without suffix, 1 .heic"
    assert said in resolved(words("--data-dir", folder)).notes


def test_idle_gpus(folder, monkeypatch, capsys):
    # Catches: a machine with 4 GPUs of which one computes, and nobody is told; the line under a launcher, too.
    accelerator = get_accelerator()
    monkeypatch.setattr(accelerator, "device_name", lambda number=None: "cuda")
    monkeypatch.setattr(accelerator, "device_count", lambda: 4)
    monkeypatch.setattr("ds_vit.training.tables.hardware_name", lambda device: "")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    said = "one of 4 GPUs is used; `ds-vit launch train …` with the same flags trains on all 4"
    assert said in dry_run(capsys, "--data-dir", folder)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    assert "GPUs is used" not in dry_run(capsys, "--data-dir", folder)


NVIDIA_SMI = """#!/bin/sh
case "$1" in
-L) echo "GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-1)"; echo "GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-2)" ;;
*) echo 535.104.05; echo 535.104.05 ;;
esac
"""


@pytest.mark.parametrize(
    ("cuda", "why"),
    [
        ("13.0", "it is built for CUDA 13.0, which needs driver 580 or newer, and the driver is 535.104.05"),
        ("12.8", "it is built for CUDA 12.8"),
        (None, "it is built without CUDA"),
    ],
)
def test_gpus_that_torch_cannot_use(folder, tmp_path, monkeypatch, capsys, cuda, why):
    # Catches: hours on the CPU of a machine with GPUs, for a torch that its driver is too old for.
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvidia-smi").write_text(NVIDIA_SMI)
    (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setattr(torch.version, "cuda", cuda)
    for name in ("DS_ACCELERATOR", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    gpu = ("--deepspeed_config", "ds_configs/zero1_bf16.json", "--data-dir", folder)
    said = refusal(capsys, words(*gpu, "--dry-run"))
    assert "nvidia-smi lists 2 GPUs (NVIDIA A100-SXM4-40GB), but torch" in said
    assert f"can use none: {why}; docs/install_cluster.md says" in said
    dry_run(capsys, "--data-dir", folder)  # cpu_zero1_fp32.json names the CPU
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    dry_run(capsys, *gpu)


@pytest.mark.parametrize(
    ("name", "precision"), [("zero1_bf16", "bf16"), ("zero1_bf16_auto", "bf16"), ("zero1_fp32", None)]
)
def test_a_gpu_configuration_on_the_cpu(folder, tmp_path, monkeypatch, capsys, name, precision):
    # Catches: a job that lost its GPUs, of which one row of a table is the only sign.
    monkeypatch.setenv("PATH", str(tmp_path))
    argv = ("--deepspeed_config", f"ds_configs/{name}.json", "--data-dir", folder, "--lr", 1)
    warning = f"warning: no usable GPU: this run trains on the CPU, in {precision}, although"
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    assert warning not in dry_run(capsys, *argv)
    monkeypatch.delenv("DS_ACCELERATOR")
    assert (warning in dry_run(capsys, *argv)) == (precision is not None)


@pytest.mark.parametrize(
    ("more", "augmentation"),
    [
        ((), "a random crop of 8% to 100% of the area, colour jitter 0.4, flip 50%"),
        (("--no-aug",), "none: resized, the centre cropped"),
        (
            ("--aa", "rand-m9", "--hflip", 0, "--reprob", 0.25, "--mixup", 0.8),
            "a random crop of 8% to 100% of the area, rand-m9, erased 25%, mixup 0.8",
        ),
        (("--task", "dino", "--prototypes", 8), "its crops have DINO's own augmentation"),
    ],
)
def test_the_batch_and_the_augmentation(folder, capsys, more, augmentation):
    # Catches: "a micro-batch x accumulated x data-parallel", and an augmentation that is on without a word.
    said = dry_run(capsys, "--data-dir", folder, "-b", 2, "--grad-accum-steps", 3, *more)
    assert "6 = 1 rank × 2 images × 3 micro-batches (" in said
    assert augmentation in " ".join(said.replace("│", " ").split()), said


def test_a_finished_run_says_so(ranks, tmp_path):
    # Catches: `--resume auto` that ends at once, with a table as if it had trained.
    argv = [*ONE_BLOCK, "--deepspeed_config", CPU, "--val-split", ""]
    argv += ["-b", 8, "--max-steps", 1, "--output", tmp_path / "a"]
    said = [ranks.run(1, run_quietly, [str(word) for word in (*argv, *more)]) for more in ((), ("--resume", "auto"))]
    assert [code for [(code, _, _)] in said] == [0, 0]
    assert ["this run is finished: all of its 1 steps are in" in out for [(_, out, _)] in said] == [False, True]
