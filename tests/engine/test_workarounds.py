"""Patches of DeepSpeed that can be tested without several ranks."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from curves import train_main
from deepspeed.runtime import utils
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from project import ROOT
from runs import ONE_BLOCK

from ds_vit.engine.patches.norms import clip_by_global_norm, grad_norm, mask_nonfinite, unscale_and_clip
from ds_vit.engine.patches.zero import hold_scheduler_on_skipped_steps
from ds_vit.tools.counting import count_step


def test_a_scheduler_waits_for_a_step_that_was_turned_down():
    # Catches: learning rates of two layouts that part after a skipped step; a resume that cannot set the scheduler.
    steps, applied = [], True
    scheduler = SimpleNamespace(step=lambda at=None: steps.append(at))
    hold_scheduler_on_skipped_steps(scheduler, lambda: applied)
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


@pytest.mark.parametrize("tp_rank", [0, 1])
@pytest.mark.parametrize("largest", [1.0, float("nan")])
def test_zeros_norm_is_deepspeeds(tp_rank, largest):
    """Digits lost in a large gradient; padding, a pipeline's second copy or another rank's parameter that counts."""
    grads = [torch.randn(size, generator=torch.Generator().manual_seed(size)) for size in (3_000_000, 64, 7, 5, 1)]
    grads[0][0] = largest
    grads[-1]._zero_padding = True
    params = [SimpleNamespace(model_parallel=True), SimpleNamespace(), SimpleNamespace(ds_pipe_replicated=True)]
    params.append(SimpleNamespace(tensor_model_parallel=True))
    optimizer = SimpleNamespace(model_parallel_rank=tp_rank, dp_process_group=None, device="cpu")
    optimizer._model_parallel_all_reduce = lambda tensor, op: None
    with mock.patch("torch.distributed.all_reduce"), mock.patch("deepspeed.comm.all_reduce"):
        theirs = DeepSpeedZeroOptimizer.get_grad_norm_direct(optimizer, grads, params)
        ours = []
        counts = count_step(lambda: ours.append(grad_norm(optimizer, grads, params)))
    torch.testing.assert_close(ours[0], theirs, rtol=1e-6, atol=0)
    assert counts.by_name["_foreach_norm"] == 1


@pytest.mark.parametrize("value", [3.5, float("nan"), float("inf"), float("-inf")])
def test_mask_of_nonfinite_norms_equals_deepspeeds(value):
    # Catches: another mark for an invalid norm; a constant that is created on the host.
    theirs, ours = torch.tensor(value), torch.tensor(value)
    utils.mask_nan_or_inf_with_val_inplace(theirs, device="cpu")
    mask_nonfinite(ours)
    assert torch.equal(ours, theirs)


def sums_of_nobody(more):
    """On a rank: the bytes that ZeRO-0's sums of gradients copied in a step, and whether its gradients were there."""
    import deepspeed

    from ds_vit.config.deepspeed_rules import sums_are_plain
    from ds_vit.engine.patches.zero import skip_reduction_of_one_rank

    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"used": torch.nn.Linear(4, 4), "unused": torch.nn.Linear(2, 2)})
    model.forward = model["used"].forward
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, **more}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config, dist_init_required=False
    )
    if sums_are_plain(config):
        skip_reduction_of_one_rank(engine)
    loss = engine(torch.ones(1, 4)).sum()
    counts = count_step(lambda: engine.backward(loss))
    zeros = torch.equal(model["unused"].weight.grad, torch.zeros(2, 2))
    return counts.by_name.get("cat", 0), torch.equal(model["used"].weight.grad, torch.ones(4, 4)), zeros


@pytest.mark.parametrize(("more", "copied"), [({}, 0), ({"prescale_gradients": True}, 1)])
def test_one_rank_sums_over_nobody(ranks, more, copied):
    """All gradients in a bucket and back, for a sum of one; a sum that the JSON asks for in another way, left out; a
    parameter without a gradient, which on several ranks would decay."""
    assert ranks.run(1, sums_of_nobody, more) == [(copied, True, True)]


def test_a_version_of_deepspeed_that_was_not_tested(monkeypatch):
    import deepspeed

    from ds_vit.engine.patches.process import version_warnings

    assert version_warnings() == []
    monkeypatch.setattr(deepspeed, "__version__", "0.20.1+abc")
    [line] = version_warnings()
    assert "DeepSpeed 0.20.1 " in line
    assert "pip install deepspeed==0.19.8" in line


def test_tf32_ends_with_the_run():
    # Catches: a second run in the same process that multiplies in TF32 without --tf32.
    from ds_vit.engine.patches.process import tf32_products

    with tf32_products():
        assert torch.get_float32_matmul_precision() == "high"
    assert torch.get_float32_matmul_precision() == "highest"


def linear_maps_after(argv):
    """On a rank: whether a ZeRO-3 run that ends by an error restores torch's linear map."""
    from unittest import mock

    from ds_vit.fault_tolerance.errors import UserError
    from ds_vit.training.trainer import Trainer

    before = torch.nn.functional.linear
    with mock.patch.object(Trainer, "train", side_effect=UserError("as if an image were damaged")):
        assert train_main(argv) == 2
    return torch.nn.functional.linear is before


def test_a_run_that_fails_restores_the_process(ranks, tmp_path):
    argv = [*ONE_BLOCK, "--max-steps", "1", "--deepspeed_config", str(ROOT / "ds_configs" / "cpu_zero3_fp32.json")]
    argv += ["--output", str(tmp_path / "run")]
    assert ranks.run(1, linear_maps_after, argv) == [True]
