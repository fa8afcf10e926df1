"""`--set`, and the flags that have a key of the DeepSpeed JSON for their own."""

from __future__ import annotations

import json

import pytest
from project import ROOT

from ds_vit.config import parse
from ds_vit.config.batch import batch_sizes
from ds_vit.config.deepspeed_set import overlay, parse_set
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.launching.process import Process
from ds_vit.training.plan import prepare

CPU = str(ROOT / "ds_configs" / "cpu_zero1_fp32.json")
RUN = [
    *("--dataset", "digits", "--val-split", "", "--model", "vit_tiny_patch16_224", "--img-size", "16", "-b", "8"),
    *("--model-kwargs", "patch_size=8", "embed_dim=24", "depth=1", "num_heads=2", "--max-steps", "2"),
]


def plan_of(*words):
    config, explicit = parse([*RUN, "--deepspeed_config", CPU, *words])
    return prepare(config, explicit, Process("env", 0, 1, 0, 1), on_cpu=True)


def test_values_have_the_types_of_a_file():
    # Catches: "2" for 2, and a later value that does not count.
    words = ["a.b=2", "a.c=1e-3", "d=true", "e=[0.9,0.95]", "f=AdamW", "g=null", "h=x=y", "a.b=3"]
    values = {"a.b": 3, "a.c": 1e-3, "d": True, "e": [0.9, 0.95], "f": "AdamW", "g": None, "h": "x=y"}
    assert parse_set(words) == values
    file = {"a": {"b": 1, "z": 5}}
    assert overlay(file, parse_set(["a.b=2", "n.m.k=1"]), "c.json") == {"a": {"b": 2, "z": 5}, "n": {"m": {"k": 1}}}
    assert file == {"a": {"b": 1, "z": 5}}, "the file's own values were changed"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--set", "zero_optimization.stage"], "--set takes KEY.PATH=VALUE, such as zero_optimization.stage=2"),
        (["--set", ".x=1"], "--set takes KEY.PATH=VALUE"),
        (["--set", "zero_optimization.stage.x=1"], '"zero_optimization.stage" in'),
        (["--set", "zero_optimisation.stage=2"], 'the nearest known key is "zero_optimization"'),
        (["--set", "zero_optimization.stage=7"], "stage 7 does not exist"),
        (["--set", "zero_optimization.overlap_comm=perhaps"], "--set zero_optimization.overlap_comm=perhaps: zero"),
        (["--set", "optimizer.params.lr=0.1", "--lr", "0.2"], "--lr 0.2 and --set optimizer.params.lr are both given"),
    ],
)
def test_what_is_set_is_checked_like_the_file(words, said):
    # Catches: a way around the checks of the file, and a message that blames the file alone.
    with pytest.raises(UserError) as error:
        plan_of(*words)
    assert said in str(error.value)


def test_who_has_the_last_word_and_who_says_so():
    # Catches: a flag that the JSON's number outvotes, and a value whose source is told wrong.
    plan = plan_of("--set", "zero_optimization.stage=2", "--set", "gradient_clipping=0.25", "--weight-decay", "0.3")
    assert plan.deepspeed.zero_stage == 2
    assert (plan.optimizer.clip, plan.optimizer.decay) == (0.25, 0.3)
    assert plan.deepspeed.json["optimizer"]["params"]["weight_decay"] == 0.3
    origin = plan.deepspeed.origin
    names = ("zero_optimization.stage", "gradient_clipping", "optimizer.params.weight_decay", "optimizer.params.lr")
    assert [origin(name) for name in names] == ["--set", "--set", "--weight-decay", "JSON"]
    fixed = json.loads((ROOT / "ds_configs" / "cpu_zero1_fp32.json").read_text())["gradient_clipping"]
    assert plan_of("--clip-grad", "0.5").optimizer.clip == 0.5 != fixed


def test_the_command_lines_set_is_over_a_recipes_flag(tmp_path):
    # Catches: a rate that a run's config.yaml outvotes in silence, and bounds of another number of stages.
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"deepspeed_config: {CPU}\ndataset: digits\nlr: 0.5\nweight_decay: 0.1\npp: 2\npp_partition: 0,2,3\n"
        "set: [gradient_clipping=0.1, steps_per_print=7]\n"
    )
    config, _ = parse(["--recipe", str(recipe), "--set", "optimizer.params.lr=0.2", "--clip-grad", "0.3"])
    assert (config.lr, config.weight_decay, config.clip_grad) == (None, 0.1, 0.3)
    assert config.set == ("steps_per_print=7", "optimizer.params.lr=0.2")
    assert config.pp_partition == "0,2,3"
    assert parse(["--recipe", str(recipe), "--pp", "3"])[0].pp_partition == ""


def batch(total, micro, accumulation, dp, b=None, a=None):
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    data = {key: number for key, number in zip(keys, (total, micro, accumulation), strict=True) if number is not None}
    found = batch_sizes(data, "c.json", dp=dp, batch_size=b, grad_accum_steps=a, follow=True)
    assert found.micro_batch * found.accumulation * found.dp == found.global_batch == total
    return found.micro_batch, found.accumulation


def test_micro_batch_and_accumulation_follow_the_global_batch():
    # Catches: a micro-batch above the one that fits into memory, and a flag that says nothing.
    assert batch(64, 8, 2, 4) == (8, 2)
    assert batch(64, 8, 2, 1) == (8, 8)
    assert batch(64, 8, 2, 16) == (4, 1)
    assert batch(12, 5, 9, 1) == (4, 3)
    assert batch(64, 8, 2, 1, b=16) == (16, 4)
    assert batch(64, 8, 2, 2, a=2) == (16, 2)
    assert batch(64, None, 4, 2) == (8, 4)
    with pytest.raises(
        UserError, match=r"batch is 64, which 3 data-parallel.* start 2 data.*--set train_batch_size=63"
    ):
        batch(64, 8, 2, 3)
