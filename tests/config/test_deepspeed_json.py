"""DeepSpeed's JSON: what is accepted, what is refused and in which words, and that our list of keys is DeepSpeed's."""

import copy
import json
import re

import pytest
from project import ROOT

from ds_vit.config import deepspeed_auto, deepspeed_json, deepspeed_keys, deepspeed_rules
from ds_vit.config.batch import BatchSizes, batch_sizes

CONFIGS = sorted((ROOT / "ds_configs").glob("*.json"))


def check(data, path):
    """As a run looks at a file."""
    deepspeed_keys.check_keys(data, path)
    deepspeed_keys.check_rules(deepspeed_auto.settle(data), path)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
@pytest.mark.parametrize("dp", [1, 3, 1024])
def test_shipped_files_are_legal_for_any_number_of_ranks(path, dp):
    """A shipped file that our own rules, or some number of ranks, would refuse."""
    data = deepspeed_json.load_json(path)
    deepspeed_keys.check_keys(data, path.name)
    assert deepspeed_keys.idle_keys(data) == []
    deepspeed_json.precision(data, path.name, on_cpu=False)
    sizes = batch_sizes(data, path.name, dp=dp, batch_size=8, grad_accum_steps=2)
    assert (sizes.global_batch, sizes.micro_batch, sizes.accumulation) == (16 * dp, 8, 2)
    assert path.name in (ROOT / "ds_configs" / "README.md").read_text() or path.name.startswith("cpu_zero")


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_resolved_files_are_accepted_by_deepspeed_itself(path):
    """A resolved file that DeepSpeed's own parser refuses."""
    from deepspeed.runtime.config import DeepSpeedConfig

    data = deepspeed_json.load_json(path)
    sizes = batch_sizes(data, path.name, dp=1, batch_size=8, grad_accum_steps=2)
    auto = {"optimizer.params.lr": 1e-3, "optimizer.params.weight_decay": 0.05}
    parsed = DeepSpeedConfig(
        deepspeed_json.resolve(data, batch=sizes, gradient_clipping=1.0, auto=auto, path=path.name)
    )
    assert (parsed.train_batch_size, parsed.gradient_clipping) == (16, 1.0)
    assert parsed.zero_optimization_stage == data["zero_optimization"]["stage"]


class _Spy(dict):
    """A dict that remembers which keys were asked for, so that DeepSpeed's parser lists its own keys."""

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


def test_top_level_keys_are_deepspeeds_own():
    """Canary: an upgrade of DeepSpeed that adds or drops a top-level key."""
    from deepspeed.runtime.config import DeepSpeedConfig

    seen: set[str] = set()
    DeepSpeedConfig(_Spy({"train_batch_size": 1}, seen))
    read = {key for key in seen if isinstance(key, str)} - {"bfloat16"} - set(deepspeed_keys._REMOVED)
    # These are read outside DeepSpeedConfig.
    elsewhere = {"scheduler", "sequence_parallel_size", "data_parallel_size", "log_level"}
    assert read - deepspeed_keys.TOP_LEVEL == set()
    assert deepspeed_keys.TOP_LEVEL - read - elsewhere == set()


def test_removed_keys_are_deepspeeds_own():
    """Canary: DeepSpeed's list of removed keys moves."""
    from deepspeed.runtime import config

    assert set(config._REMOVED_TOP_LEVEL_CONFIG_KEYS) == set(deepspeed_keys._REMOVED)
    assert set(config._REMOVED_ZERO_CONFIG_KEYS) <= set(deepspeed_keys._REMOVED_ZERO)


def test_stage3_keys_exist():
    """Canary: a stage-3 key of ours that DeepSpeed no longer has would never be reported as idle."""
    known = deepspeed_keys._block_keys("zero_optimization")
    assert {*deepspeed_rules._STAGE3_ONLY, *deepspeed_rules._STAGES_1_AND_2, *deepspeed_rules._IDLE_ZERO} <= known


REFUSED = [
    ({"zero_optimisation": {}}, 'knows no key "zero_optimisation"; the nearest known key is "zero_optimization"'),
    ({"zero_optimization": {"stge": 1}}, 'knows no key "zero_optimization.stge"; the nearest known key is "stage"'),
    ({"pipeline": {"activation_checkpoint_intervall": 1}}, 'the nearest known key is "activation_checkpoint_interval"'),
    ({"elasticity": {}}, '"elasticity": DeepSpeed 0.19 removed elasticity'),
    ({"zero_optimization": {"mics_shard_size": 2}}, '"zero_optimization.mics_shard_size": DeepSpeed 0.19 removed'),
    ({"bfloat16": {"enabled": True}}, 'call the block "bf16"'),
    ({"zero_optimization": {"stage": 4}}, "stage 4 does not exist; it may be 0, 1, 2 or 3"),
    ({"zero_optimization": {"stage": True}}, "stage True does not exist"),
    ({"zero_optimization": 1}, '"zero_optimization" must be a block'),
    ({"zero_optimization": {"stage": "4"}}, "stage '4' does not exist"),
    ({"zero_optimization": {"stage": 1, "round_robin_gradients": True}}, "mix parameters up"),
    ({"zero_optimization": {"stage": "1", "round_robin_gradients": "true"}}, "mix parameters up"),
    ({"zero_optimization": {"stage": 1, "offload_param": {"device": "cpu"}}}, "needs stage 3; this file has stage 1"),
    ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, 'use "cpu"'),
    ({"tensor_parallel": {"autotp_size": 2}}, "use --tp"),
    ({"gradient_allreduce_op": "sum"}, "depend on the number of ranks"),
    ({"autotuning": {"enabled": True}}, "delete the block"),
    ({"zero_optimization": {"stage": 3, "leaf_module": {"classes": ["torch.nn.Linear"]}}}, "mixture of experts"),
    ({"zero_optimization": {"stage": 3, "stage3_module_granularity_threshold": 9}}, "in the backward pass; delete it"),
    ({"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}, "rounds the weights on their way"),
    ({"zero_optimization": {"stage": 3, "zero_quantized_gradients": True}}, "rounds the gradients on their way"),
    (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
        '"zero_optimization.offload_optimizer.ratio" below 1',
    ),
    ({"zero_optimization": {"stage": 1, "cpu_offload_param": True}}, "needs stage 3; this file has stage 1"),
    ({"zero_optimization": {"stage": 2}, "prescale_gradients": True}, 'stage 2 needs "reduce_scatter": false'),
    ({"zero_optimization": {"stage": 3}, "gradient_predivide_factor": 2}, 'stage 3 needs "reduce_scatter": false'),
    (
        {"zero_optimization": {"stage": 3, "reduce_scatter": False}, "gradient_predivide_factor": 2},
        "divide the gradients by it where it equals the number of data-parallel ranks",
    ),
    ({"gradient_predivide_factor": 0}, "must be a number above 0, not 0"),
    ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, 'together with "bf16_master_weights_and_grads"'),
    ({"fp16": {"fp16_master_weights_and_grads": True}}, "compiled CPU Adam"),
    *(
        (
            {
                "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True},
                "zero_optimization": {"stage": stage, "offload_optimizer": {"device": "cpu"}},
            },
            '"bf16.bf16_master_weights_and_grads" with "zero_optimization.offload_optimizer" needs',
        )
        for stage in (1, 2, 3)
    ),
    ({"zero_optimization": {"stage": 3, "compute_grad_norm": False}}, "supported only with ZeRO Stage 1 or 2"),
    ({"timers": {"throughputs": {}}}, 'the nearest known key is "throughput"'),
    ({"comms_logger": {"enabeld": True}}, 'the nearest known key is "enabled"'),
    ({"zero_optimization": {"stage": 1, "cpu_offload": True, "offload_optimizer": {"device": "cpu"}}}, "cpu_offload"),
]


@pytest.mark.parametrize(("data", "message"), REFUSED, ids=lambda v: str(v)[:40])
def test_refused(data, message):
    """A key that DeepSpeed would swallow in silence or crash on."""
    with pytest.raises(ValueError, match=re.escape(message)):
        check(data, "c.json")


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"data_types": {"param_dtype": "bf16"}}, "param_dtype 'bf16' is not what fp32 computes in"),
        ({"data_types": {"grad_accum_dtype": "bf16"}}, "at ZeRO stage 0 must be the model's type, float32"),
        ({"data_types": {"buffer_dtype": "fp31"}}, 'must be "fp32", "bf16" or "fp16", not \'fp31\''),
        ({"torch_autocast": {"lower_precision_safe_modules": ["no.such.Module"]}}, "there is no 'no.such.Module'"),
        (
            {"torch_autocast": {"lower_precision_safe_modules": ["Linear"]}},
            "there is no 'Linear'; write the class with",
        ),
    ],
    ids=str,
)
def test_types_refused(data, message):
    """DeepSpeed looks these up after the ranks have met."""
    with pytest.raises(ValueError, match=re.escape(message)):
        deepspeed_json.check_types(data, deepspeed_json.precision(data, "c.json", on_cpu=True), "c.json")


def test_a_norm_that_is_not_computed():
    """Nothing to clip by, and a wrapper that cannot do without it."""
    data = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 1, "compute_grad_norm": False}}
    with pytest.raises(ValueError, match=r"leaves nothing to clip by, and gradient_clipping is 0\.5"):
        deepspeed_rules.check_grad_norm(data, "c.json", clip=0.5)
    deepspeed_rules.check_grad_norm(data, "c.json", clip=0.0)
    data["data_types"] = {"grad_accum_dtype": "fp32"}
    with pytest.raises(ValueError, match="does not go with bf16, stage 1 and gradients summed in fp32"):
        deepspeed_rules.check_grad_norm(data, "c.json", clip=0.0)


def test_a_monitor_whose_package_is_missing(monkeypatch):
    """An import error on every rank."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match='"comet" needs the package comet_ml: pip install comet_ml, or delete'):
        deepspeed_rules.check_monitors({"comet": {"enabled": True}, "wandb": {"enabled": False}}, "c.json")


def test_deepspeeds_own_complaint_is_one_line():
    """A value that no rule here knows of, and that DeepSpeed's parser raises at."""
    good = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1, "train_batch_size": 64}
    deepspeed_json.check_with_deepspeed(good, "c.json")
    with pytest.raises(ValueError, match=r"c.json: DeepSpeed does not take it: Invalid communication_data_type[^\n]*$"):
        deepspeed_json.check_with_deepspeed({**good, "communication_data_type": "fp8"}, "c.json")


def test_idle_keys_do_not_reach_deepspeed():
    """What is idle cannot crash it either; what acts stays, and so does an empty block that means something."""
    zero = {"stage": 3, "overlap_comm": True, "elastic_checkpoint": True, "allgather_bucket_size": 1}
    data = {"zero_optimization": zero, "aio": {"use_gds": True}, "activation_checkpointing": {"profile": True}}
    before = copy.deepcopy(data)
    told = deepspeed_rules.without_idle(data)
    assert told == {"zero_optimization": {"stage": 3, "overlap_comm": True}, "activation_checkpointing": {}}
    assert data == before
    assert deepspeed_rules.idle(told) == {}


def test_idle_keys_are_named():
    """Nothing is silently ignored: each idle key gets a line with its reason."""
    lines = deepspeed_keys.idle_keys(
        {
            "zero_optimization": {"stage": 1, "stage3_max_live_parameters": 1},
            "checkpoint": {},
            "fp16": {"enabled": False, "loss_scale": 0},
        }
    )
    assert len(lines) == 3
    assert any(line.startswith("zero_optimization.stage3_max_live_parameters: it acts at stage 3") for line in lines)
    assert any(line.startswith("fp16: it is not enabled") for line in lines)


def test_comms_logger_is_idle_and_left_out():
    """DeepSpeed's log of collectives, which costs time at each of them and is printed by nobody here."""
    [line] = deepspeed_keys.idle_keys({"comms_logger": {"enabled": True, "verbose": True}})
    assert line.startswith("comms_logger: ")
    resolved = deepspeed_rules.without_idle({"comms_logger": {"enabled": True}})
    assert "comms_logger" not in resolved


def test_malformed_json_names_the_place(tmp_path):
    """A syntax error without file, line and column."""
    path = tmp_path / "c.json"
    path.write_text('{\n  "zero_optimization": {"stage": 1},\n  "bf16": {"enabled": true\n}\n')
    with pytest.raises(ValueError, match=re.escape(f"{path}, line 5, column 1: malformed JSON")):
        deepspeed_json.load_json(path)
    path.write_text('{"bf16": {"enabled": true}, "bf16": {}}')
    with pytest.raises(ValueError, match='"bf16" stands twice'):
        deepspeed_json.load_json(path)
    path.write_text("[]")
    with pytest.raises(ValueError, match="one JSON object"):
        deepspeed_json.load_json(path)
    with pytest.raises(ValueError, match="No such file"):
        deepspeed_json.load_json(tmp_path / "absent.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{\n  "train_batch_size": 8 "gradient_clipping": 1.0\n}', "line 2, column 25: malformed JSON: Expecting ','"),
        (
            '{\n  "train_batch_size": 8\n  "gradient_clipping": 1.0\n}',
            "line 3, column 3: malformed JSON: Expecting ','",
        ),
        (
            '{\n  // the stage\n  "steps_per_print": 1\n}',
            "line 2, column 3: JSON has no comments; delete them, or name",
        ),
        ('{"steps_per_print": 1 # often\n}', "line 1, column 23: JSON has no comments"),
        (
            '{\n  "steps_per_print": 1,\n}',
            "JSON has no comma before a closing bracket; delete it, or name the file .hjson",
        ),
        ('{"optimizer": {"params": {"betas": [0.9, 0.99,]}}}', "JSON has no comma before a closing bracket"),
    ],
)
def test_json_is_json(tmp_path, text, message):
    """DeepSpeed reads Hjson: without its comma, `8 "gradient_clipping": 1.0` is a batch size."""
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=re.escape(f"{path}, line ")) as said:
        deepspeed_json.load_json(path)
    assert message in str(said.value)


def test_hjson_has_comments_by_name(tmp_path):
    """The file that a .json's message points to; a missing comma is seen there too, with its line."""
    path = tmp_path / "c.hjson"
    path.write_text('{\n  // the stage\n  "zero_optimization": {"stage": 2},\n}\n')
    assert deepspeed_json.load_json(path) == {"zero_optimization": {"stage": 2}}
    path.write_text('{\n  # the stage\n  "train_batch_size": 8 "gradient_clipping": 1.0\n}\n')
    with pytest.raises(ValueError, match=r"line 3: .*a comma is missing"):
        deepspeed_json.load_json(path)
    path.write_text('{\n  # the stage\n  "bf16": {"enabled": true\n')
    with pytest.raises(ValueError, match=r"line 4, column 1: malformed Hjson"):
        deepspeed_json.load_json(path)


def _sizes(total, micro, accumulation, dp, b=None, a=None):
    data = {
        "train_batch_size": total,
        "train_micro_batch_size_per_gpu": micro,
        "gradient_accumulation_steps": accumulation,
    }
    data = {key: value for key, value in data.items() if value is not None}
    sizes = batch_sizes(data, "c.json", dp=dp, batch_size=b, grad_accum_steps=a)
    assert sizes.global_batch == sizes.micro_batch * sizes.accumulation * dp
    return sizes.global_batch, sizes.micro_batch, sizes.accumulation


def test_batch_arithmetic():
    """Every way of leaving numbers out."""
    assert _sizes(64, 8, 4, 2) == (64, 8, 4)
    assert _sizes(64, 8, None, 2) == (64, 8, 4)
    assert _sizes(64, None, 4, 2) == (64, 8, 4)
    assert _sizes(64, None, None, 2) == (64, 32, 1)
    assert _sizes(64, "auto", "auto", 2, b=8) == (64, 8, 4)
    assert _sizes(64, "auto", "auto", 2, a=4) == (64, 8, 4)
    assert _sizes("auto", "auto", "auto", 3, b=5, a=2) == (30, 5, 2)
    assert _sizes(None, None, None, 2) == (256, 128, 1)
    assert _sizes("auto", 4, "auto", 2) == (8, 4, 1)


@pytest.mark.parametrize(
    ("numbers", "flags", "message"),
    [
        (
            (64, 6, 2, 4),
            {},
            "64 is not micro-batch 6 x accumulation 2 x data-parallel 4 = 48; set train_batch_size to 48, or",
        ),
        ((64, None, None, 3), {}, "set train_batch_size to 63, or start a number of ranks that divides 64, such as 2"),
        ((2, None, None, 4), {}, "start a number of ranks that divides 2"),
        (("auto", 8, "auto", 1), {"b": 4}, "c.json fixes train_micro_batch_size_per_gpu to 8 and --batch-size says 4"),
        ((0, None, None, 1), {}, 'train_batch_size must be a whole number >= 1 or "auto", not 0'),
        (("64", None, None, 1), {}, "not '64'"),
        ((8.5, None, None, 1), {}, "not 8.5"),
    ],
)
def test_batch_arithmetic_refused(numbers, flags, message):
    """DeepSpeed checks after a floor division: 64 on 3 ranks would become 63 images in silence."""
    with pytest.raises(ValueError, match=re.escape(message)):
        _sizes(*numbers, **flags)


@pytest.mark.parametrize(
    ("data", "on_cpu", "expected"),
    [
        ({}, True, "fp32"),
        ({"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}}, True, "bf16"),
        ({"bf16": {"enabled": False}}, True, "fp32"),
        ({"torch_autocast": {"enabled": True, "dtype": "torch.bfloat16"}}, True, "autocast-bf16"),
        ({"fp16": {"enabled": True}, "zero_optimization": {"stage": 2}}, False, "fp16"),
    ],
)
def test_precision(data, on_cpu, expected):
    """The name in summary.json is not what runs."""
    assert deepspeed_json.precision(data, "c.json", on_cpu=on_cpu).name == expected


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"fp16": {"enabled": True}, "zero_optimization": {"stage": 1}}, "fp16 needs a GPU"),
        ({"bf16": {"enabled": True}}, "bf16.enabled at ZeRO stage 0"),
        ({"bf16": {"enabled": True}, "torch_autocast": {"enabled": True}}, "enabled at once; keep one"),
        ({"torch_autocast": {"enabled": True, "dtype": "float64"}}, "'float64' is not a 16-bit type"),
    ],
)
def test_precision_refused(data, message):
    """fp16 on a CPU and the wrappers that DeepSpeed 0.19.8 gets wrong."""
    with pytest.raises(ValueError, match=re.escape(message)):
        deepspeed_json.precision(data, "c.json", on_cpu=True)


def test_activation_checkpointing():
    """The three ways to ask for it, and contradictions."""

    def get(flag, interval=None, **block):
        data = {} if interval is None else {"pipeline": {"activation_checkpoint_interval": interval}}
        data |= {"activation_checkpointing": block} if block else {}
        found = deepspeed_json.activation_checkpointing(data, "c.json", flag=flag)
        return found.interval, found.cpu, found.selective

    assert get("") == get("", 0) == (0, False, False)
    assert get("full") == get("full", 1) == get("1", 1) == (1, False, False)
    assert get("", 2) == get("full", 2) == get("2") == get("2", 2) == (2, False, False)
    assert get("selective") == get("selective", 1) == (1, False, True)
    assert get("", cpu_checkpointing=True) == get("full", cpu_checkpointing=True) == (1, True, False)
    assert get("3", cpu_checkpointing=True) == (3, True, False)
    for asked, interval, block, message in (
        ("full", 0, {}, "turns activation checkpointing off and --grad-checkpointing turns it on"),
        ("selective", 0, {}, "turns activation checkpointing off and --grad-checkpointing turns it on"),
        ("3", 2, {}, "interval 2 recomputes so many blocks together and --grad-checkpointing 3 asks for 3; delete one"),
        ("selective", 2, {}, "interval 2 recomputes so many blocks together and --grad-checkpointing selective goes"),
        ("selective", None, {"cpu_checkpointing": True}, "say --grad-checkpointing full"),
        ("", 0.5, {}, "whole number"),
    ):
        with pytest.raises(ValueError, match=message):
            get(asked, interval, **block)


def test_resolve_replaces_every_auto_and_nothing_else():
    """An "auto" that reaches DeepSpeed crashes it or means "off"; what is not auto must not change."""
    data = {"optimizer": {"params": {"lr": "auto", "eps": 1e-6}}, "communication_data_type": "auto"}
    before = copy.deepcopy(data)
    sizes = BatchSizes(8, 4, 1, 2)
    out = deepspeed_json.resolve(
        data,
        batch=sizes,
        gradient_clipping=0.0,
        auto={"optimizer.params.lr": 0.5, "communication_data_type": None},
        path="c",
    )
    assert data == before
    assert out["optimizer"] == {"params": {"lr": 0.5, "eps": 1e-6}}
    assert "communication_data_type" not in out
    assert out["gradient_clipping"] == 0.0
    assert "auto" not in json.dumps(out)
    with pytest.raises(ValueError, match=re.escape('"optimizer.params.lr" cannot be "auto"')):
        deepspeed_json.resolve(data, batch=sizes, gradient_clipping=0.0, auto={}, path="c")
