"""Training steps of CLIP and SigLIP without DeepSpeed: open_clip's."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from ds_vit.fault_tolerance.errors import UserError, first_line
from ds_vit.tasks.clip.export import open_clip_text
from ds_vit.tasks.metrics import Batch
from ds_vit.tasks.peers import Peer, PeerRun, compile_blocks, replicated


def open_clip_model(run: PeerRun) -> nn.Module:
    """open_clip's model of the engine's towers, on the CPU.

    Raises:
        UserError: open_clip is not installed.
    """
    try:
        from open_clip.model import CustomTextCLIP
    except ImportError as error:
        raise UserError(f"--against open_clip needs pip install open_clip_torch ({first_line(error)})") from None
    whole, spec = run.whole, run.spec
    image_settings = {
        "timm_model_name": spec.name,
        "timm_pool": "",
        "timm_drop_path": spec.drop_path_rate,
        "image_size": run.image.img_size,
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


def _step(run: PeerRun, batch: Batch) -> Callable[[], None]:
    """A step of open_clip's model, loss and accumulation: it caches the features of all micro-batches, and compares
    each micro-batch's, computed again, with the cache (`--accum-freq`, `--local-loss`, `--gather-with-grad`).
    """
    model, device = open_clip_model(run), batch["images"].device
    from open_clip.loss import ClipLoss, SigLipLoss

    world = dist.get_world_size()
    ranks = {"rank": dist.get_rank(), "world_size": world}
    has_bias = len(run.whole.text.initial_logits) > 1
    loss = SigLipLoss(**ranks) if has_bias else ClipLoss(local_loss=True, gather_with_grad=True, **ranks)
    peer = model.to(device).train()
    if run.compiles:
        compile_blocks(model.visual.trunk.blocks, model.text.transformer.resblocks)
    if world > 1:
        peer = replicated(peer)
    torchs = run.optimizer_of(model)
    pieces = run.accumulation
    micro_batches = list(zip(batch["images"].chunk(pieces), batch["texts"].chunk(pieces), strict=True))

    def outputs(number: int) -> dict[str, torch.Tensor]:
        with torch.autocast(device.type, torch.bfloat16, enabled=run.half):
            return peer(*micro_batches[number])

    def backward(of_step: Mapping[str, torch.Tensor]) -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=run.half):
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
        if run.clip:
            nn.utils.clip_grad_norm_(peer.parameters(), run.clip)
        torchs.step()
        with torch.no_grad():
            model.logit_scale.clamp_(0.0, math.log(100.0))

    return step


PEERS = {"open_clip": Peer(_step)}
