"""One face over DeepSpeed's engines: initialise, train a step, run the model, sum and mean over the ranks.

What DeepSpeed's engines do otherwise than we need is worked around here, in start.py, norms.py and workarounds.py, with
a canary test each in tests/engine/test_deepspeed_canaries.py.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_vit.config.deepspeed_rules import sums_are_plain
from ds_vit.engine.flat_gradients import put_where_they_are_stepped_on
from ds_vit.engine.norms import (
    clip_on_the_device,
    judge_by_the_norm_alone,
    leave_the_verdict_to_the_device,
    take_norms_at_once,
)
from ds_vit.engine.start import WarningsOnly
from ds_vit.engine.step_guard import SquareNorms, StepGuard, StepResult
from ds_vit.engine.workarounds import (
    advance_where_applied,
    ask_numactl_once,
    copy_buckets_at_once,
    copy_reduced_at_once,
    count_groups_of_other_stages,
    count_nothing_where_there_is_nothing,
    gather_around,
    import_muon_uncompiled,
    leave_gradients_of_one_rank,
    partition_at_once,
    settle_the_scale_after_the_step,
    sum_flat_gradients_where_they_are,
)
from ds_vit.models import blocks_of, set_image_size, timm_names
from ds_vit.optim.build import rules_of
from ds_vit.parallel.groups import Groups
from ds_vit.parallel.zero_map import build_zero_map
from ds_vit.tasks import Batch

# Evaluation runs this many batches at a time: through a pipeline the bubble stands against the logits kept, and between
# two such chunks a run can be stopped.
EVAL_CHUNK = 32
# What DeepSpeed's DynamicLossScaler counts.
_LOSS_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class Engine(ABC):
    """What is common to the plain and the pipeline engine.

    Args:
        model: what DeepSpeed shall train.
        optimizer: over the model's trained parameters; None for evaluation alone.
        config: the DeepSpeed JSON with every "auto" resolved.
        groups: of the run.
        input_names: the fields of a batch that the model takes, in its order; the keys follow them.
        whole_outputs: puts outputs together that are cut over classes (a collective of the tensor-parallel group).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        config: Mapping[str, Any],
        groups: Groups,
        input_names: Sequence[str] = ("images",),
        whole_outputs: Callable[[torch.Tensor], torch.Tensor] = lambda outputs: outputs,
    ) -> None:
        import deepspeed

        own: dict[str, Any] = copy.deepcopy(dict(config))
        self.stage = int(own.get("zero_optimization", {}).get("stage", 0))
        self.accumulation = int(own["gradient_accumulation_steps"])
        self.groups = groups
        self._input_names = tuple(input_names)
        self._whole_outputs = whole_outputs
        self._clip = float(own["gradient_clipping"])
        self._norm: torch.Tensor | None = None
        # What the norm of the step under way is made of: parameters, and the norms of this rank's pieces of their
        # gradients.
        self._piece_norms: list[tuple[Sequence[torch.Tensor | None], torch.Tensor]] = []
        if self.stage == 0:
            # Without ZeRO DeepSpeed throws the norm away, and in a pipeline clips by a wrong one; see _clip_gradients.
            own["gradient_clipping"] = 0.0
        if optimizer is not None and not rules_of(type(optimizer)).shown_to_deepspeed:
            own.pop("optimizer", None)
        own["zero_allow_untested_optimizer"] = True
        own["zero_force_ds_cpu_optimizer"] = False  # DeepSpeed's own CPU Adam needs a JIT build
        own.setdefault("steps_per_print", 2**63 - 1)
        arguments = {"model": model, "optimizer": optimizer, "config": own, **self._initialize_arguments()}
        # BF16_Optimizer prints its memory line by line, past every log level.
        quiet = any(isinstance(f, WarningsOnly) for f in logging.getLogger("DeepSpeed").filters)
        import_muon_uncompiled()
        with contextlib.redirect_stdout(io.StringIO()) if quiet else contextlib.nullcontext():
            self.engine, *_ = deepspeed.initialize(dist_init_required=False, **arguments)
        if self.stage == 3:
            ask_numactl_once()
            gather_around(self.engine.optimizer, blocks_of(self.engine.module))
        plain_sums = sums_are_plain(own)
        if self.stage == 0:
            self._clip_before_the_step(plain_sums)
        if optimizer is not None:
            self._adapt_the_optimizer(plain_sums)

    def _clip_before_the_step(self, plain_sums: bool) -> None:
        """Without ZeRO: clip by the norm over all stages, and sum without DeepSpeed's copies."""
        copy_reduced_at_once(self.engine)
        if self.groups.layout.dp == 1 and plain_sums:
            leave_gradients_of_one_rank(self.engine)
        take_step = self.engine._take_model_step

        def clip_and_take_step(*args: Any, **kwargs: Any) -> None:
            self._norm = self._clip_gradients()
            # torch's GradScaler then leaves an optimizer that is not fused out, and tells nobody.
            if self.engine.torch_autocast_z0_gradscaler is not None and not math.isfinite(float(self._norm)):
                self.guard.overflowed(self.zero_map.gradients(1.0))
            take_step(*args, **kwargs)

        self.engine._take_model_step = clip_and_take_step

    def _adapt_the_optimizer(self, plain_sums: bool) -> None:
        """Have DeepSpeed's wrapper of the optimizer sum, clip and judge as we need it, and guard its steps."""
        groups, optimizer = self.groups, self.engine.optimizer
        if plain_sums:
            sum_flat_gradients_where_they_are(self.engine)
        if groups.layout.pp > 1:
            count_groups_of_other_stages(optimizer, self.device)
        if groups.grid is not None:
            count_nothing_where_there_is_nothing(optimizer, self.device)
        settle_the_scale_after_the_step(optimizer)
        judge_by_the_norm_alone(optimizer)
        clip_on_the_device(optimizer)
        take_norms_at_once(optimizer, self._keep_norms)
        alone = groups.layout.pp == groups.layout.tp == self.accumulation == 1
        in_the_order_of_the_model = self.engine.module.parameters()
        if not (alone and put_where_they_are_stepped_on(optimizer, in_the_order_of_the_model)):
            copy_buckets_at_once(optimizer)
        partition_at_once(optimizer)
        self.zero_map = build_zero_map(self.engine, groups, timm_names(self.engine.module))
        device_judges = self._device_can_judge()
        if device_judges and self.stage > 0:
            leave_the_verdict_to_the_device(optimizer, lambda: self.guard.device_judges)
        self.guard = StepGuard(
            self.zero_map,
            self._current_norm,
            self._current_loss,
            self.clipped_by,
            judged=self._norm_is_judged(),
            square_norms=self._square_norms if device_judges else None,
        )
        if self.engine.lr_scheduler is not None:
            advance_where_applied(self.engine.lr_scheduler, lambda: self.guard.rejection is None)

    def _initialize_arguments(self) -> dict[str, Any]:
        return {}

    @property
    def module(self) -> nn.Module:
        """The part of the model that DeepSpeed trains on this rank."""
        return self.engine.module

    @property
    def device(self) -> torch.device:
        """Where the inputs have to be."""
        return self.engine.device

    @property
    def counts_rows(self) -> bool:
        """Whether this rank's rows count in an evaluation: those of the last stage, once a tensor-parallel group."""
        return self.groups.tp_rank == 0

    @property
    def dtype(self) -> torch.dtype:
        """The type that the model takes its pixels in."""
        if self.engine.bfloat16_enabled():
            return torch.bfloat16
        return torch.float16 if self.engine.fp16_enabled() else torch.float32

    def take_images_of(self, size: int, patch_size: tuple[int, int]) -> None:
        """Let the model take square images of another size from the next batch on, in training and evaluation.

        Args:
            size: pixels; for a model that `check_sizes` accepts.
            patch_size: the model's.
        """
        set_image_size(self.module, size, patch_size)

    def set_lr(self, lr: float) -> None:
        """Set the base learning rate of the next step (not to be called where the JSON has a scheduler)."""
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr

    def lr(self) -> float:
        """The base learning rate of the next step."""
        return float(self.engine.optimizer.param_groups[0]["lr"])

    def loss_scale(self) -> float:
        """The loss scale of the next step; 1 where there is none."""
        scaler = self.engine.torch_autocast_z0_gradscaler
        if scaler is not None:
            return float(scaler.get_scale())
        if not self.engine.fp16_enabled():
            return 1.0
        return float(self.engine.optimizer.cur_scale)

    def progress(self) -> dict[str, Any]:
        """What the engine knows beside tensors and must not forget: plain numbers, the same on every rank."""
        scaler = self.engine.torch_autocast_z0_gradscaler
        scheduler = self.engine.lr_scheduler
        out: dict[str, Any] = {"lr": self.lr(), "skipped_steps": int(self.engine.skipped_steps)}
        if scaler is not None:
            out["loss_scaler"] = {key: value for key, value in scaler.state_dict().items() if value is not None}
        elif self.engine.fp16_enabled():
            own = vars(self.engine.optimizer.loss_scaler)
            out["loss_scaler"] = {key: own[key] for key in _LOSS_SCALER if key in own}
        if scheduler is not None:
            out["lr_scheduler"] = int(scheduler.last_batch_iteration)
        return out

    def restore_progress(self, progress: Mapping[str, Any], step: int) -> None:
        """Take up what `progress` gave; a loss scale is taken up where both runs have one of the same kind.

        Args:
            progress: from a checkpoint.
            step: optimizer steps that are done.
        """
        engine = self.engine
        engine.global_steps = step
        engine.global_samples = step * engine.train_batch_size()
        engine.skipped_steps = int(progress["skipped_steps"])
        saved = progress.get("loss_scaler") or {}
        scaler = engine.torch_autocast_z0_gradscaler
        if scaler is not None:
            if "scale" in saved:
                scaler.load_state_dict({**scaler.state_dict(), **saved})
        elif engine.fp16_enabled() and engine.optimizer.loss_scaler.dynamic:
            for key in _LOSS_SCALER:
                if key in saved:
                    setattr(engine.optimizer.loss_scaler, key, saved[key])
        # The JSON's scheduler gives the rate itself: where the checkpoint's had other settings or was the flags', the
        # saved rate is not this run's.
        if engine.lr_scheduler is not None and (counted := progress.get("lr_scheduler", step - 1)) >= 0:
            engine.lr_scheduler.step(counted)
        else:
            self.set_lr(progress["lr"])

    @abstractmethod
    def train_step(self, batches: Iterator[Batch], meanwhile: Callable[[], object] = lambda: None) -> StepResult:
        """One optimizer step: `accumulation` micro-batches are taken from `batches`.

        Args:
            batches: of this rank.
            meanwhile: called before anything of this step changes the weights, if it can be while the device has work:
                the moment to ask for the verdict on the step before, and to leave training by an exception.
        """

    @abstractmethod
    def forward_batches(
        self, batches: Iterator[Batch], num_batches: int, *, features: bool = False
    ) -> Iterator[tuple[torch.Tensor, Batch]]:
        """Run the model without gradients or anything random (a collective; to be iterated to its end).

        Args:
            batches: this rank's evaluation batches, all of one shape.
            num_batches: how many; the same on every rank.
            features: let the last layer give the images' features (see `giving_features`) in place of its outputs.

        Yields:
            (outputs of the last layer in fp32, batch) of each batch, on the ranks whose rows count: those of the
            last pipeline stage, one of each tensor-parallel group.
        """

    def _whole(self, outputs: torch.Tensor, features: bool) -> torch.Tensor:
        """Outputs of the last layer in fp32, put together where they are cut, as features are not."""
        return (outputs if features else self._whole_outputs(outputs)).float()

    def _inputs(self, batch: Batch) -> tuple[torch.Tensor | None, ...]:
        """What the first layer takes; a rank whose stage is another has the keys alone."""
        return (*(batch.get(name) for name in self._input_names), batch["keys"])

    def _result(self, loss: torch.Tensor) -> StepResult:
        norm = self._norm if self.stage == 0 else self.engine.get_global_grad_norm()
        return StepResult(loss, norm, self.guard.verdict(applied=self.engine.was_step_applied()))

    def _current_norm(self) -> torch.Tensor | float | None:
        """The global gradient norm before clipping, while the optimizer takes its step."""
        return self._norm if self.stage == 0 else self.engine.optimizer._global_grad_norm

    def _device_can_judge(self) -> bool:
        """Whether a step whose norm is not finite can be turned down without asking the host.

        It can where the optimizer's kernel takes a flag for it, and nobody else has to know before the next step: no
        loss scale, no scheduler of DeepSpeed's, no other pipeline stage. ZeRO-3 asks on its own.
        """
        engine, optimizer = self.engine, self.engine.optimizer
        return (
            self.device.type in ("cpu", "cuda")
            and self.groups.layout.pp == 1
            and self.stage < 3
            and getattr(self.zero_map.base, "_step_supports_amp_scaling", False)
            and getattr(optimizer, "compute_grad_norm", True)
            and not getattr(optimizer, "cpu_offload", False)
            and not engine.fp16_enabled()
            and engine.torch_autocast_z0_gradscaler is None
            and engine.lr_scheduler is None
        )

    def _keep_norms(self, parameters: Sequence[torch.Tensor | None], norms: torch.Tensor) -> None:
        if self.guard.device_judges:
            self._piece_norms.append((parameters, norms))

    def _square_norms(self) -> SquareNorms:
        """What the norm of the step under way is made of, to be read later: each gradient is one rank's to count."""
        kept, self._piece_norms = self._piece_norms, []
        # Without ZeRO, and with BF16_Optimizer, every data-parallel rank has the whole gradient.
        counts = hasattr(self.engine.optimizer, "single_partition_of_fp32_groups") or self.groups.dp_rank == 0

        def read() -> Iterator[tuple[str, float]]:
            timm = timm_names(self.module)
            names = {id(parameter): timm[name] for name, parameter in self.module.named_parameters()}
            for parameters, norms in kept if counts else ():
                for parameter, square in zip(parameters, norms.double().square().tolist(), strict=True):
                    if parameter is not None:
                        yield names[id(parameter)], square

        return read

    def _norm_is_judged(self) -> bool:
        """Whether DeepSpeed reads the norm, and skips the step where it is not finite, before it calls the optimizer.

        It does but for bf16 in ZeRO-1 and ZeRO-2 under `check_grad_overflow: false`.
        """
        optimizer = self.engine.optimizer
        return self.stage > 0 and (getattr(optimizer, "check_grad_overflow", True) or optimizer.dtype != torch.bfloat16)

    @abstractmethod
    def _current_loss(self) -> tuple[torch.Tensor | None, int]:
        """Sum and number of this rank's losses, while the optimizer takes its step; (None, 0) where it has none."""

    def clipped_by(self) -> float:
        """What clipping multiplies the gradients of the step under way by."""
        norm = self._current_norm()
        if self._clip <= 0 or norm is None:
            return 1.0
        return min(1.0, self._clip / (float(norm) + 1e-6))

    def _clip_gradients(self) -> torch.Tensor:
        """Norm of the reduced gradients, and clipping by it, where ZeRO does neither for us.

        A tensor slice counts on its own rank, what the ranks of a tensor-parallel group hold in common counts once.
        """
        scaler = self.engine.torch_autocast_z0_gradscaler
        if scaler is not None:
            scaler.unscale_(self.engine.optimizer)
        trained = [p for p in self.engine.module.parameters() if p.grad is not None]
        first = self.groups.tp_rank == 0
        counted = [p for p in trained if first or getattr(p, "tensor_model_parallel", False)]
        grads = [p.grad for p in counted]
        norms = torch.stack(torch._foreach_norm(grads, 2)) if grads else torch.zeros(0, device=self.device)
        self._keep_norms(counted, norms)
        norm = torch.linalg.vector_norm(norms)
        if self.groups.replica is not None:
            square = norm.square()
            dist.all_reduce(square, group=self.groups.replica)
            norm = square.sqrt()
        if self._clip > 0:
            nn.utils.clip_grads_with_norm_(trained, self._clip, norm)
        return norm

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """The mean of a scalar over all ranks (a collective)."""
        return self.sum(value) / dist.get_world_size()

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over all ranks (a collective); the argument stays as it is."""
        value = value.clone()
        dist.all_reduce(value)
        return value

    def write_events(self, events: Sequence[tuple[str, float, int]]) -> None:
        """Give figures to the monitors that the JSON switches on (rank 0 alone has any)."""
        if self.engine.monitor.enabled:
            self.engine.monitor.write_events(list(events))

    def close(self) -> None:
        """Let go of DeepSpeed's hooks and buffers."""
        self.engine.destroy()
