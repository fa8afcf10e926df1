"""--workers auto: what it counts, and that a run takes it and says so."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from unittest import mock

import pytest
import yaml
from project import ROOT
from runs import DIGITS, resolved, run_quietly

from ds_vit.training.build import reads
from ds_vit.training.inputs import MAX_WORKERS, InputPipeline, Loading, count_workers, cpu_quota, estimate_workers

KWARGS = ("--model-kwargs", "patch_size=8", "embed_dim=24", "depth=3", "num_heads=2", "--max-steps", "1")
ZERO0 = ("--deepspeed_config", str(ROOT / "ds_configs" / "cpu_zero1_fp32.json"))
RUN = [*DIGITS, *KWARGS, *ZERO0, "--val-split", "", "-b", "4", "--no-aug"]


def cores(first, number):
    return frozenset(range(first, first + number))


@pytest.mark.parametrize(
    ("ranks", "numbers"),
    [
        ([Loading("a", cores(0, 16), "images")] * 4, [3] * 4),  # 12 left for four
        ([Loading("a", cores(0, 2), "images")] * 4, [1] * 4),  # fewer cores than ranks
        ([Loading("a", cores(0, 128), "images")], [MAX_WORKERS]),
        ([Loading("a", cores(16 * i, 16), "images") for i in range(4)], [15] * 4),  # bound by Slurm
        ([Loading("a", cores(0, 8), "images")] * 2 + [Loading("b", cores(0, 4), "images")] * 2, [3, 3, 1, 1]),
        # Four stages of two tensor slices: one loads images, one targets; (20 - 8 - 1) for one.
        ([Loading("a", cores(0, 20), word) for word in ("images", "", "", "", "", "", "targets", "")], [11] + [1] * 7),
    ],
)
def test_cores_are_shared(ranks, numbers):
    """A core counted on two hosts or for two ranks, or training left without one."""
    assert [count_workers(ranks, rank).number for rank in range(len(ranks))] == numbers


def test_who_reads_what():
    """Middle stages and second slices that count as loaders; an autoencoder's last stage that does not."""
    plan = resolved([*RUN, "--workers", "auto", "--pp", 3, "--tp", 2], world=12)
    reads_of, layout = reads(plan), plan.layout
    assert Counter(reads_of(rank) for rank in range(12)) == {"images": 2, "targets": 2, "": 8}
    assert {layout.stage(rank) for rank in range(12) if reads_of(rank) == "images"} == {0}
    assert {layout.tp_rank(rank) for rank in range(12) if reads_of(rank)} == {0}
    left = len(os.sched_getaffinity(0)) - 12 - 2
    assert estimate_workers(reads_of, plan.process).number == max(1, min(MAX_WORKERS, left // 2))


@contextlib.contextmanager
def with_many_cores():
    """On a rank: nine cores that it shares, and the number of workers that its loader would have."""
    loading = InputPipeline._loading
    told = []

    def told_one(self, fields):
        options = loading(self, fields)
        told.append(options["num_workers"])
        return {**options, "num_workers": 0}

    with (
        mock.patch.object(os, "sched_getaffinity", return_value=set(range(9))),
        mock.patch.object(InputPipeline, "_loading", told_one),
    ):
        yield
    assert set(told) == {3}, told


def test_a_run_counts_and_says_so(ranks, tmp_path):
    """A flag that reaches no loader; a config.yaml that fixes the number of another machine."""
    argv = [*RUN, "--workers", "auto", "--output", str(tmp_path / "run")]
    said = ranks.run(2, run_quietly, argv, with_many_cores)
    assert [code for code, _, _ in said] == [0, 0], said
    table = " ".join(said[0][1].replace("│", " ").split())
    assert "--workers auto 3 per rank (9 cores for 2 training processes, 2 of which load images)" in table
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["workers"] == "auto"


def test_a_container_that_is_given_less_time_than_cores(tmp_path):
    """A process for each core of a large host, in a container that may use four."""
    limit = tmp_path / "cpu.max"
    assert cpu_quota(limit) == cpu_quota(tmp_path / "none") > 10**6
    limit.write_text("max 100000\n")
    assert cpu_quota(limit) > 10**6
    limit.write_text("400000 100000\n")
    assert cpu_quota(limit) == 4
    ranks = [Loading("", frozenset(range(64)), "images", cpu_quota(limit))] * 2
    assert count_workers(ranks, 0).number == 1
    assert count_workers([rank._replace(quota=2**31) for rank in ranks], 0).number == MAX_WORKERS
