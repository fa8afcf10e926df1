"""Distillation of a classifier from a fixed teacher (Hinton et al. 2015; Touvron et al. 2021), as timm's `timm.task`.

The teacher is a frozen tower next to the student, which sees the same augmented and mixed images. It is in evaluation
mode in every step, is loaded from its source at each start of a run, and is in no checkpoint and no exported file.

Shapes: B samples of a micro-batch, C classes, c of them on this rank, D width of the student's features, E of the
teacher's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from timm.models import VisionTransformerDistilled
from torch import nn

from ds_vit.config.schema import RunConfig
from ds_vit.models.layers import MAIN_TOWER, Layer, TokenCount, take_apart
from ds_vit.models.zoo import ModelSpec, create_model, image_size
from ds_vit.parallel.tensor.class_parallel import SoftmaxCrossEntropy, SoftmaxDivergence, gather_logits, own_classes
from ds_vit.parallel.tensor.collectives import TensorParallel
from ds_vit.tasks.classification.task import Classification
from ds_vit.tasks.metrics import Batch
from ds_vit.tasks.task import StepContext

TEACHER, PROJECTION = "teacher", "projection"
"""The further towers; the second one where the features of student and teacher differ in width."""
_ONE_SIZE = "its teacher takes images of one size"


def loss_weights(task: float | None, distill: float | None) -> tuple[float, float]:
    """The weights of the loss against the labels and of that against the teacher, by timm's rule.

    Both default to 1; with only the first one given, the second is 1 minus it.
    """
    if distill is None:
        return (1.0, 1.0) if task is None else (task, 1.0 - task)
    return (1.0 if task is None else task), distill


def soft_loss(
    student: torch.Tensor, teacher: torch.Tensor, temperature: float, tp: TensorParallel | None = None
) -> torch.Tensor:
    """KL divergence of the student's softened probabilities from the teacher's, times temperature squared, a scalar.

    It is computed in float64: fp32 rounds the logarithms, and the loss of a student that has learnt is smaller.

    Args:
        student: logits fp32 [B, c] of this rank, without padding.
        teacher: as `student`.
        temperature: of both; the factor keeps the gradient's size (Hinton et al. 2015, section 2).
        tp: the ranks over which the classes are sharded; None: c = C.
    """
    own, wanted = (logits.double() / temperature for logits in (student, teacher))
    return (SoftmaxDivergence.apply(own, wanted, tp) * temperature**2).to(student.dtype)


def hard_loss(student: torch.Tensor, teacher: torch.Tensor, tp: TensorParallel | None = None) -> torch.Tensor:
    """Cross-entropy against the teacher's most probable class (Touvron et al. 2021, equation 3), a scalar.

    Args:
        student: logits fp32 [B, c] of this rank, without padding.
        teacher: logits fp32 [B, C].
        tp: the ranks over which the student's classes are sharded; None: c = C.
    """
    wanted = teacher.argmax(dim=1)
    if tp is None:
        return F.cross_entropy(student, wanted)
    first, count = own_classes(teacher.shape[1], tp)
    classes = torch.arange(first, first + count, device=teacher.device)
    return SoftmaxCrossEntropy.apply(student, (wanted[:, None] == classes).float(), tp)


class Distillation(Classification):
    """`--task classification` with a teacher: `--kd-model-name` or `--kd-checkpoint`."""

    fixed_towers = (TEACHER,)
    tower_flags: ClassVar = {TEACHER: "kd_checkpoint"}
    parts: ClassVar = {f"{PROJECTION}.": "projection to a teacher's width"}
    separate_files: ClassVar = {PROJECTION: (*parts,)}
    not_replayed = ""
    refused_flags: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("img_size_schedule", "train_img_sizes"), _ONE_SIZE),
        "auto_batch": "its trial step leaves out the teacher",
    }

    # ---- the model -------------------------------------------------------------------------------------------------

    @classmethod
    def create_model(cls, spec: ModelSpec, config: RunConfig, *, for_training: bool) -> nn.Module:
        """As `Task.create_model`: the student, with the teacher as a further tower.

        The teacher takes images of the student's size: its position embeddings are resampled where it has another one.
        """
        student = create_model(spec, for_training=for_training)
        assert spec.teacher is not None, "resolve_model describes the teacher"
        by_features = config.kd_distill_type == "feature"
        classes = 0 if by_features else spec.num_classes
        asked = replace(spec.teacher.model, num_classes=classes, img_size=image_size(student), drop_path_rate=0.0)
        teacher = create_model(asked, for_training=False)
        teacher.pretrained_cfg = {**teacher.pretrained_cfg, **spec.teacher.pixels}
        student.teacher = teacher.requires_grad_(False)
        student.further_towers = (TEACHER,)
        # Its head layer gets both settings with the model's others.
        if by_features:
            student.adds_features = True
            if student.head_hidden_size != teacher.head_hidden_size:
                student.projection = Projection(student.head_hidden_size, teacher.head_hidden_size)
                student.further_towers = (TEACHER, PROJECTION)
        elif isinstance(student, VisionTransformerDistilled):
            student.set_distilled_training(config.kd_distill_type == "token")
        return student

    @classmethod
    def towers(cls, model: nn.Module) -> dict[str, list[Layer]]:
        """As `Task.towers`; the teacher's layers are in evaluation mode in training too."""
        towers = super().towers(model)
        for layer in towers[TEACHER]:
            layer.evaluates_only = True
            layer.eval()
        return towers

    def supports(self, model: nn.Module) -> str | None:
        """As `Task.supports`; `--kd-distill-type token` needs a distillation token."""
        if self.config.kd_distill_type == "token" and not isinstance(model, VisionTransformerDistilled):
            return (
                f"--kd-distill-type token: {self.config.model} has no distillation token; use one of timm's "
                "deit_*_distilled_* models, for example deit_small_distilled_patch16_224"
            )
        if self.config.pp > 1:
            return (
                f"--pp {self.config.pp}: a student and its teacher are not split into pipeline stages; use --pp 1, and "
                "ZeRO-3 or --tp to shard both"
            )
        return super().supports(model)

    def identity(self) -> dict[str, Any]:
        """As `Task.identity`: how the teacher is learnt from; its weights have a fingerprint (`Model.towers`)."""
        return super(Classification, self).identity()

    # ---- a step ----------------------------------------------------------------------------------------------------

    def setup(self, context: StepContext) -> None:
        """As `Task.setup`."""
        super().setup(context)
        self._weights = loss_weights(self.config.task_loss_weight, self.config.distill_loss_weight)
        cfg = self.model.teacher.pretrained_cfg

        def channels(values: object) -> torch.Tensor:
            return torch.tensor(values, device=context.device).view(1, -1, 1, 1)

        self._mean, self._std = channels(self.image.mean), channels(self.image.std)
        self._teacher_mean, self._teacher_std = channels(cfg["mean"]), channels(cfg["std"])
        self._same_pixels = tuple(cfg["mean"]) == self.image.mean and tuple(cfg["std"]) == self.image.std

    def _seen_by_teacher(self, images: torch.Tensor) -> torch.Tensor:
        """Images [B, 3, H, W] that are normalised for the student, normalised for the teacher."""
        if self._same_pixels:
            return images
        pixels = images.float() * self._std + self._mean
        return ((pixels - self._teacher_mean) / self._teacher_std).to(images.dtype)

    def step(self, context: StepContext, batch: Batch, piece: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor:
        """As `Task.step`."""
        config = self.config
        seen = self._seen_by_teacher(batch["images"])
        taught = context.forward(TEACHER, [seen], batch, grad=False)
        logits = learning = context.forward(MAIN_TOWER, [batch["images"]], batch)
        if config.kd_distill_type == "feature":
            logits, learning = logits.tensor_split((-self.model.head_hidden_size,), dim=1)
            if PROJECTION in self.model.further_towers:
                learning = context.forward(PROJECTION, [learning], batch)
        elif config.kd_distill_type == "token":
            logits, learning = logits.chunk(2, dim=1)
        with torch.autocast(logits.device.type, enabled=False):
            of_labels = self._loss(logits, batch)
            if config.kd_distill_type == "feature":
                of_teacher = F.mse_loss(learning.float(), taught.float())
            else:
                of_teacher = self._loss_of_logits(learning, taught, context.class_parallel)
        of_task, of_distilling = self._weights
        return of_task * of_labels + of_distilling * of_teacher

    def _loss_of_logits(self, learning: torch.Tensor, taught: torch.Tensor, tp: TensorParallel | None) -> torch.Tensor:
        """The loss of the student's logits [B, c] against the teacher's [B, c], a fp32 scalar."""
        hard = "hard" in (self.config.kd_loss_type, self.config.kd_token_distill_type)
        if tp is not None:
            count = own_classes(self.num_classes, tp)[1]
            learning = learning[:, :count]
            taught = gather_logits(taught, self.num_classes, tp) if hard else taught[:, :count]
        student, teacher = learning.float(), taught.float()
        return hard_loss(student, teacher, tp) if hard else soft_loss(student, teacher, self.config.kd_temperature, tp)


class Projection(nn.Module):
    """The description: one linear layer with torch's initial values, as in timm's feature distillation.

    Args:
        width: D.
        taught: E.
    """

    attn_pool: ClassVar[None] = None

    def __init__(self, width: int, taught: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, taught, device="meta")

    def init_weights(self, needs_reset: bool = True) -> None:
        """torch's initial values."""
        self.linear.reset_parameters()


class ProjectionLayer(Layer):
    """Features [B, D] to the teacher's width [B, E].

    Args:
        linear: of a copy of the description.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.num_tokens = TokenCount(1, 0)

    def example(self, samples: int) -> tuple[torch.Tensor, ...]:
        """As `Layer.example`: features [B, D]."""
        weight = self.linear.weight
        return (torch.empty(samples, weight.shape[1], dtype=weight.dtype, device="meta", requires_grad=True),)

    def forward(self, inputs: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """(features [B, D], keys, ...) -> [B, E]."""
        return self.linear(inputs[0])


@take_apart.register
def _(model: Projection) -> list[Layer]:
    return [ProjectionLayer(model.linear)]
