"""Ways around DeepSpeed 0.19.8 where it takes gradient norms, judges them and clips by them.

Each has a canary in tests/engine/test_deepspeed_canaries.py, which says when it can go.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

Keep = Callable[[Sequence[torch.Tensor | None], torch.Tensor], object]
"""Takes parameters (None: nobody's) and the norms [P] of what this rank has of their gradients, not yet clipped."""


def clip_on_the_device(optimizer: Any) -> None:
    """Have ZeRO-1, ZeRO-2 and BF16_Optimizer clip without reading the norm.

    Whether the norm is finite `step` has asked already, or the device judges; their clipping asks again for each group
    of parameters, or whether there is anything to clip, and the device's queue runs empty each time. A coefficient of 1
    says the same.
    """
    from deepspeed.runtime import bf16_optimizer

    if isinstance(optimizer, bf16_optimizer.BF16_Optimizer):
        bf16_optimizer.clip_tensors_by_global_norm = clip_by_global_norm
    elif hasattr(optimizer, "single_partition_of_fp32_groups"):
        optimizer.unscale_and_clip_grads = functools.partial(unscale_and_clip, optimizer)


def judge_by_the_norm_alone(optimizer: Any) -> None:
    """Keep ZeRO-1 and ZeRO-2 in 16 bits from looking at each gradient before they look at their norm.

    Seven operations a parameter and one more wait find what the norm says as well: it is finite where all of them are,
    and `step` skips the step, and settles the loss scale, by either alike.
    """
    if not hasattr(optimizer, "single_partition_of_fp32_groups") or optimizer.cpu_offload:
        return  # offloaded, the flag is raised while gradients are copied, which costs nothing here
    if optimizer.compute_grad_norm:
        optimizer.check_overflow = lambda **_: None


def take_norms_at_once(optimizer: Any, keep: Keep) -> None:
    """Have ZeRO take the norms of a group's gradients in one operation in place of two a parameter.

    Args:
        optimizer: ZeRO's.
        keep: gets what each norm is made of.
    """
    from deepspeed.runtime import bf16_optimizer

    if isinstance(optimizer, bf16_optimizer.BF16_Optimizer):
        parameters = {
            id(gradient): parameter
            for gradients, group in zip(optimizer.fp32_groups_gradients, optimizer.bf16_groups, strict=True)
            for gradient, parameter in zip(gradients, group, strict=True)
        }
        norm = functools.partial(grad_norm_of_bf16, parameters, keep)
        _within_step(optimizer, bf16_optimizer, "get_global_norm_of_tensors", norm)
    elif hasattr(optimizer, "get_grad_norm_direct"):
        by_stage = grad_norm if hasattr(optimizer, "single_partition_of_fp32_groups") else grad_norm_of_stage3
        optimizer.get_grad_norm_direct = functools.partial(by_stage, optimizer, keep=keep)


def leave_the_verdict_to_the_device(optimizer: Any, wanted: Callable[[], bool]) -> None:
    """Keep ZeRO-1, ZeRO-2 and BF16_Optimizer from reading the norm before they call the optimizer, which then judges.

    A norm that is not finite leaves the weights as they are (`found_inf`), and all that follows repeats what was.

    Args:
        optimizer: ZeRO's.
        wanted: whether they shall be kept from it in this step.
    """
    from deepspeed.runtime import bf16_optimizer
    from deepspeed.runtime.zero import stage_1_and_2

    module = bf16_optimizer if isinstance(optimizer, bf16_optimizer.BF16_Optimizer) else stage_1_and_2
    own_question = module.is_invalid_grad_norm
    _within_step(optimizer, module, "is_invalid_grad_norm", lambda norm: not wanted() and own_question(norm))


def _within_step(optimizer: Any, module: Any, name: str, function: Callable[..., Any]) -> None:
    """Have `optimizer.step` find another function under a name of its module."""
    own_step, own_function = optimizer.step, getattr(module, name)

    def step(*args: Any, **kwargs: Any) -> Any:
        setattr(module, name, function)
        try:
            return own_step(*args, **kwargs)
        finally:
            setattr(module, name, own_function)

    optimizer.step = step


def grad_norm(
    optimizer: Any,
    gradients: Iterable[torch.Tensor],
    parameters: Iterable[torch.Tensor],
    norm_type: int = 2,
    *,
    keep: Keep = lambda parameters, norms: None,
) -> torch.Tensor:
    """What `get_grad_norm_direct` of ZeRO-1 and ZeRO-2 gives for the 2-norm (a collective)."""
    from deepspeed.runtime.zero import stage_1_and_2 as zero

    assert norm_type == 2, norm_type
    whole = (gradient for gradient in gradients if not getattr(gradient, "_zero_padding", False))
    counted = [
        (parameter, gradient.detach())
        for gradient, parameter in zip(whole, parameters, strict=False)  # what is left over is padding
        if not getattr(parameter, "ds_pipe_replicated", False)
        and (zero.is_model_parallel_parameter(parameter) or optimizer.model_parallel_rank == 0)
    ]
    square = _sum_of_squares(optimizer, keep, counted).float()
    return _joined(optimizer, square, optimizer.dp_process_group)


def grad_norm_of_stage3(
    optimizer: Any,
    gradients: Iterable[torch.Tensor],
    parameters: Sequence[torch.Tensor],
    norm_type: int = 2,
    *,
    keep: Keep = lambda parameters, norms: None,
) -> torch.Tensor:
    """What `get_grad_norm_direct` of ZeRO-3 gives for the 2-norm (a collective)."""
    from deepspeed.runtime.zero import stage3 as zero

    assert norm_type == 2, norm_type
    optimizer._assert_same_partition_group(parameters)
    group = optimizer._get_param_partition_group(parameters[0])
    everywhere = optimizer._grad_norm_counts_every_rank(parameters, group)
    counted = [
        (parameter, gradient.to(optimizer.device))
        for gradient, parameter in zip(gradients, parameters, strict=False)
        if everywhere or zero.is_model_parallel_parameter(parameter) or optimizer.model_parallel_rank == 0
    ]
    square = _sum_of_squares(optimizer, keep, counted)
    return _joined(optimizer, square, group, model_parallel=not everywhere)


def grad_norm_of_bf16(
    parameters: Mapping[int, torch.Tensor],
    keep: Keep,
    input_tensors: Sequence[torch.Tensor],
    norm_type: int = 2,
    mpu: Any = None,
) -> torch.Tensor:
    """What `deepspeed.runtime.utils.get_global_norm_of_tensors` gives for the 2-norm, but for -1 in place of what is
    not finite (a collective).

    Args:
        parameters: that each gradient, by its id, is of.
        keep: gets what the norm is made of.
        input_tensors: gradients.
        norm_type: 2.
        mpu: where the tensors of a replica are spread over ranks.
    """
    assert norm_type == 2, norm_type
    norms = torch.stack(torch._foreach_norm([tensor.detach() for tensor in input_tensors], 2, dtype=torch.float32))
    keep([parameters.get(id(tensor)) for tensor in input_tensors], norms)
    square = norms.pow(2).sum()
    if mpu is not None:
        dist.all_reduce(square, group=mpu.get_model_parallel_group())
    return square.sqrt()


def _sum_of_squares(optimizer: Any, keep: Keep, counted: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    from deepspeed.runtime.zero.utils import get_norm_dtype

    if not counted:
        return torch.zeros((), dtype=get_norm_dtype(), device=optimizer.device)
    parameters, gradients = zip(*counted, strict=True)
    norms = torch.stack(torch._foreach_norm(gradients, 2, dtype=get_norm_dtype()))
    keep(parameters, norms)
    return norms.pow(2).sum()


def _joined(optimizer: Any, square: torch.Tensor, group: Any, model_parallel: bool = True) -> torch.Tensor:
    """The norm whose squares the ranks have parts of (a collective)."""
    from deepspeed import comm

    comm.all_reduce(square, group=group)
    if model_parallel:
        optimizer._model_parallel_all_reduce(tensor=square, op=dist.ReduceOp.SUM)
    return square.sqrt().nan_to_num_(nan=-1.0, posinf=-1.0)  # DeepSpeed's word for a norm that is not finite


def clip_by_global_norm(
    input_tensors: Sequence[torch.Tensor],
    max_norm: float = 1.0,
    global_norm: torch.Tensor | None = None,
    mpu: Any = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """What `deepspeed.runtime.utils.clip_tensors_by_global_norm` does with a norm that is finite.

    By one that is not it spoils the gradients, which nobody uses then.
    """
    if global_norm is None:
        from deepspeed.runtime import utils

        return utils.clip_tensors_by_global_norm(input_tensors, max_norm, global_norm, mpu, eps)
    torch._foreach_mul_(list(input_tensors), (max_norm / (global_norm + eps)).clamp(max=1.0))
    return global_norm


def unscale_and_clip(optimizer: Any, gradients: Sequence[torch.Tensor], total_norm: torch.Tensor) -> None:
    """What `unscale_and_clip_grads` of ZeRO-1 and ZeRO-2 does with a norm that `combine_grad_norm_groups` made.

    That one is infinite where it is not valid, which leaves nothing of the gradients, as DeepSpeed does.
    """
    scale = optimizer.loss_scale
    if optimizer.clip_grad > 0.0:
        scale = ((total_norm / scale + 1e-6) / optimizer.clip_grad).clamp(min=1.0) * scale
    elif scale == 1.0:
        return
    for gradient in gradients:
        gradient.mul_(1.0 / scale)
