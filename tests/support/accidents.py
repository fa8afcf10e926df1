"""What goes wrong in a run because a test plants it, on a rank."""

from __future__ import annotations

import math
from collections.abc import Collection


def spoil_batches(bad: Collection[int]) -> None:
    """The images of these global batches, counted from 0 in the order of the data, are not finite."""
    from ds_vit.training.inputs import InputPipeline

    training = InputPipeline.training

    def spoilt(self, first_step=0, skipped=0):
        for i, batch in enumerate(training(self, first_step, skipped)):
            poor = "images" in batch and first_step + skipped + i // self.run.share.accumulation in bad
            yield {**batch, "images": batch["images"] * math.nan} if poor else batch

    InputPipeline.training = spoilt
