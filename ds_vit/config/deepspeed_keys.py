"""DeepSpeed's JSON as one typed object: which keys exist, and which values they take.

    json, wrong = read_json(load_json(path), path)     # the blocks that are right, and a line for each wrong key
    json = DeepSpeedJson.of({"zero_optimization": {"stage": 3}})
    json.zero_stage, json.zero_optimization.sub_group_size, json.auto, json.dump()

A block that DeepSpeed 0.19 reads by a pydantic model is that model; the others are here. A file that works with
DeepSpeed works here; DeepSpeed ignores unknown keys of the top level, and crashes on some "auto" values.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Collection, Iterable, Mapping
from typing import Annotated, Any, get_args

from deepspeed.comm.config import CommsLoggerConfig
from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
from deepspeed.runtime.config import _REMOVED_TOP_LEVEL_CONFIG_KEYS, _REMOVED_ZERO_CONFIG_KEYS, DtypeEnum
from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.utils.config import DeepSpeedThroughputTimerConfig
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PrivateAttr, Strict, ValidationError

from ds_vit.config.deepspeed_json import BATCH_KEYS, is_on, leaves, overlay, value_of, without
from ds_vit.config.deepspeed_verdicts import NAMED
from ds_vit.config.flag import spelling
from ds_vit.config.schema import KEY_OF_FLAG, RunConfig, what_is_wrong
from ds_vit.fault_tolerance.errors import UserError, did_you_mean


def _known_type(name: str) -> str:
    try:
        DtypeEnum(name)
    except (KeyError, ValueError):
        raise ValueError('must be "fp32", "bf16" or "fp16"') from None
    return name


# Published files write 1e5 for a whole number.
Whole = Annotated[int, BeforeValidator(lambda v: int(v) if isinstance(v, float) and v.is_integer() else v)]
Count = Annotated[Whole, Field(ge=1)]
Type = Annotated[str, AfterValidator(_known_type)]
Switch = Annotated[bool, Strict(False)]  # 1 and "true", as in DeepSpeed's models


class Block(BaseModel):
    """A block without a model in DeepSpeed; keys that have no effect are in deepspeed_verdicts.py only."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class NamedClass(Block):
    """An object that DeepSpeed makes by the name of its class: the optimizer, the schedule of the learning rate."""

    type: str | None = None
    params: dict[str, Any] = {}


class Autocast(Block):
    """torch_autocast."""

    enabled: Switch = False
    dtype: str = "bfloat16"
    lower_precision_safe_modules: list[str] = []


class DataTypes(Block):
    """The types of sums, parameters and buffers."""

    grad_accum_dtype: Type | None = None
    param_dtype: Type | None = None
    buffer_dtype: Type | None = None
    keep_in_fp32_modules: list[str] | None = None


class Pipeline(Block):
    """DeepSpeed's pipeline; ds_vit builds its own, and reads the interval of recomputation."""

    activation_checkpoint_interval: Annotated[Whole, Field(ge=0)] | None = None


class ActivationCheckpointing(Block):
    """Recomputation; the block turns it on."""

    cpu_checkpointing: Switch = False


class FlopsProfiler(Block):
    """DeepSpeed's profiler."""

    enabled: Switch = False
    recompute_fwd_factor: float = 0.0
    profile_step: Whole = 1
    module_depth: Whole = -1
    top_modules: Whole = 1
    detailed: Switch = True
    output_file: str | None = None


class Timers(Block):
    """DeepSpeed's timers."""

    throughput: DeepSpeedThroughputTimerConfig = Field(default_factory=DeepSpeedThroughputTimerConfig)


class DeepSpeedJson(Block):
    """The file with the values of --set. An "auto" is at its default here, and named in `auto`."""

    train_batch_size: Count | None = None
    train_micro_batch_size_per_gpu: Count | None = None
    gradient_accumulation_steps: Count | None = None
    gradient_clipping: float | None = None
    optimizer: NamedClass | None = None
    scheduler: NamedClass | None = None
    fp16: DeepSpeedFP16Config = Field(default_factory=DeepSpeedFP16Config)
    bf16: DeepSpeedBF16Config = Field(default_factory=DeepSpeedBF16Config)
    torch_autocast: Autocast = Autocast()
    data_types: DataTypes = DataTypes()
    zero_optimization: DeepSpeedZeroConfig = Field(default_factory=DeepSpeedZeroConfig)
    pipeline: Pipeline = Pipeline()
    activation_checkpointing: ActivationCheckpointing | None = None
    communication_data_type: str | None = None
    prescale_gradients: Switch = False
    gradient_predivide_factor: Annotated[float, Field(gt=0)] = 1.0
    steps_per_print: Count | None = None
    dump_state: Switch = False
    disable_python_gc: Switch = False
    wall_clock_breakdown: Switch = False
    memory_breakdown: Switch = False
    flops_profiler: FlopsProfiler = FlopsProfiler()
    timers: Timers = Timers()
    tensorboard: TensorBoardConfig = Field(default_factory=TensorBoardConfig)
    csv_monitor: CSVConfig = Field(default_factory=CSVConfig)
    wandb: WandbConfig = Field(default_factory=WandbConfig)
    comet: CometConfig = Field(default_factory=CometConfig)
    comms_logger: CommsLoggerConfig = Field(default_factory=CommsLoggerConfig)

    _given: dict[str, Any] = PrivateAttr(default_factory=dict)

    @classmethod
    def of(cls, data: Mapping[str, Any], path: str = "the DeepSpeed JSON") -> DeepSpeedJson:
        """The typed file.

        Raises:
            UserError: every unknown key and invalid value.
        """
        json, wrong = read_json(data, path)
        if wrong:
            raise UserError(*wrong.values())
        return json

    @property
    def auto(self) -> frozenset[str]:
        """The dotted names of the values that the file leaves open."""
        return frozenset(name for name, value in leaves(self._given).items() if value == "auto")

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage, 0 without ZeRO."""
        return int(self.zero_optimization.stage)

    @property
    def offloaded(self) -> frozenset[str]:
        """What is in host memory: "optimizer" and "param"."""
        blocks = {"optimizer": self.zero_optimization.offload_optimizer, "param": self.zero_optimization.offload_param}
        return frozenset(name for name, block in blocks.items() if block is not None and block.device == "cpu")

    @property
    def flat_gradients(self) -> bool:
        """Whether engine/flat_gradient.py sums the gradients: below ZeRO-3, without offload of the optimizer."""
        return self.zero_stage < 3 and "optimizer" not in self.offloaded

    def given(self, name: str) -> Any:
        """The value that the file has under a dotted name, as DeepSpeed reads it, or "auto"; None where it has none."""
        return value_of(self._given, name)

    def is_on(self, block: str) -> bool:
        """Whether the file enables a block; "auto" counts as enabled."""
        return is_on(self.given(block))

    def replace(self, values: Mapping[str, Any], without_keys: Collection[str] = ()) -> DeepSpeedJson:
        """The same file with resolved values, which no range of a flag holds for, and without some keys.

        Args:
            values: by dotted name.
            without_keys: dotted names.
        """
        data = overlay(without(self._given, without_keys), values, "the DeepSpeed JSON")
        return _parse(_by_alias(data, DeepSpeedJson))

    def dump(self) -> dict[str, Any]:
        """What the file says, with the values that DeepSpeed reads: for DeepSpeed, and for deepspeed.json."""
        return copy.deepcopy(self._given)


# An "auto" in these is resolved from the flags, the data, the ranks, the model and the machine. DeepSpeed's models read
# the others as the default.
_CAN_BE_AUTO = frozenset(
    (
        *(*BATCH_KEYS, "gradient_clipping", "communication_data_type", "bf16.enabled", "fp16.enabled"),
        *(f"zero_optimization.{key}" for key in ("reduce_bucket_size", "allgather_bucket_size")),
        *(f"zero_optimization.stage3_{key}" for key in ("prefetch_bucket_size", "param_persistence_threshold")),
        *(f"optimizer.params.{key}" for key in ("lr", "weight_decay", "betas", "eps", "momentum")),
        *(f"scheduler.params.warmup_{key}" for key in ("min_lr", "max_lr", "num_steps")),
        "scheduler.params.total_num_steps",
    )
)
_OLD_OFFLOAD = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}
# Keys of published files that DeepSpeed never read, and the keys that it reads.
_READ_ELSEWHERE = {
    "bfloat16": "bf16",
    "optimizer.adam_w_mode": "optimizer.params.adam_w_mode",
    "gradient_accumulation_dtype": "data_types.grad_accum_dtype",
    "log": "steps_per_print",
    "comms_config": "comms_logger",
    "stage3_max_live_parameters": "zero_optimization.stage3_max_live_parameters",
    "stage3_max_reuse_distance": "zero_optimization.stage3_max_reuse_distance",
}


def read_json(data: Mapping[str, Any], path: str) -> tuple[DeepSpeedJson, dict[str, str]]:
    """The typed file.

    Args:
        data: the file with the values of --set.
        path: named in messages.

    Returns:
        What nothing is wrong with; dotted name → what is wrong with it, and what to do.
    """
    given = _by_alias(data, DeepSpeedJson)
    wrong = _wrong_leaves(given, path)
    blocks = {"zero_optimization"} & {name.removesuffix(".stage") for name in wrong}  # no stage to judge it by
    while True:
        kept = without(given, {*wrong, *blocks})
        try:
            return _parse(kept), wrong
        except ValidationError as error:
            found = _wrong_keys(error, path)
        # A rule between keys, or an item of a list: the whole block goes.
        blocks |= {key for key in kept for name in found.keys() & wrong.keys() if f"{name}.".startswith(f"{key}.")}
        wrong = {**found, **wrong}


def _parse(given: Mapping[str, Any]) -> DeepSpeedJson:
    autos = [name for name, value in leaves(given).items() if value == "auto"]
    json = DeepSpeedJson.model_validate(without(given, (*autos, *_ONLY_NAMED)))
    read = json.model_dump(mode="json", by_alias=True, exclude_unset=True, warnings=False, fallback=lambda value: value)
    json._given = _of_keys(read, given)
    return json


def model_of(hint: Any) -> type[BaseModel] | None:
    """The model in a type, which may be one with None; None where there is none."""
    kinds = (hint, *get_args(hint))
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def _keys_of(blocks: Iterable[str]) -> set[str]:
    """The keys of the model of a block within blocks; none where it has no model."""
    model: type[BaseModel] | None = DeepSpeedJson
    for block in blocks:
        model = model_of(model.model_fields[block].annotation) if model and block in model.model_fields else None
    return {field.alias or key for key, field in model.model_fields.items()} if model else set()


# Keys that only a verdict knows.
_ONLY_NAMED = frozenset(name for name in NAMED if name.split(".")[-1] not in _keys_of(name.split(".")[:-1]))


def _by_alias(data: Mapping[str, Any], model: type[BaseModel], prefix: str = "") -> dict[str, Any]:
    """The keys by the names that DeepSpeed writes, without those that say nothing: null, and "auto" for a default."""
    fields = {
        name: (field.alias or key, field) for key, field in model.model_fields.items() for name in (key, field.alias)
    }
    of_deepspeed, out = issubclass(model, DeepSpeedConfigModel), {}
    for key, value in data.items():
        if key not in fields:  # the models reject a name that nothing else knows, whatever it says
            out |= {key: value if f"{prefix}{key}" in NAMED else None}
            continue
        name, field = fields[key]
        block = model_of(field.annotation)
        is_silent = value == "auto" and f"{prefix}{name}" not in _CAN_BE_AUTO if of_deepspeed else value is None
        if is_silent and not (value is None and block):
            continue
        out[name] = _by_alias(value, block, f"{prefix}{name}.") if block and isinstance(value, Mapping) else value
    return out


def _of_keys(read: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The values that the models read, of the given keys only; deprecated keys, which they drop, stay."""
    out: dict[str, Any] = {}
    for key, value in given.items():
        inner = read.get(key, value)
        if new := _OLD_OFFLOAD.get(key):
            out |= {new: {"device": "cpu"}} if read.get(new) else {}
        else:
            out[key] = _of_keys(inner, value) if isinstance(value, Mapping) and isinstance(inner, Mapping) else inner
    return out


def _wrong_leaves(data: Mapping[str, Any], path: str) -> dict[str, str]:
    """Values that are not finite, quoted, "auto", or outside the range of the flag for the same key → what is wrong."""
    found, flags = {}, {key: name for name, key in KEY_OF_FLAG.items() if RunConfig.range_of(name)}
    for key, value in leaves(data).items():
        # Text is checked in the optimizer's arguments only: elsewhere DeepSpeed's models and ours reject it.
        is_checked = isinstance(value, (int, float)) or (key.startswith("optimizer.") and value not in (None, "auto"))
        if is_checked and (flag := flags.get(key)):
            whole = int(value) if isinstance(value, float) and value.is_integer() else value
            for problem in what_is_wrong({flag: whole})[1].get(flag, ()):
                found[key] = f"{path}: {key}{problem.removeprefix(spelling(flag))}"
        if value == "auto" and (problem := _why_not_auto(key)):
            found[key] = f"{path}: {problem}"
        is_null = value is None and key in DeepSpeedJson.model_fields
        if is_null or (key == "zero_optimization.leaf_module" and value not in (None, {})):
            found[key] = f'{path}: "{key}" must be a block {{…}}, not {value!r}'
        if key == "zero_optimization.stage" and str(value) not in ("0", "1", "2", "3"):  # true and 1.0 are read as 1
            found[key] = f"{path}: zero_optimization.stage must be 0, 1, 2 or 3, not {value!r}"
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, float) and not math.isfinite(item):
                found[key] = f"{path}: {key} must be a finite number, not {item}"
            is_number = isinstance(item, str) and re.fullmatch(r"[-+]?[\d.]+(e[-+]?\d+)?", item.lower())
            if is_number and key.startswith(("optimizer.params.", "scheduler.params.")):  # DeepSpeed passes text on
                found[key] = f'{path}: {key}: "{item}" is text, not a number; write {item}'
    return found


def _why_not_auto(key: str) -> str:
    """Why a key cannot be "auto"; empty where it can, or where a verdict covers any value."""
    if key in _CAN_BE_AUTO or any(f"{key}.".startswith(f"{name}.") for name in _ONLY_NAMED):
        return ""
    if key in ("optimizer.params", "scheduler.params") or _keys_of(key.split(".")):
        return f"\"{key}\" must be a block {{…}}, not 'auto'"
    block = key.rpartition(".")[0]
    can = [name for name in _CAN_BE_AUTO if name.rpartition(".")[0] == block] or _CAN_BE_AUTO
    return f'"{key}" cannot be "auto"; those that can are {", ".join(sorted(can))}'


def _wrong_keys(error: ValidationError, path: str) -> dict[str, str]:
    """Dotted name → what the models reject, in one line."""
    found = {}
    for detail in error.errors():
        *blocks, last = map(str, detail["loc"])
        name, message, value = ".".join((*blocks, last)), detail["msg"], detail.get("input")
        message = message.removeprefix("Value error, ").removeprefix("Assertion failed, ")
        if detail["type"] == "extra_forbidden":
            message = _why_unknown(blocks, last)
        elif detail["type"] in ("model_type", "dict_type"):
            message = f'"{name}" must be a block {{…}}, not {value!r}'
        elif isinstance(value, (Mapping, BaseModel)):  # a rule between keys, whose input is the whole block
            message = f"{name}: {message}"
        else:
            message = message.removeprefix(f"{name} ").partition(", got a number")[0].replace("Input should", "must")
            message = message.replace("a valid ", "a ").replace("integer", "whole number")
            message += ' or "auto"' * (name in _CAN_BE_AUTO)
            message = f"{name} {message}, not {value!r}"
        found[name] = f"{path}: {message}"
    return found


def _why_unknown(blocks: list[str], last: str) -> str:
    """What is wrong with a key that no model has, and the nearest one that works."""
    block, name = ".".join(blocks), ".".join((*blocks, last))
    removed = {"": _REMOVED_TOP_LEVEL_CONFIG_KEYS, "zero_optimization": _REMOVED_ZERO_CONFIG_KEYS}.get(block, {})
    if last in removed:
        return f'"{name}": {removed[last].partition(" See ")[0].strip()} Delete it'
    if name in _READ_ELSEWHERE:
        return f'DeepSpeed 0.19 knows no key "{name}"; it reads "{_READ_ELSEWHERE[name]}"'
    known = _keys_of(blocks) | {key.rpartition(".")[2] for key in NAMED if key.rpartition(".")[0] == block}
    return f'DeepSpeed 0.19 knows no key "{name}"{did_you_mean(last, known)}'
