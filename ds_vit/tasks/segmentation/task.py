"""Segmentation: a class for each pixel, by a timm ViT with a head on its patch tokens.

The loss is the mean over the pixels of the global batch that count, as torch's `CrossEntropyLoss` of the whole batch
has it: not a mean of the means of micro-batches or ranks, in which a pixel of an image that is mostly ignored would
count for more. The number of these pixels needs the masks only, so there is no second forward pass.

Shapes: B images, K windows of an image, C classes, h x w the model's size, gh x gw the grid of its logits.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any, ClassVar

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ds_vit.config.run_folder import RunFolder
from ds_vit.config.schema import RunConfig
from ds_vit.data.field import Field
from ds_vit.data.masks import MaskField, SceneImages
from ds_vit.data.settings import ImageConfig
from ds_vit.data.sources.combined import first_part, part_of
from ds_vit.data.sources.listing import is_training
from ds_vit.data.sources.masks import IGNORED, of_masks, open_masks, pixels_of_classes
from ds_vit.data.sources.source import Source
from ds_vit.fault_tolerance.errors import EndedTogether, UserError, enumerate_some, read_text
from ds_vit.models.layers import MAIN_TOWER, Layer
from ds_vit.models.zoo import ModelSpec, TimmViT, names_and_shapes
from ds_vit.parallel.groups import gather_objects
from ds_vit.tasks.metrics import Batch, Metrics
from ds_vit.tasks.panels import Panel, pictures
from ds_vit.tasks.segmentation.export import FORMATS
from ds_vit.tasks.segmentation.flags import SETTINGS
from ds_vit.tasks.segmentation.metrics import FIGURES, MeanIoU, iou_panels, write_iou
from ds_vit.tasks.segmentation.predictions import predict_masks, write_labels
from ds_vit.tasks.segmentation.scenes import SceneSource
from ds_vit.tasks.segmentation.towers import HEAD, Segmenter, create_segmenter, grid_of_logits
from ds_vit.tasks.segmentation.windows import WholeMask, Windows
from ds_vit.tasks.task import Coupled, StepContext, Task

BALANCED = "balanced"


class Segmentation(Task):
    """`--task segmentation`.

    A batch of training has "images" [B, 3, h, w] on the first stage and "masks" int64 [B, h, w] on the last; one of
    evaluation the windows "images" [B, K, 3, h, w], and "masks" and "sizes" of the masks' own sizes (windows.py).
    """

    name = "segmentation"
    not_replayed = ""
    coupled = True
    collects_outputs = False
    example_dataset = "scenes"
    settings = SETTINGS
    refused_flags: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("mixup", "cutmix", "cutmix_minmax"), "masks of two images cannot be mixed"),
        **dict.fromkeys(("smoothing", "bce_loss", "bce_sum", "bce_target_thresh"), "its loss is cross-entropy"),
        **dict.fromkeys(("eval_knn", "eval_linear_probe"), "its images have no class"),
        "linear_probe": "--freeze-backbone trains only the head",
        "class_parallel": "its head has no sharded classifier",
        "drop": "its head has no dropout",
        "allow_empty_classes": "its classes have no folders",
        **dict.fromkeys(("aa", "reprob"), "masks do not follow its operations"),
        **dict.fromkeys(("train_crop_mode", "scale", "ratio"), "images and masks are cropped by --scale-range"),
        **dict.fromkeys(("train_interpolation", "interpolation"), "images are resized bilinearly"),
        **dict.fromkeys(("crop_pct", "crop_mode"), "windows slide over whole images (--slide-stride)"),
        **dict.fromkeys(("decode", "augment_on"), "crops are exactly those of the masks"),
        **dict.fromkeys(("img_size_schedule", "train_img_sizes"), "crops and windows are of one size"),
    }
    parts: ClassVar = {HEAD: "segmentation head"}
    separate_files: ClassVar = {"seg_head": (HEAD,)}
    tower_files: ClassVar = {"seg_head": "segmentation head"}
    export_formats = FORMATS
    pipeline_tag = "image-segmentation"
    predict_flags = ("slide_stride",)
    figures = FIGURES
    predictor = staticmethod(predict_masks)

    model: Segmenter

    def __init__(self, config: RunConfig, image: ImageConfig, source: Source, model: nn.Module, **more: Any) -> None:
        super().__init__(config, image, source, model, **more)
        self._given: tuple[float, ...] = ()
        if config.class_weights not in ("", BALANCED):
            self._given = read_class_weights(config.class_weights, self.num_classes)

    @property
    def notes(self) -> tuple[str, ...]:
        """As `Task.notes`: a line where a class seems to have the ignored value, as in masks of 0 and 255 only."""
        some = range(0, len(self.source), len(self.source) // 20 + 1)
        count = partial(pixels_of_classes, num_classes=self.num_classes)
        ignored, *counted = sum(of_masks(self.source, "mask", some, count), np.zeros(self.num_classes + 1))
        if not ignored or np.count_nonzero(counted) > 1:
            return ()
        shown = f"{len(some)} masks were read: {int(ignored):,} pixels are ignored, and the others are of one class"
        return (f"{shown}; if the ignored value is a class, list it in labels.csv",)

    # ---- the model -------------------------------------------------------------------------------------------------

    @classmethod
    def create_model(cls, spec: ModelSpec, config: RunConfig, *, for_training: bool) -> TimmViT:
        """As `Task.create_model`."""
        return create_segmenter(spec, config.seg_head, for_training=for_training)

    @classmethod
    def fit_tensors(cls, model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """As `Task.fit_tensors`: a head of another kind is left out."""
        head = {name for name in tensors if name.startswith(HEAD)}
        return {name: tensors[name] for name in tensors if name not in head or head <= {*names_and_shapes(model)}}

    @classmethod
    def locked_names(cls, model: nn.Module, config: RunConfig) -> Mapping[str, frozenset[str]]:
        """As `Task.locked_names`, for --freeze-backbone."""
        if not config.freeze_backbone:
            return {}
        names = (name for name, _ in model.named_parameters())
        return {"--freeze-backbone": frozenset(name for name in names if not name.startswith(HEAD))}

    def identity(self) -> dict[str, Any]:
        """As `Task.identity`; of a file of class weights its numbers, whatever its name."""
        return super().identity() | ({"class_weights": [*self._given]} if self._given else {})

    # ---- a batch ---------------------------------------------------------------------------------------------------

    @classmethod
    def open_source(cls, config: RunConfig, folder: str, split: str) -> Source:
        """As `Task.open_source`: images with masks."""
        split, percent = part_of(split)
        if config.dataset == "scenes":
            source: Source = SceneSource(is_training("scenes", split))
        else:
            classes = config.num_classes, config.ignore_index, config.reduce_zero_label
            source = open_masks(config.dataset, folder, split, classes)
        return source if percent == 100 else first_part(source, percent)

    def fields(self, *, training: bool) -> tuple[Field, ...]:
        """As `Task.fields`."""
        if training:
            images = SceneImages("images", self.image, self.config, self.config.scale_range)
            return images, MaskField("masks", images)
        found: set[Any] = {self.image.img_size}
        if self.validation is not None:  # from the headers; a mask that is damaged is left to the one who reads it
            found.update(of_masks(self.validation, "mask_size", range(len(self.validation)), tuple))
        windows = Windows("images", self.image, self.config.slide_stride, found)
        sizes = Field("sizes", (2,), torch.int64, stage="last", entry="mask_size")  # 0 x 0 of a row that is not valid
        return windows, WholeMask("masks", found), sizes

    # ---- a step ----------------------------------------------------------------------------------------------------

    def setup(self, context: StepContext) -> None:
        """As `Task.setup`; balanced weights read all training masks, of which each rank takes a share.

        Raises:
            EndedTogether: a mask of one of the ranks is invalid.
        """
        weights = self._given or (1.0,) * self.num_classes
        if self.config.class_weights == BALANCED:
            own = range(dist.get_rank(), len(self.source), dist.get_world_size())
            count = partial(pixels_of_classes, num_classes=self.num_classes)
            try:
                found: Any = sum(of_masks(self.source, "mask", own, count), np.zeros(self.num_classes + 1))
            except (UserError, OSError) as error:
                found = str(error)
            everyones = gather_objects(found)
            if errors := [of_rank for of_rank in everyones if isinstance(of_rank, str)]:
                raise EndedTogether(errors[0])
            weights = balanced_weights(sum(everyones)[1:].tolist())
        self._weights = torch.tensor(weights, device=context.device)

    def _weight(self, masks: torch.Tensor) -> torch.Tensor:
        """The summed weights of the pixels that count, fp32 scalar; summed in float64."""
        weights = torch.where(masks == IGNORED, 0.0, self._weights[masks.clamp(min=0)])
        return weights.sum(dtype=torch.float64).float()

    def step(self, context: StepContext, batch: Batch, piece: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor:
        """As `Task.step`: this micro-batch's share of the loss of the global batch; 0 where no pixel counts."""
        logits, masks = context.forward(MAIN_TOWER, [batch.get("images")], batch), batch["masks"]
        total = context.sum(self._weight(masks)) if piece is None else piece["total"]
        with torch.autocast(logits.device.type, enabled=False):
            logits = upsampled(logits.float(), masks.shape[-2:])
            # On a GPU the order in which "sum" adds differs from call to call.
            losses = F.cross_entropy(logits, masks, self._weights, ignore_index=IGNORED, reduction="none")
            share = losses.sum() / torch.where(total > 0, total, 1.0)
        return share * (dist.get_world_size(context.groups.dp) * context.accumulation)

    def collect(self, context: StepContext, batch: Batch) -> Mapping[str, torch.Tensor]:
        """As `Task.collect`, of the masks only."""
        return {"weight": self._weight(batch["masks"])}

    def couple(self, context: StepContext, collected: Sequence[Mapping[str, torch.Tensor]]) -> Coupled:
        """As `Task.couple`: the summed weights of the global batch."""
        total = context.sum(torch.stack([found["weight"] for found in collected]).sum())
        return Coupled(None, [{"total": total}] * len(collected))

    def outputs(self, context: StepContext, batch: Batch) -> torch.Tensor:
        """As `Task.outputs`: logits [B, K, C, gh, gw]."""
        return super().outputs(context, batch).unflatten(0, (-1, self.evaluation_fields[0].shape[0]))

    def loss_on_meta(self, layers: Sequence[Layer], samples: int) -> torch.Tensor:
        """As `Task.loss_on_meta`: the upsampled logits, and in the backward pass three tensors of their size."""
        patches = torch.empty(samples, math.prod(self.model.grid_size), self.model.embed_dim, device="meta")
        logits = grid_of_logits(self.model.seg_head, patches, self.model.grid_size).detach().requires_grad_()
        masks = torch.empty(samples, *self.image.img_size, dtype=torch.int64, device="meta")
        loss = F.cross_entropy(upsampled(logits, masks.shape[-2:]), masks, reduction="none").sum()
        loss.backward()
        return loss

    # ---- evaluation, predictions and the report ----------------------------------------------------------------------

    def metrics(self, device: torch.device) -> Metrics:
        """As `Task.metrics`."""
        windows = Windows("images", self.image, self.config.slide_stride)
        return MeanIoU(self.num_classes, windows, device, self.validation)

    def write_classes(self, folder: RunFolder) -> None:
        """As `Task.write_classes`, with the colours and the pixel values of the classes."""
        super().write_classes(folder)
        write_labels(folder.path, self.source)

    def write_files(self, metrics: Metrics, folder: RunFolder, source: Source) -> None:
        """As `Task.write_files`: the IoU of each class."""
        assert isinstance(metrics, MeanIoU)
        write_iou(folder, metrics, self.class_names)

    @classmethod
    def panels(cls, folder: RunFolder) -> Mapping[str, Sequence[Panel]]:
        """As `Task.panels`: the IoU of each class, and images with their masks."""
        title = "Images, their masks and the predicted classes at the last evaluation"
        return {"Classes": iou_panels(folder), "Images": pictures(folder, {"segmentation": title})}


@cache
def _bilinear(length: int, size: int, device: torch.device) -> torch.Tensor:
    """The matrix [size, length] that resizes a vector as `F.interpolate` does with mode "linear"."""
    return F.interpolate(torch.eye(length, device=device)[None], size, mode="linear")[0].T.contiguous()


def upsampled(logits: torch.Tensor, size: Sequence[int]) -> torch.Tensor:
    """`F.interpolate(logits, size, mode="bilinear")` of float32 [B, C, gh, gw], by two matrix products.

    The backward pass of torch's adds in any order on a GPU: tensor-parallel ranks would drift apart.
    """
    rows, columns = (_bilinear(*pair, logits.device) for pair in zip(logits.shape[-2:], size, strict=True))
    return rows @ (logits @ columns.T)


def read_class_weights(path: str, num_classes: int) -> tuple[float, ...]:
    """The weights of a file, one for each class, separated by spaces, commas or lines.

    Raises:
        UserError: it cannot be read, or does not hold as many numbers that are weights.
    """
    words = read_text(path, f"--class-weights is {BALANCED} or a file: ").replace(",", " ").split()
    with contextlib.suppress(ValueError):
        weights = tuple(map(float, words))
        if len(weights) == num_classes and all(0 <= weight < math.inf for weight in weights):
            return weights
    rule = f"must have {num_classes} numbers of at least 0, one for each class"
    raise UserError(f"--class-weights {path} {rule}; it has {len(words)} words: {enumerate_some(words)}")


def balanced_weights(pixels: Sequence[int]) -> tuple[float, ...]:
    """scikit-learn's weights "balanced", n / (C * pixels) of C classes and n pixels; 1 for a class without pixels."""
    return tuple(sum(pixels) / (len(pixels) * number) if number else 1.0 for number in pixels)
