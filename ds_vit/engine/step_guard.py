"""The step guard: skips an update whose gradient is not finite, or whose loss or gradient norm spikes.

It decides before the update, from numbers that are the same on every rank. A skipped step changes neither weights nor
moments.

Where the optimizer's kernel takes a flag (`found_inf` of torch's fused ones), the device decides, and the host reads
the outcome later: the device has other work by then, and nothing waits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import torch
import torch.distributed as dist

from ds_vit.device import pins_memory, record_event
from ds_vit.engine.layer_norms import worst_layer
from ds_vit.parallel.tensor.slices import Segment
from ds_vit.parallel.zero_map import Shard, ZeroMap

SquareNorms = Callable[[], Iterable[tuple[str, float]]]
"""Gives the timm name of a parameter and the squared norm of a part of its gradient, for each part on this rank."""


_LAST_VALUES, _LEAST_VALUES = 100, 10
"""Losses and norms whose mean a spike exceeds: at most so many, and with fewer nothing is a spike."""


class CountedGradients:
    """The parts of a rank's flat gradients that the global norm counts.

    Args:
        shards: of the ZeRO map.
        grads: a flat gradient for each of them.
        counts: whether this rank counts a segment, so that over all ranks each is counted once.
        most: elements of a part; None for a segment whole.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        grads: Sequence[torch.Tensor],
        counts: Callable[[Segment], bool],
        most: int | None = None,
    ) -> None:
        self._parts: list[torch.Tensor] = []
        self._names: list[str] = []
        for shard, grad in zip(shards, grads, strict=True):
            for segment in filter(counts, shard.segments):
                whole = segment.of(grad)
                parts = whole.split(most) if most else (whole,)
                self._parts += parts
                self._names += [segment.name] * len(parts)
        if not self._parts:
            self._parts = [torch.zeros(1, device=grads[0].device)]

    def norms(self, dtype: torch.dtype) -> torch.Tensor:
        """The norm of each part, now; one zero where the rank counts none."""
        self._norms = torch.stack(torch._foreach_norm(self._parts, 2, dtype))
        return self._norms

    def square_norms(self) -> SquareNorms:
        """The squares of the last `norms`, to be read later."""
        names, norms = self._names, self._norms
        return lambda: zip(names, norms[: len(names)].double().square().tolist(), strict=True)


@dataclass(frozen=True)
class SkippedStep:
    """A step that was not applied, and why.

    Attributes:
        reason: "nonfinite", or "spike" (of the loss or the norm).
        loss: of the global batch; None where it was not read.
        grad_norm: global, before clipping.
        usual: the recent mean that a spike exceeds; None where the gradient is not finite.
        layer: the layer with the largest gradient (or one that is not finite), and its norm.
    """

    reason: str
    loss: float | None
    grad_norm: float
    usual: float | None
    layer: tuple[str, float]

    def __str__(self) -> str:
        where = f"largest in {self.layer[0]} ({self.layer[1]:.3g})"
        if self.reason == "nonfinite":
            return f"the gradient is not finite (norm {self.grad_norm:.3g}, {where})"
        return f"a spike: loss {self.loss:.4g}, gradient norm {self.grad_norm:.3g}, usually {self.usual:.3g}; {where}"


def usual_before_spike(recent: Sequence[float], value: float, factor: float) -> float | None:
    """The mean of the last values of a quantity, if there are enough and this value is above `factor` times it."""
    usual = sum(recent) / max(1, len(recent))
    return usual if len(recent) >= _LEAST_VALUES and value > factor * usual else None


class StepOutcome(NamedTuple):
    """Whether a step was applied.

    Attributes:
        applied: False where the step was skipped, because fp16 overflowed or the guard rejected it.
        skipped: why; None where the step was applied, or DeepSpeed skipped it without a reason.
    """

    applied: bool
    skipped: SkippedStep | None = None


class HostScalar:
    """A device scalar that is copied to the host without a wait."""

    def __init__(self, scalar: torch.Tensor) -> None:
        self._here = torch.empty((), pin_memory=pins_memory(scalar.device))
        self._here.copy_(scalar.detach(), non_blocking=True)
        self._copied = record_event(scalar.device)

    @property
    def arrived(self) -> bool:
        """Whether `read` does not wait."""
        return self._copied is None or self._copied.query()

    def read(self) -> float:
        """The number; waits for the copy."""
        if self._copied is not None:
            self._copied.synchronize()
        return float(self._here.numpy())


@dataclass
class StepResult:
    """The result of one optimizer step on this rank.

    Attributes:
        loss: fp32 scalar tensor, before the update; its mean over all ranks is that over the global batch.
        grad_norm: the global gradient norm before clipping; None if DeepSpeed is configured not to compute it.
        outcome: gives whether the step was applied; may wait for the device.
    """

    loss: torch.Tensor
    grad_norm: float | torch.Tensor | None
    outcome: Callable[[], StepOutcome]


@dataclass(eq=False)
class StepGuard:
    """Wraps the `step` of the optimizer that ZeRO calls.

    Attributes:
        zero_map: the map of this rank.
        norm: the global gradient norm of the step under way, before clipping.
        loss: this rank's sum and number of losses of the step under way; read to detect spikes only.
        clipped_by: the factor by which clipping multiplied the gradients of the step under way.
        checked: whether the optimizer is called only where the norm is finite. Reading a number waits for the device,
            so the guard does not read it again.
        square_norms: gives this rank's squared gradient norms of the step under way, to be read later, where the device
            decides; None where the host decides.
        factor: steps are rejected whose loss or norm is more than so many times the mean of the last 100 (of 10 at
            least).
        late: gives the outcome of the step that was taken, which the device decides; None where the host has.
    """

    zero_map: ZeroMap
    norm: Callable[[], torch.Tensor | float | None]
    loss: Callable[[], tuple[torch.Tensor | None, int]]
    clipped_by: Callable[[], float]
    checked: bool
    square_norms: Callable[[], SquareNorms] | None = None
    factor: float = math.inf

    def __post_init__(self) -> None:
        self._recent = deque[float](maxlen=_LAST_VALUES), deque[float](maxlen=_LAST_VALUES)  # losses and norms
        self._base = self.zero_map.base
        self._update = self._base.step
        self._base.step = self._step
        self.begin()

    def recent(self) -> list[list[float]]:
        """The losses and norms that spikes are compared with, for a checkpoint."""
        return [list(recent) for recent in self._recent]

    def remember(self, values: Sequence[Sequence[float]]) -> None:
        """Restore what `recent` gave, if spikes are watched for: others would be out of date when they are again."""
        for recent, old in zip(self._recent, values if self.factor < math.inf else (), strict=False):
            recent.clear()
            recent.extend(old)

    @property
    def device_decides(self) -> bool:
        """Whether the device decides, and the host reads the outcome later.

        The host decides where it detects spikes, and in the first step: torch's fused SGD would keep a momentum that
        its kernel, which skips the step, has not written.
        """
        return self.square_norms is not None and self.factor == math.inf and bool(self._base.state)

    def begin(self) -> None:
        """Begin a new step."""
        self._decided = False
        self.late: Callable[[], StepOutcome] | None = None
        self.skipped: SkippedStep | None = None
        if self.square_norms is not None:
            self._base.found_inf = None

    def outcome(self, *, applied: bool) -> Callable[[], StepOutcome]:
        """`StepResult.outcome` of the step that was taken.

        Args:
            applied: whether DeepSpeed reports the step as applied.
        """
        known = StepOutcome(applied and self.skipped is None, self.skipped)
        return self.late or (lambda: known)

    def overflowed(self) -> None:
        """Note that the step under way is skipped because its gradients are not finite."""
        if not self._decided:
            self._decided = True
            self.skipped = SkippedStep("nonfinite", None, math.inf, None, self._worst_layer(finite=False))

    def _step(self, closure: None = None) -> None:
        """ZeRO calls this in place of the optimizer's own `step`, once or once for each group of parameters."""
        if not self._decided:
            self._decided = True
            if self.device_decides:
                self._decide_on_device()
            else:
                self.skipped = self._decide()
        if self.skipped is None:
            self._update()

    def _decide_on_device(self) -> None:
        norm: torch.Tensor = self.norm()
        square_norms, on_host = self.square_norms(), HostScalar(norm)

        @cache
        def read() -> StepOutcome:
            """The decision of the device, by the norm (a collective where the step was skipped)."""
            value = on_host.read()
            if math.isfinite(value):
                return StepOutcome(True)
            worst = worst_layer(self.zero_map, square_norms())
            return StepOutcome(False, SkippedStep("nonfinite", None, value, None, worst))

        self._base.found_inf = norm.isfinite().logical_not().float()
        self.late = read

    def _decide(self) -> SkippedStep | None:
        norm, loss = self.norm(), None
        watches = self.factor < math.inf
        if norm is None or (self.checked and not watches):
            return None
        if watches:
            loss_sum, count = self.loss()
            # One answer for all ranks: the last digit of the norm may differ between pipeline stages.
            figures = torch.zeros(3, dtype=torch.float64, device=self.zero_map.device)
            figures[0] = 0.0 if loss_sum is None else loss_sum.double()
            figures[1] = count
            figures[2] = torch.as_tensor(norm, dtype=torch.float64) / dist.get_world_size()
            dist.all_reduce(figures)
            total, number, norm = figures.tolist()
            loss = total / number
        norm = float(norm)
        if not math.isfinite(norm) or (loss is not None and not math.isfinite(loss)):
            return SkippedStep("nonfinite", loss, norm, None, self._worst_layer(finite=False))
        if loss is None:
            return None
        for value, recent in zip((loss, norm), self._recent, strict=True):
            if (usual := usual_before_spike(recent, value, self.factor)) is not None:
                return SkippedStep("spike", loss, norm, usual, self._worst_layer(finite=True))
        for value, recent in zip((loss, norm), self._recent, strict=True):
            recent.append(value)
        return None

    def _worst_layer(self, finite: bool) -> tuple[str, float]:
        grads = self.zero_map.gradients(self.clipped_by() if finite else 1.0)
        squares = (
            (segment.name, float(segment.of(grad).double().square().sum()))
            for shard, grad in zip(self.zero_map.shards, grads, strict=True)
            for segment in filter(self.zero_map.counts, shard.segments)
        )
        return worst_layer(self.zero_map, squares)
