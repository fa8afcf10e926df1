"""The flags of `--task dino`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ds_vit.config.flag import (
    ASCENDING,
    FREE,
    IDENTITY,
    WEIGHTS,
    Epochs,
    Pixels,
    Probability,
    Rate,
    Settings,
    UpTo1,
    Weight,
    Width,
    flag,
)

Temperature = Annotated[float, Field(gt=0, le=100)]
Stretch = Annotated[float, Field(gt=1, le=100)]


class HeadSettings(Settings, section="model", scope=WEIGHTS):
    """The heads of DINO and iBOT, with the defaults of DINOv2 (facebookresearch/dinov2, dinov2/configs)."""

    prototypes: Annotated[int, Field(ge=2, le=2**24)] = flag(65536, "prototypes of a head")
    head_hidden_dim: Width = flag(2048, "hidden width of a head")
    head_bottleneck_dim: Width = flag(256, "width before the prototypes")
    untie_cls_and_patch_norms: bool = flag(
        False, "a final norm for patches, and another for class and register tokens", needs="ibot_weight"
    )
    untie_global_and_local_cls_norm: bool = flag(
        False, "a final norm for the class and register tokens of local crops", needs="local_crops_number"
    )
    initial_head: str = flag(
        "", "head to start from, ours or a published one (default: that in the initial weights)", FREE, metavar="FILE"
    )


class CropSettings(Settings, section="augmentation", scope=IDENTITY):
    """The crops of DINO."""

    global_crops_scale: Annotated[tuple[UpTo1, UpTo1], ASCENDING] = flag((0.32, 1.0), "area of a global crop")
    local_crops_scale: Annotated[tuple[UpTo1, UpTo1], ASCENDING] = flag((0.05, 0.32), "area of a local crop")
    local_crops_number: Annotated[int, Field(ge=0, le=2**6)] = flag(8, "local crops of an image (0: none)")
    local_crops_size: Pixels | None = flag(
        None, "side of a local crop (default: the multiple of the patch size nearest 96)"
    )
    rope_shift_coords: Annotated[float, Field(gt=0, le=100)] | None = flag(
        None, "shift DINOv3's rotary coordinates along each axis by up to this much, in half sides of the image"
    )
    rope_jitter_coords: Stretch | None = flag(
        None, "stretch DINOv3's rotary coordinates along each axis by up to this factor, or shrink them"
    )
    rope_rescale_coords: Stretch | None = flag(
        None, "stretch DINOv3's rotary coordinates along both axes by up to this factor, or shrink them"
    )


class SelfDistillationSettings(Settings, section="loss", scope=IDENTITY):
    """The masks, teacher and losses of DINO and iBOT."""

    mask_sample_probability: Probability = flag(0.5, "probability that a global crop has masked patches")
    mask_ratio_min_max: Annotated[tuple[Probability, Probability], ASCENDING] = flag(
        (0.1, 0.5), "smallest and largest share of a masked crop's patches"
    )
    centering: Literal["ema", "sinkhorn"] = flag(
        "ema", "keep assignments balanced by a running mean or by Sinkhorn-Knopp"
    )
    ibot_weight: Weight = flag(1.0, "weight of the loss over masked patches (0: no masks)")
    koleo_weight: Weight = flag(0.1, "weight of the KoLeo loss")
    student_temp: Temperature = flag(0.1, "temperature of the student")
    teacher_temp: Temperature = flag(0.07, "temperature of the teacher")
    warmup_teacher_temp: Temperature = flag(0.04, "temperature of the teacher at the start")
    warmup_teacher_temp_epochs: Epochs = flag(30, "epochs until the teacher reaches --teacher-temp")
    teacher_momentum: Probability = flag(0.992, "share of its weights that the teacher keeps at a step")
    teacher_momentum_end: Probability = flag(1.0, "--teacher-momentum at the end of the run")
    freeze_last_layer_epochs: Epochs = flag(
        1, "epochs in which the prototypes have a learning rate of 0", section="optimizer"
    )
    freeze_backbone_epochs: Annotated[float, Field(ge=0, le=10**6)] = flag(
        0.0, "epochs, or a fraction of one, in which the backbone has a learning rate of 0", section="optimizer"
    )
    patch_embed_lr_mult: Rate = flag(0.2, "factor on the learning rate of the patch embedding", section="optimizer")
    weight_decay_end: Rate | None = flag(
        None, "weight decay at the end of the run, reached along a cosine", section="optimizer"
    )


SETTINGS = (HeadSettings, CropSettings, SelfDistillationSettings)
