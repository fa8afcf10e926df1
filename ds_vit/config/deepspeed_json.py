"""DeepSpeed's JSON: read it, refuse what cannot work, say what is idle, and resolve every "auto".

A file that works with DeepSpeed 0.19 works here. DeepSpeed itself lets unknown top-level keys pass, crashes on some
"auto" values and checks the batch arithmetic after a floor division; all of that is caught here, before any process
group exists.
"""

from __future__ import annotations

import copy
import difflib
import importlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pydantic

from ds_vit.config.deepspeed_rules import (
    MONITORS,
    check_low_precision_masters,
    check_monitors,
    check_scaling,
    check_zero,
    current_names,
    idle,
    switched_on,
)
from ds_vit.fault_tolerance.errors import UserError

# Top-level keys of DeepSpeed 0.19.8: runtime/config.py reads them; tests/config/test_deepspeed_json.py compares.
_TOP_LEVEL_NAMES = """
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps managed_gradient_accumulation
    gradient_clipping optimizer scheduler fp16 bf16 torch_autocast data_types zero_optimization pipeline
    activation_checkpointing communication_data_type seq_parallel_communication_data_type prescale_gradients
    gradient_predivide_factor gradient_allreduce_op steps_per_print dump_state disable_python_gc disable_allgather
    zero_allow_untested_optimizer zero_force_ds_cpu_optimizer flops_profiler wall_clock_breakdown memory_breakdown
    comms_logger timers aio autotuning hybrid_engine data_efficiency checkpoint datastates_ckpt dataloader_drop_last
    log_level weight_quantization compile tensor_parallel expert_parallel use_data_before_expert_parallelism
    vocabulary_size tensorboard csv_monitor wandb comet sequence_parallel_size data_parallel_size
    """
TOP_LEVEL = frozenset(_TOP_LEVEL_NAMES.split())

# Sub-keys of the blocks whose readers in DeepSpeed let unknown ones pass in silence.
_SUB_KEYS: dict[str, frozenset[str]] = {
    "optimizer": frozenset({"type", "params", "legacy_fusion"}),
    "scheduler": frozenset({"type", "params"}),
    "torch_autocast": frozenset({"enabled", "dtype", "lower_precision_safe_modules"}),
    "data_types": frozenset({"grad_accum_dtype", "param_dtype", "buffer_dtype", "keep_in_fp32_modules"}),
    "pipeline": frozenset(
        {
            "stages",
            "partition",
            "seed_layers",
            "activation_checkpoint_interval",
            "use_reentrant",
            "pipe_partitioned",
            "grad_partitioned",
        }
    ),
    "activation_checkpointing": frozenset(
        {
            "partition_activations",
            "contiguous_memory_optimization",
            "cpu_checkpointing",
            "number_checkpoints",
            "synchronize_checkpoint_boundary",
            "profile",
        }
    ),
    "timers": frozenset({"throughput"}),
    "aio": frozenset(
        {"block_size", "queue_depth", "intra_op_parallelism", "single_submit", "overlap_events", "use_gds"}
    ),
    "flops_profiler": frozenset(
        {"enabled", "recompute_fwd_factor", "profile_step", "module_depth", "top_modules", "detailed", "output_file"}
    ),
}

_REMOVED = {
    "nebula": "DeepSpeed 0.19 removed Nebula checkpointing; delete the block",
    "compression_training": "DeepSpeed 0.19 removed compression; delete the block",
    "amp": 'DeepSpeed 0.19 removed Apex AMP; use "bf16", "fp16" or "torch_autocast"',
    "quantize_training": "DeepSpeed 0.19 removed quantised training; delete the block",
    "sparse_gradients": "DeepSpeed 0.19 removed sparse gradients; delete the key",
    "eigenvalue": "DeepSpeed 0.19 removed eigenvalue quantisation; delete the block",
    "sparse_attention": "DeepSpeed 0.19 removed sparse attention; delete the block",
    "elasticity": "DeepSpeed 0.19 removed elasticity; give train_batch_size and let the accumulation be computed",
    "graph_harvesting": "DeepSpeed 0.19 removed graph harvesting; delete the key",
    "curriculum_learning": "DeepSpeed 0.19 removed curriculum learning; delete the block",
    "progressive_layer_drop": "DeepSpeed 0.19 removed progressive layer drop; use --drop-path",
}
_REMOVED_ZERO = {
    "mics_shard_size": "DeepSpeed 0.19 removed MiCS; zero_hpz_partition_size is the nearest",
    "mics_hierarchical_params_gather": "DeepSpeed 0.19 removed MiCS; delete the key",
    "zeropp_loco_param": "DeepSpeed 0.19 removed LoCo; delete the key",
    "legacy_stage1": "DeepSpeed removed the old stage 1; delete the key",
}

# Blocks that DeepSpeed would act on in ways that would break the sample order, the model's cut or the promise.
_REFUSED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "autotuning": (
        lambda v: switched_on(v),
        "is DeepSpeed's own launcher mode and rewrites this run; delete the block",
    ),
    "hybrid_engine": (switched_on, "is for generation during RLHF; delete the block"),
    "data_efficiency": (
        lambda v: switched_on(v),
        "replaces the data loader, whose order here is keyed; delete the block",
    ),
    "tensor_parallel": (lambda v: bool(v), "is DeepSpeed's AutoTP, which replaces our cut of the model; use --tp"),
    "expert_parallel": (
        lambda v: switched_on(v),
        "needs a mixture of experts, which no ViT here has; delete the block",
    ),
    "sequence_parallel_size": (lambda v: v not in (None, 1), "is Ulysses, which does not cut a ViT; delete the key"),
    "data_parallel_size": (lambda v: v is not None, "follows from the number of ranks, --pp and --tp; delete the key"),
    "weight_quantization": (lambda v: bool(v), "changes the weights during training; delete the block"),
    "managed_gradient_accumulation": (lambda v: v is False, "hands the accumulation to the caller; delete the key"),
    "gradient_allreduce_op": (
        lambda v: str(v).lower() != "mean",
        'makes the loss curve depend on the number of ranks; delete the key (the default is "mean")',
    ),
    "compile": (
        lambda v: not isinstance(v, Mapping) or v.get("deepcompile") not in (None, False),
        "(DeepCompile) is not supported; delete the block",
    ),
}


@dataclass(frozen=True)
class Precision:
    """What a JSON file says about number formats.

    Attributes:
        name: "fp32", "bf16", "fp16", "autocast-bf16" or "autocast-fp16", as summary.json has it.
        compute: torch dtype name of the parameters and inputs that the forward pass sees.
    """

    name: str
    compute: str


@dataclass(frozen=True)
class Checkpointing:
    """Activation checkpointing: every `interval` blocks (0: off), kept on the CPU where `cpu` is set."""

    interval: int = 0
    cpu: bool = False


@dataclass(frozen=True)
class BatchSizes:
    """The batch arithmetic: `global_batch = micro_batch * accumulation * dp`."""

    global_batch: int
    micro_batch: int
    accumulation: int
    dp: int

    def __str__(self) -> str:
        return (
            f"{self.global_batch} = {self.micro_batch} a micro-batch x {self.accumulation} accumulated "
            f"x {self.dp} data-parallel"
        )


def load_json(path: str | Path) -> dict[str, Any]:
    """Read a DeepSpeed JSON file (strict JSON, or Hjson with comments, as DeepSpeed reads it).

    Raises:
        UserError: the file is missing, malformed (with line and column), has a key twice, or is not an object.
    """
    path = Path(path)
    try:
        text = path.read_text()
    except OSError as error:
        raise UserError(f"--deepspeed_config {path}: {error.strerror or error}") from None

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise UserError(f'{path}: the key "{key}" stands twice in one block; keep one')
            seen[key] = value
        return seen

    try:
        data = json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        data = _load_hjson(text, unique, path, error)
    if not isinstance(data, dict):
        raise UserError(f"{path}: a DeepSpeed configuration is one JSON object, not a {type(data).__name__}")
    return data


def _load_hjson(text: str, unique: Callable, path: Path, error: json.JSONDecodeError) -> Any:
    """Hjson's comments and trailing commas are legal DeepSpeed; its unquoted strings would swallow real mistakes."""
    import hjson

    malformed = UserError(f"{path}, line {error.lineno}, column {error.colno}: malformed JSON: {error.msg}")
    try:
        data = hjson.loads(text, object_pairs_hook=unique)
    except hjson.HjsonDecodeError:
        raise malformed from None
    if any(isinstance(leaf, str) and any(c in leaf for c in '{}":,\n') for leaf in _leaves(data) if leaf):
        raise malformed
    return data


def _leaves(data: Any) -> Iterator[Any]:
    if isinstance(data, Mapping):
        for value in data.values():
            yield from _leaves(value)
    elif isinstance(data, list):
        for value in data:
            yield from _leaves(value)
    else:
        yield data


def _nearest(key: str, known: frozenset[str]) -> str:
    close = difflib.get_close_matches(key, sorted(known), n=1, cutoff=0.4)
    return f'; the nearest known key is "{close[0]}"' if close else ""


def block_model(block: str) -> type | None:
    """The pydantic model by which DeepSpeed reads a block, where it has one."""
    from deepspeed.comm.config import CommsLoggerConfig
    from deepspeed.monitor.config import CometConfig, CSVConfig, TensorBoardConfig, WandbConfig
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    models = {
        "zero_optimization": DeepSpeedZeroConfig,
        "bf16": DeepSpeedBF16Config,
        "fp16": DeepSpeedFP16Config,
        "tensorboard": TensorBoardConfig,
        "csv_monitor": CSVConfig,
        "wandb": WandbConfig,
        "comet": CometConfig,
        "comms_logger": CommsLoggerConfig,
    }
    return models.get(block)


def _block_keys(block: str) -> frozenset[str] | None:
    """The keys that DeepSpeed knows in a block, aliases included; None where the block is free."""
    model = block_model(block)
    if model is None:
        return _SUB_KEYS.get(block)
    return frozenset(name for key, field in model.model_fields.items() for name in (key, field.alias) if name)


def _check_values(block: str, value: Mapping[str, Any], path: str) -> None:
    """Let DeepSpeed's own model look at the values ("auto" aside), and say in one line what it does not like."""
    model = block_model(block)
    if model is None:
        return
    try:
        model(**{key: item for key, item in value.items() if item != "auto"})
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        said = first["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
        name = ".".join([block, *map(str, first["loc"])])
        given = first.get("input")
        # A rule between keys is broken by the whole block, which nobody wants to read.
        wrong = "" if isinstance(given, pydantic.BaseModel) else f", not {given!r}"
        raise UserError(f"{path}: {name}: {said}{wrong}") from None
    except AssertionError as error:  # an old and a new name of one key
        raise UserError(f"{path}: {block}: {error}") from None


def check_keys(data: Mapping[str, Any], path: str) -> None:
    """Refuse keys that DeepSpeed removed, never had, or that would change what a run means.

    Raises:
        UserError: names the key, the reason and the nearest thing that works.
    """
    for key, value in data.items():
        if key in _REMOVED:
            raise UserError(f'{path}: "{key}": {_REMOVED[key]}')
        if key == "bfloat16":
            raise UserError(f'{path}: "bfloat16" is the old name; call the block "bf16"')
        if key not in TOP_LEVEL:
            raise UserError(f'{path}: DeepSpeed 0.19 knows no key "{key}"{_nearest(key, TOP_LEVEL)}')
        if key in _REFUSED and _REFUSED[key][0](value):
            raise UserError(f'{path}: "{key}" {_REFUSED[key][1]}')
        known = _block_keys(key)
        if known is None:
            continue
        if not isinstance(value, Mapping):
            raise UserError(f'{path}: "{key}" must be a block {{…}}, not {value!r}')
        for sub in value:
            if key == "zero_optimization" and sub in _REMOVED_ZERO:
                raise UserError(f'{path}: "{key}.{sub}": {_REMOVED_ZERO[sub]}')
            if sub not in known:
                raise UserError(f'{path}: DeepSpeed 0.19 knows no key "{key}.{sub}"{_nearest(sub, known)}')
    zero = data.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    if isinstance(stage, bool) or stage not in (0, 1, 2, 3):
        raise UserError(f"{path}: zero_optimization.stage {stage!r} does not exist; it may be 0, 1, 2 or 3")
    for key, value in data.items():
        _check_values(key, value, path)
    check_zero(current_names(zero), stage, path)
    check_low_precision_masters(data, path)
    check_scaling(data, stage, path)
    check_monitors(data, path)


def idle_keys(data: Mapping[str, Any]) -> list[str]:
    """One line for each known key that does nothing in this run: "key: why"."""
    return [f"{name}: {why}" for name, why in idle(data).items()]


def check_pipeline(data: Mapping[str, Any], path: str, pp: int) -> None:
    """Refuse what DeepSpeed's pipeline engine cannot do or gets wrong.

    Raises:
        UserError: with the nearest legal choice.
    """
    if pp == 1:
        return
    stage = data.get("zero_optimization", {}).get("stage", 0)
    if stage > 1:
        raise UserError(
            f"{path}: ZeRO stage {stage} does not go with --pp {pp}: DeepSpeed's pipeline takes stages 0 and 1; "
            "use stage 1, or --pp 1"
        )
    for key, asked in (
        ("wall_clock_breakdown", data.get("wall_clock_breakdown")),
        ("flops_profiler", switched_on(data.get("flops_profiler"))),
    ):
        if asked:
            raise UserError(
                f'{path}: "{key}" crashes DeepSpeed 0.19.8 with --pp {pp}; delete it (the start table has the FLOPs, '
                "metrics.jsonl the times)"
            )


def precision(data: Mapping[str, Any], path: str, *, on_cpu: bool) -> Precision:
    """Which number formats the file asks for.

    Raises:
        UserError: two at once, fp16 on a CPU, or a wrapper that DeepSpeed 0.19.8 gets wrong.
    """
    stage = data.get("zero_optimization", {}).get("stage", 0)
    enabled = [block for block in ("bf16", "fp16", "torch_autocast") if switched_on(data.get(block))]
    if len(enabled) > 1:
        raise UserError(f"{path}: {' and '.join(enabled)} are enabled at once; keep one")
    if not enabled:
        return Precision("fp32", "float32")
    kind = enabled[0]
    if kind == "torch_autocast":
        name = str(data[kind].get("dtype", "bfloat16")).removeprefix("torch.")
        name = {"bf16": "bfloat16", "fp16": "float16", "half": "float16"}.get(name, name)
        if name not in ("bfloat16", "float16"):
            raise UserError(f'{path}: torch_autocast.dtype {name!r} is not a 16-bit type; use "bfloat16" or "float16"')
        kind = "autocast-bf16" if name == "bfloat16" else "autocast-fp16"
    if kind in ("fp16", "autocast-fp16") and on_cpu:
        raise UserError(f"{path}: {kind} needs a GPU and this machine has none; use bf16 or fp32")
    if kind == "bf16" and stage == 0:
        raise UserError(
            f"{path}: bf16.enabled at ZeRO stage 0 makes DeepSpeed 0.19.8 take an optimizer step before training; "
            'use stage 1, or "torch_autocast": {"enabled": true, "dtype": "bfloat16"} as in ds_configs/zero0_bf16.json'
        )
    if kind == "fp16" and stage == 0:
        raise UserError(
            f"{path}: fp16.enabled at ZeRO stage 0 makes DeepSpeed 0.19.8 take an optimizer step before training; "
            "use stage 1 as in ds_configs/zero1_fp16.json"
        )
    return Precision(kind, {"bf16": "bfloat16", "fp16": "float16"}.get(kind, "float32"))


def check_types(data: Mapping[str, Any], found: Precision, path: str) -> None:
    """Refuse names of types and of modules that DeepSpeed would look up after the ranks have met.

    Args:
        data: the JSON.
        found: the precision that it asks for.
        path: named in messages.

    Raises:
        UserError: names the key and what it may be.
    """
    from deepspeed.runtime.config import DtypeEnum

    types = data.get("data_types") or {}
    for key in ("grad_accum_dtype", "param_dtype", "buffer_dtype"):
        try:
            given = None if types.get(key) is None else DtypeEnum(types[key]).value
        except (KeyError, ValueError):
            raise UserError(f'{path}: data_types.{key} must be "fp32", "bf16" or "fp16", not {types[key]!r}') from None
        if key == "param_dtype" and given is not None and str(given) != f"torch.{found.compute}":
            raise UserError(
                f"{path}: data_types.param_dtype {types[key]!r} is not what {found.name} computes in; delete it, or "
                'enable the block "bf16" or "fp16"'
            )
        stage = data.get("zero_optimization", {}).get("stage", 0)
        if key == "grad_accum_dtype" and stage == 0 and given is not None and str(given) != f"torch.{found.compute}":
            raise UserError(
                f"{path}: data_types.grad_accum_dtype {types[key]!r} at ZeRO stage 0 must be the model's type, "
                f"{found.compute}; delete it, or use stage 1"
            )
    for name in (data.get("torch_autocast") or {}).get("lower_precision_safe_modules") or ():
        package, _, cls = str(name).rpartition(".")
        try:
            getattr(importlib.import_module(package), cls)
        except (ImportError, AttributeError, ValueError):
            raise UserError(
                f"{path}: torch_autocast.lower_precision_safe_modules: there is no {name!r}; write the class with its "
                'module, such as "torch.nn.Linear"'
            ) from None


def activation_checkpointing(data: Mapping[str, Any], path: str, *, flag: bool) -> Checkpointing:
    """What `pipeline.activation_checkpoint_interval`, the `activation_checkpointing` block and the flag ask for.

    Raises:
        UserError: the flag asks for it and the JSON turns it off, or the interval is no whole number.
    """
    interval = data.get("pipeline", {}).get("activation_checkpoint_interval")
    block = data.get("activation_checkpointing")
    if interval is not None and (isinstance(interval, bool) or not isinstance(interval, int) or interval < 0):
        raise UserError(
            f"{path}: pipeline.activation_checkpoint_interval must be a whole number >= 0, not {interval!r}"
        )
    if interval == 0 and (flag or block is not None):
        asker = "--grad-checkpointing" if flag else 'the block "activation_checkpointing"'
        raise UserError(
            f"{path}: pipeline.activation_checkpoint_interval 0 turns activation checkpointing off and {asker} turns "
            "it on; delete one of them"
        )
    wanted = bool(interval) or flag or block is not None
    return Checkpointing(interval or int(wanted), bool((block or {}).get("cpu_checkpointing", False)))


def batch_sizes(
    data: Mapping[str, Any], path: str, *, dp: int, batch_size: int | None, grad_accum_steps: int | None
) -> BatchSizes:
    """Resolve `train_batch_size = micro-batch x accumulation x dp`, before anything is divided.

    Args:
        data: the JSON; each of the three keys may be a number, "auto" or absent.
        path: named in messages.
        dp: data-parallel degree.
        batch_size: `-b/--batch-size`, for a micro-batch of "auto" (128 where nothing says it, as in timm).
        grad_accum_steps: `--grad-accum-steps`, for an accumulation of "auto".

    Raises:
        UserError: with the three numbers and two ways out.
    """
    keys = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    numbers: list[int | None] = []
    for key in keys:
        value = data.get(key, "auto")
        if value is None or value == "auto":
            numbers.append(None)
        elif isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise UserError(f'{path}: {key} must be a whole number >= 1 or "auto", not {value!r}')
        else:
            numbers.append(value)
    total, micro, accumulation = numbers
    for key, flag, value, given in (
        (keys[1], "--batch-size", micro, batch_size),
        (keys[2], "--grad-accum-steps", accumulation, grad_accum_steps),
    ):
        if value is not None and given is not None and value != given:
            raise UserError(f'{path} fixes {key} to {value} and {flag} says {given}; drop the flag or write "auto"')
        if given is not None and given < 1:
            raise UserError(f"{flag} must be at least 1, not {given}")
    micro = micro if micro is not None else batch_size
    accumulation = accumulation if accumulation is not None else grad_accum_steps
    if total is None:
        micro, accumulation = micro or 128, accumulation or 1
        return BatchSizes(micro * accumulation * dp, micro, accumulation, dp)
    if micro is not None and accumulation is None:
        accumulation = max(1, total // (micro * dp))
    elif micro is None:
        accumulation = accumulation or 1
        micro = max(1, total // (accumulation * dp))
    product = micro * accumulation * dp
    if product != total:
        raise UserError(
            f"{path}: train_batch_size {total} is not micro-batch {micro} x accumulation {accumulation} x "
            f"data-parallel {dp} = {product}; set train_batch_size to {product}, or " + _other_way(total, dp)
        )
    return BatchSizes(total, micro, accumulation, dp)


def _other_way(total: int, dp: int) -> str:
    if total % dp == 0:
        share = total // dp
        options = [
            f"{m} x {share // m}" for m in sorted((d for d in range(1, share + 1) if share % d == 0), reverse=True)
        ]
        return f"choose micro-batch x accumulation as one of {', '.join(options[:4])}"
    divisors = [d for d in range(1, total + 1) if total % d == 0 and d <= 2 * dp]
    nearest = min(divisors, key=lambda d: abs(d - dp))
    return f"start a number of ranks that divides {total}, such as {nearest}"


# What evaluation reads of a file; it has no optimizer, no schedule and no accumulation.
_FOR_EVALUATION = ("train_micro_batch_size_per_gpu", "fp16", "bf16", "torch_autocast", "data_types", *MONITORS)


def for_evaluation(data: Mapping[str, Any], *, pp: int) -> dict[str, Any]:
    """The part of a training file that evaluation needs: the precision, the micro-batch, the monitors.

    Of ZeRO only stage 3 means something without an optimizer, and only without a pipeline: parameters stay
    partitioned, so a model that does not fit on one accelerator can be evaluated as it was trained.

    Args:
        data: the JSON.
        pp: pipeline stages.
    """
    out = {key: data[key] for key in _FOR_EVALUATION if key in data}
    zero = data.get("zero_optimization") or {}
    if zero.get("stage") == 3 and pp == 1:
        out["zero_optimization"] = {key: value for key, value in zero.items() if key != "offload_optimizer"}
    return out


def resolve(
    data: Mapping[str, Any],
    *,
    batch: BatchSizes,
    gradient_clipping: float,
    auto: Mapping[str, Any],
    path: str,
) -> dict[str, Any]:
    """The file as DeepSpeed gets it: every "auto" replaced, the batch and the clipping always explicit.

    Args:
        auto: values for what stands as "auto" at a dotted name; None deletes the key, so that DeepSpeed's default
            holds.

    Raises:
        UserError: "auto" stands where nothing resolves it.
    """
    resolved = copy.deepcopy(dict(data))
    resolved["train_batch_size"] = batch.global_batch
    resolved["train_micro_batch_size_per_gpu"] = batch.micro_batch
    resolved["gradient_accumulation_steps"] = batch.accumulation
    resolved["gradient_clipping"] = gradient_clipping

    def walk(block: dict[str, Any], prefix: str) -> None:
        for key in list(block):
            name = f"{prefix}{key}"
            if isinstance(block[key], dict):
                walk(block[key], f"{name}.")
            elif block[key] == "auto":
                if name not in auto:
                    raise UserError(f'{path}: "{name}" cannot be "auto"; those that can are {", ".join(sorted(auto))}')
                if auto[name] is None:
                    del block[key]
                else:
                    block[key] = auto[name]

    walk(resolved, "")
    return resolved


def check_with_deepspeed(resolved: Mapping[str, Any], path: str) -> None:
    """Have DeepSpeed read the resolved file before there is a process group; what it does not like, in one line.

    Raises:
        UserError: DeepSpeed's own complaint.
    """
    from deepspeed.runtime.config import DeepSpeedConfig

    # Without ranks DeepSpeed would hold the batch against one; `batch_sizes` has looked at it.
    try:
        DeepSpeedConfig({key: value for key, value in resolved.items() if key != "train_batch_size"})
    except Exception as error:  # whatever it is, it would come again as a traceback after the ranks have met
        said = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UserError(f"{path}: DeepSpeed does not take it: {said}") from error
