"""Patches of DeepSpeed: methods and functions of it that a run replaces, with the reason for each.

Each has a canary in tests/engine/test_deepspeed_canaries.py, which fails when DeepSpeed no longer needs it. A patch of
process-wide state is a context, which restores the state at its end; an engine holds those that a run needs until it
closes.

More is replaced elsewhere: engine/flat_gradient.py reduces and steps below ZeRO-3, engine/zero3.py gathers and reduces
at ZeRO-3. Private attributes are also read in engine/base.py (norms), parallel/zero_map.py (where ZeRO keeps weights,
and how they return to the model) and config/deepspeed_keys.py (removed keys).
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

TESTED = ("0.19.8",)
"""The versions of DeepSpeed whose private attributes this package was tested with."""


def version_warnings() -> list[str]:
    """A line for people if the installed DeepSpeed was not tested."""
    import deepspeed

    installed = deepspeed.__version__.partition("+")[0]
    if installed in TESTED:
        return []
    return [
        f"WARNING: DeepSpeed {installed} is installed, and ds_vit was tested with {', '.join(TESTED)}: gradient norms, "
        f"clipping and checkpoints rely on private attributes; pip install deepspeed=={TESTED[-1]}"
    ]


_ABSENT = object()


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute of a module, a class or an object itself for the block; one that it lacks is then removed."""
    original = vars(owner).get(name, _ABSENT)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if original is _ABSENT:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


def without_compiled_collectives() -> contextlib.AbstractContextManager[None]:
    """Keep `deepspeed.init_distributed` on a CPU from compiling a collective: 50 s, and an error without ninja.

    DeepSpeed fills its table of operators by trying the compiler on all of them; the replacement saves that too.
    """
    import deepspeed

    return replaced(deepspeed.ops, "__compatible_ops__", {"deepspeed_shm_comm": False})


def import_muon_uncompiled() -> None:
    """Import DeepSpeed's Muon before its ZeRO stages do, which ask of every optimizer whether it is one.

    The import compiles it, and loads torch's compiler: more than a second of six in the start of every rank.
    """
    from deepspeed.runtime import compiler

    with replaced(compiler, "compile", lambda *_, **__: lambda function: function):
        importlib.import_module("deepspeed.runtime.zero.muon.original_muon")


def torch_linear_restored() -> contextlib.AbstractContextManager[None]:
    """Restore torch's linear map, which ZeRO-3 replaces for the whole process under autocast.

    There torch's map saves a 16-bit copy of each weight for the backward pass; DeepSpeed's saves the parameter.
    """
    return replaced(torch.nn.functional, "linear", torch.nn.functional.linear)


def plain_linear_at_zero3() -> contextlib.AbstractContextManager[None]:
    """Have ZeRO-3's linear map under autocast compute what torch's does; it saves as little as before.

    DeepSpeed adds the bias to a product that is rounded already: in 16 bits the loss would depend on the ZeRO stage. It
    adds in place, so that a product that selective recomputation keeps would get the bias twice.
    """
    from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3

    return replaced(LinearFunctionForZeroStage3, "forward", staticmethod(_linear))


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    # `F.linear` is replaced; `setup_context` takes the arguments as they are given here.
    return torch._C._nn.linear(input, weight, bias)


# ---- ZeRO's wrappers and DeepSpeed's engine, on the instance that a run uses ----------------------------------------


def shared_grid(grid: Any) -> contextlib.AbstractContextManager[None]:
    """Have `PipelineModule` use this PipelineParallelGrid: its own would create every process group a second time."""
    from deepspeed.runtime.pipe import module

    return replaced(module, "PipelineParallelGrid", lambda *_, **__: grid)


def keep_training_mode(module: torch.nn.Module) -> contextlib.AbstractContextManager[None]:
    """Keep the modules in training mode through `eval_batch`, which switches to evaluation: drop-path stays on."""
    module.train()
    return replaced(module, "eval", lambda: module)


def autocast_scaler(engine: Any) -> torch.amp.GradScaler | None:
    """The GradScaler of float16 autocast, which DeepSpeed keeps in the engine at stage 0, else in the optimizer."""
    own = engine.torch_autocast_z0_gradscaler
    return own if own is not None else getattr(engine.optimizer, "torch_autocast_gradscaler", None)


def sum_norm_once(optimizer: Any) -> None:
    """Have ZeRO with offload sum the squared gradient norm over the pipeline stages once.

    It does so once for each parameter group. A stage with fewer groups (nothing trained is decayed, or Muon leaves
    nothing to AdamW) would miss a collective, and the run would hang.
    """
    original, all_reduce = optimizer.scaled_global_norm, optimizer._model_parallel_all_reduce

    def scaled_global_norm(*args: Any, **kwargs: Any) -> torch.Tensor:
        with replaced(optimizer, "_model_parallel_all_reduce", lambda **_: None):
            square = original(*args, **kwargs).square()
        all_reduce(tensor=square, op=dist.ReduceOp.SUM)
        return square.sqrt()

    optimizer.scaled_global_norm = scaled_global_norm


def hold_loss_scale(
    optimizer: Any, overflowed: Callable[[], None], settle: Callable[[], object]
) -> Callable[[bool], None]:
    """Keep ZeRO from changing the loss scale within a step; the engine does so before it scales the next loss.

    Every `loss_scale_window` steps DeepSpeed doubles the scale before it divides by it: that step uses half of the
    gradient, and clips it as if it were half as long.

    Args:
        optimizer: DeepSpeed's.
        overflowed: called before gradients that are not finite are dropped.
        settle: called in fp16 before each loss is scaled.

    Returns:
        DeepSpeed's function that changes the scale, given whether there was an overflow.
    """
    update_scale, scaler = optimizer._update_scale, optimizer.loss_scaler
    optimizer._update_scale = lambda has_overflow=False: overflowed() if has_overflow else None
    scale_loss = scaler.scale_loss

    def scaled(loss: torch.Tensor) -> torch.Tensor:
        settle()
        return scale_loss(loss)

    if optimizer.dtype == torch.float16:
        scaler.scale_loss = scaled
    return update_scale


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
