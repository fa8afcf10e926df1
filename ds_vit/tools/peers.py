"""Training steps without DeepSpeed, as a good engineer writes them with timm and torch: what ours are compared with."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import nn

from ds_vit.fault_tolerance.errors import UserError
from ds_vit.training.build_engine import EngineConfig


def _compiled(model: nn.Module, half: bool) -> nn.Module:
    model.compile()
    return model


def _fsdp2(model: nn.Module, half: bool) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if half else None
    options: dict[str, Any] = {"mp_policy": policy} if policy else {}
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


_WRAPPERS: dict[str, Callable[[nn.Module, bool], nn.Module]] = {
    "timm": lambda model, half: model,
    "timm-compiled": _compiled,
    "ddp": lambda model, half: nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True),
    "fsdp2": _fsdp2,
}
PEERS = tuple(_WRAPPERS)


def check_peer(name: str, world_size: int) -> None:
    """Refuse a peer that is none, or that trains on one rank where there are several.

    Raises:
        UserError: names those that there are.
    """
    if name not in PEERS:
        raise UserError(f"--against {name}: there is no such peer; choose among {', '.join(PEERS)}")
    if world_size > 1 and name in ("timm", "timm-compiled"):
        raise UserError(f"--against {name} is one process, and the launcher started {world_size}; use ddp or fsdp2")


@contextlib.contextmanager
def own_linear() -> Iterator[None]:
    """torch's linear map, for the whole block: at stage 3 DeepSpeed puts one of its own, two operations for one, in
    place of the whole process's."""
    with mock.patch.object(nn.functional, "linear", torch._C._nn.linear):
        yield


def check_comparable(engine: EngineConfig) -> None:
    """Refuse what ours would do and the peers would not.

    Raises:
        UserError: names it.
    """
    config, precision = engine.model.task.config, engine.precision.name
    ours_alone = {
        "--freeze": config.freeze,
        "--linear-probe": config.linear_probe,
        "--bce-loss": config.bce_loss,
        "--layer-decay": config.layer_decay not in (None, 1.0),
        "--model-ema": config.model_ema,
        "--task": config.task != "classification",
    }
    if found := [flag for flag, is_given in ours_alone.items() if is_given]:
        raise UserError(f"bench step: the peers know nothing of {', '.join(found)}; drop it")
    if "fp16" in precision:
        raise UserError(f"bench step: the peers compute in fp32 or bf16, and the JSON says {precision}")
    assert engine.optimizer is not None, "training has an optimizer"
    if (cls := engine.optimizer.cls) not in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        raise UserError(f"bench step: the peers take Adam, AdamW or SGD, and the JSON says {cls.__name__}")


def peer_step(name: str, engine: EngineConfig, images: torch.Tensor, targets: torch.Tensor) -> Callable[[], None]:
    """An optimizer step with the engine's model, optimizer, precision and clipping (a collective of all ranks).

    Fused where torch has that for the optimizer; 16 bits by autocast, or by FSDP2's own policy.

    Args:
        name: of `PEERS`.
        engine: of a run of classification.
        images: of this rank, fp32 [B, C, height, width].
        targets: int64 [B].
    """
    import timm

    optimizer, half = engine.optimizer, engine.precision.name != "fp32"
    assert optimizer is not None, "training has an optimizer"
    config = engine.model.task.config
    options: dict[str, Any] = {"drop_path_rate": config.drop_path, "num_classes": config.num_classes}
    options |= {"drop_rate": config.drop, **config.model_kwargs}
    if config.img_size:
        options["img_size"] = config.img_size
    model = timm.create_model(config.model, **options).to(images.device).train()
    peer = _WRAPPERS[name](model, half)
    groups = timm.optim.param_groups_weight_decay(peer, optimizer.weight_decay)
    timms = optimizer.cls(groups, **{**optimizer.arguments, "lr": optimizer.lr, "fused": True})
    autocast = half and name != "fsdp2"

    def step() -> None:
        with own_linear():
            with torch.autocast(images.device.type, torch.bfloat16, enabled=autocast):
                logits = peer(images)
            loss = nn.functional.cross_entropy(logits.float(), targets, label_smoothing=config.smoothing)
            timms.zero_grad()
            loss.backward()
        if optimizer.clip:
            nn.utils.clip_grad_norm_(peer.parameters(), optimizer.clip)
        timms.step()

    return step
