"""The interface of a task: `--task` selects a `Task`, and no code outside this package knows which one it is.

A task defines the model and its towers, the tensors of a batch, one training step of a micro-batch, and the metrics
that rate the weights. The input path allocates, loads, broadcasts and pads by `fields`. The engine calls `step` for
every micro-batch, with a `StepContext` that runs towers and gathers features over the ranks. The trainer, the
checkpoints and every file of the output folder use `figures`.

Values that follow a schedule are pure functions of the step, counted from 1: nothing to save, nothing to restore. They
are those of DINOv2's `CosineScheduler` (facebookresearch/dinov2, dinov2/utils/utils.py), whose iteration i is step
i + 1 here.

Shapes: B samples of a micro-batch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from ds_vit.config.outside import Configurable, word_of
from ds_vit.config.run_folder import RunFolder, write_json
from ds_vit.config.schema import RunConfig, names_in
from ds_vit.data.field import Field
from ds_vit.data.fields import ImageField, LabelField
from ds_vit.data.settings import ImageConfig
from ds_vit.data.sources.source import Source
from ds_vit.data.text import Tokenizer
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.models.layers import MAIN_TOWER, Layer, take_apart_towers
from ds_vit.models.zoo import ModelSpec, create_model, require_supported_name
from ds_vit.parallel.groups import Groups
from ds_vit.parallel.tensor.collectives import TensorParallel
from ds_vit.tasks.evaluators import chosen_evaluators
from ds_vit.tasks.exports import ArrayPredictor, Exported, Format, TextTower
from ds_vit.tasks.foreign_names import VIT_NAMES, ForeignNames
from ds_vit.tasks.metrics import Batch, Chart, Figure, Metrics
from ds_vit.tasks.panels import Panel
from ds_vit.tasks.zero_shot import ZERO_SHOT

Loss = Callable[[torch.Tensor, Batch], torch.Tensor]
"""(outputs of the last layer, batch) → fp32 scalar."""


@dataclass(frozen=True)
class Horizon:
    """The horizon of a run's schedules; a run that `--max-steps` or a signal stops early keeps it.

    Attributes:
        total_steps: of the schedules.
        steps_per_epoch: optimizer steps.
        weight_decay: of the JSON or --weight-decay, from which a schedule begins.
    """

    total_steps: int
    steps_per_epoch: int
    weight_decay: float

    def steps_in(self, epochs: float) -> int:
        """The number of steps, to the nearest one; the same in every layout."""
        return round(epochs * self.steps_per_epoch)

    def is_within(self, step: int, epochs: float) -> bool:
        """Whether a step is one of the first `epochs` epochs."""
        return step <= self.steps_in(epochs)


def cosine(step: int, start: float, end: float, total_steps: int) -> float:
    """Half a cosine from `start` in step 1 towards `end`, which step total_steps + 1 would have.

    The last step, number T of T, has end + (start - end) · (1 + cos(π (T - 1) / T)) / 2; later ones have `end`.
    """
    done = step - 1
    if done >= total_steps:
        return end
    return end + 0.5 * (start - end) * (1.0 + math.cos(math.pi * done / total_steps))


def linear_warmup(step: int, start: float, end: float, warmup_steps: int) -> float:
    """A line from `start` in step 1 to `end` in step `warmup_steps`; later ones have `end`.

    With a warm-up of one step that step has `start`, as numpy's linspace; with none all steps have `end`.
    """
    if step > warmup_steps:
        return end
    return start + (end - start) * (step - 1) / max(1, warmup_steps - 1)


@dataclass(kw_only=True, eq=False)
class StepContext(ABC):
    """The engine's services for a task's step, on this rank.

    Attributes:
        groups: the process groups of the run.
        device: of the towers.
        class_parallel: the ranks over which the outputs of the main tower are sharded by class, or None.
        accumulation: micro-batches of a step.
        step: the number of the step, counted from 1.
        schedules: the values of `Task.schedules` in this step, by name.
        measures: whether `Task.gauges` are read after this step.
    """

    groups: Groups
    device: torch.device
    class_parallel: TensorParallel | None
    accumulation: int
    step: int = 0
    schedules: Mapping[str, float] = field(default_factory=dict)
    measures: bool = False

    @abstractmethod
    def forward(
        self, tower: str, inputs: Sequence[torch.Tensor | None], batch: Batch, *, grad: bool = True
    ) -> torch.Tensor:
        """Run a tower on this rank's rows; every rank calls the same towers in the same order.

        Args:
            tower: a name of `Task.towers`.
            inputs: what its first layer takes without the keys; None for what only another pipeline stage has.
            batch: the micro-batch, whose keys decide everything random.
            grad: whether gradients flow back into the tower.

        Returns:
            Outputs of its last layer [B, …], in the type that the model computes in; a layer may return several.
        """

    @abstractmethod
    def gather(self, rows: torch.Tensor) -> torch.Tensor:
        """[B, …] of this rank → [dp · B, …] of all data-parallel ranks, in rank order (a collective).

        The gradient of this rank's rows is the sum of the gradients that all ranks have of them.
        """

    def sum(self, own: torch.Tensor) -> torch.Tensor:
        """The sum of a tensor over the data-parallel ranks (a collective).

        Not differentiable: pass values without a gradient, which would be of this rank's term only.
        """
        total = own.clone()
        dist.all_reduce(total, group=self.groups.dp)
        return total

    @abstractmethod
    def masters(self, names: Sequence[str]) -> torch.Tensor:
        """The values that the optimizer keeps of one-element parameters of the last stage, float32 [number of names].

        A collective of the ranks that call `Task.step`. In a model in 16 bits, the towers compute with rounded ones.
        """

    @abstractmethod
    def update_teachers(self, momentum: float) -> None:
        """Move the teachers towards their students (a collective); for `Task.after_update`.

        Args:
            momentum: the share of a teacher's weights that it keeps.
        """


@dataclass(frozen=True)
class Coupled:
    """The result of `Task.couple`.

    Attributes:
        loss: the loss of the global batch, fp32 scalar, the same on every rank; None where it is the mean of what
            `step` returns, over the micro-batches and the ranks.
        pieces: for each micro-batch of this rank, what `step` takes to produce its share of the gradient.
    """

    loss: torch.Tensor | None
    pieces: Sequence[Mapping[str, torch.Tensor]]


class Task(Configurable, ABC):
    """One run's task; the same on every rank, and without tensors.

    Args:
        config: the flags.
        image: sizes and normalisation.
        source: the training split.
        model: the whole one, on the meta device.
        probes: whether the images have what --eval-knn and --eval-linear-probe need.
        validation: the split that is evaluated; None without one.

    Attributes:
        evaluators: rate the features of the images, in addition to the task's metrics; by their metric.
        evaluates_outputs: whether the task's metrics are computed.
        tokenizer: of the captions; set by a task whose fields read texts.
        encoded_dim: E of `encode`; set by a task that has it.

    Raises:
        UserError: an evaluator that does not support this data, or an --eval-metric that nothing evaluates.
    """

    name: ClassVar[str]
    """The word of --task; of a class from outside, its module and name."""
    refused_flags: ClassVar[Mapping[str, str]] = {}
    """Flags that would have no effect, each with the reason; those of a classifier follow from `has_classes`."""
    epoch_flags: ClassVar[tuple[str, ...]] = ()
    """Flags that count epochs from the start, after which something changes: a run that ends before says so."""
    example_dataset: ClassVar[str] = "digits"
    """The embedded data set that a run without data gets: `ds-vit bench step`, `ds-vit plan`."""
    coupled: bool = False
    """Whether the loss couples all samples of the global batch; `collect` and `couple` serve accumulation."""
    collects_outputs: ClassVar[bool] = True
    """Whether `collect` runs towers; a task whose `collect` reads only the batch spares a pipeline's first pass."""
    teachers: ClassVar[Mapping[str, str]] = {}
    """Towers that `create_model` froze, and whose weights are the moving average of another's: teacher → student."""
    fixed_towers: ClassVar[tuple[str, ...]] = ()
    """Towers that `create_model` froze and that stay as they are: loaded from their source at each start of a run, in
    no checkpoint and in no exported file."""
    feature_tower: ClassVar[str] = MAIN_TOWER
    """The tower whose features are evaluated, and whose images token maps show."""
    not_replayed: str = "the task does not state that its steps can be"
    """Why a CUDA graph cannot replay `step` and `collect`; each derived class sets it again. It is "" where both do the
    same in every micro-batch: they read tensors of `fixed_batch` and of the device, and scheduled values, and keep
    nothing but values in tensors."""
    collected_once: ClassVar[tuple[str, ...]] = ()
    """Tensors of `collect` that are the same in each micro-batch: only those of the first are kept."""
    updates_after_step: ClassVar[bool] = False
    """Whether the class defines `after_update`; set for each derived class."""
    bounds: ClassVar[Mapping[str, tuple[float, float]]] = {}
    """Names of parameters → the least and the largest value that each update leaves them with."""
    shown_parameters: ClassVar[Mapping[str, tuple[str, Callable[[float], float]]]] = {}
    """Names of one-element parameters → their key in the training rows of metrics.jsonl, and how they are written."""
    charts: ClassVar[tuple[Chart, ...]] = ()
    """Charts of the report, of what `gauges` and `shown_parameters` add to the training rows."""
    parts: ClassVar[Mapping[str, str]] = {}
    """How names of parameters begin that a ViT of timm's lacks → what those are, in words. A file of initial weights
    has all of a part or nothing of it; a model without the part leaves it out."""
    separate_files: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Files that the end of a run writes apart from `model.safetensors` → how the names of their parameters begin."""
    tower_files: ClassVar[Mapping[str, str]] = {}
    """Those of `separate_files` without which `model.safetensors` is incomplete → what they hold, in words. They are
    read with it. If one holds a tower, files of initial weights are of the whole model, else of the main tower."""
    foreign_names: ClassVar[tuple[ForeignNames, ...]] = (VIT_NAMES,)
    """The names of other tools for the tensors of the task's models."""
    tower_flags: ClassVar[Mapping[str, str]] = {}
    """Further towers with weights of their own → the flag that names them. Without it a fixed tower has those of its
    model's name, and another one starts from the file of the main tower, if that has its tensors and these fit."""
    export_formats: ClassVar[Mapping[str, Format]] = {}
    """Other tools' forms of the whole model, by the words of `ds-vit export --to`. A tool that has none here gets the
    main tower as a model of timm's; of a task with classes only ONNX, which gets the whole model."""
    pipeline_tag: ClassVar[str] = ""
    """Hugging Face's word for what the whole model does; "" for that of a model of timm's."""
    predict_flags: ClassVar[Sequence[str]] = ()
    """Flags of the task that `ds-vit predict` takes."""
    peers: ClassVar[tuple[str, ...]] = ()
    """The names in tools/peers.py of steps without DeepSpeed that train the same, the default first; a derived class
    has none unless it sets them again."""
    with_teacher: ClassVar[str] = ""
    """MODULE:CLASS of the task that --kd-model-name and --kd-checkpoint make of this one; of a derived class only if it
    sets that again or is derived from that task."""
    has_classes: ClassVar[bool] = True
    """Whether the model has a classifier; else `num_classes` is 0, whatever the data has."""
    has_text: ClassVar[bool] = False
    """Whether a field reads texts, so that the images must have captions."""
    takes_pairs: ClassVar[bool] = False
    """Whether the main tower takes an image and a text together, and rejects images without texts."""
    tokenizer: Tokenizer | None = None
    encoded_dim: int = 0
    figures: tuple[Figure, ...]
    """The metrics of an evaluation; the first decides which weights are the best, if it is summed up. A run adds those
    of its evaluators and puts that of --eval-metric first."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.updates_after_step = cls.after_update is not Task.after_update
        if not cls.__module__.startswith("ds_vit."):
            cls.name = word_of(cls)

    def __init__(
        self,
        config: RunConfig,
        image: ImageConfig,
        source: Source,
        model: nn.Module,
        *,
        probes: bool = True,
        validation: Source | None = None,
    ) -> None:
        self.config = config
        self.num_classes: int = vars(model)["num_classes"] if self.has_classes else 0
        self.image = image
        self.source = source
        self.validation = validation
        self.model = model
        self.evaluators = chosen_evaluators(config, source) if probes else {}
        self.evaluates_outputs = bool(config.val_split or not config.zeroshot)
        figures = (*type(self).figures, *self.evaluators)
        if config.zeroshot:
            figures = (*(figures if self.evaluates_outputs else ()), *ZERO_SHOT)
        self.figures = _best_first(figures, config.eval_metric)

    def evaluate_features_only(self) -> None:
        """Leave out the task's own metrics: the weights lack what comes after the features."""
        self.evaluates_outputs = False
        self.figures = tuple(self.evaluators)

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes in the order of the logits; empty for a task without classes."""
        return tuple(self.source.class_names) if self.has_classes else ()

    @property
    def notes(self) -> tuple[str, ...]:
        """Lines for people about what the task decides."""
        return ()

    @property
    def decided_flags(self) -> Mapping[str, Any]:
        """Flags whose values the task decides, by their recipe names: config.yaml has these values."""
        values: dict[str, Any] = {"num_classes": self.num_classes}
        if not self.evaluators:
            values |= {name: self.config.default_of(name) for name in ("eval_knn", "eval_linear_probe")}
        return values

    # ---- the model -------------------------------------------------------------------------------------------------

    @classmethod
    def check_model_name(cls, name: str) -> None:
        """Reject a --model that the task cannot train, before anything else is read.

        Raises:
            UserError: there is no such model, or it is of another kind.
        """
        require_supported_name(name)

    @classmethod
    def create_model(cls, spec: ModelSpec, config: RunConfig, *, for_training: bool) -> nn.Module:
        """The whole model on the meta device: its names, shapes and hyper-parameters.

        Raises:
            UserError: a model that cannot be trained for this task, or arguments that it does not take.
        """
        return create_model(spec, for_training=for_training)

    @classmethod
    def fit_tensors(cls, model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors of a file of initial weights as a model takes them, before and after timm translates them."""
        return tensors

    @classmethod
    def locked_names(cls, model: nn.Module, config: RunConfig) -> Mapping[str, frozenset[str]]:
        """The parameters that the task freezes, by the flag that says so; "" for those that nothing reaches."""
        return {}

    @classmethod
    def layers(cls, model: nn.Module) -> list[Layer]:
        """The layers of all towers, the main one's first, for what counts their memory and time."""
        return [layer for layers in cls.towers(model).values() for layer in layers]

    @classmethod
    def towers(cls, model: nn.Module) -> dict[str, list[Layer]]:
        """All towers by name, the main one first; together they hold each parameter of the model once.

        A task with several towers makes them members of the model and lists them in `model.further_towers`.
        """
        return take_apart_towers(model)

    def chain(self, towers: Mapping[str, list[Layer]]) -> list[Layer] | None:
        """The towers as one list of layers for a pipeline; None where they do not form one.

        Each tower takes one field of the first stage, in the order of `fields`.
        """
        return towers[MAIN_TOWER] if len(towers) == 1 else None

    def supports(self, model: nn.Module) -> str | None:
        """Why the run cannot train a model with this task, its flags and its data; None where it can.

        Args:
            model: from `create_model`.
        """
        if self.teachers and self.config.model_ema:
            return f"--model-ema: the teacher of --task {self.name} already is such an average; drop the flag"
        if self.config.pp > 1 and (self.updates_after_step or self.chain(self.towers(model)) is None):
            return f"--pp {self.config.pp}: --task {self.name} cannot be split into pipeline stages; use --pp 1"
        return None

    def supports_training(self, horizon: Horizon, global_batch: int) -> str | None:
        """Why the run cannot train for these steps with so many samples in each; None where it can."""
        return None

    def differs_from_peers(self) -> str | None:
        """Why `peers` would train something else than this run; None where they do not."""
        return None

    def identity(self) -> dict[str, Any]:
        """Values of flags, by their recipe names, that have to be the same in a run that resumes."""
        names = names_in(self.settings) & self.config.fixed_on_resume()
        values = {name: getattr(self.config, name) for name in sorted(names)}
        values = {name: list(value) if isinstance(value, tuple) else value for name, value in values.items()}  # as JSON
        return values if self.tokenizer is None else {**values, "tokenizer": self.tokenizer.name}

    def is_fixed(self, name: str) -> bool:
        """Whether a parameter of this name belongs to one of `fixed_towers`."""
        return name.startswith(tuple(f"{tower}." for tower in self.fixed_towers))

    def weight_files(self) -> dict[str, frozenset[str]]:
        """The parameters of `separate_files` that the model has, by the name of their file."""
        names = [name for name, _ in self.model.named_parameters()]
        files = {
            file: [name for name in names if name.startswith(begin)] for file, begin in self.separate_files.items()
        }
        return {file: frozenset(of_file) for file, of_file in files.items() if of_file}

    def average_files(self) -> dict[str, frozenset[str]] | None:
        """Of a task with teachers: the files of their weights in float32, under the names of their students, by the
        name of the file; the first is the one to use. None for `ema.safetensors`, and teachers as `weight_files` says.
        """
        return None

    # ---- a batch ---------------------------------------------------------------------------------------------------

    @classmethod
    def open_source(cls, config: RunConfig, folder: str, split: str) -> Source | None:
        """A split of data in a form that only this task reads; None for what --dataset and --data-dir name.

        Args:
            config: the flags.
            folder: a --data-dir; "" for none.
            split: its name.

        Raises:
            NoSuchSplit: there is no such split.
            UserError: the data cannot be read.
        """
        return None

    @abstractmethod
    def fields(self, *, training: bool) -> tuple[Field, ...]:
        """The tensors of a batch except the keys, those of the first stage in the order of the towers that take them.

        It is called once for each of `training_fields` and `evaluation_fields`.

        Args:
            training: in training or in evaluation.
        """

    @cached_property
    def training_fields(self) -> tuple[Field, ...]:
        """`fields` of training."""
        return self.fields(training=True)

    @cached_property
    def evaluation_fields(self) -> tuple[Field, ...]:
        """`fields` of evaluation."""
        return self.fields(training=False)

    @cached_property
    def feature_fields(self) -> tuple[Field, ...]:
        """The tensors of a batch where features are evaluated: as in the task's evaluation, and a class per image."""
        return self.images(training=False), LabelField("targets", self.num_classes)

    def images(self, *, training: bool) -> ImageField:
        """The field "images" of the run's size and augmentation."""
        return ImageField("images", self.image, self.config if training else None)

    def fixed_batch(self, batch: Batch) -> Batch:
        """For a CUDA graph: the micro-batch with what `step` and `collect` make of it on the host, in fixed shapes."""
        return batch

    # ---- a step ----------------------------------------------------------------------------------------------------

    def setup(self, context: StepContext) -> None:
        """Called once on each rank, before the first step."""
        return

    @abstractmethod
    def step(self, context: StepContext, batch: Batch, piece: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor:
        """The forward pass of one micro-batch in training.

        Args:
            context: of this rank.
            batch: the micro-batch.
            piece: of a coupled task with several micro-batches per step: what `couple` made for this one.

        Returns:
            fp32 scalar to differentiate; the engine divides by the accumulation and averages over data-parallel ranks.
            Without `piece` it is the loss; a coupled task gathers, and returns the loss of the global batch.
        """

    def collect(self, context: StepContext, batch: Batch) -> Mapping[str, torch.Tensor]:
        """Of a coupled task: what the loss needs of a micro-batch, computed in training mode without gradients."""
        raise NotImplementedError(f"--task {self.name} is not coupled")

    def couple(self, context: StepContext, collected: Sequence[Mapping[str, torch.Tensor]]) -> Coupled:
        """Of a coupled task: the loss of the global batch, once per step (a collective).

        The pieces hold the gradients of that loss; `step` turns them into gradients of the weights (gradient caching,
        Gao et al. 2021). A scalar that `step` returns is divided by dp · accumulation in the end.
        """
        raise NotImplementedError(f"--task {self.name} is not coupled")

    def after_update(self, context: StepContext) -> None:
        """Called after each applied step, before anything else sees the weights and before the next step begins."""
        return

    def schedules(self, step: int, horizon: Horizon) -> Mapping[str, float]:
        """Values other than the learning rate that follow a schedule, by `cosine` and `linear_warmup`.

        Args:
            step: counted from 1.
            horizon: what the schedules are made for.

        Returns:
            By name; `weight_decay` is set on every group of parameters that has one.
        """
        return {}

    def rate_factors(self, model: nn.Module) -> Mapping[str, float]:
        """Factors on the learning rate by the names of parameters, which multiply those of --layer-decay; else 1.

        Args:
            model: the whole one, on the meta device.
        """
        return {}

    def held_names(self, step: int, horizon: Horizon) -> frozenset[str]:
        """The parameters that a step leaves where they are while the optimizer's state advances: a rate of 0.

        The first step holds each parameter that is ever held. The arguments are those of `schedules`.
        """
        return frozenset()

    def gauges(self, context: StepContext) -> Mapping[str, torch.Tensor]:
        """Scalars that a training row of metrics.jsonl has for this step, by key (a collective)."""
        return {}

    def concerns(self, figures: Mapping[str, float], step: int, steps_per_epoch: int) -> Mapping[str, str]:
        """Warnings about a run that goes wrong, by a name under which a run prints the first only.

        Args:
            figures: `gauges` of a training step, or the figures of an evaluation of the weights.
            step: of them.
            steps_per_epoch: optimizer steps.
        """
        return {}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Tensors that the task carries from step to step, the same on every rank; for a checkpoint."""
        return {}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore what `state_dict` gave."""
        assert not state, f"--task {self.name} has no state"

    def outputs(self, context: StepContext, batch: Batch) -> torch.Tensor:
        """The forward pass of a micro-batch in evaluation: what `metrics` rate [B, …]; the main tower's outputs."""
        name = next(field.name for field in self.evaluation_fields if field.stage == "first")
        return context.forward(MAIN_TOWER, [batch.get(name)], batch)

    def loss_on_meta(self, layers: Sequence[Layer], samples: int) -> torch.Tensor | None:
        """The loss of a micro-batch on the meta device, to count the memory that it takes; None where that is little.

        Args:
            layers: of all towers on the meta device, as a rank has them.
            samples: B.
        """
        return None

    def encode(self, name: str, context: StepContext, batch: Batch) -> torch.Tensor:
        """Of a task with text: features by which images and texts are compared, normalised, float32 [B, E].

        Args:
            name: of the field, "images" or "texts".
            context: of this rank.
            batch: with that field.
        """
        raise NotImplementedError(f"--task {self.name} compares no images with texts")

    @classmethod
    def predictor(
        cls, exported: Exported, values: Mapping[str, Any], folder: Path
    ) -> TextTower | ArrayPredictor | None:
        """How `ds-vit predict` and `ds-vit embed` use a whole model that gives no logits of the classes of images.

        Args:
            exported: the model with weights.
            values: the flags of its run, by their recipe names.
            folder: of the run, or of weights without one.
        """
        return None

    def further_texts(self) -> Sequence[tuple[int, str]]:
        """Texts that the task's metrics take in addition to the batches of `validation`, each after the number of its
        sample, in the order of the samples."""
        return ()

    @abstractmethod
    def metrics(self, device: torch.device) -> Metrics:
        """Counters for one evaluation."""

    # ---- the report ------------------------------------------------------------------------------------------------

    def write_classes(self, folder: RunFolder) -> None:
        """Write the classes into the run's folder at its start, on rank 0.

        Raises:
            OSError: a file cannot be written.
        """
        if self.has_classes:
            write_json(folder.classes, self.class_names)

    def write_files(self, metrics: Metrics, folder: RunFolder, source: Source) -> None:
        """Write what `panels` shows of an evaluation into the run's folder, on rank 0.

        Args:
            metrics: of this task, computed.
            folder: of the run.
            source: the split that was evaluated.

        Raises:
            OSError: a file cannot be written.
        """
        return

    def write_patches(self, folder: RunFolder, *, step: int, images: torch.Tensor, tokens: torch.Tensor) -> None:
        """Write what `panels` shows of the patches of a few images, the same in each evaluation, on rank 0.

        Args:
            folder: of the run.
            step: of the weights.
            images: as the model gets them [B, 3, height, width].
            tokens: of their patches behind the last block of the feature tower [B, rows, columns, D].

        Raises:
            OSError: a file cannot be written.
        """
        return

    @classmethod
    def panels(cls, folder: RunFolder) -> Mapping[str, Sequence[Panel]]:
        """The panels (tasks/panels.py) that the report of a run adds to its own, from the files in the run's folder, by
        the heading of their section."""
        return {}


def _best_first(figures: Sequence[Figure], name: str) -> tuple[Figure, ...]:
    """The figures with the one of --eval-metric first; as they are where it is empty."""
    known = {figure.name: figure for figure in figures}
    if name and name not in known:
        raise UserError(f"--eval-metric {name} is no metric of this run; it has {', '.join(known)}")
    first = [replace(known.pop(name), summed_up=True)] if name else []
    return (*first, *known.values())


class ChainTask(Task):
    """A task with one tower and a loss that is a mean over samples."""

    @abstractmethod
    def loss(self, tp: TensorParallel | None) -> Loss:
        """The loss of a micro-batch, a mean over its samples.

        Args:
            tp: the ranks over which the outputs are sharded by class; None where each has all classes.
        """

    def setup(self, context: StepContext) -> None:
        """As `Task.setup`."""
        self._loss = self.loss(context.class_parallel)
        self._inputs = [field.name for field in self.training_fields if field.stage == "first"]

    def step(self, context: StepContext, batch: Batch, piece: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor:
        """As `Task.step`."""
        outputs = context.forward(MAIN_TOWER, [batch.get(name) for name in self._inputs], batch)
        with torch.autocast(outputs.device.type, enabled=False):
            return self._loss(outputs, batch)
