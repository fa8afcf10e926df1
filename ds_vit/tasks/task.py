"""What a run is trained for, behind one face: `--task` chooses it, and nothing outside this package knows which it is.

A task brings the model and its layers, the tensors of a batch, the loss, and the metrics with which weights are judged.
The input path allocates, loads, broadcasts and pads by `fields`; the engine hands the first stage's to the first layer
and the last stage's to the loss; the trainer, the checkpoints and every file of the output folder speak of `figures`.

Shapes: B samples of a micro-batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn

from ds_vit.config import RunConfig
from ds_vit.data import ImageConfig, MicroBatch, Source, finish_images, finish_targets
from ds_vit.models import Layer, ModelSpec, create_model, take_apart
from ds_vit.parallel.tensor import TensorParallel
from ds_vit.tasks.evaluators import chosen_evaluators
from ds_vit.tasks.metrics import Batch, Figure, Metrics

Loss = Callable[[torch.Tensor, Batch], torch.Tensor]
"""(outputs of the last layer, batch) → fp32 scalar."""


@dataclass(frozen=True)
class Field:
    """One tensor of a batch.

    Attributes:
        name: its key in a `Batch`.
        stage: the pipeline stage that needs it: the first (the model's input) or the last (the loss's).
        reads: what has to be read of a sample for it: its image is decoded, or its target alone.
        shape: of one sample.
        dtype: of the tensor; None for the type that the model takes its input in.
    """

    name: str
    stage: Literal["first", "last"]
    reads: Literal["images", "targets"]
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None


class Task(ABC):
    """One run's task; the same on every rank, and without tensors.

    Args:
        config: the flags, `num_classes` resolved.
        image: sizes and normalisation.
        source: the training split.
        model: the whole one, on the meta device.

    Attributes:
        evaluators: what judges the features of the images, beside the task's own metrics.
        judges_outputs: whether the task's own metrics are wanted at all.

    Raises:
        UserError: an evaluator that cannot judge this data.
    """

    name: ClassVar[str]
    flags: ClassVar[frozenset[str]] = frozenset()
    """Flags that this task alone takes, by their recipe names."""
    refused_flags: ClassVar[Mapping[str, str]] = {}
    """Flags that would have no effect, each with the reason."""
    loss_is_mean_of_samples: ClassVar[bool] = True
    """Else the gradient of a global batch is not the sum of its micro-batches', and accumulation is refused."""
    has_classes: ClassVar[bool] = True
    """Whether the model has a classifier; else `num_classes` is 0, whatever the data has."""
    figures: tuple[Figure, ...]
    """The metrics by which weights are judged; the first decides which weights are the best. A class names its own, a
    run has its evaluators' besides."""

    def __init__(self, config: RunConfig, image: ImageConfig, source: Source, model: nn.Module) -> None:
        assert config.num_classes is not None, "num_classes is not resolved"
        self.config = config
        self.num_classes = config.num_classes
        self.image = image
        self.augment = config.augment
        self.mix = config.mix
        self.source = source
        self.model = model
        self.evaluators = chosen_evaluators(config, source)
        self.judges_outputs = True
        self.figures = (*type(self).figures, *(evaluator.figure for evaluator in self.evaluators))

    def judge_features_alone(self) -> None:
        """Leave out the task's own metrics: the weights lack what comes after the features."""
        self.judges_outputs = False
        self.figures = tuple(evaluator.figure for evaluator in self.evaluators)

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes in the order of the logits; empty for a task without classes."""
        return tuple(self.source.class_names) if self.has_classes else ()

    # ---- the model -------------------------------------------------------------------------------------------------

    @classmethod
    def create_model(cls, spec: ModelSpec, config: RunConfig, *, for_training: bool) -> nn.Module:
        """The whole model on the meta device: its names, shapes and hyper-parameters.

        Raises:
            UserError: a model that cannot be trained for this task, or arguments that it does not take.
        """
        return create_model(spec, for_training=for_training)

    @classmethod
    def layers(cls, model: nn.Module) -> list[Layer]:
        """The model as a list of layers, to be run one after the other or dealt to pipeline stages."""
        return take_apart(model)

    def identity(self) -> dict[str, Any]:
        """Values of flags, by their recipe names, that a checkpoint cannot be gone on from with others."""
        return {name: getattr(self.config, name) for name in sorted(self.flags)}

    def weight_files(self) -> dict[str, frozenset[str]]:
        """The parameters that the end of a run writes apart from `model.safetensors`, by the name of their file."""
        return {}

    # ---- a batch ---------------------------------------------------------------------------------------------------

    @abstractmethod
    def fields(self, *, training: bool) -> tuple[Field, ...]:
        """The tensors of a batch beside the keys, those of the first stage in the order in which the model takes them.

        Args:
            training: in training or in evaluation.
        """

    def feature_fields(self) -> tuple[Field, ...]:
        """The tensors of a batch where features are judged: as in the task's own evaluation, and a class an image."""
        return (
            Field("images", "first", "images", (3, *self.image.img_size)),
            Field("targets", "last", "targets", (), torch.int64),
        )

    def tensors(
        self, fields: Sequence[Field], micro_batch: MicroBatch, *, training: bool, device: torch.device
    ) -> dict[str, torch.Tensor]:
        """Fields of a micro-batch, made on the device by what its samples drew: [B, *field.shape] each, by name.

        Images are finished once and in fp32, however many fields they are.
        """
        made: dict[str, torch.Tensor] = {}
        if any(field.reads == "images" for field in fields):
            augment = self.augment if training else None
            made["images"] = finish_images(micro_batch, self.image, augment, device=device)
        if any(field.reads == "targets" for field in fields):
            mix = self.mix if training else None
            made["targets"] = finish_targets(micro_batch, self.num_classes, mix, device=device)
        return {field.name: made[field.reads].to(field.dtype or made[field.reads].dtype) for field in fields}

    # ---- what is learned, and how well -----------------------------------------------------------------------------

    @abstractmethod
    def loss(self, tp: TensorParallel | None) -> Loss:
        """The loss of a micro-batch, a mean over its samples.

        Args:
            tp: the ranks over which the outputs are cut by class; None where each has them whole.
        """

    @abstractmethod
    def metrics(self, device: torch.device) -> Metrics:
        """Counters for one evaluation."""
