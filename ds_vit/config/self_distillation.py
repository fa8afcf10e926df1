"""The settings of `--task dino`, with DINOv2's defaults (facebookresearch/dinov2, dinov2/configs)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from ds_vit.config.flag import ABOVE_0_TO_1, EPOCHS, PAIR, PIXELS, PROBABILITY, RATE, WEIGHTS, Range, flag_of

_WEIGHT = Range(0, 10**6)
_TEMPERATURE = Range(0, 100, above=True)
_flag = partial(flag_of, "dino")
_of_crops, _of_optimizer = partial(_flag, section="augmentation"), partial(_flag, section="optimizer")
_of_head = partial(_flag, section="model")


@dataclass(frozen=True, kw_only=True)
class SelfDistillationSettings:
    """The heads, the crops, the teacher and the losses of DINO and iBOT."""

    prototypes: int = _of_head(65536, "prototypes of a head", WEIGHTS, span=Range(2, 2**24))
    head_hidden_dim: int = _of_head(2048, "hidden width of a head", WEIGHTS, span=Range(1, 2**16))
    head_bottleneck_dim: int = _of_head(256, "width before the prototypes", WEIGHTS, span=Range(1, 2**16))
    global_crops_scale: Sequence[float] = _of_crops((0.32, 1.0), "area of a global crop", span=ABOVE_0_TO_1, **PAIR)
    local_crops_scale: Sequence[float] = _of_crops((0.05, 0.32), "area of a local crop", span=ABOVE_0_TO_1, **PAIR)
    local_crops_number: int = _of_crops(8, "local crops of an image (0: none)", span=Range(0, 64))
    local_crops_size: int | None = _of_crops(
        None, "side of a local crop (default: the multiple of the patch size nearest 96)", span=PIXELS
    )
    mask_sample_probability: float = _flag(0.5, "probability that a global crop has masked patches", span=PROBABILITY)
    mask_ratio_min_max: Sequence[float] = _flag(
        (0.1, 0.5), "smallest and largest share of a masked crop's patches", span=PROBABILITY, **PAIR
    )
    centering: str = _flag(
        "ema", "keep assignments balanced by a running mean or by Sinkhorn-Knopp", choices=("ema", "sinkhorn")
    )
    ibot_weight: float = _flag(1.0, "weight of the loss over masked patches (0: no masks)", span=_WEIGHT)
    koleo_weight: float = _flag(0.1, "weight of KoLeo", span=_WEIGHT)
    student_temp: float = _flag(0.1, "temperature of the student", span=_TEMPERATURE)
    teacher_temp: float = _flag(0.07, "temperature of the teacher", span=_TEMPERATURE)
    warmup_teacher_temp: float = _flag(0.04, "temperature of the teacher at the start", span=_TEMPERATURE)
    warmup_teacher_temp_epochs: int = _flag(30, "epochs until the teacher has its temperature", span=EPOCHS)
    teacher_momentum: float = _flag(0.992, "share of its weights that the teacher keeps", span=PROBABILITY)
    teacher_momentum_end: float = _flag(1.0, "the same at the end of the run", span=PROBABILITY)
    freeze_last_layer_epochs: int = _of_optimizer(
        1, "epochs in which the prototypes have a learning rate of 0", span=EPOCHS
    )
    patch_embed_lr_mult: float = _of_optimizer(0.2, "factor on the learning rate of the patch embedding", span=RATE)
    weight_decay_end: float | None = _of_optimizer(
        None, "weight decay at the end of the run, which a cosine leads to", span=RATE
    )
