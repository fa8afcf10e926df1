"""The passes of a micro-batch as CUDA graphs: captured once, replayed on static inputs (`--cuda-graph`).

The first pass of a kind runs eagerly and fills caches and handles of libraries. The second is captured: Python runs
once more, the device runs nothing. That pass and all later ones are replays, in which no hook runs; `StepGraphs` sets
the state that DeepSpeed's hooks and those of the flat gradient set.

Everything that varies is a tensor at a fixed address: the batch, scheduled values, the loss scale. All graphs share one
memory pool, so the outputs of a replay are valid until the next one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ds_vit.device import capture, count_pool, graph_pool
from ds_vit.engine.flat_gradient import FlatGradient
from ds_vit.engine.patches import replaced
from ds_vit.fault_tolerance.errors import first_line
from ds_vit.tasks.task import StepContext

Given = Mapping[str, torch.Tensor]
Pass = Callable[..., Any]
"""Some `Given` → a tensor, or tensors by name."""

LOSS_SCALE = "loss scale"


class StepGraphs:
    """The graphs of a run on this rank.

    Args:
        engine: DeepSpeed's.
        flat: the gradient that the passes write.
        context: with the scheduled values that the passes read.
        settle: makes the loss scale that of the next loss.

    Attributes:
        reason: why nothing is captured any more; "" while it is.
        say: prints a line for people, on the rank that has a console.
    """

    def __init__(self, engine: Any, flat: FlatGradient, context: StepContext, settle: Callable[[], object]) -> None:
        self._engine, self._flat, self._context, self._settle = engine, flat, context, settle
        flat.releases = False  # a graph writes gradients at the addresses of its capture
        self.say: Callable[[str], object] = lambda line: None
        self._device: torch.device = engine.device
        self._inputs: dict[tuple[Any, ...], Given] = {}
        self._scalars: dict[str, torch.Tensor] = {}
        self._values: dict[str, float] = {}
        self.reason = ""
        self._graphs: dict[tuple[Any, ...], tuple[Any, Any] | None] = {}  # a graph, and the tensors that it returns
        self._pool = graph_pool(self._device)

    def clear(self) -> None:
        """Drop all graphs and their memory."""
        count_pool(self._device, 0)
        self._graphs.clear()
        self._pool = graph_pool(self._device)

    def run(self, name: str, function: Pass, *given: Given) -> Any:
        """Replay `function(*given)`, or run it eagerly where it is not captured; returns its outputs.

        Args:
            name: of the pass.
            function: runs DeepSpeed's engine forward and perhaps backward. Only `given`, which it reads on the device,
                the scheduled values and the loss scale may differ from call to call.
            given: tensors by name; those on the host are ignored.
        """
        kind = self._device.type
        on_device = [{name: t for name, t in part.items() if t.device.type == kind} for part in given]
        boundary = self._engine.is_gradient_accumulation_boundary()
        reduces = boundary and self._context.groups.layout.dp > 1
        shapes = [(name, tensor.shape, tensor.dtype) for part in on_device for name, tensor in part.items()]
        key = (name, torch.is_grad_enabled() and self._flat.fresh, reduces, *shapes)
        if self.reason or key not in self._graphs:
            self._graphs.setdefault(key, None)
            return function(*given)
        self._set_scalars()
        inputs = self._filled(on_device)
        captured = self._graphs[key] = self._graphs[key] or self._capture(function, inputs)
        if captured is None:
            return function(*given)
        graph, outputs = captured  # the latter in memory that the next replay writes, of whichever graph
        graph.replay()
        if torch.is_grad_enabled():
            self._flat.end_replay(boundary)
        if isinstance(outputs, Mapping):
            return {name: tensor.clone() for name, tensor in outputs.items()}
        return outputs.clone()

    def _filled(self, given: Sequence[Given]) -> Sequence[Given]:
        """Copy the tensors to the addresses that graphs read."""
        inputs: list[Given] = []
        for place, part in enumerate(given):
            key = place, *[(name, tensor.shape, tensor.dtype) for name, tensor in part.items()]
            if key not in self._inputs:
                self._inputs[key] = {name: torch.empty_like(tensor) for name, tensor in part.items()}
            inputs.append(self._inputs[key])
        torch._foreach_copy_(*([tensor for part in side for tensor in part.values()] for side in (inputs, given)))
        return inputs

    def _set_scalars(self) -> None:
        """Copy the scalars of this step to the device."""
        values = dict(self._context.schedules)
        if self._engine.fp16_enabled():
            self._settle()
            values[LOSS_SCALE] = float(self._engine.optimizer.loss_scaler.loss_scale)
        for name, value in values.items():
            if name not in self._scalars:
                self._scalars[name] = torch.empty((), dtype=torch.float64, device=self._device)
            if self._values.get(name) != value:  # else each micro-batch would launch a kernel for each
                self._values[name] = value
                self._scalars[name].fill_(value)

    def _reading_scalars(self) -> contextlib.ExitStack:
        """Within it, the pass reads scheduled values and the loss scale from the device."""
        stack = contextlib.ExitStack()
        stack.enter_context(replaced(self._context, "schedules", self._scalars))
        if self._engine.fp16_enabled():
            scaled = lambda loss: (loss.double() * self._scalars[LOSS_SCALE]).to(loss.dtype)  # noqa: E731
            stack.enter_context(replaced(self._engine.optimizer.loss_scaler, "scale_loss", scaled))
        return stack

    def _capture(self, function: Pass, inputs: Sequence[Given]) -> tuple[Any, Any] | None:
        """A graph of the pass, and its outputs; None where it cannot be captured: the state is then as before."""
        fresh = self._flat.fresh
        _renew_accumulators(self._engine.module)
        try:
            with self._reading_scalars(), capture(self._device, self._pool) as graph:
                outputs = function(*inputs)
            return graph, outputs
        except RuntimeError as error:
            self.reason = first_line(error.__context__ or error)  # the end of the capture fails, too
        self._flat.abandon(fresh)
        state = getattr(self._engine.optimizer, "_backward_hook_state", None)
        if state is not None:
            state.backward_active_depth = 0
        self.clear()
        self._inputs.clear()
        self.say(f"--cuda-graph: this step cannot be captured, and runs eagerly: {self.reason}")
        return None


def _renew_accumulators(module: nn.Module) -> None:
    """Have autograd create its nodes that accumulate gradients anew, on the stream of the capture.

    A node runs on the stream that was current when it was made, and lives as long as anything holds it, such as what
    DeepSpeed has flattened. The default stream cannot be captured. For data of another type torch makes a new node.
    """
    for parameter in module.parameters():
        if parameter.requires_grad:
            data = parameter.data
            parameter.data = data.new_empty(0, dtype=torch.float64)
            parameter.data = data
