"""All legal layouts of a model on a machine, each with the largest micro-batch that fits, by images a second.

Of each tensor-parallel degree the model is looked at once, with three blocks: the first may differ (no drop-path), the
others are alike. Memory is that of planner/memory.py, time that of planner/cost.py.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from ds_vit.config.batch import BatchSizes, nearest_dp, ways_to_share
from ds_vit.config.deepspeed_json import Checkpointing
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.models import ModelSpec, TimmViT, balance, count_flops, create_model, num_parameters, take_apart
from ds_vit.optim.build import optimizer_class, rules_of, states_per_element
from ds_vit.optim.muon import Muon
from ds_vit.parallel.layout import Layout
from ds_vit.parallel.tensor import legal_degrees, pays
from ds_vit.planner.cost import Machine, StepTime, step_time
from ds_vit.planner.layers import as_a_rank_has_them, cut_regions, memory_of_layers
from ds_vit.planner.memory import LayerMemory, MemoryRules, RankMemory, in_host_memory, of_stage, on_device
from ds_vit.planner.work import LayerWork, work_of_layers

RECOMPUTING: dict[str, Checkpointing] = {
    "": Checkpointing(),
    "selective": Checkpointing(1, selective=True),
    "full": Checkpointing(1),
}
"""What `--grad-checkpointing` says → what it means; the first is none."""
_MOST_STAGES = 16
_LARGEST_MICRO_BATCH = 512


@dataclass(frozen=True)
class Wishes:
    """What is to be planned.

    Attributes:
        spec: the model.
        machine: what it would run on.
        global_batch: images of a step.
        json: DeepSpeed's, of which ZeRO's stage and the batch are filled in; see `fixed_stage`.
        compute: torch's name of the weights' type.
        autocast: products in 16 bits of weights in fp32.
        model_ema: the weights have an average.
        fixed_stage: the only ZeRO stage; None for all.
        pp: the only pipeline degree; None for all.
        tp: the only tensor-parallel degree; None for all.
    """

    spec: ModelSpec
    machine: Machine
    global_batch: int
    json: Mapping[str, Any]
    compute: str = "bfloat16"
    autocast: bool = False
    model_ema: bool = False
    fixed_stage: int | None = None
    pp: int | None = None
    tp: int | None = None


@dataclass(frozen=True)
class Cut:
    """A model at one tensor-parallel degree: what each layer costs a rank."""

    memory: list[LayerMemory]
    works: list[LayerWork]
    regions: list[int]


@dataclass(frozen=True)
class Layouted:
    """A layout, what it needs and how fast it would be.

    Attributes:
        layout: degrees.
        stage: of ZeRO.
        recomputing: as `--grad-checkpointing` says it.
        batch: arithmetic.
        bounds: of the pipeline's stages.
        memory: of a rank of each stage.
        room: bytes that a rank may take.
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
        words = f"pp {self.layout.pp} x tp {self.layout.tp} x dp {self.layout.dp}, ZeRO-{self.stage}"
        return f"{words}, {self.recomputing} recomputing" if self.recomputing else words


@dataclass(frozen=True)
class Planned:
    """All layouts of a model on a machine.

    Attributes:
        wishes: what was asked for.
        parameters: of the model.
        flops: of an image in training.
        fitting: by falling images a second.
        too_large: those whose smallest micro-batch does not fit, by rising need.
    """

    wishes: Wishes
    parameters: int
    flops: int
    fitting: tuple[Layouted, ...]
    too_large: tuple[Layouted, ...]

    def mfu(self, found: Layouted) -> float:
        """Share of the peak that a layout's products of matrices come to; what runs again does not count."""
        accelerator = self.wishes.machine.accelerator
        in_fp32 = self.wishes.compute == "float32" and not self.wishes.autocast
        peak = accelerator.fp32_tflops if in_fp32 else accelerator.bf16_tflops
        return self.flops * found.images_per_second / self.wishes.machine.gpus / (peak * 1e12)


class Search:
    """Looks for layouts.

    Args:
        wishes: what is to be planned.

    Raises:
        UserError: a wish that cannot be, with the nearest that can.
    """

    def __init__(self, wishes: Wishes) -> None:
        self.wishes = wishes
        self.model = create_model(wishes.spec)
        self.depth = len(self.model.blocks)
        self.degrees = [tp for tp in legal_degrees(self.model) if self._may_be_tensor(tp)]
        self._cuts: dict[int, Cut] = {}
        self._check()

    @cached_property
    def _optimizer(self) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
        block = dict(self.wishes.json.get("optimizer") or {"type": "AdamW"})
        # What the flags of training fill in decides neither on memory nor on time.
        block["params"] = {key: value for key, value in (block.get("params") or {}).items() if value != "auto"}
        cls, arguments = optimizer_class(block, "the JSON")
        return cls, {"lr": 1e-3, **arguments}

    def _may_be_tensor(self, tp: int) -> bool:
        machine = self.wishes.machine
        in_hosts = machine.gpus <= machine.per_node or machine.per_node % tp == 0  # else some group has two hosts
        return machine.gpus % tp == 0 and tp <= machine.per_node and in_hosts

    def _check(self) -> None:
        """Refuse what cannot be."""
        wishes, machine = self.wishes, self.wishes.machine
        if (wanted := wishes.tp) is not None and wanted not in self.degrees:
            nearest = min(self.degrees, key=lambda tp: abs(tp - wanted))
            raise UserError(
                f"--tp {wishes.tp} cannot be had: it has to divide the model's heads and hidden features, the "
                f"{machine.gpus} GPUs, and stay inside a host of {machine.per_node}; the nearest is --tp {nearest} (of "
                f"{', '.join(map(str, self.degrees))})"
            )
        if (stages := wishes.pp) is not None and stages not in self._stages(wishes.tp or 1):
            legal = self._stages(wishes.tp or 1)
            nearest = min(legal, key=lambda pp: abs(pp - stages))
            raise UserError(
                f"--pp {wishes.pp} cannot be had: it has to divide {machine.gpus // (wishes.tp or 1)} ranks and be at "
                f"most the model's {self.depth + 2} layers and {_MOST_STAGES}; the nearest is --pp {nearest}"
            )
        if wishes.fixed_stage not in (None, 0, 1) and (wishes.pp or 1) > 1:
            raise UserError(f"--pp {wishes.pp} goes with ZeRO-1, not with ZeRO-{wishes.fixed_stage}: drop one of them")
        if not list(self._layouts()):
            pp, tp = wishes.pp or 1, wishes.tp or 1
            dp = max(1, machine.gpus // (pp * tp))
            batch = max(1, round(wishes.global_batch / dp)) * dp
            raise UserError(
                f"--global-batch {wishes.global_batch} cannot be shared by {dp} replicas; the nearest that can is "
                f"{batch}, or take {nearest_dp(wishes.global_batch, dp) * pp * tp} GPUs"
            )

    def _stages(self, tp: int) -> list[int]:
        ranks = self.wishes.machine.gpus // tp
        return [pp for pp in range(1, min(_MOST_STAGES, self.depth + 2) + 1) if ranks % pp == 0]

    def _layouts(self) -> Iterator[Layout]:
        wishes = self.wishes
        for tp in [wishes.tp] if wishes.tp else self.degrees:
            for pp in self._stages(tp):
                if wishes.pp not in (None, pp):
                    continue
                layout = Layout(pp, wishes.machine.gpus // (pp * tp), tp)
                if wishes.global_batch % layout.dp == 0:
                    yield layout

    def _zero_stages(self, layout: Layout) -> list[int]:
        stages = [1] if layout.pp > 1 else [1, 2, 3] if layout.dp > 1 else [1]
        if self.wishes.compute == "float32" and layout.pp == 1:  # DeepSpeed's bf16 without ZeRO is refused
            stages = [0, *stages]
        return [stage for stage in stages if self.wishes.fixed_stage in (None, stage)]

    def cut(self, tp: int) -> Cut:
        """What each layer costs a rank at a tensor-parallel degree."""
        if tp not in self._cuts:
            self._cuts[tp] = self._look(tp)
        return self._cuts[tp]

    def _look(self, tp: int) -> Cut:
        wishes, model = self.wishes, self._shallow(3)
        layers = as_a_rank_has_them(
            take_apart(model),
            tp=tp,
            sequence_parallel=False,
            class_parallel=tp > 1 and pays(wishes.spec.num_classes, tp),
            compute=wishes.compute,
            norms_fp32=True,
        )
        cls, arguments = self._optimizer
        memory = memory_of_layers(
            model,
            layers,
            compute=wishes.compute,
            states=states_per_element(cls, arguments),
            fallback=rules_of(cls).fallback(model, arguments) or frozenset(),
        )
        works = work_of_layers(model, layers, getattr(torch, wishes.compute))
        regions = cut_regions(layers)

        def whole(of: list[Any]) -> list[Any]:
            return [*of[:2], *[of[-2]] * (self.depth - 1), of[-1]]

        return Cut(whole(memory), whole(works), whole(regions))

    def _shallow(self, depth: int) -> TimmViT:
        """The model with no more than this many of its blocks."""
        kwargs = {**self.wishes.spec.model_kwargs, "depth": min(depth, self.depth)}
        return create_model(dataclasses.replace(self.wishes.spec, model_kwargs=kwargs))

    def _training_flops(self) -> int:
        """Of an image: those of two blocks and the ends, and what each further block adds."""
        two, three = (count_flops(self._shallow(depth)).training for depth in (2, 3))
        return two + max(0, self.depth - 2) * (three - two)

    def run(self) -> Planned:
        """Every layout, ranked."""
        fitting: list[Layouted] = []
        too_large: list[Layouted] = []
        for layout in self._layouts():
            bounds = self._bounds(layout)
            for stage, recomputing in itertools.product(self._zero_stages(layout), RECOMPUTING):
                found, fits = self._largest(layout, stage, recomputing, bounds)
                if found is not None:
                    (fitting if fits else too_large).append(found)
        return Planned(
            self.wishes,
            num_parameters(self.model),
            self._training_flops(),
            tuple(sorted(fitting, key=lambda one: -one.images_per_second)),
            tuple(sorted(too_large, key=lambda one: one.needs)),
        )

    def _bounds(self, layout: Layout) -> tuple[int, ...]:
        cut = self.cut(layout.tp)
        if layout.pp == 1:
            return (0, len(cut.works))
        work = [work.forward.flops + work.backward.flops for work in cut.works]
        return tuple(balance(work, [layer.kept.bytes for layer in cut.memory], layout.pp))

    def rules(self, layout: Layout, stage: int, recomputing: str) -> MemoryRules:
        """Of a layout."""
        return MemoryRules.of_json(
            self.json_of(stage),
            pp=layout.pp,
            dp=layout.dp,
            tp=layout.tp,
            compute=self.wishes.compute,
            autocast=self.wishes.autocast,
            average=self.wishes.model_ema,
            whole_matrices=issubclass(self._optimizer[0], Muon),
            checkpointing=RECOMPUTING[recomputing],
        )

    def json_of(self, stage: int) -> dict[str, Any]:
        """DeepSpeed's JSON at a ZeRO stage, without the batch."""
        return json_at_stage(self.wishes.json, stage)

    def _largest(
        self, layout: Layout, stage: int, recomputing: str, bounds: Sequence[int]
    ) -> tuple[Layouted | None, bool]:
        """The fastest micro-batch that fits, or else the smallest; whether it fits."""
        cut, rules = self.cut(layout.tp), self.rules(layout, stage, recomputing)
        stages = [
            of_stage(cut.memory[start:stop], rules, layout.pp - number)
            for number, (start, stop) in enumerate(itertools.pairwise(bounds))
        ]
        accelerator, in_host = self.wishes.machine.accelerator, in_host_memory(self.json_of(stage))
        room = accelerator.memory_bytes - accelerator.reserved_bytes
        fastest: Layouted | None = None
        for batch in ways_to_share(self.wishes.global_batch, layout.dp):
            if batch.micro_batch > _LARGEST_MICRO_BATCH or (batch.accumulation < layout.pp and batch.micro_batch > 1):
                break
            memory = tuple(on_device(one.of(batch), in_host) for one in stages)
            fits = max(one.together for one in memory) <= room
            if fastest and not fits:
                return fastest, True
            time = self._time(layout, bounds, batch, rules)
            found = Layouted(layout, stage, recomputing, batch, tuple(bounds), memory, room, time)
            if not fits:
                return found, False
            if fastest is None or found.images_per_second > fastest.images_per_second:
                fastest = found
        return fastest, fastest is not None

    def _time(self, layout: Layout, bounds: Sequence[int], batch: BatchSizes, rules: MemoryRules) -> StepTime:
        cut = self.cut(layout.tp)
        return step_time(
            cut.works,
            cut.regions,
            [layer.parameters for layer in cut.memory],
            [layer.is_block for layer in cut.memory],
            bounds,
            self.wishes.machine,
            layout=layout,
            batch=batch,
            rules=rules,
            json=self.json_of(rules.stage),
        )


def json_at_stage(json: Mapping[str, Any], stage: int) -> dict[str, Any]:
    """A DeepSpeed JSON at a ZeRO stage, with what goes with it in 16 bits: sums in fp32 at stage 1, overlap above."""
    zero = {**(json.get("zero_optimization") or {}), "stage": stage}
    changed = {**json, "zero_optimization": zero}
    if stage >= 2:
        zero.setdefault("overlap_comm", True)
        changed.pop("data_types", None)
    elif (json.get("bf16") or {}).get("enabled") is True and stage == 1:
        changed.setdefault("data_types", {"grad_accum_dtype": "fp32"})
    return changed


def why_slower(best: Layouted, other: Layouted) -> str:
    """In one sentence, what costs the second layout the difference."""
    words = {
        "computing": "smaller products of matrices",
        "recomputing": "blocks that are computed twice",
        "tensor": "sums over the tensor-parallel group",
        "bubble": "the pipeline's bubble",
        "sending": "tokens sent from stage to stage",
        "data": "gradients and weights between replicas",
        "copying": "copies of gradients and weights",
        "update": "the update of more parameters a rank",
    }
    more = {name: getattr(other.time, name) - getattr(best.time, name) for name in words}
    name = max(more, key=lambda name: more[name])
    total = other.time.seconds / best.time.seconds - 1
    longer = (other.time.seconds - best.time.seconds) * 1e3
    if total < 0.005:
        return f"{other} is as fast as the best, within half a percent."
    return (
        f"{other} takes {longer:,.0f} ms ({total:.0%}) longer a step, above all for {words[name]}, "
        f"{more[name] * 1e3:,.0f} ms more."
    )
