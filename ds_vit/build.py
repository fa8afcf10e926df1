"""From a plan to a running engine: layers, initial values, optimizer, loss, DeepSpeed."""

from __future__ import annotations

from collections.abc import Callable

import deepspeed
import torch
import torch.utils.checkpoint

from ds_vit.engine import PlainEngine
from ds_vit.losses import build_loss
from ds_vit.models import SequentialViT, freeze, initialise, no_weight_decay_names, take_apart, timm_names
from ds_vit.optim.build import build_optimizer, parameter_groups
from ds_vit.prepare import Plan


def build_engine(plan: Plan, device: torch.device) -> PlainEngine:
    """The plan's model, initialised and wrapped by DeepSpeed (a collective).

    Under ZeRO-3 each layer is partitioned as soon as it is filled, so that no rank holds the model whole.
    """
    layers = take_apart(plan.model)
    on_layer: Callable[[torch.nn.Module], None] | None = None
    if plan.stage == 3:

        def on_layer(layer: torch.nn.Module) -> None:
            deepspeed.zero.Init(module=layer, config_dict_or_path=dict(plan.deepspeed))

    initialise(
        plan.model,
        layers,
        seed=plan.config.seed,
        device=device,
        # DeepSpeed casts a whole model itself, and expects a partitioned one to be in its type already.
        dtype=getattr(torch, plan.precision.compute) if plan.stage == 3 else torch.float32,
        checkpoint=plan.initial_checkpoint,
        on_layer=on_layer,
    )
    model = SequentialViT(
        layers,
        checkpoint_interval=plan.checkpointing.interval,
        checkpoint_function=_checkpoint_on_cpu if plan.checkpointing.cpu else None,
    )
    freeze(model, plan.frozen)
    names = timm_names(model)
    parameters = [(names[local], p) for local, p in model.named_parameters()]
    cls, arguments = plan.optimizer
    groups = parameter_groups(parameters, plan.weight_decay, no_weight_decay_names(plan.model))
    # With the optimizer offloaded, its step runs on the CPU.
    offloaded = (plan.deepspeed.get("zero_optimization", {}).get("offload_optimizer") or {}).get("device") == "cpu"
    optimizer = build_optimizer(cls, groups, arguments, torch.device("cpu") if offloaded else device)
    loss = build_loss(
        soft_targets=plan.mix.active,
        smoothing=plan.config.smoothing,
        bce=plan.config.bce_loss,
        bce_sum=plan.config.bce_sum,
        bce_target_thresh=plan.config.bce_target_thresh,
        multi_label=plan.train_source.multi_label,
    )
    return PlainEngine(model, optimizer, loss, plan.deepspeed)


def _checkpoint_on_cpu(function: Callable, *tensors: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """Activation checkpointing whose saved inputs wait in host memory."""
    with torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available()):
        return torch.utils.checkpoint.checkpoint(function, *tensors, use_reentrant=False, preserve_rng_state=False)
