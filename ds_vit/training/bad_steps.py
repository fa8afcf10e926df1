"""Steps that were not applied: counted and told; too many or too bad ones end the run, or lead back to a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ds_vit.config import RunConfig
from ds_vit.engine.step_guard import Rejection, StepResult
from ds_vit.fault_tolerance.exit_codes import Diverged
from ds_vit.monitoring.metrics import Reporter

# Steps in a row without an update after which going on is pointless; a loss scale of 2^16 is found in fewer.
MAX_SKIPS = 50


class RollBack(Exception):
    """Leaves training at a step that was turned down, on all ranks together.

    Attributes:
        step: that was turned down, counted from 1.
        rejection: why.
        diverged: what to raise where there is nothing to go back to.
    """

    def __init__(self, step: int, rejection: Rejection, diverged: Diverged) -> None:
        super().__init__(str(rejection))
        self.step = step
        self.rejection = rejection
        self.diverged = diverged


class BadSteps:
    """The skipped steps and rollbacks of a run; the same on every rank.

    Args:
        config: says whether to stop, to skip or to roll back.
        fp16: a step without a reason is an overflow under a loss scale.
    """

    def __init__(self, config: RunConfig, *, fp16: bool) -> None:
        self.skipped = 0
        self.rollbacks = 0
        self._in_a_row = 0
        self._config = config
        self._fp16 = fp16

    def state_dict(self) -> dict[str, Any]:
        """What a run that goes on has to know."""
        return {"skipped_steps": self.skipped, "skipped_in_a_row": self._in_a_row, "rollbacks": self.rollbacks}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take up what `state_dict` gave."""
        self.skipped, self.rollbacks = state["skipped_steps"], state["rollbacks"]
        self._in_a_row = state.get("skipped_in_a_row", 0)  # not in older checkpoints

    def applied(self) -> None:
        """A step was applied."""
        self._in_a_row = 0

    def skip(self, step: int, scale: float, result: StepResult, loss: float, reporter: Reporter | None) -> None:
        """Count a step that was not applied, say why, and stop where that is asked for.

        Args:
            step: counted from 1.
            scale: the loss scale that it was taken with.
            result: what it left.
            loss: its mean over the global batch.
            reporter: of rank 0.

        Raises:
            RollBack: the run shall go on from its last checkpoint.
            Diverged: the run shall not go on.
        """
        self.skipped += 1
        self._in_a_row += 1
        rejection = result.rejection
        overflow = self._fp16 and (rejection is None or rejection.reason == "nonfinite")
        reason = "overflow" if overflow or rejection is None else rejection.reason
        if reporter:
            norm, layer, there = (None, None, None)
            if rejection is not None:
                norm, (layer, there) = rejection.grad_norm, rejection.layer
            row = {"step": step, "reason": reason, "loss": loss, "grad_norm": norm, "layer": layer}
            row |= {"layer_norm": there, "loss_scale": scale, "skipped_steps": self.skipped}
            reporter.skip(row, str(rejection) if rejection and not overflow else None)
        saved = "what was saved before is intact; lower the learning rate, warm up for longer or clip harder"
        if not overflow and self._config.on_nonfinite == "stop":
            diverged = Diverged(
                f"step {step}: {rejection}; the update was not applied; {saved}, or go on past such steps "
                "with --on-nonfinite skip"
            )
        elif self._in_a_row >= MAX_SKIPS:
            diverged = Diverged(f"step {step}: {self._in_a_row} steps in a row were skipped ({reason}); {saved}")
        else:
            return
        if rejection is not None and self.rollbacks < self._config.rollback:
            raise RollBack(step, rejection, diverged)
        raise diverged

    def rolled_back(self, bad: RollBack, to_step: int, skipped_batches: int, reporter: Reporter | None) -> None:
        """Training goes on from an earlier step, without the samples since then.

        Args:
            bad: the step that led here.
            to_step: the steps that are done now.
            skipped_batches: global batches that this leaves out.
            reporter: of rank 0.
        """
        self.rollbacks += 1
        self._in_a_row = 0
        if reporter:
            row = {"step": bad.step, "reason": bad.rejection.reason, "layer": bad.rejection.layer[0]}
            row |= {"to_step": to_step, "skipped_batches": skipped_batches, "number": self.rollbacks}
            reporter.rollback(row)
