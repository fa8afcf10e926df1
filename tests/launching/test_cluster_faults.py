"""launch/run_hostfile.sh and launch/mpi.sh on hosts with an sshd each: a training, words for a shell, and faults."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import oracle
import pytest
from cluster import Host, cluster
from curves import assert_same_curve, read_rows
from launches import GLOBAL_BATCH, NASTY, explain, one_process, training
from project import ON_CPU, ROOT, wait_until

pytestmark = pytest.mark.slow

# How soon a silent host is noticed; the defaults are those of docs/clusters.md (45 s, 30 s, 10 minutes).
SOON = {
    "PDSH_SSH_ARGS_APPEND": "-o ServerAliveInterval=2 -o ServerAliveCountMax=2 -o ConnectTimeout=3",
    "DEEPSPEED_TIMEOUT": "1",
    "GLOO_SOCKET_IFNAME": "eth0",
}


@pytest.fixture
def hosts(tmp_path) -> Iterator[list[Host]]:
    with cluster(tmp_path / "c", 2) as hosts:
        (tmp_path / "hosts").write_text("node1 slots=1\nnode2 slots=1\n")
        for host in hosts:
            host.environ.update(SOON)
        yield hosts


def command(folder: Path, *options: str) -> list[str]:
    """launch/run_hostfile.sh with its options, up to the script."""
    launcher = ["bash", str(ROOT / "launch" / "run_hostfile.sh"), "--hostfile", str(folder / "hosts"), "--grace", "4"]
    return [*launcher, "--logs", str(folder / "logs"), *options]


@pytest.fixture(scope="module")
def data(tmp_path_factory, real_images) -> Path:
    return oracle.cifar_splits(real_images, tmp_path_factory.mktemp("cifar"), 103, 20)


@pytest.fixture
def running(hosts, tmp_path, data) -> Iterator[subprocess.Popen]:
    """A long training over both hosts that has begun, and saves itself now and then."""
    layout = ["--pp", "2", "--grad-accum-steps", "2", "--batch-size", str(GLOBAL_BATCH // 2)]
    arguments = [*training(data, 100_000), *layout, "--output", str(tmp_path / NASTY), "--checkpoint-interval", "5"]
    process = hosts[0].popen(
        [*command(tmp_path), str(ROOT / "launch" / "train.py"), *arguments],
        stdout=(tmp_path / "stdout").open("w"),
        stderr=(tmp_path / "stderr").open("w"),
        cwd=tmp_path,
    )
    rows = tmp_path / NASTY / "metrics.jsonl"
    wait_until(lambda: (rows.exists() and rows.read_text().count("\n") > 3) or process.poll() is not None, "no step")
    assert process.poll() is None, (tmp_path / "stderr").read_text()
    yield process
    process.kill()
    process.wait()


def ranks_of(host: Host) -> list[str]:
    return [line for line in host.processes() if "train.py" in line or "script.py" in line]


# What a rank on its host would see: arguments, folder and variables as they arrived.
SHOW = """
import json, os, socket, sys
place = {"rank": int(os.environ["RANK"]), "host": socket.gethostname(), "argv": sys.argv[1:], "cwd": os.getcwd()}
names = [name for name in os.environ if name.startswith(("DS_TEST", "NCCL_", "CUDA_"))]
place["environ"] = {name: os.environ[name] for name in names}
print("SHOW" + json.dumps(place), flush=True)
"""


def test_whatever_is_written_arrives_as_it_is(hosts, tmp_path):
    # Catches: a word, a folder or a variable that a shell between two hosts splits, expands or runs; a filter that is
    # not passed on; a master address on a host that takes no part.
    folder = tmp_path / NASTY
    folder.mkdir()
    words = ["two words", "it's", 'a "b"', "$HOME", "$(touch pwned)", "`touch pwned`"]
    words += ["; touch pwned", "\\", "", "a\nb", "ü"]
    value = """it's "$(touch pwned)" `touch pwned`; touch pwned \\ $HOME ü"""
    (folder / ".deepspeed_env").write_text(f"# a comment\n\nDS_TEST_HERE={value}\n")
    (folder / "more.env").write_text(f"NCCL_IB_HCA==mlx5_0:1,mlx5_1:1\nDS_TEST_FILE={value}\n")
    (folder / "hosts").write_text("node1 slots=2\nnode2 slots=3\n")
    script = folder / 'it\'s; a "script" $(touch pwned).py'
    script.write_text(SHOW)
    options = ["--env-file", "more.env", "--include", "node2:0,2"]
    environ = {"DS_TEST_SHELL": value, "DS_TEST_FILE": "loses against the file"}
    done = hosts[0].run([*command(folder, *options), str(script), *words], cwd=folder, environ=environ)
    assert done.returncode == 0, explain(done, folder / "logs")
    assert not [*Path("/").glob("pwned*"), *folder.rglob("pwned*")]
    logs = [log.read_text() for log in sorted((folder / "logs").glob("rank-*.log"))]
    places = [json.loads(line[4:]) for log in logs for line in log.splitlines() if line.startswith("SHOW")]
    assert [(place["host"], place["rank"]) for place in places] == [("node2", 0), ("node2", 1)]
    for place in places:
        assert place["argv"] == words
        assert place["cwd"] == str(folder)
        assert place["environ"].pop("NCCL_IB_HCA") == "=mlx5_0:1,mlx5_1:1"
        assert place["environ"].pop("CUDA_VISIBLE_DEVICES") == "0,2"
        assert place["environ"] == dict.fromkeys(("DS_TEST_HERE", "DS_TEST_SHELL", "DS_TEST_FILE"), value)


def test_two_hosts_train_like_one_process_and_a_pulled_cable_ends_the_run(hosts, running, ranks, data, tmp_path):
    # Catches: ranks that do not meet, a stage without its neighbour, an output folder split by a shell; a run
    # that waits for a host that is gone, and never says which; work that is lost with the host.
    output = tmp_path / NASTY
    latest = output / "checkpoints" / "latest"
    wait_until(latest.exists, "no checkpoint")
    hosts[1].link("down")
    assert running.wait(240) == 1
    assert "the connection to node2 broke: the host or its network is down" in (tmp_path / "stderr").read_text()
    assert sorted(log.name for log in (tmp_path / "logs").iterdir()) == ["rank-0000.node1.log", "rank-0001.node2.log"]
    assert not ranks_of(hosts[0])

    step = int(latest.read_text().strip().removeprefix("step-"))
    whole = ["--batch-size", str(GLOBAL_BATCH), "--output", str(output), "--resume", "auto"]
    line = [*command(tmp_path, "--exclude", "node2"), str(ROOT / "launch" / "train.py"), *training(data, step + 2)]
    done = hosts[0].run([*line, *whole], cwd=tmp_path)
    assert done.returncode == 0, explain(done, output)
    rows = [row for row in read_rows(output) if row["step"] <= step + 2]  # others were done and not saved
    assert_same_curve(one_process(ranks, data, step + 2), rows, rtol=1e-4)
    assert not list(tmp_path.rglob("pwned"))
    hosts[1].link("up")  # the rank over there finds out by itself, after DEEPSPEED_TIMEOUT at the latest
    wait_until(lambda: not ranks_of(hosts[1]), "node2's rank has not ended")


SAVES = """
import os, pathlib, signal, socket, sys, time
here = pathlib.Path(sys.argv[-1]) / os.environ["RANK"]
def end(number, frame):
    here.write_text(str(number)); sys.exit(75)
signal.signal(signal.SIGUSR1, end); signal.signal(signal.SIGTERM, end)
here.touch(); time.sleep(300)
"""


def wait_for_both(folder: Path, launcher: subprocess.Popen) -> None:
    """Wait until two ranks of `SAVES` have begun; fails with what the launcher says if it ends."""
    wait_until(lambda: all((folder / rank).exists() for rank in "01") or launcher.poll() is not None, "no ranks")
    assert launcher.poll() is None, launcher.communicate()[1]


def saved(folder: Path) -> list[str]:
    """What each rank has noted on its way out."""
    return [(folder / rank).read_text() for rank in "01"]


def test_ranks_end_with_the_process_that_started_them(hosts, tmp_path):
    # Catches: GPUs held on every host by a run that nobody watches any more; a kill without time to save.
    (tmp_path / "script.py").write_text(SAVES)
    line = [*command(tmp_path), str(tmp_path / "script.py"), str(tmp_path)]
    launcher = hosts[0].popen(line, stderr=subprocess.DEVNULL)
    wait_for_both(tmp_path, launcher)
    hosts[0].check("pkill", "-KILL", "-f", "^[^ ]*python[^ ]* [^ ]*launch/run.py hostfile")
    launcher.wait(60)
    wait_until(lambda: not ranks_of(hosts[0]) and not ranks_of(hosts[1]), "the ranks have not ended")
    assert set(saved(tmp_path)) <= {str(int(signal.SIGUSR1)), str(int(signal.SIGTERM))}
    wait_until(lambda: not hosts[0].processes(), "something is left on node1")


def test_hosts_that_cannot_take_part(hosts, tmp_path):
    # Catches: DeepSpeed's check of the first host alone; a port that is taken; a hang; a folder made for nothing.
    train = [str(ROOT / "launch" / "train.py"), "--output", str(tmp_path / "out")]
    listen = "import socket, time; s = socket.socket(); s.bind(('', 29777)); s.listen(); print(1, flush=True)"
    listen += "; time.sleep(99)"
    server = hosts[0].popen(["python", "-c", listen], stdout=subprocess.PIPE)
    assert server.stdout.readline()
    done = hosts[0].run([*command(tmp_path, "--master_port", "29777"), *train])
    assert done.returncode == 2
    assert (
        "1 of 2 hosts cannot be used; node1: rank.py: error: port 29777 on node1: Address already in use" in done.stderr
    )

    hosts[1].stop_sshd()
    done = hosts[0].run([*command(tmp_path), *train])
    assert done.returncode == 2
    assert "1 of 2 hosts cannot be used; node2: ssh: connect to host node2 port 22: Connection refused" in done.stderr
    assert "Traceback" not in done.stderr
    hosts[1].start_sshd()
    assert not (tmp_path / "out").exists()


def test_pbs_starts_on_the_hosts_of_the_job(hosts, tmp_path):
    # Catches: a job that ignores the scheduler's hosts, words torn at blanks, a SIGTERM that bash keeps to itself, that
    # only the launching machine's ranks hear, or that ends them without time to save.
    (tmp_path / "script.py").write_text(SAVES)
    (tmp_path / "nodes").write_text("node1\nnode2\n")
    environ = {
        "PBS_NODEFILE": str(tmp_path / "nodes"),
        "PBS_O_WORKDIR": str(ROOT),
        "ARGUMENTS": f"--logs '{tmp_path}/my logs' '{tmp_path}/script.py' 'two words' '{tmp_path}'",
    }
    line = ["bash", str(ROOT / "launch" / "pbs.sh")]
    process = hosts[0].popen(line, environ=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_both(tmp_path, process)
    log = tmp_path / "my logs" / "rank-0001.node2.log"
    assert "two words" in log.read_text()
    hosts[0].check("pkill", "-TERM", "-f", "bash .*launch/pbs.sh")
    _, error = process.communicate(timeout=120)
    assert process.returncode == 75, error
    assert saved(tmp_path) == [str(int(signal.SIGUSR1))] * 2
    assert "interrupted and saved (code 75)" in error


MPIRUN = Path(sys.executable).with_name("mpirun")
needs_mpirun = pytest.mark.skipif(not MPIRUN.exists(), reason="no mpirun: pip install 'ds-vit[mpi]'")
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "DS_VIT_PYTHON": sys.executable}
MPI_SH = ["bash", str(ROOT / "launch" / "mpi.sh"), "-np", "2"]


@needs_mpirun
def test_mpirun_over_two_hosts(hosts, ranks, data, tmp_path):
    # Catches: ranks that do not meet, or train a model each; variables or an address that stay on the machine of
    # mpirun; a name that a shell between mpirun and the ranks cuts.
    output = tmp_path / NASTY
    arguments = [*training(data), "--batch-size", str(GLOBAL_BATCH // 2), "--output", str(output)]
    options = ["--hostfile", str(tmp_path / "hosts"), "--logs", "logs", str(ROOT / "launch" / "train.py")]
    done = hosts[0].run([*MPI_SH, *options, *arguments], cwd=tmp_path, environ=AS_ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(log.name for log in (tmp_path / "logs").iterdir()) == ["rank-0000.node1.log", "rank-0001.node2.log"]
    assert_same_curve(one_process(ranks, data), read_rows(output), rtol=1e-5)
    assert not list(tmp_path.rglob("pwned"))


@needs_mpirun
def test_a_signal_under_mpirun(tmp_path):
    # Catches: mpirun that kills the ranks on SIGTERM before they have saved.
    (tmp_path / "script.py").write_text(SAVES.replace("RANK", "OMPI_COMM_WORLD_RANK"))
    environ = {**os.environ, **ON_CPU, **AS_ROOT, "PATH": f"{MPIRUN.parent}:{os.environ['PATH']}"}
    line = [*MPI_SH, "--mpirun", "mpirun --oversubscribe", str(tmp_path / "script.py"), str(tmp_path)]
    process = subprocess.Popen(line, cwd=tmp_path, env=environ, stderr=subprocess.PIPE, text=True)
    wait_for_both(tmp_path, process)
    process.terminate()
    _, error = process.communicate(timeout=120)
    assert process.returncode == 75, error
    assert all(saved(tmp_path)), "both had time to save"
