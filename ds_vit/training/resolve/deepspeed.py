"""The DeepSpeed JSON: read before the other parts of a run are resolved, written out after them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch

from ds_vit.config import RunConfig, deepspeed_rules
from ds_vit.config.batch import BatchSizes
from ds_vit.config.deepspeed_json import derived_path, leaves, load_json, overlay
from ds_vit.config.deepspeed_keys import DeepSpeedJson, read_json
from ds_vit.config.deepspeed_rules import Checkpointing, Precision
from ds_vit.config.deepspeed_verdicts import idle_keys, rejected
from ds_vit.config.schema import KEY_OF_FLAG
from ds_vit.config.units import parse_set
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.optim.build import optimizer_class
from ds_vit.parallel.layout import Layout

T = TypeVar("T")
_PRECISIONS = ("bf16", "fp16", "torch_autocast")
IDLE = "DeepSpeed keys without effect in this run: "


@dataclass(frozen=True)
class DeepSpeedSettings:
    """The JSON, and its number formats and recomputation.

    Attributes:
        path: the file, named in messages.
        json: between `read` and `write_out` the file without its idle keys; then what DeepSpeed gets, without "auto".
        precision: the number formats.
        checkpointing: of activations.
        file: the file with the values of --set, before anything was resolved.
        of_a_run: the file was written by a run: its global batch counts, and the two other numbers of the batch follow.
        asks_for_gpu: the file asks for a 16-bit type, by name or "auto"; a CPU is slow in it, or takes another.
        origins: dotted name of a value in `json` → where it came from; values of the file have none.
        notes: lines for people.
    """

    path: str
    json: DeepSpeedJson
    precision: Precision
    checkpointing: Checkpointing
    file: Mapping[str, Any] = field(default_factory=dict, repr=False)
    of_a_run: bool = False
    asks_for_gpu: bool = False
    origins: Mapping[str, str] = field(default_factory=dict, repr=False)
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage, 0 without ZeRO."""
        return self.json.zero_stage

    def origin(self, name: str) -> str:
        """The origin of a value of the JSON, for people."""
        return self.origins.get(name, "JSON")


def read(config: RunConfig, *, on_cpu: bool) -> DeepSpeedSettings:
    """Read the JSON as far as possible without the rest of the run.

    Raises:
        UserError: invalid keys or values, or flags that contradict them.
    """
    source: Mapping[str, Any] | str = config.deepspeed_config  # the contents, from a program
    given, of_a_run = parse_set(config.set), False
    monitor = {KEY_OF_FLAG[name]: value for name in ("wandb", "wandb_project") if (value := getattr(config, name))}
    if isinstance(source, Mapping):
        path, stored = "deepspeed_config", source
    else:
        path, stored = source, load_json(source)
        of_a_run = derived_path(source).is_file()
    file = overlay(stored, given | monitor, path)
    if given:
        path += f" with --set {' '.join(config.set)}"
    path += " with --wandb" if monitor else ""
    json, wrong = read_json(file, path)
    refused = rejected(json, path)
    problems = [*wrong.values(), *(line for _, line in refused)]
    bad = {name.partition(".")[0] for name in (*wrong, *dict(refused))}

    def check(blocks: str, call: Callable[[], T]) -> T | None:
        """The result of a check that reads these blocks, if nothing is wrong in them; its problems join the others."""
        try:
            return None if bad & {*blocks.split()} else call()
        except UserError as error:
            problems.extend(error.problems)
            return None

    if config.wandb_project and not json.is_on("wandb") and "wandb" not in bad:
        problems.append("--wandb-project has no effect without --wandb; drop it")
    asks_for_gpu, ways = any(map(json.is_on, _PRECISIONS)), f"{' '.join(_PRECISIONS)} zero_optimization"
    precision = check(ways, lambda: deepspeed_rules.precision(_with_auto_precision(json, on_cpu), path, on_cpu=on_cpu))
    if precision is not None:
        check("data_types", lambda: deepspeed_rules.check_types(json, precision, path))
        check("", lambda: _check_types(config, precision, on_cpu))
    if config.eval_only:
        json = deepspeed_rules.for_evaluation(json, pp=config.pp)
    idle = idle_keys(json)
    notes = [f"{IDLE}{', '.join(idle)}"] if idle else []
    json = json.replace({}, idle)  # none of them can make DeepSpeed fail
    check(f"{ways} wall_clock_breakdown flops_profiler", lambda: deepspeed_rules.check_pipeline(json, path, config.pp))
    if not config.eval_only:
        with_optimizer = check("optimizer", lambda: deepspeed_rules.with_optimizer(json, path, lr=config.lr))
        json, filled = with_optimizer or (json, [])
        notes += filled
        if with_optimizer:
            check("optimizer", lambda: optimizer_of(json, path))
    checkpointing = check(
        "pipeline activation_checkpointing",
        lambda: deepspeed_rules.activation_checkpointing(json, path, flag=config.grad_checkpointing),
    )
    if problems or precision is None or checkpointing is None:
        raise UserError(*problems)
    origins = {**dict.fromkeys(leaves(given), "--set"), **dict.fromkeys(monitor, "--wandb")}
    return DeepSpeedSettings(
        path, json, precision, checkpointing, file, of_a_run, asks_for_gpu, origins=origins, notes=tuple(notes)
    )


def optimizer_of(json: DeepSpeedJson, path: str) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The class and arguments of the JSON's optimizer, as `optimizer_class`."""
    assert json.optimizer is not None, "read() fills it in"
    return optimizer_class(json.optimizer.type, json.optimizer.params, path)


def _check_types(config: RunConfig, precision: Precision, on_cpu: bool) -> None:
    """Reject --norm-dtype and --tf32 where they have no effect."""
    if config.norm_dtype == "model" and precision.compute == "float32":
        raise UserError(f"--norm-dtype model has no effect in {precision.name}: the model is in float32; drop it")
    if config.tf32 and (on_cpu or precision.compute != "float32"):
        why = "a CPU has no TF32 cores" if on_cpu else f"the model is in {precision.compute}"
        raise UserError(f"--tf32 has no effect: {why}; drop it")


def _auto_precision(on_cpu: bool) -> dict[str, bool]:
    """ "auto" for a 16-bit type: bf16 where the accelerator supports it, fp16 on older ones, neither on a CPU."""
    if on_cpu:
        return {"bf16": False, "fp16": False}
    from deepspeed.accelerator import get_accelerator

    has_bf16 = get_accelerator().is_bf16_supported()
    return {"bf16": has_bf16, "fp16": not has_bf16}


def _with_auto_precision(json: DeepSpeedJson, on_cpu: bool) -> DeepSpeedJson:
    """Resolve "auto" precision; next to a precision that is named, "auto" is off."""
    enabled = {block: json.given(f"{block}.enabled") for block in _PRECISIONS}
    named = True in enabled.values()
    found = _auto_precision(on_cpu)
    return json.replace({f"{b}.enabled": found[b] and not named for b in found if enabled[b] == "auto"})


def sum_micro_batches(
    json: DeepSpeedJson, precision: Precision, batch: BatchSizes
) -> tuple[DeepSpeedJson, tuple[str, ...]]:
    """The JSON, summing several micro-batches in fp32; a line for people where one of its keys sums them in 16 bits."""
    json = deepspeed_rules.with_fp32_sums(json, precision, batch.accumulation)
    keys = ("data_types.grad_accum_dtype", deepspeed_rules.MASTERS_IN_BF16)
    chosen = next((key for key in keys if json.given(key)), None)
    if batch.accumulation > 1 and chosen and not deepspeed_rules.sums_in_fp32(json):
        return json, (f"micro-batches are summed in 16 bits, by {chosen}",)
    return json, ()


def write_out(
    settings: DeepSpeedSettings,
    batch: BatchSizes,
    layout: Layout,
    width: int,
    origins: Mapping[str, str],
    *,
    clip: float = 0.0,
    optimizer: Mapping[str, float] | None = None,
    scheduler: Mapping[str, float] | None = None,
) -> DeepSpeedSettings:
    """Write the resolved numbers into the JSON. Bucket sizes follow the width, as in Hugging Face's integration.

    Args:
        settings: from `read`.
        batch: the batch arithmetic.
        layout: of the run.
        width: of the model.
        origins: dotted name of a number in the JSON → where it came from, where that is not the JSON.
        clip: the largest norm of the gradient.
        optimizer: values of `optimizer.params` that flags decide; None in evaluation only.
        scheduler: values for "auto" in `scheduler.params`.

    Raises:
        UserError: "auto" where nothing resolves it, or a value that DeepSpeed itself rejects.
    """
    path, json = settings.path, settings.json
    always = {**batch.as_json(), "gradient_clipping": clip}
    always |= {f"optimizer.params.{key}": value for key, value in (optimizer or {}).items()}
    auto: dict[str, Any] = {
        "bf16.enabled": settings.precision.name == "bf16",
        "fp16.enabled": settings.precision.name == "fp16",
        "communication_data_type": None,
        "zero_optimization.reduce_bucket_size": width * width,
        "zero_optimization.allgather_bucket_size": width * width,
        "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * width * width),
        "zero_optimization.stage3_param_persistence_threshold": 10 * width,
        **{f"scheduler.params.{key}": value for key, value in (scheduler or {}).items()},
    }
    names = json.auto - always.keys()
    for name in sorted(names - auto.keys()):
        known = ", ".join(sorted({*auto, *always} - {*batch.as_json(), "gradient_clipping"}))
        raise UserError(f'{path}: "{name}" cannot be "auto"; those that can are {known}')
    default = [name for name in names if auto[name] is None]
    json = json.replace(always | {name: auto[name] for name in names - {*default}}, default)
    deepspeed_rules.check_scheduler(json, path)
    deepspeed_rules.check_with_deepspeed(json, path)
    return dataclasses.replace(settings, json=json, origins=_origins(settings, json, origins))


def _origins(settings: DeepSpeedSettings, json: DeepSpeedJson, known: Mapping[str, str]) -> dict[str, str]:
    """The origin of each value that is not the file's."""
    file, origins = leaves(settings.file), {}
    for name, value in leaves(json.dump()).items():
        if name in settings.origins and file.get(name) == value:
            origins[name] = settings.origins[name]
        elif name in known:
            origins[name] = known[name]
        elif file.get(name) != value:
            origins[name] = '"auto"' if file.get(name) == "auto" else "default"
    return origins
