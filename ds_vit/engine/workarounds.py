"""Ways around DeepSpeed 0.19.8 that are not about ZeRO's flat memory.

Each has a canary in tests/engine/test_deepspeed_canaries.py, which says when it can go.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
from collections.abc import Callable, Iterable, Iterator
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


def copy_reduced_at_once(engine: Any) -> None:
    """Have ZeRO-0 copy a reduced bucket back into the gradients in one operation in place of one a parameter."""

    def allreduce_and_copy(small_bucket: list[torch.Tensor], dp_group: Any, dp_world_size: int | None = None) -> None:
        reduced = engine.allreduce_bucket(small_bucket, dp_group, dp_world_size)
        torch._foreach_copy_(small_bucket, engine.unflatten(reduced, small_bucket))

    engine.allreduce_and_copy = allreduce_and_copy


def sum_flat_gradients_where_they_are(engine: Any) -> None:
    """Have BF16_Optimizer's gradients, which lie in flat memory, summed there in place of in a copy and back.

    Args:
        engine: DeepSpeed's, whose JSON asks for nothing else on their way (`sums_are_plain`).
    """

    from deepspeed.runtime.bf16_optimizer import BF16_Optimizer

    optimizer = engine.optimizer
    if not isinstance(optimizer, BF16_Optimizer) or optimizer.grad_acc_dtype != engine.communication_data_type:
        return

    def allreduce_and_copy(small_bucket: list[torch.Tensor], dp_group: Any, dp_world_size: int | None = None) -> None:
        if dp_world_size == 1:
            return
        works = [dist.all_reduce(flat, group=dp_group, async_op=True) for flat in small_bucket]
        for work in works:
            work.wait()
        torch._foreach_mul_(small_bucket, 1 / (dp_world_size or dist.get_world_size(dp_group)))

    engine.allreduce_and_copy = allreduce_and_copy


def leave_gradients_of_one_rank(engine: Any) -> None:
    """Keep ZeRO-0 on one data-parallel rank from copying all gradients into a bucket and back, to sum them over nobody.

    A trained parameter without a gradient gets zeros all the same, as on several ranks: its decay hangs on that.

    Args:
        engine: DeepSpeed's, whose JSON asks for nothing else on their way (`sums_are_plain`).
    """

    def fill(grads: Any = None, **_: Any) -> None:
        if grads is None and not hasattr(engine.optimizer, "get_grads_for_reduction"):  # BF16_Optimizer's are all there
            engine._get_gradients_for_reduction()

    engine.buffered_allreduce_fallback = fill


def copy_buckets_at_once(optimizer: Any) -> None:
    """Have ZeRO-1 and ZeRO-2 take a reduced bucket into this rank's partition in one operation in place of one a
    parameter, each gradient to the place where the optimizer steps on it.

    DeepSpeed lines them up as they come, and copies all of them once more into the order of the flat weights.
    """
    if not hasattr(optimizer, "single_partition_of_fp32_groups") or optimizer.cpu_offload:
        return
    from deepspeed.accelerator import get_accelerator

    own_reduce, own_copy = optimizer.reduce_ipg_grads, optimizer.copy_grads_in_partition
    own_flat = optimizer._get_preflattened_grad_partition
    starts, firsts, gaps, total = _places(optimizer)
    places: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []

    def copy_grads_in_partition(param: torch.Tensor, group_idx: int | None = None) -> None:
        group = optimizer._get_param_group_idx(param) if group_idx is None else group_idx
        if optimizer._use_compact_grad_partition_buffer(group):
            own_copy(param, group)
            return
        if optimizer.grads_in_partition is None:
            device = get_accelerator().current_device_name()
            optimizer.grads_in_partition = torch.empty(total, dtype=optimizer.dtype, device=device)
            for gap in gaps:
                optimizer.grads_in_partition[gap].zero_()
        gradient = optimizer.get_gradient_for_reduction(param)
        place = optimizer.grads_in_partition.narrow(0, starts[id(param)], param.numel())
        sources.append(gradient.detach().view(-1))
        places.append(place)
        gradient.data = place.view_as(gradient)

    def reduce_ipg_grads(comm_dtype: torch.dtype | None = None) -> None:
        own_reduce(comm_dtype)
        if places:
            accelerator = get_accelerator()
            stream = optimizer.reduction_stream if optimizer.overlap_comm else accelerator.current_stream()
            with accelerator.stream(stream):
                torch._foreach_copy_(places, sources)
            places.clear()
            sources.clear()

    def flat(group: int) -> torch.Tensor | None:
        """The gradients of a partition as the one piece of memory that they are, or None for DeepSpeed to join them."""
        whole = own_flat(group)
        gradients = optimizer.averaged_gradients[group][: len(optimizer.params_in_partition[group])]
        if whole is not None or not gradients:
            return whole
        memory, at = gradients[0].untyped_storage(), firsts[group]
        for gradient in gradients:  # one that the loss does not reach is elsewhere, as one in another type
            if gradient.untyped_storage().data_ptr() != memory.data_ptr() or gradient.storage_offset() != at:
                return None
            at += gradient.numel()
        if memory.nbytes() != total * gradients[0].element_size():
            return None
        return gradients[0].as_strided((int(optimizer.partition_size[group]),), (1,))

    optimizer.copy_grads_in_partition, optimizer.reduce_ipg_grads = copy_grads_in_partition, reduce_ipg_grads
    optimizer._get_preflattened_grad_partition = flat


def _places(optimizer: Any) -> tuple[dict[int, int], list[int], list[slice], int]:
    """Where ZeRO's gradients stand in one piece of memory, group by group in the order of the flat weights.

    Returns:
        id(parameter) → start of its gradient; for each group, where this rank's partition starts (the first parameter
        may begin in another rank's); what stays zero, behind the last gradient; and the length.
    """
    starts: dict[int, int] = {}
    firsts, gaps, total = [], [], 0
    groups = zip(optimizer.params_in_partition, optimizer.first_offset, optimizer.partition_size, strict=True)
    for parameters, first_offset, size in groups:
        first = total + int(first_offset)
        firsts.append(first)
        for parameter in parameters:
            starts[id(parameter)] = total
            total += parameter.numel()
        if parameters and first + int(size) > total:
            gaps.append(slice(total, first + int(size)))
            total = first + int(size)
    return starts, firsts, gaps, total


def partition_at_once(optimizer: Any) -> None:
    """Have ZeRO-3 take the gradients of a reduced bucket into its partitions in one operation in place of one a
    parameter."""
    partitions = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"
    if not hasattr(optimizer, partitions) or optimizer.offload_optimizer:
        return
    from deepspeed.accelerator import get_accelerator

    def partition_grads(parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        places, sources = [], []
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if parameter.grad is not None and not get_accelerator().is_synchronized_device():
                parameter.grad.record_stream(get_accelerator().current_stream())
            parameter.grad = None
            if parameter.partition_numel() * optimizer._get_param_partition_rank(parameter) < parameter.ds_numel:
                places.append(getattr(optimizer, partitions)[parameter.ds_id].narrow(0, 0, gradient.numel()))
                sources.append(gradient.view(-1))
        if places and optimizer.micro_step_id == 0:
            torch._foreach_copy_(places, sources)
        elif places:
            torch._foreach_add_(places, [source.to(optimizer.gradient_accumulation_dtype) for source in sources])
        return places

    optimizer.partition_grads = partition_grads


def gather_around(optimizer: Any, modules: Iterable[torch.nn.Module]) -> None:
    """Have ZeRO-3 gather all weights of each of these modules around its call, in place of each part's around its own.

    A block has some twenty parts, each with four hooks that run in every step whether or not it has a weight; and the
    graph of a compiled block cannot run them. DeepSpeed's leaf modules would be the same with fewer lines, but lose the
    gradients of a module whose input has none: they are taken when the gradient of the input is there.

    Args:
        optimizer: of the engine; without one to train with, what DeepSpeed has in its place.
        modules: none of them inside another.
    """
    from deepspeed.runtime.zero.partition_parameters import register_external_parameter

    dicts_of_parts = set()
    for module in modules:
        own = set(module.parameters(recurse=False))
        for part in module.modules():
            if part is not module:
                dicts_of_parts |= {id(part._forward_pre_hooks), id(part._forward_hooks)}
        for parameter in module.parameters():
            if parameter not in own:
                register_external_parameter(module, parameter)
    offload = getattr(optimizer, "parameter_offload", optimizer)
    for hook in (*offload.forward_hooks, *offload.backward_hooks):  # others' hooks stay
        if id(hook.hooks_dict_ref()) in dicts_of_parts:
            hook.remove()


def ask_numactl_once() -> None:
    """Have DeepSpeed's accelerator for CPUs count itself once a process.

    ZeRO-3 asks for the count in every reduction of a bucket, and each answer is a process of `numactl`.
    """
    from deepspeed.utils import numa

    if not hasattr(numa.get_numa_cores, "cache_info"):
        numa.get_numa_cores = functools.cache(numa.get_numa_cores)


def settle_the_scale_after_the_step(optimizer: Any) -> None:
    """Have ZeRO in fp16 unscale gradients by the loss scale that they were made with.

    Every `loss_scale_window` steps DeepSpeed doubles the scale before it divides by it, so that the step takes half of
    the gradient, and clips what is half as long.
    """
    if not getattr(optimizer, "dynamic_loss_scale", False):
        return
    own_update, own_step = optimizer._update_scale, optimizer.step
    is_due = False

    def update_scale(has_overflow: bool = False) -> None:
        nonlocal is_due
        if has_overflow:
            own_update(True)
        else:
            is_due = True

    def step(*args: Any, **kwargs: Any) -> Any:
        nonlocal is_due
        is_due = False
        result = own_step(*args, **kwargs)
        if is_due:
            own_update(False)
        return result

    optimizer._update_scale, optimizer.step = update_scale, step


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


def import_muon_uncompiled() -> None:
    """Import DeepSpeed's Muon, which no run uses, before its ZeRO stages do to ask whether an optimizer is one.

    It is compiled as it is imported, for which torch imports its compiler: a second and more in every rank.
    """
    from deepspeed.runtime import compiler

    own, compiler.compile = compiler.compile, lambda *_, **__: lambda function: function
    try:
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")
    finally:
        compiler.compile = own


def leave_products_alone() -> None:
    """Have ZeRO-3's linear map add its bias beside the product of the matrices, to the same bits, for this process.

    DeepSpeed adds it in place. Where activations are recomputed selectively the product is kept for the second run,
    which would find the bias in it and add it once more; torch's check of versions does not see through the view. The
    map stays in torch's place after the run that brought it.
    """
    from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3

    def forward(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if input.dim() == 2 and bias is not None:
            return torch.addmm(bias, input, weight.t())
        product = input.matmul(weight.t())
        # Under autocast the product is in 16 bits and the bias in 32.
        return product if bias is None else (product + bias).to(product.dtype)

    LinearFunctionForZeroStage3.forward = staticmethod(forward)
