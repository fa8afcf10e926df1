"""All legal layouts of a model on a machine, each with the fastest micro-batch that fits, by images per second.

The costs of a model are counted once for each tensor-parallel degree, with three blocks: the first may differ (no
drop-path), the others are alike. Memory is that of planner/memory.py, time that of planner/cost.py.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ds_vit.config.batch import BatchSizes, nearest_dp, ways_to_share
from ds_vit.config.deepspeed_rules import Checkpointing, Precision, with_fp32_sums
from ds_vit.config.schema import RunConfig
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.models.layers import take_apart
from ds_vit.models.zoo import ModelSpec, TimmViT, create_model, num_parameters
from ds_vit.optim.build import optimizer_class, rules_of, states_per_element
from ds_vit.parallel.layout import Layout
from ds_vit.parallel.tensor.class_parallel import pays
from ds_vit.parallel.tensor.shard import legal_degrees
from ds_vit.planner.cost import Machine, StepTime, step_time
from ds_vit.planner.counting import LayerWork, count_flops, work_of_layers
from ds_vit.planner.memory import (
    LayerMemory,
    MemoryRules,
    RankMemory,
    StageMemory,
    layers_of_rank,
    memory_by_stage,
    memory_of_layers,
    unaligned_matrices,
)
from ds_vit.planner.pipeline import balance

if TYPE_CHECKING:
    from ds_vit.config.deepspeed_keys import DeepSpeedJson

RECOMPUTING: dict[str, Checkpointing] = {
    "": Checkpointing(),
    "selective": Checkpointing(1, selective=True),
    "full": Checkpointing(1),
}
"""Value of `--grad-checkpointing` → its meaning; the first is none."""
_MOST_STAGES = 16
_LARGEST_MICRO_BATCH = 512


@dataclass(frozen=True)
class PlanRequest:
    """What to plan.

    Attributes:
        spec: the model.
        machine: what it would run on.
        global_batch: images of a step.
        json: DeepSpeed's, of which ZeRO's stage and the batch are filled in; see `fixed_stage`.
        precision: number formats.
        model_ema: the weights have an average.
        fixed_stage: the only ZeRO stage; None for all.
        pp: the only pipeline degree; None for all.
        tp: the only tensor-parallel degree; None for all.
    """

    spec: ModelSpec
    machine: Machine
    global_batch: int
    json: DeepSpeedJson
    precision: Precision
    model_ema: bool = False
    fixed_stage: int | None = None
    pp: int | None = None
    tp: int | None = None


@dataclass(frozen=True)
class Candidate:
    """A layout, its memory and its time.

    Attributes:
        layout: degrees.
        stage: of ZeRO.
        recomputing: as `--grad-checkpointing` says it.
        batch: arithmetic.
        bounds: of the pipeline's stages.
        memory: of a rank of each stage.
        room: bytes that a rank may use.
        time: of a step.
    """

    layout: Layout
    stage: int
    recomputing: str
    batch: BatchSizes
    bounds: tuple[int, ...]
    memory: tuple[RankMemory, ...]
    room: float
    time: StepTime

    @property
    def needs(self) -> int:
        """Bytes of the fullest rank."""
        return max(memory.together for memory in self.memory)

    @property
    def fits(self) -> bool:
        """Whether every rank has room."""
        return self.needs <= self.room

    @property
    def images_per_second(self) -> float:
        """Of all ranks."""
        return self.batch.global_batch / self.time.seconds

    def __str__(self) -> str:
        text = f"pp {self.layout.pp} x tp {self.layout.tp} x dp {self.layout.dp}, ZeRO-{self.stage}"
        return f"{text}, {self.recomputing} recomputing" if self.recomputing else text


@dataclass(frozen=True)
class Planned:
    """All layouts of a model on a machine.

    Attributes:
        request: of the plan.
        parameters: of the model.
        flops: of an image in training.
        fitting: by falling images per second.
        too_large: those whose smallest micro-batch does not fit, by rising memory.
        unaligned: tensor-parallel degree → what `unaligned_matrices` names.
    """

    request: PlanRequest
    parameters: int
    flops: int
    fitting: tuple[Candidate, ...]
    too_large: tuple[Candidate, ...]
    unaligned: Mapping[int, Sequence[str]]

    def mfu(self, found: Candidate) -> float:
        """Share of the peak that a layout reaches; recomputed products do not count."""
        accelerator = self.request.machine.accelerator
        peak = accelerator.fp32_tflops if self.request.precision.name == "fp32" else accelerator.bf16_tflops
        return self.flops * found.images_per_second / self.request.machine.gpus / (peak * 1e12)


class Search:
    """Finds and ranks layouts.

    Args:
        request: what to plan.

    Raises:
        UserError: a degree, a batch or a ZeRO stage that is not possible, with the nearest that is.
    """

    def __init__(self, request: PlanRequest) -> None:
        self.request = request
        self._unaligned: dict[int, list[str]] = {}
        self._costs = functools.cache(self._count)
        self.describe()
        self._check()

    def describe(self) -> None:
        """Set the model, its depth and its legal tensor-parallel degrees."""
        self.model = create_model(self.request.spec)
        self.depth = len(self.model.blocks)
        self.degrees = [tp for tp in legal_degrees(self.model) if self._is_legal_tp(tp)]

    def _rules(self, json: DeepSpeedJson, layout: Layout, checkpointing: Checkpointing) -> MemoryRules:
        """What memory and time depend on besides the layers."""
        request = self.request
        return MemoryRules(
            json,
            layout,
            precision=request.precision,
            optimizer=self._optimizer[0],
            average=request.model_ema,
            checkpointing=checkpointing,
        )

    @functools.cached_property
    def _optimizer(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        block = self.request.json.optimizer  # neither memory nor time depends on what training's flags fill in
        cls, arguments = optimizer_class(block.type, block.params, "the JSON") if block else (torch.optim.AdamW, {})
        return cls, {"lr": 1e-3, **arguments}

    def _is_legal_tp(self, tp: int) -> bool:
        machine = self.request.machine
        in_hosts = machine.gpus <= machine.per_node or machine.per_node % tp == 0  # else some group has two hosts
        return machine.gpus % tp == 0 and tp <= machine.per_node and in_hosts

    def _check(self) -> None:
        """Reject degrees, batches and ZeRO stages that are not possible."""
        request, machine = self.request, self.request.machine
        pp, tp = request.pp or 1, request.tp or 1
        if request.tp is not None and tp not in self.degrees:
            nearest = min(self.degrees, key=lambda other: abs(other - tp))
            raise UserError(
                f"--tp {tp} is not possible: it has to divide the model's heads and hidden features, the "
                f"{machine.gpus} GPUs, and stay inside a host of {machine.per_node}; the nearest is --tp {nearest} (of "
                f"{', '.join(map(str, self.degrees))})"
            )
        if request.pp is not None and pp not in self._stages(tp):
            nearest = min(self._stages(tp), key=lambda other: abs(other - pp))
            raise UserError(
                f"--pp {pp} is not possible: it has to divide {machine.gpus // tp} ranks and be at most the model's "
                f"{self.depth + 2} layers and {_MOST_STAGES}; the nearest is --pp {nearest}"
            )
        if request.fixed_stage not in (None, 0, 1) and pp > 1:
            raise UserError(f"--pp {pp} needs ZeRO-1, not ZeRO-{request.fixed_stage}: drop one of them")
        if not list(self._layouts()):
            dp = max(1, machine.gpus // (pp * tp))
            batch = max(1, round(request.global_batch / dp)) * dp
            raise UserError(
                f"--global-batch {request.global_batch} cannot be shared by {dp} replicas; the nearest that can is "
                f"{batch}, or take {nearest_dp(request.global_batch, dp) * pp * tp} GPUs"
            )

    def _stages(self, tp: int) -> list[int]:
        ranks = self.request.machine.gpus // tp
        return [pp for pp in range(1, min(_MOST_STAGES, self.depth + 2) + 1) if ranks % pp == 0]

    def _layouts(self) -> Iterator[Layout]:
        request = self.request
        for tp in [request.tp] if request.tp else self.degrees:
            for pp in self._stages(tp):
                if request.pp not in (None, pp):
                    continue
                layout = Layout(pp, request.machine.gpus // (pp * tp), tp)
                if request.global_batch % layout.dp == 0:
                    yield layout

    def _zero_stages(self, layout: Layout) -> list[int]:
        stages = [1] if layout.pp > 1 else [1, 2, 3] if layout.dp > 1 else [1]
        if self.request.precision.compute == "float32" and layout.pp == 1:  # DeepSpeed's bf16 without ZeRO is refused
            stages = [0, *stages]
        return [stage for stage in stages if self.request.fixed_stage in (None, stage)]

    def _count(self, tp: int) -> tuple[list[LayerMemory], list[LayerWork]]:
        """The memory and the work of each layer of a rank at a tensor-parallel degree."""
        request, model, compute = self.request, self._shallow(3), self.request.precision.compute
        class_parallel = tp > 1 and pays(request.spec.num_classes, tp)
        layers = layers_of_rank(take_apart(model), RunConfig(tp=tp), class_parallel=class_parallel, compute=compute)
        self._unaligned[tp] = unaligned_matrices(layers)
        cls, arguments = self._optimizer
        states, fallback = states_per_element(cls, arguments), rules_of(cls).fallback(model, arguments) or frozenset()
        memory = memory_of_layers(layers, states=states, fallback=fallback)
        works = work_of_layers(layers)
        return self._repeat_blocks(memory), self._repeat_blocks(works)

    def _repeat_blocks(self, of_three: list[Any]) -> list[Any]:
        """What was counted with three blocks, for all blocks."""
        return [*of_three[:2], *[of_three[-2]] * (self.depth - 1), of_three[-1]]

    def _shallow(self, depth: int) -> TimmViT:
        """The model with no more than this many of its blocks."""
        kwargs = {**self.request.spec.model_kwargs, "depth": min(depth, self.depth)}
        return create_model(dataclasses.replace(self.request.spec, model_kwargs=kwargs))

    def _training_flops(self) -> int:
        """Of an image: those of two blocks and the ends, and what each further block adds."""
        two, three = (count_flops(self._shallow(depth)).training for depth in (2, 3))
        return two + max(0, self.depth - 2) * (three - two)

    def run(self) -> Planned:
        """Every layout, ranked."""
        found = []
        for layout in self._layouts():
            memory, works = self._costs(layout.tp)
            flops = [work.forward.flops + work.backward.flops for work in works]
            bounds = tuple(balance(flops, [layer.kept.bytes for layer in memory], layout.pp))
            for stage, recomputing in itertools.product(self._zero_stages(layout), RECOMPUTING):
                found.append(self._fastest(layout, stage, recomputing, bounds))
        return Planned(
            self.request,
            num_parameters(self.model),
            self._training_flops(),
            tuple(sorted((one for one in found if one.fits), key=lambda one: -one.images_per_second)),
            tuple(sorted((one for one in found if not one.fits), key=lambda one: one.needs)),
            self._unaligned,
        )

    def _fastest(self, layout: Layout, stage: int, recomputing: str, bounds: tuple[int, ...]) -> Candidate:
        """The fastest micro-batch that fits, or else the smallest."""
        layers, works = self._costs(layout.tp)
        request, accelerator = self.request, self.request.machine.accelerator
        room, tried = accelerator.memory_bytes - accelerator.reserved_bytes, []

        @functools.cache
        def memory_at(accumulation: int) -> tuple[MemoryRules, list[StageMemory]]:
            json = with_fp32_sums(json_at_stage(request.json, stage), request.precision, accumulation)
            rules = self._rules(json, layout, RECOMPUTING[recomputing])
            return rules, memory_by_stage(layers, bounds, rules)

        for batch in ways_to_share(request.global_batch, layout.dp):
            if batch.micro_batch > _LARGEST_MICRO_BATCH or (batch.accumulation < layout.pp and batch.micro_batch > 1):
                break
            rules, stages = memory_at(min(batch.accumulation, 2))
            memory = tuple(one.on_device(batch) for one in stages)
            time = step_time(works, bounds, request.machine, batch, rules)
            tried.append(Candidate(layout, stage, recomputing, batch, bounds, memory, room, time))
            if not tried[-1].fits:
                break
        return min(tried, key=lambda one: (not one.fits, -one.images_per_second))


def json_at_stage(json: DeepSpeedJson, stage: int) -> DeepSpeedJson:
    """A DeepSpeed JSON at a ZeRO stage: in bf16 with sums in fp32 at stage 1, with overlap at 3."""
    values: dict[str, Any] = {"zero_optimization.stage": stage}
    if stage == 3 and json.given("zero_optimization.overlap_comm") is None:
        values["zero_optimization.overlap_comm"] = True
    elif stage == 1 and json.bf16.enabled and json.given("data_types") is None:
        values["data_types.grad_accum_dtype"] = "fp32"
    return json.replace(values, ["data_types"] if stage >= 2 else [])
