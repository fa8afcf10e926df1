"""What DeepSpeed is told: the JSON, read before the other parts of a plan and written out after them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ds_vit.config import RunConfig, deepspeed_auto, deepspeed_json, deepspeed_keys
from ds_vit.config.deepspeed_json import Checkpointing, Precision
from ds_vit.config.deepspeed_rules import sums_going_back, switched_on, without_idle
from ds_vit.config.deepspeed_set import leaves, overlay, parse_set
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.parallel.layout import Layout

if TYPE_CHECKING:
    from ds_vit.training.plan.data import DataPlan
    from ds_vit.training.plan.optimizer import OptimizerPlan


@dataclass(frozen=True)
class DeepSpeedPlan:
    """The JSON, and what it says of number formats and of recomputation.

    Attributes:
        path: the file, named in messages.
        json: between `read` and `write_out` the file less what is idle; in a plan what DeepSpeed gets, without "auto".
        precision: which number formats it asks for.
        checkpointing: of activations.
        file: the file with what --set says, before anything was resolved.
        of_a_run: the file was written by a run: its global batch counts, and the two other numbers of the batch follow.
        origins: dotted name of a value in `json` → where it came from; of the others, which stood in the file, none.
        notes: lines for people.
    """

    path: str
    json: Mapping[str, Any]
    precision: Precision
    checkpointing: Checkpointing
    file: Mapping[str, Any] = field(default_factory=dict, repr=False)
    of_a_run: bool = False
    origins: Mapping[str, str] = field(default_factory=dict, repr=False)
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage, 0 without ZeRO."""
        return int(self.json.get("zero_optimization", {}).get("stage", 0))

    def origin(self, name: str) -> str:
        """Where a value of the JSON came from, in a word or two for people."""
        return self.origins.get(name, "JSON")


def read(config: RunConfig, *, on_cpu: bool) -> DeepSpeedPlan:
    """Read the JSON, as far as it can be without knowing anything else of the run.

    Raises:
        UserError: keys or values that cannot be, or flags that contradict them.
    """
    source: Mapping[str, Any] | str = config.deepspeed_config  # the contents, from a program
    given, of_a_run = parse_set(config.set), False
    if isinstance(source, Mapping):
        path, stored = "deepspeed_config", copy.deepcopy(dict(source))
    else:
        path, stored = source, deepspeed_json.load_json(source)
        of_a_run = deepspeed_json.derived_path(source).is_file()
    file = data = overlay(stored, given, path)
    if given:
        path += f" with --set {' '.join(config.set)}"
    deepspeed_keys.check_keys(data, path)
    data = deepspeed_auto.settle(data)
    deepspeed_keys.check_rules(data, path)
    precision = deepspeed_json.precision(_with_auto_precision(data, on_cpu), path, on_cpu=on_cpu)
    deepspeed_json.check_types(data, precision, path)
    _check_types(config, precision, on_cpu)
    if config.eval_only:
        data = deepspeed_json.for_evaluation(data, pp=config.pp)
    notes = [f"idle in this run: {line}" for line in deepspeed_keys.idle_keys(data)]
    data = without_idle(data)
    if not config.eval_only:
        data, filled = deepspeed_auto.with_optimizer(data, path, lr=config.lr)
        notes += filled
    checkpointing = deepspeed_json.activation_checkpointing(data, path, flag=config.grad_checkpointing)
    return DeepSpeedPlan(
        path, data, precision, checkpointing, file, of_a_run, dict.fromkeys(leaves(given), "--set"), tuple(notes)
    )


def _check_types(config: RunConfig, precision: Precision, on_cpu: bool) -> None:
    """Refuse --norm-dtype and --tf32 where they would do nothing."""
    if config.norm_dtype == "model" and precision.compute == "float32":
        raise UserError(f"--norm-dtype model has no effect in {precision.name}: the model is in float32; drop it")
    if config.tf32 and (on_cpu or precision.compute != "float32"):
        why = "a CPU has no TF32 cores" if on_cpu else f"the model is in {precision.compute}"
        raise UserError(f"--tf32 has no effect: {why}; drop it")


def _auto_precision(on_cpu: bool) -> dict[str, bool]:
    """What "auto" means for a 16-bit type: bf16 where the GPU has it, fp16 on older ones, neither on a CPU."""
    has_bf16 = not on_cpu and torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    return {"bf16": has_bf16, "fp16": not on_cpu and not has_bf16}


def _with_auto_precision(data: Mapping[str, Any], on_cpu: bool) -> dict[str, Any]:
    """Beside a precision that is asked for by name, "auto" is no other."""
    blocks = {
        block: data[block] for block in ("bf16", "fp16", "torch_autocast") if isinstance(data.get(block), Mapping)
    }
    named = any(block.get("enabled") != "auto" and switched_on(block) for block in blocks.values())
    for name, value in _auto_precision(on_cpu).items():
        if blocks.get(name, {}).get("enabled") == "auto":
            blocks[name] = {**blocks[name], "enabled": value and not named}
    return {**data, **blocks}


def write_out(
    told: DeepSpeedPlan, data: DataPlan, optimizer: OptimizerPlan | None, model: nn.Module, layout: Layout
) -> DeepSpeedPlan:
    """Write the resolved numbers into the JSON. Bucket sizes follow the width, as in Hugging Face's integration.

    Args:
        told: from `read`.
        data: its batch arithmetic.
        optimizer: None in evaluation alone.
        model: the whole one.
        layout: of the run.

    Raises:
        UserError: "auto" where nothing resolves it, or what DeepSpeed itself does not take.
    """
    width, path, batch = model.embed_dim, told.path, data.batch
    auto = {
        "bf16.enabled": told.precision.name == "bf16",
        "fp16.enabled": told.precision.name == "fp16",
        "communication_data_type": None,
        # Without ZeRO it is of torch's reducer, which has a default of its own.
        "zero_optimization.reduce_bucket_size": width * width if told.zero_stage else None,
        "zero_optimization.allgather_bucket_size": width * width,
        "zero_optimization.stage3_prefetch_bucket_size": int(0.9 * width * width),
        "zero_optimization.stage3_param_persistence_threshold": 10 * width,
    }
    if optimizer is None:
        json = deepspeed_json.resolve(told.json, batch=batch, gradient_clipping=0.0, auto=auto, path=path)
    else:
        auto |= {f"scheduler.params.{key}": value for key, value in optimizer.scheduler.items()}
        auto |= {f"optimizer.params.{key}": value for key, value in optimizer.of_flags.items()}
        json = deepspeed_json.resolve(told.json, batch=batch, gradient_clipping=optimizer.clip, auto=auto, path=path)
        params = {**(json["optimizer"].get("params") or {}), **optimizer.of_flags}
        json["optimizer"] = {**json["optimizer"], "params": params}
        deepspeed_auto.check_scheduler(json, path)
    deepspeed_json.check_with_deepspeed(json, path)
    notes = told.notes
    idle = told.zero_stage == 0 and "reduce_bucket_size" in json.get("zero_optimization", {})
    if idle and not sums_going_back(json, pp=layout.pp, dp=layout.dp, tp=layout.tp):
        why = "at stage 0 it acts between data-parallel ranks alone, and without accumulation (docs/performance.md)"
        notes = (*notes, f"idle in this run: zero_optimization.reduce_bucket_size: {why}")
    return dataclasses.replace(told, json=json, origins=_origins(told, json, data, optimizer), notes=notes)


def with_batch(told: DeepSpeedPlan, data: DataPlan) -> DeepSpeedPlan:
    """A JSON that is written out, with the batch arithmetic of `data`."""
    json = {**told.json, **data.batch.as_json()}
    return dataclasses.replace(told, json=json, origins={**told.origins, **data.origins})


def _origins(
    told: DeepSpeedPlan, json: Mapping[str, Any], data: DataPlan, optimizer: OptimizerPlan | None
) -> dict[str, str]:
    """Where each value came from that is not the file's own."""
    file, known = leaves(told.file), {**data.origins, **(optimizer.origins if optimizer else {})}
    origins = {}
    for name, value in leaves(json).items():
        if name in told.origins and file.get(name) == value:
            origins[name] = told.origins[name]
        elif name in known:
            origins[name] = known[name]
        elif file.get(name) != value:
            origins[name] = '"auto"' if file.get(name) == "auto" else "default"
    return origins
