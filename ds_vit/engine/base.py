"""The interface of both engines around DeepSpeed: initialise, train a step, run the model, reduce over the ranks.

Workarounds for DeepSpeed are in this module, start.py and patches.py; each has a canary test in
tests/engine/test_deepspeed_canaries.py.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_vit.config.deepspeed_keys import DeepSpeedJson
from ds_vit.device import has_fused_step
from ds_vit.engine.flat_gradient import FlatGradient
from ds_vit.engine.graph import StepGraphs
from ds_vit.engine.patches import (
    autocast_scaler,
    hold_loss_scale,
    hold_scheduler_on_skipped_steps,
    import_muon_uncompiled,
    sum_norm_once,
)
from ds_vit.engine.step_guard import StepGuard, StepOutcome, StepResult
from ds_vit.engine.zero3 import ZeroUnits
from ds_vit.models.layers import Layer
from ds_vit.models.sequential import SizeSwitch, timm_names
from ds_vit.optim.build import rules_of
from ds_vit.optim.ema import TeacherAverage
from ds_vit.optim.rate_factors import RateFactors
from ds_vit.parallel.groups import Groups, gather_rows
from ds_vit.parallel.tensor.class_parallel import gather_logits
from ds_vit.parallel.tensor.collectives import TensorParallel
from ds_vit.parallel.zero_map import FlatGroup, ZeroMap, build_zero_map, flat_groups
from ds_vit.tasks.metrics import Batch
from ds_vit.tasks.task import StepContext, Task

Forward = Callable[[StepContext, Batch], torch.Tensor]
"""(context of this rank, micro-batch) → outputs [B, …]."""

# Evaluation runs this many batches at a time: trades pipeline bubble against logits held. Between two such chunks a run
# can be stopped.
EVAL_CHUNK = 32
# The counters of DeepSpeed's DynamicLossScaler.
_LOSS_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


@dataclass(kw_only=True, eq=False)
class RankContext(StepContext):
    """Base of both engines' contexts.

    Attributes:
        zero_map: of this rank; None in evaluation only.
        teachers: of the task, in training, which a checkpoint holds in fp32; None without any.
    """

    zero_map: ZeroMap | None = None
    teachers: TeacherAverage | None = None

    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """As `StepContext.gather`."""
        return gather_rows(rows, self.groups.dp)

    def masters(self, names: Sequence[str]) -> torch.Tensor:
        """As `StepContext.masters`."""
        assert self.zero_map is not None, "there is no optimizer"
        return self.zero_map.values(names)

    def update_teachers(self, momentum: float) -> None:
        """As `StepContext.update_teachers`."""
        assert self.teachers is not None, "the task has no teachers"
        self.teachers.update_by(momentum)


class Engine(ABC):
    """Base of the plain and the pipeline engine.

    Args:
        model: that DeepSpeed trains.
        optimizer: over the model's trained parameters; None for evaluation only.
        task: defines the training step.
        json: without "auto".
        groups: of the run.
        class_parallel: the ranks over which the outputs are sharded by class, or None.
        write_initial: passes initial values in fp32 to `ZeroMap.set_values`; None where the model has them in fp32.

    Attributes:
        context: of the task's steps.
        rates: factors on the learning rate by parameter; set by the builder, for training.
        graphs: of the passes of a micro-batch; None where all run eagerly.
        loss_scale: of the last step's gradients; 1 where there is none.
        on_close: restores the process-wide state that the run changed.
    """

    rates: RateFactors
    graphs: StepGraphs | None = None
    loss_scale: float = 1.0
    _settle: Callable[[], object] = staticmethod(lambda: None)
    """In fp16 changes the loss scale after the last step, which the device may have to end first."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        task: Task,
        json: DeepSpeedJson,
        *,
        groups: Groups,
        class_parallel: TensorParallel | None = None,
        write_initial: Callable[[Callable[[Mapping[str, torch.Tensor]], None]], None] | None = None,
    ) -> None:
        import deepspeed

        self.stage, own = json.zero_stage, json.dump()
        self.accumulation = json.gradient_accumulation_steps or 1
        self.groups = groups
        self._task = task
        self._sizes: SizeSwitch | None = None
        self._input_names = [field.name for field in task.training_fields if field.stage == "first"]
        self._clip = json.gradient_clipping or 0.0
        own_sums = optimizer is not None and json.flat_gradients
        if own_sums:  # for another type than the model's, DeepSpeed has other wrappers, and another copy of gradients
            own.get("data_types", {}).pop("grad_accum_dtype", None)
            if self.stage == 2:  # with it DeepSpeed's constructor rejects factors, which the flat gradient applies
                own["zero_optimization"]["reduce_scatter"] = False
        if self.stage == 0:
            # Without ZeRO DeepSpeed discards the norm, and in a pipeline clips by a wrong one: the flat gradient clips.
            own["gradient_clipping"] = 0.0
        if optimizer is not None and not rules_of(type(optimizer)).shown_to_deepspeed:
            own.pop("optimizer", None)
        own["zero_allow_untested_optimizer"] = True
        if self.stage == 3:
            own["zero_optimization"]["contiguous_gradients"] = False  # a bucket that would not be used
        own["zero_force_ds_cpu_optimizer"] = False  # DeepSpeed's own CPU Adam needs a JIT build
        if json.steps_per_print is None:
            own["steps_per_print"] = 2**63 - 1
            # DeepSpeed's timer waits for the device twice per step, and only that print reads it.
            own.setdefault("timers", {"throughput": {"enabled": False}})
        import_muon_uncompiled()
        self.on_close = contextlib.ExitStack()
        mpu = groups.grid if groups.layout.pp == 1 else None  # a pipeline brings its grid
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=own, mpu=mpu, dist_init_required=False
        )
        self._grad_scaler, self._scales = autocast_scaler(self.engine), self.engine.fp16_enabled()
        self.units = ZeroUnits(self.engine, trains=optimizer is not None) if self.stage == 3 else None
        self.flat = FlatGradient(self.engine, groups, json) if own_sums else None
        self._sums = self.flat or self.units
        if self._sums is not None:
            self.on_close.callback(self._sums.close)
        if optimizer is not None:
            self._adapt_the_optimizer()
            if write_initial is not None:
                write_initial(self.zero_map.set_values)
        shared = {"groups": groups, "device": self.device, "accumulation": self.accumulation}
        shared["zero_map"] = self.zero_map if optimizer is not None else None
        self.context = self._make_context(model, trains=optimizer is not None, class_parallel=class_parallel, **shared)
        task.setup(self.context)

    @abstractmethod
    def _make_context(self, model: nn.Module, *, trains: bool, **shared: Any) -> RankContext:
        """The context of the task's steps; `shared` are the attributes of `RankContext`."""

    def _adapt_the_optimizer(self) -> None:
        """Patch reduction, clipping and overflow checks of DeepSpeed's optimizer, and guard its steps."""
        groups, optimizer, sums = self.groups, self.engine.optimizer, self._sums
        if self.flat is not None:
            flats: Sequence[FlatGroup] = self.flat.flats
        else:
            if groups.layout.pp > 1:
                sum_norm_once(optimizer)
            flats = flat_groups(optimizer) if self.stage < 3 else ()
        names, shares = timm_names(self.engine.module), None if sums is None else sums.shares
        self.zero_map = build_zero_map(self.engine, groups, names, self._task.is_fixed, flats, shares)
        decides = sums is not None and self._device_can_decide()
        if sums is not None:
            sums.count(self.zero_map)
        if self.units is not None and decides:
            self.units.defer_norm_check(lambda: self.guard.device_decides)
        self.guard = StepGuard(
            self.zero_map,
            self._current_norm,
            self._current_loss,
            self.clipped_by,
            checked=self._norm_is_checked(),
            square_norms=sums.square_norms if sums is not None and decides else None,
        )
        if self.flat is not None:
            self.flat.guard = self.guard
        if self.stage > 0:
            self._change_scale = hold_loss_scale(optimizer, self.guard.overflowed, lambda: self._settle())
        self._keep_bounds()
        if self.engine.lr_scheduler is not None:
            hold_scheduler_on_skipped_steps(self.engine.lr_scheduler, lambda: self.guard.skipped is None)

    def _keep_bounds(self) -> None:
        """Clamp the task's bounded parameters after each update; ZeRO then copies them to the model."""
        bounds = self._task.bounds
        bounded = [
            (view, bounds[segment.name])
            for shard in self.zero_map.shards
            for segment, view in zip(shard.segments, shard.views(), strict=True)
            if segment.name in bounds
        ]

        def clamp(*_: Any) -> None:
            for view, (low, high) in bounded:
                view.clamp_(low, high)

        if bounded:
            self.zero_map.base.register_step_post_hook(clamp)

    @property
    def module(self) -> nn.Module:
        """This rank's part of the model."""
        return self.engine.module

    @property
    def device(self) -> torch.device:
        """The device of the inputs."""
        return self.engine.device

    @property
    def counts_rows(self) -> bool:
        """Whether this rank's rows count in an evaluation: those of the last stage, once per tensor-parallel group."""
        return self.groups.tp_rank == 0

    @property
    def dtype(self) -> torch.dtype:
        """The type of the model's images."""
        return self.engine.get_data_types()[0]

    def take_images_of(self, size: int, patch_size: tuple[int, int]) -> None:
        """Set the size of square images from the next batch on, in training and evaluation.

        Args:
            size: pixels; for a model that `check_sizes` accepts.
            patch_size: the model's.
        """
        if self._sizes is None:  # it keeps the tables of each size at their addresses, which graphs read
            self._sizes = SizeSwitch([child for child in self.module.modules() if isinstance(child, Layer)], patch_size)
            if self.graphs is not None:
                self.graphs.clear()
        self._sizes.set(size)

    def begin_step(self, step: int, schedules: Mapping[str, float], held: frozenset[str] = frozenset()) -> None:
        """Set the scheduled values of the next step.

        Args:
            step: its number, counted from 1.
            schedules: of `Task.schedules`.
            held: of `Task.held_names`.
        """
        self.rates.hold(held)
        if self._grad_scaler is not None:
            self.loss_scale = float(self._grad_scaler.get_scale())
        if "weight_decay" in schedules:
            for group in self.engine.optimizer.param_groups:
                if group["weight_decay"] > 0:
                    group["weight_decay"] = schedules["weight_decay"]
        self.context.step, self.context.schedules = step, schedules

    def set_lr(self, lr: float) -> None:
        """Set the base learning rate of the next step (not to be called where the JSON has a scheduler)."""
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr

    def lr(self) -> float:
        """The base learning rate of the next step."""
        return float(self.engine.optimizer.param_groups[0]["lr"])

    def progress(self) -> dict[str, Any]:
        """The engine's state without tensors, for a checkpoint: plain numbers, the same on every rank."""
        self._settle()
        scaler = self._grad_scaler
        out: dict[str, Any] = {"lr": self.lr(), "skipped_steps": int(self.engine.skipped_steps)}
        if scaler is not None:
            out["loss_scaler"] = {key: value for key, value in scaler.state_dict().items() if value is not None}
        elif self.engine.fp16_enabled():
            own = vars(self.engine.optimizer.loss_scaler)
            out["loss_scaler"] = {key: own[key] for key in _LOSS_SCALER if key in own}
        if self.engine.lr_scheduler is not None:
            out["lr_scheduler"] = int(self.engine.lr_scheduler.last_batch_iteration)
        return out

    def restore_progress(self, progress: Mapping[str, Any], step: int, saved_step: int) -> None:
        """Restore what `progress` gave; a loss scale is restored if both runs have one of the same kind.

        Args:
            progress: from a checkpoint.
            step: optimizer steps that are done, counted in this run's global batches.
            saved_step: the same in the checkpoint's, which may be of another size.
        """
        engine = self.engine
        engine.global_steps = step
        engine.global_samples = step * engine.train_batch_size()
        engine.skipped_steps = int(progress["skipped_steps"])
        saved = progress.get("loss_scaler") or {}
        scaler = self._grad_scaler
        if scaler is not None and "scale" in saved:
            scaler.load_state_dict({**scaler.state_dict(), **saved})
        elif engine.fp16_enabled() and engine.optimizer.loss_scaler.dynamic:
            vars(engine.optimizer.loss_scaler).update({key: saved[key] for key in _LOSS_SCALER if key in saved})
        # The JSON's scheduler gives the rate itself: where the checkpoint's had other settings or was the flags', the
        # saved rate is not this run's.
        counted = progress.get("lr_scheduler", saved_step - 1) + step - saved_step
        if engine.lr_scheduler is not None and counted >= 0:
            engine.lr_scheduler.step(counted)
        else:
            self.set_lr(progress["lr"])

    @abstractmethod
    def train_step(self, batches: Iterator[Batch], meanwhile: Callable[[], object] = lambda: None) -> StepResult:
        """One optimizer step: `accumulation` micro-batches are taken from `batches`.

        Args:
            batches: of this rank.
            meanwhile: called before this step changes the weights, if possible while the device has work. It reads the
                outcome of the step before, and may leave training by an exception.
        """

    @abstractmethod
    def forward_batches(
        self, batches: Iterator[Batch], num_batches: int, *, features: bool = False, run: Forward | None = None
    ) -> Iterator[tuple[torch.Tensor, Batch]]:
        """Run the model without gradients or anything random (a collective; to be iterated to its end).

        Args:
            batches: this rank's evaluation batches, all of one shape.
            num_batches: how many; the same on every rank.
            features: the last layer returns the images' features (see `giving_features`) in place of its outputs.
            run: returns the outputs, in place of `Task.outputs`.

        Yields:
            (outputs of the last layer in fp32, batch) of each batch, on the ranks whose rows count: those of the
            last pipeline stage, one of each tensor-parallel group.
        """

    def _whole(self, outputs: torch.Tensor, features: bool) -> torch.Tensor:
        """Outputs of the last layer in fp32, gathered where they are sharded over classes; features never are."""
        tp = self.context.class_parallel
        if tp is not None and not features:
            outputs = gather_logits(outputs, num_classes=self._task.num_classes, tp=tp)
        return outputs.float()

    def _inputs(self, batch: Batch) -> tuple[torch.Tensor | None, ...]:
        """The towers' inputs without the keys, the main one's first; None on the other pipeline stages."""
        return tuple(batch.get(name) for name in self._input_names)

    def _result(self, loss: torch.Tensor) -> StepResult:
        outcome = self.guard.outcome(applied=self.engine.was_step_applied())
        if not self._scales:
            return StepResult(loss, self._current_norm(), outcome)
        is_late, self.loss_scale = self.guard.late is not None, float(self.engine.optimizer.cur_scale)

        @cache
        def settle() -> StepOutcome:
            """The outcome; the loss scale follows it before the next loss is scaled."""
            done = outcome()
            overflows = not done.applied and (done.skipped is None or done.skipped.reason == "nonfinite")
            self._change_scale(overflows)  # may refuse a lower scale
            if is_late and overflows:  # DeepSpeed has counted the others
                self.engine.skipped_steps += 1
            return done

        self._settle = settle
        if not is_late:
            settle()
        return StepResult(loss, self._current_norm(), settle)

    def _current_norm(self) -> torch.Tensor | float | None:
        """The global gradient norm of this step before clipping."""
        return self.engine.optimizer._global_grad_norm if self.flat is None else self.flat.grad_norm

    def _device_can_decide(self) -> bool:
        """Whether the device can skip a step whose norm is not finite, without a number read on the host.

        The optimizer's kernel must take a flag for it, and nothing else may depend on the outcome before the next step:
        no GradScaler, no scheduler of DeepSpeed's, no other pipeline stage.
        """
        engine, optimizer = self.engine, self.engine.optimizer
        return (
            has_fused_step(self.device)
            and self.groups.layout.pp == 1
            and getattr(self.zero_map.base, "_step_supports_amp_scaling", False)
            and getattr(optimizer, "compute_grad_norm", True)
            and not getattr(optimizer, "offload_optimizer", False)
            and self._grad_scaler is None
            and engine.lr_scheduler is None
        )

    def _norm_is_checked(self) -> bool:
        """Whether DeepSpeed reads the norm, and skips the step where it is not finite, before it calls the optimizer.

        It does at ZeRO-3 and with offload, except for bf16 under `check_grad_overflow: false`. FlatGradient does under
        a loss scale.
        """
        engine, optimizer = self.engine, self.engine.optimizer
        if self.flat is not None:
            return engine.fp16_enabled() or self._grad_scaler is not None
        return getattr(optimizer, "check_grad_overflow", True) or optimizer.dtype != torch.bfloat16

    @abstractmethod
    def _current_loss(self) -> tuple[torch.Tensor | None, int]:
        """Sum and number of this rank's losses, while the optimizer takes its step; (None, 0) where it has none."""

    def clipped_by(self) -> float:
        """The factor by which clipping multiplies the gradients of the step under way."""
        norm = self._current_norm()
        if self._clip <= 0 or norm is None:
            return 1.0
        return min(1.0, self._clip / (float(norm) + 1e-6))

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """The mean of a scalar over all ranks (a collective)."""
        return self.sum(value) / dist.get_world_size()

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over all ranks (a collective); the argument stays as it is."""
        value = value.clone()
        dist.all_reduce(value)
        return value

    def write_events(self, events: Sequence[tuple[str, float, int]]) -> None:
        """Write figures to the monitors that the JSON enables (on rank 0 only)."""
        self.engine.monitor.write_events(list(events))

    def close(self) -> None:
        """Release DeepSpeed's hooks and buffers, and restore the process-wide state that the run changed."""
        self.engine.destroy()
        self.on_close.close()
