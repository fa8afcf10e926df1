"""Retrieval: how often a caption of an image is among the nearest captions, and the reverse.

The protocol for several captions per image is that of Karpathy and Fei-Fei 2015 (https://arxiv.org/abs/1412.2306): an
image is right at k if one of its captions is among the k nearest of all; each caption is a query for its image.

Shapes: B samples of a micro-batch, E common width of both towers, N samples of a split, M captions after the first ones
of all samples, Q queries, G candidates of a gallery.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ds_vit.config.run_folder import RunFolder, write_json
from ds_vit.data.settings import ImageConfig
from ds_vit.data.sources.source import Source
from ds_vit.tasks.metrics import Batch, Metrics, spread
from ds_vit.tasks.panels import Panel, heat_map, save_samples

RANKS = (1, 5, 10)
DIRECTIONS = ("image_to_text", "text_to_image")
_MOST_SHOWN, _MOST_LISTED = 12, 8


class Retrieval(Metrics):
    """Recall at 1, 5 and 10 in percent over a whole split, from images to captions and the reverse.

    "similarity" is the mean cosine of an image and its first caption: it moves smoothly, where recalls of a barely
    trained model jump by near ties.

    Features of all ranks are added up into one table; the order of samples and captions is the split's. Of equally
    similar candidates the first counts as nearer.

    Args:
        device: where the features are kept.
        width: E.

    Attributes:
        rows: float32 [N, 2E], zero where a sample does not count.
        counted: samples that count, int64, and the places of their captions (`places_of_partners`); from `compute`.
    """

    counted: tuple[torch.Tensor, torch.Tensor]

    def __init__(self, device: torch.device, width: int) -> None:
        super().__init__(1, device)  # images
        self._width = width
        self.rows: torch.Tensor = torch.zeros(0, 2 * width, device=device)
        self._further_samples = torch.zeros(0, dtype=torch.int64, device=device)
        self._further_texts = torch.zeros(0, width, device=device)

    def expect(self, num_samples: int) -> None:
        """As `Metrics.expect`."""
        super().expect(num_samples)
        self.rows = self.rows.new_zeros(num_samples, 2 * self._width)

    def take_texts(self, samples: torch.Tensor, features: torch.Tensor) -> None:
        """As `Metrics.take_texts`: the captions after the first one of each sample."""
        self._further_samples, self._further_texts = samples, features

    def update(self, outputs: torch.Tensor, batch: Batch) -> None:
        """Normalised features of an image and its first caption, float32 [B, 2E]."""
        valid = batch["valid"]
        self.rows[self.places(batch)] = outputs[valid]
        self.sums += valid.double().sum()

    def compute(self) -> dict[str, float]:
        """As `Metrics.compute`."""
        counts = self.rows.any(dim=1)
        samples = counts.nonzero()[:, 0]
        firsts = self.rows[counts].double()
        images, texts = firsts.split(self._width, dim=1)
        further = counts[self._further_samples]
        of_texts = torch.cat((samples, self._further_samples[further]))
        texts = torch.cat((texts, self._further_texts[further].double()))
        of_texts, order = of_texts.sort(stable=True)
        found: dict[str, Any] = {}
        sides = ((images, samples), (texts[order], of_texts))
        for direction, (queries, gallery) in zip(DIRECTIONS, (sides, sides[::-1]), strict=True):
            places = places_of_partners(*queries, *gallery)
            if gallery is sides[1]:
                self.counted = samples, places
            found |= {
                f"{direction}_r{k}": 100.0 * (places < k).double().sum().item() / max(1, len(places)) for k in RANKS
            }
        mean = sum(found[f"{direction}_r1"] for direction in DIRECTIONS) / len(DIRECTIONS)
        own = (images * firsts[:, self._width :]).sum().item() / max(1, len(images))
        return {"r1": mean, **found, "similarity": own, "images": int(self.sums[0])}


def places_of_partners(
    queries: torch.Tensor,
    of_queries: torch.Tensor,
    gallery: torch.Tensor,
    of_gallery: torch.Tensor,
    at_once: int = 1 << 22,
) -> torch.Tensor:
    """How many candidates are nearer to a query than the nearest one of its sample, int64 [Q]; of equal ones the first.

    A candidate with a NaN is the farthest. A query with no number for any of its sample has all candidates before it.

    Args:
        queries: [Q, E].
        of_queries: the sample that each query is of, int64 [Q].
        gallery: the candidates [G, E].
        of_gallery: the sample that each candidate is of, int64 [G]; each query's sample has one at least.
        at_once: similarities that are computed at a time.
    """
    size, found = len(gallery), [torch.zeros(0, dtype=torch.int64, device=queries.device)]
    columns = torch.arange(size, device=queries.device)
    for rows in torch.arange(len(queries), device=queries.device).split(max(1, at_once // max(1, size))):
        products = queries[rows] @ gallery.T
        similarities = products.masked_fill(products.isnan(), -torch.inf)
        is_partner = of_queries[rows][:, None] == of_gallery
        best, place = similarities.masked_fill(~is_partner, -torch.inf).max(dim=1, keepdim=True)
        nearer = (similarities > best) | ((similarities == best) & (columns < place))
        found.append(torch.where(best[:, 0].isfinite(), nearer.sum(dim=1), size))
    return torch.cat(found)


# ---- the report: which images and captions are similar ---------------------------------------------------------------


def write_pairs(folder: RunFolder, metrics: Retrieval, source: Source, image: ImageConfig) -> None:
    """Write the similarities of some images and their first captions, and a sheet of the most and least similar pairs.

    Args:
        folder: of the run.
        metrics: of its validation split, computed.
        source: the split.
        image: how its images are read.

    Raises:
        OSError: a file cannot be written.
    """
    samples, places = (values.cpu() for values in metrics.counted)
    if not len(samples):
        return
    images, texts = metrics.rows.cpu()[samples].double().chunk(2, dim=1)
    shown = spread(_MOST_SHOWN, len(samples))
    numbers = samples[shown].tolist()
    found = {
        "images": [Path(source.describe(number)).name for number in numbers],
        "captions": [source.captions(number)[0] for number in numbers],
        "similarities": (images[shown] @ texts[shown].T).tolist(),
    }
    write_json(folder.similarities, found)
    own = (images * texts).sum(dim=1).nan_to_num(nan=-torch.inf)
    order = own.argsort(stable=True).tolist()
    most = min(_MOST_LISTED, len(order) // 2)
    captioned = []
    for row in (*order[::-1][:most], *order[:most]):
        number = int(samples[row])
        captioned.append((number, f"{own[row]:.3f}, place {places[row] + 1:,}: {source.captions(number)[0]}"))
    save_samples(source, captioned, folder.pairs, image)


def pair_panels(folder: RunFolder) -> list[Panel]:
    """The similarities of some images and captions; none without similarities.json."""
    try:
        found = json.loads(folder.similarities.read_text())
    except (OSError, ValueError):
        return []
    panel = heat_map(
        "Similarity of validation images and captions",
        [f"{name}: {text}" for name, text in zip(found["images"], found["captions"], strict=True)],
        found["captions"],
        np.array(found["similarities"], dtype=float),
        column_kind="caption",
        note="rows: images, each with its own caption; columns: captions; the diagonal should be brightest",
    )
    return [panel] if panel else []
