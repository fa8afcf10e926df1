"""Whether two modules do and cost the same, so that of a stack of blocks one is looked at."""

from __future__ import annotations

from typing import Any

from torch import nn

from ds_vit.models.keyed_drop import KeyedDrop


def looks(module: nn.Module) -> tuple[Any, ...]:
    """What decides on a module's cost: its classes, settings, shapes and types, and not its weights' values."""
    if isinstance(module, (KeyedDrop, nn.Identity)):  # a first block without drop-path has none of it
        return ()
    # A norm that computes in fp32 has a forward of its own: by its name, which is that of every such norm.
    settings = {
        name: repr(value) for name, value in vars(module).items() if not name.startswith("_") and name != "forward"
    }
    shapes = [
        (name, tensor.shape, tensor.dtype, tensor.requires_grad)
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None
    ]
    inner = [(name, child and looks(child)) for name, child in module._modules.items()]
    return type(module), settings, shapes, inner
