"""A whole run: what it writes, what it shows, and every switch that is not in the layout matrix."""

import csv
import json

import oracle
import pytest
import torch
import yaml
from curves import assert_same_curve, read_rows, train_in, train_rows
from project import ROOT
from runs import KINDS, pretend_fp16, run_quietly
from safetensors.torch import load_file

CONFIGS = ROOT / "ds_configs"
MODEL = ["--model", oracle.MODEL, *oracle.kwargs_words(), "--img-size", 16]
DIGITS = [*MODEL, "--dataset", "digits", "--workers", 0, "--log-interval", 1, "-b", 16, "--warmup-steps", 1]
EVALUATED = [*MODEL, "--dataset", "digits", "--workers", 0, "-b", 16, "--eval-only"]

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


def words(*argv):
    """Arguments as text."""
    return [str(arg) for arg in argv]


def json_file(folder, base, **changes):
    """A shipped file with changes."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads((CONFIGS / base).read_text()), **changes}))
    return path


@pytest.fixture(scope="module")
def digits_run(ranks, tmp_path_factory):
    """A short run on two ranks: its folder, and what each rank said."""
    output = tmp_path_factory.mktemp("digits") / "run"
    argv = words(*DIGITS, "--deepspeed_config", CONFIGS / "cpu_zero1_fp32.json", "--max-steps", 5, "--output", output)
    return output, argv, ranks.run(2, run_quietly, argv)


def test_files_of_a_run(digits_run):
    """The contract: names of files, keys of rows and of the summary."""
    output, _, said = digits_run
    assert [code for code, _, _ in said] == [0, 0]
    names = {path.name for path in output.iterdir()}
    expected = {"config.yaml", "deepspeed.json", "metrics.jsonl", "summary.json", "tensorboard", "model.safetensors"}
    expected |= {"classes.json", "best.safetensors", "checkpoints", "deepspeed.derived.json", "starts.jsonl"}
    expected |= {"report.html", "predictions.csv", "augmented.png", "augmented.json", "mistakes.png", "mistakes.json"}
    expected |= {"token-norms.png", "attention.png"}
    assert names == expected
    rows = read_rows(output)
    assert [row["step"] for row in train_rows(rows)] == [1, 2, 3, 4, 5]
    assert all(set(row) == TRAIN_KEYS for row in train_rows(rows))
    [evaluation] = [row for row in rows if row["kind"] == "eval"]
    assert evaluation.keys() == {
        "kind",
        "step",
        "epoch",
        "wall_seconds",
        "top1",
        "top5",
        "loss",
        "images",
        "skipped_images",
    }
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
    (_, first, first_err), (_, second, second_err) = digits_run[2]
    assert second == second_err == ""
    assert "step 5/5" in first
    assert "eval at step 5: top-1" in first
    assert "32 = 16 a micro-batch x 1 accumulated x 2 data-parallel" in first
    assert "INFO" not in first + first_err


def test_config_yaml_runs_the_same_again(ranks, tmp_path, digits_run):
    """config.yaml must be enough: the same curve from it and another --output alone."""
    output = digits_run[0]
    rows = train_in(ranks, 2, ["--recipe", output / "config.yaml", "--output", tmp_path / "again"])
    assert_same_curve(read_rows(output), rows, rtol=1e-6)
    again = yaml.safe_load((tmp_path / "again" / "config.yaml").read_text())
    first = yaml.safe_load((output / "config.yaml").read_text())
    assert again == first


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


def test_config_yaml_of_a_run_without_evaluation(ranks, tmp_path):
    """A crop that was resolved for a split that nobody evaluates, and is then refused as without effect."""
    argv = [*DIGITS, "--deepspeed_config", CONFIGS / "cpu_zero1_fp32.json", "--max-steps", 2, "--val-split", ""]
    first = train_in(ranks, 1, [*argv, "--output", tmp_path / "run"])
    again = train_in(ranks, 1, ["--recipe", tmp_path / "run" / "config.yaml", "--output", tmp_path / "again"])
    assert_same_curve(first, again, rtol=1e-6)


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
def test_shipped_files_train(ranks, tmp_path, base, world):
    """A shipped file that DeepSpeed refuses, or whose curve leaves fp32's by more than bf16's rounding."""
    data = json.loads((CONFIGS / base).read_text())
    small = {"reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000}
    if "zero_optimization" in data and data["zero_optimization"]["stage"]:
        data["zero_optimization"].update(small)
    path = tmp_path / base
    path.write_text(json.dumps(data))
    argv = [*DIGITS, "--deepspeed_config", path, "--max-steps", 3, "--val-split", "", "-b", 16 // world]
    rows = train_in(ranks, world, argv)
    reference = json.loads((CONFIGS / "cpu_zero1_fp32.json").read_text()) | {"optimizer": data["optimizer"]}
    (tmp_path / "fp32.json").write_text(json.dumps(reference))
    reference = train_in(ranks, 1, [*argv, "--deepspeed_config", tmp_path / "fp32.json", "-b", 16])
    assert_same_curve(reference, rows, rtol=5e-3 if "bf16" in base else 1e-5, keys=("loss",))


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
def test_model_kinds_under_zero3(ranks, kind):
    """A parameter that is read outside its module's forward is not there under ZeRO-3, or gets no gradient."""
    name, kwargs = KINDS[kind]
    small = {"patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3} | kwargs
    argv = [*DIGITS, "--model", name, *oracle.kwargs_words(small), "--drop-path", 0.1]
    argv += ["--max-steps", 3, "--val-split", ""]
    zero1 = train_in(ranks, 1, [*argv, "--deepspeed_config", CONFIGS / "cpu_zero1_fp32.json"])
    zero3 = [*argv, "--deepspeed_config", CONFIGS / "cpu_zero3_fp32.json", "-b", 8, "--grad-checkpointing"]
    assert_same_curve(zero1, train_in(ranks, 2, zero3), rtol=1e-5)


def weights_before_and_after(ranks, tmp_path, *flags, stage=1):
    """Final weights of a short run and its initial ones."""
    oracle.write_weights(tmp_path / "w.safetensors", num_classes=10)
    argv = [*DIGITS, "--img-size", 32, "--initial-checkpoint", tmp_path / "w.safetensors", "--max-steps", 2]
    argv += ["--deepspeed_config", CONFIGS / f"cpu_zero{stage}_fp32.json", "--output", tmp_path / "run", *flags]
    train_in(ranks, 2, [*argv, "--val-split", ""])
    return load_file(str(tmp_path / "w.safetensors")), load_file(str(tmp_path / "run" / "model.safetensors"))


@pytest.mark.sampled(4)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("flags", "trained"),
    [
        (("--linear-probe",), lambda name: name.startswith("head.")),
        (
            ("--freeze", "patch_embed.*", "blocks.[01].*"),
            lambda n: not n.startswith(("patch_embed", "blocks.0", "blocks.1")),
        ),
    ],
    ids=["linear probe", "freeze"],
)
def test_freezing(ranks, tmp_path, stage, flags, trained):
    """A frozen tensor that moves, a trained one that does not, or a frozen one that is lost from the file."""
    before, after = weights_before_and_after(ranks, tmp_path, *flags, stage=stage)
    assert before.keys() == after.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved == {name for name in before if trained(name)}


def test_scheduler_of_the_json(ranks, tmp_path):
    """The JSON's scheduler sets the rate, its "auto" values come from the flags, and the log shows it."""
    params = {"warmup_min_lr": 0.0, "warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}
    block = {"type": "WarmupDecayLR", "params": {**params, "warmup_type": "linear"}}
    path = json_file(tmp_path, "cpu_zero1_fp32.json", scheduler=block)
    argv = [*DIGITS, "--deepspeed_config", path, "--warmup-steps", 2, "--lr", 0.01, "--max-steps", 6, "--val-split", ""]
    rates = [row["lr"] for row in train_rows(train_in(ranks, 1, argv))]
    assert rates[1:] == pytest.approx([0.0, 0.005, 0.01, 0.0075, 0.005])  # DeepSpeed's own start


def rates_of_the_json(ranks, tmp_path, *flags, **params):
    """The learning rates of 12 steps under the JSON's WarmupLR, and what was said on the way."""
    params = {"warmup_min_lr": 0.0, "warmup_max_lr": 1.0, "warmup_type": "linear", **params}
    path = json_file(tmp_path, "cpu_zero1_fp32.json", scheduler={"type": "WarmupLR", "params": params})
    argv = [*DIGITS[: DIGITS.index("--warmup-steps")], "--deepspeed_config", path, "--max-steps", 12, "--val-split", ""]
    argv = words(*argv, *flags, "--output", tmp_path / "run")
    [(code, out, err)] = ranks.run(1, run_quietly, argv)
    return [row["lr"] for row in train_rows(read_rows(tmp_path / "run"))] if code == 0 else [], out + err


# Warm-up in steps by the rules of the flags' own schedule: 90 steps are an epoch.
WARMUPS = {
    "--warmup-steps 4": 4,
    "--warmup-epochs 0.06": 5,
    "--epochs 1": 4,  # the default's 5 epochs do not fit: a twentieth of 90
}


@pytest.mark.parametrize("flags", WARMUPS)
def test_auto_warm_up_of_the_json(ranks, tmp_path, flags):
    """--warmup-epochs and the default warm-up, which a scheduler of the JSON went without."""
    rates, said = rates_of_the_json(ranks, tmp_path, *flags.split(), warmup_num_steps="auto")
    warmup = WARMUPS[flags]
    assert rates[2:] == pytest.approx([min(1.0, step / warmup) for step in range(1, 11)])
    assert ("warming up for 4" in said) == (flags == "--epochs 1")


def test_warm_up_flags_beside_a_json_that_has_its_own(ranks, tmp_path):
    """A flag that fills no "auto" of the JSON's scheduler and is passed over."""
    params = {"warmup_num_steps": 4, "warmup_max_lr": "auto"}
    _, said = rates_of_the_json(ranks, tmp_path, "--warmup-epochs", 0.06, **params)
    assert 'has a "scheduler" (WarmupLR) and --warmup-epochs asks for another' in said
    _, said = rates_of_the_json(ranks, tmp_path, "--max-steps", 3, "--warmup-steps", 3, warmup_num_steps="auto")
    assert "a warm-up of 3 steps does not fit into a run of 3" in said


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


def test_multi_label(ranks, tmp_path):
    """Several labels an image, binary cross-entropy, the same on one rank and on two."""
    import numpy as np
    from PIL import Image

    generator = np.random.default_rng(0)
    for split, count in (("train", 24), ("val", 7)):
        folder = tmp_path / "data" / split
        folder.mkdir(parents=True)
        lines = []
        for i in range(count):
            Image.fromarray(generator.integers(0, 255, (16, 16, 3), dtype=np.uint8)).save(folder / f"{i}.png")
            lines.append(f"{i}.png,{';'.join(sorted({f'c{i % 3}', f'c{i % 5}'}))}")
        (folder / "labels.csv").write_text("\n".join(["file,labels", *lines]) + "\n")
    argv = [*MODEL, "--data-dir", tmp_path / "data", "--workers", 0, "--log-interval", 1, "--warmup-steps", 0]
    argv += ["--deepspeed_config", CONFIGS / "cpu_zero1_fp32.json", "--bce-loss", "--max-steps", 4, "--smoothing", 0.1]
    one, two = train_in(ranks, 1, [*argv, "-b", 6]), train_in(ranks, 2, [*argv, "-b", 3])
    assert_same_curve(one, two, rtol=1e-5)
    counted = [{k: row[k] for k in ("top1", "top5", "images")} for row in (one[-1], two[-1])]
    assert counted[0] == counted[1]
    assert counted[0]["images"] == 7
    mixed = [*argv, "-b", 6, "--mixup", 0.5]  # mixed targets come smoothed, for a cut classifier too
    cut = train_in(ranks, 3, [*mixed, "--tp", 3, "--class-parallel", "on"])
    assert_same_curve(train_in(ranks, 1, mixed), cut, rtol=1e-5)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_fp16_scales_its_loss(ranks, tmp_path, stage):
    """An overflow must halve the scale and skip the step, on every rank and in every layout alike, and be seen."""
    fp16 = {"enabled": True, "initial_scale_power": 24, "hysteresis": 1, "loss_scale_window": 1000}
    path = json_file(tmp_path, f"cpu_zero{stage}_fp32.json", fp16=fp16)
    runs = []
    for world in (1, 2):
        output = tmp_path / f"run{world}"
        argv = words(*DIGITS, "--deepspeed_config", path, "--max-steps", 14, "--val-split", "", "-b", 16 // world)
        said = ranks.run(world, run_quietly, [*argv, "--output", str(output)], pretend_fp16)
        assert said[0][0] == 0, said[0][2]
        runs.append(train_rows(read_rows(output)))
    scales = [row["loss_scale"] for row in runs[0]]
    skipped = [row["grad_norm"] is None for row in runs[0]]
    assert scales[0] == 2.0**24
    assert any(skipped)
    assert not all(skipped)
    for i in range(len(scales) - 1):
        assert scales[i + 1] == (scales[i] / 2 if skipped[i] else scales[i])
    assert scales == [row["loss_scale"] for row in runs[1]]
    assert_same_curve(*runs, rtol=5e-3, keys=("loss",))


def test_a_diverged_run_is_no_success(ranks, tmp_path):
    """A loss that is not a number must stop the run on every rank, in one line, without weights or summary."""
    argv = [*DIGITS, "--deepspeed_config", CONFIGS / "cpu_zero1_fp32.json", "--max-steps", 6, "--lr", 1e9]
    said = ranks.run(2, run_quietly, words(*argv, "--output", tmp_path / "run"))
    assert [code for code, _, _ in said] == [3, 3]
    assert "the gradient is not finite" in said[0][2]
    assert "the update was not applied" in said[0][2]
    assert not (tmp_path / "run" / "model.safetensors").exists()
    assert not (tmp_path / "run" / "summary.json").exists()


def test_bf16_sums_gradients_in_fp32(ranks, tmp_path):
    """The usual file must not add gradients of many ranks up in bf16."""
    argv = [*DIGITS, "--max-steps", 1, "--warmup-steps", 0, "--val-split", ""]
    argv += ["--deepspeed_config", CONFIGS / "zero1_bf16.json", "--output", tmp_path / "run"]
    types = ranks.run(2, reduced_types, words(*argv))
    assert types == [["torch.float32"]] * 2


def reduced_types(argv):
    """On a rank: train, and give the floating types of the larger all-reduces."""
    import torch.distributed as dist

    from ds_vit.train import main

    seen = set()
    original = dist.all_reduce

    def recording(tensor, *args, **kwargs):
        if tensor.is_floating_point() and tensor.numel() > 1000:
            seen.add(str(tensor.dtype))
        return original(tensor, *args, **kwargs)

    dist.all_reduce = recording
    try:
        assert main(argv) == 0
    finally:
        dist.all_reduce = original
    return sorted(seen)
