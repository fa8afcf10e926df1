"""Self-distillation without labels: DINO (Caron et al. 2021) with iBOT's masked patches (Zhou et al. 2022).

A student sees two global crops of an image, some of their patches masked, and several local crops. It predicts how its
own moving average, the teacher, assigns the whole global crops to prototypes. Terms, weights and defaults are those of
DINOv2 (Oquab et al. 2024, https://arxiv.org/abs/2304.07193; facebookresearch/dinov2).

Centering, Sinkhorn-Knopp and KoLeo mean the global batch in every layout. With several micro-batches a step has two
passes: the first collects the teacher's bottleneck features and the student's class tokens, which are small, and the
second differentiates. Everything random follows from the key of a crop.

Shapes: B samples of a micro-batch, A micro-batches of a rank, n local crops, V = 2 + n crops, N patches of a global
crop, M masked patches of a micro-batch, S tokens, D width, R rows of a head call, E bottleneck width, K prototypes (k
of this rank where they are sharded).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import nn

from ds_vit.config.augmentation import AugmentConfig
from ds_vit.config.run_folder import RunFolder
from ds_vit.config.schema import RunConfig
from ds_vit.data.field import Field
from ds_vit.data.settings import NUM_GLOBAL, CropConfig, ImageConfig
from ds_vit.data.sources.source import Source
from ds_vit.device import send
from ds_vit.models.layers import MAIN_TOWER, Layer
from ds_vit.models.zoo import ModelSpec
from ds_vit.tasks.dino.centers import Centers
from ds_vit.tasks.dino.fields import LOCAL_IMAGES, PatchMasks, crop_fields
from ds_vit.tasks.dino.flags import SETTINGS
from ds_vit.tasks.dino.loss import (
    Assignment,
    Gauges,
    Prototypes,
    assignment_cross_entropy,
    centered,
    crop_weights,
    koleo,
    sinkhorn,
)
from ds_vit.tasks.dino.metrics import DEVIATION, RANKME, FeatureSpread, collapse_concerns
from ds_vit.tasks.dino.published import BACKBONE_NAMES, HEAD_NAMES
from ds_vit.tasks.dino.rope import CoordinateDraws
from ds_vit.tasks.dino.similarity import SIMILARITIES, SIMILARITY, add_step, centre_similarities
from ds_vit.tasks.dino.towers import (
    HEAD,
    LOCAL_NORM,
    PATCH_NORM,
    TEACHER,
    TEACHER_HEAD,
    ProjectionHeadLayer,
    SelfDistillationViT,
    create_self_distillation,
    local_size,
    masked_share,
)
from ds_vit.tasks.dino.views import Views, fill_up, views_of
from ds_vit.tasks.metrics import Batch, Chart, Figure, Metrics
from ds_vit.tasks.panels import Panel, sheet
from ds_vit.tasks.task import Coupled, Horizon, StepContext, Task, cosine, linear_warmup

_NO_LABELS = "the teacher gives the targets, and there are no labels to mix"
_OWN_AUGMENTATION = "its crops have DINO's own augmentation"
_OF_ANY_AUGMENTATION = {"decode", "augment_on", "remode", "recount"}  # the last two need --reprob
_SIZES = "its crops are of two sizes, --img-size and --local-crops-size"
_PARTS = ("class", "patch")
"""Class tokens and masked patches: each with its own centre or Sinkhorn-Knopp."""

_Taught = dict[str, torch.Tensor]
"""The teacher's bottleneck features, by part."""


class SelfDistillation(Task):
    """`--task dino`.

    A batch has "images" [B, 2, 3, G, G], "local_images" [B, n, 3, L, L] and "masks" [B, 2, N]; evaluation has one image
    of a sample.
    """

    name = "dino"
    peers = ("lightly",)
    settings = SETTINGS
    refused_flags: ClassVar[Mapping[str, str]] = {
        **dict.fromkeys(("mixup", "cutmix", "cutmix_minmax"), _NO_LABELS),
        "drop": "its model has no classifier",
        **dict.fromkeys(("img_size_schedule", "train_img_sizes"), _SIZES),
        **dict.fromkeys(sorted(AugmentConfig.flags().keys() - _OF_ANY_AUGMENTATION), _OWN_AUGMENTATION),
    }
    has_classes = False
    parts: ClassVar = {
        "mask_token": "mask token",
        f"{PATCH_NORM}.": "norm of patches (--untie-cls-and-patch-norms)",
        f"{LOCAL_NORM}.": "norm of local crops (--untie-global-and-local-cls-norm)",
        f"{HEAD}.": "projection head",
        f"{TEACHER}.": "teacher",
        f"{TEACHER_HEAD}.": "projection head",
    }
    separate_files: ClassVar = {"head": (f"{HEAD}.", f"{PATCH_NORM}.", f"{LOCAL_NORM}.")}
    tower_files: ClassVar = {"head": "projection head"}
    foreign_names = (*Task.foreign_names, BACKBONE_NAMES, HEAD_NAMES)
    tower_flags: ClassVar = {HEAD: "initial_head"}
    teachers: ClassVar[Mapping[str, str]] = {TEACHER: MAIN_TOWER, TEACHER_HEAD: HEAD}
    feature_tower = TEACHER
    epoch_flags = ("freeze_last_layer_epochs", "freeze_backbone_epochs")
    figures: tuple[Figure, ...] = (DEVIATION, RANKME)
    charts: ClassVar = (
        Chart("Feature deviation of the teacher (0: collapsed)", {"feature_std": "deviation"}),
        Chart(
            "Teacher's assignment to prototypes, nats",
            {
                "teacher_entropy": "entropy of a row",
                "prototype_entropy": "entropy of the mean: prototypes in use",
                "teacher_kl": "KL of the mean from uniform",
            },
        ),
    )

    model: SelfDistillationViT
    crops: CropConfig
    collected_once = Prototypes._fields

    def __init__(self, config: RunConfig, image: ImageConfig, source: Source, model: nn.Module, **more: Any) -> None:
        super().__init__(config, image, source, model, **more)
        if self.evaluators and not config.eval_metric:  # which say more about the features than their spread
            own = len(type(self).figures)
            self.figures = (*self.figures[own:], *self.figures[:own])
        self.crops = CropConfig(
            local_size=local_size(config, self.model),
            num_local=config.local_crops_number,
            global_scale=config.global_crops_scale,
            local_scale=config.local_crops_scale,
        )
        self.masks_patches = config.ibot_weight > 0
        self._draws = CoordinateDraws.of(config)
        self._parts = _PARTS if self.masks_patches else _PARTS[:1]
        self.uses_sinkhorn = config.centering == "sinkhorn"
        self.coupled = self.uses_sinkhorn or config.koleo_weight > 0
        self.not_replayed = "" if self.coupled else "its centres need --koleo-weight above 0 or --centering sinkhorn"

    @property
    def notes(self) -> tuple[str, ...]:
        """As `Task.notes`."""
        added = tuple(f"--task dino adds {k}={value} to --model-kwargs" for k, value in self.model.added_kwargs.items())
        if self.figures[0].summed_up or not self.config.val_split:
            return added
        why = "no weights are marked as the best: the feature deviation of random weights is the largest"
        return (*added, why + "; --eval-knn 20 or --eval-linear-probe rates features" * bool(self.source.class_names))

    # ---- the model -------------------------------------------------------------------------------------------------

    @property
    def decided_flags(self) -> Mapping[str, Any]:
        """As `Task.decided_flags`, with what the model adds to --model-kwargs."""
        return {**super().decided_flags, "model_kwargs": {**self.config.model_kwargs, **self.model.added_kwargs}}

    @classmethod
    def create_model(cls, spec: ModelSpec, config: RunConfig, *, for_training: bool) -> SelfDistillationViT:
        """As `Task.create_model`."""
        return create_self_distillation(spec, config, for_training=for_training)

    @classmethod
    def fit_tensors(cls, model: nn.Module, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """As `Task.fit_tensors`: a separate norm that the file lacks begins as its norm."""
        norms = [norm for norm in (PATCH_NORM, LOCAL_NORM) if hasattr(model, norm)]
        of_norm = {name: tensor for name, tensor in tensors.items() if name.startswith("norm.")}
        return {f"{norm}.{name[5:]}": tensor for norm in norms for name, tensor in of_norm.items()} | tensors

    @classmethod
    def locked_names(cls, model: nn.Module, config: RunConfig) -> Mapping[str, frozenset[str]]:
        """As `Task.locked_names`: without masks, nothing reaches the mask token."""
        return {} if config.ibot_weight > 0 else {"": frozenset({"mask_token"})}

    def differs_from_peers(self) -> str | None:
        """As `Task.differs_from_peers`: terms of the loss that lightly lacks."""
        config = self.config
        ours_alone = {
            f"--ibot-weight {config.ibot_weight:g}": config.ibot_weight > 0,
            f"--koleo-weight {config.koleo_weight:g}": config.koleo_weight > 0,
            "--centering sinkhorn": self.uses_sinkhorn,
            "--rope-…-coords": self._draws is not None,
            "--untie-…": config.untie_cls_and_patch_norms or config.untie_global_and_local_cls_norm,
        }
        if found := [flag for flag, is_given in ours_alone.items() if is_given]:
            others = "; pass --ibot-weight 0 --koleo-weight 0 and none of the others"
            return f"the peers know nothing of {', '.join(found)}{others}"
        return None

    def supports_training(self, horizon: Horizon, global_batch: int) -> str | None:
        """As `Task.supports_training`, for KoLeo and the schedule of the weight decay."""
        if self.config.koleo_weight > 0 and global_batch < 2:
            return (
                "--koleo-weight needs a neighbour in the global batch, which has 1 sample; raise --batch-size, or pass "
                "--koleo-weight 0"
            )
        if self.config.weight_decay_end is not None and not horizon.weight_decay:
            return (
                f"--weight-decay-end {self.config.weight_decay_end:g} has no effect: there is no weight decay to begin "
                "with in the JSON; give --weight-decay a value above 0"
            )
        if self.config.freeze_backbone_epochs and not horizon.steps_in(self.config.freeze_backbone_epochs):
            return (
                f"--freeze-backbone-epochs {self.config.freeze_backbone_epochs:g} is less than half a step of the "
                f"{horizon.steps_per_epoch} of an epoch; give more, or drop it"
            )
        return super().supports_training(horizon, global_batch)

    def average_files(self) -> dict[str, frozenset[str]]:
        """As `Task.average_files`: the teacher's backbone, which is timm's model, and its head."""
        prefix, (of_head,) = f"{TEACHER}.", self.weight_files().values()
        names = (name for name, _ in self.model.named_parameters() if name.startswith(prefix))
        return {TEACHER: frozenset(name.removeprefix(prefix) for name in names) - of_head, TEACHER_HEAD: of_head}

    # ---- a batch ---------------------------------------------------------------------------------------------------

    def fields(self, *, training: bool) -> tuple[Field, ...]:
        """As `Task.fields`."""
        if not training:
            return (self.images(training=False),)
        crops = crop_fields(self.image, self.crops, self.config)
        if not self.masks_patches:
            return crops
        grid, probability = self.model.patch_embed.grid_size, self.config.mask_sample_probability
        return (*crops, PatchMasks(grid, probability, self.config.mask_ratio_min_max))

    def fixed_batch(self, batch: Batch) -> Batch:
        """As `Task.fixed_batch`."""
        return fill_up(batch, self.config.mask_ratio_min_max[1]) if self.masks_patches else batch

    # ---- a step ----------------------------------------------------------------------------------------------------

    def setup(self, context: StepContext) -> None:
        """As `Task.setup`."""
        self._tp = context.groups.tensor_parallel(self.config)
        parts = () if self.uses_sinkhorn else self._parts
        self._centers = Centers(parts, self.config.prototypes, context.device, self._tp)
        self._pairs: dict[int, torch.Tensor] = {}
        self._gauges, self._gauged_step = Gauges(), 0

    def _tokens(
        self, context: StepContext, tower: str, images: torch.Tensor, views: Views, first: int, *, masked: bool
    ) -> torch.Tensor:
        """Normed tokens [B * v, S, D] of crops [B, v, 3, h, w], which are number `first` and those after it."""
        crops = slice(first, first + images.shape[1])
        inputs = [images.flatten(0, 1)]
        if self._draws is not None and tower == MAIN_TOWER:
            step, size, num_blocks = context.schedules["rope_step"], images.shape[-1], len(self.model.blocks)
            inputs.append(self._draws.draw(self.config.seed, step, size, num_blocks, images.device))
        if masked and views.masks is not None:
            inputs.append(views.masks)
        keys = views.keys[:, crops].reshape(-1)
        return context.forward(tower, inputs, {"keys": keys}, grad=tower == MAIN_TOWER)

    def _masked_patches(self, tokens: torch.Tensor, views: Views) -> torch.Tensor:
        """The masked patches among global crops' tokens [2B, S, D]: [M, D]."""
        patches = tokens[:, self.model.num_prefix_tokens :].flatten(0, 1)
        return patches.index_select(0, views.patches)

    def _project(
        self, context: StepContext, tower: str, rows: Sequence[torch.Tensor], batch: Batch
    ) -> tuple[list[torch.Tensor], Prototypes]:
        """Bottleneck features of each tensor of rows, and the prototypes: one call, so that ZeRO-3 gathers once."""
        features, *prototypes = context.forward(tower, [torch.cat([*rows])], batch, grad=tower == HEAD)
        return [*features.split([len(tensor) for tensor in rows])], Prototypes(*prototypes)

    def _teach(self, context: StepContext, batch: Batch, views: Views) -> tuple[_Taught, Prototypes]:
        """The teacher's bottleneck features of class tokens [2B, E] and masked patches [M, E], and its prototypes."""
        tokens = self._tokens(context, TEACHER, batch["images"], views, 0, masked=False)
        if context.measures:
            if self._gauged_step != context.step:
                self._gauges, self._gauged_step = Gauges(), context.step
            self._gauges.add_features(tokens[:, 0])
        rows = (tokens[:, 0], self._masked_patches(tokens, views))
        features, prototypes = self._project(context, TEACHER_HEAD, rows, batch)
        return dict(zip(self._parts, features, strict=False)), prototypes

    def _assign(
        self, context: StepContext, taught: _Taught, prototypes: Prototypes, counted: _Taught, micro_batches: int = 1
    ) -> dict[str, Assignment]:
        """The assignments of class tokens and masked patches of some micro-batches (a collective); `counted` as of
        `Views`."""
        temperature, total, tp = context.schedules["teacher_temp"], context.sum, self._tp
        self._centers.note(context, taught, prototypes, total, counted, micro_batches)
        assignments = {
            part: sinkhorn(rows, prototypes, temperature, total, tp, counted=counted.get(part))
            if self.uses_sinkhorn
            else centered(rows, prototypes, temperature, self._centers.own(part), tp)
            for part, rows in taught.items()
        }
        if context.measures:
            self._gauges.add_assignment(assignments["class"])
        return assignments

    def _koleo(self, context: StepContext, classes: torch.Tensor) -> torch.Tensor:
        """This rank's share of KoLeo over both global crops, of class tokens [A * B, 2, D] (a collective)."""
        first = context.groups.dp_rank * len(classes)
        return torch.stack([koleo(crop, context.gather, first) for crop in classes.unbind(1)]).sum()

    def step(self, context: StepContext, batch: Batch, piece: Mapping[str, torch.Tensor] | None = None) -> torch.Tensor:
        """As `Task.step`. With `piece`, the value is this micro-batch's share of the loss too."""
        config, views = self.config, views_of(batch, self.crops.num_views)
        if piece is None:
            taught, prototypes = self._teach(context, batch, views)
            assignments = self._assign(context, taught, prototypes, views.counted)
        else:
            assignments = self._assignments_in(piece, context.schedules["teacher_temp"])
        tokens = self._tokens(context, MAIN_TOWER, batch["images"], views, 0, masked=True)
        classes, rows = tokens[:, 0], [tokens[:, 0], self._masked_patches(tokens, views)]
        if self.crops.num_local:
            rows.append(self._tokens(context, MAIN_TOWER, batch[LOCAL_IMAGES], views, NUM_GLOBAL, masked=False)[:, 0])
        (of_global, patches, *of_local), prototypes = self._project(context, HEAD, rows, batch)
        samples = len(batch["images"])
        crops = torch.cat([of_crops.unflatten(0, (samples, -1)) for of_crops in (of_global, *of_local)], dim=1)
        if samples not in self._pairs:
            self._pairs[samples] = send(crop_weights(samples, self.crops.num_local), crops.device)
        pairs = self._pairs[samples]

        def cross_entropy(part: str, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return assignment_cross_entropy(rows, prototypes, config.student_temp, assignments[part], weights, self._tp)

        loss = cross_entropy("class", crops, pairs)
        if self.masks_patches:
            loss = loss + config.ibot_weight * cross_entropy("patch", patches[:, None], views.weights)
        if config.koleo_weight > 0:
            features = classes.float().unflatten(0, (samples, NUM_GLOBAL))
            if piece is None:
                share = self._koleo(context, features)
            else:
                share = (features * piece["koleo_gradient"]).sum()
                share = share - share.detach() + piece["koleo"]
            loss = loss + config.koleo_weight * share
        return loss

    def collect(self, context: StepContext, batch: Batch) -> Mapping[str, torch.Tensor]:
        """As `Task.collect`: the teacher's bottleneck features, and for KoLeo the student's class tokens."""
        views = views_of(batch, self.crops.num_views)
        taught, prototypes = self._teach(context, batch, views)
        taught |= prototypes._asdict()  # the same ones in each micro-batch
        taught |= {f"{part}/counted": counted for part, counted in views.counted.items()}
        if self.config.koleo_weight > 0:
            tokens = self._tokens(context, MAIN_TOWER, batch["images"], views, 0, masked=True)
            taught["koleo"] = tokens[:, 0].float().unflatten(0, (-1, NUM_GLOBAL))
        return taught

    def couple(self, context: StepContext, collected: Sequence[Mapping[str, torch.Tensor]]) -> Coupled:
        """As `Task.couple`: assignments over the global batch, and KoLeo's gradients."""
        prototypes = Prototypes(*(collected[0][name] for name in Prototypes._fields))
        counted = {
            part: torch.cat([rows[f"{part}/counted"] for rows in collected])
            for part in self._parts
            if f"{part}/counted" in collected[0]
        }
        taught = {part: torch.cat([rows[part] for rows in collected]) for part in self._parts}
        assignments = self._assign(context, taught, prototypes, counted, len(collected))
        pieces: list[dict[str, torch.Tensor]] = [prototypes._asdict() for _ in collected]
        for part, assignment in assignments.items():
            of_micro_batches = assignment.rows.split([len(rows[part]) for rows in collected])
            for piece, rows in zip(pieces, of_micro_batches, strict=True):
                piece |= {f"{part}/rows": rows, f"{part}/of_prototypes": assignment.of_prototypes}
        if self.config.koleo_weight > 0:
            classes = torch.cat([rows["koleo"] for rows in collected]).requires_grad_()
            with torch.enable_grad():
                loss = self._koleo(context, classes)
                (gradient,) = torch.autograd.grad(loss, classes)
            # Every micro-batch has the loss as its value, and separate features: the engine divides by their number.
            parts = (len(collected) * gradient).split(len(collected[0]["koleo"]))
            for piece, of_micro_batch in zip(pieces, parts, strict=True):
                piece |= {"koleo": loss.detach(), "koleo_gradient": of_micro_batch}
        return Coupled(None, pieces)

    def _assignments_in(self, piece: Mapping[str, torch.Tensor], temperature: float) -> dict[str, Assignment]:
        """The assignments in a piece of `couple`."""
        prototypes = Prototypes(*(piece[name] for name in Prototypes._fields))
        rest = {part: (piece[f"{part}/rows"], piece[f"{part}/of_prototypes"]) for part in self._parts}
        return {part: Assignment(rows, prototypes, temperature, a, self._tp) for part, (rows, a) in rest.items()}

    def after_update(self, context: StepContext) -> None:
        """As `Task.after_update`: the centres, then the teacher."""
        self._centers.move()
        context.update_teachers(context.schedules["teacher_momentum"])

    def schedules(self, step: int, horizon: Horizon) -> Mapping[str, float]:
        """As `Task.schedules`."""
        config, total = self.config, horizon.total_steps
        warmup = config.warmup_teacher_temp_epochs * horizon.steps_per_epoch
        values = {
            "teacher_momentum": cosine(step, config.teacher_momentum, config.teacher_momentum_end, total),
            "teacher_temp": linear_warmup(step, config.warmup_teacher_temp, config.teacher_temp, warmup),
        }
        if self._draws is not None:  # a CUDA graph reads the number of the step as it reads scheduled values
            values["rope_step"] = float(step)
        if config.weight_decay_end is None:
            return values
        return {**values, "weight_decay": cosine(step, horizon.weight_decay, config.weight_decay_end, total)}

    def rate_factors(self, model: nn.Module) -> Mapping[str, float]:
        """As `Task.rate_factors`: the patch embedding learns more slowly."""
        names = [name for name, _ in model.named_parameters() if name.startswith("patch_embed.")]
        return dict.fromkeys(names, self.config.patch_embed_lr_mult)

    def held_names(self, step: int, horizon: Horizon) -> frozenset[str]:
        """As `Task.held_names`: the prototypes and the student's backbone during the first epochs."""
        held = self._backbone if horizon.is_within(step, self.config.freeze_backbone_epochs) else frozenset()
        is_held = horizon.is_within(step, self.config.freeze_last_layer_epochs)
        return held | {f"{HEAD}.last_layer.weight"} if is_held else held

    @cached_property
    def _backbone(self) -> frozenset[str]:
        """The parameters of the student's backbone."""
        towers = tuple(f"{tower}." for tower in self.model.further_towers)
        return frozenset(name for name, _ in self.model.named_parameters() if not name.startswith(towers))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """As `Task.state_dict`: the centres."""
        return {part: center.clone() for part, center in self._centers.values.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """As `Task.load_state_dict`."""
        self._centers.load_state_dict(state)

    def gauges(self, context: StepContext) -> Mapping[str, torch.Tensor]:
        """As `Task.gauges`: those of collapse, of the teacher's class tokens."""
        return self._gauges.compute(context.sum, self._tp) if self._gauged_step == context.step else {}

    def concerns(self, figures: Mapping[str, float], step: int, steps_per_epoch: int) -> Mapping[str, str]:
        """As `Task.concerns`: features that collapse."""
        return collapse_concerns(figures, self.model.num_features, step, steps_per_epoch)

    def loss_on_meta(self, layers: Sequence[Layer], samples: int) -> torch.Tensor:
        """As `Task.loss_on_meta`: assignments without a centre, and as many masked patches as are expected."""
        student, teacher = (layer.last_layer for layer in layers if isinstance(layer, ProjectionHeadLayer))
        own, theirs = Prototypes(*student()), Prototypes(*teacher())

        def cross_entropy(groups: int, weights: torch.Tensor) -> torch.Tensor:
            _, in_group, in_assignment = weights.shape
            rows = own.weight.new_empty(groups, in_group, own.weight.shape[1], requires_grad=True)
            of_teacher = theirs.weight.new_empty(groups * in_assignment, theirs.weight.shape[1])
            assignment = Assignment(of_teacher, theirs, 1.0, torch.empty_like(theirs.lengths))
            return assignment_cross_entropy(rows, own, 1.0, assignment, weights)

        loss = cross_entropy(samples, crop_weights(samples, self.crops.num_local))
        if self.masks_patches:
            patches = round(NUM_GLOBAL * samples * self.model.patch_embed.num_patches * masked_share(self.config))
            loss = loss + cross_entropy(patches, torch.empty(patches, 1, 1))
        return loss

    # ---- evaluation ------------------------------------------------------------------------------------------------

    def outputs(self, context: StepContext, batch: Batch) -> torch.Tensor:
        """As `Task.outputs`: the teacher's features [B, D]."""
        return context.forward(TEACHER, [batch["images"]], batch)

    def metrics(self, device: torch.device) -> Metrics:
        """As `Task.metrics`."""
        return FeatureSpread(self.model.num_features, device)

    def write_patches(self, folder: RunFolder, *, step: int, images: torch.Tensor, tokens: torch.Tensor) -> None:
        """As `Task.write_patches`: the similarity of patches."""
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.image.mean, self.image.std))
        add_step(folder.picture(SIMILARITY), step, images * std + mean, centre_similarities(tokens))

    @classmethod
    def panels(cls, folder: RunFolder) -> Mapping[str, Sequence[Panel]]:
        """As `Task.panels`: the similarity of patches at several steps."""
        return {"Images": sheet(folder.picture(SIMILARITY), SIMILARITIES)}
