"""The flat gradient of ZeRO-0 to ZeRO-2 (engine/flat_gradient.py), against DeepSpeed's own sums."""

import contextlib
import copy
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from runs import pretend_fp16

STEPS = 4


class Branches(torch.nn.Module):
    """Layers of which one has no gradient on some ranks in some micro-batches, and one never has any."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(5, 40), torch.nn.Linear(40, 7)
        self.sometimes, self.never = torch.nn.Linear(40, 40), torch.nn.Linear(3, 3)

    def forward(self, inputs, skips):
        hidden = self.first(inputs)
        return self.second(hidden if skips else self.sometimes(hidden)).float().square().mean()


def optimizer_of(model):
    """Two groups, so that buckets of both come in turn."""
    matrices, biases = ([p for p in model.parameters() if (p.ndim > 1) == is_matrix] for is_matrix in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.01, fused=True)


def start(config, ours):
    """On a rank: DeepSpeed's engine, with flat gradients or without, and those."""
    import deepspeed

    from ds_vit.config.deepspeed_keys import DeepSpeedJson
    from ds_vit.engine.flat_gradient import FlatGradient
    from ds_vit.parallel.groups import build_groups
    from ds_vit.parallel.layout import Layout
    from ds_vit.parallel.zero_map import build_zero_map

    torch.manual_seed(0)
    model = Branches()
    small = {"reduce_bucket_size": 100, "allgather_bucket_size": 1000}
    base = {"train_micro_batch_size_per_gpu": 1, "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True}
    config = {**base, "zero_force_ds_cpu_optimizer": False, **config}
    config["zero_optimization"] = {**small, **config["zero_optimization"]}
    given = copy.deepcopy(config)
    if ours:
        given.get("data_types", {}).pop("grad_accum_dtype", None)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer_of(model), config=given)
    if not ours:
        return engine, None
    groups = build_groups(Layout(1, dist.get_world_size(), 1))
    flat = FlatGradient(engine, groups, DeepSpeedJson.of(config))
    names = {name: name for name, _ in model.named_parameters()}
    zero_map = build_zero_map(engine, groups, names, flats=flat.flats, gradients=flat.shares)
    flat.count(zero_map)
    flat.guard = mock.Mock(device_decides=False)
    return engine, flat


def train(config, ours, unevenly=False):
    """On a rank: the weights after some steps; unevenly: ranks differ in which gradients they have.

    DeepSpeed's ranks would then send buckets of different sizes.
    """
    with pretend_fp16() if "fp16" in config else contextlib.nullcontext():
        engine, flat = start(config, ours)
    dtype = next(engine.module.parameters()).dtype
    for step in range(STEPS):
        for micro_batch in range(engine.gradient_accumulation_steps()):
            part = micro_batch * dist.get_world_size() + dist.get_rank()
            inputs = torch.randn(6, 5, generator=torch.Generator().manual_seed(100 * step + part)).to(dtype)
            engine.backward(engine(inputs, (step + (part if unevenly else micro_batch)) % 3 == 0))
            engine.step()
    weights = [p.detach().float().clone() for p in engine.module.parameters()]
    if flat is not None:
        flat.close()
    engine.destroy()
    return weights


BF16 = {"bf16": {"enabled": True}}
IN_FP32 = {"data_types": {"grad_accum_dtype": "fp32"}}
SENT_IN_FP32 = {"communication_data_type": "fp32"}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 6}}
CASES = {
    "ZeRO-0": (0, {}),
    "ZeRO-1": (1, {}),
    "ZeRO-2": (2, {}),
    "ZeRO-1 bf16": (1, BF16),
    "ZeRO-1 bf16, sums and wire in fp32": (1, {**BF16, **IN_FP32, **SENT_IN_FP32}),
    "ZeRO-1 bf16, sent in fp32": (1, {**BF16, **SENT_IN_FP32}),
    "ZeRO-2 bf16": (2, BF16),
    "ZeRO-2 fp16": (2, FP16),
    "prescaled": (1, {"prescale_gradients": True}),
    "predivided": (1, {"gradient_predivide_factor": 2.0}),
    "sent in bf16": (1, {"communication_data_type": "bf16"}),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("case", CASES)
def test_weights_are_deepspeeds(ranks, case, accumulation):
    """A gradient that is summed before it is whole, divided twice or not at all, added to one of another bucket; a
    parameter without a gradient. In 16 bits to the last bit."""
    stage, more = CASES[case]
    config = {"zero_optimization": {"stage": stage}, "gradient_accumulation_steps": accumulation, **more}
    ours, theirs = (ranks.run(2, train, config, whose)[0] for whose in (True, False))
    for own, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=0 if "16" in case and "sent" not in case else 2e-6)


@pytest.mark.parametrize("config", [{}, {**BF16, **IN_FP32}, {**BF16, "gradient_accumulation_steps": 2}])
def test_one_rank_sums_over_nobody(ranks, config):
    """The buffers and factors of several ranks on one."""
    config = {**config, "zero_optimization": {"stage": 1}}
    [ours], [theirs] = (ranks.run(1, train, config, whose) for whose in (True, False))
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_ranks_with_other_gradients_than_their_neighbours(ranks, stage):
    """Buckets that are sent in another order, or not at all, where a rank lacks a gradient."""
    config = {"zero_optimization": {"stage": stage}}
    two = ranks.run(2, train, {**config, "gradient_accumulation_steps": 2}, True, True)[0]
    [one] = ranks.run(1, train, {**config, "gradient_accumulation_steps": 4}, True, True)
    for own, other in zip(two, one, strict=True):
        torch.testing.assert_close(own, other, rtol=0, atol=2e-6)


def held_at_most(config):
    """On a rank: the most elements of gradients that wait for their bucket in a backward pass, and how many stay."""
    engine, flat = start(config, True)
    parameters = list(engine.module.parameters())
    most = 0

    def look(_):
        nonlocal most
        most = max(most, sum(p.grad.numel() for p in parameters if p.grad is not None))

    for p in parameters:
        p.register_post_accumulate_grad_hook(look)
    engine.backward(engine(torch.ones(6, 5), False))
    left = [p for p in parameters if p.grad is not None]
    engine.step()
    flat.close()
    engine.destroy()
    return most, len(left)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_gradients_are_not_held_twice(ranks, stage):
    """Gradients that wait for the end of the pass next to flat ones, whatever `reduce_bucket_size` says."""
    config = {"zero_optimization": {"stage": stage, "reduce_bucket_size": 10**9}}
    for most, left in ranks.run(2, held_at_most, config):
        assert most <= 40 * 40 + 40 + 2 * 280, "the largest parameter and what shares its bucket"
        assert left == 0
