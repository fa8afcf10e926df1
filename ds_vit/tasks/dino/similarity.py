"""The sheet of similarities: which patches a teacher sees alike in the same images, at several steps of a run.

As by Siméoni et al. 2025, arXiv 2508.10104: the cosine of each patch token with the one in the centre.
"""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F
from PIL import Image
from torchvision.transforms.functional import to_pil_image

from ds_vit.tasks.panels import read_sheet, save_sheet, viridis

SIMILARITY = "patch-similarity"
"""The name of the sheet."""
SIMILARITIES = (
    "Images, and at several steps the cosine of each patch token of the teacher with the one in the centre, dark: 0 or "
    "less, bright: 1"
)
MOST_STEPS = 6


def centre_similarities(tokens: torch.Tensor) -> torch.Tensor:
    """The cosine of patch tokens with the one in the centre.

    Args:
        tokens: [B, rows, columns, D], which a norm without weights precedes.

    Returns:
        float [B, rows, columns].
    """
    rows = F.normalize(F.layer_norm(tokens.double(), tokens.shape[-1:]), dim=-1)
    centre = rows[:, rows.shape[1] // 2, rows.shape[2] // 2]
    return torch.einsum("brcd,bd->brc", rows, centre).float()


def add_step(path: Path, step: int, pixels: torch.Tensor, similarities: torch.Tensor) -> None:
    """Add a step to a sheet (tasks/panels.py): a row of images, then a row for each step.

    Steps from `step` on are of a run that was interrupted, and are replaced. An unreadable sheet, or one with
    another number of images, is begun anew. Of more than `MOST_STEPS` steps those that are spread most evenly stay, the
    first and the last among them.

    Args:
        path: of the sheet, which need not exist.
        step: of the weights.
        pixels: of the images, from 0 to 1 [B, 3, height, width].
        similarities: as of `centre_similarities`; 0 and less is dark, 1 is bright, in each step.

    Raises:
        OSError: it cannot be written.
    """
    count = len(pixels)
    before, captions, num_views = read_sheet(path)
    rows: dict[int, list[Image.Image]] = {}
    if num_views == count:
        numbers = (int(caption.removeprefix("step ")) for caption in captions[count::count])
        rows = {number: before[at * count :][:count] for at, number in enumerate(numbers, 1) if number < step}
    shares = similarities.nan_to_num(0.0).clamp(0.0, 1.0).cpu()
    rows[step] = [Image.fromarray(colours) for colours in viridis(shares.numpy())]
    if len(rows) > MOST_STEPS:
        steps = [*rows]
        del rows[min(steps[1:-1], key=lambda at: steps[steps.index(at) + 1] - steps[steps.index(at) - 1])]
    pixels = (pixels.clamp(0.0, 1.0) * 255.0).round().to(torch.uint8)
    images, captions = [to_pil_image(image) for image in pixels], [""] * count
    for number, row in rows.items():
        images += row
        captions += [f"step {number}", *[""] * (count - 1)]
    save_sheet(images, captions, path, num_views=count)
