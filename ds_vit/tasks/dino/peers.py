"""Training steps of DINO without DeepSpeed: lightly's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ds_vit.fault_tolerance.errors import UserError, first_line
from ds_vit.tasks.metrics import Batch
from ds_vit.tasks.peers import Peer, PeerRun, compile_blocks, replicated


class MultiCrop(nn.Module):
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
        options |= {"drop_path_rate": drop_path_rate, **config.model_kwargs}
        self.backbone = timm.create_model(config.model, num_classes=0, dynamic_img_size=True, **options)
        widths = (self.backbone.num_features, config.head_hidden_dim, config.head_bottleneck_dim)
        self.head = DINOProjectionHead(*widths, config.prototypes)

    def forward(self, crops: Sequence[torch.Tensor]) -> torch.Tensor:
        """Crops [B, v, 3, h, w] of each size -> logits [the sum of all B * v, K], crop by crop."""
        return self.head(torch.cat([self.backbone(of_size.transpose(0, 1).flatten(0, 1)) for of_size in crops]))


def _step(run: PeerRun, batch: Batch) -> Callable[[], None]:
    """A step of DINO with lightly's head, loss and momentum.

    Raises:
        UserError: lightly is not installed.
    """
    try:
        from lightly.loss import DINOLoss
        from lightly.models.utils import update_momentum
    except ImportError as error:
        raise UserError(f"--against lightly needs pip install lightly ({first_line(error)})") from None
    config, device, size = run.config, batch["images"].device, run.spec.img_size
    student = MultiCrop(config, size, config.drop_path).to(device).train()
    teacher = MultiCrop(config, size, 0.0).to(device)
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)
    if run.compiles:
        compile_blocks(student.backbone.blocks, teacher.backbone.blocks)
    peer: nn.Module = student
    if dist.get_world_size() > 1:
        peer = replicated(student)
    torchs = run.optimizer_of(student)
    loss = DINOLoss(config.prototypes, student_temp=config.student_temp).to(device)
    samples, crops = len(batch["images"]), [batch[name] for name in ("images", "local_images") if name in batch]

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=run.half):
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
        if run.clip:
            nn.utils.clip_grad_norm_(student.parameters(), run.clip)
        torchs.step()
        update_momentum(student, teacher, config.teacher_momentum)

    return step


PEERS = {"lightly": Peer(_step)}
