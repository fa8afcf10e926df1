"""Weights of other tools, written as a safetensors file under timm's names."""

from __future__ import annotations

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import torch
from timm.models import clean_state_dict

from ds_vit.checkpoint.tensors import save_weights
from ds_vit.fault_tolerance.errors import UserError, first_line
from ds_vit.models.zoo import create_model
from ds_vit.weights.files import (
    class_names,
    deepspeed_checkpoint,
    names_as_metadata,
    open_weights,
    read_torch,
)
from ds_vit.weights.initial_checkpoint import InitialCheckpoint, require_tensors
from ds_vit.weights.source import model_spec


def import_weights(source: str | Path, to: str | Path, **settings: Any) -> str:
    """Write weights under timm's names.

    Args:
        source: a Hugging Face `ViTForImageClassification` folder, a timm folder, a file that `--initial-checkpoint`
            accepts, or a checkpoint of DeepSpeed's own `save_checkpoint` of a plain timm module (any ZeRO stage). The
            last is a set of pickles that can run code when they are read: convert only what you trust.
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
    inner = deepspeed_checkpoint(source) if source.is_dir() else None
    state = _from_deepspeed(inner) if inner else open_weights(source)
    try:
        require_tensors(state)
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    partial = to.with_name(f".{to.stem}.unchecked.safetensors")
    metadata = {} if inner else names_as_metadata(class_names(source))
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


def _from_deepspeed(folder: Path) -> dict[str, torch.Tensor]:
    """The fp32 weights of DeepSpeed's own checkpoint, through DeepSpeed's converter.

    Without ZeRO there is nothing to convert: the weights are in the one file of model states.
    """
    states = sorted(folder.glob("mp_rank_*_model_states.pt"))
    has_zero = any(True for _ in folder.glob("*_optim_states.pt"))
    if not has_zero and len(states) != 1:
        raise UserError(f"{folder} holds {len(states)} files of model states: DeepSpeed converts no parallel model")
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    try:
        if not has_zero:
            return clean_state_dict(read_torch(states[0])["module"])
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return clean_state_dict(get_fp32_state_dict_from_zero_checkpoint(str(folder.parent), tag=folder.name))
    except Exception as error:  # the converter and its unpickler raise anything
        raise UserError(f"DeepSpeed's checkpoint {folder} cannot be read: {first_line(error)}") from error
