"""All legal layouts of a run on a machine, each with the fastest micro-batch that fits, by images per second.

The layers of the run are counted once for each tensor-parallel degree. Memory is that of planner/memory.py, time that
of planner/cost.py.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ds_vit.config.batch import BatchSizes, nearest_dp, ways_to_share
from ds_vit.config.deepspeed_rules import Checkpointing, with_fp32_sums
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.models.zoo import num_parameters
from ds_vit.parallel.layout import Layout
from ds_vit.parallel.tensor.class_parallel import pays
from ds_vit.parallel.tensor.shard import legal_degrees
from ds_vit.planner.cost import Machine, StepTime, step_time
from ds_vit.planner.counting import count_flops
from ds_vit.planner.memory import MemoryRules, RankMemory, StageMemory, memory_by_stage, unaligned_matrices
from ds_vit.planner.pipeline import balance

if TYPE_CHECKING:
    from ds_vit.config.deepspeed_keys import DeepSpeedJson
    from ds_vit.training.cost import Cost
    from ds_vit.training.run import Run

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
        machine: what the run would be on.
        global_batch: images of a step.
        json: DeepSpeed's, of which ZeRO's stage and the batch are filled in; see `fixed_stage`.
        fixed_stage: the only ZeRO stage; None for all.
        pp: the only pipeline degree; None for all.
        tp: the only tensor-parallel degree; None for all.
    """

    machine: Machine
    global_batch: int
    json: DeepSpeedJson
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


def mfu(flops_per_second: float, machine: Machine, precision: str) -> float:
    """Share of the peak of the machine's GPUs, with products in the types of a precision of this name."""
    peak = machine.accelerator.fp32_tflops if precision == "fp32" else machine.accelerator.bf16_tflops
    return flops_per_second / machine.gpus / (peak * 1e12)


class Search:
    """All layouts of a model on a machine, ranked.

    Args:
        request: what to plan.
        run: of the model, on one rank.
        one_vit: the run's model is the chain of one ViT; the layouts of others are data-parallel only.

    Attributes:
        fitting: by falling images per second.
        too_large: those whose smallest micro-batch does not fit, by rising memory.
        parameters: of the model.
        flops: of an image in training; recomputed products do not count.

    Raises:
        UserError: a degree, a batch or a ZeRO stage that is not possible, with the nearest that is.
    """

    def __init__(self, request: PlanRequest, run: Run, *, one_vit: bool) -> None:
        self.request, self._run, self._costs = request, run, functools.cache(self._cost_at)
        degrees, self._most_stages = [1], 1
        if one_vit:
            degrees, self._most_stages = legal_degrees(run.model.whole), run.model.bounds[-1]
        elif (request.pp or 1) > 1 or (request.tp or 1) > 1:
            raise UserError(f"--recipe: --task {run.model.task.name} is planned with --pp 1 --tp 1 only; drop them")
        self._degrees = [tp for tp in degrees if self._is_legal_tp(tp)]
        self._check()
        found = list(self._found())
        self.fitting = sorted((one for one in found if one.fits), key=lambda one: -one.images_per_second)
        self.too_large = sorted((one for one in found if not one.fits), key=lambda one: one.needs)
        self.parameters = num_parameters(run.model.whole)
        self.flops = count_flops(run.model.whole, run.model.frozen).training

    def _cost_at(self, tp: int) -> Cost:
        """The cost of the run with this tensor-parallel degree, in any layout that has it."""
        from ds_vit.training.cost import Cost  # which imports DeepSpeed

        model = self._run.model
        model = replace(model, class_parallel=tp > 1 and pays(model.spec.num_classes, tp))
        return Cost(replace(self._run, config=self._run.config.model_copy(update={"tp": tp}), model=model))

    def _is_legal_tp(self, tp: int) -> bool:
        machine = self.request.machine
        in_hosts = machine.gpus <= machine.per_node or machine.per_node % tp == 0  # else some group has two hosts
        return machine.gpus % tp == 0 and tp <= machine.per_node and in_hosts

    def _check(self) -> None:
        """Reject degrees, batches and ZeRO stages that are not possible."""
        request, machine = self.request, self.request.machine
        pp, tp = request.pp or 1, request.tp or 1
        if request.tp is not None and tp not in self._degrees:
            nearest = min(self._degrees, key=lambda other: abs(other - tp))
            raise UserError(
                f"--tp {tp} is not possible: it has to divide the model's heads and hidden features, the "
                f"{machine.gpus} GPUs, and stay inside a host of {machine.per_node}; the nearest is --tp {nearest} (of "
                f"{', '.join(map(str, self._degrees))})"
            )
        if request.pp is not None and pp not in self._stages(tp):
            nearest = min(self._stages(tp), key=lambda other: abs(other - pp))
            raise UserError(
                f"--pp {pp} is not possible: it has to divide {machine.gpus // tp} ranks and be at most the model's "
                f"{self._most_stages} layers and {_MOST_STAGES}; the nearest is --pp {nearest}"
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
        return [pp for pp in range(1, min(_MOST_STAGES, self._most_stages) + 1) if ranks % pp == 0]

    def _layouts(self) -> Iterator[Layout]:
        request = self.request
        for tp in [request.tp] if request.tp else self._degrees:
            for pp in self._stages(tp):
                if request.pp not in (None, pp):
                    continue
                layout = Layout(pp, request.machine.gpus // (pp * tp), tp)
                if request.global_batch % layout.dp == 0:
                    yield layout

    def _zero_stages(self, layout: Layout) -> list[int]:
        stages = [1] if layout.pp > 1 else [1, 2, 3] if layout.dp > 1 else [1]
        in_fp32 = self._run.engine.precision.compute == "float32"  # DeepSpeed's bf16 without ZeRO is refused
        if in_fp32 and layout.pp == 1:
            stages = [0, *stages]
        return [stage for stage in stages if self.request.fixed_stage in (None, stage)]

    def mfu(self, one: Candidate) -> float:
        """Share of the machine's peak that a layout reaches."""
        return mfu(self.flops * one.images_per_second, self.request.machine, self._run.engine.precision.name)

    def unaligned(self, one: Candidate) -> Sequence[str]:
        """The matrices of a layout that `unaligned_matrices` names."""
        return unaligned_matrices(self._costs(one.layout.tp).layers)

    def _found(self) -> Iterator[Candidate]:
        for layout in self._layouts():
            cost = self._costs(layout.tp)
            flops = [work.forward.flops + work.backward.flops for work in cost.works]
            bounds = tuple(balance(flops, [layer.kept.bytes for layer in cost.layer_memory], layout.pp))
            for stage, recomputing in itertools.product(self._zero_stages(layout), RECOMPUTING):
                yield self._fastest(cost, layout, stage, recomputing, bounds)

    def _fastest(self, cost: Cost, layout: Layout, stage: int, recomputing: str, bounds: tuple[int, ...]) -> Candidate:
        """The fastest micro-batch that fits, or else the smallest."""
        request, accelerator = self.request, self.request.machine.accelerator
        room, tried = accelerator.memory_bytes - accelerator.reserved_bytes, []

        @functools.cache
        def memory_at(accumulation: int) -> tuple[MemoryRules, list[StageMemory]]:
            json = with_fp32_sums(json_at_stage(request.json, stage), cost.run.engine.precision, accumulation)
            rules = cost.rules_of(json, layout, RECOMPUTING[recomputing])
            return rules, memory_by_stage(cost.layer_memory, bounds, rules)

        for batch in ways_to_share(request.global_batch, layout.dp):
            if batch.micro_batch > _LARGEST_MICRO_BATCH or (batch.accumulation < layout.pp and batch.micro_batch > 1):
                break
            rules, stages = memory_at(min(batch.accumulation, 2))
            memory = tuple(one.on_device(batch) for one in stages)
            time = step_time(cost.works, bounds, request.machine, batch, rules)
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
