"""The resolved settings of an engine: how a model is computed and its state partitioned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from ds_vit.config.deepspeed_keys import DeepSpeedJson
from ds_vit.config.deepspeed_rules import Checkpointing, Precision
from ds_vit.models.checkpointing import (
    CheckpointFunction,
    recompute_all,
    recompute_from_host_memory,
    recompute_selectively,
)


@dataclass(frozen=True)
class EngineSettings:
    """Number formats, ZeRO, recomputation.

    Attributes:
        path: of the DeepSpeed JSON, named in messages.
        json: the DeepSpeed JSON without "auto".
        precision: number formats.
        checkpointing: of activations.
        graphs: the passes of a micro-batch are captured and replayed.
        origins: dotted name of a value in `json` → where it came from; values of the file have none.
        notes: lines for people.
    """

    path: str
    json: DeepSpeedJson
    precision: Precision
    checkpointing: Checkpointing
    graphs: bool = False
    origins: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    notes: tuple[str, ...] = field(default=(), compare=False)

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage, 0 without ZeRO."""
        return self.json.zero_stage

    @property
    def autocast(self) -> bool:
        """Whether torch casts the operands of each operation."""
        return "autocast" in self.precision.name

    @property
    def dtype(self) -> torch.dtype:
        """The type that the model computes in."""
        return getattr(torch, self.precision.compute)

    @property
    def recompute(self) -> CheckpointFunction:
        """Runs a group of blocks whose activations are recomputed: `function(run, *tensors)`."""
        if self.checkpointing.selective:
            return recompute_selectively
        return recompute_from_host_memory if self.checkpointing.cpu else recompute_all
