"""Each task as a plain loop in one process, in 16 bits or in float64, of torch and the task's own library only.

The loop in 16 bits is the textbook's (Micikevicius et al. 2017, arXiv 1710.03740): the weights that the optimizer
updates are fp32, each micro-batch computes with their rounded values, and the gradients of micro-batches are summed in
fp32. Norms and losses compute in fp32. In float64 everything is float64: what a run in 16 bits should have computed.

A model's first tower is `main`; its parameters have ds_vit's names, those of `main` without that prefix.

Shapes: B samples of a micro-batch, N patches, L tokens of a caption, E common width of two towers, K prototypes.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import timm
import torch
import torch.nn.functional as F
from plain_dino import Head, exact, terms
from timm.layers import GELUTanh
from timm.models.vision_transformer import Block
from torch import nn
from torch.func import functional_call

Tensors = Mapping[str, torch.Tensor]
SIZE, NAME = 16, "vit_tiny_patch16_224"
VIT = {"patch_size": 4, "embed_dim": 48, "depth": 3, "num_heads": 4}
CLASSES, WIDTH = 10, 16
VOCABULARY, CONTEXT, PAD, END, TEXT_DEPTH = 259, 12, 256, 258, 2
DECODER = {"dim": 32, "depth": 1, "heads": 4}
HEAD = {"prototypes": 48, "hidden": 64, "bottleneck": 16}
LOCAL, NUM_LOCAL, MASK_RATIOS = 8, 2, (0.1, 0.5)
TEMPERATURE = 3.0
TEACHER_TEMPERATURE, MOMENTUM, CENTER_MOMENTUM = 0.07, 0.9, 0.9


def _norm(norm: nn.LayerNorm, x: torch.Tensor) -> torch.Tensor:
    wide = exact(x)
    weight, bias = norm.weight.to(wide.dtype), norm.bias.to(wide.dtype)
    return F.layer_norm(wide, norm.normalized_shape, weight, bias, norm.eps).to(x.dtype)


class PlainTask(nn.Module):
    """A task's towers, the outputs of a micro-batch and their loss.

    Attributes:
        averaged: prefix of a tower that is the moving average of another → that of the other.
        untrained: prefixes of parameters that are fixed.
    """

    main: nn.Module
    averaged: ClassVar[Mapping[str, str]] = {}
    untrained: tuple[str, ...] = ()

    def forward(self, batch: Tensors) -> tuple[torch.Tensor, ...]:
        """The outputs of a micro-batch, one after the other along their first dimension in a global batch."""
        raise NotImplementedError

    def loss(self, outputs: Sequence[torch.Tensor], batch: Tensors, weights: Tensors) -> torch.Tensor:
        """The loss of a global batch; `weights` are those that the optimizer has."""
        raise NotImplementedError

    def named_values(self) -> dict[str, torch.Tensor]:
        """Its parameters by ds_vit's names."""
        return {name.removeprefix("main."): p.detach() for name, p in self.named_parameters()}

    def shake(self, seed: int) -> None:
        """Move every parameter: at timm's initial values many a branch gives zero, and a zero hides what is wrong."""
        generator = torch.Generator().manual_seed(seed)
        for parameter in self.parameters():
            parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=0.05)


def vit(**kwargs: Any) -> nn.Module:
    """timm's small ViT."""
    return timm.create_model(NAME, img_size=SIZE, **{**VIT, **kwargs})


# ---- tasks -----------------------------------------------------------------------------------------------------------


class Classification(PlainTask):
    """Cross-entropy of timm's ViT."""

    def __init__(self) -> None:
        super().__init__()
        self.main = vit(num_classes=CLASSES)

    def forward(self, batch: Tensors) -> tuple[torch.Tensor, ...]:
        return (self.main(batch["images"]),)

    def loss(self, outputs: Sequence[torch.Tensor], batch: Tensors, weights: Tensors) -> torch.Tensor:
        return F.cross_entropy(exact(outputs[0]), batch["targets"])


class Distillation(PlainTask):
    """Cross-entropy and the divergence from a wider teacher (Hinton et al. 2015)."""

    TEACHER: ClassVar = {**VIT, "embed_dim": 64, "depth": 2}
    untrained = ("teacher.",)

    def __init__(self) -> None:
        super().__init__()
        self.main, self.teacher = vit(num_classes=CLASSES), vit(num_classes=CLASSES, **self.TEACHER)
        nn.init.normal_(self.teacher.head.weight, std=0.7)

    def forward(self, batch: Tensors) -> tuple[torch.Tensor, ...]:
        with torch.no_grad():
            taught = self.teacher(batch["images"])
        return self.main(batch["images"]), taught

    def loss(self, outputs: Sequence[torch.Tensor], batch: Tensors, weights: Tensors) -> torch.Tensor:
        student, teacher = map(exact, outputs)
        own, wanted = ((logits / TEMPERATURE).log_softmax(1) for logits in (student, teacher))
        divergence = F.kl_div(own, wanted, reduction="batchmean", log_target=True)
        return F.cross_entropy(student, batch["targets"]) + TEMPERATURE**2 * divergence


def _sine_cosine(side: int, width: int) -> torch.Tensor:
    """The paper's positions of the decoder, with a class token [1, 1 + side², width]."""
    frequencies = 10000.0 ** -(torch.arange(width // 4, dtype=torch.float64) / (width // 4))
    rows, columns = torch.meshgrid(*[torch.arange(side, dtype=torch.float64)] * 2, indexing="ij")
    row, column = rows.flatten().outer(frequencies), columns.flatten().outer(frequencies)
    table = torch.cat((column.sin(), column.cos(), row.sin(), row.cos()), dim=1)
    return torch.cat((torch.zeros(1, width), table.float()))[None]


class MaskedAutoencoding(PlainTask):
    """He et al. 2022, of timm's blocks; the masks come with the batch."""

    untrained = ("pos_embed",)

    def __init__(self) -> None:
        super().__init__()
        self.main, dim = vit(num_classes=0, global_pool="token"), DECODER["dim"]
        self.main.decoder_embed = nn.Linear(VIT["embed_dim"], dim)
        self.main.mask_token = nn.Parameter(0.02 * torch.randn(1, 1, dim))
        norm = partial(nn.LayerNorm, eps=1e-6)
        self.main.decoder_blocks = nn.ModuleList(
            Block(dim, DECODER["heads"], qkv_bias=True, norm_layer=norm) for _ in range(DECODER["depth"])
        )
        self.main.decoder_norm = norm(dim)
        self.main.decoder_pred = nn.Linear(dim, 3 * VIT["patch_size"] ** 2)
        self.register_buffer("positions", _sine_cosine(SIZE // VIT["patch_size"], dim), persistent=False)

    def forward(self, batch: Tensors) -> tuple[torch.Tensor, ...]:
        main, seen = self.main, ~batch["masks"]
        tokens = main._pos_embed(main.patch_embed(batch["images"]))
        kept = tokens[:, 1:][seen].unflatten(0, (len(tokens), -1))
        tokens = main.norm(main.blocks(torch.cat((tokens[:, :1], kept), dim=1)))
        tokens = main.decoder_embed(tokens)
        patches = main.mask_token.expand(*seen.shape, -1).masked_scatter(seen[..., None], tokens[:, 1:])
        tokens = torch.cat((tokens[:, :1], patches), dim=1) + self.positions.to(tokens.dtype)
        for block in main.decoder_blocks:
            tokens = block(tokens)
        return (main.decoder_pred(main.decoder_norm(tokens[:, 1:])),)

    def loss(self, outputs: Sequence[torch.Tensor], batch: Tensors, weights: Tensors) -> torch.Tensor:
        side, size = SIZE // VIT["patch_size"], VIT["patch_size"]
        pixels = batch["pixels"].to(exact(outputs[0]).dtype)
        pixels = pixels.unflatten(3, (side, size)).unflatten(2, (side, size)).permute(0, 2, 4, 3, 5, 1)
        return (exact(outputs[0]) - pixels.flatten(3).flatten(1, 2)).square().mean(2)[batch["masks"]].mean()


class TextTower(nn.Module):
    """A causal transformer of timm's blocks whose features are the end token's, or (SigLIP) one that is not, with its
    last token's; with the logit scale and bias."""

    def __init__(self, causal: bool, logits: Sequence[float]) -> None:
        super().__init__()
        width, self.causal = VIT["embed_dim"], causal
        norm = partial(nn.LayerNorm, eps=1e-5 if causal else 1e-6)
        self.token_embed = nn.Embedding(VOCABULARY, width)
        self.pos_embed = nn.Parameter(0.01 * torch.randn(1, CONTEXT, width))
        activation = nn.GELU if causal else GELUTanh
        self.blocks = nn.ModuleList(
            Block(width, VIT["num_heads"], qkv_bias=True, act_layer=activation, norm_layer=norm)
            for _ in range(TEXT_DEPTH)
        )
        self.norm, self.head = norm(width), nn.Linear(width, WIDTH, bias=not causal)
        for name, value in zip(("logit_scale", "logit_bias"), logits, strict=False):
            self.register_parameter(name, nn.Parameter(torch.tensor([value])))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        tokens = self.token_embed(ids) + self.pos_embed
        for block in self.blocks:
            tokens = block(tokens, is_causal=self.causal)
        last = (ids == END).int().argmax(1) if self.causal else torch.full_like(ids[:, 0], CONTEXT - 1)
        return self.head(self.norm(tokens[torch.arange(len(ids)), last]))


class Contrastive(PlainTask):
    """open_clip's losses of timm's ViT and a text tower."""

    causal: bool
    initial_logits: tuple[float, ...]

    def __init__(self) -> None:
        super().__init__()
        self.main, self.text = vit(num_classes=WIDTH), TextTower(self.causal, self.initial_logits)
        self.main.head = nn.Linear(VIT["embed_dim"], WIDTH, bias=False)

    def shake(self, seed: int) -> None:
        super().shake(seed)
        for name, value in zip(("logit_scale", "logit_bias"), self.initial_logits, strict=False):
            getattr(self.text, name).data.fill_(value)

    def forward(self, batch: Tensors) -> tuple[torch.Tensor, ...]:
        features = self.main(batch["images"]), self.text(batch["texts"])
        return tuple(F.normalize(exact(rows), dim=1) for rows in features)


class Clip(Contrastive):
    """Radford et al. 2021."""

    causal, initial_logits = True, (2.6592,)

    def loss(self, outputs: Sequence[torch.Tensor], batch: Tensors, weights: Tensors) -> torch.Tensor:
        from open_clip.loss import ClipLoss

        return ClipLoss()(*outputs, weights["text.logit_scale"][0].exp())


class SigLip(Contrastive):
    """Zhai et al. 2023."""

    causal, initial_logits = False, (2.3026, -10.0)

    def loss(self, outputs: Sequence[torch.Tensor], batch: Tensors, weights: Tensors) -> torch.Tensor:
        from open_clip.loss import SigLipLoss

        return SigLipLoss()(*outputs, weights["text.logit_scale"][0].exp(), weights["text.logit_bias"][0])


class BridgeTower(PlainTask):
    """transformers' model of a folder, and the three terms of its loss in fp32."""

    def __init__(self, folder: Path) -> None:
        from transformers import BridgeTowerForContrastiveLearning

        super().__init__()
        self.main = BridgeTowerForContrastiveLearning.from_pretrained(folder)
        unused = [name for name, _ in self.main.named_parameters() if ".text_model.pooler." in name]
        self.untrained = tuple(name for name in unused)
        for module in self.main.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0

    def forward(self, batch: Tensors) -> tuple[torch.Tensor, ...]:
        ids = batch["texts"]
        found = self.main(input_ids=ids, attention_mask=(ids != PAD).long(), pixel_values=batch["images"])
        return found.text_embeds, found.image_embeds, found.cross_embeds

    def loss(self, outputs: Sequence[torch.Tensor], batch: Tensors, weights: Tensors) -> torch.Tensor:
        texts, images, both = (F.normalize(exact(rows), dim=1) for rows in outputs)
        labels, scale = torch.arange(len(texts)), weights["logit_scale"].exp()
        pairs = ((texts, images), (texts, both), (images, both))
        return sum(F.cross_entropy(scale * rows @ columns.T, labels) for rows, columns in pairs) / 3


class Backbone(nn.Module):
    """timm's ViT with a mask token, which gives all its normed tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.vit = vit(num_classes=0, global_pool="token", dynamic_img_size=True)

    def forward(self, images: torch.Tensor, masks: torch.Tensor | None = None, token: Any = None) -> torch.Tensor:
        tokens = self.vit.patch_embed(images)
        if masks is not None:
            tokens = torch.where(masks.view(*tokens.shape[:3], 1), token[None], tokens)
        return self.vit.norm(self.vit.blocks(self.vit._pos_embed(tokens)))


class SelfDistillation(PlainTask):
    """DINO with iBOT's masked patches and KoLeo; crops and masks come with the batch."""

    averaged: ClassVar = {"teacher.": "", "teacher_head.": "dino_head."}

    def __init__(self) -> None:
        super().__init__()
        self.main, self.dino_head = Backbone(), Head(VIT["embed_dim"], **HEAD)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, VIT["embed_dim"]))
        self.teacher, self.teacher_head = copy.deepcopy(self.main), copy.deepcopy(self.dino_head)
        self.centers = [torch.zeros(HEAD["prototypes"]) for _ in range(2)]

    def named_values(self) -> dict[str, torch.Tensor]:
        return {name.replace("main.vit.", "").replace(".vit.", "."): p.detach() for name, p in self.named_parameters()}

    def shake(self, seed: int) -> None:
        """More than the others: KoLeo amplifies rounding where features are alike."""
        super().shake(seed)
        generator = torch.Generator().manual_seed(seed + 1)
        for name, parameter in self.main.named_parameters():
            if parameter.ndim > 1 and "pos_embed" not in name:
                parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
        self.teacher.load_state_dict(self.main.state_dict())
        self.teacher_head.load_state_dict(self.dino_head.state_dict())

    def forward(self, batch: Tensors) -> tuple[torch.Tensor, ...]:
        images, masks = batch["images"].flatten(0, 1), batch["masks"].flatten(0, 1)
        with torch.no_grad():
            tokens = self.teacher(images)
            taught = self.teacher_head(tokens[:, 0]), self.teacher_head(tokens[:, 1:][masks])
        tokens = self.main(images, masks, self.mask_token)
        crops = self.main(batch["local_images"].flatten(0, 1))[:, 0]
        head = self.dino_head
        students = head(tokens[:, 0]), head(tokens[:, 1:][masks]), head(crops), exact(tokens[:, 0])
        return *taught, *students

    def loss(self, outputs: Sequence[torch.Tensor], batch: Tensors, weights: Tensors) -> torch.Tensor:
        *taught, of_globals, of_patches, of_locals, classes = outputs
        centers = [center.to(rows.dtype) for center, rows in zip(self.centers, taught, strict=True)]
        pairs = zip(taught, centers, strict=True)
        targets, patch_targets = [((rows - center) / TEACHER_TEMPERATURE).softmax(1) for rows, center in pairs]
        pairs = zip(taught, centers, strict=True)
        self.centers = [
            CENTER_MOMENTUM * center + (1 - CENTER_MOMENTUM) * rows.mean(0).detach() for rows, center in pairs
        ]
        masks = batch["masks"].flatten(0, 1)
        return terms(targets, patch_targets, of_globals, of_locals, of_patches, masks, classes)


TASKS: dict[str, type[PlainTask]] = {
    "classification": Classification,
    "mae": MaskedAutoencoding,
    "clip": Clip,
    "siglip": SigLip,
    "dino": SelfDistillation,
    "distillation": Distillation,
    "bridgetower": BridgeTower,
}


# ---- the loop --------------------------------------------------------------------------------------------------------


class Run(NamedTuple):
    """A loop's losses, the change of its trained weights in the first step, and at the end its weights and averages."""

    losses: list[float]
    first: dict[str, torch.Tensor]
    last: dict[str, torch.Tensor]


def train(
    task: PlainTask,
    values: Tensors,
    batches: Sequence[Tensors],
    dtype: torch.dtype,
    *,
    optimizer: Mapping[str, Any],
    clip: float,
    pieces: int = 1,
    scale: float = 1.0,
) -> Run:
    """Train on global batches.

    Args:
        task: the model; its own values do not count.
        values: initial ones by ds_vit's names, in fp32.
        batches: one a step.
        dtype: the model's; float64 computes everything in it.
        optimizer: arguments of torch's SGD.
        clip: of the gradient norm.
        pieces: micro-batches of a step.
        scale: of the loss in fp16.
    """
    for module in task.modules():
        if isinstance(module, nn.LayerNorm):
            module.forward = partial(_norm, module)
    local = dict(zip(task.named_values(), dict(task.named_parameters()), strict=True))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    weights = {name: values[name].to(wide, copy=True) for name in local}
    averaged = task.averaged
    fixed = (*averaged, *task.untrained)
    trained = {name: weights[name].requires_grad_() for name in local if not name.startswith(fixed)}
    stepper = torch.optim.SGD([*trained.values()], **optimizer)
    losses, first = [], {}
    for batch in batches:
        outputs = []
        for piece in range(pieces):
            own = {name: tensor.chunk(pieces)[piece] for name, tensor in batch.items()}
            own |= {name: tensor.to(dtype) for name, tensor in own.items() if tensor.is_floating_point()}
            rounded = {local[name]: tensor.to(dtype) for name, tensor in weights.items()}
            outputs.append(functional_call(task, rounded, (own,)))
        loss = task.loss([torch.cat(parts) for parts in zip(*outputs, strict=True)], batch, weights)
        stepper.zero_grad()
        (scale * loss).backward()
        for tensor in trained.values():
            if tensor.grad is not None:
                tensor.grad /= scale
        nn.utils.clip_grad_norm_(trained.values(), clip)
        stepper.step()
        with torch.no_grad():
            for teacher, student in averaged.items():
                for name in weights:
                    if name.startswith(teacher):
                        weights[name].lerp_(weights[student + name.removeprefix(teacher)], 1 - MOMENTUM)
        losses.append(loss.item())
        first = first or {name: (tensor - values[name].view_as(tensor)).detach() for name, tensor in trained.items()}
    averages = [name for name in weights if name.startswith(tuple(averaged))]
    return Run(losses, first, {name: weights[name].detach() for name in [*trained, *averages]})
