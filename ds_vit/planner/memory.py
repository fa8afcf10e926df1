"""The memory of a rank at its fullest moment, from its layers and from what DeepSpeed keeps at each ZeRO stage.

Two moments can be the fullest: one in the backward pass, where activations go while gradients come, or the update, when
gradients are complete next to copies of them. Held all the time are weights, masters, the optimizer's state, an
average, ZeRO's buckets, and at stage 3 the weights that are gathered.

This is the only model of memory: `--dry-run`, `--auto-batch`, `ds-vit plan` and the comparison at a run's end use it.
Not counted: the loader, what collectives take within torch.distributed, the context of a GPU, its libraries and the
gaps of its allocator (2 to 3 GB), and what reference cycles hold until Python's collector runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import torch

from ds_vit.config.batch import BatchSizes
from ds_vit.config.deepspeed_rules import Checkpointing, sums_are_plain, sums_going_back, sums_in_fp32
from ds_vit.models import BlockLayer, Layer, TimmViT, cast_block_buffers, freeze, norms_in_fp32
from ds_vit.optim.build import STATES_OF_FALLBACK
from ds_vit.parallel.layout import Layout
from ds_vit.parallel.tensor import TensorParallel, cut_layer
from ds_vit.planner.counting import Kept, Temporary, kept_by_layers, temporary_memory

# Bytes of activations over those of fp32, at an MLP ratio of 4: under autocast the residual stream stays in fp32.
_AUTOCAST_OF_FP32 = 36 / 64
DEFAULT_BUCKET = 500_000_000  # elements; DeepSpeed's reduce_bucket_size
_DEFAULT_LIVE = 1e9  # elements; stage3_max_live_parameters and stage3_max_reuse_distance


def layers_of_rank(
    layers: Sequence[Layer],
    *,
    tp: int,
    sequence_parallel: bool,
    class_parallel: bool,
    compute: str,
    norms_fp32: bool,
    frozen: frozenset[str] = frozenset(),
) -> list[Layer]:
    """The layers as the first rank of a tensor-parallel group has them: sharded, cast and frozen, in place.

    Args:
        layers: all of a model, whole.
        tp: tensor-parallel degree.
        sequence_parallel: between the sharded parts each rank holds a share of the tokens.
        class_parallel: the classifier is sharded over classes.
        compute: torch's name of the weights' type.
        norms_fp32: norms compute in fp32.
        frozen: timm names of what is not trained.
    """
    group = TensorParallel(0, tp, None, sequence_parallel)
    for layer in layers:
        freeze(layer, frozen)
        if tp > 1:
            cut_layer(layer, group, class_parallel=class_parallel)
        cast_layer(layer, compute, norms_fp32=norms_fp32)
    return list(layers)


def cast_layer(layer: Layer, compute: str, *, norms_fp32: bool) -> None:
    """Cast a layer to the types that it has in the run, in place."""
    if compute == "float32":
        return
    dtype = getattr(torch, compute)
    for parameter in layer.parameters():
        parameter.data = parameter.data.to(dtype)
    cast_block_buffers(layer, dtype)
    if norms_fp32:
        norms_in_fp32(layer)


class LayerMemory(NamedTuple):
    """A layer as a rank has it.

    Attributes:
        parameters: how many.
        trained: of them.
        states: numbers that the optimizer keeps of them.
        kept: of an image in the forward pass.
        back: what its backward pass makes.
        is_block: whether it can be recomputed.
    """

    parameters: int
    trained: int
    states: int
    kept: Kept
    back: Temporary
    is_block: bool


def memory_of_layers(
    model: TimmViT, layers: Sequence[Layer], *, compute: str, states: int, fallback: frozenset[str], trains: bool = True
) -> list[LayerMemory]:
    """What each layer of a rank has and keeps.

    Args:
        model: the whole one, for its images.
        layers: from `layers_of_rank`.
        compute: torch's name of the weights' type.
        states: numbers that the optimizer keeps of an element.
        fallback: timm names of which it keeps another number.
        trains: False for evaluation only, which keeps nothing.
    """
    if trains:
        dtype = getattr(torch, compute)
        kept, temporary = kept_by_layers(model, layers, dtype), temporary_memory(model, layers, dtype)
    else:
        kept, temporary = [Kept(0, None, 0, 0, 0, 0)] * len(layers), [Temporary(())] * len(layers)
    found = []
    for layer, of_layer, made in zip(layers, kept, temporary, strict=True):
        sizes = {name: parameter.numel() for name, parameter in layer.named_parameters() if parameter.requires_grad}
        number, is_block = sum(p.numel() for p in layer.parameters()), isinstance(layer, BlockLayer)
        found.append(
            LayerMemory(number, sum(sizes.values()), num_states(states, fallback, sizes), of_layer, made, is_block)
        )
    return found


def num_states(states: int, fallback: frozenset[str], sizes: Mapping[str, int]) -> int:
    """How many numbers an optimizer keeps of parameters, by their elements; the other arguments are as above."""
    return sum(size * (STATES_OF_FALLBACK if name in fallback else states) for name, size in sizes.items())


@dataclass(frozen=True)
class RankMemory:
    """Bytes of a rank of one pipeline stage, the first of its tensor-parallel group.

    Attributes:
        parameters: how many it works with, its tensor slice of each (ZeRO-3 keeps a share of them).
        weights: in the type of the forward pass.
        gradients: of a step, as they wait for the update.
        masters: copies of the weights that ZeRO updates, in fp32 unless the JSON says bf16.
        optimizer: the optimizer's state.
        average: of the weights, with --model-ema.
        activations: that wait for the backward pass at the fullest moment.
        buckets: in which ZeRO collects gradients.
        gathered: weights that ZeRO-3 has gathered at a time; those that autocast has cast.
        going_back: activations, temporary memory and the gradients so far, at the fullest moment of the backward pass.
        updating: gradients and copies of them while the optimizer steps.
    """

    parameters: int
    weights: int
    gradients: int
    masters: int
    optimizer: int
    average: int
    activations: int
    buckets: int = 0
    gathered: int = 0
    going_back: int = 0
    updating: int = 0

    @property
    def held(self) -> int:
        """All the time."""
        return self.weights + self.masters + self.optimizer + self.average + self.buckets + self.gathered

    @property
    def together(self) -> int:
        """At the fullest moment."""
        return self.held + max(self.going_back, self.updating)

    @property
    def states(self) -> int:
        """Whatever the micro-batch."""
        return self.weights + self.gradients + self.masters + self.optimizer + self.average


@dataclass(frozen=True)
class MemoryRules:
    """The settings of a run that its memory depends on, in addition to its layers.

    Attributes:
        stage: of ZeRO.
        dp: data-parallel ranks.
        of_type: bytes of a weight in the forward pass.
        of_gradient: bytes of a gradient that waits for the update.
        of_master: bytes of a master, and of each number of the optimizer.
        bucket: bytes in which ZeRO collects gradients.
        live: parameters that ZeRO-3 may have gathered at a time.
        sums_apart: gradients are added up in a separate buffer (DeepSpeed's BF16_Optimizer).
        sums_going_back: torch sums them during the backward pass, in memory that is allocated before it.
        put_in_place: ZeRO-1 too has them in such memory, which it updates from, in steps of one micro-batch
            (engine/patches/flat_gradients.py).
        sent_as: additional bytes of a gradient while the ranks sum it in another type than it waits in.
        autocast: the weights are in fp32 and the products in 16 bits.
        average: the weights have one.
        whole_matrices: the optimizer gathers matrices that ZeRO has partitioned (Muon).
        checkpointing: of activations.
    """

    stage: int
    dp: int
    of_type: int
    of_gradient: int
    of_master: int
    bucket: int
    live: int
    sums_apart: bool
    sums_going_back: bool
    put_in_place: bool
    sent_as: int
    autocast: bool
    average: bool
    whole_matrices: bool
    checkpointing: Checkpointing

    @classmethod
    def of_json(
        cls,
        json: Mapping[str, Any],
        layout: Layout,
        *,
        compute: str,
        autocast: bool,
        average: bool,
        whole_matrices: bool,
        checkpointing: Checkpointing,
    ) -> MemoryRules:
        """Those of a DeepSpeed JSON without "auto".

        Args:
            json: that DeepSpeed gets.
            layout: degrees.
            compute: torch's name of the weights' type.
            autocast: as the attribute.
            average: as the attribute.
            whole_matrices: as the attribute.
            checkpointing: as the attribute.
        """
        zero = json.get("zero_optimization") or {}
        stage = int(zero.get("stage", 0))
        of_type = 4 if compute == "float32" else 2
        in_fp32 = sums_in_fp32(json)
        sums_apart = stage == 1 and compute == "bfloat16" and in_fp32
        overlaps = zero.get("overlap_comm")
        put_in_place = stage == layout.pp == layout.tp == 1 and not autocast and not (in_fp32 and of_type == 2)
        put_in_place = put_in_place and _writes_in_place(json, compute)
        bucket = int(zero.get("reduce_bucket_size", DEFAULT_BUCKET)) * (4 if stage == 1 and in_fp32 else of_type)
        bucket *= 2 if overlaps and stage < 3 else 1
        bucket *= 2 if autocast and stage in (1, 3) else 1  # one for each type that it knows
        live = (zero.get(f"stage3_max_{what}", _DEFAULT_LIVE) for what in ("live_parameters", "reuse_distance"))
        return cls(
            stage=stage,
            dp=layout.dp,
            of_type=of_type,
            of_gradient=4 if in_fp32 else of_type,
            of_master=2 if (json.get("bf16") or {}).get("bf16_master_weights_and_grads") else 4,
            bucket=bucket if stage and not sums_apart else 0,
            live=int(max(map(float, live))),
            sums_apart=sums_apart,
            sums_going_back=sums_going_back(json, pp=layout.pp, dp=layout.dp, tp=layout.tp),
            put_in_place=put_in_place,
            sent_as=2 if sums_apart and json.get("communication_data_type") != "fp32" else 0,
            autocast=autocast,
            average=average,
            whole_matrices=whole_matrices,
            checkpointing=checkpointing,
        )


def _writes_in_place(json: Mapping[str, Any], compute: str) -> bool:
    """Whether the JSON of ZeRO-1 lets gradients, summed in the model's type, be written in place."""
    zero = json.get("zero_optimization") or {}
    offloaded = (zero.get("offload_optimizer") or {}).get("device", "none") != "none"
    plain = sums_are_plain({key: value for key, value in json.items() if key != "communication_data_type"})
    names = {"float32": (None, "fp32"), "bfloat16": (None, "bf16", "bfp16"), "float16": (None, "fp16")}[compute]
    sent = json.get("communication_data_type") in names
    return plain and sent and not offloaded and not zero.get("overlap_comm") and zero.get("contiguous_gradients", True)


class _Run(NamedTuple):
    """Layers whose activations are allocated and freed together.

    Attributes:
        waiting: bytes of an image that wait for the backward pass.
        again: additional bytes of an image, of what is recomputed.
        back: of its layers.
        trained: parameters.
    """

    waiting: float
    again: float
    back: tuple[Temporary, ...]
    trained: int


@dataclass(frozen=True)
class StageMemory:
    """The memory of a rank of one pipeline stage, by the micro-batch.

    Attributes:
        states: without activations.
        ahead: micro-batches under way at most: stage i of p has p - i (1F1B).
        rules: of the run.
        runs: of the stage's layers, in order.
        of_several: the same for steps of several micro-batches, where that is not the same.
    """

    states: RankMemory
    ahead: int
    rules: MemoryRules
    runs: tuple[_Run, ...] = ()
    of_several: StageMemory | None = None

    @cached_property
    def waiting(self) -> float:
        """Bytes of an image that wait for the backward pass."""
        return sum(run.waiting for run in self.runs)

    @cached_property
    def live(self) -> float:
        """Additional bytes of an image, of what is recomputed at a time."""
        return max((run.again for run in self.runs), default=0.0)

    def of(self, batch: BatchSizes) -> RankMemory:
        """With this micro-batch and accumulation."""
        if self.of_several is not None and batch.accumulation > 1:
            return self.of_several.of(batch)
        micro_batch, under_way = batch.micro_batch, min(self.ahead, batch.accumulation)
        activations = (self.waiting * under_way + self.live) * micro_batch
        going_back = self._going_back(micro_batch, under_way, summed=batch.accumulation > under_way)
        return replace(self.states, activations=round(activations), going_back=round(going_back))

    def _going_back(self, micro_batch: int, under_way: int, *, summed: bool) -> float:
        """Activations, temporary memory and gradients, at the fullest moment of the backward pass.

        Args:
            micro_batch: images.
            under_way: micro-batches whose activations are held.
            summed: gradients of earlier micro-batches are held.
        """
        rules, whole = self.rules, sum(run.trained for run in self.runs)
        share = whole / rules.dp if rules.stage >= 2 else whole
        held = rules.sums_apart or rules.sums_going_back or rules.put_in_place or summed or rules.stage == 3
        waiting, fullest, done = self.waiting, 0.0, 0
        width = _AUTOCAST_OF_FP32 if rules.autocast else 1.0  # over what layers make in the types that they have
        made_by = {key: back.of(micro_batch) * width for key, back in self._backs.items()}
        for run in reversed(self.runs):
            so_far = rules.of_gradient * (share if held else min(done, share))
            so_far += rules.of_type * done if rules.sums_apart else 0
            made = max(made_by[id(back)] for back in run.back)
            fullest = max(fullest, so_far + made + micro_batch * (self.waiting * (under_way - 1) + waiting + run.again))
            waiting -= run.waiting
            done += run.trained
        return fullest

    @cached_property
    def _backs(self) -> dict[int, Temporary]:
        """Each once, by its identity: blocks that are alike share one."""
        return {id(back): back for run in self.runs for back in run.back}


def memory_by_stage(
    layers: Sequence[LayerMemory], bounds: Sequence[int], rules: MemoryRules, *, trains: bool = True
) -> list[StageMemory]:
    """The memory of a rank of each pipeline stage.

    Args:
        layers: all of a model.
        bounds: stage i has the layers from bounds[i] up to, and without, bounds[i + 1].
        rules: of the run.
        trains: False for evaluation only.
    """
    stages = list(itertools.pairwise(bounds))
    return [
        _stage_memory(layers[start:stop], rules, len(stages) - stage, trains)
        for stage, (start, stop) in enumerate(stages)
    ]


def _stage_memory(layers: Sequence[LayerMemory], rules: MemoryRules, ahead: int, trains: bool = True) -> StageMemory:
    number, stage, dp = sum(layer.parameters for layer in layers), rules.stage, rules.dp
    weights = rules.of_type * number // (dp if stage == 3 else 1)
    if not trains:
        return StageMemory(RankMemory(number, weights, 0, 0, 0, 0, 0), ahead, rules)
    trained, share = sum(layer.trained for layer in layers), dp if stage else 1
    gradients = rules.of_gradient * trained // (dp if stage >= 2 else 1)
    # ZeRO updates a rank's share in fp32: it copies 16-bit gradients, and whole ones into a flat share, unless they are
    # there already.
    copies = 4 * trained // dp if rules.of_gradient < 4 or (stage in (1, 2) and not rules.put_in_place) else 0
    if stage == 0 or rules.sums_apart:  # summed over the ranks in one piece
        copies = min(trained, DEFAULT_BUCKET) * (rules.of_gradient + rules.sent_as) if dp > 1 else 0
        copies += rules.of_type * trained if rules.sums_apart else 0
    if rules.whole_matrices:  # matrices, their updates, and both again while they travel between ranks
        copies += 4 * (3 if dp > 1 else 2) * trained // dp
    states = RankMemory(
        parameters=number,
        weights=weights,
        gradients=gradients,
        masters=rules.of_master * trained // dp if stage else 0,
        optimizer=rules.of_master * sum(layer.states for layer in layers) // share,
        average=4 * trained // share if rules.average else 0,
        activations=0,
        buckets=0 if rules.put_in_place else rules.bucket,
        gathered=_gathered(number, max((layer.parameters for layer in layers), default=0), rules),
        updating=gradients + copies,
    )
    of_several = _stage_memory(layers, replace(rules, put_in_place=False), ahead) if rules.put_in_place else None
    return StageMemory(states, ahead, rules, tuple(_runs(layers, rules)), of_several)


def _gathered(number: int, largest: int, rules: MemoryRules) -> int:
    """Bytes of weights in addition to those held: what autocast has cast for this step, or ZeRO-3 has gathered.

    Args:
        number: parameters of the stage.
        largest: of a layer, which is gathered while the ones before it are still held.
        rules: of the run.
    """
    if rules.stage < 3:
        return 2 * number if rules.autocast else 0
    return rules.of_type * (min(number, rules.live) + largest) if rules.dp > 1 else 0


def _runs(layers: Sequence[LayerMemory], rules: MemoryRules) -> list[_Run]:
    """The layers by what is freed together: single ones, or the groups that are recomputed."""
    recomputing = rules.checkpointing
    of_saved, of_dear = (_AUTOCAST_OF_FP32, 0.5) if rules.autocast else (1.0, 1.0)
    runs = []
    for are_recomputed, found in itertools.groupby(layers, lambda layer: recomputing.interval > 0 and layer.is_block):
        together = list(found)
        if not are_recomputed:
            runs += [_Run(of_saved * one.kept.bytes, 0.0, (one.back,), one.trained) for one in together]
            continue
        for start in range(0, len(together), recomputing.interval):
            group = together[start : start + recomputing.interval]
            first, again = group[0].kept, of_saved * sum(layer.kept.bytes for layer in group)
            waiting = 0.0
            if again:  # else frozen, and nothing before is trained: torch keeps nothing
                if not recomputing.cpu:
                    waiting += first.given
                    again -= first.given_saved
                if recomputing.selective:
                    waiting += of_dear * first.dear
                    again -= of_dear * first.dear_saved
            backs = tuple(dict.fromkeys(layer.back for layer in group))
            runs.append(_Run(waiting, again, backs, sum(layer.trained for layer in group)))
    return runs


def in_host_memory(json: Mapping[str, Any]) -> frozenset[str]:
    """The fields of `RankMemory` that a JSON's offload keeps in host memory."""
    zero = json.get("zero_optimization", {})
    fields = {"optimizer": ("masters", "optimizer"), "param": ("weights",)}
    offloaded = [key for key in fields if (zero.get(f"offload_{key}") or {}).get("device") == "cpu"]
    return frozenset(field for key in offloaded for field in fields[key])


def on_device(memory: RankMemory, in_host: frozenset[str]) -> RankMemory:
    """The part of it in the accelerator's memory."""
    return replace(memory, **dict.fromkeys(in_host, 0))
