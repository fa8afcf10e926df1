"""Steps that would do harm: a gradient that is not finite, a loss or a gradient norm far above its recent mean.

The decision falls before the update, from numbers that are the same on every rank, so all ranks make the same one. A
rejected step changes nothing: neither weights nor moments.

Where the optimizer's kernel takes a flag (`found_inf` of torch's fused ones), the device decides on its own, and the
host reads the verdict when it is asked for: by then the device has other work, and nothing has waited.
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
from ds_vit.engine.layer_norms import layer_norms, layer_norms_of
from ds_vit.parallel.zero_map import ZeroMap

SquareNorms = Callable[[], Iterable[tuple[str, float]]]


@dataclass(frozen=True)
class Rejection:
    """Why a step was not applied.

    Attributes:
        reason: "nonfinite", or "spike" (of the loss or the norm).
        loss: of the global batch; None where it was not looked at.
        grad_norm: global, before clipping.
        usual: the recent mean that a spike stands out from; None for what is not finite.
        layer: where the gradient is largest (or not finite), and its norm there.
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


class Recent:
    """The last values of a quantity, and whether a new one stands out.

    Args:
        factor: how many times the mean counts as standing out.
        size: values that are remembered.
        least: values without which nothing stands out.
    """

    def __init__(self, factor: float, size: int = 100, least: int = 10) -> None:
        self._factor = factor
        self._least = least
        self.values: deque[float] = deque(maxlen=size)

    @property
    def mean(self) -> float:
        """Of the remembered values."""
        return sum(self.values) / len(self.values)

    def stands_out(self, value: float) -> bool:
        """Whether a value is more than `factor` times the recent mean."""
        return len(self.values) >= self._least and value > self._factor * self.mean

    def add(self, value: float) -> None:
        """Remember a value that was accepted."""
        self.values.append(value)


class Verdict(NamedTuple):
    """Whether a step was applied.

    Attributes:
        applied: False where the step was skipped, because fp16 overflowed or the guard rejected it.
        rejection: why it was skipped; None where it was not, or nothing is known about it.
    """

    applied: bool
    rejection: Rejection | None = None


class HostScalar:
    """A device scalar on its way to the host; the device has not been waited for."""

    def __init__(self, scalar: torch.Tensor) -> None:
        self._here = torch.empty((), pin_memory=pins_memory(scalar.device))
        self._here.copy_(scalar.detach(), non_blocking=True)
        self._copied = record_event(scalar.device)

    @property
    def arrived(self) -> bool:
        """Whether `read` does not wait."""
        return self._copied is None or self._copied.query()

    def read(self) -> float:
        """The number; may wait for the device."""
        if self._copied is not None:
            self._copied.synchronize()
        return float(self._here.numpy())


@dataclass
class StepResult:
    """What one optimizer step leaves on this rank.

    Attributes:
        loss: fp32 scalar tensor, before the update; its mean over all ranks is that over the global batch.
        grad_norm: the global gradient norm before clipping; None if DeepSpeed is configured not to compute it.
        verdict: gives whether the step was applied, which may wait for the device.
    """

    loss: torch.Tensor
    grad_norm: float | torch.Tensor | None
    verdict: Callable[[], Verdict]


@dataclass(eq=False)
class StepGuard:
    """Stands in front of the optimizer that ZeRO calls.

    Attributes:
        zero_map: the map of this rank.
        norm: the global gradient norm of the step under way, before clipping.
        loss: this rank's sum and number of losses of the step under way; read to detect spikes only.
        clipped_by: what clipping multiplied the gradients of the step under way by.
        judged: whether DeepSpeed calls the optimizer only where the norm is finite. Reading a number waits for the
            device, so it is then not read again.
        square_norms: where the device is to decide: this rank's squared norms of the gradients of the step under way,
            with the timm names of their parameters, to be read later. None where the host decides.
    """

    zero_map: ZeroMap
    norm: Callable[[], torch.Tensor | float | None]
    loss: Callable[[], tuple[torch.Tensor | None, int]]
    clipped_by: Callable[[], float]
    judged: bool
    square_norms: Callable[[], SquareNorms] | None = None

    def __post_init__(self) -> None:
        self._recent: tuple[Recent, Recent] | None = None  # losses and norms
        self._decided = False
        self._late: Callable[[], Verdict] | None = None
        self.rejection: Rejection | None = None
        self._base = self.zero_map.base
        self._update = self._base.step
        self._base.step = self._step
        self.zero_map.on_overflow(self.overflowed)

    def watch_spikes(self, factor: float) -> None:
        """Reject steps whose loss or norm is more than `factor` times the mean of the last 100 (of 10 at least)."""
        self._recent = Recent(factor), Recent(factor)

    def recent(self) -> list[list[float]]:
        """The losses and norms that spikes are compared with, for a checkpoint."""
        return [list(recent.values) for recent in self._recent] if self._recent else [[], []]

    def remember(self, values: Sequence[Sequence[float]]) -> None:
        """Restore what `recent` gave, if spikes are watched for."""
        for recent, old in zip(self._recent or (), values, strict=False):
            recent.values.clear()
            recent.values.extend(old)

    @property
    def device_judges(self) -> bool:
        """Whether the device decides and the host reads later; the host detects spikes.

        So is the first step: torch's fused SGD would keep a momentum that its kernel, turned away, never wrote.
        """
        return self.square_norms is not None and self._recent is None and bool(self._base.state)

    def begin(self) -> None:
        """A new step."""
        self._decided = False
        self._late = None
        self.rejection = None
        if self.square_norms is not None:
            self._base.found_inf = None

    def verdict(self, *, applied: bool) -> Callable[[], Verdict]:
        """Gives the verdict on the step that was taken.

        Args:
            applied: what DeepSpeed says.
        """
        known = Verdict(applied and self.rejection is None, self.rejection)
        return self._late or (lambda: known)

    def overflowed(self, grads: list[torch.Tensor | None]) -> None:
        """Note that DeepSpeed skips the step under way by itself, because these gradients are not finite."""
        if not self._decided:
            self._decided = True
            worst = _largest(layer_norms(self.zero_map, grads))
            self.rejection = Rejection("nonfinite", None, math.inf, None, worst)

    def _step(self, closure: None = None) -> None:
        """What ZeRO calls in place of the optimizer's own `step`: once, or once for each group of parameters."""
        if not self._decided:
            self._decided = True
            if self.device_judges:
                self._let_the_device_judge()
            else:
                self.rejection = self._judge()
        if self.rejection is None:
            self._update()

    def _let_the_device_judge(self) -> None:
        norm: torch.Tensor = self.norm()
        square_norms, on_host = self.square_norms(), HostScalar(norm)

        @cache
        def read() -> Verdict:
            """What the device has decided by the norm (a collective where the step was rejected)."""
            value = on_host.read()
            if math.isfinite(value):
                return Verdict(True)
            worst = _largest(layer_norms_of(self.zero_map, square_norms()))
            return Verdict(False, Rejection("nonfinite", None, value, None, worst))

        self._base.found_inf = norm.isfinite().logical_not().float()
        self._late = read

    def _judge(self) -> Rejection | None:
        norm, loss = self.norm(), None
        if norm is None or (self.judged and self._recent is None):
            return None
        if self._recent is not None:
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
            return Rejection("nonfinite", loss, norm, None, self._worst_layer(finite=False))
        if self._recent is None or loss is None:
            return None
        for value, recent in zip((loss, norm), self._recent, strict=True):
            if recent.stands_out(value):
                return Rejection("spike", loss, norm, recent.mean, self._worst_layer(finite=True))
        for value, recent in zip((loss, norm), self._recent, strict=True):
            recent.add(value)
        return None

    def _worst_layer(self, finite: bool) -> tuple[str, float]:
        grads = self.zero_map.gradients(self.clipped_by() if finite else 1.0)
        return _largest(layer_norms(self.zero_map, grads))


def _largest(norms: dict[str, float]) -> tuple[str, float]:
    return max(norms.items(), key=lambda item: item[1] if math.isfinite(item[1]) else math.inf)
