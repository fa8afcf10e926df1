"""One face over DeepSpeed's engine: initialise, train a step, run the model, hand out its weights.

Every workaround of DeepSpeed that is not about ZeRO's flat memory lives in this file, with a canary test each in
tests/test_deepspeed_canaries.py.
"""

from __future__ import annotations

import copy
import logging
import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

# Pixels [B, 3, H, W] in the model's type, int64 sample keys [B], targets [B] or [B, C]; all on the engine's device.
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def quiet_deepspeed(verbose: bool) -> None:
    """Keep DeepSpeed's chatter to warnings; must run before `import deepspeed` to catch what it says on import."""
    if verbose:
        return
    logger = logging.getLogger("DeepSpeed")
    if not any(isinstance(f, _WarningsOnly) for f in logger.filters):
        logger.addFilter(_WarningsOnly())
    warnings.filterwarnings("ignore", category=FutureWarning, module="deepspeed")
    warnings.filterwarnings("ignore", message=".*c10d::.*autograd kernel was not registered.*")


class _WarningsOnly(logging.Filter):
    """A filter instead of a level, because DeepSpeed sets its logger's level itself, more than once."""

    _EXPECTED = (
        "Setting accelerator to CPU",
        "untested optimizer",  # every optimizer that optim/build.py lets through is tested with ZeRO
        "unable to import 'fp_quantizer'",
    )

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return record.levelno >= logging.WARNING and not any(piece in text for piece in self._EXPECTED)


def init_distributed(arguments: Mapping[str, Any]) -> bool:
    """Meet the other ranks, unless somebody has brought us together already.

    Returns:
        Whether the process group was made here (and is to be destroyed by whoever called).
    """
    import deepspeed

    # On a CPU DeepSpeed would compile a shared-memory collective first: 50 s, and an error where ninja is missing.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    mine = not dist.is_initialized()
    deepspeed.init_distributed(**(arguments if mine else {}), verbose=False)
    return mine


def device_of(local_rank: int) -> torch.device:
    """This rank's accelerator (made current), or the CPU."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return torch.device("cpu")
    accelerator.set_device(local_rank)
    return torch.device(accelerator.device_name(local_rank))


def share_cores(local_world_size: int | None) -> None:
    """On a CPU, give each rank its share of the cores; two ranks with all cores each run several times slower."""
    if "OMP_NUM_THREADS" not in os.environ and local_world_size:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_world_size))


@dataclass
class StepResult:
    """What one optimizer step leaves on this rank; nothing here waits for the device.

    Attributes:
        loss: fp32 scalar tensor, the mean over this rank's share of the global batch, before the update.
        grad_norm: the global gradient norm before clipping; None where DeepSpeed was told not to compute it.
        applied: False where fp16 overflowed and the step was skipped.
    """

    loss: torch.Tensor
    grad_norm: float | torch.Tensor | None
    applied: bool


class PlainEngine:
    """DeepSpeed's engine around a sequential ViT: ZeRO 0 to 3, one pipeline stage.

    Args:
        model: `forward(images, keys) → logits [B, C]`.
        optimizer: over the model's trained parameters.
        loss: `loss(logits, targets) → fp32 scalar`, the mean over a micro-batch.
        config: the DeepSpeed JSON with every "auto" resolved.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        config: Mapping[str, Any],
    ) -> None:
        import deepspeed

        config = copy.deepcopy(dict(config))
        self.stage = int(config.get("zero_optimization", {}).get("stage", 0))
        self.accumulation = int(config["gradient_accumulation_steps"])
        self._clip = float(config["gradient_clipping"])
        self._loss = loss
        if self.stage == 0:
            # Without ZeRO DeepSpeed clips by a norm that it throws away; we compute it once, clip and keep it.
            config["gradient_clipping"] = 0.0
        config["zero_allow_untested_optimizer"] = True
        config["zero_force_ds_cpu_optimizer"] = False  # DeepSpeed's own CPU Adam needs a JIT build
        config.setdefault("steps_per_print", 2**63 - 1)
        self.engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, config=config, dist_init_required=False
        )
        self.has_scheduler = self.engine.lr_scheduler is not None

    @property
    def module(self) -> nn.Module:
        """The model that DeepSpeed trains."""
        return self.engine.module

    @property
    def device(self) -> torch.device:
        """Where the inputs have to be."""
        return self.engine.device

    @property
    def dtype(self) -> torch.dtype:
        """The type that the model takes its pixels in."""
        if self.engine.bfloat16_enabled():
            return torch.bfloat16
        return torch.float16 if self.engine.fp16_enabled() else torch.float32

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

    def train_step(self, inputs: Iterator[Inputs]) -> StepResult:
        """One optimizer step: `accumulation` micro-batches are taken from `inputs`."""
        self.engine.train()
        total: torch.Tensor | None = None
        norm: torch.Tensor | None = None
        for index in range(self.accumulation):
            images, keys, targets = next(inputs)
            loss = self._loss(self.engine(images, keys), targets)
            self.engine.backward(loss)
            total = loss.detach() if total is None else total + loss.detach()
            if self.stage == 0 and index == self.accumulation - 1:
                norm = self._clip_gradients()
            self.engine.step()
        assert total is not None
        applied = self.engine.was_step_applied()
        if self.engine.torch_autocast_z0_gradscaler is not None:  # it skips a step without telling the engine
            applied = applied and math.isfinite(float(norm))
        if self.stage > 0:
            norm = self.engine.get_global_grad_norm()
        return StepResult(loss=total / self.accumulation, grad_norm=norm, applied=applied)

    def _clip_gradients(self) -> torch.Tensor:
        """Norm of the reduced gradients, and clipping by it, where ZeRO does neither for us."""
        scaler = self.engine.torch_autocast_z0_gradscaler
        if scaler is not None:
            scaler.unscale_(self.engine.optimizer)
        trained = [p for p in self.engine.module.parameters() if p.grad is not None]
        norm = nn.utils.get_total_norm([p.grad for p in trained])
        if self._clip > 0:
            nn.utils.clip_grads_with_norm_(trained, self._clip, norm)
        return norm

    @torch.no_grad()
    def eval_step(self, images: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Logits [B, C] of a batch in fp32, without gradients or anything random. ZeRO-3: a collective."""
        self.engine.eval()
        return self.engine(images, keys).float()

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """The mean of a scalar over the data-parallel ranks (a collective)."""
        return self.sum(value) / dist.get_world_size()

    def sum(self, value: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over the data-parallel ranks (a collective); the argument stays as it is."""
        value = value.clone()
        dist.all_reduce(value)
        return value

    def full_state(self, state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor] | None:
        """The whole model on rank 0's CPU, fp32 masters where there are any (a collective).

        Args:
            state: names in the file → the engine's parameters and buffers, as `timm_state_dict(…, keep_vars=True)`.

        Returns:
            Names in the file → tensors on rank 0, None on the others.
        """
        import deepspeed
        from deepspeed.utils import safe_get_full_fp32_param

        first = dist.get_rank() == 0
        full: dict[str, torch.Tensor] = {}
        for name, tensor in state.items():
            if self.stage > 0 and isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                value = safe_get_full_fp32_param(tensor)
            elif hasattr(tensor, "ds_id"):
                with deepspeed.zero.GatheredParameters([tensor]):
                    value = tensor.detach().clone()
            else:
                value = tensor.detach()
            if first:
                full[name] = value.to("cpu", torch.float32 if value.is_floating_point() else value.dtype, copy=True)
        return full if first else None

    def write_events(self, events: Sequence[tuple[str, float, int]]) -> None:
        """Give figures to the monitors that the JSON switches on (rank 0 alone has any)."""
        if self.engine.monitor.enabled:
            self.engine.monitor.write_events(list(events))

    def close(self) -> None:
        """Let go of DeepSpeed's hooks and buffers."""
        self.engine.destroy()
