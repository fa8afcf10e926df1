"""The quality of features: exact k nearest neighbours, and a linear classifier. Both learn from the training split's
features and are evaluated on the validation split's, in any layout, without all features of a split on one rank.

Shapes: N features of the training split on this rank, Q of the validation split at once, D width, C classes, k
neighbours, R data-parallel ranks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial

import torch
import torch.distributed as dist
import torch.nn.functional as F

from ds_vit.config.schema import RunConfig
from ds_vit.data.sources.source import Source
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.parallel.groups import Groups
from ds_vit.tasks.metrics import Batch, Figure, Means, Metrics

TEMPERATURE = 0.07
_NUMBERS_AT_ONCE = 1 << 23  # 64 MiB in float64
_LEAST_DEVIATION = 1e-3  # of a feature, relative to the root mean square of all features


@dataclass(frozen=True)
class FeatureBank:
    """The features of a split that this rank computed: each image on one rank, none where rows do not count.

    Attributes:
        features: float32 [N, D].
        targets: class numbers int64 [N].
        places: int64 [N], growing; images are numbered over all ranks, in the order of the split.
        num_classes: C.
    """

    features: torch.Tensor
    targets: torch.Tensor
    places: torch.Tensor
    num_classes: int

    @classmethod
    def collect(
        cls, outputs: Iterable[tuple[torch.Tensor, Batch]], num_classes: int, groups: Groups, device: torch.device
    ) -> FeatureBank:
        """The bank of an engine's outputs in evaluation, whose batches are assigned to the ranks in turn."""
        found = []
        for number, (rows, batch) in enumerate(outputs):
            valid = batch["valid"]
            first = (number * groups.layout.dp + groups.dp_rank) * len(rows)
            found.append((rows[valid], batch["targets"][valid], first + valid.nonzero()[:, 0]))
        if not found:
            none = torch.empty(0, dtype=torch.int64, device=device)
            return cls(torch.empty(0, 0, device=device), none, none, num_classes)
        features, targets, places = (torch.cat(parts) for parts in zip(*found, strict=True))
        return cls(features, targets, places, num_classes)

    def blocks(self, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Features, targets and places, at most `size` images at a time; no block where this rank has no image."""
        parts = (self.features, self.targets, self.places) if len(self.targets) else ()
        return zip(*(part.split(size) for part in parts), strict=True)


class _Top1(Means):
    """Top-1 accuracy of the classes that `predict` gives."""

    def __init__(self, name: str, bank: FeatureBank, groups: Groups) -> None:
        super().__init__(bank.features.device, name)
        self.bank = bank
        self.groups = groups

    @abstractmethod
    def predict(self, features: torch.Tensor) -> torch.Tensor:
        """Features float32 [Q, D] → classes int64 [Q]; the data-parallel ranks call it together."""

    def update(self, outputs: torch.Tensor, batch: Batch) -> None:
        """As `Metrics.update`, of features [Q, D] and class numbers."""
        self.count([100.0 * (self.predict(outputs) == batch["targets"])], batch)


def _unit(features: torch.Tensor) -> torch.Tensor:
    """Features normalised in float64, so that rounding decides no neighbour; non-finite rows become zero."""
    return F.normalize(features.double(), dim=1).nan_to_num()


def _nearest(
    similarities: torch.Tensor, targets: torch.Tensor, places: torch.Tensor, k: int
) -> tuple[torch.Tensor, ...]:
    """The k candidates [Q, k] with the largest similarities; of equal ones those of the lowest places."""
    order = places.argsort(dim=1)
    order = order.gather(1, similarities.gather(1, order).argsort(dim=1, descending=True, stable=True)[:, :k])
    return similarities.gather(1, order), targets.gather(1, order), places.gather(1, order)


def _nearest_columns(similarities: torch.Tensor, k: int) -> torch.Tensor:
    """Indices [Q, k] of each row's k largest, ascending; of equal ones the first (`topk` takes any)."""
    least = similarities.topk(k, dim=1).values[:, -1:]
    above, equal = similarities > least, similarities == least
    wanted = above | (equal & (equal.cumsum(dim=1) <= k - above.sum(dim=1, keepdim=True)))
    return wanted.nonzero()[:, 1].view(-1, k)


class NearestNeighbours(_Top1):
    """Exact weighted k nearest neighbours by DINO's rule (Caron et al. 2021, arXiv 2104.14294; Wu et al. 2018).

    An image votes for its class with exp(cosine similarity / 0.07). Of equally similar images those that come first in
    the training split count, of equal votes the lower class: the layout decides nothing. Every rank compares the
    queries of all ranks with the images that it holds, a block at a time, and k candidates per rank are exchanged.

    Args:
        bank: this rank's share of the training split.
        groups: of the run.
        k: neighbours.
    """

    def __init__(self, bank: FeatureBank, groups: Groups, *, k: int) -> None:
        super().__init__("knn_top1", bank, groups)
        self.k = k

    def predict(self, features: torch.Tensor) -> torch.Tensor:
        """As `_Top1.predict`."""
        rows, size = len(features), self.groups.layout.dp
        every = self._of_all_ranks(features).flatten(0, 1)
        found = torch.stack([part.double() for part in self._own_nearest(_unit(every))])  # exact up to 2**53
        own = self._of_all_ranks(found)[:, :, self.groups.dp_rank * rows : (self.groups.dp_rank + 1) * rows]
        similarities, targets, places = own.permute(1, 2, 0, 3).reshape(3, rows, size * self.k)
        similarities, targets, _ = _nearest(similarities, targets.long(), places, self.k)
        votes = similarities.new_zeros(rows, self.bank.num_classes)
        weights = (similarities / TEMPERATURE).exp()
        for neighbour in range(self.k):  # one addition after the other: equal votes are equal in every bit
            one = slice(neighbour, neighbour + 1)
            votes.scatter_add_(1, targets[:, one], weights[:, one])
        return votes.argmax(dim=1)  # the first of equal ones

    def _of_all_ranks(self, tensor: torch.Tensor) -> torch.Tensor:
        """[...] of each data-parallel rank → [R, ...]."""
        out = tensor.new_empty(self.groups.layout.dp, *tensor.shape)
        dist.all_gather_into_tensor(out.view(-1), tensor.reshape(-1).contiguous(), group=self.groups.dp)
        return out

    def _own_nearest(self, queries: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The k nearest of this rank's images: similarities, targets, places [Q, k]; -inf where it has fewer."""
        shape = (len(queries), self.k)
        none = torch.zeros(shape, dtype=torch.int64, device=queries.device)
        found = (queries.new_full(shape, -torch.inf), none, none)
        for features, targets, places in self.bank.blocks(max(self.k, _NUMBERS_AT_ONCE // len(queries))):
            similarities = queries @ _unit(features).T
            columns = _nearest_columns(similarities, min(self.k, len(features)))
            candidates = (similarities.gather(1, columns), targets[columns], places[columns])
            near, labels, at = (torch.cat(both, dim=1) for both in zip(found, candidates, strict=True))
            found = _nearest(near, labels, at, self.k)
        return found


class LinearProbe(_Top1):
    """Multinomial logistic regression on standardised features, as scikit-learn's `LogisticRegression` with C = 1.

    The least of sum(cross-entropy) + |weights|^2 / 2 over the training split, found by L-BFGS in float64: there is one,
    so there is no learning rate to choose, and every layout finds the same. A feature whose deviation is below a
    thousandth of the features' root mean square is divided by that thousandth instead.

    Args:
        bank: this rank's share of the training split.
        groups: of the run.
    """

    max_iterations = 200

    def __init__(self, bank: FeatureBank, groups: Groups) -> None:
        super().__init__("linear_top1", bank, groups)

    def predict(self, features: torch.Tensor) -> torch.Tensor:
        """As `_Top1.predict`; the first call fits the classifier."""
        return self._classify(features).argmax(dim=1)

    def _sum(self, tensor: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(tensor, group=self.groups.dp)
        return tensor

    @cached_property
    def _classify(self) -> Callable[[torch.Tensor], torch.Tensor]:
        """Features float32 [Q, D] → logits float64 [Q, C]."""
        bank, width = self.bank, self.bank.features.shape[1]
        block = max(1, _NUMBERS_AT_ONCE // max(width, bank.num_classes))
        moments = torch.zeros(2, width, dtype=torch.float64, device=bank.features.device)
        count = self._sum(moments.new_tensor(float(len(bank.targets))))
        for features, _, _ in bank.blocks(block):
            moments[0] += features.double().sum(0)
        mean = self._sum(moments[0]) / count
        for features, _, _ in bank.blocks(block):
            moments[1] += (features.double() - mean).square().sum(0)
        deviation = (self._sum(moments[1]) / count).sqrt()
        # A smaller deviation is mostly rounding, which differs between layouts: it is not magnified.
        least = _LEAST_DEVIATION * (mean.square() + deviation.square()).mean().sqrt()
        deviation.clamp_(min=least)
        deviation[deviation == 0] = 1.0

        # The last column is the bias, which is not penalised.
        weights = moments.new_zeros(bank.num_classes, width + 1, requires_grad=True)

        def logits(features: torch.Tensor) -> torch.Tensor:
            return F.linear((features.double() - mean) / deviation, weights[:, :-1], weights[:, -1])

        optimizer = torch.optim.LBFGS(
            [weights], max_iter=self.max_iterations, tolerance_grad=1e-7, line_search_fn="strong_wolfe"
        )

        def loss() -> torch.Tensor:
            optimizer.zero_grad()
            total = moments.new_zeros(())
            for features, targets, _ in bank.blocks(block):
                part = F.cross_entropy(logits(features), targets, reduction="sum") / count
                part.backward()
                total += part.detach()
            gradient = torch.zeros_like(weights) if weights.grad is None else weights.grad
            both = self._sum(torch.cat([gradient.flatten(), total[None]]))
            weights.grad = both[:-1].view_as(weights)
            weights.grad[:, :-1] += weights.detach()[:, :-1] / count
            return both[-1] + weights.detach()[:, :-1].square().sum() / (2 * count)

        with torch.enable_grad():
            optimizer.step(loss)
        weights.requires_grad_(False)
        return logits


Evaluator = Callable[[FeatureBank, Groups], Metrics]
"""(This rank's share of the training split, groups) → metrics whose `update` takes features of the validation split and
their batch, with "targets"."""
KNN = Figure("knn_top1", "k-NN top-1", "%")
LINEAR = Figure("linear_top1", "linear probe top-1", "%")


def chosen_evaluators(config: RunConfig, source: Source) -> dict[Figure, Evaluator]:
    """The evaluators that flags ask for, by their metric.

    Args:
        config: the flags.
        source: the training split.

    Raises:
        UserError: images with several labels or without any, fewer images than neighbours, or no training split to
            learn from.
    """
    chosen: dict[Figure, Evaluator] = {}
    if config.eval_knn:
        chosen[KNN] = partial(NearestNeighbours, k=config.eval_knn)
    if config.eval_linear_probe:
        chosen[LINEAR] = LinearProbe
    flag = f"--eval-knn {config.eval_knn}" if config.eval_knn else "--eval-linear-probe"
    if chosen and source.multi_label:
        raise UserError(f"{flag} needs one class an image, and these have several labels; drop it")
    if chosen and not source.class_names:
        raise UserError(f"{flag} needs a class for each image, and these have none; drop it")
    if chosen and not config.train_split:
        raise UserError(f"{flag} learns from the training split, and --train-split '' names none")
    if config.eval_knn > len(source):
        raise UserError(f"--eval-knn {config.eval_knn} must be at most the {len(source)} images of the training split")
    return chosen
