"""The losses of DINO, iBOT and KoLeo over the global batch, without the matrix of all rows by all prototypes.

A teacher assigns each of its rows to prototypes, and a student predicts the assignment. Logits are recomputed from
bottleneck features a few rows at a time, and gradients are computed in the same pass as the loss: what waits for the
backward pass are the gradients of rows and prototypes. Everything is computed in float32, or float64 for float64 rows,
whatever the type of the rows. Prototypes may be sharded over a tensor-parallel group; the rows are then the same on
its ranks, and so are the losses.

The conventions are DINOv2's (Oquab et al. 2024, https://arxiv.org/abs/2304.07193); docs/self_distillation.md lists
them. DINO: Caron et al. 2021, https://arxiv.org/abs/2104.14294; iBOT: Zhou et al. 2022,
https://arxiv.org/abs/2111.07832; KoLeo: Sablayrolles et al. 2019, https://arxiv.org/abs/1806.03198.

Shapes: R rows of the teacher on this rank, G groups of rows (a sample's crops, or one masked patch), V rows of the
student and U of the teacher in a group (R = G · U), C groups at a time, E bottleneck width, K prototypes, k of this
rank, B samples of this rank, D width of the features, dp data-parallel ranks.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from ds_vit.parallel.tensor.class_parallel import log_softmax
from ds_vit.parallel.tensor.collectives import TensorParallel, copy_to_region, stack_over_group, sum_over_group

ROWS_AT_ONCE = 256
CENTER_MOMENTUM = 0.9
KOLEO_EPS = 1e-8

Sum = Callable[[torch.Tensor], torch.Tensor]
"""The sum of a tensor over the data-parallel ranks, a new tensor; no gradient passes."""


def _exact(x: torch.Tensor) -> torch.Tensor:
    """float64 as it is, everything else in float32."""
    return x if x.dtype == torch.float64 else x.float()


class Prototypes(NamedTuple):
    """This rank's prototypes: the rows of a weight, each normalised. The logits are divided by the lengths instead.

    Attributes:
        weight: float32 [k, E] (float64 for float64 rows), in which the losses are differentiated.
        lengths: of its rows, of the same type [k]; no gradient passes through them.
    """

    weight: torch.Tensor
    lengths: torch.Tensor


def _without_autocast(x: torch.Tensor) -> contextlib.AbstractContextManager[object]:
    """A context without autocast, which would multiply in 16 bits; the meta device, for planning, has none anyway."""
    device = x.device.type
    return torch.autocast(device, enabled=False) if device != "meta" else contextlib.nullcontext()


def _logits(rows: torch.Tensor, prototypes: Prototypes, temperature: float) -> torch.Tensor:
    """rows [..., E] → [..., k]."""
    with _without_autocast(rows):
        return (_exact(rows) @ prototypes.weight.T).div_(prototypes.lengths * temperature)


def _parts(count: int, rows_of_one: int = 1) -> Iterator[slice]:
    """Slices of `count` groups of `rows_of_one` rows. They depend on nothing that differs within a tensor group."""
    step = max(1, ROWS_AT_ONCE // rows_of_one)
    return (slice(start, min(start + step, count)) for start in range(0, count, step))


def _logsumexp_over_prototypes(logits: torch.Tensor, tp: TensorParallel | None) -> torch.Tensor:
    """[..., k] on each rank of the tensor group → [...] over all prototypes, the same on each (a collective)."""
    own = logits.logsumexp(-1)
    return own if tp is None else stack_over_group(own, tp).logsumexp(0)


def _logsumexp_over_ranks(own: torch.Tensor, has_rows: torch.Tensor, sum_over_ranks: Sum) -> torch.Tensor:
    """The logarithm of the sum of exp(own) over the data-parallel ranks that have rows, from sums only.

    The common shift is the mean, which the largest one exceeds by less than float64's exponents span: rows and
    prototypes are normalised, so logits lie within ±1 / temperature.

    Args:
        own: float64 [k].
        has_rows: 1 where this rank has a row; else 0, and `own` does not count: float64 [1].
        sum_over_ranks: as `Sum`.
    """
    own = torch.where(has_rows > 0, own, 0.0)
    sums, ranks = sum_over_ranks(torch.cat((own, has_rows))).split([len(own), 1])
    shift = sums / ranks.clamp(min=1.0)
    total = sum_over_ranks((own - shift).exp() * has_rows)
    return shift + total.clamp(min=torch.finfo(total.dtype).tiny).log()


@dataclass(frozen=True)
class Assignment:
    """How a teacher assigns rows to prototypes: q[r, k] = exp(rows[r] · prototypes[k] / temperature + a[k] + b[r]).

    Each row sums to 1 over the prototypes of all ranks, which decides b. The matrix is not kept.

    Attributes:
        rows: bottleneck features [R, E].
        prototypes: of the teacher.
        temperature: of the teacher.
        of_prototypes: a [k].
        tp: the group over which prototypes are sharded.
    """

    rows: torch.Tensor
    prototypes: Prototypes
    temperature: float
    of_prototypes: torch.Tensor
    tp: TensorParallel | None = None

    def logarithms(self, part: slice) -> torch.Tensor:
        """log q of some rows: [rows, k] (a collective of the tensor group)."""
        logits = _logits(self.rows[part], self.prototypes, self.temperature).add_(self.of_prototypes)
        return log_softmax(logits, self.tp)


@torch.no_grad()
def centered(
    rows: torch.Tensor,
    prototypes: Prototypes,
    temperature: float,
    center: torch.Tensor,
    tp: TensorParallel | None = None,
) -> Assignment:
    """The softmax of logits less a centre (DINO).

    Args:
        rows: [R, E].
        prototypes: of the teacher.
        temperature: of the teacher.
        center: [k], in the logits' units before they are divided by the temperature.
        tp: the group over which prototypes are sharded.
    """
    return Assignment(rows, prototypes, temperature, _exact(center) / -temperature, tp)


@torch.no_grad()
def sinkhorn(
    rows: torch.Tensor,
    prototypes: Prototypes,
    temperature: float,
    sum_over_ranks: Sum,
    tp: TensorParallel | None = None,
    iterations: int = 3,
    counted: torch.Tensor | None = None,
) -> Assignment:
    """Sinkhorn-Knopp over the rows of all data-parallel ranks (SwAV, Caron et al. 2020; DINOv2).

    Each iteration gives all prototypes the same mass, then all rows. It runs on logarithms: a mass that both are
    divided by (their number, the total) is a constant and drops out, so ranks may have different numbers of rows, or
    none. A collective of all ranks.

    Args:
        rows: of all micro-batches [R, E].
        prototypes: as for `centered`.
        temperature: as for `centered`.
        tp: as for `centered`.
        sum_over_ranks: as `Sum`.
        iterations: at least 1.
        counted: which rows have a mass, bool [R]; None for all.
    """
    assert iterations > 0, f"{iterations} iterations"
    of_prototypes = torch.zeros_like(prototypes.lengths)
    has_rows = of_prototypes.new_full((1,), float(len(rows) > 0), dtype=torch.float64)
    if counted is not None:
        has_rows = counted.any(dim=0, keepdim=True).double()
    for iteration in range(iterations):
        masses = torch.full_like(of_prototypes, -math.inf, dtype=torch.float64)
        # The rows of one iteration and the prototypes of the next in one pass over the logits.
        for part in _parts(len(rows)):
            logits = _logits(rows[part], prototypes, temperature)
            if iteration:
                logits -= _logsumexp_over_prototypes(logits + of_prototypes, tp)[:, None]
            if counted is not None:
                logits = logits.masked_fill_(~counted[part, None], -math.inf)
            masses = torch.logaddexp(masses, logits.logsumexp(0).double())
        masses = _logsumexp_over_ranks(masses, has_rows, sum_over_ranks)
        of_prototypes = -masses.to(of_prototypes.dtype)
    return Assignment(rows, prototypes, temperature, of_prototypes, tp)


@torch.no_grad()
def next_center(
    center: torch.Tensor,
    rows: torch.Tensor,
    prototypes: Prototypes,
    sum_over_ranks: Sum,
    counted: torch.Tensor | None = None,
) -> torch.Tensor:
    """The centre of the next step: it moves by 1/10 towards the mean logits of this one (a collective).

    Logits are linear in the rows: only the sum of the rows and their number are exchanged.

    Args:
        center: of this step [k]; unchanged, and the result where no rank has a row.
        rows: of all micro-batches [R, E]; ranks may have different numbers of them.
        prototypes: of the teacher.
        sum_over_ranks: as `Sum`.
        counted: which rows count, bool [R]; None for all.
    """
    if counted is None:
        sums = rows.sum(0, dtype=torch.float64)
        number = sums.new_full((1,), len(rows))
    else:
        sums = torch.where(counted[:, None], rows, 0.0).sum(0, dtype=torch.float64)
        number = counted.sum(dim=0, keepdim=True).double()
    sums, number = sum_over_ranks(torch.cat((sums, number))).split([len(sums), 1])
    mean = _logits((sums / number.clamp(min=1.0)).to(prototypes.weight.dtype), prototypes, 1.0)
    moved = center * CENTER_MOMENTUM + mean.to(center.dtype) * (1.0 - CENTER_MOMENTUM)
    return torch.where(number > 0, moved, center)


class _CrossEntropy(torch.autograd.Function):
    """The weighted cross-entropy of assignments; gradients are computed in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        student: torch.Tensor,
        weight: torch.Tensor,
        lengths: torch.Tensor,
        temperature: float,
        assignment: Assignment,
        weights: torch.Tensor,
        tp: TensorParallel | None,
    ) -> torch.Tensor:
        """student [G, V, E], weight [k, E], weights [G, V, U]; under `tp` d_student is this rank's summand."""
        differentiated = any(ctx.needs_input_grad)
        groups, in_group, in_assignment = weights.shape
        prototypes = Prototypes(weight, lengths)
        total = weights.new_zeros((), dtype=torch.float64)
        d_student = torch.empty_like(student)
        d_weight = (torch.empty_like if groups else torch.zeros_like)(prototypes.weight)
        along = torch.zeros_like(prototypes.lengths)  # each prototype · its gradient, as if its length were 1
        for part in _parts(groups, max(in_group, in_assignment)):
            of_teacher = slice(part.start * in_assignment, part.stop * in_assignment)
            assigned = assignment.logarithms(of_teacher).exp_().unflatten(0, (-1, in_assignment))
            targets = weights[part] @ assigned
            logits = _logits(student[part], prototypes, temperature)
            logarithms = log_softmax(logits, tp)
            total -= (targets * logarithms).sum(dtype=torch.float64)
            if differentiated:
                # The rows of an assignment sum to 1, so those of the targets to the sum of their weights.
                d_logits = logarithms.exp_().mul_(weights[part].sum(-1, keepdim=True)).sub_(targets)
                along += logits.mul_(d_logits).sum((0, 1))
                d_products = d_logits.div_(prototypes.lengths * temperature)
                d_student[part] = d_products @ prototypes.weight
                d_weight.addmm_(d_products.flatten(0, 1).T, student[part].flatten(0, 1), beta=min(part.start, 1))
        if differentiated:  # the length of a prototype changes no logit
            d_weight.addcmul_(prototypes.weight, (along / prototypes.lengths.square())[:, None], value=-1.0)
        ctx.save_for_backward(d_student, d_weight)
        return (total if tp is None else sum_over_group(total, tp)).to(student.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        d_student, d_weight = ctx.saved_tensors
        return d_student.mul_(grads[0]), d_weight.mul_(grads[0]), None, None, None, None, None


def assignment_cross_entropy(
    student_rows: torch.Tensor,
    prototypes: Prototypes,
    student_temp: float,
    assignment: Assignment,
    weights: torch.Tensor,
    tp: TensorParallel | None = None,
) -> torch.Tensor:
    """The sum over groups of weights[g, v, u] · (−Σ_k q[g, u, k] log softmax(student[g, v] · prototypes / temp)[k]).

    Differentiable in the student's rows and the weight of its prototypes. What it keeps for the backward pass grows
    with R + K, not with R · K.

    Args:
        student_rows: [G, V, E]; G may be 0.
        prototypes: the student's.
        student_temp: its temperature.
        assignment: the teacher's, of the rows [G · U, E] in the order of the groups.
        weights: broadcastable to [G, V, U]: of `crop_weights` or `patch_weights`.
        tp: the group over which both towers' prototypes are sharded.

    Returns:
        Scalar in float32 (float64 for float64 rows), the same on the ranks of `tp`.
    """
    groups, in_group = student_rows.shape[:2]
    rows = _exact(student_rows)
    weights = weights.to(rows).expand(groups, in_group, weights.shape[-1])
    assert len(assignment.rows) == groups * weights.shape[-1], (
        f"{len(assignment.rows)} rows of the teacher for {groups} groups of {weights.shape[-1]}"
    )
    if tp is not None:
        rows = copy_to_region(rows, tp)
    with _without_autocast(rows):
        return _CrossEntropy.apply(rows, *prototypes, student_temp, assignment, weights, tp)


def crop_weights(num_samples: int, num_local: int) -> torch.Tensor:
    """Weights of DINO's pairs of crops: the mean over samples and pairs; no global crop is paired with itself.

    Args:
        num_samples: B, at least 1.
        num_local: local crops of a sample.

    Returns:
        float64 [1, 2 + num_local, 2]: the student's crops of a sample, its global ones first, by the teacher's.
    """
    weights = torch.ones(2 + num_local, 2, dtype=torch.float64)
    weights[:2] -= torch.eye(2)
    return weights.div_(weights.sum() * num_samples)[None]


def patch_weights(masks: torch.Tensor) -> torch.Tensor:
    """Weights of iBOT's masked patches: the mean over the masked patches of a crop, then over all global crops.

    Crops without masked patches count as zero: the mean over ranks and micro-batches of the losses is then the loss
    of the global batch, however many patches each has masked.

    Args:
        masks: bool [crops, N]: all global crops of a micro-batch, the masked patches True.

    Returns:
        float64 [P, 1, 1] for the P masked patches, in the order of `masks.nonzero()`.
    """
    of_crops = 1.0 / (masks.sum(1).clamp(min=1) * len(masks)).double()
    return of_crops[:, None].expand(masks.shape)[masks][:, None, None]


@torch.no_grad()
def _nearest(rows: torch.Tensor, others: torch.Tensor, first: int) -> torch.Tensor:
    """The index in `others` [dp · B, D] of the nearest neighbour of each normalised row [B, D]; row i is first + i."""
    nearest = torch.empty(len(rows), dtype=torch.int64, device=rows.device)
    for part in _parts(len(rows)):
        cosines = rows[part] @ others.T
        own = torch.arange(first + part.start, first + part.stop, device=rows.device)
        nearest[part] = cosines.scatter_(1, own[:, None], -math.inf).argmax(1)
    return nearest


def koleo(own: torch.Tensor, gather: Callable[[torch.Tensor], torch.Tensor], offset: int) -> torch.Tensor:
    """KoLeo: minus the mean logarithm of the distance between each row and its nearest neighbour in the global batch.

    Args:
        own: features of this rank's rows of one crop, of all micro-batches [B, D]; not normalised.
        gather: [B, D] → [dp · B, D] over the ranks, differentiable.
        offset: place of this rank's first row in the gathered ones, which have at least two.

    Returns:
        Scalar in float32 (float64 for float64 rows); its mean over the ranks is the loss of the global batch.
    """
    with _without_autocast(own):
        rows = F.normalize(_exact(own), dim=-1, eps=KOLEO_EPS)
        everyone = gather(rows)
        assert len(everyone) > 1, "a row has no neighbour in a global batch of 1"
        neighbours = everyone[_nearest(rows, everyone, offset)]
        return -(F.pairwise_distance(rows, neighbours, eps=KOLEO_EPS) + KOLEO_EPS).log().mean()


class Gauges:
    """Gauges of collapse over the rows of a step, of all its micro-batches and data-parallel ranks."""

    def __init__(self) -> None:
        self._features: torch.Tensor | None = None  # count, sum and sum of squares of normalised features [3, D]
        self._assigned: torch.Tensor | None = None  # mass of each own prototype, entropy, number of rows [k + 2]

    @torch.no_grad()
    def add_features(self, features: torch.Tensor) -> None:
        """Count features [B, D]."""
        rows = F.normalize(features.double(), dim=-1)
        own = torch.stack((torch.ones_like(rows), rows, rows.square())).sum(1)
        self._features = own if self._features is None else self._features + own

    @torch.no_grad()
    def add_assignment(self, assignment: Assignment) -> None:
        """Count the rows of an assignment, in one pass over its logits."""
        masses = torch.zeros_like(assignment.of_prototypes, dtype=torch.float64)
        entropy = masses.new_zeros(())
        for part in _parts(len(assignment.rows)):
            logarithms = assignment.logarithms(part)
            assigned = logarithms.exp()
            masses += assigned.sum(0, dtype=torch.float64)
            entropy -= (assigned * logarithms).sum(dtype=torch.float64)
        own = torch.cat((masses, torch.stack((entropy, torch.full_like(entropy, len(assignment.rows))))))
        self._assigned = own if self._assigned is None else self._assigned + own

    def compute(self, sum_over_ranks: Sum, tp: TensorParallel | None = None) -> dict[str, torch.Tensor]:
        """The gauges of what was counted (a collective); nothing where nothing was.

        Returns:
            Float64 scalars. feature_std: the standard deviation of normalised features times √D, the mean over the
            features; near 1 if they use all directions, 0 if they have collapsed to a point (Chen and He 2021,
            https://arxiv.org/abs/2011.10566, section 4.1). teacher_entropy: the mean entropy of a row's assignment, in
            nats (log K: uniform, nothing is learned). prototype_entropy: the entropy of the mean assignment, in nats:
            its exponential is how many prototypes are in use. teacher_kl: the KL divergence of the mean assignment from
            the uniform one, in nats (log K: all rows have one prototype); log K less the entropy of the mean.
        """
        if self._features is None or self._assigned is None:
            return {}
        count, sums, squares = sum_over_ranks(self._features)
        variance = squares / count - (sums / count).square()
        deviation = variance.clamp(min=0.0).sqrt().mean() * math.sqrt(len(sums))
        masses, (entropy, rows) = sum_over_ranks(self._assigned).split([len(self._assigned) - 2, 2])
        mean = masses / rows
        own = torch.stack((entropy, torch.xlogy(mean, mean).sum(), mean.sum(), torch.full_like(entropy, len(mean))))
        entropy, negentropy, mass, prototypes = own if tp is None else sum_over_group(own, tp)
        kl = negentropy / mass + (prototypes / mass).log()  # the mass is 1 up to fp32's rounding, which may exceed it
        return {
            "feature_std": deviation,
            "teacher_entropy": entropy / rows,
            "prototype_entropy": prototypes.log() - kl,
            "teacher_kl": kl,
        }
