"""The settings of `--task dino`, with DINOv2's defaults (facebookresearch/dinov2, dinov2/configs)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ds_vit.config.flag import (
    ABOVE_0_TO_1,
    ASCENDING,
    EPOCHS,
    PIXELS,
    PROBABILITY,
    RATE,
    WEIGHTS,
    Range,
    flag,
)

_WEIGHT = Range(0, 10**6)
_TEMPERATURE = Range(0, 100, above=True)


@dataclass(frozen=True, kw_only=True)
class SelfDistillationSettings:
    """The heads, the crops, the teacher and the losses of DINO and iBOT."""

    prototypes: int = flag(
        65536,
        "--task dino: prototypes of a head",
        WEIGHTS,
        span=Range(2, 2**24),
        section="model",
        task="dino",
    )
    head_hidden_dim: int = flag(
        2048,
        "--task dino: hidden width of a head",
        WEIGHTS,
        span=Range(1, 2**16),
        section="model",
        task="dino",
    )
    head_bottleneck_dim: int = flag(
        256,
        "--task dino: width before the prototypes",
        WEIGHTS,
        span=Range(1, 2**16),
        section="model",
        task="dino",
    )
    global_crops_scale: Sequence[float] = flag(
        (0.32, 1.0),
        "--task dino: area of a global crop",
        span=ABOVE_0_TO_1,
        rule=ASCENDING,
        nargs=2,
        section="augmentation",
        task="dino",
    )
    local_crops_scale: Sequence[float] = flag(
        (0.05, 0.32),
        "--task dino: area of a local crop",
        span=ABOVE_0_TO_1,
        rule=ASCENDING,
        nargs=2,
        section="augmentation",
        task="dino",
    )
    local_crops_number: int = flag(
        8, "--task dino: local crops of an image (0: none)", span=Range(0, 64), section="augmentation", task="dino"
    )
    local_crops_size: int | None = flag(
        None,
        "--task dino: side of a local crop (default: the multiple of the patch size nearest 96)",
        span=PIXELS,
        section="augmentation",
        task="dino",
    )
    mask_sample_probability: float = flag(
        0.5, "--task dino: probability that a global crop has masked patches", span=PROBABILITY, task="dino"
    )
    mask_ratio_min_max: Sequence[float] = flag(
        (0.1, 0.5),
        "--task dino: smallest and largest share of a masked crop's patches",
        span=PROBABILITY,
        rule=ASCENDING,
        nargs=2,
        task="dino",
    )
    centering: str = flag(
        "ema",
        "--task dino: keep assignments balanced by a running mean or by Sinkhorn-Knopp",
        choices=("ema", "sinkhorn"),
        task="dino",
    )
    ibot_weight: float = flag(
        1.0, "--task dino: weight of the loss over masked patches (0: no masks)", span=_WEIGHT, task="dino"
    )
    koleo_weight: float = flag(0.1, "--task dino: weight of KoLeo", span=_WEIGHT, task="dino")
    student_temp: float = flag(0.1, "--task dino: temperature of the student", span=_TEMPERATURE, task="dino")
    teacher_temp: float = flag(0.07, "--task dino: temperature of the teacher", span=_TEMPERATURE, task="dino")
    warmup_teacher_temp: float = flag(
        0.04, "--task dino: temperature of the teacher at the start", span=_TEMPERATURE, task="dino"
    )
    warmup_teacher_temp_epochs: int = flag(
        30, "--task dino: epochs until the teacher has its temperature", span=EPOCHS, task="dino"
    )
    teacher_momentum: float = flag(
        0.992, "--task dino: share of its weights that the teacher keeps", span=PROBABILITY, task="dino"
    )
    teacher_momentum_end: float = flag(
        1.0, "--task dino: the same at the end of the run", span=PROBABILITY, task="dino"
    )
    freeze_last_layer_epochs: int = flag(
        1,
        "--task dino: epochs in which the prototypes have a learning rate of 0",
        span=EPOCHS,
        section="optimizer",
        task="dino",
    )
    patch_embed_lr_mult: float = flag(
        0.2,
        "--task dino: factor on the learning rate of the patch embedding",
        span=RATE,
        section="optimizer",
        task="dino",
    )
    weight_decay_end: float | None = flag(
        None,
        "--task dino: weight decay at the end of the run, which a cosine leads to",
        span=RATE,
        section="optimizer",
        task="dino",
    )
