"""The part of the report on pairs: which images and captions are similar."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ds_vit.config.run_folder import RunFolder, write_json
from ds_vit.data.settings import ImageConfig
from ds_vit.data.sources.source import Source
from ds_vit.tasks.panels import Panel, heat_map, save_samples


@dataclass(frozen=True)
class Pairs:
    """Images with their first captions, for the report.

    Attributes:
        samples: K samples, evenly spaced in the split.
        similarities: of their images (rows) and captions (columns), float [K, K].
        best, worst: (sample, similarity, place of the nearest own caption, from 1) of the most and least similar pairs.
    """

    samples: list[int]
    similarities: list[list[float]]
    best: list[tuple[int, float, int]]
    worst: list[tuple[int, float, int]]


def write_pairs(folder: RunFolder, pairs: Pairs, source: Source, image: ImageConfig) -> None:
    """Write the similarities of some images and captions, and a sheet of the most and the least similar pairs.

    Args:
        folder: of the run.
        pairs: of its validation split.
        source: the split.
        image: how its images are read.

    Raises:
        OSError: a file cannot be written.
    """
    texts = [source.captions(sample)[0] for sample in pairs.samples]
    names = [Path(source.describe(sample)).name for sample in pairs.samples]
    write_json(folder.similarities, {"images": names, "captions": texts, "similarities": pairs.similarities})
    captioned = [
        (sample, f"{similarity:.3f}, place {place:,}: {source.captions(sample)[0]}")
        for sample, similarity, place in (*pairs.best, *pairs.worst)
    ]
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
