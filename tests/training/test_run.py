"""A whole run: what it writes, what it shows, and every switch that is not in the layout matrix."""

import csv
import functools
import json
import re

import oracle
import pytest
import torch
import yaml
from curves import assert_same_curve, read_rows, train_in, train_rows
from deepspeed.runtime import lr_schedules
from picture_folders import made
from PIL import Image
from project import ROOT
from runs import KINDS, ONE_BLOCK, refusal, resolved, run_quietly
from safetensors.torch import load_file

from ds_vit.fault_tolerance.errors import UserError

CONFIGS = ROOT / "ds_configs"
MODEL = ["--model", oracle.MODEL, *oracle.kwargs_words(), "--img-size", 16]
DIGITS = [*MODEL, "--dataset", "digits", "--workers", 0, "--log-interval", 1, "-b", 16, "--warmup-steps", 1]

TRAIN_KEYS = {
    *("kind", "step", "epoch", "wall_seconds", "loss", "epoch_loss", "lr", "grad_norm", "loss_scale"),
    *("images_per_second", "tflops_per_accelerator", "mfu", "data_wait_fraction", "memory_bytes"),
    *("images_seen", "skipped_images"),
}
SUMMARY_KEYS = {
    *("model", "num_parameters", "class_names", "layout", "precision", "steps", "exit", "memory", "step_seconds"),
    *("best_top1", "last_top1", "best_top5", "last_top5", "eval_images", "images_per_second", "wall_seconds"),
    "skipped_images",
}
EVALUATION_KEYS = {
    *("kind", "step", "epoch", "wall_seconds", "top1", "top5", "loss", "images", "skipped_images"),
}


def json_file(folder, base, **changes):
    """A shipped file with changes."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads((CONFIGS / base).read_text()), **changes}))
    return path


@pytest.fixture(scope="module")
def digits_run(ranks, tmp_path_factory):
    """A short run on two ranks: its folder, and what each rank said."""
    output = tmp_path_factory.mktemp("digits") / "run"
    argv = [*DIGITS, "--deepspeed_config", CONFIGS / "cpu_zero1_fp32.json", "--max-steps", 5, "--output", output]
    return output, ranks.run(2, run_quietly, argv)


def test_files_of_a_run(digits_run):
    """The contract: names of files, keys of rows and of the summary."""
    output, said = digits_run
    assert [code for code, _, _ in said] == [0, 0]
    names = {path.name for path in output.iterdir()}
    expected = {"config.yaml", "deepspeed.json", "metrics.jsonl", "summary.json", "tensorboard", "model.safetensors"}
    expected |= {"classes.json", "best.safetensors", "checkpoints", "deepspeed.derived.json", "starts.jsonl"}
    expected |= {"report.html", "predictions.csv", "augmented.png", "augmented.json", "mistakes.png", "mistakes.json"}
    expected |= {"token-norms.png", "attention.png", "patch-pca.png"}
    assert names == expected
    rows = read_rows(output)
    assert [row["step"] for row in train_rows(rows)] == [1, 2, 3, 4, 5]
    assert all(set(row) == TRAIN_KEYS for row in train_rows(rows))
    [evaluation] = [row for row in rows if row["kind"] == "eval"]
    assert set(evaluation) == EVALUATION_KEYS
    assert evaluation["images"] == 355
    assert [row["step"] for row in rows if row["kind"] == "checkpoint"] == [5]
    summary = json.loads((output / "summary.json").read_text())
    assert set(summary) == SUMMARY_KEYS
    assert summary["layout"] == {"pp": 1, "dp": 2, "tp": 1, "zero_stage": 1}
    assert (summary["steps"], summary["eval_images"], summary["exit"]) == (5, 355, "completed")
    assert summary["last_top1"] == evaluation["top1"]
    assert [row["images_seen"] for row in train_rows(rows)] == [32, 64, 96, 128, 160]
    assert list((output / "tensorboard").glob("events.out.tfevents.*"))
    deepspeed = json.loads((output / "deepspeed.json").read_text())
    assert (deepspeed["train_batch_size"], deepspeed["gradient_clipping"]) == (32, 1.0)
    assert "auto" not in (output / "deepspeed.json").read_text()


def test_tensorboard_has_the_same_figures(digits_run):
    """A curve that differs from metrics.jsonl."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    output = digits_run[0]
    board = EventAccumulator(str(output / "tensorboard"))
    board.Reload()
    losses = [(event.step, event.value) for event in board.Scalars("train/loss")]
    assert losses == [(row["step"], pytest.approx(row["loss"])) for row in train_rows(read_rows(output))]
    [evaluation] = [row for row in read_rows(output) if row["kind"] == "eval"]
    assert board.Scalars("eval/top1")[0].value == pytest.approx(evaluation["top1"])
    groups = {tag.partition("/")[0] for tag in board.Tags()["scalars"]}
    assert groups == {"train", "grad", "time", "memory", "eval"}
    assert "ZeRO-" in board.Tensors("layout/text_summary")[0].tensor_proto.string_val[0].decode()
    assert [tag for tag in board.summary_metadata if tag.startswith("_hparams_/")] != []


def test_only_rank_0_speaks(digits_run):
    """Two ranks' lines mixed, or DeepSpeed's chatter."""
    (_, first, first_err), (_, second, second_err) = digits_run[1]
    assert second == second_err == ""
    assert "step 5/5" in first
    assert "eval at step 5: top-1" in first
    assert "32 = 2 ranks × 16 images × 1 micro-batch" in first
    assert "INFO" not in first + first_err


def test_config_yaml_runs_the_same_again(ranks, tmp_path, digits_run):
    """config.yaml must be enough: the same curve from it and another --output alone."""
    output = digits_run[0]
    rows = train_in(ranks, 2, ["--recipe", output / "config.yaml", "--output", tmp_path / "again"])
    assert_same_curve(read_rows(output), rows, rtol=1e-6)
    again = yaml.safe_load((tmp_path / "again" / "config.yaml").read_text())
    first = yaml.safe_load((output / "config.yaml").read_text())
    assert again == first


@pytest.mark.slow
def test_config_yaml_evaluates_its_weights(ranks, tmp_path):
    """README's command, after a run with checkpoints, a list of samples and all that evaluation has no use for."""
    config = json_file(tmp_path, "cpu_zero1_fp32.json", gradient_clipping="auto")
    argv = [*DIGITS, "--deepspeed_config", config, "--max-steps", 2, "--lr", 0.01, "--model-ema", "--clip-grad", 0.5]
    argv += ["--checkpoint-interval", 1, "--log-samples", "--mixup", 0.8, "--eval-interval", 2]
    trained = train_in(ranks, 1, [*argv, "--output", tmp_path / "run"])
    argv = ["--recipe", tmp_path / "run" / "config.yaml", "--eval-only", "--output", tmp_path / "check"]
    argv += ["--initial-checkpoint", tmp_path / "run" / "model.safetensors"]
    [row] = train_in(ranks, 3, [*argv, "--deepspeed_config", CONFIGS / "cpu_zero3_fp32.json"])
    [last] = [row for row in trained if row["kind"] == "eval"]
    assert (row["top1"], row["top5"], row["images"]) == (last["top1"], last["top5"], last["images"])
    assert row["loss"] == pytest.approx(last["loss"], rel=1e-5)
    assert not (tmp_path / "check" / "samples").exists()
    assert not (tmp_path / "check" / "model.safetensors").exists()
    assert json.loads((tmp_path / "check" / "summary.json").read_text())["last_top1"] == last["top1"]


@pytest.fixture(scope="module")
def in_fp32(ranks, tmp_path_factory):
    """An optimizer block of the JSON → the rows of three steps with it on one rank in fp32; each is trained once."""

    @functools.cache
    def rows(optimizer):
        path = json_file(tmp_path_factory.mktemp("fp32"), "cpu_zero1_fp32.json", optimizer=json.loads(optimizer))
        return train_in(ranks, 1, [*DIGITS, "--deepspeed_config", path, "--max-steps", 3, "--val-split", ""])

    return rows


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("base", "world"),
    [
        ("cpu_zero1_fp32.json", 1),
        ("zero0_bf16.json", 2),
        ("zero1_bf16.json", 2),
        ("zero1_bf16_checkpointing.json", 2),
        ("zero2_bf16.json", 1),
        ("zero3_bf16.json", 2),
        ("zero3_offload_bf16.json", 2),
        ("zero1_fp32.json", 1),
        ("lamb_zero1_bf16.json", 2),
        ("muon_zero1_bf16.json", 2),
    ],
)
def test_shipped_files_train(ranks, in_fp32, tmp_path, base, world):
    """A shipped file that DeepSpeed refuses, or whose curve leaves fp32's by more than bf16's rounding."""
    data = json.loads((CONFIGS / base).read_text())
    small = {"reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000}
    if "zero_optimization" in data and data["zero_optimization"]["stage"]:
        data["zero_optimization"].update(small)
        assert "bf16" not in base or data["communication_data_type"] == "fp32", "gradients of many ranks add up in bf16"
    path = tmp_path / base
    path.write_text(json.dumps(data))
    argv = [*DIGITS, "--deepspeed_config", path, "--max-steps", 3, "--val-split", "", "-b", 16 // world]
    rows = train_in(ranks, world, argv)
    assert_same_curve(
        in_fp32(json.dumps(data["optimizer"])), rows, rtol=5e-3 if "bf16" in base else 1e-5, keys=("loss",)
    )


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
def test_model_kinds_under_zero3(ranks, kind):
    """A parameter that is read outside its module's forward is not there under ZeRO-3, or gets no gradient; a block
    that writes into a product that selective recomputation keeps."""
    name, kwargs = KINDS[kind]
    mode = "selective" if [*KINDS].index(kind) % 2 else "full"
    small = {"patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3} | kwargs
    argv = [*DIGITS, "--model", name, *oracle.kwargs_words(small), "--drop-path", 0.1]
    argv += ["--max-steps", 3, "--val-split", ""]
    zero1 = train_in(ranks, 1, [*argv, "--deepspeed_config", CONFIGS / "cpu_zero1_fp32.json"])
    zero3 = [*argv, "--deepspeed_config", CONFIGS / "cpu_zero3_fp32.json", "-b", 8, "--grad-checkpointing", mode]
    assert_same_curve(zero1, train_in(ranks, 2, zero3), rtol=1e-5)


# Flags, and the names that they leave trained.
PROBE = (["--linear-probe"], r"head\.")
FREEZE = (["--freeze", "patch_embed.*", "blocks.[01].*"], "cls_token|pos_embed|blocks.[2-9]|norm|head")


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("stage", "flags", "trained"), [(0, *PROBE), (1, *FREEZE), (2, *PROBE), (3, *FREEZE)])
def test_freezing(ranks, tmp_path, stage, flags, trained):
    """A frozen tensor that moves, a trained one that does not, or a frozen one that is lost from the file."""
    oracle.write_weights(tmp_path / "w.safetensors", num_classes=10)
    argv = [*DIGITS, "--img-size", 32, "--initial-checkpoint", tmp_path / "w.safetensors", "--max-steps", 2]
    argv += ["--deepspeed_config", CONFIGS / f"cpu_zero{stage}_fp32.json", "--output", tmp_path / "run", *flags]
    train_in(ranks, 2, [*argv, "--val-split", ""])
    before, after = (load_file(tmp_path / name) for name in ("w.safetensors", "run/model.safetensors"))
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if re.match(trained, name)}


def test_scheduler_of_the_json(ranks, tmp_path):
    """The JSON's scheduler sets the rate, its "auto" values come from the flags, and the log shows it."""
    params = {"warmup_min_lr": 0.0, "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}
    block = {"type": "WarmupDecayLR", "params": {**params, "warmup_type": "linear"}}
    path = json_file(tmp_path, "cpu_zero1_fp32.json", scheduler=block)
    argv = [*DIGITS, "--deepspeed_config", path, "--warmup-steps", 2, "--lr", 0.01, "--max-steps", 6, "--val-split", ""]
    rates = [row["lr"] for row in train_rows(train_in(ranks, 1, argv))]
    assert rates[1:] == pytest.approx([0.0, 0.005, 0.01, 0.0075, 0.005])  # DeepSpeed's own start


OTHER_SCHEDULERS = {
    "WarmupCosineLR": {"total_num_steps": 10, "warmup_num_steps": 2},
    "OneCycle": {"cycle_min_lr": 0.001, "cycle_max_lr": 0.002, "cycle_first_step_size": 2},
    "LRRangeTest": {"lr_range_test_min_lr": 0.001, "lr_range_test_step_size": 2},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", OTHER_SCHEDULERS)
def test_other_schedulers_of_the_json(ranks, tmp_path, kind):
    """A scheduler that the engine does not step, or whose rate is not the one that is logged."""
    params = OTHER_SCHEDULERS[kind]
    path = json_file(tmp_path, "cpu_zero1_fp32.json", scheduler={"type": kind, "params": params})
    argv = [*DIGITS[: DIGITS.index("--warmup-steps")], "--deepspeed_config", path, "--lr", 0.01, "--max-steps", 5]
    rates = [row["lr"] for row in train_rows(train_in(ranks, 1, [*argv, "--val-split", ""]))]
    plain = torch.optim.AdamW([torch.zeros(1, requires_grad=True)], lr=0.01)
    schedule, expected = getattr(lr_schedules, kind)(plain, **params), []
    for _ in rates:
        expected.append(plain.param_groups[0]["lr"])
        schedule.step()
    assert len({*rates}) > 2
    assert rates[1:] == pytest.approx(expected[1:])


def warm_up_of_the_json(tmp_path, flags, **params):
    """The warm-up steps that DeepSpeed's scheduler gets in a run of 12 steps, and the lines for people."""
    params = {"warmup_min_lr": 0.0, "warmup_max_lr": 1.0, "warmup_type": "linear", **params}
    path = json_file(tmp_path, "cpu_zero1_fp32.json", scheduler={"type": "WarmupLR", "params": params})
    argv = [*DIGITS[: DIGITS.index("--warmup-steps")], "--deepspeed_config", path, "--max-steps", 12, "--val-split", ""]
    plan = resolved([*argv, *flags.split()])
    return plan.engine.json.scheduler.params["warmup_num_steps"], " ".join(plan.notes)


# Warm-up in steps by the rules of the flags' own schedule: 90 steps are an epoch.
WARMUPS = {
    "--warmup-steps 4": 4,
    "--warmup-epochs 0.06": 5,
    "--epochs 1": 9,  # the default: a tenth of 90
}


def test_auto_warm_up_of_the_json(tmp_path):
    """--warmup-epochs and the default warm-up, which a scheduler of the JSON ignored; flags that fill no "auto", and a
    rate that the JSON overrides in silence."""
    for flags, wanted in WARMUPS.items():
        steps, said = warm_up_of_the_json(tmp_path, flags, warmup_num_steps="auto")
        assert steps == wanted
        assert ("warming up for a tenth of 90 steps, 9" in said) == (flags == "--epochs 1")
    with pytest.raises(UserError, match='has a "scheduler" \\(WarmupLR\\) and --warmup-epochs asks for another'):
        warm_up_of_the_json(tmp_path, "--warmup-epochs 0.06", warmup_num_steps=4, warmup_max_lr="auto")
    for flags, said_so in (("--lr 0.5", True), ("--lr 1", False), ("--epochs 1", False)):
        assert ("--lr 0.5 has no effect" in warm_up_of_the_json(tmp_path, flags, warmup_num_steps=4)[1]) == said_so
    assert "--lr" not in warm_up_of_the_json(tmp_path, "--lr 0.5", warmup_num_steps=4, warmup_max_lr="auto")[1]
    assert (
        "warmup_max_lr [0.25]" in warm_up_of_the_json(tmp_path, "--lr 0.5", warmup_num_steps=4, warmup_max_lr=[0.25])[1]
    )
    with pytest.raises(UserError, match="a warm-up of 3 steps does not fit into a run of 3"):
        warm_up_of_the_json(tmp_path, "--max-steps 3 --warmup-steps 3", warmup_num_steps="auto")


def test_monitors_of_the_json_get_the_same_figures(ranks, tmp_path):
    """DeepSpeed's own writers: the same loss and accuracy as metrics.jsonl."""
    monitor = {"enabled": True, "output_path": str(tmp_path / "csv"), "job_name": "job"}
    path = json_file(tmp_path, "cpu_zero1_fp32.json", csv_monitor=monitor)
    rows = train_in(ranks, 2, [*DIGITS, "--deepspeed_config", path, "--max-steps", 3])

    def written(name):
        with (tmp_path / "csv" / "job" / f"{name}.csv").open() as file:
            return {int(step): float(value) for step, value in list(csv.reader(file))[1:]}

    losses = written("train_loss")
    assert [*losses.values()] == pytest.approx([row["loss"] for row in train_rows(rows)])
    # By the images seen, as DeepSpeed's own lines are: a monitor may drop what goes back.
    assert losses.keys() == written("Train_Samples_lr").keys() == {32, 64, 96}
    assert written("eval_top1").keys() == {96}


def test_several_labels_need_binary_cross_entropy(capsys, tmp_path):
    """Multi-hot targets under softmax."""
    for split in ("train", "val"):
        Image.new("RGB", (16, 16)).save(made(tmp_path / split / "1.png"))
        (tmp_path / split / "labels.csv").write_text("file,labels\n1.png,a;b\n")
    data = ["--dataset", "", "--data-dir", tmp_path, "--deepspeed_config", ROOT / "ds_configs/zero1_bf16_auto.json"]
    assert "softmax cannot fit them; add --bce-loss" in refusal(capsys, [*ONE_BLOCK, *data, "--lr", "0.1", "-b", "1"])
