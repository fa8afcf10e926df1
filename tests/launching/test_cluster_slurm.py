"""launch/slurm.sbatch on a real Slurm of two nodes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import oracle
import pytest
from curves import assert_same_curve, read_rows, train_in
from interrupting import last_step
from launches import GLOBAL_BATCH, NASTY, one_process, training
from project import ROOT, wait_until
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
    return oracle.cifar_splits(real_images, tmp_path_factory.mktemp("cifar"), 103, 20)


def test_plain_srun_trains_the_same(here, ranks, data, tmp_path):
    # Catches: `srun python launch/train.py` that starts as many runs as it has tasks.
    output = tmp_path / "out"
    arguments = [*training(data), "--batch-size", str(GLOBAL_BATCH // 2), "--output", str(output)]
    here.run("srun", "-N2", "-n2", "python", str(ROOT / "launch" / "train.py"), *arguments, cwd=tmp_path, timeout=300)
    assert_same_curve(one_process(ranks, data), read_rows(output), rtol=1e-5)


def test_an_interrupted_job_comes_back_and_goes_on(here, ranks, data, tmp_path):
    # Catches: a signal, of a person or of sbatch's --signal, that kills without saving; a job that does not come back,
    # starts from the beginning, or goes on with another curve; one that comes back although it was cancelled; a file
    # name that a shell cuts.
    output = tmp_path / NASTY
    arguments = [*training(data, 1_000_000), "--batch-size", str(GLOBAL_BATCH // 2), "--output", str(output)]
    script = [str(ROOT / "launch" / "slurm.sbatch"), "--restarts", "20", "--logs", "logs"]
    job = here.sbatch(*JOB, "--time=9", *script, str(ROOT / "launch" / "train.py"), *arguments, cwd=tmp_path)

    def wait_for(what: str, true: Callable[[], bool]) -> None:
        wait_until(true, lambda: f"{what}: never\n{(tmp_path / 'slurm.out').read_text()}\n{here.logs()}", 500)

    wait_for("the third step", lambda: last_step(output) >= 3)
    here.run("scancel", "--signal=USR1", job)
    wait_for("back in the queue after a signal", lambda: int(here.job(job)["Restarts"]) == 1)
    saved = last_step(output)
    wait_for("going on", lambda: last_step(output) > saved)
    here.run("scancel", job)
    assert here.wait(job) == "CANCELLED"
    assert int(here.job(job)["Restarts"]) == 1, "a job that was cancelled came back"
    said = (tmp_path / "slurm.out").read_text()
    assert said.count("interrupted and saved (code 75)") == 2, said
    assert "settings that differ" not in said
    assert sorted(log.name for log in (tmp_path / "logs").iterdir()) == ["rank-0000.node1.log", "rank-0001.node2.log"]
    assert not list(tmp_path.rglob("pwned"))
    rows = [row for row in read_rows(output) if row["kind"] == "train" and row["step"] <= saved + 1]
    assert [row["step"] for row in rows] == list(range(1, saved + 2)), "a step was repeated or left out"
    # In the same layout: in another one, rounding would have grown to percents after some hundred steps.
    whole = train_in(ranks, 2, [*training(data, saved + 1), "--batch-size", str(GLOBAL_BATCH // 2)])
    assert_same_curve(whole, rows, rtol=1e-6)


def test_the_doctor_in_a_job(here, tmp_path):
    # Catches: a doctor that asks one host of the job's, or takes its tasks for as many machines.
    words = ("--json", "--output", str(tmp_path / "runs"), "--timeout", "200")
    line = ["srun", "-N2", "--ntasks-per-node=2", "python", "-m", "ds_vit.cli", "doctor", *words]
    done = here.hosts[0].run(line, cwd=tmp_path)
    (said,) = [text for text in done.stdout.splitlines() if text.startswith("{")]
    told = json.loads(said)
    assert {name: answer["host"]["slots"] for name, answer in told["hosts"].items()} == {"node1": 2, "node2": 2}
    assert told["findings"] == []
    assert told["network"]["measured"]["world_size"] == 4
    assert done.returncode == 0, done.stderr


def test_what_a_process_sees(here, tmp_path):
    # Catches: a plain python in a job's script that takes itself for a task and waits for others; wrong local ranks.
    look = "from ds_vit.launching.process import discover as d; p = d(); print(p.launcher, p.rank, p.world_size, "
    look += "p.local_rank, p.local_world_size)"
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/sh\nexport PYTHONPATH={ROOT}\npython -c '{look}'\nsrun -n3 python -c '{look}'\n")
    job = here.sbatch("--nodes=2", "--ntasks=3", "--output=out", str(script), cwd=tmp_path)
    assert here.wait(job) == "COMPLETED"
    first, *tasks = (tmp_path / "out").read_text().splitlines()
    assert first == "none 0 1 0 1"
    assert sorted(tasks) == ["slurm 0 3 0 2", "slurm 1 3 1 2", "slurm 2 3 0 1"]
