"""The time of a training step in a layout: computing, the pipeline's bubble, and traffic that is not hidden.

docs/planning.md describes the model: a pipeline runs by stage and micro-batch; tensor parallelism sums the tokens over
its group after each sharded part, forward and backward, and nothing hides it; data parallelism sends each gradient
around a ring, hidden behind the backward passes where DeepSpeed, or torch at ZeRO-0, overlaps the two.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import NamedTuple

from ds_vit.config.batch import BatchSizes
from ds_vit.config.deepspeed_rules import elements_of_bucket
from ds_vit.parallel.layout import Layout
from ds_vit.planner.counting import LayerWork, Pass
from ds_vit.planner.hardware import Accelerator, Link
from ds_vit.planner.memory import MemoryRules
from ds_vit.planner.pipeline import pipeline_time

_UPDATE_BYTES = 42
"""A parameter: gradient read for its norm, read and written to clip it; gradient, master, two moments read, all but the
first written, weight written."""


@dataclass(frozen=True)
class Machine:
    """The GPUs of a run.

    Attributes:
        accelerator: the kind of each GPU.
        gpus: their number.
        per_node: GPUs of a host.
        inside: the link within a host.
        outside: the link of a GPU between hosts.
    """

    accelerator: Accelerator
    gpus: int
    per_node: int
    inside: Link
    outside: Link

    def ring(self, layout: Layout) -> Link:
        """The link of a data-parallel group's ring; several of its ranks in a host add up their rates."""
        replica = layout.pp * layout.tp
        if self.gpus <= self.per_node:
            return self.inside
        # Each of a group's ranks in one host has its own way out.
        ways = max(1, self.per_node // replica)
        reached = min(self.inside.reached, ways * self.outside.reached)
        return replace(self.outside, bytes_per_second=reached, efficiency=1.0)

    def between_stages(self, layout: Layout) -> Link:
        """The slowest link that tokens cross from stage to stage."""
        # Replicas follow each other: only those that divide a host stay inside one.
        stays_inside = self.gpus <= self.per_node or self.per_node % (layout.pp * layout.tp) == 0
        return self.inside if stays_inside else self.outside


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step, by cause.

    Attributes:
        computing: of the slowest stage, for all micro-batches.
        recomputing: forward passes that are repeated.
        tensor: sums over the tensor-parallel group.
        bubble: a stage waits for another.
        sending: tokens from stage to stage.
        data: gradients and weights between replicas that are not hidden.
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


def step_time(
    works: Sequence[LayerWork], bounds: Sequence[int], machine: Machine, batch: BatchSizes, rules: MemoryRules
) -> StepTime:
    """The time of a step, of a planned layout or of a run.

    Args:
        works: the work of each layer, as a rank has it.
        bounds: pipeline stage i has the layers from bounds[i] on.
        machine: the GPUs.
        batch: micro-batch and accumulation.
        rules: layout, ZeRO stage, types and recomputing.
    """
    m, p, stage = batch.accumulation, rules.layout.pp, rules.stage
    distinct = {id(work): work for work in works}
    times = {key: _layer_time(work, machine, rules, batch.micro_batch) for key, work in distinct.items()}
    parts = [works[start:stop] for start, stop in itertools.pairwise(bounds)]
    stages = [_PassTime.of_stage([times[id(work)] for work in part]) for part in parts]
    slowest = max(stages, key=lambda one: one.whole)
    bubble = pipeline_time([(one.ahead, one.whole - one.ahead) for one in stages], m) - m * slowest.whole
    sending = 0.0
    if p > 1:
        link = machine.between_stages(rules.layout)
        # A stage receives and sends both ways; DeepSpeed waits for each of them.
        one = works[min(1, len(works) - 1)].given * batch.micro_batch / link.reached + link.latency_seconds
        sending = (2 if p == 2 else 4) * m * one
    of_rank = max(sum(work.parameters for work in part) for part in parts)
    data, overlapped = _traffic(of_rank, len(works), rules, m, machine.ring(rules.layout))
    copied_per_second = machine.accelerator.copied_per_second
    behind = machine.accelerator.hidden_share * (slowest.once * 2 / 3) * m if _overlaps(rules) else 0.0
    return StepTime(
        computing=m * slowest.once,
        recomputing=m * slowest.again,
        tensor=m * slowest.tensor,
        bubble=max(0.0, bubble),
        sending=sending,
        data=data + max(0.0, overlapped - behind),
        hidden=min(overlapped, behind),
        copying=_copied(rules, m) * of_rank / copied_per_second,
        update=_UPDATE_BYTES * of_rank / (rules.layout.dp if stage else 1) / copied_per_second,
    )


class _PassTime(NamedTuple):
    """Seconds of a micro-batch in a layer or a pipeline stage on a rank.

    Attributes:
        once: computing, forward and backward.
        forward: computing, forward.
        again: computing that is repeated in the backward pass.
        sums: over the tensor-parallel group in both passes, without those that are repeated.
        sums_again: those that are repeated in the backward pass.
    """

    once: float
    forward: float
    again: float
    sums: float
    sums_again: float

    @classmethod
    def of_stage(cls, layers: Sequence[_PassTime]) -> _PassTime:
        """The time of a stage."""
        return cls(*map(sum, zip(*layers, strict=True)))

    @property
    def tensor(self) -> float:
        """All sums over the group."""
        return self.sums + self.sums_again

    @property
    def ahead(self) -> float:
        """The forward pass with its sums."""
        return self.forward + self.sums / 2

    @property
    def whole(self) -> float:
        """Both passes."""
        return self.once + self.again + self.tensor


def _layer_time(work: LayerWork, machine: Machine, rules: MemoryRules, micro_batch: int) -> _PassTime:
    """The time of one layer; a block that is recomputed sends its first sum again (docs/performance.md)."""
    tp, of_type, checkpointing = rules.layout.tp, 2 if rules.autocast else rules.of_type, rules.checkpointing
    one_sum = 2 * (tp - 1) / tp * work.given * micro_batch / machine.inside.reached if tp > 1 else 0.0
    one_sum += 2 * (tp - 1) * machine.inside.latency_seconds

    def seconds(of: Pass) -> float:
        return of.seconds(machine.accelerator, of_type, micro_batch)

    forward, again, sums_again = seconds(work.forward), 0.0, 0.0
    if checkpointing.interval and work.is_block:
        again = seconds(work.forward._replace(products=())) if checkpointing.selective else forward
        sums_again = one_sum if work.regions else 0.0
    return _PassTime(forward + seconds(work.backward), forward, again, 2 * work.regions * one_sum, sums_again)


def _overlaps(rules: MemoryRules) -> bool:
    """Whether gradients travel during the backward pass: where they are flat, unless a pipeline waits for its end."""
    if rules.flat:
        return rules.layout.pp == 1
    return rules.stage >= 2 and bool(rules.json.zero_optimization.overlap_comm)


def _copied(rules: MemoryRules, m: int) -> float:
    """Bytes of a parameter that copies read and write in a step of m micro-batches.

    Summing up reads two gradients and writes one. DeepSpeed's ZeRO copies a gradient five times on its way to its
    owner: into a bucket, out of it into a flat tensor, the mean, back, and into the owner's share (`stage_1_and_2.py`,
    0.19.8; the last two on the owner only); flat gradients are copied once. ZeRO-3 copies into a buffer, and the
    owner's share out of it; it gathers each weight for both passes (`engine/zero3.py`).
    """
    summed = 0 if m == 1 else 3 * rules.sent_as * m
    of_zero = 3 + 2 / rules.layout.dp
    brought = 1.0 if rules.flat else of_zero * (m if rules.stage > 1 else 1)
    if rules.stage == 3:
        brought = (1 + 1 / rules.layout.dp) * m
    gathered = 2 * rules.of_type * m * 2 if rules.stage == 3 else 0
    return summed + brought * 2 * rules.sent_as + gathered


def _traffic(parameters: int, layers: int, rules: MemoryRules, m: int, ring: Link) -> tuple[float, float]:
    """Seconds of traffic between the replicas in a step: (exposed, overlappable)."""
    n, zero = rules.layout.dp, rules.json.zero_optimization
    if n == 1:
        return 0.0, 0.0
    around = (n - 1) / n * parameters / ring.reached
    gathered = around * rules.of_type / ring.gather_share
    bucket = elements_of_bucket(rules.json, parameters) if rules.flat else zero.reduce_bucket_size
    pieces = math.ceil(parameters / bucket) if rules.stage < 3 else 1
    summed = 2 * (around * rules.sent_as + (n - 1) * ring.latency_seconds * pieces)
    scattered = around * rules.sent_as / ring.scatter_share + (n - 1) * ring.scatter_latency_seconds * pieces
    wait = (n - 1) * ring.gather_latency_seconds
    if rules.stage == 0:
        return 0.0, summed
    if rules.stage == 3:  # all weights of a layer together, for both passes
        waits = (n - 1) * ring.scatter_latency_seconds * (layers - 1)
        return 0.0, m * (2 * (gathered + wait * layers) + scattered + waits)
    # Stage 1 sums whole gradients, stage 2 those of each micro-batch, each part to its owner; with offload both by
    # default whole buckets on all ranks. Both gather the weights after the update.
    to_all = zero.use_multi_rank_bucket_allreduce or not zero.reduce_scatter
    whole = to_all and not rules.flat
    return wait + gathered, (summed if whole else scattered) * (1 if rules.stage == 1 else m)
