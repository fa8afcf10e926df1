"""Patches of how ZeRO checks and clips by the gradient norm: no gradient and no norm is read back to the host.

Each host read empties the device's queue. The canaries in tests/engine/test_deepspeed_canaries.py count DeepSpeed's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from ds_vit.engine.patches.process import replaced

_NORM_PIECE = 2**16
"""Elements whose squares are summed in fp32."""


def clip_without_sync(optimizer: Any) -> None:
    """Have ZeRO-1, ZeRO-2 and BF16_Optimizer clip without reading the norm.

    `step` has checked the norm before. Clipping checks it again for each parameter group, and creates a constant on the
    host for each norm; both wait for the device.
    """
    from deepspeed.runtime import bf16_optimizer, utils
    from deepspeed.runtime.zero import stage_1_and_2

    if isinstance(optimizer, bf16_optimizer.BF16_Optimizer):
        replace_within_step(optimizer, bf16_optimizer, "clip_tensors_by_global_norm", clip_by_global_norm)
        replace_within_step(optimizer, utils, "mask_nan_or_inf_with_val_inplace", mask_nonfinite)
    elif hasattr(optimizer, "single_partition_of_fp32_groups"):
        optimizer.unscale_and_clip_grads = functools.partial(unscale_and_clip, optimizer)
        replace_within_step(optimizer, stage_1_and_2, "mask_nan_or_inf_with_val_inplace", mask_nonfinite)


def detect_overflow_by_norm(optimizer: Any) -> None:
    """Keep ZeRO-1 and ZeRO-2 in 16 bits from checking each gradient for overflow.

    The norm is finite exactly where all gradients are, and `step` skips the step by either. The check costs seven
    operations a parameter and one host read.
    """
    if not hasattr(optimizer, "single_partition_of_fp32_groups") or optimizer.cpu_offload:
        return  # offloaded, the flag is set while gradients are copied, at no cost
    if optimizer.compute_grad_norm:
        optimizer.check_overflow = lambda **_: None


def take_norms_together(optimizer: Any) -> None:
    """Have ZeRO-1 and ZeRO-2 take the norms of all gradients in one call.

    DeepSpeed copies each into float64 and takes its norm.
    """
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        optimizer.get_grad_norm_direct = functools.partial(grad_norm, optimizer)


def grad_norm(optimizer: Any, gradients: Iterable[torch.Tensor], params: Iterable[torch.Tensor]) -> torch.Tensor:
    """Equals `get_grad_norm_direct` of ZeRO-1 and ZeRO-2: the norm over all ranks (a collective); -1 if not finite."""
    from deepspeed.runtime.utils import is_model_parallel_parameter

    own = (g for g in gradients if not getattr(g, "_zero_padding", False))
    counted = [
        g.view(-1)
        for g, p in zip(own, params, strict=False)
        if (is_model_parallel_parameter(p) or optimizer.model_parallel_rank == 0)
        and not getattr(p, "ds_pipe_replicated", False)
    ]
    # A CPU adds squares one after the other: the norm of 2**24 elements in one piece is 7e-4 too small.
    pieces = [piece for gradient in counted for piece in gradient.split(_NORM_PIECE)]
    norms = torch._foreach_norm(pieces, 2, dtype=torch.float32) if pieces else []
    total = torch.stack([torch.zeros((), device=optimizer.device), *norms]).double().square().sum().float()
    dist.all_reduce(total, group=optimizer.dp_process_group)
    optimizer._model_parallel_all_reduce(tensor=total, op=dist.ReduceOp.SUM)
    total = total.sqrt()
    mask_nonfinite(total)
    return total


def defer_norm_check(optimizer: Any, deferred: Callable[[], bool]) -> None:
    """Keep ZeRO-1, ZeRO-2 and BF16_Optimizer from reading the norm before they call the optimizer.

    The optimizer's kernel receives `found_inf` instead, and leaves weights and state as they are.

    Args:
        optimizer: ZeRO's.
        deferred: whether to do so in this step.
    """
    from deepspeed.runtime import bf16_optimizer
    from deepspeed.runtime.zero import stage_1_and_2

    module = bf16_optimizer if isinstance(optimizer, bf16_optimizer.BF16_Optimizer) else stage_1_and_2
    original = module.is_invalid_grad_norm
    replace_within_step(optimizer, module, "is_invalid_grad_norm", lambda norm: not deferred() and original(norm))


def replace_within_step(optimizer: Any, module: Any, name: str, function: Callable[..., Any]) -> None:
    """Replace a function of a module while `optimizer.step` runs."""
    original_step = optimizer.step

    def step(*args: Any, **kwargs: Any) -> Any:
        with replaced(module, name, function):
            return original_step(*args, **kwargs)

    optimizer.step = step


def mask_nonfinite(norm: torch.Tensor, device: Any = None, val: float = -1.0) -> None:
    """Equals `deepspeed.runtime.utils.mask_nan_or_inf_with_val_inplace`; -1 marks an invalid norm."""
    norm.nan_to_num_(nan=val, posinf=val, neginf=val)


def clip_by_global_norm(
    input_tensors: Sequence[torch.Tensor],
    max_norm: float = 1.0,
    global_norm: torch.Tensor | None = None,
    mpu: Any = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Equals `deepspeed.runtime.utils.clip_tensors_by_global_norm` for a valid norm; an invalid one is never used."""
    assert global_norm is not None, "BF16_Optimizer passes the norm"
    torch._foreach_mul_(list(input_tensors), (max_norm / (global_norm + eps)).clamp(max=1.0))
    return global_norm


def unscale_and_clip(optimizer: Any, gradients: Sequence[torch.Tensor], total_norm: torch.Tensor) -> None:
    """Equals `unscale_and_clip_grads` of ZeRO-1 and ZeRO-2 for the norm of `combine_grad_norm_groups`.

    That norm is infinite where it is invalid, which sets the gradients to zero as DeepSpeed does.
    """
    scale = optimizer.loss_scale
    if optimizer.clip_grad > 0.0:
        scale = ((total_norm / scale + 1e-6) / optimizer.clip_grad).clamp(min=1.0) * scale
    elif scale == 1.0:
        return
    for gradient in gradients:
        gradient.mul_(1.0 / scale)
