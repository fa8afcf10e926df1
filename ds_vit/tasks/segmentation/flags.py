"""The flags of `--task segmentation`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ds_vit.config.flag import ASCENDING, IDENTITY, NOTED, WEIGHTS, Settings, flag
from ds_vit.config.units import MOST_PIXELS

_Factor = Annotated[float, Field(ge=0.05, le=20)]


class SegmentationSettings(Settings, section="model", scope=WEIGHTS):
    """The head, the masks and the crops of segmentation."""

    seg_head: Literal["linear", "conv"] = flag(
        "linear", "head on the patch tokens: one linear layer, or two transposed convolutions to four times the grid"
    )
    freeze_backbone: bool = flag(False, "train only the head", NOTED)
    ignore_index: Annotated[int, Field(ge=-1, le=65535)] | None = flag(
        None, "pixel value not counted (255 if no class has it; -1: none)", section="data", idle_if="dataset=scenes"
    )
    reduce_zero_label: bool = flag(
        False, "pixel value 0 is not counted, and class c has the value c + 1", section="data", idle_if="dataset=scenes"
    )
    slide_stride: Annotated[int, Field(ge=0, le=MOST_PIXELS)] | None = flag(
        None,
        "pixels between windows in evaluation (default: 2/3 of the window; 0: squash the image)",
        section="data",
        needs=("eval_only or val_split", "with --val-split '': nothing is evaluated"),
    )
    scale_range: Annotated[tuple[_Factor, _Factor], ASCENDING] = flag(
        (0.5, 2.0), "factor on the size that covers the crop", IDENTITY, section="augmentation", idle_if="no_aug"
    )
    class_weights: str = flag(
        "", "weights of the classes in the loss: balanced, or a file of a number each", IDENTITY, section="loss"
    )


SETTINGS = (SegmentationSettings,)
"""`--task segmentation`."""
