"""The mean loss of an epoch so far, without waiting for the device at any step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ds_vit.engine.base import Engine


class EpochMean:
    """The mean of this rank's losses over the applied steps of an epoch; its mean over the ranks is the epoch's.

    Args:
        device: where the losses are.

    Attributes:
        epoch: that the mean is of.
        steps: that are in it.
    """

    def __init__(self, device: torch.device) -> None:
        self.epoch = 0
        self.steps = 0
        self._mean = torch.zeros((), device=device)

    def add(self, loss: torch.Tensor, epoch: int) -> None:
        """Take in the loss of a step; the first one of another epoch begins anew."""
        self._begin(epoch)
        self.steps += 1
        self._mean.lerp_(loss.detach().float(), 1 / self.steps)

    def own(self, epoch: int) -> torch.Tensor:
        """This rank's mean over an epoch so far, fp32; 0 where none of its steps was applied yet."""
        self._begin(epoch)
        return self._mean

    def _begin(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch, self.steps = epoch, 0
            self._mean.zero_()

    def state_dict(self, engine: Engine) -> dict[str, Any]:
        """Plain data, the same on every rank (a collective)."""
        return {"epoch": self.epoch, "steps": self.steps, "mean": float(engine.mean(self._mean))}

    def load_state_dict(self, state: Mapping[str, Any] | None) -> None:
        """Take up what `state_dict` gave; None, of a checkpoint from before there was one, begins anew."""
        self.epoch, self.steps = (state["epoch"], state["steps"]) if state else (0, 0)
        self._mean.fill_(state["mean"] if state else 0.0)
