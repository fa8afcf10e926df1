"""What a run may go on from, and what becomes of its batch, its damage and its end."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import shutil
import signal
import tarfile
from pathlib import Path

import pytest
from curves import assert_same_curve, read_rows, train_in, train_rows
from interrupting import TINY, train_with
from PIL import Image
from project import ROOT

from ds_vit.checkpoint import newest
from ds_vit.checkpoint.folder import Checkpoint
from ds_vit.config.batch import BatchSizes
from ds_vit.config.durations import Interval, parse_seconds
from ds_vit.data import SampleOrder
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.optim.schedules import Schedule
from ds_vit.training.resume import (
    _BEFORE,
    _IDENTITY,
    Resume,
    check_micro_batch,
    check_same_run,
    check_same_schedule,
    first_step,
    goes_on_in,
    keep_global_batch,
)

FIRST = ("cosine", 1e-3)  # name and rate of the schedule of `run`
NEVER = {"step": 10**9, "delay": 0.0}


def resume_of(global_batch: int) -> Resume:
    return Resume(Checkpoint(Path("x"), {}, {"global_batch": global_batch, "step": 7}), falls_back=True)


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
    batch = BatchSizes(micro * accumulation * dp, micro, accumulation, dp)
    got, notes = keep_global_batch(batch, resume_of(wanted), fixed=False, allow=False)
    assert (got.micro_batch, got.accumulation, got.global_batch) == (*kept, wanted)
    assert got.micro_batch * got.accumulation * dp == wanted
    assert bool(notes) == (batch != got)


def test_another_micro_batch_is_honoured_or_refused():
    # Catches: `-b 32` on resume that is taken for 16, with a line that nobody reads; one command that fails on
    # another number of ranks.
    before = Resume(Checkpoint(Path("x"), {}, {"global_batch": 32, "step": 7, "config": {"batch_size": 8}}), True)

    def kept(asked, dp):
        batch, _ = keep_global_batch(BatchSizes(asked * dp, asked, 1, dp), before, fixed=False, allow=False)
        check_micro_batch(batch, before, asked)
        return batch.micro_batch

    assert (kept(16, 1), kept(32, 1), kept(4, 2)) == (16, 32, 4)
    for asked, dp, legal in ((32, 2, "16, 8, 4, 2, 1"), (12, 1, "32, 16, 8, 4, 2, 1"), (64, 1, "32, 16")):
        with pytest.raises(ValueError, match=rf"--batch-size {asked} .* of 32 on {dp} data.*one of {legal}"):
            kept(asked, dp)
    assert kept(8, 8) == 4  # the run's own, on more ranks than it has room for


def test_a_batch_that_cannot_be_kept_is_refused_with_the_numbers():
    # Catches: a floor division.
    batch = BatchSizes(24, 8, 1, 3)
    with pytest.raises(ValueError, match=r"global batch is 32.*24 = 8 .* 3 data-parallel.*start 2 data-parallel ranks"):
        keep_global_batch(batch, resume_of(32), fixed=False, allow=False)
    with pytest.raises(ValueError, match=r'write "train_batch_size": 32 or "auto", or say --allow-batch-change'):
        keep_global_batch(BatchSizes(64, 16, 1, 4), resume_of(32), fixed=True, allow=False)
    got, [note] = keep_global_batch(batch, resume_of(32), fixed=False, allow=True)
    assert got == batch
    assert "changes from 32 to 24" in note


@pytest.mark.parametrize(("old", "new"), [(16, 24), (24, 16), (10, 7), (16, 16), (50, 20)])
def test_another_batch_goes_on_behind_the_samples_that_were_seen(old, new):
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


@pytest.mark.parametrize(
    ("text", "interval"),
    [
        ("0", Interval()),
        ("500", Interval(steps=500)),
        ("30m", Interval(seconds=1800)),
        ("1.5h", Interval(seconds=5400)),
    ],
)
def test_intervals(text, interval):
    # Catches: minutes that are taken for steps.
    assert Interval.parse(text, "--x") == interval
    assert bool(interval) == (text != "0")


def test_seconds():
    # Catches: a unit by the wrong factor.
    assert [parse_seconds(text, "--x") for text in ("90", "90s", "2m", "2h", "1d")] == [90, 90, 120, 7200, 86400]


def test_whose_folder_it_is(tmp_path):
    # Catches: two runs' rows in one metrics.jsonl.
    run = tmp_path / "run"
    assert goes_on_in(str(run), "auto")
    assert not goes_on_in(str(run), "none")
    assert goes_on_in(str(run), str(run / "checkpoints" / "step-00000007"))
    assert goes_on_in(str(run), str(run))
    assert not goes_on_in(str(run), str(tmp_path / "other" / "checkpoints" / "step-00000007"))


def test_only_what_has_changed_is_told():
    # Catches: tuples told as changed after JSON has made lists of them; a change that is not told.
    config = {"mean": (0.5, 0.5, 0.5), "smoothing": 0.1, "workers": 4}
    state = {"run": {}, "config": json.loads(json.dumps(config))}
    resume = Resume(Checkpoint(Path("x"), {"files": {}}, state), falls_back=True)
    same = {**dict.fromkeys(_IDENTITY), **_BEFORE}  # which is what a state without these means
    assert check_same_run(resume, same, config) == []
    [told] = check_same_run(resume, same, config | {"smoothing": 0.2, "workers": 8})
    assert told == "settings that differ from the checkpoint's run: smoothing 0.1 → 0.2"


def test_another_decoding_is_another_run():
    # Catches: pixels that change in the middle of a curve; a checkpoint from before --decode that cannot go on.
    resume = Resume(Checkpoint(Path("x"), {"files": {}}, {"run": {}, "config": {}}), falls_back=True)
    same = {**dict.fromkeys(_IDENTITY), **_BEFORE}
    with pytest.raises(UserError, match="decode: exact there and fast here; give the same --decode"):
        check_same_run(resume, {**same, "decode": "fast"}, {})


def saved_with(rates: dict | None, global_batch: int = 16) -> Resume:
    state = {"schedule": json.loads(json.dumps(rates)), "global_batch": global_batch}
    return Resume(Checkpoint(Path("x"), {}, state), falls_back=True)


COSINE = Schedule("cosine", 0.1, 30, warmup_steps=2)
CONSTANT = Schedule("constant", 0.1, 30)
DECAY = {"type": "WarmupDecayLR", "params": {"total_num_steps": 30}}


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (COSINE, COSINE),
        (COSINE, dataclasses.replace(COSINE, decay_fraction=0.3)),  # of wsd alone
        (CONSTANT, dataclasses.replace(CONSTANT, total_steps=60, min_lr=0.01, warmup_lr=0.0)),
        (DECAY, DECAY),
    ],
)
def test_the_same_rates_go_on_without_a_word(old, new):
    # Catches: a run at a constant rate that cannot be made longer.
    old, new = (each if isinstance(each, dict) else dataclasses.asdict(each) for each in (old, new))
    assert check_same_schedule(saved_with(old), new, 16, allow=False) == []


@pytest.mark.parametrize(
    ("old", "new", "remedy"),
    [
        (COSINE, dataclasses.replace(COSINE, total_steps=60), "give --epochs and --max-steps"),
        (COSINE, dataclasses.replace(COSINE, warmup_steps=3), "give the warm-up as before"),
        (CONSTANT, dataclasses.replace(CONSTANT, base_lr=0.2), "give --lr as before"),
        (dataclasses.replace(COSINE, name="wsd"), Schedule("wsd", 0.1, 30, 2, decay_fraction=0.2), "--wsd-decay"),
        (DECAY, DECAY | {"params": {"total_num_steps": 60}}, "give the JSON's scheduler, --epochs"),
        (DECAY, COSINE, "give the JSON's scheduler"),
        (None, COSINE, "the JSON's there and cosine"),  # what was saved beside a scheduler of the JSON once
    ],
)
def test_other_rates_are_refused_or_told(old, new, remedy):
    # Catches: a curve that bends where a run was resumed, and nobody told.
    old, new = (each if each is None or isinstance(each, dict) else dataclasses.asdict(each) for each in (old, new))
    with pytest.raises(ValueError, match=remedy) as error:
        check_same_schedule(saved_with(old), new, 16, allow=False)
    [told] = check_same_schedule(saved_with(old), new, 16, allow=True)
    there, here = re.search("schedule: (.*) there and (.*) here; give", str(error.value)).groups()
    assert there != here
    assert told == f"the learning rate's schedule changes from {there} to {here}; the curve with it"
    assert check_same_schedule(saved_with(old, global_batch=8), new, 16, allow=False) == [told]


def test_a_json_scheduler_of_which_nothing_was_saved_is_told():
    # Catches: checkpoints from before its settings were saved that nobody can go on from.
    [told] = check_same_schedule(saved_with(None), DECAY, 16, allow=False)
    assert told.endswith("goes on as the JSON's WarmupDecayLR (total_num_steps 30)")


def test_what_muon_leaves_to_adamw_stays():
    # Catches: a tensor whose state in the checkpoint is another optimizer's.
    same = {**dict.fromkeys(_IDENTITY), **_BEFORE}  # which is what a state without these means
    there, here = {"head.bias": "AdamW's"}, {"head.bias": "AdamW's", "head.weight": "AdamW's"}
    resume = Resume(Checkpoint(Path("x"), {}, {"run": same | {"left_to_adamw": there}, "config": {}}), falls_back=True)
    assert check_same_run(resume, same | {"left_to_adamw": there}, {}) == []
    message = "left to adamw: head.weight is absent there and AdamW's here; give the same fallback_list"
    with pytest.raises(ValueError, match=message):
        check_same_run(resume, same | {"left_to_adamw": here}, {})


def words(*argv: object) -> list[str]:
    config = ["--deepspeed_config", ROOT / "ds_configs" / "cpu_zero1_fp32.json", "-b", 16, "--val-split", ""]
    return [str(word) for word in [*TINY, *config, *argv]]


@pytest.fixture(scope="module")
def run(ranks, tmp_path_factory):
    """A run of 8 steps with checkpoints at 2, 4, 6 and 8: its folder and rows."""
    output = tmp_path_factory.mktemp("rules") / "run"
    argv = ("--max-steps", 8, "--checkpoint-interval", 2, "--keep-checkpoints", 0)
    return output, train_in(ranks, 1, words(*argv, "--output", output))


REFUSED = {
    "model": (("--model", "vit_small_patch16_224"), "model: vit_tiny_patch16_224 there and vit_small_patch16_224 here"),
    "num classes": (("--num-classes", 12), "num classes: 10 there and 12 here; give the same --num-classes"),
    "seed": (("--seed", 7), "seed: 42 there and 7 here"),
    "shapes": (
        ("--model-kwargs", "patch_size=4", "embed_dim=48", "depth=2", "num_heads=2"),
        "shapes: cls_token is [1, 1, 32]",
    ),
    "trained": (("--linear-probe",), "give the same --freeze or --linear-probe"),
    "optimizer": (("--deepspeed_config", "sgd.json"), "optimizer: AdamW there and SGD here"),
    "length of the schedule": (
        ("--epochs", 2),
        "schedule: cosine from 0.001 to 0 over 90 steps, warm-up of 2 from 1e-05 there and cosine from 0.001 to 0 over "
        "180 steps, warm-up of 2 from 1e-05 here; give --epochs and --max-steps (without --epochs, --max-steps is the "
        "schedule's length) as before, or say --allow-schedule-change to go on with the new one",
    ),
    "kind of the schedule, and rate": (("--sched", "linear", "--lr", 0.1), "give --sched and --lr as before"),
    "a scheduler in the JSON": (
        ("--deepspeed_config", "warmup.json"),
        "cosine from 0.001 to 0 over 90 steps, warm-up of 2 from 1e-05 there and the JSON's WarmupLR (warmup_num_steps "
        "2) here",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_another_run_is_refused(run, tmp_path, capsys, what, monkeypatch):
    # Catches: weights of one run under the optimizer state, data or seed of another.
    from ds_vit.train import main

    data = json.loads((ROOT / "ds_configs" / "cpu_zero1_fp32.json").read_text())
    data["optimizer"] = {"type": "SGD", "params": {"lr": 0.1}}
    (tmp_path / "sgd.json").write_text(json.dumps(data))
    data["optimizer"] = {"type": "AdamW", "params": {"lr": 1e-3}}
    data["scheduler"] = {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}
    (tmp_path / "warmup.json").write_text(json.dumps(data))
    flags, message = REFUSED[what]
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.chdir(tmp_path)
    code = main(words("--output", tmp_path / "new", "--resume", run[0], *flags))
    err = capsys.readouterr().err
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "new").exists()


def image_folder(root: Path) -> Path:
    """A data set of 16 images in two classes."""
    for split, label in itertools.product(("train", "val"), ("cat", "dog")):
        for number in range(8):
            path = root / split / label / f"{label}-{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (16, 16), (number * 30, 0, 0)).save(path)
    return root


def swap_cat_and_dog(split: Path) -> None:
    (split / "cat").rename(split / "aside")
    (split / "dog").rename(split / "cat")
    (split / "aside").rename(split / "dog")


def pack(split: Path) -> None:
    with tarfile.open(split.with_suffix(".tar"), "w") as tar:
        tar.add(split, arcname="packed")
    shutil.rmtree(split)


# What is done to each split, and what is then said.
OTHER_DATA = {
    "swapped": (
        swap_cat_and_dog,
        "samples: there are 16 as there were, but the name or the label of at least one is another",
    ),
    "renamed": (
        lambda split: (split / "dog").rename(split / "hound"),
        "class names: class 1 is dog there and hound here; give the same training data",
    ),
    "elsewhere": (lambda split: None, None),
    "packed": (pack, None),
}


@pytest.fixture(scope="module")
def images_run(ranks, tmp_path_factory):
    """A run of 2 steps on image files: its data and its folder."""
    folder = tmp_path_factory.mktemp("images")
    data = image_folder(folder / "data")
    at = TINY.index("--dataset")
    argv = [*TINY[:at], *TINY[at + 2 :], "--deepspeed_config", ROOT / "ds_configs" / "cpu_zero1_fp32.json"]
    argv = [str(word) for word in [*argv, "-b", 4, "--val-split", "", "--warmup-steps", 0]]
    argv += ["--max-steps", "2", "--checkpoint-interval", "2"]
    train_in(ranks, 1, [*argv, "--data-dir", str(data), "--output", str(folder / "run")])
    return data, folder / "run", argv


@pytest.mark.parametrize("what", OTHER_DATA)
def test_the_data_must_be_the_same(images_run, tmp_path, capsys, what, monkeypatch):
    # Catches: another data set of as many images that is gone on with, and the same one that is refused elsewhere.
    from ds_vit import config
    from ds_vit.launching.process import discover
    from ds_vit.training.plan import prepare

    data, run, argv = images_run
    shutil.copytree(data, tmp_path / "moved")
    change, message = OTHER_DATA[what]
    change(tmp_path / "moved" / "train")
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    argv = [*argv, "--data-dir", str(tmp_path / "moved"), "--resume", str(run), "--output", str(tmp_path / "new")]
    parsed = config.parse(argv)
    if message is not None:
        with pytest.raises(ValueError, match=message):
            prepare(*parsed, discover(), on_cpu=True)
        return
    plan = prepare(*parsed, discover(), on_cpu=True)
    assert plan.resume is not None
    assert not [note for note in plan.notes if "sample" in note or "class" in note or "differ" in note]


def test_a_checkpoint_without_samples_goes_on_and_says_so():
    # Catches: runs of an older version that cannot go on.
    new = dict.fromkeys(_IDENTITY) | {"class_names": ["cat", "dog"], "samples": "1234"}
    old = {"run": dict.fromkeys(_IDENTITY.keys() - {"class_names", "samples"}), "config": {}}
    told = check_same_run(Resume(Checkpoint(Path("x"), {}, old), falls_back=True), new, {})
    assert told == [
        f"the checkpoint is from before {what} were saved: they are not compared" for what in ("class names", "samples")
    ]


def test_max_steps_stops_early_or_is_the_length(ranks, run, tmp_path):
    # Catches: a longer --max-steps that bends the curve of a run without --epochs, and one that is refused though the
    # length of the schedule is the same.
    argv = words("--output", tmp_path / "run", "--resume", run[0])
    at = argv.index("--epochs")
    without = [*argv[:at], *argv[at + 2 :]]
    arguments = (str(tmp_path / "run"), 0, signal.SIGTERM, NEVER)
    [(code, _, err)] = ranks.run(1, train_with, [*without, "--max-steps", "60"], *arguments)
    assert code == 2
    assert "over 90 steps, warm-up of 2 from 1e-05 there and cosine from 0.001 to 0 over 60 steps" in err
    assert train_rows(train_in(ranks, 1, [*argv, "--max-steps", "9"]))[-1]["lr"] == Schedule(*FIRST, 90, 2).lr(8)
    arguments = (str(tmp_path / "new"), 0, signal.SIGTERM, NEVER)
    argv = words("--output", tmp_path / "new", "--resume", run[0], "--epochs", 2, "--max-steps", 9)
    [(code, out, err)] = ranks.run(1, train_with, [*argv, "--allow-schedule-change"], *arguments)
    assert code == 0, err
    said = " ".join(out.split())
    assert "schedule changes from cosine from 0.001 to 0 over 90 steps, warm-up of 2 from 1e-05 to cosine" in said
    assert train_rows(read_rows(tmp_path / "new"))[-1]["lr"] == Schedule(*FIRST, 180, 2).lr(8)


def test_a_longer_scheduler_of_the_json(ranks, tmp_path):
    # Catches: total_num_steps "auto" that follows another --max-steps in silence, and the old rate at the first step.
    block = {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 2, "warmup_max_lr": 1e-3, "warmup_min_lr": 0}}
    block["params"] |= {"total_num_steps": "auto", "warmup_type": "linear"}
    data = json.loads((ROOT / "ds_configs" / "cpu_zero1_fp32.json").read_text()) | {"scheduler": block}
    (tmp_path / "decay.json").write_text(json.dumps(data))
    argv = words(
        "--deepspeed_config", tmp_path / "decay.json", "--output", tmp_path / "run", "--checkpoint-interval", 4
    )
    for flag in ("--epochs", "--warmup-steps"):
        del argv[argv.index(flag) : argv.index(flag) + 2]
    train_in(ranks, 1, [*argv, "--max-steps", "4"])
    arguments = (str(tmp_path / "run"), 0, signal.SIGTERM, NEVER)
    argv += ["--max-steps", "12", "--resume", "auto"]
    [(code, _, err)] = ranks.run(1, train_with, argv, *arguments)
    assert code == 2
    assert "total_num_steps 4, warmup_type linear) there and the JSON's WarmupDecayLR" in err
    rows = train_in(ranks, 1, [*argv, "--allow-schedule-change"])
    assert [row["lr"] for row in rows if row["kind"] == "train"][4:] == pytest.approx(
        [1e-3 * (12 - step) / 10 for step in range(3, 11)]
    )


def flip(path: Path) -> None:
    """Turn over one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)


# What is done to a file of the newest checkpoint, and the step from which the run then goes on.
HARM = {
    **{
        f"a flipped bit in {name}": (f"step-00000008/{name}", flip, 6)
        for name in (
            *("model.safetensors", "optimizer-exp_avg.safetensors", "optimizer-exp_avg_sq.safetensors"),
            *("ema.safetensors", "state.json", "manifest.json"),
        )
    },
    "a truncated file": ("step-00000008/ema.safetensors", lambda p: os.truncate(p, p.stat().st_size - 4), 6),
    "a deleted file": ("step-00000008/model.safetensors", Path.unlink, 6),
    "latest points nowhere": ("latest", lambda p: p.write_text("step-00000099\n"), 8),
}


@pytest.mark.slow
@pytest.mark.parametrize("harm", HARM)
def test_a_damaged_newest_one_falls_back(ranks, run, tmp_path, harm):
    # Catches: a silently wrong resume, a crash, and words that do not name the file.
    output = tmp_path / "run"
    shutil.copytree(run[0], output)
    name, action, step = HARM[harm]
    action(output / "checkpoints" / name)
    argv = words("--max-steps", 10, "--output", output, "--resume", "auto", "--checkpoint-interval", 5)
    [(code, out, err)] = ranks.run(1, train_with, argv, str(output), 0, signal.SIGTERM, NEVER)
    assert code == 0, err
    assert name in out
    assert f"going on from {output}/checkpoints/step-{step:08d} at step {step}" in out
    rows = train_rows(read_rows(output))
    assert [row["step"] for row in rows] == list(range(1, 11))
    assert_same_curve(run[1], rows[:8], rtol=1e-6)
    newest(output / "checkpoints")[0].verify()


def test_a_damaged_one_by_name_is_refused(ranks, run, tmp_path):
    # Catches: another checkpoint in place of the one that somebody named.
    output = tmp_path / "run"
    shutil.copytree(run[0], output)
    flip(output / "checkpoints" / "step-00000004" / "optimizer-exp_avg.safetensors")
    argv = words("--max-steps", 10, "--output", output, "--resume", output / "checkpoints" / "step-00000004")
    [(code, _, err)] = ranks.run(1, train_with, argv, str(output), 0, signal.SIGTERM, NEVER)
    assert code == 2
    assert "step-00000004/optimizer-exp_avg.safetensors does not have the checksum of the manifest" in err
    assert "give another one, or its run's folder" in err
    assert read_rows(output) == run[1]


def test_all_damaged_is_said(run, tmp_path, capsys, monkeypatch):
    # Catches: a run that quietly begins anew and overwrites what could be rescued.
    from ds_vit.train import main

    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    output = tmp_path / "run"
    shutil.copytree(run[0], output)
    for path in output.glob("checkpoints/step-*/state.json"):
        path.unlink()
    assert main(words("--output", output, "--resume", "auto")) == 2
    err = capsys.readouterr().err
    assert "no checkpoint in" in err
    assert "step-00000008/state.json is missing" in err


def test_an_earlier_one_by_name_and_then_auto(ranks, run, tmp_path):
    # Catches: `auto` that returns to the course that was given up, because its steps are higher.
    output = tmp_path / "run"
    shutil.copytree(run[0], output)
    path = output / "checkpoints" / "step-00000002"
    argv = words("--output", output, "--checkpoint-interval", 3, "--keep-checkpoints", 2)
    train_in(ranks, 1, [*argv, "--max-steps", 5, "--resume", str(path)])
    assert newest(output / "checkpoints")[0].step == 5
    assert sorted(p.name for p in (output / "checkpoints").glob("step-*")) == ["step-00000003", "step-00000005"]
    rows = train_in(ranks, 1, [*argv, "--max-steps", 8, "--resume", "auto"])
    assert [row["step"] for row in rows if row["kind"] == "train"] == [*range(1, 9), 3, 4, 5, 6, 7, 8]
    assert_same_curve(run[1], rows, rtol=1e-6)


def test_going_on_saves_no_step_more(ranks, run, tmp_path):
    # Catches: a checkpoint one step behind the one that was resumed from, which pushes an older one out.
    output = tmp_path / "run"
    shutil.copytree(run[0], output)
    argv = words("--output", output, "--checkpoint-interval", 4, "--keep-checkpoints", 0, "--max-steps", 11)
    rows = train_in(ranks, 1, [*argv, "--resume", "auto"])
    saved = [row["step"] for row in rows[len(run[1]) :] if row["kind"] == "checkpoint"]
    assert saved == [11]


def test_a_file_with_a_checkpoints_name(ranks, run, tmp_path):
    # Catches: a run that goes on and ends with code 74 because something else has the name of its next checkpoint.
    output = tmp_path / "run"
    shutil.copytree(run[0], output)
    for name in ("step-00000010", ".step-00000010.old", ".step-00000010.partial", "step-00000099"):
        (output / "checkpoints" / name).write_text("no folder")
    argv = words("--output", output, "--checkpoint-interval", 5, "--max-steps", 10, "--resume", "auto")
    [(code, out, err)] = ranks.run(1, train_with, argv, str(output), 0, signal.SIGTERM, NEVER)
    assert code == 0, out + err
    said = " ".join(out.split())
    assert "step-00000010, step-00000099: no folder, so no checkpoint" in said
    assert newest(output / "checkpoints")[0].step == 10
    assert not list((output / "checkpoints").glob(".*"))


def test_a_finished_run_is_left_as_it_is(ranks, run, tmp_path):
    # Catches: a supervisor's last restart that trains one more step, or fails.
    output = tmp_path / "run"
    shutil.copytree(run[0], output)
    before = (output / "model.safetensors").read_bytes()
    rows = train_in(ranks, 1, words("--output", output, "--max-steps", 8, "--resume", "auto"))
    assert rows == run[1]
    assert (output / "model.safetensors").read_bytes() == before
    assert json.loads((output / "summary.json").read_text())["steps"] == 8


def lose_the_moments(argv: list[str]) -> int:
    """On a rank: resume with optimizer states that are zero."""
    from ds_vit.train import main
    from ds_vit.training import checkpoint_manager

    plain = checkpoint_manager.load_tensors

    def load(checkpoint, zero_map, ema, scalars):
        plain(checkpoint, zero_map, ema, scalars)
        for shard in zero_map.shards:
            zero_map.state(shard, "exp_avg").zero_()

    checkpoint_manager.load_tensors = load
    return main(argv)


def test_a_lost_moment_is_felt(ranks, run, tmp_path):
    # Catches: a comparison of curves that would not see what it is there to see.
    argv = words("--output", tmp_path / "run", "--max-steps", 8)
    checkpoint = str(run[0] / "checkpoints" / "step-00000004")
    good = train_in(ranks, 1, [*argv, "--resume", checkpoint])
    later = [row for row in run[1] if row["step"] > 4]
    assert_same_curve(later, good, rtol=1e-6)
    lost = tmp_path / "lost"
    assert ranks.run(1, lose_the_moments, [*argv, "--output", str(lost), "--resume", checkpoint]) == [0]
    with pytest.raises(AssertionError, match="the curves part"):
        assert_same_curve(later, read_rows(lost), rtol=1e-5)
