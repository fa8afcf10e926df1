"""launch/slurm.sbatch on a real Slurm of two nodes."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from curves import assert_same_curve, read_rows
from launches import GLOBAL_BATCH, NASTY, alone, cifar_folder, training
from project import ROOT
from slurm import Slurm, slurm

pytestmark = pytest.mark.slow

JOB = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=1", "--gpus-per-node=0", "--output=slurm.out")


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Iterator[Slurm]:
    with slurm(tmp_path_factory.mktemp("slurm")) as here:
        for host in here.hosts:
            host.environ["GLOO_SOCKET_IFNAME"] = "eth0"
            host.environ["DS_VIT_ROOT"] = str(ROOT)
            host.environ["DS_VIT_PYTHON"] = sys.executable
        yield here


@pytest.fixture(scope="module")
def data(tmp_path_factory, real_images) -> Path:
    return cifar_folder(tmp_path_factory.mktemp("cifar"), real_images)


@pytest.fixture(scope="module")
def reference(ranks, data) -> list[dict]:
    return alone(ranks, data)


def test_a_job_trains_like_one_process(here, data, reference, tmp_path):
    # Catches: tasks that do not meet or train a model each; a file name that a shell cuts.
    output = tmp_path / NASTY
    arguments = [*training(data), "--batch-size", str(GLOBAL_BATCH // 2), "--output", str(output)]
    script = str(ROOT / "launch" / "slurm.sbatch")
    job = here.sbatch(*JOB, script, "--logs", "logs", str(ROOT / "launch" / "train.py"), *arguments, cwd=tmp_path)
    state = here.wait(job)
    assert state == "COMPLETED", (tmp_path / "slurm.out").read_text() + here.logs()
    assert json.loads((output / "summary.json").read_text())["layout"]["dp"] == 2
    assert_same_curve(reference, read_rows(output), rtol=1e-5)
    assert sorted(log.name for log in (tmp_path / "logs").iterdir()) == ["rank-0000.node1.log", "rank-0001.node2.log"]
    assert not list(tmp_path.rglob("pwned"))


def test_plain_srun_trains_the_same(here, data, reference, tmp_path):
    # Catches: `srun python launch/train.py` that starts as many runs as it has tasks.
    output = tmp_path / "out"
    arguments = [*training(data), "--batch-size", str(GLOBAL_BATCH // 2), "--output", str(output)]
    here.run("srun", "-N2", "-n2", "python", str(ROOT / "launch" / "train.py"), *arguments, cwd=tmp_path, timeout=300)
    assert_same_curve(reference, read_rows(output), rtol=1e-5)


def test_what_a_process_sees(here, tmp_path):
    # Catches: a plain python in a job's script that takes itself for a task and waits for others; wrong local ranks.
    look = "from ds_vit.layout import discover as d; p = d(); print(p.launcher, p.rank, p.world_size, p.local_rank, "
    look += "p.local_world_size)"
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/sh\nexport PYTHONPATH={ROOT}\npython -c '{look}'\nsrun -n3 python -c '{look}'\n")
    job = here.sbatch("--nodes=2", "--ntasks=3", "--output=out", str(script), cwd=tmp_path)
    assert here.wait(job) == "COMPLETED"
    first, *tasks = (tmp_path / "out").read_text().splitlines()
    assert first == "none 0 1 0 1"
    assert sorted(tasks) == ["slurm 0 3 0 2", "slurm 1 3 1 2", "slurm 2 3 0 1"]
