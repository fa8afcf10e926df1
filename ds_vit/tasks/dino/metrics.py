"""What tells features that are learned from those that collapse: their deviation and effective rank."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F

from ds_vit.tasks.metrics import Batch, Figure, Metrics

DEVIATION = Figure("feature_std", "feature deviation", digits=3, summed_up=False)
RANKME = Figure("rankme", "RankMe", digits=1, summed_up=False)
LEAST_DEVIATION, LEAST_RANKME = 0.15, 5.0
"""Below them features are taken for collapsed: evaluations of a run that went well had 0.57 and 12 at least, of runs
that went wrong one of 0.13 and 4 at most from the second epoch on (docs/self_distillation.md)."""
_SHARE_OF_RANKME = 1 / 8
"""Of the largest possible RankMe: the bound where that is below 40, with narrow models and few images."""
_EARLIEST = 1000
"""The step from which features are rated where the first epoch is longer: LayerScale begins near zero, and with it the
differences between the class tokens of images."""
_EPS = 1e-7
"""RankMe's ε, which its paper adds to each share."""


class FeatureSpread(Metrics):
    """Two measures of how many directions features use.

    The deviation of normalised features times √D is near 1 where they are spread, 0 where they have collapsed to a
    point (Chen and He 2021, https://arxiv.org/abs/2011.10566, section 4.1). RankMe (Garrido et al. 2023,
    https://arxiv.org/abs/2210.02885) is the exponential of the entropy of the singular values of the feature matrix,
    which are those of the roots of its Gram matrix: D² sums, however many images there are.

    Args:
        width: D.
        device: where the sums are kept.
    """

    def __init__(self, width: int, device: torch.device) -> None:
        # Normalised features, their squares, images, the Gram matrix.
        super().__init__(2 * width + 1 + width**2, device)
        self._sizes = [width, width, 1, width**2]

    def update(self, outputs: torch.Tensor, batch: Batch) -> None:
        """Features fp32 [B, D]."""
        valid = batch["valid"][:, None]
        features = torch.where(valid, outputs.double(), 0.0)
        rows = F.normalize(features, dim=1)
        self.sums += torch.cat((rows.sum(0), rows.square().sum(0), valid.sum(0), (features.T @ features).flatten()))

    def compute(self) -> dict[str, float]:
        """As `Metrics.compute`."""
        sums, squares, count, gram = self.sums.split(self._sizes)
        images = int(count)
        means, squares = sums / max(images, 1), squares / max(images, 1)
        deviation = (squares - means.square()).clamp(min=0.0).sqrt().mean() * len(means) ** 0.5
        rank = _rankme(gram.view(len(means), -1), images)
        return {DEVIATION.name: float(deviation), RANKME.name: rank, "images": images}


def _rankme(gram: torch.Tensor, images: int) -> float:
    """RankMe by a Gram matrix float64 [D, D] of some images; NaN where a feature is not finite, or all are zero."""
    if not (gram.isfinite().all() and gram.any()):
        return float("nan")
    squares = torch.linalg.eigvalsh(gram)[-images:]
    # Smaller ones are rounding, whose roots would count.
    squares = torch.where(squares > squares[-1] * len(gram) * torch.finfo(gram.dtype).eps, squares, 0.0)
    singular = squares.sqrt()
    shares = singular / singular.sum() + _EPS
    return float((-(shares * shares.log()).sum()).exp())


def collapse_concerns(figures: Mapping[str, float], width: int, step: int, steps_per_epoch: int) -> Mapping[str, str]:
    """Warnings about figures below the bounds; none in the first steps, and none of figures that are not finite.

    Args:
        figures: with or without those of `FeatureSpread`.
        width: D.
        step: of the figures.
        steps_per_epoch: optimizer steps.
    """
    if step < min(steps_per_epoch, _EARLIEST):
        return {}
    bounds = {DEVIATION: LEAST_DEVIATION}
    if RANKME.name in figures:
        bounds[RANKME] = min(LEAST_RANKME, _SHARE_OF_RANKME * min(width, figures["images"]))
    return {
        figure.name: f"at step {step} the {figure.label} of the teacher is {figures[figure.name]:.3g}, below "
        f"{least:g}: its features may have collapsed, unless random weights began so; docs/self_distillation.md says "
        "what to change"
        for figure, least in bounds.items()
        if figures.get(figure.name, least) < least
    }
