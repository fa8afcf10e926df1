"""Training steps without DeepSpeed next to those of a run: which its task has, and whether they can be compared."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from ds_vit.engine.patches import replaced
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.optim.settings import Optimizer
from ds_vit.tasks.metrics import Batch
from ds_vit.tasks.peers import Peer, PeerRun
from ds_vit.tasks.task import Task
from ds_vit.training.run import Run

COMPILED = "-compiled"
"""The end of a peer's name: its blocks are compiled, or all of timm's model."""


def own_linear() -> contextlib.AbstractContextManager[None]:
    """torch's linear map for the block: at ZeRO-3 under autocast an engine of ours replaces the whole process's."""
    return replaced(nn.functional, "linear", torch._C._nn.linear)


def _peers_of(task: Task) -> Mapping[str, Peer]:
    """As the class of the task states them: a class derived from another may train something else."""
    return vars(type(task)).get("peers", {})


def default_peer(task: Task, world_size: int) -> str:
    """The first peer of a task that trains on so many ranks.

    Raises:
        UserError: there is none.
    """
    able = (name for name, peer in _peers_of(task).items() if peer.spans_ranks or world_size == 1)
    if (first := next(able, None)) is None:
        ranks = f" on {world_size} ranks" * (world_size > 1)
        raise UserError(f"bench step: there is no peer that trains as this run of --task {task.name}{ranks}")
    return first


def check_comparable(run: Run, peers: Sequence[str]) -> None:
    """Refuse peers that there are not, and what ours would do and the peers would not.

    Raises:
        UserError: names it.
    """
    task, world_size, precision = run.model.task, run.layout.world_size, run.engine.precision.name
    config, able = task.config, _peers_of(task)
    if wrong := [peer for peer in peers if peer.removesuffix(COMPILED) not in able]:
        names = ", ".join(f"{name}{end}" for name in able for end in ("", COMPILED)) or "none"
        raise UserError(f"bench step: {', '.join(wrong)} cannot train --task {task.name}; choose among {names}")
    several = [name for name, peer in able.items() if peer.spans_ranks]
    for name in peers:
        if world_size > 1 and name.removesuffix(COMPILED) not in several:
            raise UserError(
                f"--against {name} is one process, and the launcher started {world_size}; use {' or '.join(several)}"
            )
    ours_alone = {
        "--freeze": config.freeze,
        "--linear-probe": config.linear_probe,
        "--bce-loss": config.bce_loss,
        "--layer-decay": config.layer_decay not in (None, 1.0),
        "--model-ema": config.model_ema,
    }
    if found := [flag for flag, is_given in ours_alone.items() if is_given]:
        raise UserError(f"bench step: the peers know nothing of {', '.join(found)}; drop it")
    if reason := task.differs_from_peers():
        raise UserError(f"bench step: {reason}")
    if "fp16" in precision:
        raise UserError(f"bench step: the peers compute in fp32 or bf16, and the JSON says {precision}")
    assert run.optimizer is not None, "training has an optimizer"
    if (cls := run.optimizer.cls) not in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        raise UserError(f"bench step: the peers take Adam, AdamW or SGD, and the JSON says {cls.__name__}")


def peer_step(name: str, run: Run, batch: Batch) -> Callable[[], None]:
    """An optimizer step with the engine's model, optimizer, precision and clipping (a collective of all ranks).

    Fused where torch has that for the optimizer; 16 bits by autocast, or by FSDP2's own policy.

    Args:
        name: of a peer of the run's task, with `COMPILED` or without.
        run: of this rank.
        batch: of this rank for the whole step: the fields of the task, images in fp32.
    """
    step = _peers_of(run.model.task)[name.removesuffix(COMPILED)].make(peer_run(run, name.endswith(COMPILED)), batch)

    def with_own_linear() -> None:
        with own_linear():
            step()

    return with_own_linear


def peer_run(run: Run, compiles: bool) -> PeerRun:
    """What a peer takes of a run."""
    model, optimizer = run.model, run.optimizer
    assert optimizer is not None, "training has an optimizer"
    return PeerRun(
        config=model.task.config,
        spec=model.spec,
        whole=model.whole,
        image=model.image,
        optimizer_of=partial(_optimizer_of, optimizer=optimizer),
        clip=optimizer.clip,
        half=run.engine.precision.name != "fp32",
        accumulation=run.batch.accumulation,
        compiles=compiles,
    )


def _optimizer_of(model: nn.Module, optimizer: Optimizer) -> torch.optim.Optimizer:
    """The engine's optimizer, fused, with weight decay of matrices only."""
    import timm

    groups = timm.optim.param_groups_weight_decay(model, optimizer.weight_decay)
    return optimizer.cls(groups, **{**optimizer.arguments, "lr": optimizer.lr, "fused": True})
