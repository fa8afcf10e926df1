"""The flags of `--task classification` with a teacher."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ds_vit.config.flag import IDENTITY, NOTED, Rate, Settings, flag

WITH_TEACHER = ("kd_model_name or kd_checkpoint", "without a teacher: --kd-model-name or --kd-checkpoint")


class DistillationSettings(Settings, section="distillation", scope=IDENTITY, needs=WITH_TEACHER):
    """A fixed teacher, and the loss against it."""

    kd_model_name: str = flag("", "teacher to distil from: timm name, hf-hub:ORG/NAME or local-dir:FOLDER", NOTED)
    kd_checkpoint: str = flag(
        "", "weights of the teacher: a run, or a file for --kd-model-name", NOTED, metavar="RUN|FILE"
    )
    kd_distill_type: Literal["logit", "feature", "token"] = flag(
        "logit",
        "what the student learns from the teacher: its logits, its features, or its logits by a distillation token",
    )
    kd_loss_type: Literal["kl", "hard"] = flag(
        "kl",
        "--kd-distill-type logit: the teacher's probabilities (kl), or its most probable class (hard)",
        needs="kd_distill_type=logit",
    )
    kd_temperature: Annotated[float, Field(gt=0, le=10_000)] = flag(
        4.0,
        "temperature of both softmaxes under kl",
        idle_if="kd_distill_type=feature or kd_loss_type=hard or kd_token_distill_type=hard",
    )
    distill_loss_weight: Rate | None = flag(
        None, "weight of the loss against the teacher (1, or 1 - --task-loss-weight)"
    )
    task_loss_weight: Rate | None = flag(None, "weight of the loss against the labels (1)")
    kd_token_distill_type: Literal["soft", "hard"] = flag(
        "soft",
        "--kd-distill-type token: the teacher's probabilities (soft), or its most probable class (hard)",
        needs="kd_distill_type=token",
    )


SETTINGS = (DistillationSettings,)
