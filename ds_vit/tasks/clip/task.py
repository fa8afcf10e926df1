"""Contrastive pretraining of images with captions: CLIP (Radford et al. 2021) and SigLIP (Zhai et al. 2023).

Both are coupled tasks (`Task.collect`, `Task.couple`). The loss is that of the global batch in every layout: features
of all ranks and micro-batches are compared, gradients flow back through the gather, and no rank holds the matrix of all
pairs.

Shapes: B samples of a micro-batch, L tokens of a caption, E common width of both towers, N samples of a split.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from timm.models import group_parameters
from torch import nn

from ds_vit.config.run_folder import RunFolder
from ds_vit.config.schema import RunConfig
from ds_vit.data.field import Field
from ds_vit.data.fields import TextField
from ds_vit.data.settings import ImageConfig
from ds_vit.data.sources.source import Source
from ds_vit.data.text import Tokenizer, build_tokenizer
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.models.layers import MAIN_TOWER, Layer, chain_towers, take_apart
from ds_vit.models.sequential import SequentialViT
from ds_vit.models.zoo import ModelSpec, names_and_shapes
from ds_vit.tasks.clip.export import FORMATS
from ds_vit.tasks.clip.flags import SETTINGS
from ds_vit.tasks.clip.loss import CLIP_LOSS, SIGLIP_LOSS, PairLoss
from ds_vit.tasks.clip.tower import ContrastiveModel, create_contrastive_model, text_settings
from ds_vit.tasks.clip.weights import CLIP_NAMES
from ds_vit.tasks.exports import Exported, TextTower
from ds_vit.tasks.metrics import Batch, Chart, Figure, Metrics
from ds_vit.tasks.panels import Panel, sheet
from ds_vit.tasks.retrieval import DIRECTIONS, RANKS, Retrieval, pair_panels, write_pairs
from ds_vit.tasks.task import Coupled, StepContext, Task

_OF_TOWER = ("width", "depth", "heads", "pool")  # --text-width, …
_ONE_CAPTION = "a caption describes one image, and there are no labels to mix"


class Contrastive(Task):
    """Base of the tasks that compare images with captions.

    A batch has "images" [B, 3, H, W] and "texts" int64 [B, L], both on the first stage.
    """

    coupled = True
    has_classes = False
    has_text = True
    example_dataset = "glyphs"
    refused_flags: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("mixup", "cutmix", "cutmix_minmax"), _ONE_CAPTION),
        **dict.fromkeys(("img_size_schedule", "train_img_sizes"), "its images are of one size"),
    }
    figures = (
        Figure("r1", "mean R@1", "%"),
        *(
            Figure(f"{direction}_r{k}", f"{direction.replace('_', ' ')} R@{k}", "%", summed_up=k == 1)
            for direction in DIRECTIONS
            for k in RANKS
        ),
    )

    shown_parameters: ClassVar = {"text.logit_scale": ("logit_scale", math.exp)}
    charts: ClassVar[tuple[Chart, ...]] = (Chart("Logit scale (1 / temperature)", {"logit_scale": "scale"}),)
    text_model: ClassVar[str]
    """The default of --text-model."""
    initial_logits: ClassVar[tuple[float, ...]]
    """Initial values of the logit scale (its logarithm) and of the logit bias."""
    loss: ClassVar[PairLoss]
    feature_names: ClassVar[tuple[str, ...]] = ("images", "texts")
    """The features that the loss takes, in the order of its arguments."""
    logit_names: ClassVar[tuple[str, ...]] = ("text.logit_scale", "text.logit_bias")
    """The parameters that `initial_logits` initialises."""

    model: ContrastiveModel
    tokenizer: Tokenizer

    def __init__(self, config: RunConfig, image: ImageConfig, source: Source, model: nn.Module, **more: Any) -> None:
        super().__init__(config, image, source, model, **more)
        self.tokenizer = self._build_tokenizer(config)
        self.encoded_dim = self.model.common_dim

    @classmethod
    def _build_tokenizer(cls, config: RunConfig) -> Tokenizer:
        text_model = text_settings(config.text_model or cls.text_model)
        return build_tokenizer(config.tokenizer, config.context_length, text_model.context_length)

    # ---- the model -------------------------------------------------------------------------------------------------

    @classmethod
    def create_model(cls, spec: ModelSpec, config: RunConfig, *, for_training: bool) -> ContrastiveModel:
        """As `Task.create_model`."""
        tokenizer = cls._build_tokenizer(config)
        default = text_settings(config.text_model or cls.text_model)
        given = {name: getattr(config, f"text_{name}") for name in _OF_TOWER} | {"embed_dim": config.embed_dim}
        given = {name: value for name, value in given.items() if value}
        ids = {name: getattr(tokenizer, name) for name in ("vocab_size", "context_length", "end_id", "pad_id")}
        settings = replace(default, **given, **ids, drop_path_rate=spec.drop_path_rate or 0.0)
        return create_contrastive_model(spec, settings, cls.initial_logits, for_training=for_training)

    @classmethod
    def locked_names(cls, model: nn.Module, config: RunConfig) -> Mapping[str, frozenset[str]]:
        """As `Task.locked_names`, for `--lock-image` and `--lock-text`; the image projection is always trained.

        Raises:
            UserError: more unlocked groups than the image tower has.
        """
        locked: dict[str, frozenset[str]] = {}
        if config.lock_image:
            groups = group_parameters(model, model.group_matcher())
            tower = [[name for name in groups[i] if not name.startswith(("text.", "head."))] for i in sorted(groups)]
            tower = [names for names in tower if names]
            if config.lock_image_unlocked_groups > len(tower):
                raise UserError(
                    f"--lock-image-unlocked-groups {config.lock_image_unlocked_groups}: the image tower has "
                    f"{len(tower)} groups (its stem and {len(model.blocks)} blocks)"
                )
            frozen = tower[: len(tower) - config.lock_image_unlocked_groups]
            locked["--lock-image"] = frozenset(itertools.chain(*frozen))
        if config.lock_text:
            names = [name for name, _ in model.named_parameters() if name.startswith("text.")]
            locked["--lock-text"] = frozenset(name for name in names if "text.logit_" not in name)
        return locked

    def identity(self) -> dict[str, Any]:
        """As `Task.identity`, with the resolved sizes of the text tower."""
        values = super().identity() | {"context_length": self.tokenizer.context_length}
        if "text_model" in values:  # not in subclasses without --text-model
            settings = self.model.text.settings
            of_tower = {f"text_{name}": getattr(settings, name) for name in _OF_TOWER}
            values |= of_tower | {"embed_dim": settings.embed_dim}
            values["text_model"] = self.config.text_model or self.text_model
        return values

    def differs_from_peers(self) -> str | None:
        """As `Task.differs_from_peers`: a pooling or arguments that open_clip does not take."""
        if self.model.text.settings.pool == "map":
            return "open_clip has no --text-pool map; drop it"
        if self.config.model_kwargs:
            return "open_clip passes no --model-kwargs to timm; choose another --model instead"
        return None

    def chain(self, towers: Mapping[str, list[Layer]]) -> list[Layer]:
        """As `Task.chain`: image layers, then text layers."""
        return chain_towers(towers.values())

    # ---- a batch ---------------------------------------------------------------------------------------------------

    def fields(self, *, training: bool) -> tuple[Field, ...]:
        """As `Task.fields`."""
        return self.images(training=training), TextField("texts", self.tokenizer, draws=training)

    # ---- a step ----------------------------------------------------------------------------------------------------

    def _features(self, context: StepContext, batch: Batch) -> dict[str, torch.Tensor]:
        """Normalised features of "images" and "texts", float32 [B, E]; "logits" [1 or 2] in the model's type."""
        images = context.forward(MAIN_TOWER, [batch.get("images")], batch)
        texts, logits = context.forward("text", [batch.get("texts")], batch).tensor_split((self.model.common_dim,), 1)
        return self._normalised((images, texts), logits)

    def _normalised(self, features: Sequence[torch.Tensor], logits: torch.Tensor) -> dict[str, torch.Tensor]:
        """The result of `_features`, from features in the order of `feature_names` and one row of logits per sample."""
        return {**dict(zip(self.feature_names, map(_unit, features), strict=True)), "logits": logits[0]}

    def encode(self, name: str, context: StepContext, batch: Batch) -> torch.Tensor:
        """As `Task.encode`."""
        tower = MAIN_TOWER if name == "images" else "text"
        return _unit(context.forward(tower, [batch.get(name)], batch)[:, : self.encoded_dim])

    def _loss(self, context: StepContext, features: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """This rank's share: the mean over the data-parallel ranks is the loss of the global batch."""
        own = [features[name] for name in self.feature_names]
        with torch.autocast(own[0].device.type, enabled=False):
            return self.loss(own, features["logits"], context.gather, context.groups.dp_rank * len(own[0]))

    def _logits_in_fp32(self, context: StepContext, logits: torch.Tensor) -> torch.Tensor:
        """The logits with the values of the optimizer's fp32 masters, and the gradient of the model's parameters."""
        if logits.dtype == torch.float32:
            return logits
        return logits.float() + (context.masters(self.logit_names[: len(logits)]) - logits.float()).detach()

    def step(self, context: StepContext, batch: Batch, piece: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor:
        """As `Task.step`."""
        features = self._features(context, batch)
        if piece is None:
            return self._loss(context, features | {"logits": self._logits_in_fp32(context, features["logits"])})
        of_pairs = sum((features[name] * piece[name]).sum() for name in self.feature_names)
        # The engine averages gradients over micro-batches and ranks. A feature is of one of them, so its term is scaled
        # up; the scale and the bias are shared by all.
        of_logits = (features["logits"].float() * piece["logits"]).sum()
        return context.groups.layout.dp * context.accumulation * of_pairs + of_logits

    def collect(self, context: StepContext, batch: Batch) -> Mapping[str, torch.Tensor]:
        """As `Task.collect`."""
        return self._features(context, batch)

    def couple(self, context: StepContext, collected: Sequence[Mapping[str, torch.Tensor]]) -> Coupled:
        """As `Task.couple`."""
        rows = len(collected[0]["images"])
        own = {name: torch.cat([features[name] for features in collected]) for name in self.feature_names}
        own["logits"] = self._logits_in_fp32(context, collected[0]["logits"])
        own = {name: tensor.detach().requires_grad_() for name, tensor in own.items()}
        with torch.enable_grad():
            loss = self._loss(context, own)
            *of_features, of_logits = torch.autograd.grad(loss, [*own.values()])
        dp = context.groups.layout.dp
        pieces = [
            {**dict(zip(self.feature_names, of_micro_batch, strict=True)), "logits": of_logits}
            for of_micro_batch in zip(*((gradient / dp).split(rows) for gradient in of_features), strict=True)
        ]
        return Coupled(context.gather(loss.detach()[None]).mean(), pieces)

    # ---- evaluation ------------------------------------------------------------------------------------------------

    def outputs(self, context: StepContext, batch: Batch) -> torch.Tensor:
        """As `Task.outputs`: normalised features of both towers, [B, 2E]."""
        features = self._features(context, batch)
        return torch.cat((features["images"], features["texts"]), dim=1)

    def further_texts(self) -> list[tuple[int, str]]:
        """As `Task.further_texts`: the captions after each image's first one, which is in the batches."""
        source = self.validation
        assert source is not None, "there is no evaluation split"
        return [(sample, text) for sample in range(len(source)) for text in source.captions(sample)[1:]]

    def metrics(self, device: torch.device) -> Metrics:
        """As `Task.metrics`."""
        return Retrieval(device, self.model.common_dim)

    # ---- the report ------------------------------------------------------------------------------------------------

    def write_files(self, metrics: Metrics, folder: RunFolder, source: Source) -> None:
        """As `Task.write_files`: similarities, and the most and the least similar pairs."""
        assert isinstance(metrics, Retrieval)
        write_pairs(folder, metrics, source, self.image)

    @classmethod
    def panels(cls, folder: RunFolder) -> Mapping[str, Sequence[Panel]]:
        """As `Task.panels`: the same."""
        title = "The most similar pairs of the last evaluation, then the least similar: similarity, place"
        return {"Pairs": pair_panels(folder), "Images": sheet(folder.pairs, title)}


def _unit(features: torch.Tensor) -> torch.Tensor:
    """The rows normalised to length 1, in float32."""
    with torch.autocast(features.device.type, enabled=False):
        return F.normalize(features.float(), dim=1)


class TwoTowers(Contrastive):
    """A contrastive task whose image tower is a model of timm's, next to a text tower."""

    settings = SETTINGS
    parts: ClassVar = {"text.": "text tower"}
    separate_files: ClassVar = {"text": ("text.",)}
    tower_files: ClassVar = {"text": "text tower"}
    foreign_names = (CLIP_NAMES,)
    export_formats: ClassVar = FORMATS
    pipeline_tag = "zero-shot-image-classification"

    @classmethod
    def predictor(cls, exported: Exported, values: Mapping[str, Any], folder: Path) -> TextTower:
        """As `Task.predictor`: the text tower."""
        model: Any = exported.model
        tower = SequentialViT(take_apart(model.text)).eval()
        return TextTower(tower, model.text.settings.context_length, model.common_dim)

    @classmethod
    def fit_tensors(cls, model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """As `Task.fit_tensors`: a projection has no bias, or one of zeros from timm; another is a classifier's."""
        bias = tensors.get("head.bias")
        if bias is None or "head.bias" in names_and_shapes(model):
            return tensors
        left_out = ("head.bias", "head.weight") if bias.any() else ("head.bias",)
        return {name: tensor for name, tensor in tensors.items() if name not in left_out}


class Clip(TwoTowers):
    """`--task clip`: softmax over the captions of the global batch for each image, and the reverse."""

    name = "clip"
    peers = ("open_clip",)
    not_replayed = ""
    text_model = "clip_base"
    initial_logits = (math.log(1 / 0.07),)
    loss = CLIP_LOSS
    bounds: ClassVar = {"text.logit_scale": (0.0, math.log(100.0))}


class SigLip(TwoTowers):
    """`--task siglip`: for each pair of the global batch a sigmoid loss on whether the caption belongs to the image."""

    name = "siglip"
    peers = ("open_clip",)
    not_replayed = ""
    text_model = "siglip_base"
    initial_logits = (math.log(10.0), -10.0)
    shown_parameters: ClassVar = {**Contrastive.shown_parameters, "text.logit_bias": ("logit_bias", float)}
    charts: ClassVar = (*Contrastive.charts, Chart("Logit bias", {"logit_bias": "bias"}))
    loss = SIGLIP_LOSS
