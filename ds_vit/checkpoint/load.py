"""Loads a checkpoint into a running engine: each rank reads its own bytes, in any layout."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from ds_vit.checkpoint.folder import Checkpoint, Damaged
from ds_vit.checkpoint.tensors import TensorFiles
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.parallel.groups import gather_objects
from ds_vit.parallel.tensor.slices import TensorSlice
from ds_vit.parallel.zero_map import Shard, ZeroMap

_CHUNK = 2**24  # elements that are copied at a time


def read_range(full: np.ndarray, tp_slice: TensorSlice, start: int, length: int) -> np.ndarray:
    """`length` elements from `start` of the flattened tensor slice, out of the (memory-mapped) whole tensor.

    Only the rows that hold them are read. A slice that extends past the end of the whole is padded with zeros.

    Raises:
        UserError: the whole has another shape.
    """
    if full.shape != tp_slice.full_shape:
        raise UserError(f"a tensor of shape {full.shape} is not a whole of shape {tp_slice.full_shape}")
    dim = tp_slice.dim
    if dim is None:
        return full.reshape(-1)[start : start + length]
    behind = math.prod(full.shape[dim + 1 :])
    whole = full.reshape(-1, full.shape[dim], behind)
    # Which row of the whole each row of the slice is, counted from 1; 0 is padding.
    along = TensorSlice((full.shape[dim],), 0, tp_slice.sections, tp_slice.rank, tp_slice.size)
    rows = along.take(torch.arange(1, full.shape[dim] + 1)).numpy()
    block = len(rows) * behind
    first, last = start // block, -(-(start + length) // block)
    if last - first == 1:  # within one block: only its rows
        low, high = (start - first * block) // behind, -(-(start + length - first * block) // behind)
        rows = rows[low:high]
        skipped = first * block + low * behind
    else:
        skipped = first * block
    part = np.take(whole[first:last], np.maximum(rows, 1) - 1, axis=1)
    part[:, rows == 0] = 0
    return part.reshape(-1)[start - skipped : start - skipped + length]


def load_tensors(
    checkpoint: Checkpoint, zero_map: ZeroMap, ema: Sequence[torch.Tensor] | None, scalars: Mapping[str, Any]
) -> None:
    """Fill this rank's weights, optimizer state and average, and push the weights into the model (a collective).

    Args:
        checkpoint: verified.
        zero_map: the map of this rank.
        ema: the average's tensors, one per shard; where the checkpoint has no average they become the weights.
        scalars: the optimizer's states that are one number, from `optimizer_scalars`.

    Raises:
        UserError: the checkpoint lacks a tensor, or one has another shape.
    """
    weights = checkpoint.tensors("model")
    for shard in [*zero_map.shards, *zero_map.frozen]:
        _fill(shard, shard.tensor, weights)
        if shard.exact is not None:
            _fill(shard, shard.exact, weights)
    average = checkpoint.tensors("ema") if "ema" in checkpoint.kinds else weights
    for shard, tensor in zip(zero_map.shards, ema or (), strict=False):
        _fill(shard, tensor, average)
    for kind in checkpoint.kinds:
        if kind.startswith("optimizer-"):
            files, key = checkpoint.tensors(kind), kind.removeprefix("optimizer-")
            for shard in zero_map.shards:
                declared = zero_map.declared_keys(shard)
                if declared is None or key in declared:
                    _fill(shard, _state(zero_map, shard, key), files)
    _set_scalars(zero_map, scalars)
    zero_map.refresh()


@torch.no_grad()
def _fill(shard: Shard, flat: torch.Tensor, files: TensorFiles) -> None:
    for segment, target in zip(shard.segments, shard.views(flat), strict=True):
        try:
            full = files[segment.name].numpy()
            for offset in range(0, segment.length, _CHUNK):
                size = min(_CHUNK, segment.length - offset)
                values = read_range(full, segment.tp_slice, segment.start + offset, size)
                target.narrow(0, offset, size).copy_(torch.from_numpy(values))
        except KeyError:
            raise UserError(f"the checkpoint has no {segment.name}, which this model has") from None
        except UserError as error:
            raise UserError(f"the checkpoint does not fit this model: {segment.name}: {error}") from None


def _state(zero_map: ZeroMap, shard: Shard, key: str) -> torch.Tensor:
    """An optimizer state of a shard, made where the optimizer would make it at its first step."""
    states = zero_map.base.state[shard.parameter]
    if not torch.is_tensor(states.get(key)):
        states[key] = torch.zeros_like(shard.parameter, memory_format=torch.preserve_format)
    return states[key]


def optimizer_scalars(zero_map: ZeroMap) -> dict[str, Any]:
    """The optimizer's states that are one number for a whole tensor, such as its count of steps.

    Returns:
        key → {"value", "tensor": whether it is kept as a tensor}.
    """
    states = (zero_map.base.state.get(shard.parameter) for shard in zero_map.shards)
    first = next(filter(None, states), {})
    return {
        key: {"value": float(value), "tensor": torch.is_tensor(value)}
        for key, value in sorted(first.items())
        if isinstance(value, (int, float)) or (torch.is_tensor(value) and value.dim() == 0)
    }


def _set_scalars(zero_map: ZeroMap, scalars: Mapping[str, Any]) -> None:
    # torch keeps counts on the CPU, unless its fused kernels read them.
    on_device = bool(zero_map.base.defaults.get("fused"))
    for shard in zero_map.shards:
        state = zero_map.base.state[shard.parameter]
        for key, entry in scalars.items():
            value = entry["value"]
            if not entry["tensor"]:
                state[key] = int(value) if value == int(value) else value
            elif torch.is_tensor(state.get(key)):
                state[key].fill_(value)
            else:
                device = shard.parameter.device if on_device else "cpu"
                state[key] = torch.tensor(value, dtype=torch.float32, device=device)


def verify_together(checkpoint: Checkpoint) -> str:
    """Compare all files with the manifest, each by one rank (a collective).

    Returns:
        The damage, the same on every rank; "" for an intact checkpoint.
    """
    error = ""
    try:
        checkpoint.verify(sorted(checkpoint.files)[dist.get_rank() :: dist.get_world_size()])
    except Damaged as problem:
        error = str(problem)
    return "; ".join(filter(None, gather_objects(error)))


def from_first_rank(function: Callable[[], Any], group: dist.ProcessGroup | None = None) -> Any:
    """Call a function on rank 0; returns its result on every rank (a collective)."""
    result = [function() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(result, src=0, group=group)
    return result[0]


def tensors_as_json(tensors: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Small tensors as plain data, to the bit."""
    return {
        name: {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": [*tensor.shape], "values": flat}
        for name, tensor in tensors.items()
        for flat in [tensor.detach().flatten().tolist()]
    }


def tensors_of_json(data: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors that `tensors_as_json` received, on the CPU."""
    return {
        name: torch.tensor(kept["values"], dtype=getattr(torch, kept["dtype"])).view(kept["shape"])
        for name, kept in data.items()
    }
