"""Which run may resume from a checkpoint, with which batch and schedule, and from which of several checkpoints."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
from curves import assert_same_curve, read_rows, train_in, train_rows
from interrupting import TINY
from project import ROOT
from runs import refusal, resolved, run_quietly

from ds_vit.checkpoint.folder import Checkpoint, newest
from ds_vit.config.batch import BatchSizes
from ds_vit.config.deepspeed_keys import DeepSpeedJson
from ds_vit.config.flag import Scope, spelling
from ds_vit.config.schema import RunConfig
from ds_vit.config.units import Interval, parse_seconds
from ds_vit.data.sampler import SampleOrder
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.optim.schedules import LearningRate
from ds_vit.parallel.layout import Layout
from ds_vit.training.resolve.data import resolve_batch
from ds_vit.training.resume import Resume, can_resume_in, check_same_run, check_same_schedule, find, first_step


def resume_of(global_batch: int = 16, **state: object) -> Resume:
    state = {"run": {}, "config": {}, "global_batch": global_batch, "step": 7, **state}
    return Resume(Checkpoint(Path("x"), {}, json.loads(json.dumps(state))), falls_back=True)


def batch_of(micro: int, accumulation: int | None, dp: int, resume: Resume, total: object = "auto", allow=False):
    """The batch of a run that resumes with -b and --grad-accum-steps, and the lines about it."""
    engine = SimpleNamespace(json=DeepSpeedJson.of({"train_batch_size": total}), path="c.json")
    config = RunConfig(
        deepspeed_config="c.json", batch_size=micro, grad_accum_steps=accumulation, allow_batch_change=allow
    )
    return resolve_batch(config, engine, Layout(dp=dp), resume)


@pytest.mark.parametrize(
    ("asked", "wanted", "kept"),
    [
        ((8, 1, 4), 32, (8, 1)),  # the same
        ((8, 1, 2), 32, (8, 2)),  # half the ranks: twice the accumulation
        ((8, 2, 8), 32, (4, 1)),  # more ranks than the micro-batch leaves room for
        ((8, 4, 1), 24, (8, 3)),
        ((5, 1, 2), 32, (4, 4)),  # the largest micro-batch that divides, not above what was asked for
    ],
)
def test_the_global_batch_is_kept_by_accumulation(asked, wanted, kept):
    # Catches: another global batch in silence, which is another curve.
    micro, accumulation, dp = asked
    got, notes = batch_of(micro, accumulation, dp, resume_of(wanted, config={"batch_size": micro}))
    assert (got.micro_batch, got.accumulation, got.global_batch) == (*kept, wanted)
    assert got.micro_batch * got.accumulation * dp == wanted
    assert bool(notes) == (kept != (micro, accumulation))


@pytest.mark.parametrize(
    ("asked", "dp", "result"),
    [
        (16, 1, 16),
        (32, 1, 32),
        (4, 2, 4),
        (8, 8, 4),  # the run's own, on more ranks than it has room for
        (32, 2, "16, 8, 4, 2, 1"),
        (12, 1, "32, 16, 8, 4, 2, 1"),
        (64, 1, "32, 16"),
    ],
)
def test_another_micro_batch_is_used_or_refused(asked, dp, result):
    # Catches: `-b 32` on resume that silently becomes 16; one command that fails on another number of ranks.
    before = resume_of(32, config={"batch_size": 8})
    if isinstance(result, int):
        assert batch_of(asked, None, dp, before)[0].micro_batch == result
    else:
        with pytest.raises(ValueError, match=rf"--batch-size {asked} .* of 32 on {dp} data.*one of {result}"):
            batch_of(asked, None, dp, before)


def test_an_impossible_batch_is_refused_with_the_numbers():
    # Catches: a floor division.
    with pytest.raises(ValueError, match="is 32, which 3 data-parallel ranks cannot share; start 2 data-parallel"):
        batch_of(8, 1, 3, resume_of(32))
    with pytest.raises(ValueError, match=r'is 32, and .* 64; write "train_batch_size": 32 or "auto", or say --allow-b'):
        batch_of(16, 1, 4, resume_of(32), total=64)
    got, [note] = batch_of(8, 1, 3, resume_of(32), allow=True)
    assert got == BatchSizes(24, 8, 1, 3)
    assert "changes from 32 to 24" in note


@pytest.mark.parametrize(("old", "new"), [(16, 24), (24, 16), (10, 7), (16, 16), (50, 20)])
def test_another_batch_resumes_behind_the_samples_that_were_seen(old, new):
    # Catches: samples that are seen twice in an epoch, or more than a batch of them left out.
    before, after = SampleOrder(103, old, 1), SampleOrder(103, new, 1)
    for step in range(3 * before.steps_per_epoch):
        epoch, rest = divmod(step, before.steps_per_epoch)
        state = {"step": step, "epoch": epoch, "images_in_epoch": rest * old, "global_batch": old}
        begun = first_step(state, after)
        skipped = begun % after.steps_per_epoch * new - rest * old
        if begun // after.steps_per_epoch == epoch:
            assert 0 <= skipped < new
        else:
            assert begun == (epoch + 1) * after.steps_per_epoch
            assert rest * old > (after.steps_per_epoch - 1) * new


def test_intervals_and_seconds():
    # Catches: minutes that are read as steps; a unit with the wrong factor.
    wanted = {
        "0": Interval(),
        "500": Interval(steps=500),
        "30m": Interval(seconds=1800),
        "1.5h": Interval(seconds=5400),
    }
    assert {text: Interval.parse(text, "--x") for text in wanted} == wanted
    assert [text for text, interval in wanted.items() if not interval] == ["0"]
    assert [parse_seconds(text, "--x") for text in ("90", "24s", "2m", "2h", "1d")] == [90, 24, 120, 7200, 86400]
    with pytest.raises(UserError, match="--time-limit 24 means 24 seconds; write 24h, 24m or 24s"):
        parse_seconds("24", "--time-limit")


def test_the_folder_of_the_same_run(tmp_path):
    # Catches: two runs' rows in one metrics.jsonl.
    run = tmp_path / "run"
    ways = {"auto": True, "none": False, str(run): True, str(run / "checkpoints" / "step-00000007"): True}
    ways[str(tmp_path / "other" / "checkpoints" / "step-00000007")] = False
    assert {way: can_resume_in(str(run), way) for way in ways} == ways


def test_a_mark_is_no_checkpoint(tmp_path):
    # Catches: a message that does not say where the checkpoints are.
    run = tmp_path / "run"
    (run / "checkpoints").mkdir(parents=True)
    (run / "checkpoints" / "latest").write_text("step-00000007")
    ways = {
        run / "checkpoints" / "latest": f"; give a checkpoint's folder or its run's, {run}$",
        run / "config.yaml": f"; give a checkpoint's folder or its run's, {run}$",
        tmp_path / "other" / "checkpoints" / "latest": "; give a checkpoint's folder or a run's --output$",
    }
    for way, message in ways.items():
        with pytest.raises(UserError, match=f"^--resume {way}: there is no such folder{message}"):
            find(RunConfig(resume=str(way)))


NAMES = {"class_names": ["cat", "dog"], "samples": "1234"}
HEAD = {"head.bias": "AdamW's"}
# What the checkpoint and the run that resumes have, and the error.
OTHERS = {
    "decoding": (
        {"decode": "exact"},
        {"decode": "fast"},
        "exact there and fast here; give the same --decode, or start",
    ),
    "one parameter less for Muon": (
        {"left_to_adamw": HEAD},
        {"left_to_adamw": HEAD | {"head.weight": "AdamW's"}},
        "head.weight is absent there and AdamW's here; give the same, or start",
    ),
    "a class's name": (
        NAMES,
        NAMES | {"class_names": ["cat", "hound"]},
        "class 1 is dog there and hound here; give the same, or start",
    ),
    "an image's label": (
        NAMES,
        NAMES | {"samples": "5678"},
        "caption of at least one is another; give the same, say --allow-schedule-change",
    ),
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_identity_is_refused(what):
    # Catches: pixels, or an optimizer state, that change in the middle of a curve.
    old, new, message = OTHERS[what]
    assert check_same_run(resume_of(run=old), old, {}) == []
    with pytest.raises(UserError, match=message):
        check_same_run(resume_of(run=old), new, {})


def test_a_table_that_was_repaired_is_resumed_on_request():
    # Catches: captions that were corrected and end the run, with no flag that says so; names of classes that follow.
    allowed = {"allow_schedule_change": True}
    [note] = check_same_run(resume_of(run=NAMES), NAMES | {"samples": "5678"}, allowed)
    assert note.endswith("a caption of at least one is another; the curve changes with it")
    with pytest.raises(UserError, match="class 1 is dog there"):
        check_same_run(resume_of(run=NAMES), NAMES | {"class_names": ["cat", "hound"]}, allowed)


@pytest.mark.parametrize("key", ["img_size_schedule", "train_img_sizes", "task_schedules"])
def test_a_schedule_changes_on_request_and_neither_begins_nor_ends(key):
    # Catches: a schedule that begins, or ends, in the middle of a run; a flag in the message that does not help.
    old, new = {key: [[0, 32]]}, {key: [[0, 48]]}
    for flag in ("allow_schedule_change", "allow_batch_change"):
        [note] = check_same_run(resume_of(run=old), new, {flag: True})
        assert note.endswith("[[0, 32]] there and [[0, 48]] here; the curve changes with it")
        for before, now in ((old, {key: ""}), ({key: ""}, new)):
            sides = r": (none there and .*|.* there and none) here; "
            with pytest.raises(UserError, match=sides + r"give the same( --\S+)?, or start a new run"):
                check_same_run(resume_of(run=before), now, {flag: True})


def test_a_run_from_before_a_flag_has_its_default():
    # Catches: a checkpoint that no run can resume since the identity has one more flag.
    assert check_same_run(resume_of(), {"decode": "exact"}, {"exif_rotation": "off"}) == []
    with pytest.raises(UserError, match="--exif-rotation is off there and on here; give the same, say --allow-sched"):
        check_same_run(resume_of(), {}, {"exif_rotation": "on"})
    new = {"smoothing": 0.1, "optimizer.params.eps": 1e-8}  # nor has it the number, and it has a flag that was removed
    assert check_same_run(resume_of(config={"a_flag_of_old": 3}), {}, new) == []


def test_only_changes_are_named():
    # Catches: tuples named as changed after JSON has made lists of them; a change without a note.
    flags = {"mean": (0.5, 0.5, 0.5), "crop_pct": 0.9, "workers": 4}
    assert check_same_run(resume_of(config=flags), {}, flags) == []
    [note] = check_same_run(resume_of(config=flags), {}, flags | {"crop_pct": 1.0, "workers": 8})
    assert note.endswith(": crop_pct 0.9 → 1.0")


# Settings that the curve depends on, of every kind.
MOVE_THE_CURVE = """
    aa aug_repeats bce_loss bce_sum bce_target_thresh color_jitter color_jitter_prob cutmix cutmix_minmax decode drop
    drop_path gaussian_blur_prob grayscale_prob hflip layer_decay mean mixup mixup_off_epoch mixup_prob
    mixup_switch_prob model_kwargs no_aug ratio recount remode reprob scale smoothing std train_crop_mode
    train_interpolation vflip img_size_schedule train_img_sizes seed model num_classes img_size task exif_rotation
    mask_ratio norm_pix_loss kd_distill_type kd_temperature lock_text text_depth global_crops_scale ibot_weight
"""


def test_what_moves_the_curve_is_held():
    # Catches: augmentation that changes in the middle of a curve; a layout, a folder or workers that must not change.
    assert set(MOVE_THE_CURVE.split()) <= RunConfig.fixed_on_resume()
    free = "pp tp tp_across_hosts workers output compile grad_checkpointing stall_seconds log_images max_steps data_dir"
    assert RunConfig.fixed_on_resume().isdisjoint(free.split())
    for name in RunConfig.flags().keys() - {"task"}:  # the task has other checks
        before, now = resume_of(config={name: "before"}), {"task": "classification", name: "now"}
        before.checkpoint.state["config"]["task"] = "classification"
        if name in RunConfig.fixed_on_resume():
            line = (
                f"{spelling(name)} is before there and now here; give the same, say --allow-schedule-change to resume"
            )
            with pytest.raises(UserError, match=line):
                check_same_run(before, {}, now)
            now["allow_schedule_change"] = True
        notes = check_same_run(before, {}, now)
        is_free = Scope.FREE in RunConfig.flags()[name].scope
        assert [f"{name} before → now" in note for note in notes][:1] == ([] if is_free else [True]), name


def test_the_filter_of_evaluation_is_held_where_training_resizes_by_it():
    # Catches: other pixels in the middle of a run without augmentation.
    old = {"interpolation": "bicubic", "no_aug": False}
    [note] = check_same_run(resume_of(config=old), {}, old | {"interpolation": "bilinear"})
    assert note.endswith("interpolation bicubic → bilinear")
    old |= {"no_aug": True}
    with pytest.raises(UserError, match="--interpolation is bicubic there and bilinear here"):
        check_same_run(resume_of(config=old), {}, old | {"interpolation": "bilinear"})


COSINE = LearningRate("cosine", 0.1, 30, warmup_steps=2)
CONSTANT = LearningRate("constant", 0.1, 30)
DECAY = {"type": "WarmupDecayLR", "params": {"total_num_steps": 30}}


@pytest.mark.parametrize(
    ("old", "new", "same"),
    [
        (COSINE, COSINE, True),
        (COSINE, dataclasses.replace(COSINE, decay_fraction=0.3), True),  # of wsd only
        (CONSTANT, dataclasses.replace(CONSTANT, total_steps=60, min_lr=0.01, warmup_lr=0.0), True),
        (DECAY, DECAY, True),
        (COSINE, dataclasses.replace(COSINE, total_steps=60), False),
        (COSINE, dataclasses.replace(COSINE, warmup_steps=3), False),
        (CONSTANT, dataclasses.replace(CONSTANT, base_lr=0.2), False),
        (dataclasses.replace(COSINE, name="wsd"), LearningRate("wsd", 0.1, 30, 2, decay_fraction=0.2), False),
        (DECAY, DECAY | {"params": {"total_num_steps": 60}}, False),
        (DECAY, COSINE, False),
    ],
)
def test_other_rates_are_refused_or_named(old, new, same):
    # Catches: a curve that bends silently where a run was resumed; a run at a constant rate that cannot get longer.
    old, new = (each if isinstance(each, dict) else dataclasses.asdict(each) for each in (old, new))
    if same:
        assert check_same_schedule(resume_of(schedule=old), new, 16, allow=False) == []
        return
    with pytest.raises(ValueError, match="here; give --sched, --lr") as error:
        check_same_schedule(resume_of(schedule=old), new, 16, allow=False)
    there, here = re.search("schedule: (.*) there and (.*) here; give", str(error.value)).groups()
    assert there != here
    [note] = check_same_schedule(resume_of(schedule=old), new, 16, allow=True)
    assert f"changes from {there} to {here}" in note
    assert check_same_schedule(resume_of(8, schedule=old), new, 16, allow=False) == [note]


CPU = ROOT / "ds_configs" / "cpu_zero1_fp32.json"


def words(*argv: object) -> list[object]:
    return [*TINY, "--deepspeed_config", CPU, "-b", 16, "--val-split", "", *argv]


@pytest.fixture(scope="module")
def run(ranks, tmp_path_factory):
    """A run of 8 steps with checkpoints at 2, 4, 6 and 8: its folder and rows."""
    output = tmp_path_factory.mktemp("rules") / "run"
    argv = ("--max-steps", 8, "--checkpoint-interval", 2, "--keep-checkpoints", 0)
    return output, train_in(ranks, 1, words(*argv, "--output", output))


DATA = json.loads(CPU.read_text())
WARMUP = {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}
OTHER_JSON = {
    "sgd.json": DATA | {"optimizer": {"type": "SGD", "params": {"lr": 0.1}}},
    "warmup.json": DATA | {"scheduler": WARMUP},
    "betas.json": DATA
    | {"optimizer": {"type": "AdamW", "params": DATA["optimizer"]["params"] | {"betas": [0.9, 0.5]}}},
}
OTHER_SHAPES = ("--model-kwargs", "patch_size=4", "embed_dim=48", "depth=2", "num_heads=2")
SEVERAL = (("smoothing", 0.1, 0.0), ("reprob", 0.0, 0.25), ("drop-path", 0.2, 0.1), ("aa", "none", "rand-m9"))
REFUSED = {
    "shapes": (OTHER_SHAPES, ["cls_token is [1, 1, 32]"]),
    "trained": (
        ("--freeze", "cls_token", "blocks.0.attn"),
        [
            "trained: cls_token, blocks.0.attn.qkv.weight, ",
            "0.attn.proj.weight, blocks.0.attn.proj.bias only there (--freeze, --linear-probe and ",
            "decide it); give the same, or start a new run",
        ],
    ),
    "optimizer": (("--deepspeed_config", "sgd.json"), ["AdamW there and SGD here"]),
    "schedule": (
        ("--epochs", 2),
        ["over 90 steps, warm-up of 2", "over 180 steps", "--epochs, or --max-steps without it", "--allow-schedule"],
    ),
    "mixup": (
        ("--mixup", 0.8),
        ["--mixup is 0.0 there and 0.8 here; give the same, say --allow-schedule-change to resume with the new ones"],
    ),
    "several": (
        ("--smoothing", 0, "--reprob", 0.25, "--drop-path", 0.1, "--aa", "rand-m9"),
        [f"--{name} is {old} there and {new} here" for name, old, new in SEVERAL],
    ),
    "weight decay": (("--weight-decay", 0.5), ["optimizer.params.weight_decay is 0.05 there and 0.5 here"]),
    "the JSON's betas": (
        ("--deepspeed_config", "betas.json"),
        ["optimizer.params.betas is [0.9, 0.999] there and [0.9, 0.5] here"],
    ),
    "JSON's scheduler": (
        ("--deepspeed_config", "warmup.json"),
        ["cosine from 0.001 to 0 over 90 steps", "the JSON's WarmupLR (warmup_num_steps 2) here"],
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_another_run_is_refused(run, tmp_path, capsys, what, monkeypatch):
    # Catches: weights of one run under the optimizer state, data or seed of another.
    for name, data in OTHER_JSON.items():
        (tmp_path / name).write_text(json.dumps(data))
    flags, parts = REFUSED[what]
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.chdir(tmp_path)
    line = refusal(capsys, words("--output", tmp_path / "new", "--resume", run[0], *flags))
    assert [part for part in parts if part not in line] == []
    assert not (tmp_path / "new").exists()


def test_other_settings_are_allowed_by_the_flag(run, tmp_path):
    # Catches: a flag that a refusal names and that changes nothing; a change without a note.
    argv = words("--output", tmp_path / "new", "--resume", run[0], "--mixup", 0.8, "--weight-decay", 0.5)
    [note] = resolved([*argv, "--allow-schedule-change"]).output.notes
    assert note.endswith(": mixup 0.0 → 0.8; optimizer.params.weight_decay 0.05 → 0.5")
    (tmp_path / "mixup.yaml").write_text("mixup: 0.8")
    assert resolved([*argv[:-4], "--recipe", tmp_path / "mixup.yaml", "--mixup", 0]).output.notes == ()


def test_the_same_command_on_more_ranks(run, tmp_path):
    # Catches: `-b 16` of the run itself, refused because two ranks would have twice the batch.
    argv = words("--output", tmp_path / "new", "--resume", run[0])
    assert [resolved(argv, world=world).batch.micro_batch for world in (1, 2)] == [16, 8]


@pytest.mark.parametrize(
    ("asked", "said"), [(64, "16 images × 1 micro-batch"), (8, "8 images × 2 micro-batches"), (16, "")]
)
def test_a_new_run_keeps_the_global_batch_of_a_runs_recipe(run, tmp_path, asked, said):
    # Catches: a --batch-size above the global batch that is dropped in silence.
    argv = ["--recipe", run[0] / "config.yaml", "--output", tmp_path / "new", "-b", asked]
    kept = f"the global batch of {run[0] / 'deepspeed.json'} is kept: 16 = 1 rank × {said}"
    notes = [note for note in resolved(argv).engine.notes if "global batch" in note]
    assert notes == ([kept] if said else [])


def test_a_runs_recipe_is_evaluated_in_other_batches(run):
    # Catches: a run's own micro-batch, which no flag could change where its weights are evaluated.
    argv = ["--recipe", run[0] / "config.yaml", "--eval-only", "--initial-checkpoint", run[0]]
    assert [resolved([*argv, *more]).batch.micro_batch for more in ((), ("-b", 64))] == [16, 64]


def test_a_longer_run_with_another_schedule(ranks, run, tmp_path):
    # Catches: the old rate at the first step of a new schedule.
    argv = words("--output", tmp_path / "new", "--resume", run[0], "--epochs", 2, "--max-steps", 9)
    rows = train_in(ranks, 1, [*argv, "--allow-schedule-change"])
    assert train_rows(rows)[-1]["lr"] == LearningRate("cosine", 1e-3, 180, 2).lr(8)


def test_a_longer_scheduler_of_the_json(ranks, tmp_path):
    # Catches: total_num_steps "auto" that follows another --max-steps in silence, and the old rate at the first step,
    # of steps that another batch counts anew too.
    output = tmp_path / "run"
    params = {"warmup_num_steps": 2, "warmup_max_lr": 1e-3, "warmup_min_lr": 0, "warmup_type": "linear"}
    block = {"type": "WarmupDecayLR", "params": params | {"total_num_steps": "auto"}}
    (tmp_path / "decay.json").write_text(json.dumps(DATA | {"scheduler": block}))
    argv = words("--deepspeed_config", tmp_path / "decay.json", "--output", output, "--checkpoint-interval", 4)
    for flag in ("--epochs", "--warmup-steps"):
        del argv[argv.index(flag) : argv.index(flag) + 2]
    train_in(ranks, 1, [*argv, "--max-steps", "4"])
    argv += ["--max-steps", "12", "--resume", "auto"]
    [(code, _, err)] = ranks.run(1, run_quietly, argv)
    assert code == 2
    assert "total_num_steps 4" in err
    rows = train_in(ranks, 1, [*argv, "--allow-schedule-change"])
    rates = [row["lr"] for row in train_rows(rows)][4:]
    assert rates == pytest.approx([1e-3 * (12 - step) / 10 for step in range(3, 11)])
    argv += ["--resume", output / "checkpoints" / "step-00000008", "--output", tmp_path / "halved", "-b", 8]
    rows = train_in(ranks, 1, [*argv, "--max-steps", "24", "--allow-batch-change", "--allow-schedule-change"])
    assert [row["lr"] for row in train_rows(rows)] == pytest.approx([1e-3 * (24 - step) / 22 for step in range(15, 23)])


@pytest.fixture
def copy(run, tmp_path) -> Path:
    """A copy of the run's folder."""
    return shutil.copytree(run[0], tmp_path / "run")


def flip(path: Path) -> None:
    """Turn over one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


@pytest.mark.slow
def test_a_damaged_newest_one_falls_back(ranks, copy, run):
    # Catches: a silently wrong resume, a crash, and a message that does not name the file.
    flip(copy / "checkpoints" / "step-00000008" / "model.safetensors")
    argv = words("--max-steps", 10, "--output", copy, "--resume", "auto", "--checkpoint-interval", 5)
    [(code, out, err)] = ranks.run(1, run_quietly, argv)
    assert code == 0, err
    assert "step-00000008/model.safetensors" in out
    assert f"resuming from {copy}/checkpoints/step-00000006 at step 6" in out
    rows = train_rows(read_rows(copy))
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert_same_curve(run[1], rows[:8], rtol=1e-6)
    newest(copy / "checkpoints")[0].verify()


def test_damage_without_another_checkpoint_is_refused(ranks, copy, run):
    # Catches: another checkpoint in place of the one that was named; a run that quietly begins anew and overwrites the
    # files that could be rescued.
    flip(copy / "checkpoints" / "step-00000004" / "optimizer-exp_avg.safetensors")
    for path in copy.glob("checkpoints/step-*/state.json"):
        if "step-00000004" not in str(path):
            path.unlink()
    named = copy / "checkpoints" / "step-00000004"
    for resume, way_out in ((named, "give another one, or its run's folder"), ("auto", "no checkpoint in")):
        argv = words("--max-steps", 10, "--output", copy, "--resume", resume)
        [(code, _, err)] = ranks.run(1, run_quietly, argv)
        assert code == 2
        assert way_out in err
        assert "step-00000004/optimizer-exp_avg.safetensors does not have the checksum" in err
        assert read_rows(copy) == run[1]


def test_an_earlier_one_by_name_and_then_auto(ranks, copy, run):
    # Catches: `auto` that returns to the abandoned steps, because they are higher.
    path = copy / "checkpoints" / "step-00000002"
    argv = words("--output", copy, "--checkpoint-interval", 3, "--keep-checkpoints", 2)
    train_in(ranks, 1, [*argv, "--max-steps", 5, "--resume", str(path)])
    assert newest(copy / "checkpoints")[0].step == 5
    assert sorted(p.name for p in (copy / "checkpoints").glob("step-*")) == ["step-00000003", "step-00000005"]
    rows = train_in(ranks, 1, [*argv, "--max-steps", 8, "--resume", "auto"])
    assert [row["step"] for row in rows if row["kind"] == "train"] == [*range(1, 9), 3, 4, 5, 6, 7, 8]
    assert_same_curve(run[1], rows, rtol=1e-6)


def test_a_finished_run_is_left_as_it_is(ranks, copy, run):
    # Catches: a supervisor's last restart that trains one more step, or fails.
    before = (copy / "model.safetensors").read_bytes()
    rows = train_in(ranks, 1, words("--output", copy, "--max-steps", 8, "--resume", "auto"))
    assert rows == run[1]
    assert (copy / "model.safetensors").read_bytes() == before
    assert json.loads((copy / "summary.json").read_text())["steps"] == 8
