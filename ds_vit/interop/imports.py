"""Somebody else's weights as a safetensors file under timm's names."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from timm.models import clean_state_dict

from ds_vit.checkpoint import save_weights
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.interop.source import model_spec
from ds_vit.models import InitialCheckpoint, create_model
from ds_vit.models.weight_files import (
    TensorFiles,
    class_names,
    deepspeed_checkpoint,
    names_as_metadata,
    open_weights,
    read_torch,
)


def import_weights(source: str | Path, to: Path, **settings: Any) -> str:
    """Write weights under timm's names.

    Args:
        source: a Hugging Face `ViTForImageClassification` folder, a timm folder, a file that `--initial-checkpoint`
            accepts, or a checkpoint of DeepSpeed's own `save_checkpoint` of a plain timm module (any ZeRO stage). The
            last is a set of pickles that can run code when they are read: convert only what you trust.
        to: the .safetensors file to write.
        settings: model flags by their recipe names; with a model, names and shapes are held against it.

    Returns:
        What was done, in a line.

    Raises:
        UserError: it cannot be read, does not fit, or the file exists.
    """
    source = Path(source)
    if to.suffix != ".safetensors":
        raise UserError(f"--to {to}: the file's name must end in .safetensors")
    if to.exists():
        raise UserError(f"--to {to} exists already; remove it, or name another file")
    if not to.parent.is_dir() or not os.access(to.parent, os.W_OK | os.X_OK):
        raise UserError(f"--to {to}: {to.parent} is not a folder that can be written to")
    if settings and "model" not in settings:
        raise UserError(f"--{next(iter(settings)).replace('_', '-')} has no effect without --model; drop it")
    inner = deepspeed_checkpoint(source) if source.is_dir() else None
    state = dict(_from_deepspeed(inner) if inner else open_weights(source))
    others = [f"{name} ({type(value).__name__})" for name, value in state.items() if not torch.is_tensor(value)]
    if others or not state:
        raise UserError(f"{source} is no state dict: it holds {', '.join(others[:5]) or 'nothing'}")
    partial = to.with_name(f".{to.stem}.unchecked.safetensors")
    try:
        # A clone: two names of one tensor are two tensors in a safetensors file.
        state = {name: tensor.detach().clone().contiguous() for name, tensor in state.items()}
        metadata = {} if inner else names_as_metadata(class_names(source))
        save_weights(to.parent, state, max_shard_size=2**62, name=partial.stem, metadata=metadata)
        _check(partial, state)
        fits = ""
        if settings:
            spec = model_spec(settings)
            checkpoint = InitialCheckpoint(partial, create_model(spec, for_training=False))
            new = checkpoint.newly_initialised
            fits = f", which fits {spec.name}" + (f" but for its classifier ({', '.join(new)})" if new else "")
        os.replace(partial, to)
    finally:
        partial.unlink(missing_ok=True)
    elements = sum(tensor.numel() for tensor in state.values())
    return f"{to}: {len(state)} tensors of {elements:,} elements{fits}; read back and equal to the source"


def _check(file: Path, state: Mapping[str, torch.Tensor]) -> None:
    written = TensorFiles([file])
    for name, tensor in state.items():
        assert torch.equal(written[name].nan_to_num(), tensor.nan_to_num()), name


def _from_deepspeed(folder: Path) -> dict[str, torch.Tensor]:
    """The fp32 weights of a checkpoint of DeepSpeed's own, through DeepSpeed's converter.

    Without ZeRO there is nothing to convert: the weights stand in the one file of model states.
    """
    states = sorted(folder.glob("mp_rank_*_model_states.pt"))
    if not any(True for _ in folder.glob("*_optim_states.pt")):
        if len(states) != 1:
            raise UserError(f"{folder} holds {len(states)} files of model states: DeepSpeed converts no parallel model")
        try:
            return clean_state_dict(dict(read_torch(states[0])["module"]))
        except (pickle.UnpicklingError, KeyError, RuntimeError, TypeError) as error:
            raise UserError(f"{states[0]} cannot be read: {str(error).splitlines()[0]}") from None
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            state = get_fp32_state_dict_from_zero_checkpoint(str(folder.parent), tag=folder.name)
    except Exception as error:  # the converter raises whatever comes
        raise UserError(f"DeepSpeed's converter cannot read {folder}: {type(error).__name__}: {error}") from error
    return clean_state_dict(dict(state))
