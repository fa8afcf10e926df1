"""The time of a training step in a layout: computing, the pipeline's bubble, and the traffic that nothing hides.

As in docs/planning.md: a pipeline is played by stage and micro-batch; tensor parallelism sums the tokens over its group
after each cut part, forward and back, and nothing hides it; data parallelism sends each gradient around a ring, hidden
behind the backward passes where DeepSpeed, or torch at ZeRO-0, overlaps the two.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, NamedTuple

from ds_vit.config.batch import BatchSizes
from ds_vit.config.deepspeed_json import Checkpointing
from ds_vit.parallel.layout import Layout
from ds_vit.planner.hardware import Accelerator, Link
from ds_vit.planner.memory import DEFAULT_BUCKET, MemoryRules
from ds_vit.planner.schedule import seconds_of_step
from ds_vit.planner.work import LayerWork

_ZERO3_SECONDS = 120e-6
"""Of the host for each parameter that ZeRO-3 gathers or lets go, forward, back and with its gradient.

By ViTs that differ in depth alone: 42 µs on one rank and 160 µs on two, cores of an AMD EPYC, DeepSpeed 0.19.8; what
has been published of ViT-L/16 on two H200 comes to 118 µs.
"""
_UPDATE_BYTES = 42
"""A parameter: gradient read for its norm, read and written to clip it; gradient, master, two moments read, all but the
first written, weight written."""


@dataclass(frozen=True)
class Machine:
    """What a run would be on.

    Attributes:
        accelerator: each.
        gpus: how many.
        per_node: of them in a host.
        inside: link within a host.
        outside: link of a GPU between hosts.
    """

    accelerator: Accelerator
    gpus: int
    per_node: int
    inside: Link
    outside: Link

    def ring(self, layout: Layout) -> Link:
        """The link that a data-parallel group's ring goes over, with what several of its ranks in a host have."""
        replica = layout.pp * layout.tp
        if self.gpus <= self.per_node:
            return self.inside
        # A group's ranks in one host each have a way out, and use them together.
        ways = max(1, self.per_node // replica)
        reached = min(self.inside.reached, ways * self.outside.reached)
        return replace(self.outside, bytes_per_second=reached, efficiency=1.0)

    def between_stages(self, layout: Layout) -> Link:
        """The link that the tokens cross from stage to stage, the slowest of them."""
        # Replicas lie one after the other: only those that divide a host stay inside one.
        stays_inside = self.gpus <= self.per_node or self.per_node % (layout.pp * layout.tp) == 0
        return self.inside if stays_inside else self.outside


@dataclass(frozen=True)
class LayerTime:
    """A layer's seconds for a micro-batch on a rank.

    Attributes:
        forward: computing.
        backward: the same, without running it again.
        tensor: sums over the tensor-parallel group, forward and back together.
        cheap: the forward pass without its products of matrices.
        gathering: the host's part in ZeRO-3.
        first_sum: of `tensor`, the first of the forward pass.
    """

    forward: float
    backward: float
    tensor: float
    cheap: float = 0.0
    gathering: float = 0.0
    first_sum: float = 0.0


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, by what takes them.

    Attributes:
        computing: of the slowest stage, for all micro-batches.
        recomputing: forward passes of it that run again.
        tensor: sums over the tensor-parallel group.
        bubble: a stage waits for another.
        sending: tokens from stage to stage.
        data: gradients and weights between replicas that nothing hides.
        hidden: the same, hidden behind computing; no part of the step.
        copying: gradients added to those of earlier micro-batches, and what ZeRO copies of gradients and weights.
        update: of the optimizer.
    """

    computing: float
    recomputing: float
    tensor: float
    bubble: float
    sending: float
    data: float
    hidden: float
    copying: float
    update: float

    @property
    def seconds(self) -> float:
        """The whole step."""
        return sum(getattr(self, field.name) for field in fields(self) if field.name != "hidden")


def layer_times(
    works: Sequence[LayerWork],
    regions: Sequence[int],
    machine: Machine,
    *,
    tp: int,
    micro_batch: int,
    of_type: int,
) -> list[LayerTime]:
    """The seconds of each layer.

    Args:
        works: of the layers as a rank has them.
        regions: of each layer, how many parts are cut, after each of which the tokens are summed over the group.
        machine: that computes.
        tp: tensor-parallel degree.
        micro_batch: images.
        of_type: bytes of an element of a product.
    """
    found: dict[tuple[int, int], LayerTime] = {}
    for work, cut in zip(works, regions, strict=True):
        if (id(work), cut) not in found:
            one = 2 * (tp - 1) / tp * work.given * micro_batch / machine.inside.reached if tp > 1 else 0.0
            one += 2 * (tp - 1) * machine.inside.latency_seconds
            found[id(work), cut] = LayerTime(
                forward=work.forward.seconds(machine.accelerator, of_type, micro_batch),
                backward=work.backward.seconds(machine.accelerator, of_type, micro_batch),
                tensor=2 * cut * one,
                cheap=work.forward.cheap.seconds(machine.accelerator, of_type, micro_batch),
                gathering=3 * work.tensors * _ZERO3_SECONDS,
                first_sum=one if cut else 0.0,
            )
    return [found[id(work), cut] for work, cut in zip(works, regions, strict=True)]


def step_time(
    works: Sequence[LayerWork],
    regions: Sequence[int],
    parameters: Sequence[int],
    are_blocks: Sequence[bool],
    bounds: Sequence[int],
    machine: Machine,
    *,
    layout: Layout,
    batch: BatchSizes,
    rules: MemoryRules,
    json: Mapping[str, Any],
) -> StepTime:
    """The seconds of a step, of a planned layout and of a run alike.

    Args:
        works: of the layers as a rank has them.
        regions: of each layer, as `layer_times` takes them.
        parameters: of each, as a rank has them.
        are_blocks: which of them are recomputed.
        bounds: pipeline stage i has the layers from bounds[i] on.
        machine: that computes.
        layout: degrees.
        batch: arithmetic.
        rules: ZeRO's stage, types and recomputing.
        json: DeepSpeed's, of the same.
    """
    m, p, n, stage = batch.accumulation, layout.pp, layout.dp, rules.stage
    of_product = 2 if rules.autocast else rules.of_type
    layers = layer_times(works, regions, machine, tp=layout.tp, micro_batch=batch.micro_batch, of_type=of_product)
    stages = _by_stage(layers, are_blocks, bounds, rules.checkpointing)
    slowest = max(stages)
    played = seconds_of_step([(one.forward, one.whole - one.forward) for one in stages], m)
    sending = 0.0
    if p > 1:
        link = machine.between_stages(layout)
        # A stage receives and sends both ways; DeepSpeed waits for each of them.
        one = works[min(1, len(works) - 1)].given * batch.micro_batch / link.reached + link.latency_seconds
        sending = (2 if p == 2 else 4) * m * one
    of_rank = max(sum(parameters[start:stop]) for start, stop in itertools.pairwise(bounds))
    of_gradient = 4 if json.get("communication_data_type") == "fp32" else rules.sent_as or rules.of_gradient
    ring = machine.ring(layout)
    tensors = max(sum(work.tensors for work in works[start:stop]) for start, stop in itertools.pairwise(bounds))
    data, overlapped = _traffic(of_rank, tensors, rules, n, m, ring, of_gradient, json)
    if stage == 3:
        data += m * sum(one.gathering for one in layers)
    behind = (
        machine.accelerator.hidden_share * (slowest.once * 2 / 3) * m if _overlaps(rules, m, of_rank, json) else 0.0
    )
    return StepTime(
        computing=m * slowest.once,
        recomputing=m * slowest.again,
        tensor=m * slowest.tensor,
        bubble=max(0.0, played - m * slowest.whole),
        sending=sending,
        data=data + max(0.0, overlapped - behind),
        hidden=min(overlapped, behind),
        copying=_copied(rules, m, of_gradient, of_rank) * of_rank / machine.accelerator.copied_per_second,
        update=_UPDATE_BYTES * of_rank / (n if stage else 1) / machine.accelerator.copied_per_second,
    )


class _StageTime(NamedTuple):
    """Seconds of a micro-batch in a pipeline stage; of several the greatest is the slowest."""

    whole: float
    forward: float  # of the whole
    once: float  # computed, without what runs again
    again: float
    tensor: float  # sums over ranks


def _by_stage(
    layers: Sequence[LayerTime], are_blocks: Sequence[bool], bounds: Sequence[int], checkpointing: Checkpointing
) -> list[_StageTime]:
    found = []
    for start, stop in itertools.pairwise(bounds):
        of = layers[start:stop]
        once, tensor, again = sum(one.forward + one.backward for one in of), sum(one.tensor for one in of), 0.0
        forward = sum(one.forward for one in of) + tensor / 2
        if checkpointing.interval:
            blocks = [one for one, is_block in zip(of, are_blocks[start:stop], strict=True) if is_block]
            again = sum(one.cheap if checkpointing.selective else one.forward for one in blocks)
            tensor += sum(one.first_sum for one in blocks)  # docs/performance.md: what runs again sends it again
        found.append(_StageTime(once + again + tensor, forward, once, again, tensor))
    return found


def _overlaps(rules: MemoryRules, m: int, parameters: int, json: Mapping[str, Any]) -> bool:
    """Whether gradients travel during the backward pass.

    DeepSpeed's ZeRO-1 reduces after it (0.19.8, engine.py), ours where gradients are put in place, by buckets that are
    full before its end.
    """
    zero = json.get("zero_optimization") or {}
    stage, overlap = rules.stage, zero.get("overlap_comm")
    if stage == 0:
        bucket = zero.get("reduce_bucket_size", 0)
        return rules.sums_going_back and m == 1 and (bucket == "auto" or bucket < parameters)
    if stage == 1:
        return rules.put_in_place and m == 1 and zero.get("reduce_bucket_size", DEFAULT_BUCKET) < parameters
    return stage >= 2 and bool(stage == 3 if overlap is None else overlap)


def _copied(rules: MemoryRules, m: int, of_gradient: int, parameters: int) -> float:
    """Bytes of a parameter that copies read and write in a step of m micro-batches.

    Summing up reads two gradients and writes one. DeepSpeed's ZeRO takes five copies to bring a gradient to its owner:
    into a bucket, out of it into a flat tensor, the mean, back, and into the owner's share (`stage_1_and_2.py`,
    0.19.8; the last two on the owner alone); torch's reducer, and ZeRO-1 where it puts them in place
    (`engine/flat_gradients.py`), take one. ZeRO-3 puts weights together.
    """
    summed = 0 if m == 1 else 3 * of_gradient * m
    of_zero = 3 + 2 / rules.dp
    brought = {0: 1.0, 1: 1.0 if rules.put_in_place and m == 1 else of_zero, 2: of_zero * m, 3: of_zero * m}
    gathered = 2 * rules.of_type * m * _gathers(rules, parameters) if rules.stage == 3 else 0
    return summed + brought[rules.stage] * 2 * of_gradient + gathered


def _gathers(rules: MemoryRules, parameters: int) -> float:
    """How often ZeRO-3 gathers a weight in a micro-batch: again for the backward pass where it had to let it go.

    It keeps one that comes again within `stage3_max_reuse_distance`, and between a weight's two passes lie at most all
    of them twice (`partitioned_param_coordinator.py`, 0.19.8). Counted on two ranks: once, where all may be kept.
    """
    return 1 + max(0.0, 1 - rules.live / (2 * parameters))


def _traffic(
    parameters: int,
    tensors: int,
    rules: MemoryRules,
    n: int,
    m: int,
    ring: Link,
    of_gradient: int,
    json: Mapping[str, Any],
) -> tuple[float, float]:
    """Seconds of (what cannot be hidden, what can) between the replicas, in a step."""
    if n == 1:
        return 0.0, 0.0
    zero = json.get("zero_optimization") or {}
    around = (n - 1) / n * parameters / ring.reached
    gathered = around * rules.of_type / ring.gather_share
    bucket = zero.get("reduce_bucket_size", DEFAULT_BUCKET)
    pieces = math.ceil(parameters / bucket) if rules.stage and bucket != "auto" else 1
    summed = 2 * (around * of_gradient + (n - 1) * ring.latency_seconds * pieces)
    scattered = around * of_gradient / ring.scatter_share + (n - 1) * ring.scatter_latency_seconds * pieces
    wait = (n - 1) * ring.gather_latency_seconds
    if rules.stage == 0:
        return 0.0, summed
    if rules.stage == 3:  # weight and bias of a module together
        together = gathered + wait * tensors / 2
        return 0.0, m * (together * _gathers(rules, parameters) + scattered)
    # Stage 1 sums whole gradients, stage 2 those of each micro-batch: by default both whole buckets on all ranks. Both
    # gather the weights after the update.
    whole = zero.get("use_multi_rank_bucket_allreduce", True) or not zero.get("reduce_scatter", True)
    return wait + gathered, (summed if whole else scattered) * (1 if rules.stage == 1 else m)
