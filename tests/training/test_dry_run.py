"""--dry-run: all is shown, nothing is started; and whether the memory that it tells is what DeepSpeed takes."""

from __future__ import annotations

import re

import pytest
import torch
import torch.distributed as dist
from project import ROOT, write_config
from runs import DIGITS, refusal, resolved

from ds_vit.config.run_folder import RunFolder
from ds_vit.data.augment.on_device import bytes_of_photo
from ds_vit.models.zoo import num_parameters
from ds_vit.monitoring.report.record import note_start
from ds_vit.train import main
from ds_vit.training.cost import Cost
from ds_vit.training.resolve.record import resolved_flags
from ds_vit.training.tables import end_rows

RUN = [
    *(*DIGITS, "--val-split", ""),
    *("--model-kwargs", "patch_size=4", "embed_dim=64", "depth=2", "num_heads=2", "-b", "4", "--warmup-steps", "2"),
]


def config_of(stage):
    return str(ROOT / "ds_configs" / f"cpu_zero{stage}_fp32.json")


def plan_of(world, stage, *words):
    return resolved([*RUN, "--max-steps", 8, "--deepspeed_config", config_of(stage), *words], world)


def estimate_of(world, stage, *words):
    return Cost(plan_of(world, stage, *words)).memory()


def test_a_dry_run_shows_the_run_and_starts_nothing(capsys, tmp_path):
    # Catches: a folder that is made, ranks that meet, and a mistake that the real run would refuse.
    output = tmp_path / "out"
    words = [*RUN, "--deepspeed_config", config_of(1), "--max-steps", "8", "--output", str(output), "--dry-run"]
    assert main(words) == 0
    assert not dist.is_initialized()
    assert [*tmp_path.iterdir()] == []
    said = capsys.readouterr().out
    for word in (
        "dry run: nothing is started",
        "lr 0.001 (JSON; cosine)",
        "learning rate, step 3 ",
        "█" * 40,
        "backward pass with gradients so far",
    ):
        assert word in said
    for name in ("at each epoch's end; the newest 2", " each, 4 at most", str(output)):
        assert name in said
    assert "train_batch_size 6 is not micro-batch 4" in refusal(capsys, [*words, "--set", "train_batch_size=6"])


def test_a_short_run_says_what_its_defaults_make_of_it(capsys, tmp_path):
    """A table with "0 of warm-up", and no word of the flags."""
    words = [*RUN[:-2], "--deepspeed_config", config_of(1), "--max-steps", "9"]
    assert main([*words, "--output", str(tmp_path / "run"), "--dry-run"]) == 0
    said = " ".join(re.sub(r"[^ -~]", " ", capsys.readouterr().out).split())
    told = "warming up for a tenth of 9 steps, 0, and not for timm's default of 5 epochs, 1800 (--warmup-steps or"
    assert told in said
    assert "schedule over 9, no warm-up)" in said


def test_the_warm_up_of_the_default_has_no_cliff(capsys, tmp_path):
    """One more epoch that makes 3 steps of warm-up 75; a flag that is not followed to the letter."""
    words = [*RUN[:-2], "-b", "96", "--deepspeed_config", config_of(1)]  # 15 steps an epoch
    warmups = {}
    for flags in ("--epochs 5", "--epochs 6", "--epochs 49", "--epochs 50", "--epochs 300", "--max-steps 200"):
        warmups[flags] = resolved([*words, *flags.split()]).schedule.rate.warmup_steps
    assert [*warmups.values()] == [7, 9, 73, 75, 75, 20]
    (tmp_path / "r.yaml").write_text("warmup_steps: 3")
    asked = {"--warmup-epochs 4": 60, "--warmup-epochs 0.5": 8, "--warmup-steps 74": 74, "--warmup-epochs 0": 0}
    asked |= {f"--recipe {tmp_path}/r.yaml": 3, f"--recipe {tmp_path}/r.yaml --warmup-epochs 0": 0}
    for flags, wanted in asked.items():
        run = resolved([*words, "--epochs", "5", *flags.split()])
        assert run.schedule.rate.warmup_steps == wanted
        assert "warming up" not in " ".join(run.notes)
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": 11, "warmup_max_lr": "auto"}}
    of_the_json = write_config(tmp_path / "c.json", 1, scheduler=scheduler)
    argv = [*words[:-2], "--deepspeed_config", of_the_json, "--epochs", "5", "--output", tmp_path / "run", "--dry-run"]
    assert main([str(word) for word in argv]) == 0
    assert "schedule over 75, 11 of warm-up)" in capsys.readouterr().out


@pytest.mark.parametrize(("steps", "interval"), [(10, 1), (24, 1), (51, 2), (600, 12), (2500, 50), (90_000, 50)])
def test_curves_of_a_short_run_have_enough_points(steps, interval):
    """24 steps with two points; a number that config.yaml does not show, or that is not the run's own to say."""
    words = ["--max-steps", str(steps), "--warmup-steps", "2"]
    plan = plan_of(1, 1, *words)
    assert plan.output.log_interval == interval
    assert resolved_flags(plan)["log_interval"] == interval
    assert resolved_flags(plan_of(1, 1, *words, "--log-interval", "7"))["log_interval"] == 7


def test_the_flags_stay_as_they_were_given():
    # Catches: a resolved number that passes for a flag that was given, and is then compared, saved or refused as one.
    plan = plan_of(1, 1, "--max-steps", "10", "--warmup-steps", "2", "--img-size-schedule", "8:0,16:0.5")
    assert (plan.model.task.num_classes, plan.model.spec.img_size, plan.output.log_interval) == (10, 16, 1)
    assert (plan.config.num_classes, plan.config.log_interval) == (None, None)
    assert not {"num_classes", "log_interval"} & plan.config.model_fields_set
    assert plan.model.task.config is plan.config


def test_the_end_says_in_how_many_launches(tmp_path):
    """A wall time of two launches that passes for the last one's."""
    plan, folder = plan_of(1, 1), RunFolder(tmp_path)
    told = {"model": "m", "eval_images": 0, "images_per_second": None, "skipped_images": 0, "wall_seconds": 28.2}
    said = []
    for step in (0, 4):
        note_start(folder, step, plan.layout, 1, torch.device("cpu"), [])
        said.append(dict(end_rows(plan, told, tmp_path))["wall time"])
    assert said == ["28 s", "28 s in 2 launches"]


def test_images_that_the_device_decodes_and_augments(tmp_path):
    # Catches: a share that the end does not show, and memory next to the step that the plan leaves out.
    told = {"model": "m", "eval_images": 0, "images_per_second": None, "skipped_images": 0, "wall_seconds": 1.0}
    shown = dict(end_rows(plan_of(1, 1), {**told, "decoded_on_device": 0.975}, tmp_path))
    assert shown["decoded on the device"] == "97.5% of the images since this start"
    [here], [there] = (estimate_of(1, 1, "--augment-on", on) for on in ("cpu", "device"))
    size = plan_of(1, 1).model.task.image.img_size
    assert there.together - here.together == 4 * bytes_of_photo(size)


@pytest.mark.parametrize(
    ("stage", "expected"),
    [
        (0, (4, 4, 0, 8)),
        (1, (4, 4, 0, 2)),  # fp32 weights are their own masters
        (2, (4, 1, 0, 2)),
        (3, (1, 1, 0, 2)),
    ],
)
def test_bytes_a_parameter_by_zero_stage(stage, expected):
    # Catches: a share of the wrong thing. Known in closed form: fp32, AdamW, four data-parallel ranks.
    plan = plan_of(4, stage)
    [rank] = Cost(plan).memory()
    number = num_parameters(plan.model.whole)
    assert rank.parameters == number
    for value, bytes_each in zip((rank.weights, rank.gradients, rank.masters, rank.optimizer), expected, strict=True):
        assert value == pytest.approx(bytes_each * number, abs=8)


def test_bytes_a_parameter_in_bf16():
    # Catches: gradients and masters in the wrong type. Two data-parallel ranks, ZeRO-1.
    for words, expected in (
        ((), (2, 2, 2, 4)),
        (("--set", "data_types.grad_accum_dtype=fp32"), (2, 4, 2, 4)),
        (("--set", "bf16.bf16_master_weights_and_grads=true", "bf16.bf16_optimizer_states=true"), (2, 2, 0, 2)),
    ):
        plan = plan_of(2, 1, "--set", "bf16.enabled=true", *words)
        [rank] = Cost(plan).memory()
        found = (rank.weights, rank.gradients, rank.masters, rank.optimizer)
        assert found == pytest.approx([n * num_parameters(plan.model.whole) for n in expected], abs=8), words
