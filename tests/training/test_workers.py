"""--workers auto: what it counts, and that a run takes it and says so."""

from __future__ import annotations

import contextlib
import os
from unittest import mock

import pytest
import torch.distributed as dist
import yaml
from project import ROOT
from runs import DIGITS, resolved, run_quietly

from ds_vit.data.loader import Loader
from ds_vit.launching.process import Process
from ds_vit.training import inputs
from ds_vit.training.inputs import MAX_WORKERS, count_workers, cpu_quota, decodes_images

KWARGS = ("--model-kwargs", "patch_size=8", "embed_dim=24", "depth=3", "num_heads=2", "--max-steps", "1")
ZERO0 = ("--deepspeed_config", str(ROOT / "ds_configs" / "cpu_zero0_fp32.json"))
RUN = [*DIGITS, *KWARGS, *ZERO0, "--val-split", "", "-b", "4", "--no-aug"]


def with_cores(number, quota=2**31, first=0):
    """A process that may use so many cores, in a container with the time of `quota`."""
    stack = contextlib.ExitStack()
    stack.enter_context(mock.patch.object(os, "sched_getaffinity", return_value=set(range(first, first + number))))
    stack.enter_context(mock.patch.object(inputs, "cpu_quota", return_value=quota))
    return stack


@pytest.mark.parametrize(
    ("cores", "quota", "reading", "number"),
    [
        (16, 2**31, [True] * 4, 3),
        (2, 2**31, [True] * 4, 1),
        (128, 2**31, [True], MAX_WORKERS),
        (64, 4, [True] * 2, 1),
        (20, 2**31, [True, *[False] * 7], 12),
    ],
)
def test_cores_are_shared(cores, quota, reading, number):
    # Catches: training left without a core; a part for a rank that reads no images; a process for each core of a large
    # host, in a container that may use four.
    with with_cores(cores, quota):
        counted = [
            count_workers(reading.__getitem__, Process("env", rank, len(reading), rank, len(reading))).number
            for rank in range(len(reading))
        ]
    assert counted == [number if decodes else 1 for decodes in reading]


def bound_to_nine_cores():
    """On a rank that has cores of its own, as by Slurm's --cpus-per-task."""
    rank = dist.get_rank()
    with with_cores(9, first=9 * rank):
        return count_workers(lambda of: True, Process("slurm", rank, 2, rank, 2)).number


def test_bound_ranks_share_no_cores(ranks):
    # Catches: the cores of one rank divided by all ranks of its host, which leaves it a single worker.
    assert ranks.run(2, bound_to_nine_cores) == [8, 8]


def test_who_decodes_images():
    # Catches: later stages and second slices that count as loaders.
    plan = resolved([*RUN, "--workers", "auto", "--pp", 3, "--tp", 2], world=12)
    decoding = [rank for rank in range(12) if decodes_images(plan, rank)]
    assert len(decoding) == 2
    assert {(plan.layout.stage(rank), plan.layout.tp_rank(rank)) for rank in decoding} == {(0, 0)}


@contextlib.contextmanager
def with_many_cores():
    """On a rank: nine cores that it shares, and the number of workers that its loader would have."""
    told = []

    class Told(Loader):
        def __init__(self, reader, numbers, num_workers=0, pin_memory=False):
            told.append(num_workers)
            super().__init__(reader, numbers, 0, pin_memory)

    with with_cores(9), mock.patch.object(inputs, "Loader", Told):
        yield
    assert set(told) == {3}, told


def test_a_run_counts_and_says_so(ranks, tmp_path):
    # Catches: a flag that reaches no loader; a config.yaml that fixes the number of another machine.
    argv = [*RUN, "--workers", "auto", "--output", str(tmp_path / "run")]
    said = ranks.run(2, run_quietly, argv, with_many_cores)
    assert [code for code, _, _ in said] == [0, 0], said
    table = " ".join(said[0][1].replace("│", " ").split())
    assert "--workers auto 3 per rank (9 cores for 2 training processes, 2 of which load images)" in table
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["workers"] == "auto"


def test_the_quota_of_a_container(tmp_path):
    # Catches: "max" read as a number, a file that is not there.
    limit = tmp_path / "cpu.max"
    assert cpu_quota(limit) > 10**6
    limit.write_text("max 100000\n")
    assert cpu_quota(limit) > 10**6
    limit.write_text("400000 100000\n")
    assert cpu_quota(limit) == 4
