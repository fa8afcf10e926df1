"""Ways around DeepSpeed that need no ranks to be tried."""

from types import SimpleNamespace

import pytest
import torch
from deepspeed.runtime import utils
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ds_vit.engine.workarounds import advance_where_applied, clip_by_global_norm, unscale_and_clip
from ds_vit.tools.counting import count_step


def test_a_scheduler_waits_for_a_step_that_was_turned_down():
    # Catches: learning rates of two layouts that part after a skipped step; a resume that cannot set the scheduler.
    steps, applied = [], True
    scheduler = SimpleNamespace(step=lambda at=None: steps.append(at))
    advance_where_applied(scheduler, lambda: applied)
    scheduler.step()
    applied = False
    scheduler.step()
    scheduler.step(7)
    assert steps == [None, 7]


def gradients(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(size, generator=generator).to(dtype) for size in (7, 64, 1)]


@pytest.mark.parametrize("norm", [1e-3, 0.99999, 1.0, 1.0001, 37.5])
def test_bf16_optimizers_clipping_is_deepspeeds(norm):
    """Another coefficient, one that scales small gradients up, or a wait for the device."""
    for dtype in (torch.float32, torch.bfloat16):
        theirs, ours = gradients(dtype), gradients(dtype)
        utils.clip_tensors_by_global_norm(theirs, 1.0, torch.tensor(norm))
        counts = count_step(lambda: clip_by_global_norm(ours, 1.0, torch.tensor(norm)))  # noqa: B023
        assert all(map(torch.equal, ours, theirs))
        assert counts.waits == 0


@pytest.mark.parametrize("scale", [1.0, 1024.0])
@pytest.mark.parametrize("clip", [0.0, 1.0])
@pytest.mark.parametrize("norm", [1e-3, 1.0, 37.5, float("inf")])
def test_zeros_clipping_is_deepspeeds(norm, clip, scale):
    """The norm is times the loss scale, the gradients too; one that is not finite leaves nothing of them."""
    optimizer = SimpleNamespace(clip_grad=clip, loss_scale=scale, device="cpu")
    theirs, ours, total = gradients(), gradients(), torch.tensor(norm * scale)
    DeepSpeedZeroOptimizer.unscale_and_clip_grads(optimizer, theirs, total)
    counts = count_step(lambda: unscale_and_clip(optimizer, ours, total))
    assert all(map(torch.equal, ours, theirs))
    assert counts.waits == 0
