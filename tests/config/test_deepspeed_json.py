"""DeepSpeed's JSON and --set: what is accepted, rejected, resolved or without effect."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from curves import train_in
from project import ROOT
from published_files import FILES, RUN, WIDTH, ZERO2, ZERO3

from ds_vit.config import deepspeed_json, deepspeed_rules, deepspeed_verdicts
from ds_vit.config.batch import BatchSizes, batch_sizes
from ds_vit.config.deepspeed_json import overlay
from ds_vit.config.deepspeed_keys import Block, DeepSpeedJson, model_of, read_json
from ds_vit.config.parser import parse
from ds_vit.config.schema import RunConfig
from ds_vit.config.units import parse_set
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.launching.process import Process
from ds_vit.training.resolve import resolve
from ds_vit.training.resolve.deepspeed import _with_auto_precision, read
from ds_vit.training.run import World

CONFIGS = sorted((ROOT / "ds_configs").glob("*.json"))
CPU = str(ROOT / "ds_configs" / "cpu_zero1_fp32.json")


def write(folder: Path, data: dict) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(data))
    return str(path)


def checked(data: dict, path: str) -> DeepSpeedJson:
    """A file that nothing is wrong with."""
    json = DeepSpeedJson.of(data, path)
    if problems := deepspeed_verdicts.rejected(json, path):
        raise UserError(*dict(problems).values())
    return json


def resolved(file: str, *words, world: int = 1, on_cpu: bool = True):
    """A run with a file, resolved."""
    config = parse([str(word) for word in [*RUN, "--deepspeed_config", file, *words]])
    return resolve(config, World(Process("env", 0, world, 0, world), on_cpu))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_shipped_files_are_legal_for_any_number_of_ranks(path):
    """A shipped file that our rules, DeepSpeed's parser or some number of ranks would reject, or that we change."""
    from deepspeed.runtime.config import DeepSpeedConfig

    data = deepspeed_json.load_json(path)
    typed = checked(data, path.name)
    assert typed.dump() == data
    assert deepspeed_verdicts.idle_keys(typed) == []
    deepspeed_rules.precision(typed, path.name, on_cpu=False)
    for dp in (1, 3, 1024):
        sizes = batch_sizes(typed, path.name, RunConfig(batch_size=8, grad_accum_steps=2), dp=dp)
        assert (sizes.global_batch, sizes.micro_batch, sizes.accumulation) == (16 * dp, 8, 2)
    run = resolved(str(path), "--lr", "1e-3", "-b", 8, "--grad-accum-steps", 2, "--clip-grad", 1.0, on_cpu=False)
    parsed = DeepSpeedConfig(run.engine.json.dump())
    assert (parsed.train_batch_size, parsed.gradient_clipping) == (16, 1.0)
    assert parsed.zero_optimization_stage == data["zero_optimization"]["stage"]
    assert path.name in (ROOT / "ds_configs" / "README.md").read_text() or path.name.startswith("cpu_zero")


class _Spy(dict):
    """A dict that records the keys that DeepSpeed's parser asks for."""

    def __init__(self, data, seen):
        super().__init__(data)
        self.seen = seen

    def get(self, key, default=None):
        self.seen.add(key)
        return super().get(key, default)

    def __contains__(self, key):
        self.seen.add(key)
        return super().__contains__(key)

    def keys(self):
        return self

    def __copy__(self):
        return self


def test_our_top_level_is_deepspeeds():
    """Canary: an upgrade of DeepSpeed adds or drops a top-level key, or a key that a verdict names."""
    from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS, DeepSpeedConfig

    seen: set[str] = set()
    DeepSpeedConfig(_Spy({"train_batch_size": 1}, seen))
    read = {key for key in seen if isinstance(key, str)} - {"bfloat16", *_REMOVED_TOP_LEVEL_CONFIG_KEYS}
    # These are read outside DeepSpeedConfig.
    elsewhere = {"scheduler", "sequence_parallel_size", "data_parallel_size", "log_level"}
    named = deepspeed_verdicts.NAMED
    assert read | elsewhere == {*DeepSpeedJson.model_fields, *(name.partition(".")[0] for name in named)}
    for name in named:
        model = DeepSpeedJson
        for key in name.split("."):
            fields = {field.alias or own: field for own, field in model.model_fields.items()}
            if key not in fields:
                assert issubclass(model, Block), name
                break
            model = model_of(fields[key].annotation)


BF16_STATES = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
OFFLOADED = {"offload_optimizer": {"device": "cpu"}}
NVME = {"device": "nvme", "nvme_path": "/local"}
REJECTED = [
    ({"zero_optimisation": {}}, 'no key "zero_optimisation"; the nearest is zero_optimization'),
    ({"zero_optimization": {"stge": 1}}, 'no key "zero_optimization.stge"; the nearest is stage'),
    ({"comms_config": {"verbose": False}}, 'no key "comms_config"; it reads "comms_logger"'),
    ({"gradient_accumulation_dtype": "fp32"}, 'it reads "data_types.grad_accum_dtype"'),
    ({"optimizer": {"adam_w_mode": True}}, 'no key "optimizer.adam_w_mode"; it reads "optimizer.params.adam_w_mode"'),
    ({"timers": {"thruput": {}}}, 'no key "timers.thruput"; the nearest is throughput'),
    ({"elasticity": {}}, '"elasticity": Elastic training has been removed'),
    ({"bfloat16": {"enabled": True}}, 'it reads "bf16"'),
    ({"zero_optimization": {"stage": True}}, "stage must be 0, 1, 2 or 3, not True"),
    ({"optimizer": {"params": {"eps": "1e-8"}}}, 'optimizer.params.eps: "1e-8" is text, not a number; write 1e-8'),
    ({"optimizer": {"params": {"betas": ["0.9", 0.999]}}}, 'optimizer.params.betas: "0.9" is text'),
    ({"scheduler": {"params": {"warmup_max_lr": "1e-3"}}}, '"1e-3" is text, not a number'),
    ({"data_types": {"buffer_dtype": "fp31"}}, 'must be "fp32", "bf16" or "fp16", not \'fp31\''),
    ({"pipeline": {"activation_checkpoint_interval": 0.5}}, "interval must be a whole number, not 0.5"),
    ({"train_batch_size": 8.5}, 'train_batch_size must be a whole number or "auto", not 8.5'),
    ({"train_batch_size": 0}, 'train_batch_size must be greater than or equal to 1 or "auto", not 0'),
    ({"zero_optimization": {"stage": "1", "round_robin_gradients": "true"}}, "mix up parameters"),
    ({"zero_optimization": {"stage": 1, "offload_param": {"device": "cpu"}}}, "needs stage 3; this file has stage 1"),
    ({"zero_optimization": {"stage": 1, "cpu_offload": True, **OFFLOADED}}, "cpu_offload"),
    ({"zero_optimization": {"stage": 3, "compute_grad_norm": False}}, "supported only with ZeRO Stage 1 or 2"),
    ({"zero_optimization": {"stage": 1, "compute_grad_norm": False, **OFFLOADED}}, "does not work with offload_opt"),
    ({"autotuning": {"enabled": True}}, "delete the block"),
    ({"autotuning": True}, "delete the block"),
    ({"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 2}}, "gathers them by layer; delete it"),
    ({"zero_optimization": {"stage": 3}, "prescale_gradients": True}, 'stage 3 needs "reduce_scatter": false'),
    ({"gradient_predivide_factor": 0}, "must be greater than 0, not 0"),
    ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, '_states" works only together with the other of'),
    ({"zero_optimization": {"stage": 3, "offload_optimizer": NVME}}, 'files that checkpoints do not read; use "cpu"'),
    ({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}}, "its first learning"),
    (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "super_offload": True}}},
        "keeps Adam's moments in a second process, which no checkpoint reaches; delete it",
    ),
    ({"zero_optimization": {"stage": 2, "zenflow": {}, **OFFLOADED}}, "updates most of each weight late"),
    ({"optimizer": {"params": {"lr": float("nan")}}}, "optimizer.params.lr must be a finite number, not nan"),
    ({"optimizer": "auto"}, "\"optimizer\" must be a block {…}, not 'auto'"),
    ({"scheduler": {"params": "auto"}}, "\"scheduler.params\" must be a block {…}, not 'auto'"),
    ({"optimizer": {"params": {"amsgrad": "auto"}}}, 'cannot be "auto"; those that can are optimizer.params.betas'),
    ({"tensor_parallel": {"autotp_size": "auto"}}, '"tensor_parallel" is AutoTP'),
    ({"managed_gradient_accumulation": "auto"}, "leaves accumulation to the caller"),
    (
        {"data_types": {"grad_accum_dtype": "auto"}},
        '"data_types.grad_accum_dtype" cannot be "auto"; those that can are',
    ),
    ({"torch_autocast": {"lower_precision_safe_modules": [3]}}, "modules.0 must be a string, not 3"),
    ({"zero_optimization": {"leaf_module": True}}, '"zero_optimization.leaf_module" must be a block {…}, not True'),
    ({"zero_optimization": {"leaf_module": float("nan")}}, "leaf_module must be a finite number, not nan"),
    ({"gradient_clipping": -1}, "gradient_clipping must be at least 0 and at most 1,000,000,000, not -1"),
]


@pytest.mark.parametrize(("data", "message"), REJECTED, ids=lambda v: str(v)[:40])
def test_rejected(data, message):
    """A key that DeepSpeed would ignore or crash on."""
    with pytest.raises(UserError, match=re.escape(message)):
        checked(data, "c.json")


def test_everything_wrong_is_named_at_once():
    # Catches: a file that is corrected and refused four times over.
    data = {
        "trainbatchsize": 8,
        "gradient_clipping": -1,
        "zero_optimization": {"stage": 2, "stge": 1, "reduce_bucket_size": "big", "overlap_comm": "perhaps"},
        "optimizer": {"type": "AdamW", "params": {"lr": float("nan")}},
        "torch_autocast": {"enabled": True, "lower_precision_safe_modules": [3]},
        "fp16": 3,
        "a.b": {"c": float("inf")},
    }
    data["zero_optimization"]["round_robin_gradients"] = True
    json, wrong = read_json(data, "c.json")
    right = {"stage": 2, "round_robin_gradients": True}
    assert json.dump() == {"zero_optimization": right, "optimizer": {"type": "AdamW", "params": {}}}
    assert [name for name, _ in deepspeed_verdicts.rejected(json, "")] == ["zero_optimization.round_robin_gradients"]
    assert read_json({"zero_optimization": {"stage": 5, **OFFLOADED}}, "c.json")[0].dump() == {}, "no stage to judge by"
    problems = wrong.values()
    named = ["trainbatchsize", "gradient_clipping", "stge", "reduce_bucket_size", "overlap_comm"]
    named += ["lr", "fp16", "a.b", "modules.0"]
    for name in named:
        assert sum(name in problem.split(";")[0] for problem in problems) >= 1, name
    assert all(problem.startswith("c.json: ") for problem in problems)
    assert len(problems) == len(named)


def test_a_monitor_whose_package_is_missing(monkeypatch):
    """An import error on every rank."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    data = {"comet": {"enabled": True}, "wandb": {"enabled": "off"}}
    with pytest.raises(UserError, match='"comet" needs the package comet_ml: pip install comet_ml'):
        checked(data, "c.json")
    for settings in ({"wandb": True, "wandb_project": "p"}, {"set": ["wandb.enabled=true"]}):
        with pytest.raises(UserError, match='"wandb" needs the package wandb: pip install wandb'):
            read(RunConfig(deepspeed_config={}, **settings), on_cpu=True)
    stored = {"wandb": {"enabled": True, "project": "p"}}
    with pytest.raises(UserError, match='"wandb" needs the package wandb'):
        read(RunConfig(deepspeed_config=stored, lr=0.1), on_cpu=True)
    engine, _ = read(RunConfig(deepspeed_config=stored, wandb=False, lr=0.1), on_cpu=True)  # --no-wandb holds
    assert not engine.json.is_on("wandb")


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        ({"stage": 2, "overlap_comm": "auto"}, {"stage": 2}),
        ({"stage": "auto"}, {}),
        ({"stage": "3", "round_robin_gradients": "false"}, {"stage": 3, "round_robin_gradients": False}),
        ({"stage": 3, "zero_quantized_weights": "auto", "offload_param": "auto", "zenflow": "auto"}, {"stage": 3}),
        ({"stage": 3, "prefetch_bucket_size": "9"}, {"stage": 3, "stage3_prefetch_bucket_size": 9}),
        ({"stage": 1, "reduce_bucket_size": "auto"}, {"stage": 1, "reduce_bucket_size": "auto"}),
        ({"stage": 1, "cpu_offload": True}, {"stage": 1, **OFFLOADED}),
        ({"stage": 3, "cpu_offload_param": "true"}, {"stage": 3, "offload_param": {"device": "cpu"}}),
        ({"stage": 1, "cpu_offload": False}, {"stage": 1}),
        (
            {"stage": 1, "offload_optimizer": {"device": "cpu", "pin_memory": "false", "ratio": "auto"}},
            {"stage": 1, "offload_optimizer": {"device": "cpu", "pin_memory": False}},
        ),
    ],
    ids=str,
)
def test_values_are_those_that_deepspeed_reads(block, expected):
    """A quoted "false" is false for DeepSpeed and was true here; "auto" is its default; old names are new ones."""
    switches = {"dump_state": 0, "wall_clock_breakdown": 1, "torch_autocast": {"enabled": "true"}}
    data = checked({"zero_optimization": block, "bf16": {"enabled": "false"}, **switches}, "c.json").dump()
    switches = {"dump_state": False, "wall_clock_breakdown": True, "torch_autocast": {"enabled": True}}
    assert data == {"zero_optimization": expected, "bf16": {"enabled": False}, **switches}
    assert json.loads(json.dumps(data)) == data


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"data_types": {"param_dtype": "bf16"}}, "param_dtype 'bf16' must be the model's type, float32"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "must be the model's type, float32, at ZeRO stage 0"),
        ({"torch_autocast": {"lower_precision_safe_modules": ["no.such.Module"]}}, "there is no 'no.such.Module'"),
        ({"torch_autocast": {"lower_precision_safe_modules": ["torch"]}}, "there is no 'torch'"),
        ({"fp16": {"enabled": True}, "zero_optimization": {"stage": 1}}, "fp16 needs a GPU"),
        ({"bf16": {"enabled": True}, "torch_autocast": {"enabled": True}}, "enabled at once; keep one"),
        ({"torch_autocast": {"enabled": True, "dtype": "float64"}}, "'float64' is not a 16-bit type"),
    ],
    ids=str,
)
def test_number_formats_rejected(data, message):
    """DeepSpeed looks these up after the ranks have met, or gets them wrong."""
    typed = DeepSpeedJson.of(data)
    with pytest.raises(UserError, match=re.escape(message)):
        deepspeed_rules.check_types(typed, deepspeed_rules.precision(typed, "c.json", on_cpu=True), "c.json")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({}, "fp32"),
        ({"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}, "bf16"),
        ({"bf16": {"enabled": False}}, "fp32"),
        ({"torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"}}, "autocast-bf16"),
        ({"fp16": {"enabled": True}, "zero_optimization": {"stage": 2}}, "fp16"),
    ],
)
def test_precision(data, expected):
    """The name in summary.json is not the one that runs."""
    assert deepspeed_rules.precision(DeepSpeedJson.of(data), "c.json", on_cpu=False).name == expected


@pytest.mark.parametrize("has_bf16", [True, False])
def test_an_automatic_precision_is_the_accelerators(monkeypatch, has_bf16):
    """An accelerator that is not NVIDIA's: torch.cuda does not know it, and answers fp16 for all."""
    accelerator = SimpleNamespace(is_bf16_supported=lambda: has_bf16)
    monkeypatch.setattr("ds_vit.training.resolve.deepspeed.get_accelerator", lambda: accelerator)
    json = DeepSpeedJson.of({block: {"enabled": "auto"} for block in ("bf16", "fp16")})
    for on_cpu, expected in ((False, (has_bf16, not has_bf16)), (True, (False, False))):
        found = _with_auto_precision(json, on_cpu=on_cpu)
        assert (found.bf16.enabled, found.fp16.enabled) == expected


def test_float16_autocast_without_zero_has_a_scale_for_each_rank(tmp_path):
    """Loss scales of ranks that share a model diverge at the first overflow of one of them (DeepSpeed 0.19.8)."""
    autocast = {"enabled": True, "dtype": "float16"}
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3}}
    file = write(tmp_path, {"torch_autocast": autocast, "optimizer": optimizer})
    with pytest.raises(UserError, match="a separate loss scale on every rank"):
        resolved(file, "--model-kwargs", "num_heads=3", "--tp", "3", world=3, on_cpu=False)


def test_a_norm_that_is_not_computed():
    """No norm to clip by."""
    data = DeepSpeedJson.of({"zero_optimization": {"stage": 1, "compute_grad_norm": False}})
    with pytest.raises(UserError, match=r"no norm for gradient_clipping 0\.5"):
        deepspeed_rules.check_grad_norm(data, "c.json", clip=0.5)
    deepspeed_rules.check_grad_norm(data, "c.json", clip=0.0)


def test_activation_checkpointing():
    """The three ways to ask for it, and contradictions."""

    def get(flag, interval=None, **block):
        data = {} if interval is None else {"pipeline": {"activation_checkpoint_interval": interval}}
        data |= {"activation_checkpointing": block} if block else {}
        setting = deepspeed_rules.activation_checkpointing(DeepSpeedJson.of(data), "c.json", flag=flag)
        return setting.interval, setting.cpu, setting.selective

    assert get("") == get("", 0) == (0, False, False)
    assert get("full") == get("full", 1) == get("1", 1) == (1, False, False)
    assert get("", 2) == get("full", 2) == get("2") == get("2", 2) == (2, False, False)
    assert get("selective") == get("selective", 1) == (1, False, True)
    assert get("", cpu_checkpointing=True) == get("full", cpu_checkpointing=True) == (1, True, False)
    assert get("3", cpu_checkpointing=True) == (3, True, False)
    for flag, interval, block, message in (
        ("full", 0, {}, "turns activation checkpointing off and --grad-checkpointing turns it on"),
        ("3", 2, {}, "interval 2 contradicts --grad-checkpointing 3"),
        ("selective", 2, {}, "interval 2 contradicts --grad-checkpointing selective"),
        ("selective", None, {"cpu_checkpointing": True}, "use --grad-checkpointing full"),
    ):
        with pytest.raises(UserError, match=message):
            get(flag, interval, **block)


def idle(data: dict) -> list[str]:
    return deepspeed_verdicts.idle_keys(DeepSpeedJson.of(data))


def test_idle_keys_are_named_and_do_not_reach_deepspeed():
    """Each key without effect is named in one line; keys with an effect stay, and so does an empty block."""
    zero = {"stage": 3, "overlap_comm": True, "elastic_checkpoint": True, "allgather_bucket_size": 1}
    data = {"zero_optimization": zero, "aio": {"use_gds": True}, "activation_checkpointing": {"profile": "auto"}}
    data |= {"fp16": {"enabled": False, "loss_scale": 0}, "comms_logger": {"enabled": True}, "autotuning": False}
    names = ["activation_checkpointing.profile", "aio", "autotuning", "comms_logger", "fp16"]
    names += ["zero_optimization.allgather_bucket_size", "zero_optimization.elastic_checkpoint"]
    assert idle(data) == names
    told = DeepSpeedJson.of(data).replace({}, names)
    assert told.dump() == {"zero_optimization": {"stage": 3, "overlap_comm": True}, "activation_checkpointing": {}}
    assert deepspeed_verdicts.idle_keys(told) == []


@pytest.mark.parametrize(
    ("stage", "offload", "is_idle"), [(0, {}, True), (1, {}, True), (2, {}, True), (2, OFFLOADED, False)]
)
def test_keys_of_deepspeeds_sums(stage, offload, is_idle):
    """A key that engine/flat_gradient.py does not read, and that nothing names; scaling of sums, which it honours."""
    zero = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": 5, **offload}
    data = {"zero_optimization": zero, "bf16": {"enabled": True, "immediate_grad_update": True}}
    own = ["bf16.immediate_grad_update", "zero_optimization.contiguous_gradients", "zero_optimization.overlap_comm"]
    assert idle(data) == (own if is_idle else [])
    checked({**data, "prescale_gradients": True} if is_idle else data, "c.json")


def test_keys_without_a_meaning_at_stage_3_are_named():
    """A key of DeepSpeed's gathering and buckets that engine/zero3.py does not read, and that nothing names."""
    without = ("contiguous_gradients", "memory_efficient_linear", "reduce_bucket_size", "stage3_max_reuse_distance")
    read = ("overlap_comm", "stage3_prefetch_bucket_size", "stage3_max_live_parameters", "sub_group_size")
    data = {"zero_optimization": {"stage": 3, **dict.fromkeys((*without, *read), 1)}}
    assert idle(data) == [f"zero_optimization.{key}" for key in without]


def test_a_key_of_an_idle_block_is_named_with_it():
    # Catches: a block and a key in it that are both dropped.
    assert idle({"bf16": {"check_grad_overflow": False}}) == ["bf16"]


def test_deepspeeds_own_complaint_is_one_line():
    """A value without a rule here, at which DeepSpeed's parser raises."""
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "train_batch_size": 64}
    good = DeepSpeedJson.of(sizes)
    deepspeed_rules.check_with_deepspeed(good, "c.json")
    with pytest.raises(UserError, match=r"c.json: DeepSpeed rejects it: Invalid communication_data_type[^\n]*$"):
        deepspeed_rules.check_with_deepspeed(good.replace({"communication_data_type": "fp8"}), "c.json")


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("c.json", '{\n  "bf16": {"enabled": true\n}\n', "line 4, column 1: malformed JSON"),
        ("c.json", '{\n  "a": 8 "b": 1.0\n}', "line 2, column 10: malformed JSON: Expecting ','"),
        ("c.json", '{\n  // the stage\n  "a": 1\n}', "line 2, column 3: malformed JSON"),
        ("c.json", '{\n  "a": 1,\n}', "trailing commas need .hjson"),
        ("c.json", '{"bf16": {"enabled": true}, "bf16": {}}', '"bf16" is given twice'),
        ("c.json", "[]", "one JSON object"),
        ("c.hjson", '{\n  # a comment\n  "a": 8 "b": 1.0\n}\n', "line 3: '8 \"b\": 1.0' would be one string; a comma"),
        ("c.hjson", '{\n  # a comment\n  "bf16": {"enabled": true\n', "line 4, column 1: malformed Hjson"),
    ],
)
def test_malformed_files_name_the_place(tmp_path, name, text, message):
    """DeepSpeed reads Hjson: without its comma, `8 "b": 1.0` is one value."""
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UserError, match=re.escape(str(path))) as error:
        deepspeed_json.load_json(path)
    assert message in str(error.value)


def test_hjson_has_comments_by_name(tmp_path):
    """The file that a .json's message points to."""
    path = tmp_path / "c.hjson"
    path.write_text('{\n  // the stage\n  "zero_optimization": {"stage": 2},\n}\n')
    assert deepspeed_json.load_json(path) == {"zero_optimization": {"stage": 2}}


def sizes_of(total, micro, accumulation, dp, b=None, a=None, kept=None):
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    data = {key: number for key, number in zip(keys, (total, micro, accumulation), strict=True) if number is not None}
    flags = RunConfig(batch_size=b, grad_accum_steps=a)
    sizes = batch_sizes(DeepSpeedJson.of(data), "c.json", flags, dp=dp, kept=kept)
    assert sizes.global_batch == sizes.micro_batch * sizes.accumulation * dp
    return sizes.global_batch, sizes.micro_batch, sizes.accumulation


def test_batch_arithmetic():
    """Every way of leaving numbers out; a run's own global batch on another number of ranks (`kept`)."""
    assert sizes_of(64, 8, 4, 2) == (64, 8, 4)
    assert sizes_of(64, 8, None, 2) == (64, 8, 4)
    assert sizes_of(64, None, 4, 2) == (64, 8, 4)
    assert sizes_of(64, None, None, 2) == (64, 32, 1)
    assert sizes_of(64, "auto", "auto", 2, b=8) == (64, 8, 4)
    assert sizes_of(64, "auto", "auto", 2, a=4) == (64, 8, 4)
    assert sizes_of("auto", "auto", "auto", 3, b=5, a=2) == (30, 5, 2)
    assert sizes_of(None, None, None, 2) == (256, 128, 1)
    assert sizes_of(64, 8, 2, 4, kept=64) == (64, 8, 2)
    assert sizes_of(64, 8, 2, 1, kept=64) == (64, 8, 8)
    assert sizes_of(64, 8, 2, 16, kept=64) == (64, 4, 1)
    assert sizes_of(12, 5, 9, 1, kept=12) == (12, 4, 3)
    assert sizes_of(64, 8, 2, 1, b=16, kept=64) == (64, 16, 4)
    assert sizes_of(64, 8, 2, 2, a=2, kept=64) == (64, 16, 2)
    assert sizes_of("auto", "auto", "auto", 1, a=4, kept=64) == (64, 16, 4)
    assert sizes_of("auto", "auto", "auto", 2, b=8, a=4, kept=64) == (64, 8, 4)
    assert sizes_of("auto", "auto", 4, 2, kept=64) == (64, 8, 4)
    assert sizes_of("auto", "auto", "auto", 1, a=4, kept=1024) == (1024, 128, 8)


@pytest.mark.parametrize(
    ("numbers", "flags", "message"),
    [
        ((64, 6, 2, 4), {}, "64 is not micro-batch 6 x accumulation 2 x data-parallel 4 = 48; set train_batch_size"),
        ((64, None, None, 3), {}, "set train_batch_size to 63, or start a number of ranks that divides 64, such as 2"),
        (("auto", 8, "auto", 1), {"b": 4}, "c.json fixes train_micro_batch_size_per_gpu to 8 and --batch-size says 4"),
        ((64, 8, 2, 3), {"kept": 64}, "64, which 3 data-parallel ranks cannot share; start 2 data-parallel"),
        ((None, None, None, 3), {"b": 8, "kept": 32}, "global batch is 32, which 3 data-parallel ranks cannot share"),
    ],
)
def test_batch_arithmetic_rejected(numbers, flags, message):
    """DeepSpeed checks after a floor division: 64 on 3 ranks would silently become 63 images."""
    with pytest.raises(UserError, match=re.escape(message)):
        sizes_of(*numbers, **flags)


def test_every_auto_is_replaced(tmp_path):
    """An "auto" that reaches DeepSpeed crashes it or means "off"; other values must not change."""
    data = {"optimizer": {"type": "AdamW", "params": {"lr": "auto", "eps": 1e-6}}, "communication_data_type": "auto"}
    told = resolved(write(tmp_path, data), "--lr", 0.5, "-b", 8, world=2).engine.json
    assert told.auto == frozenset()
    optimizer = {"type": "AdamW", "params": {"lr": 0.5, "eps": 1e-6}}
    assert told.dump() == {"optimizer": optimizer, "gradient_clipping": 1.0, **BatchSizes(16, 8, 1, 2).as_json()}
    with pytest.raises(UserError, match=re.escape('"prescale_gradients" cannot be "auto"; those that can are comm')):
        resolved(write(tmp_path, {**data, "prescale_gradients": "auto"}), "--lr", 0.5)


def test_hugging_faces_zero3_file_is_resolved_as_they_do(tmp_path):
    """HfTrainerDeepSpeedConfig: fill_match and fill_only, key by key."""
    file = write(tmp_path, ZERO3)
    run = resolved(file, "--lr", 0.01, "--weight-decay", 0.1, "--warmup-steps", 3, "-b", 4)
    told = run.engine.json.dump()
    assert told["optimizer"]["params"] == {"lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1}
    assert (run.optimizer.arguments["betas"], run.optimizer.weight_decay) == ((0.9, 0.999), 0.1)
    warmup = {"warmup_min_lr": 0.0, "warmup_max_lr": 0.01, "warmup_num_steps": 3, "total_num_steps": 4}
    assert told["scheduler"]["params"] == warmup
    words = ["--lr", 0.01, "-b", 14, "--epochs", 4, "--warmup-epochs", 2, "--warmup-lr", 1e-4]
    params = resolved(file, *words).engine.json.scheduler.params
    assert (params["warmup_num_steps"], params["warmup_min_lr"]) == (2 * (1442 // 14), 1e-4)
    # No warm-up at all is one step, as DeepSpeed wants.
    assert resolved(write(tmp_path, ZERO2), "--lr", 1).engine.json.scheduler.params["warmup_num_steps"] == 1


def test_a_file_without_an_optimizer_is_adamw_from_the_flags(tmp_path):
    """A file that trains with another optimizer, or with none."""
    bare = write(tmp_path, {"zero_optimization": {"stage": 1}, "scheduler": {}})
    params = {"lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1}
    run = resolved(bare, "--lr", 0.01, "--weight-decay", 0.1, "--sched", "linear")
    told = run.engine.json
    assert run.schedule.rate.name == "linear", "an empty scheduler is none"
    assert told.given("optimizer") == {"type": "AdamW", "params": params}
    with pytest.raises(UserError, match='has no "optimizer", and AdamW needs --lr'):
        resolved(bare)


@pytest.mark.parametrize("source", FILES)
def test_a_published_file_is_resolved(tmp_path, source):
    """A file that works elsewhere and ends here in a traceback, in DeepSpeed's own words, or in "auto"."""
    data = FILES[source]
    run = resolved(write(tmp_path, data), "--lr", 0.001, "-b", 4)
    told, asked = run.engine.json.dump(), data["zero_optimization"]
    assert '"auto"' not in json.dumps(told)
    assert run.engine.zero_stage == asked["stage"]
    assert run.engine.precision.name == ("bf16" if data["bf16"]["enabled"] is True else "fp32")
    for key, number in (
        *((("reduce_bucket_size", WIDTH * WIDTH),) if asked["stage"] < 3 else ()),  # idle at stage 3
        ("stage3_prefetch_bucket_size", int(0.9 * WIDTH * WIDTH)),
        ("stage3_param_persistence_threshold", 10 * WIDTH),
    ):
        assert told["zero_optimization"].get(key) == (number if asked.get(key) == "auto" else asked.get(key))
    assert (told["optimizer"]["params"]["betas"], told["optimizer"]["params"]["eps"]) == ([0.9, 0.999], 1e-8)


def test_llavas_offloaded_file_trains(ranks, tmp_path):
    """Two precisions at once: bf16 enabled and fp16 "auto", on a GPU without bf16; a key by its other name."""
    file = write(tmp_path, FILES["haotian-liu/LLaVA scripts/zero3_offload.json"])
    assert len(train_in(ranks, 1, [*RUN, "--deepspeed_config", file, "--lr", "0.001", "-b", "4"])) == 4
    run = resolved(file, "--lr", 0.001, "-b", 4, on_cpu=False)
    assert run.engine.precision.name == "bf16"
    assert run.engine.json.fp16.enabled is False


def test_an_automatic_momentum_is_timms():
    """SGD with a momentum of "auto" is not SGD without one, and a line says its value."""
    file = DeepSpeedJson.of({"optimizer": {"type": "SGD", "params": {"momentum": "auto"}}})
    filled, notes = deepspeed_rules.with_optimizer(file, "c.json")
    assert filled.optimizer.params == {"momentum": 0.9}
    assert notes == ['optimizer.params.momentum "auto" is 0.9']


@pytest.mark.parametrize(
    ("params", "flags", "notes"),
    [
        ({}, [], ["DeepSpeed's default 0 holds (AdamW's own is 0.01); --weight-decay sets it"]),
        ({"weight_decay": 0.0}, [], []),
        ({}, ["--weight-decay", "0.05"], []),
    ],
)
def test_a_missing_weight_decay(tmp_path, params, flags, notes):
    """torch's AdamW decays by default, DeepSpeed's does not: a block without the key must not choose silently."""
    optimizer = {"type": "AdamW", "params": {"lr": 1e-3, **params}}
    run = resolved(write(tmp_path, {"optimizer": optimizer}), "--warmup-steps", 0, *flags)
    assert [note.partition(": ")[2] for note in run.notes if "params.weight_decay" in note] == notes
    assert run.optimizer.weight_decay == (0.05 if flags else 0.0)


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"type": "NoSuchLR"}, "scheduler.type 'NoSuchLR' is unsupported; use one of LRRangeTest, OneCycle, WarmupLR"),
        ({"type": "WarmupLR", "params": {"warmup_steps": 2}}, "unexpected keyword argument 'warmup_steps'"),
        ({"type": "WarmupLR", "params": {"warmup_num_steps": 0}}, "must be a positive integer, got 0"),
        ({"type": "OneCycle", "params": {}}, "scheduler.params of OneCycle"),
    ],
    ids=str,
)
def test_schedulers_rejected(block, message):
    """DeepSpeed builds the scheduler after the ranks have met."""
    with pytest.raises(UserError, match=message):
        deepspeed_rules.check_scheduler(DeepSpeedJson.of({"scheduler": block}), "c.json")


def test_set_values_have_the_types_of_a_file():
    # Catches: "2" for 2, and a later value that does not count.
    words = ["a.b=2", "a.c=1e-3", "d=true", "e=[0.9,0.95]", "f=AdamW", "g=null", "h=x=y", "a.b=3"]
    values = {"a.b": 3, "a.c": 1e-3, "d": True, "e": [0.9, 0.95], "f": "AdamW", "g": None, "h": "x=y"}
    assert parse_set(words) == values
    file = {"a": {"b": 1, "z": 5}}
    assert overlay(file, parse_set(["a.b=2", "n.m.k=1"]), "c.json") == {"a": {"b": 2, "z": 5}, "n": {"m": {"k": 1}}}
    assert file == {"a": {"b": 1, "z": 5}}, "the file's own values were changed"
    # A later block replaces what was set in an earlier one.
    assert overlay({}, parse_set(['a={"b":1}', "a.b=2", 'a={"b":3}']), "c.json") == {"a": {"b": 3}}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--set", "zero_optimization.stage"], "--set takes KEY.PATH=VALUE, such as zero_optimization.stage=2"),
        (["--set", "zero_optimization.stage.x=1"], '"zero_optimization.stage" in'),
        (["--set", "zero_optimization.overlap_comm=perhaps"], "--set zero_optimization.overlap_comm=perhaps: zero"),
        *(
            (["--set", pair, "--lr", "0.2"], "--lr 0.2 and --set optimizer.params.lr are both given")
            for pair in ("optimizer.params.lr=0.1", 'optimizer.params={"lr":0.1}', 'optimizer={"params":{"lr":0.1}}')
        ),
    ],
)
def test_set_is_checked_like_the_file(words, message):
    # Catches: a way around the checks of the file, and a message that blames the file only.
    with pytest.raises(UserError) as error:
        resolved(CPU, *words)
    assert message in str(error.value)


def test_origin_of_values(tmp_path):
    # Catches: a flag that the JSON's number overrides, and a value whose source is reported wrong.
    words = ["--set", "zero_optimization.stage=2", "--set", "gradient_clipping=0.25", "--weight-decay", "0.3"]
    run = resolved(CPU, *words)
    assert (run.engine.zero_stage, run.optimizer.clip, run.optimizer.decay) == (2, 0.25, 0.3)
    assert run.engine.json.optimizer.params["weight_decay"] == 0.3
    names = ("zero_optimization.stage", "gradient_clipping", "optimizer.params.weight_decay", "optimizer.params.lr")
    assert [run.engine.origins.get(name) for name in names] == ["--set", "--set", "--weight-decay", None]
    params = {"weight_decay": "auto"}
    data = {"train_batch_size": 32, "gradient_accumulation_steps": 4, "optimizer": {"type": "AdamW", "params": params}}
    names = ["train_micro_batch_size_per_gpu", "gradient_clipping"]
    names += ["optimizer.params.lr", "optimizer.params.weight_decay"]
    file = write(tmp_path, data)
    for words, origins in {
        "": ["batch arithmetic", "DeepSpeed's default", "AdamW's default", '"auto"'],
        "--lr 0 --clip-grad 0 --weight-decay 0": ["batch arithmetic", "--clip-grad", "--lr", "--weight-decay"],
        "--lr 1e9 --lr-scale-by-batch linear --lr-base-size 1 --weight-decay 0.1 --clip-grad 1": [
            *("batch arithmetic", "--clip-grad", "--lr-scale-by-batch", "--weight-decay")
        ],
    }.items():
        assert [resolved(file, *words.split()).engine.origins[name] for name in names] == origins
    assert (
        resolved(CPU, "--clip-grad", "0.5").optimizer.clip
        == 0.5
        != json.loads(Path(CPU).read_text())["gradient_clipping"]
    )


def test_set_on_the_command_line_overrides_a_recipes_flag(tmp_path):
    # Catches: a rate that a run's config.yaml overrides silently, and bounds for another number of stages.
    recipe = tmp_path / "r.yaml"
    recipe.write_text(
        f"deepspeed_config: {CPU}\ndataset: digits\nlr: 0.5\nweight_decay: 0.1\npp: 2\npp_partition: 0,2,3\n"
        "set: [gradient_clipping=0.1, steps_per_print=7]\n"
    )
    config = parse(["--recipe", str(recipe), "--set", "optimizer.params.lr=0.2", "--clip-grad", "0.3"])
    assert (config.lr, config.weight_decay, config.clip_grad) == (None, 0.1, 0.3)
    assert config.set == ("steps_per_print=7", "optimizer.params.lr=0.2")
    assert config.pp_partition == "0,2,3"
    assert parse(["--recipe", str(recipe), "--pp", "3"]).pp_partition == ""


@pytest.mark.parametrize(
    ("pair", "kept"),
    [
        ('optimizer={"type":"SGD","params":{"lr":0.1}}', {"weight_decay": 0.1, "sched": "linear", "warmup_steps": 3}),
        ('optimizer.params={"lr":"auto","weight_decay":0.2}', {"lr": 0.5, "sched": "linear", "warmup_steps": 3}),
        ('scheduler={"type":"OneCycle","params":{}}', {"lr": 0.5, "weight_decay": 0.1}),
        (
            'scheduler={"type":"WarmupLR","params":{"warmup_num_steps":"auto"}}',
            {"lr": 0.5, "weight_decay": 0.1, "warmup_steps": 3},
        ),
        ("scheduler={}", {"lr": 0.5, "weight_decay": 0.1, "sched": "linear", "warmup_steps": 3}),
    ],
)
def test_a_block_of_set_overrides_a_recipes_flags(tmp_path, pair, kept):
    # Catches: the rate of a recipe that wins over the block's in silence, and a schedule that nobody asked for.
    recipe = tmp_path / "r.yaml"
    text = f"deepspeed_config: {CPU}\ndataset: digits\n"
    recipe.write_text(f"{text}lr: 0.5\nweight_decay: 0.1\nsched: linear\nwarmup_steps: 3\n")
    config = parse(["--recipe", str(recipe), "--set", pair])
    flags = {"lr", "weight_decay", "sched", "warmup_steps"}
    assert {name: getattr(config, name) for name in flags & config.model_fields_set} == kept


def test_a_recipes_warm_up_next_to_the_type_of_a_scheduler(tmp_path):
    # Catches: a message that asks for a flag to be dropped that only the recipe has.
    recipe = tmp_path / "r.yaml"
    recipe.write_text(json.dumps({"warmup_steps": 3, "sched": "linear"}))
    with pytest.raises(UserError, match=r"--warmup-steps asks .*; keep one \(a block, --set '(.*)', overrides"):
        resolved(CPU, "--recipe", recipe, "--set", "scheduler.type=WarmupLR")
    block = 'scheduler={"type":"WarmupLR"}'
    assert resolved(CPU, "--recipe", recipe, "--set", block).engine.json.given("scheduler.type") == "WarmupLR"


def test_a_flag_overrides_a_value_in_a_block_of_a_recipes_set(tmp_path):
    # Catches: a recipe whose rate no flag can change.
    recipe = tmp_path / "r.yaml"
    recipe.write_text(json.dumps({"set": ['optimizer={"type":"SGD","params":{"lr":0.1,"momentum":0.9}}']}))
    params = resolved(CPU, "--recipe", recipe, "--lr", 0.2).engine.json.optimizer.params
    assert (params["lr"], params["momentum"]) == (0.2, 0.9)


ADAM = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}}


def test_what_later_checks_find_is_listed_too(tmp_path):
    """A problem that is listed only after the others are fixed; one that only follows from another."""
    wrong = {"foo": 1, "bf16": {"enabled": True}, "fp16": {"enabled": True}, "train_batch_size": 1.5}
    wrong |= {"optimizer": {"type": "Shampoo", "params": {}}}
    wrong |= {"pipeline": {"activation_checkpoint_interval": -1}}
    with pytest.raises(UserError) as error:
        resolved(write(tmp_path, wrong))
    found = [problem.partition("config.json: ")[2] for problem in error.value.problems]
    said = ["train_batch_size must be a whole", "pipeline.activation_checkpoint_interval must be"]
    said += [
        'DeepSpeed 0.19 knows no key "foo"',
        "bf16 and fp16 are enabled at once",
        "there is no optimizer 'Shampoo'",
    ]
    assert [problem[: len(part)] for problem, part in zip(found, said, strict=True)] == said
    text = {"optimizer": {"type": 1, "params": {"eps": "1e-8"}}, "scheduler": {"params": {"warmup_num_steps": "10"}}}
    assert read(RunConfig(deepspeed_config=text, eval_only=True), on_cpu=True)[0].json.dump() == {}
    with pytest.raises(UserError, match="stge") as error:
        resolved(write(tmp_path, {"zero_optimization": {"stge": 1}, "bf16": {"enabled": True}, **ADAM}))
    assert len(error.value.problems) == 1, "bf16 without ZeRO follows from the misspelt stage"
