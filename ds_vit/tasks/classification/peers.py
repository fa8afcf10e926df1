"""Training steps of a classifier without DeepSpeed: timm's model in one process, under DDP and under FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from ds_vit.models import compiled
from ds_vit.tasks.metrics import Batch
from ds_vit.tasks.peers import Peer, PeerRun, compile_blocks, replicated


def _alone(model: nn.Module, half: bool) -> nn.Module:
    return model


def _ddp(model: nn.Module, half: bool) -> nn.Module:
    return replicated(model)


def _fsdp2(model: nn.Module, half: bool) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if half else None
    options: dict[str, Any] = {"mp_policy": policy} if policy else {}
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def _step(run: PeerRun, batch: Batch, wrap: Callable[[nn.Module, bool], nn.Module]) -> Callable[[], None]:
    """A step of timm's model, wrapped, with cross-entropy."""
    import timm

    config = run.config
    options: dict[str, Any] = {"drop_path_rate": config.drop_path, "num_classes": run.spec.num_classes}
    options |= {"drop_rate": config.drop, **config.model_kwargs}
    if run.spec.img_size:
        options["img_size"] = run.spec.img_size
    images, targets = batch["images"], batch["targets"]
    model = timm.create_model(config.model, **options).to(images.device).train()
    if run.compiles and wrap is _alone:
        model.compile(backend=compiled.BACKEND)
    elif run.compiles:
        compile_blocks(model.blocks)
    peer = wrap(model, run.half)
    timms = run.optimizer_of(peer)
    autocast = run.half and wrap is not _fsdp2

    def step() -> None:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=autocast):
            logits = peer(images)
        loss = nn.functional.cross_entropy(logits.float(), targets, label_smoothing=config.smoothing)
        timms.zero_grad()
        loss.backward()
        if run.clip:
            nn.utils.clip_grad_norm_(peer.parameters(), run.clip)
        timms.step()

    return step


PEERS = {
    "timm": Peer(partial(_step, wrap=_alone), spans_ranks=False),
    "ddp": Peer(partial(_step, wrap=_ddp)),
    "fsdp2": Peer(partial(_step, wrap=_fsdp2)),
}
