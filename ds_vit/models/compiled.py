"""Blocks compiled by `torch.compile`: one graph for all blocks that do the same, without a break in it.

The compiled function takes a block, its tokens and its rotary table: its graph takes the weights as inputs, and serves
every block that passes its guards. Guards check whatever a graph read in Python, so nothing that differs from block to
block or from step to step may be read in one. A random module reads its row of the micro-batch's masks (of hashed bits,
where single elements drop), a tensor; its name and a drop-path's rate stay outside.

Shapes: B samples, S tokens, D width.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from ds_vit.fault_tolerance.errors import UserError, first_line
from ds_vit.models.layers import BlockLayer, Layer

BACKEND: Any = "inductor"
"""The backend, as `torch.compile` takes it."""

_LIMIT = 64  # graphs of one run: kinds of blocks, each in training, evaluation and giving features; torch's is 8
_DIFFERING = ("lambda_init",)  # numbers of timm's blocks that depend on their depth

Compiled = Callable[[nn.Module, torch.Tensor, dict[str, torch.Tensor]], torch.Tensor]


def compiler_settings() -> AbstractContextManager[None]:
    """The compiler's process-wide settings that compiled blocks need while a run lasts."""
    return torch._dynamo.config.patch(recompile_limit=max(_LIMIT, torch._dynamo.config.recompile_limit))


def compile_function(mode: str = "default") -> Compiled:
    """A function `(block, tokens, further arguments) -> tokens` that compiles itself at its first calls.

    Args:
        mode: as `torch.compile` takes it.
    """
    # Separate code: graphs that another run in this process compiled do not count, and are not searched.
    function = types.FunctionType(_run.__code__.replace(), globals(), _run.__name__)
    further = {} if BACKEND != "inductor" or mode == "default" else {"mode": mode}
    return torch.compile(function, fullgraph=True, dynamic=False, backend=BACKEND, **further)


def _run(block: nn.Module, tokens: torch.Tensor, arguments: dict[str, torch.Tensor]) -> torch.Tensor:
    return type(block).forward(block, tokens, **arguments)


def compile_block(layer: Layer, function: Compiled) -> None:
    """Compile a layer's block, in place; its names and those of its parameters stay.

    Hooks of the block itself run outside its graph.

    Args:
        layer: filled, sharded and cast as it will be; one without a block is left as it is.
        function: from `compile_function`, the same for all layers of a run.
    """
    if not isinstance(layer, BlockLayer):
        return
    block = layer.block
    for module in block.modules():
        for name in _DIFFERING:
            if isinstance(vars(module).get(name), float):
                setattr(module, name, torch.tensor(getattr(module, name), device=next(block.parameters()).device))

    def forward(tokens: torch.Tensor, **arguments: torch.Tensor) -> torch.Tensor:
        # DeepSpeed replaces torch's linear function at ZeRO-3 under autocast, for the whole process: its own frees the
        # weights between forward and backward pass. A graph saves no copy of them, and cannot trace it.
        replaced, F.linear = F.linear, torch._C._nn.linear
        try:
            return function(block, tokens, arguments)
        except torch._dynamo.exc.TorchDynamoException as error:
            raise UserError(
                f"--compile: torch {torch.__version__} cannot compile {type(block).__name__}: {first_line(error)}; "
                "drop --compile"
            ) from error
        finally:
            F.linear = replaced

    block.forward = forward
