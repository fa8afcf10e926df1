"""Patches of process-wide state of DeepSpeed: each is a context, which restores the state at its end.

An engine holds those that a run needs until it closes. Each has a canary in tests/engine/test_deepspeed_canaries.py.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any

import torch

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


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of a module or a class for the block."""
    original = vars(owner)[name]
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextlib.contextmanager
def without_compiled_collectives() -> Iterator[None]:
    """Keep `deepspeed.init_distributed` on a CPU from compiling a collective: 50 s, and an error without ninja.

    DeepSpeed fills its table of operators by trying the compiler on all of them; the replacement saves that too.
    """
    import deepspeed

    made = vars(deepspeed.ops).get("__compatible_ops__")
    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    try:
        yield
    finally:
        if made is None:
            del deepspeed.ops.__compatible_ops__
        else:
            deepspeed.ops.__compatible_ops__ = made


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


@contextlib.contextmanager
def tf32_products() -> Iterator[None]:
    """Let torch multiply fp32 matrices in TF32, for the whole process."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)
