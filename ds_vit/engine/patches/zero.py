"""Patches of DeepSpeed's ZeRO wrappers and of its engine, on the instance that a run uses.

Each has a canary in tests/engine/test_deepspeed_canaries.py, which fails when DeepSpeed no longer needs it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from ds_vit.engine.patches.process import replaced


def shared_grid(grid: Any) -> contextlib.AbstractContextManager[None]:
    """Have `PipelineModule` use this PipelineParallelGrid: its own would create every process group a second time."""
    from deepspeed.runtime.pipe import module

    return replaced(module, "PipelineParallelGrid", lambda *_, **__: grid)


@contextlib.contextmanager
def keep_training_mode(module: torch.nn.Module) -> Iterator[None]:
    """Keep the modules in training mode through `eval_batch`, which switches to evaluation: drop-path stays on."""
    module.train()
    module.eval = lambda: module  # type: ignore[method-assign]
    try:
        yield
    finally:
        del module.eval


def autocast_scaler(engine: Any) -> torch.amp.GradScaler | None:
    """The GradScaler of float16 autocast, which DeepSpeed keeps in the engine at stage 0, else in the optimizer."""
    own = engine.torch_autocast_z0_gradscaler
    return own if own is not None else getattr(engine.optimizer, "torch_autocast_gradscaler", None)


def match_norm_collectives(optimizer: Any, device: torch.device) -> None:
    """Let pipeline stages with offload differ in their number of parameter groups (a collective).

    ZeRO all-reduces the squared gradient norm over the stages once for each parameter group. A stage with fewer groups
    (nothing trained is decayed, or Muon leaves nothing to AdamW) would miss a collective, and the run would hang. This
    stage joins the missing collectives with zeros; the sum over all groups is the same whichever groups meet.
    """
    from deepspeed.runtime.utils import combine_grad_norm_groups

    most = torch.tensor(len(optimizer.bit16_groups), device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    missing = int(most) - len(optimizer.bit16_groups)
    original = optimizer.scaled_global_norm

    def scaled_global_norm(*args: Any, **kwargs: Any) -> torch.Tensor:
        norms = [original(*args, **kwargs)]
        for _ in range(missing):
            square = torch.zeros(1, device=device)
            optimizer._model_parallel_all_reduce(tensor=square, op=dist.ReduceOp.SUM)
            norms.append(square.sqrt().view(()).to(norms[0].device))
        return combine_grad_norm_groups(norms)

    if missing:
        optimizer.scaled_global_norm = scaled_global_norm


def grow_scale_after_step(optimizer: Any) -> None:
    """Have ZeRO-3, and ZeRO with offload, in fp16 unscale gradients by the loss scale that they were computed with.

    Every `loss_scale_window` steps DeepSpeed doubles the scale before it divides by it: that step uses half of the
    gradient, and clips it as if it were half as long.
    """
    if not getattr(optimizer, "dynamic_loss_scale", False):
        return
    original_update, original_step = optimizer._update_scale, optimizer.step
    is_due = False

    def update_scale(has_overflow: bool = False) -> None:
        nonlocal is_due
        if has_overflow:
            original_update(True)
        else:
            is_due = True

    def step(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_due
        is_due = False
        result = original_step(*args, **kwargs)
        if is_due:
            original_update(False)
        return result

    optimizer._update_scale, optimizer.step = update_scale, step


def hold_scheduler_on_skipped_steps(scheduler: Any, applied: Callable[[], bool]) -> None:
    """Keep a scheduler of the JSON at its step after a skipped step.

    DeepSpeed does so only where its wrapper of the optimizer reports an overflow, which depends on ZeRO stage and
    type: the learning rates of two layouts would differ from then on.

    Args:
        scheduler: DeepSpeed's; a call with an argument, which sets its step, passes through.
        applied: whether the current step was applied.
    """
    advance = scheduler.step

    def step(*args: Any, **kwargs: Any) -> None:
        if args or kwargs or applied():
            advance(*args, **kwargs)

    scheduler.step = step
