"""Ways around DeepSpeed 0.19.8 that are not about ZeRO's flat memory.

Each has a canary in tests/engine/test_deepspeed_canaries.py, which says when it can go.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist


@contextlib.contextmanager
def one_grid(grid: Any) -> Iterator[None]:
    """Have `PipelineModule` find this PipelineParallelGrid: it would make another one, with every group once more."""
    from deepspeed.runtime.pipe import module

    own = module.PipelineParallelGrid
    module.PipelineParallelGrid = lambda *_, **__: grid
    try:
        yield
    finally:
        module.PipelineParallelGrid = own


def count_groups_of_other_stages(optimizer: Any, device: torch.device) -> None:
    """Let pipeline stages differ in their number of parameter groups (a collective).

    ZeRO sums the gradient norm over the stages group by group, and a stage that has fewer groups than another one
    (nothing decayed that is trained; nothing that Muon leaves to AdamW) would be missing in a collective. It takes
    part with zeros instead: the sum over all groups is the same, whichever groups meet.
    """
    from deepspeed.runtime.utils import combine_grad_norm_groups

    if not hasattr(optimizer, "scaled_global_norm"):  # BF16_Optimizer, no ZeRO: one collective for all groups
        return
    shape = (1,) if optimizer.cpu_offload else ()  # as ZeRO's own
    most = torch.tensor(len(optimizer.bit16_groups), device=device)
    dist.all_reduce(most, op=dist.ReduceOp.MAX)
    missing = int(most) - len(optimizer.bit16_groups)
    own_norm = optimizer.scaled_global_norm

    def scaled_global_norm(*args: Any, **kwargs: Any) -> torch.Tensor:
        norms = [own_norm(*args, **kwargs)]
        for _ in range(missing):
            square = torch.zeros(shape, device=device)
            optimizer._model_parallel_all_reduce(tensor=square, op=dist.ReduceOp.SUM)
            norms.append(square.sqrt().view(()).to(norms[0].device))
        return combine_grad_norm_groups(norms)

    if missing:
        optimizer.scaled_global_norm = scaled_global_norm


def count_nothing_where_there_is_nothing(optimizer: Any, device: torch.device) -> None:
    """Let a rank take part in BF16_Optimizer's gradient norm that has nothing to count in it.

    What a tensor-parallel group holds in common counts on its first rank. On the others of a stage that trains
    nothing else, such as a head alone, the list of norms is empty, which torch does not stack.
    """
    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

    if not isinstance(optimizer, BF16_Optimizer):
        return
    own_gradients = optimizer.get_grads_for_norm

    def get_grads_for_norm(for_clipping: bool = False) -> Any:
        gradients = own_gradients(for_clipping)
        if for_clipping:
            return gradients
        counted, of_experts = gradients
        return counted or [torch.zeros(1, device=device)], of_experts

    optimizer.get_grads_for_norm = get_grads_for_norm


def clip_on_the_device(optimizer: Any) -> None:
    """Have ZeRO-1, ZeRO-2 and BF16_Optimizer clip without reading the norm.

    By then `step` has looked whether the norm is finite, once; their clipping asks again for each group of parameters,
    or whether there is anything to clip, and the device's queue runs empty each time. A coefficient of 1 says the same.
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


def clip_by_global_norm(
    input_tensors: Sequence[torch.Tensor], max_norm: float, global_norm: torch.Tensor, mpu: Any = None
) -> None:
    """What `deepspeed.runtime.utils.clip_tensors_by_global_norm` does with a norm that is finite."""
    torch._foreach_mul_(list(input_tensors), (max_norm / (global_norm + 1e-6)).clamp(max=1.0))


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


def advance_where_applied(scheduler: Any, applied: Callable[[], bool]) -> None:
    """Keep a scheduler of the JSON where it is after a step that was turned down.

    DeepSpeed holds it back where its own wrapper of the optimizer reports an overflow, which depends on the ZeRO stage
    and the type: the learning rates of two layouts would part at the first such step.

    Args:
        scheduler: DeepSpeed's; a call with an argument, which sets it to a step, passes.
        applied: whether the step under way was.
    """
    advance = scheduler.step

    def step(*args: Any, **kwargs: Any) -> None:
        if args or kwargs or applied():
            advance(*args, **kwargs)

    scheduler.step = step
