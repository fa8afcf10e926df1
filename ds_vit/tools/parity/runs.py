"""What the ranks' new processes do: prepare every layout, or train one, by the trainer's own parts."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_vit import config as flags
from ds_vit.config import deepspeed_json
from ds_vit.config.batch import ways_to_share
from ds_vit.config.deepspeed_set import overlay, parse_set
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.launching.process import discover, rendezvous
from ds_vit.parallel.layout import Layout
from ds_vit.tools.parity.progress import note_step
from ds_vit.tools.parity.request import Cut, Request, default_layouts, parse_cut

if TYPE_CHECKING:
    import torch

    from ds_vit.training.plan import Plan

# SGD shows a constant factor in a gradient, which Adam hides, and does not scale rounding up to the learning rate in
# parameters whose gradient is zero in exact arithmetic. Clipping is far below the norm, so that a wrong norm shows.
PROBE = {"type": "SGD", "params": {"lr": 0.3, "momentum": 0.9, "weight_decay": 0.05}}
PROBE_CLIPPING = 0.1

# A tensor whose root mean square is below this share of the whole model's is judged against that share: one that
# starts at zero and has no gradient in exact arithmetic (a bias of the keys) holds nothing but rounding.
_SMALL_TENSOR = 1e-3

_OPTIMIZER_FLAGS = ("lr", "weight_decay", "clip_grad")
_SCHEDULE_FLAGS = ("sched", "warmup_steps", "warmup_epochs", "warmup_lr", "min_lr", "wsd_decay_fraction", "epochs")
_IDLE_FLAGS = (
    *("output", "log_interval", "eval_interval", "val_split", "validation_batch_size"),
    *("crop_pct", "crop_mode"),
)


@dataclass(frozen=True)
class Survey:
    """What can be compared, found before anything is trained.

    Attributes:
        reference: what the layouts are compared with.
        layouts: the layouts, each with its degrees and number format, or with the reason why it cannot be.
        batch: (global batch, micro-batch) of the reference; every layout has this global batch.
        judge_weights: whether the weights count; Adam scales rounding in gradients that should be zero.
        facts: lines for people: model, data, optimizer.
    """

    reference: Cut
    layouts: tuple[tuple[Cut, str, str | None], ...]
    precision: Mapping[str, str]
    batch: tuple[int, int]
    judge_weights: bool
    facts: tuple[str, ...]


@dataclass(frozen=True)
class Curve:
    """A few steps: (loss, gradient norm or None where the step was skipped), and the weights' worst deviation."""

    rows: tuple[tuple[float, float | None], ...]
    worst_weight: tuple[str, float] | None = None


def resolve(request: Request, cut: Cut, batch: tuple[int, int] | None, folder: Path) -> Plan:
    """The plan of one layout: the user's flags and JSON, with what this layout changes.

    Args:
        request: what was asked for.
        cut: the layout.
        batch: (global batch, micro-batch) of the reference; None for the reference itself.
        folder: an existing folder, for the layout's JSON.

    Raises:
        UserError: as `prepare`; or the global batch cannot be had with this micro-batch and dp.
    """
    from deepspeed.accelerator import get_accelerator

    from ds_vit.training.plan import prepare

    process = discover()
    path = request.values["deepspeed_config"]
    data = _load(request)
    values = {name: value for name, value in request.values.items() if name not in ("set", *_idle(request))}
    values |= {**cut.flags, "max_steps": request.steps, "val_split": ""}
    if not request.own_optimizer:
        data.pop("scheduler", None)
        data |= {"optimizer": PROBE, "gradient_clipping": PROBE_CLIPPING}
        values |= {"sched": "constant", "warmup_steps": 0}
    if cut.stage is not None:
        data["zero_optimization"] = _zero_block(data.get("zero_optimization") or {}, cut.stage)
    if cut.fp32:
        data = {key: value for key, value in data.items() if key not in ("bf16", "fp16", "torch_autocast")}
    if batch is not None:
        total, micro = batch
        micro = values.pop("batch_size") if "batch_size" in cut.flags else micro
        values = {name: value for name, value in values.items() if name not in ("batch_size", "grad_accum_steps")}
        dp = Layout.of_world(process.world_size, values.get("pp", 1), values.get("tp", 1)).dp
        data |= _batch_keys(total, micro, dp)
    file = folder / "layout.json"
    file.write_text(json.dumps(data))
    config, explicit = flags.from_values({**values, "deepspeed_config": str(file)})
    try:
        return prepare(config, explicit, process, on_cpu=get_accelerator().device_name() == "cpu")
    except UserError as error:
        raise UserError(str(error).replace(str(file), path)) from None


def _load(request: Request) -> dict[str, Any]:
    """The JSON, with what --set says; a layout has the last word over both."""
    path = request.values["deepspeed_config"]
    return overlay(deepspeed_json.load_json(path), parse_set(request.values.get("set", ())), path)


def _idle(request: Request) -> list[str]:
    """The flags that were written down and do nothing here, by their recipe names."""
    idle: tuple[str, ...] = (
        _IDLE_FLAGS if request.own_optimizer else (*_IDLE_FLAGS, *_OPTIMIZER_FLAGS, *_SCHEDULE_FLAGS)
    )
    idle += () if request.values.get("no_aug") else ("interpolation",)
    return [name for name in idle if name in request.values]


def _zero_block(block: Mapping[str, Any], stage: int) -> dict[str, Any]:
    """The JSON's ZeRO block at another stage, without what that stage cannot offload."""
    out = {**block, "stage": stage}
    if stage < 3:
        out.pop("offload_param", None)
    if stage < 1:
        out.pop("offload_optimizer", None)
    return out


def _batch_keys(total: int, micro: int, dp: int) -> dict[str, int]:
    """The three batch keys of a layout; accumulation is what is left."""
    ways = {way.micro_batch: way for way in ways_to_share(total, dp)}
    if micro not in ways:
        legal = f"choose -b among {', '.join(map(str, ways))}" if ways else "choose another global batch"
        raise UserError(
            f"the reference's global batch of {total} is not micro-batch {micro} x data-parallel {dp} x a whole "
            f"accumulation; {legal}"
        )
    return ways[micro].as_json()


def survey(request: Request) -> Survey:
    """Prepare every layout on this rank, start none.

    Raises:
        UserError: the reference cannot be, or a layout that was asked for.
    """
    from torch.optim import SGD

    from ds_vit.engine.start import quiet_deepspeed

    quiet_deepspeed(bool(request.values.get("verbose")))
    data = _load(request)
    stage = (data.get("zero_optimization") or {}).get("stage", 0)
    with tempfile.TemporaryDirectory(prefix="ds_vit-") as name:
        folder = Path(name)
        reference = request.reference
        if reference is None:
            # fp16 leaves steps out while it looks for its loss scale: only fp16 does the same.
            as_it_is = resolve(request, parse_cut("zero1"), None, folder)
            reference = parse_cut("zero1" if as_it_is.deepspeed.precision.name.endswith("fp16") else "zero1 fp32")
        try:
            plan = resolve(request, reference, None, folder)
        except UserError as error:
            raise UserError(f"reference {reference.text!r}: {error}") from None
        batch = (plan.data.batch.global_batch, plan.data.batch.micro_batch)
        cuts = request.layouts or default_layouts(plan.parallel.layout.world_size, stage=stage)
        precision = {reference.text: plan.deepspeed.precision.name}
        layouts: list[tuple[Cut, str, str | None]] = []
        for cut in cuts:
            try:
                other = resolve(request, cut, batch, folder)
            except UserError as error:
                layouts.append((cut, "", str(error)))
                continue
            if request.layouts is None and _same_run(plan, other):
                continue
            precision[cut.text] = other.deepspeed.precision.name
            layouts.append((cut, _describe(other), None))
    illegal = [f"layout {cut.text!r}: {reason}" for cut, _, reason in layouts if reason is not None]
    if illegal and request.layouts is not None:
        raise UserError("; ".join(illegal))
    optimizer = plan.training
    facts = (
        f"{plan.config.model}, {sum(p.numel() for p in plan.model.whole.parameters()):,} parameters, "
        f"{plan.parallel.layout.world_size} ranks, global batch {batch[0]}, {optimizer.total_steps} steps",
        f"{optimizer.cls.__name__}, learning rate {optimizer.lr:g}, norm clipped to {optimizer.clip:g}"
        + ("" if request.own_optimizer else " (a probe, in place of the JSON's; --own-optimizer keeps that)"),
        f"reference: {reference.text} ({_describe(plan)})",
        *(f"idle here: {flags.spelling(name)}" for name in _idle(request)),
    )
    return Survey(reference, tuple(layouts), precision, batch, issubclass(optimizer.cls, SGD), facts)


def _same_run(a: Plan, b: Plan) -> bool:
    """Whether two plans are the same run, which would be compared with itself."""
    return (a.deepspeed, a.parallel.layout, a.data.batch) == (b.deepspeed, b.parallel.layout, b.data.batch)


def _describe(plan: Plan) -> str:
    return f"{plan.in_words}, {plan.data.batch.micro_batch} x {plan.data.batch.accumulation} a replica"


def run_steps(
    plan: Plan, folder: Path | None = None
) -> tuple[tuple[tuple[float, float | None], ...], dict[str, torch.Tensor] | None]:
    """Train a plan's steps (a collective of all ranks, which have met).

    Args:
        plan: what to train.
        folder: where each step that is done is noted; None for nowhere.

    Returns:
        (loss, gradient norm before clipping) of each step, on every rank; and the whole model by timm's names on
        rank 0 (None on the others), fp32.
    """
    from ds_vit.checkpoint.holding import Holding
    from ds_vit.checkpoint.snapshot import collect_weights
    from ds_vit.engine.start import device_of
    from ds_vit.models import names_and_shapes
    from ds_vit.monitoring.throughput import Throughput
    from ds_vit.parallel.groups import build_groups
    from ds_vit.training.build import build_engine
    from ds_vit.training.inputs import InputPipeline

    groups = build_groups(plan.parallel.layout, saves=True)
    engine = build_engine(plan, device_of(plan.parallel.process.local_rank), groups)
    inputs = InputPipeline(plan, engine, Throughput()).training()
    rows = []
    for step in range(plan.training.total_steps):
        if plan.training.schedule is not None:
            engine.set_lr(plan.training.schedule.lr(step))
        result = engine.train_step(inputs)
        norm = float(result.grad_norm) if result.applied and result.grad_norm is not None else None
        rows.append((float(engine.mean(result.loss)), norm))
        if folder is not None:
            note_step(folder)
    holding = Holding(engine.zero_map, None, names_and_shapes(plan.model.whole))
    return tuple(rows), collect_weights(holding, groups.files)


def train_one(request: Request, cut: Cut, batch: tuple[int, int] | None, folder: str) -> Curve:
    """Train one layout on this rank, and compare its weights with the reference's.

    Args:
        request: what was asked for.
        cut: the layout.
        batch: as in `resolve`; None for the reference, whose weights are written.
        folder: this rank's, where rank 0 keeps the reference's weights; the steps that are done are noted there.
    """
    import torch.distributed as dist
    from safetensors.torch import save_file

    from ds_vit.engine.start import init_distributed, quiet_deepspeed, share_cores

    quiet_deepspeed(bool(request.values.get("verbose")))
    from deepspeed.accelerator import get_accelerator

    with tempfile.TemporaryDirectory(prefix="ds_vit-") as own:
        plan = resolve(request, cut, batch, Path(own))
    if get_accelerator().device_name() == "cpu":
        share_cores(plan.parallel.process.local_world_size)
    init_distributed(rendezvous(plan.parallel.process))
    rows, weights = run_steps(plan, Path(folder))
    worst = None
    if weights is not None:
        file = Path(folder) / "reference.safetensors"
        if batch is None:
            save_file({name: tensor.contiguous() for name, tensor in weights.items()}, str(file))
        else:
            worst = worst_weight(file, weights)
    dist.barrier()  # a rank that left early would close the sockets that the others still read
    return Curve(rows, worst)


def worst_weight(reference: Path, weights: Mapping[str, torch.Tensor]) -> tuple[str, float]:
    """The tensor that is farthest from the reference's: its name and |a - b| / |a|, by Euclidean norms.

    Raises:
        ValueError: the two have other names.
    """
    import torch

    from ds_vit.models.weight_files import TensorFiles

    file = TensorFiles([reference])
    if set(file) != set(weights):
        raise ValueError(f"these tensors are in one model alone: {sorted(set(file) ^ set(weights))[:5]}")
    parts, count, square = {}, 0, 0.0
    for name in file:
        if not weights[name].is_floating_point():
            continue
        a = file[name].double()
        count, square = count + a.numel(), square + float(a.square().sum())
        distance = float(torch.linalg.vector_norm(a - weights[name].double()))
        parts[name] = (distance, float(torch.linalg.vector_norm(a)), math.sqrt(a.numel()))
    floor = _SMALL_TENSOR * math.sqrt(square / count)
    relative = {
        name: distance / max(norm, floor * size) if math.isfinite(distance) else math.inf
        for name, (distance, norm, size) in parts.items()
    }
    worst = max(relative, key=lambda name: relative[name])
    return worst, relative[worst]
