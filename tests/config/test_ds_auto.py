"""Files that leave things open: Hugging Face's "auto" files as they stand, quotation marks, no optimizer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from curves import assert_same_curve, train_in
from project import ROOT
from published_files import ZERO2, ZERO3

from ds_vit.config import deepspeed_auto, deepspeed_json, deepspeed_keys, parse
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.launching.process import Process
from ds_vit.training.plan import prepare

WIDTH = 24
RUN = [
    *("--model", "vit_tiny_patch16_224", "--model-kwargs", "patch_size=8", f"embed_dim={WIDTH}", "depth=1"),
    *("num_heads=2", "--img-size", 16, "--dataset", "digits", "--val-split", "", "--no-aug", "--workers", 0),
    *("--max-steps", 4, "--log-interval", 1),
]


def write(folder: Path, data: dict) -> Path:
    path = folder / "config.json"
    path.write_text(json.dumps(data))
    return path


def resolved(folder: Path, data: dict, *words, world: int = 1):
    """The plan of a run with a file."""
    config, explicit = parse([str(w) for w in [*RUN, "--deepspeed_config", write(folder, data), *words]])
    return prepare(config, explicit, Process("env", 0, world, 0, world), on_cpu=True)


def test_hugging_faces_zero3_file_is_resolved_as_they_do(tmp_path):
    """HfTrainerDeepSpeedConfig: fill_match and fill_only, key by key."""
    plan = resolved(tmp_path, ZERO3, "--lr", 0.01, "--weight-decay", 0.1, "--warmup-steps", 3, "-b", 4)
    told = plan.deepspeed.json
    assert told["optimizer"]["params"] == {"lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1}
    assert plan.optimizer.arguments["betas"] == (0.9, 0.999)
    assert plan.optimizer.weight_decay == 0.1
    zero = told["zero_optimization"]
    assert zero["reduce_bucket_size"] == WIDTH * WIDTH
    assert zero["stage3_prefetch_bucket_size"] == int(0.9 * WIDTH * WIDTH)
    assert zero["stage3_param_persistence_threshold"] == 10 * WIDTH
    assert told["scheduler"]["params"] == {
        "warmup_min_lr": 0.0,
        "warmup_max_lr": 0.01,
        "warmup_num_steps": 3,
        "total_num_steps": 4,
    }
    assert "auto" not in json.dumps(told)


def test_warmup_of_the_jsons_scheduler_takes_every_flag(tmp_path):
    """--warmup-epochs and --warmup-lr were taken and passed over; no warm-up at all is one step, as DeepSpeed wants."""
    steps = 1442 // 14
    words = ["--lr", 0.01, "-b", 14, "--epochs", 4, "--warmup-epochs", 2, "--warmup-lr", 1e-4]
    told = resolved(tmp_path, ZERO3, *words).deepspeed.json
    assert told["scheduler"]["params"]["warmup_num_steps"] == 2 * steps
    assert told["scheduler"]["params"]["warmup_min_lr"] == 1e-4
    assert resolved(tmp_path, ZERO2, "--lr", 1).deepspeed.json["scheduler"]["params"]["warmup_num_steps"] == 1


@pytest.mark.parametrize("data", [ZERO2, ZERO3], ids=["zero2", "zero3"])
def test_hugging_faces_files_train(ranks, tmp_path, data):
    """The file as it stands, and what plain DeepSpeed would make of its numbers at stage 1."""
    words = ["--lr", 0.01, "-b", 2, "--weight-decay", 0.05, "--warmup-steps", 2]
    rows = train_in(ranks, 2, [*RUN, "--deepspeed_config", write(tmp_path, data), *words])
    params = {"lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.05}
    plain = {
        "gradient_clipping": 0.0,
        "optimizer": {"type": "AdamW", "params": params},
        "scheduler": resolved(tmp_path, data, *words, world=2).deepspeed.json["scheduler"],
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 100_000},
    }
    reference = train_in(ranks, 1, [*RUN, "--deepspeed_config", write(tmp_path, plain), "-b", 4])
    assert_same_curve(reference, rows, rtol=1e-5)


def test_a_file_without_an_optimizer_is_adamw_from_the_flags(ranks, tmp_path):
    """It said that betas or a type were missing; now what it becomes is in deepspeed.json, and runs."""
    output = tmp_path / "run"
    bare = {"zero_optimization": {"stage": 1, "reduce_bucket_size": 100_000}, "gradient_clipping": 1.0}
    words = ["-b", 4, "--lr", 0.01, "--weight-decay", 0.1]
    rows = train_in(ranks, 1, [*RUN, "--deepspeed_config", write(tmp_path, bare), *words, "--output", output])
    told = json.loads((output / "deepspeed.json").read_text())["optimizer"]
    params = {"lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1}
    assert told == {"type": "AdamW", "params": params}
    full = write(tmp_path, {**bare, "optimizer": told})
    assert_same_curve(train_in(ranks, 1, [*RUN, "--deepspeed_config", full, "-b", 4]), rows, rtol=1e-7)
    with pytest.raises(ValueError, match='has no "optimizer", and AdamW needs --lr'):
        resolved(tmp_path, bare)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"eps": "1e-8"}, 'optimizer.params.eps: "1e-8" in quotation marks is not a number; write 1e-8'),
        ({"lr": "1e-3"}, 'optimizer.params.lr: "1e-3" in quotation marks'),
        ({"betas": ["0.9", 0.999]}, 'optimizer.params.betas: "0.9" in quotation marks'),
        (
            {"amsgrad": "auto"},
            '"optimizer.params.amsgrad" cannot be "auto"; those that can are betas, eps, lr, momentum',
        ),
    ],
    ids=str,
)
def test_what_deepspeed_would_hand_on_is_refused_in_a_sentence(params, message):
    """DeepSpeed gives these to torch as they stand: '<=' not supported between instances of 'float' and 'str'."""
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        deepspeed_auto.with_optimizer({"optimizer": {"type": "AdamW", "params": params}}, "c.json")


def test_momentum_is_timms_where_it_is_left_open():
    """SGD with a momentum of "auto" is not SGD without one, and a line says what it is."""
    data, said = deepspeed_auto.with_optimizer({"optimizer": {"type": "SGD", "params": {"momentum": "auto"}}}, "c.json")
    assert data["optimizer"]["params"] == {"momentum": 0.9}
    assert said == ['optimizer.params.momentum "auto" is 0.9']


@pytest.mark.parametrize(
    ("block", "settled"),
    [
        ({"stage": 2, "overlap_comm": "auto"}, {"stage": 2}),
        ({"stage": "2", "reduce_scatter": "auto"}, {"stage": 2}),
        ({"stage": "auto"}, {}),
        ({"stage": 3, "round_robin_gradients": "false"}, {"stage": 3, "round_robin_gradients": False}),
        ({"stage": 3, "zero_quantized_weights": "auto", "offload_param": "auto", "zenflow": "auto"}, {"stage": 3}),
        ({"stage": 1, "contiguous_gradients": "false"}, {"stage": 1, "contiguous_gradients": False}),
        ({"stage": 1, "reduce_bucket_size": "500000"}, {"stage": 1, "reduce_bucket_size": 500_000}),
        ({"stage": 1, "cpu_offload": True}, {"stage": 1, "offload_optimizer": {"device": "cpu"}}),
        ({"stage": 3, "cpu_offload_param": "true"}, {"stage": 3, "offload_param": {"device": "cpu"}}),
        ({"stage": 1, "cpu_offload": False}, {"stage": 1}),
        (
            {"stage": 1, "offload_optimizer": {"device": "cpu", "pin_memory": "false", "ratio": "auto"}},
            {"stage": 1, "offload_optimizer": {"device": "cpu", "pin_memory": False}},
        ),
    ],
    ids=str,
)
def test_blocks_are_read_as_deepspeed_reads_them(block, settled):
    """A "false" in quotation marks is false for DeepSpeed, and was true here; "auto" is its default. Hugging Face's
    files have both, and were refused."""
    data = {"zero_optimization": block}
    deepspeed_keys.check_keys(data, "c.json")
    read = deepspeed_auto.settle(data)
    assert read == {"zero_optimization": settled}
    assert json.loads(json.dumps(read)) == read
    deepspeed_keys.check_rules(read, "c.json")


def test_a_precision_in_quotation_marks():
    """`"enabled": "false"` switched bf16 on."""
    data = deepspeed_auto.settle({"bf16": {"enabled": "false"}, "fp16": {"enabled": "auto"}})
    assert data == {"bf16": {"enabled": False}, "fp16": {"enabled": "auto"}}
    deepspeed_keys.check_keys({"autotuning": {"enabled": "false"}, "wandb": {"enabled": "off"}}, "c.json")


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"type": "NoSuchLR"}, "scheduler.type 'NoSuchLR' is unknown; use one of LRRangeTest, OneCycle, WarmupLR"),
        ({"type": "StepLR", "params": {"step_size": 2}}, "'StepLR' is torch's, whose place in its course no"),
        ({"type": "WarmupLR", "params": {"warmup_steps": 2}}, "scheduler.params.warmup_steps: WarmupLR has no such"),
        ({"type": "WarmupLR", "params": {"warmup_max_lr": "1e-3"}}, '"1e-3" in quotation marks is not a number'),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": 0}}, "must be a positive integer, got 0"),
        ({"type": "OneCycle", "params": {}}, "scheduler.params of OneCycle"),
    ],
    ids=str,
)
def test_a_scheduler_that_would_end_in_a_traceback(block, message):
    """DeepSpeed makes the scheduler after the ranks have met."""
    with pytest.raises(ValueError, match=message):
        deepspeed_auto.check_scheduler({"scheduler": block}, "c.json")


def test_shipped_files_are_not_changed_by_settling():
    """What already says everything must reach DeepSpeed as it is written."""
    for path in sorted((ROOT / "ds_configs").glob("*.json")):
        data = deepspeed_json.load_json(path)
        assert deepspeed_auto.settle(data) == data, path.name


def test_float16_autocast_without_zero_has_a_scale_for_each_rank(tmp_path):
    """Loss scales of ranks that share a model part at the first overflow of one of them (DeepSpeed 0.19.8)."""
    path = tmp_path / "config.json"
    autocast = {"enabled": True, "dtype": "float16"}
    path.write_text(json.dumps({"torch_autocast": autocast, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}))
    words = ["--dataset", "digits", "--model", "vit_tiny_patch16_224", "--deepspeed_config", str(path), "--tp", "3"]
    config, explicit = parse([*words, "--batch-size", "8", "--max-steps", "2"])
    with pytest.raises(UserError, match="a loss scale of its own on every rank"):
        prepare(config, explicit, Process("env", 0, 3, 0, 3), on_cpu=False)


@pytest.mark.parametrize(
    ("params", "flags", "said"),
    [
        ({}, [], ["DeepSpeed's default 0 holds (AdamW's own is 0.01); --weight-decay sets it"]),
        ({"weight_decay": 0.0}, [], []),
        ({}, ["--weight-decay", "0.05"], []),
    ],
)
def test_a_weight_decay_that_nobody_gives(tmp_path, params, flags, said):
    """torch's AdamW decays by itself, DeepSpeed's does not: a block without the key must not choose in silence."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, **params}}}))
    words = ["--dataset", "digits", "--model", "vit_tiny_patch16_224", "--deepspeed_config", str(path), *flags]
    config, explicit = parse([*words, "--batch-size", "8", "--max-steps", "2", "--warmup-steps", "0"])
    plan = prepare(config, explicit, Process("env", 0, 1, 0, 1), on_cpu=True)
    notes = [note.partition(": ")[2] for note in plan.notes if "params.weight_decay" in note]
    assert notes == said
    assert plan.optimizer.weight_decay == (0.05 if flags else 0.0)
