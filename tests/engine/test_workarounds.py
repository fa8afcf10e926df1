"""Ways around DeepSpeed that need no ranks to be tried."""

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from deepspeed.runtime import utils
from deepspeed.runtime.zero import stage_1_and_2
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ds_vit.engine.norms import clip_by_global_norm, grad_norm, grad_norm_of_bf16, unscale_and_clip
from ds_vit.engine.workarounds import advance_where_applied
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


@pytest.mark.parametrize("what", ["all", "16 bits", "second of its group", "nan", "padded", "none"])
def test_zeros_norm_is_deepspeeds(what):
    """A padding that is counted, a parameter that two ranks count, another word for what is not finite."""
    optimizer = SimpleNamespace(
        dp_process_group=None,
        device="cpu",
        model_parallel_rank=int("second" in what),
        _model_parallel_all_reduce=lambda tensor, op: None,
    )
    values = gradients(torch.bfloat16 if what == "16 bits" else torch.float32) if what != "none" else []
    parameters = [SimpleNamespace(model_parallel=place == 1, ds_pipe_replicated=place == 2) for place in range(3)]
    if what == "nan":
        values[0][3] = float("nan")
    if what == "padded":
        values.insert(1, torch.ones(5))
        values[1]._zero_padding = True
        values.append(torch.ones(4))
    with mock.patch.object(stage_1_and_2.dist, "all_reduce"):
        theirs = DeepSpeedZeroOptimizer.get_grad_norm_direct(optimizer, values, parameters)
        ours = []
        counts = count_step(lambda: ours.append(grad_norm(optimizer, values, parameters)))
    assert torch.equal(ours[0], theirs)
    assert counts.waits == 0
    assert (theirs == -1) == (what == "nan")
    assert counts.by_name.get("linalg_vector_norm", 0) == 0


@pytest.mark.parametrize("what", ["fp32", "bf16", "nan"])
def test_bf16_optimizers_norm_is_deepspeeds(what):
    """Another sum, a norm under another parameter's name, one that is not finite and looks it."""
    values, kept = gradients(torch.bfloat16 if what == "bf16" else torch.float32), []
    if what == "nan":
        values[1][3] = float("nan")
    parameters = {id(value): place for place, value in enumerate(values[:2])}  # the third is nobody's
    theirs = utils.get_global_norm_of_tensors(values)
    ours = grad_norm_of_bf16(parameters, lambda *made_of: kept.append(made_of), values)
    assert utils.is_invalid_grad_norm(ours) == utils.is_invalid_grad_norm(theirs) == (what == "nan")
    [(places, norms)] = kept
    assert places == [0, 1, None]
    assert torch.allclose(norms, torch.stack([value.float().norm() for value in values]), rtol=1e-6, equal_nan=True)
    if what != "nan":
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


def sums_of_nobody(more):
    """On a rank: the bytes that ZeRO-0's sums of gradients copied in a step, and whether its gradients were there."""
    import deepspeed

    from ds_vit.config.deepspeed_rules import sums_are_plain
    from ds_vit.engine.workarounds import leave_gradients_of_one_rank

    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"used": torch.nn.Linear(4, 4), "unused": torch.nn.Linear(2, 2)})
    model.forward = model["used"].forward
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, **more}
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), config=config, dist_init_required=False
    )
    if sums_are_plain(config):
        leave_gradients_of_one_rank(engine)
    loss = engine(torch.ones(1, 4)).sum()
    counts = count_step(lambda: engine.backward(loss))
    zeros = torch.equal(model["unused"].weight.grad, torch.zeros(2, 2))
    return counts.by_name.get("cat", 0), torch.equal(model["used"].weight.grad, torch.ones(4, 4)), zeros


@pytest.mark.parametrize(("more", "copied"), [({}, 0), ({"prescale_gradients": True}, 1)])
def test_one_rank_sums_over_nobody(ranks, more, copied):
    """All gradients in a bucket and back, for a sum of one; a sum that the JSON asks for in another way, left out; a
    parameter without a gradient, which on several ranks would decay."""
    assert ranks.run(1, sums_of_nobody, more) == [(copied, True, True)]
