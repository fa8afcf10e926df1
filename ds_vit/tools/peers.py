"""Training steps without DeepSpeed, as a good engineer writes them with timm, open_clip, lightly and torch."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_vit.engine.patches import replaced
from ds_vit.fault_tolerance.errors import UserError, first_line
from ds_vit.models import compiled
from ds_vit.tasks.clip.export import open_clip_text
from ds_vit.tasks.metrics import Batch
from ds_vit.tasks.task import Task
from ds_vit.training.run import Run

COMPILED = "-compiled"
"""The end of a peer's name: its blocks are compiled, or all of timm's model."""


def _compile_blocks(*stacks: Iterable[nn.Module]) -> None:
    """Compile each block of these stacks in place, as one graph without a break."""
    for block in itertools.chain(*stacks):
        block.compile(fullgraph=True, backend=compiled.BACKEND)


def own_linear() -> contextlib.AbstractContextManager[None]:
    """torch's linear map for the block: at ZeRO-3 under autocast an engine of ours replaces the whole process's."""
    return replaced(nn.functional, "linear", torch._C._nn.linear)


def _fsdp2(model: nn.Module, half: bool) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if half else None
    options: dict[str, Any] = {"mp_policy": policy} if policy else {}
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


_WRAPPERS: dict[str, Callable[[nn.Module, bool], nn.Module]] = {
    "timm": lambda model, half: model,
    "ddp": lambda model, half: nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True),
    "fsdp2": _fsdp2,
}


def _peers_of(task: Task) -> tuple[str, ...]:
    """As the class of the task states them: a class derived from another may train something else."""
    return vars(type(task)).get("peers", ())


def default_peers(task: Task, world_size: int) -> tuple[str, ...]:
    """The peer of a task on so many ranks without --against; none if no peer trains as the task does."""
    able = _peers_of(task)
    return ("ddp",) if "ddp" in able and world_size > 1 else able[:1]


def check_comparable(run: Run, peers: Sequence[str]) -> None:
    """Refuse peers that there are not, and what ours would do and the peers would not.

    Raises:
        UserError: names it.
    """
    task, precision, world_size = run.model.task, run.engine.precision.name, run.layout.world_size
    config, able = task.config, [f"{name}{end}" for name in _peers_of(task) for end in ("", COMPILED)]
    if wrong := [peer for peer in peers if peer not in able]:
        names = ", ".join(able) or "none"
        raise UserError(f"bench step: {', '.join(wrong)} cannot train --task {task.name}; choose among {names}")
    for name in peers:
        if world_size > 1 and name.startswith("timm"):
            raise UserError(f"--against {name} is one process, and the launcher started {world_size}; use ddp or fsdp2")
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
    if (cls := run.training[0].cls) not in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        raise UserError(f"bench step: the peers take Adam, AdamW or SGD, and the JSON says {cls.__name__}")


def peer_step(name: str, run: Run, batch: Batch) -> Callable[[], None]:
    """An optimizer step with the engine's model, optimizer, precision and clipping (a collective of all ranks).

    Fused where torch has that for the optimizer; 16 bits by autocast, or by FSDP2's own policy.

    Args:
        name: of a peer of the task, with `COMPILED` or without.
        run: of this rank.
        batch: of this rank for the whole step: fp32 "images" [B, C, height, width], and "targets" int64 [B] or "texts"
            int64 [B, L]; or crops, as `--task dino` has them.

    Raises:
        UserError: the peer's library is not installed.
    """
    kind = name.removesuffix(COMPILED)
    make = {"open_clip": _open_clip_step, "lightly": _lightly_step}.get(kind, partial(_classification_step, kind))
    try:
        step = make(run, batch, name != kind)
    except ImportError as error:
        package = {"open_clip": "open_clip_torch"}.get(kind, kind)
        raise UserError(f"--against {kind} needs pip install {package} ({first_line(error)})") from None

    def with_own_linear() -> None:
        with own_linear():
            step()

    return with_own_linear


def _classification_step(kind: str, run: Run, batch: Batch, compiles: bool) -> Callable[[], None]:
    import timm

    config, half = run.model.task.config, run.engine.precision.name != "fp32"
    options: dict[str, Any] = {"drop_path_rate": config.drop_path, "num_classes": run.model.task.num_classes}
    options |= {"drop_rate": config.drop, **config.model_kwargs}
    if run.model.spec.img_size:
        options["img_size"] = run.model.spec.img_size
    images, targets = batch["images"], batch["targets"]
    model = timm.create_model(config.model, **options).to(images.device).train()
    if compiles and kind == "timm":
        model.compile(backend=compiled.BACKEND)
    elif compiles:
        _compile_blocks(model.blocks)
    peer = _WRAPPERS[kind](model, half)
    timms, update = _optimizer_of(peer, run)
    autocast = half and kind != "fsdp2"

    def step() -> None:
        with torch.autocast(images.device.type, torch.bfloat16, enabled=autocast):
            logits = peer(images)
        loss = nn.functional.cross_entropy(logits.float(), targets, label_smoothing=config.smoothing)
        timms.zero_grad()
        loss.backward()
        update()

    return step


def _optimizer_of(model: nn.Module, run: Run) -> tuple[torch.optim.Optimizer, Callable[[], None]]:
    """The engine's optimizer, fused, with weight decay of matrices only; and its step on clipped gradients."""
    import timm

    ours, _ = run.training
    groups = timm.optim.param_groups_weight_decay(model, ours.weight_decay)
    optimizer = ours.cls(groups, **{**ours.arguments, "lr": ours.lr, "fused": True})

    def update() -> None:
        if ours.clip:
            nn.utils.clip_grad_norm_(model.parameters(), ours.clip)
        optimizer.step()

    return optimizer, update


def _open_clip_model(run: Run) -> nn.Module:
    """open_clip's model of the engine's towers, on the CPU."""
    from open_clip.model import CustomTextCLIP

    whole, spec = run.model.whole, run.model.spec
    image_settings = {
        "timm_model_name": spec.name,
        "timm_pool": "",
        "timm_drop_path": spec.drop_path_rate,
        "image_size": run.model.task.image.img_size,
    }
    scale, *bias = whole.text.initial_logits
    return CustomTextCLIP(
        whole.common_dim,
        image_settings,
        open_clip_text(whole),
        init_logit_scale=scale,
        init_logit_bias=bias[0] if bias else None,
        output_dict=True,
    )


def _open_clip_step(run: Run, batch: Batch, compiles: bool) -> Callable[[], None]:
    """A step of open_clip's model, loss and accumulation: it caches the features of all micro-batches, and compares
    each micro-batch's, computed again, with the cache (`--accum-freq`, `--local-loss`, `--gather-with-grad`).
    """
    model, device = _open_clip_model(run), batch["images"].device
    from open_clip.loss import ClipLoss, SigLipLoss

    world, half = dist.get_world_size(), run.engine.precision.name != "fp32"
    ranks = {"rank": dist.get_rank(), "world_size": world}
    has_bias = len(run.model.whole.text.initial_logits) > 1
    loss = SigLipLoss(**ranks) if has_bias else ClipLoss(local_loss=True, gather_with_grad=True, **ranks)
    peer = model.to(device).train()
    if compiles:
        _compile_blocks(model.visual.trunk.blocks, model.text.transformer.resblocks)
    if world > 1:
        peer = _WRAPPERS["ddp"](peer, half)
    torchs, update = _optimizer_of(model, run)
    pieces = run.batch.accumulation
    micro_batches = list(zip(batch["images"].chunk(pieces), batch["texts"].chunk(pieces), strict=True))

    def outputs(number: int) -> dict[str, torch.Tensor]:
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            return peer(*micro_batches[number])

    def backward(of_step: Mapping[str, torch.Tensor]) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            value = loss(**of_step)
        value.backward()

    def accumulate() -> None:
        names = ("image_features", "text_features")
        with torch.no_grad():
            cached = [outputs(number) for number in range(pieces)]
        for number in range(pieces):
            last = number == pieces - 1
            with contextlib.nullcontext() if last or world == 1 else peer.no_sync():
                own = outputs(number)
                parts = [*cached[:number], own, *cached[number + 1 :]]
                backward(own | {name: torch.cat([part[name] for part in parts]) for name in names})

    def step() -> None:
        torchs.zero_grad()
        if pieces == 1:
            backward(outputs(0))
        else:
            accumulate()
        update()
        with torch.no_grad():
            model.logit_scale.clamp_(0.0, math.log(100.0))

    return step


class _MultiCrop(nn.Module):
    """A timm ViT and lightly's head, which a step calls once for crops of all sizes.

    Args:
        config: of the run.
        img_size: of the ViT; its own where None.
        drop_path_rate: of the ViT.
    """

    def __init__(self, config: Any, img_size: Any, drop_path_rate: float) -> None:
        super().__init__()
        import timm
        from lightly.models.modules import DINOProjectionHead

        options: dict[str, Any] = {"img_size": img_size} if img_size else {}
        options |= {"drop_path_rate": drop_path_rate, "global_pool": "token", **config.model_kwargs}
        self.backbone = timm.create_model(config.model, num_classes=0, dynamic_img_size=True, **options)
        widths = (self.backbone.num_features, config.head_hidden_dim, config.head_bottleneck_dim)
        self.head = DINOProjectionHead(*widths, config.prototypes)

    def forward(self, crops: Sequence[torch.Tensor]) -> torch.Tensor:
        """Crops [B, v, 3, h, w] of each size -> logits [the sum of all B * v, K], crop by crop."""
        return self.head(torch.cat([self.backbone(of_size.transpose(0, 1).flatten(0, 1)) for of_size in crops]))


def _lightly_step(run: Run, batch: Batch, compiles: bool) -> Callable[[], None]:
    """A step of DINO with lightly's head, loss and momentum."""
    from lightly.loss import DINOLoss
    from lightly.models.utils import update_momentum

    config = run.model.task.config
    half, device = run.engine.precision.name != "fp32", batch["images"].device
    size = run.model.spec.img_size
    student = _MultiCrop(config, size, config.drop_path).to(device).train()
    teacher = _MultiCrop(config, size, 0.0).to(device)
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)
    if compiles:
        _compile_blocks(student.backbone.blocks, teacher.backbone.blocks)
    peer: nn.Module = student
    if dist.get_world_size() > 1:
        peer = _WRAPPERS["ddp"](student, half)
    torchs, update = _optimizer_of(student, run)
    loss = DINOLoss(config.prototypes, student_temp=config.student_temp).to(device)
    samples, crops = len(batch["images"]), [batch[name] for name in ("images", "local_images") if name in batch]

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            with torch.no_grad():
                taught = teacher(crops[:1])
            given = peer(crops)
        value = loss(
            list(taught.float().split(samples)),
            list(given.float().split(samples)),
            teacher_temp=config.teacher_temp,
        )
        torchs.zero_grad()
        value.backward()
        update()
        update_momentum(student, teacher, config.teacher_momentum)

    return step
