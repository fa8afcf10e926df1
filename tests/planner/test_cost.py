"""Seconds of a step: hidden traffic, repeated sums, and the link that is used."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from ds_vit.config.batch import BatchSizes
from ds_vit.config.deepspeed_keys import DeepSpeedJson
from ds_vit.config.deepspeed_rules import Checkpointing, Precision
from ds_vit.parallel.layout import Layout
from ds_vit.planner.cost import Machine, step_time
from ds_vit.planner.counting import LayerWork
from ds_vit.planner.hardware import accelerator, link
from ds_vit.planner.memory import MemoryRules
from ds_vit.tools.layout_search import json_at_stage, mfu


def machine(gpus, per_node=8):
    return Machine(accelerator("h100"), gpus, per_node, link("nvlink4"), link("ib400"))


def work(is_block):
    without_products = SimpleNamespace(seconds=lambda *_: 0.1)
    forward = SimpleNamespace(seconds=lambda *_: 1.0, _replace=lambda products: without_products)
    backward = SimpleNamespace(seconds=lambda *_: 2.0)
    return LayerWork(forward, backward, given=1000, parameters=10**8, regions=2, is_block=is_block)


def step(deepspeed, stage, layout, recomputed=(), layers=(True,)):
    json = json_at_stage(DeepSpeedJson.of(deepspeed or {}), stage)
    rules = MemoryRules(
        json,
        layout,
        precision=Precision("bf16", "bfloat16"),
        optimizer=None,
        average=False,
        checkpointing=Checkpointing(*recomputed),
    )
    works = [work(is_block) for is_block in layers]
    return step_time(works, (0, len(works)), machine(8), BatchSizes(layout.dp, 1, 1, layout.dp), rules)


@pytest.mark.parametrize(
    ("stage", "deepspeed", "overlaps"),
    [
        (0, {}, True),
        (0, {"gradient_accumulation_steps": 2}, True),
        (1, {}, True),
        (2, None, True),
        (2, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}, False),
        (2, {"zero_optimization": {"offload_optimizer": {"device": "cpu"}, "overlap_comm": True}}, True),
        (3, None, True),
        (3, {"zero_optimization": {"overlap_comm": False}}, False),
    ],
)
def test_when_gradients_are_hidden(stage, deepspeed, overlaps):
    # Catches: traffic that is free where DeepSpeed begins it after the backward pass.
    assert bool(step(deepspeed, stage, Layout(1, 8, 1)).hidden) == overlaps


def test_zero3_gathers_weights_for_both_passes():
    # Catches: weights that are gathered once, as if they were kept for the backward pass; a gather for each parameter.
    ring = link("nvlink4")
    gathered = 7 / 8 * 10**8 / ring.reached * 2 / ring.gather_share + 7 * ring.gather_latency_seconds
    scattered = 7 / 8 * 10**8 / ring.reached * 2 / ring.scatter_share + 7 * ring.scatter_latency_seconds
    assert step({}, 3, Layout(1, 8, 1)).data == 0.0
    assert step(None, 3, Layout(1, 8, 1)).hidden <= 2 * gathered + scattered
    two = step({"zero_optimization": {"overlap_comm": False}}, 3, Layout(1, 8, 1))
    assert two.data + two.hidden == pytest.approx(2 * gathered + scattered, rel=1e-6)


def test_sums_of_small_buckets_wait_more_often():
    # Catches: a latency for a step where each bucket has its own.
    def seconds(size):
        time = step({"zero_optimization": {"reduce_bucket_size": size}}, 2, Layout(1, 8, 1))
        return time.data + time.hidden

    more = seconds(10**6) - seconds(10**8)
    assert more == pytest.approx(92 * 7 * link("nvlink4").scatter_latency_seconds, rel=1e-6)


@pytest.mark.parametrize(("recomputed", "sums", "seconds"), [((), 8, 0.0), ((1,), 9, 1.0), ((1, False, True), 9, 0.1)])
def test_only_blocks_are_recomputed_with_their_first_sum(recomputed, sums, seconds):
    # Catches: four sums of a recomputed block where five are sent; sums of layers that are not recomputed.
    inside = link("nvlink4")
    one = 2 * (2 - 1) * inside.latency_seconds + 2 * (2 - 1) / 2 * 1000 / inside.reached
    time = step({}, 1, Layout(1, 4, 2), recomputed, layers=(True, False))
    assert (time.computing, time.recomputing, time.tensor) == (6.0, seconds, pytest.approx(sums * one))


@pytest.mark.parametrize(("gpus", "pp", "tp", "inside"), [(24, 3, 2, False), (24, 2, 4, True), (6, 3, 2, True)])
def test_replicas_that_cross_hosts(gpus, pp, tp, inside):
    # Catches: three replicas of six GPUs in hosts of eight, the second of which has two hosts.
    of = machine(gpus)
    assert (of.between_stages(Layout(pp, gpus // (pp * tp), tp)) is of.inside) == inside


def test_mfu_is_of_the_types_that_are_multiplied():
    # Catches: autocast measured against the peak of fp32, which gives more than 100 %.
    assert mfu(989 * 10**12, machine(1), "autocast-bf16") == pytest.approx(1.0)
