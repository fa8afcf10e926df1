"""Weights of other tools, written as a safetensors file under timm's names."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ds_vit.checkpoint.tensors import save_weights
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.models.zoo import create_model
from ds_vit.weights.files import (
    class_names,
    names_as_metadata,
    open_weights,
)
from ds_vit.weights.initial_checkpoint import InitialCheckpoint, require_tensors
from ds_vit.weights.source import model_spec


def import_weights(source: str | Path, to: str | Path, **settings: Any) -> str:
    """Write weights under timm's names.

    Args:
        source: a file or folder that `--initial-checkpoint` accepts, such as one of Hugging Face, open_clip or timm.
        to: the .safetensors file to write.
        settings: model flags by their recipe names; with a model, names and shapes are compared with it.

    Returns:
        A line that describes the file.

    Raises:
        UserError: the source cannot be read, does not fit, or the file exists.
    """
    source, to = Path(source), Path(to)
    if to.suffix != ".safetensors":
        raise UserError(f"--to {to}: the file's name must end in .safetensors")
    if to.exists():
        raise UserError(f"--to {to} exists already; remove it, or name another file")
    if not to.parent.is_dir() or not os.access(to.parent, os.W_OK | os.X_OK):
        raise UserError(f"--to {to}: {to.parent} is not a folder that can be written to")
    if settings and "model" not in settings:
        raise UserError(f"--{next(iter(settings)).replace('_', '-')} has no effect without --model; drop it")
    state = open_weights(source)
    try:
        require_tensors(state)
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    partial = to.with_name(f".{to.stem}.unchecked.safetensors")
    metadata = names_as_metadata(class_names(source))
    try:
        save_weights(to.parent, state, max_bytes=2**62, name=partial.stem, metadata=metadata)
        fits = ""
        if settings:
            spec = model_spec(settings)
            new = InitialCheckpoint(partial, create_model(spec, for_training=False)).newly_initialised
            fits = f", which fits {spec.name}" + (f" except its classifier ({', '.join(new)})" if new else "")
        os.replace(partial, to)
    finally:
        partial.unlink(missing_ok=True)
    elements = sum(tensor.numel() for tensor in state.values())
    return f"{to}: {len(state)} tensors of {elements:,} elements{fits}; read back and equal to the source"
