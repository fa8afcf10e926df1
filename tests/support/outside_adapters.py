"""A task from outside: a classifier that is fine-tuned by low-rank adapters (LoRA), its own weights frozen.

Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models", https://arxiv.org/abs/2106.09685.
"""

from __future__ import annotations

import math
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn

from ds_vit.config.flag import WEIGHTS, Settings, flag
from ds_vit.models.keyed_drop import convert
from ds_vit.models.layers import block_stacks
from ds_vit.models.linear import Linear
from ds_vit.tasks.classification.task import Classification


class LoraLinear(Linear):
    """x · weight + alpha / rank · (x · lora_a) · lora_b."""

    outputs: ClassVar = {**Linear.outputs, "lora_b": 0}
    inputs: ClassVar = {**Linear.inputs, "lora_a": 1}
    added: ClassVar = ("lora_a", "lora_b")
    scale: float

    def init_weights(self):
        """Draw one matrix; the other one is zero."""
        nn.init.uniform_(self.lora_a, -1 / math.sqrt(self.in_features), 1 / math.sqrt(self.in_features))
        nn.init.zeros_(self.lora_b)

    def product(self, x):
        """As `Linear.product`."""
        return super().product(x) + self.scale * F.linear(F.linear(x, self.lora_a), self.lora_b)

    @torch.no_grad()
    def fold(self):
        """As `Linear.fold`."""
        self.weight += self.scale * self.lora_b @ self.lora_a
        del self.lora_a, self.lora_b
        super().fold()


def add_adapters(model, rank, alpha=8.0):
    """Give each linear map of the blocks an adapter, and freeze all else but the classifier."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("head."))
    for stack in block_stacks(model).values():
        for linear in [module for module in stack.modules() if isinstance(module, nn.Linear)]:
            convert(linear, LoraLinear, scale=alpha / rank)
            linear.lora_a = nn.Parameter(linear.weight.new_empty(rank, linear.in_features))
            linear.lora_b = nn.Parameter(linear.weight.new_empty(linear.out_features, rank))
    return model


class LoraSettings(Settings, scope=WEIGHTS):
    """The task's flags."""

    lora_rank: int = flag(3, "rank of the adapters")


class Adapted(Classification):
    """A classifier with adapters."""

    settings = (LoraSettings,)

    @classmethod
    def create_model(cls, spec, config, *, for_training):
        """As `Task.create_model`."""
        return add_adapters(super().create_model(spec, config, for_training=for_training), config.lora_rank)
