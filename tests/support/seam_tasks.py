"""Small tasks that use every part of the task seam: two coupled towers, a teacher, a state, and rates by parameter.

`--task seam_tasks:CLASS` names them.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
import torch.nn.functional as F

from ds_vit.data.field import Derived
from ds_vit.models.layers import MAIN_TOWER, chain_towers
from ds_vit.models.zoo import create_model
from ds_vit.tasks.classification.task import Classification
from ds_vit.tasks.task import Coupled, cosine


def contrastive(left, right):
    """CLIP's symmetric loss (Radford et al. 2021) at temperature 0.1; row i of both belongs together."""
    logits = 10.0 * F.normalize(left.float()) @ F.normalize(right.float()).T
    labels = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


class TwoTowers(Classification):
    """Two ViTs see an image and its mirror image; the loss couples all samples of the global batch."""

    coupled = True

    @classmethod
    def create_model(cls, spec, config, *, for_training):
        """The second tower has half the blocks."""
        whole = create_model(spec, for_training=for_training)
        kwargs = {**spec.model_kwargs, "depth": len(whole.blocks) // 2}
        whole.mirror = create_model(dataclasses.replace(spec, model_kwargs=kwargs), for_training=for_training)
        whole.further_towers = ("mirror",)
        return whole

    def chain(self, towers):
        """As `Task.chain`."""
        return chain_towers(towers.values())

    def fields(self, *, training):
        """As `Task.fields`."""
        images, targets = super().fields(training=training)
        return images, Derived("mirrored", images, lambda pixels: pixels.flip(-1)), targets

    def features(self, context, batch):
        """The features of both towers, by name."""
        inputs = {MAIN_TOWER: batch.get("images"), "mirror": batch.get("mirrored")}
        return {name: context.forward(name, [seen], batch).float() for name, seen in inputs.items()}

    def collect(self, context, batch):
        """As `Task.collect`."""
        return self.features(context, batch)

    def couple(self, context, collected):
        """As `Task.couple`."""
        names, rows = list(collected[0]), len(collected[0][MAIN_TOWER])
        own = {name: torch.cat([features[name] for features in collected]) for name in names}
        with torch.enable_grad():
            whole = {name: context.gather(features).detach().requires_grad_() for name, features in own.items()}
            loss = contrastive(*whole.values())
            gradients = torch.autograd.grad(loss, [*whole.values()])
        first = context.groups.dp_rank * len(own[MAIN_TOWER])
        pieces = [
            {name: gradient[start : start + rows] for name, gradient in zip(names, gradients, strict=True)}
            for start in range(first, first + len(own[MAIN_TOWER]), rows)
        ]
        return Coupled(loss, pieces)

    def step(self, context, batch, piece=None):
        """As `Task.step`."""
        features = self.features(context, batch)
        if piece is None:
            return contrastive(*(context.gather(of_tower) for of_tower in features.values()))
        share = sum((features[name] * piece[name]).sum() for name in features)
        return context.groups.layout.dp * context.accumulation * share


class WithTeacher(Classification):
    """A student sees an image and its mirror image; both outputs follow its own average's, in addition to labels."""

    separate_files: ClassVar = {"teacher": ("teacher.",)}
    teachers: ClassVar = {"teacher": MAIN_TOWER}

    @classmethod
    def create_model(cls, spec, config, *, for_training):
        """The teacher is a second model of the same kind, without drop-path."""
        whole = create_model(spec, for_training=for_training)
        whole.teacher = create_model(dataclasses.replace(spec, drop_path_rate=0.0), for_training=for_training)
        whole.teacher.requires_grad_(False)
        whole.further_towers = ("teacher",)
        return whole

    @classmethod
    def layers(cls, model):
        """As `Task.layers`: the student sees each image twice."""
        layers = super().layers(model)
        for layer in layers:
            if not layer.prefix:
                layer.images_per_sample = 2.0, 1.0
        return layers

    def schedules(self, step, horizon):
        """As `Task.schedules`."""
        done = step / horizon.total_steps
        return {"momentum": 0.5 + 0.5 * done, "weight_decay": 0.05 + 0.1 * done}

    def step(self, context, batch, piece=None):
        """As `Task.step`."""
        images, targets = batch["images"], batch["targets"]
        taught = context.forward("teacher", [images], batch, grad=False).float()
        views = [context.forward(MAIN_TOWER, [view], batch).float() for view in (images, images.flip(-1))]
        return F.cross_entropy(views[0], targets) + sum(10.0 * F.mse_loss(view, taught) for view in views)

    def after_update(self, context):
        """As `Task.after_update`."""
        context.update_teachers(context.schedules["momentum"])


class WithTwoTeachers(WithTeacher):
    """In addition a tower of half the depth, which sees mirror images and has its own teacher."""

    teachers: ClassVar = {"teacher": MAIN_TOWER, "mirror_teacher": "mirror"}

    @classmethod
    def create_model(cls, spec, config, *, for_training):
        """Two students, each with its teacher."""
        whole = super().create_model(spec, config, for_training=for_training)
        kwargs = {**spec.model_kwargs, "depth": len(whole.blocks) // 2}
        for name in ("mirror", "mirror_teacher"):
            half = dataclasses.replace(spec, model_kwargs=kwargs, drop_path_rate=0.0)
            setattr(whole, name, create_model(half, for_training=for_training))
        whole.mirror_teacher.requires_grad_(False)
        whole.further_towers = ("teacher", "mirror", "mirror_teacher")
        return whole

    def step(self, context, batch, piece=None):
        """As `Task.step`."""
        mirrored = [batch["images"].flip(-1)]
        taught = context.forward("mirror_teacher", mirrored, batch, grad=False).float()
        own = context.forward("mirror", mirrored, batch).float()
        return super().step(context, batch) + F.cross_entropy(own, batch["targets"]) + 10.0 * F.mse_loss(own, taught)


class WithState(Classification):
    """Classification of logits less their running mean over global batches (as DINO, Caron et al. 2021)."""

    def setup(self, context):
        """As `Task.setup`."""
        self.center = torch.zeros(self.num_classes, device=context.device)
        self.seen = []

    def step(self, context, batch, piece=None):
        """As `Task.step`."""
        logits = context.forward(MAIN_TOWER, [batch["images"]], batch).float()
        self.seen.append(context.gather(logits.detach()).mean(0))
        return F.cross_entropy(5.0 * (logits - self.center), batch["targets"])

    def after_update(self, context):
        """As `Task.after_update`."""
        self.center = 0.8 * self.center + 0.2 * torch.stack(self.seen).mean(0)
        self.seen = []

    def state_dict(self):
        """As `Task.state_dict`."""
        return {"center": self.center}

    def load_state_dict(self, state):
        """As `Task.load_state_dict`."""
        self.center = state["center"]


class WithRates(Classification):
    """The patches learn at a fifth of the rate, the head at none for three epochs, and weight decay grows."""

    HELD_EPOCHS, PATCH_FACTOR, WEIGHT_DECAY_END = 3, 0.2, 0.4

    def schedules(self, step, horizon):
        """As `Task.schedules`."""
        return {"weight_decay": cosine(step, horizon.weight_decay, self.WEIGHT_DECAY_END, horizon.total_steps)}

    def rate_factors(self, model):
        """As `Task.rate_factors`."""
        names = [name for name, _ in model.named_parameters()]
        return {name: self.PATCH_FACTOR for name in names if name.startswith("patch_embed.")}

    def held_names(self, step, horizon):
        """As `Task.held_names`."""
        return frozenset({"head.weight", "head.bias"} if horizon.is_within(step, self.HELD_EPOCHS) else ())
