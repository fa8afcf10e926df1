"""The ranks of two runs at one port: each rank checks that it reached its own run before it is counted there."""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from project import ON_CPU, ROOT, wait_until

from ds_vit.fault_tolerance.errors import UserError
from ds_vit.launching.launchers import Local
from ds_vit.launching.process import Process, discover, run_token
from ds_vit.launching.rank import Job
from ds_vit.training import program


def _leave_the_pool() -> int:
    """Leave the group of the rank pool, as if a launcher had just started this process; gives its rank there."""
    import deepspeed

    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    deepspeed.comm.comm.cdb = None
    return rank


SRUN = {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2", "SLURM_LOCALID": "1"}


def _meet(run: str, rank: int, value: float) -> tuple[int, float, str]:
    """Meet the other rank of a run, and sum the values of both; gives exit code, sum, and the lines for people."""
    from ds_vit.engine.start import init_distributed
    from ds_vit.launching.process import rendezvous

    for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):  # of the pool
        os.environ.pop(name, None)
    os.environ |= {"WORLD_SIZE": "2", "RANK": str(rank), "LOCAL_SIZE": "2", "DS_VIT_RUN_ID": run}
    total = torch.tensor(value)

    def body(process: Process) -> int:
        init_distributed(rendezvous(process))
        dist.all_reduce(total)
        return 0

    with contextlib.redirect_stderr(io.StringIO()) as said:
        code = program.guarded("train.py", body, "")
    return code, total.item(), said.getvalue()


def stranger_first(folder: Path, agent: bool) -> tuple[int, float, str]:
    """On ranks 0 and 1: run a. On rank 2: rank 1 of run b, which comes before rank 1 of run a."""
    store = None
    if agent:  # torchrun: the store is its own, and every rank is a client
        os.environ["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        if dist.get_rank() == 2:
            port = int(os.environ["MASTER_PORT"])
            store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
    rank = _leave_the_pool()
    if rank < 2:
        if rank == 1:
            wait_until((folder / "rejected").exists, "the rank of run b was not rejected")
        result = _meet("a", rank, 1.0 + rank)
        (folder / f"met-{rank}").touch()
        return result
    with mock.patch.object(program.time, "sleep"):  # for the launcher to end this rank
        result = _meet("b", 1, 100.0)
    (folder / "rejected").touch()
    if store is not None:
        wait_until(lambda: all((folder / f"met-{r}").exists() for r in (0, 1)), "run a did not meet")
    return result


@pytest.mark.parametrize("agent", [False, True])
def test_a_rank_of_another_run_is_rejected(agent, ranks, tmp_path):
    # Catches: a stranger that takes a rank's place, or is counted; one that ends without a word, or with a traceback.
    first, second, (code, _, said) = ranks.run(3, stranger_first, tmp_path, agent, timeout=240)
    assert first == second == (0, 3.0, "")
    assert code == 2
    [line] = said.splitlines()
    assert re.fullmatch(
        r"train\.py: error: rank 1 of this run \(DS_VIT_RUN_ID=b\) reached another run at 127\.0\.0\.1:\d+ "
        r"\(DS_VIT_RUN_ID=a\); choose another with the launcher's --master_port .*",
        line,
    )


def meet_a_silent_store(folder: Path) -> str:
    """On rank 0: another program's store, without a token. On rank 1: a rank of a run."""
    from ds_vit.engine import start

    port = int(os.environ["MASTER_PORT"])
    if _leave_the_pool() == 0:
        store = dist.TCPStore("127.0.0.1", port, is_master=True, wait_for_workers=False)
        wait_until((folder / "rejected").exists, "nobody connected")
        del store
        return ""
    with mock.patch.object(program.time, "sleep"), mock.patch.object(start, "_ANSWER_SECONDS", 0.2):
        code, _, said = _meet("b", 1, 1.0)
    (folder / "rejected").touch()
    assert code == 2
    return said


def test_a_store_that_gives_no_token(ranks, tmp_path):
    # Catches: a wait of half an hour.
    _, said = ranks.run(2, meet_a_silent_store, tmp_path, timeout=240)
    [line] = said.splitlines()
    assert "reached another run" in line
    assert "(no token of ds_vit); choose another" in line


# Rank 1 of a run, which says when it asks.
ASKING = """
from ds_vit.fault_tolerance.signals import end_at_signals
end_at_signals("train.py")
import datetime
import torch.distributed as dist
from ds_vit.engine import start
from ds_vit.training.program import guarded
get = dist.TCPStore.get
dist.TCPStore.get = lambda store, key: print("asking", flush=True) or get(store, key)
guarded("train.py", lambda process: next(dist.rendezvous("ds-vit://b", timeout=datetime.timedelta(seconds=60))), "")
"""


def test_a_store_that_ends_meanwhile():
    # Catches: torch's page or warning about a closed connection, with 25 lines of C++ frames.
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environ = {name: value for name, value in os.environ.items() if name != "TORCH_CPP_LOG_LEVEL"}
    environ |= {**ON_CPU, "PYTHONPATH": str(ROOT), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    environ |= {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    rank = subprocess.Popen([sys.executable, "-c", ASKING], env=environ, **pipes)
    assert rank.stdout.readline() == "asking\n"
    del store
    [line] = rank.communicate(timeout=120)[1].splitlines()
    assert "reached another run" in line


SEVERAL_HOSTS = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "2"}
MPIRUN = {f"OMPI_COMM_WORLD_{name}": "2" for name in ("SIZE", "LOCAL_SIZE")}
MPIRUN |= {f"OMPI_COMM_WORLD_{name}": "1" for name in ("RANK", "LOCAL_RANK")}


@pytest.mark.parametrize(
    ("environ", "token"),
    [
        (SEVERAL_HOSTS | {"DS_VIT_RUN_ID": "x", "TORCHELASTIC_RUN_ID": "y"}, "DS_VIT_RUN_ID=x"),
        (SEVERAL_HOSTS | {"TORCHELASTIC_RUN_ID": "y"}, "TORCHELASTIC_RUN_ID=y"),
        (SEVERAL_HOSTS | {"TORCHELASTIC_RUN_ID": "none"}, "command line "),
        (SEVERAL_HOSTS, "command line "),
        (SEVERAL_HOSTS | {"WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}, f"launcher {os.getppid()} started at "),
        (SEVERAL_HOSTS | {"WORLD_SIZE": "2", "SLURM_JOB_ID": "1", "SLURM_STEP_ID": "2"}, f"launcher {os.getppid()} "),
        (SRUN | {"SLURM_JOB_ID": "12", "SLURM_STEP_ID": "3"}, "SLURM_JOB_ID=12 SLURM_STEP_ID=3"),
        (MPIRUN | {"PMIX_NAMESPACE": "prterun-n1-7@1"}, "PMIX_NAMESPACE=prterun-n1-7@1"),
        (MPIRUN, f"launcher {os.getppid()} started at "),
    ],
)
def test_what_identifies_a_run(environ, token):
    # Catches: torchrun's "none" taken for an identifier, two runs in one Slurm job's shell taken for one.
    assert run_token(discover(environ), environ, ["train.py"]).startswith(token)


def test_the_command_line_identifies_a_run_on_several_hosts():
    # Catches: ranks of one run that differ by the --local_rank that DeepSpeed's launcher appends.
    process = discover(SEVERAL_HOSTS)

    def token(*words: str) -> str:
        return run_token(process, SEVERAL_HOSTS, ["train.py", *words])

    assert token("--local_rank=0", "--lr", "1") == token("--local-rank=1", "--lr", "1")
    assert token("--local_rank=0", "--lr", "1") != token("--local_rank=0", "--lr", "2")


# Starts two ranks, the second under a wrapper script, and waits for its end of the pipe to be closed.
LAUNCHER = """
import os, subprocess, sys
rank = "from ds_vit.launching.process import *; print(run_token(discover()), flush=True)"
environ = {**os.environ, "WORLD_SIZE": "2", "LOCAL_SIZE": "2", "RANK": "0"}
subprocess.run([sys.executable, "-c", rank], env=environ)
subprocess.run(["sh", "-c", f"{sys.executable} -c '{rank}'; true"], env=environ | {"RANK": "1"})
sys.stdin.read()
"""


def test_a_launcher_identifies_a_run_on_one_host():
    # Catches: ranks under wrapper scripts taken for two runs, two launchers of one command line taken for one.
    environ = {name: value for name, value in os.environ.items() if name != "RANK"} | {"PYTHONPATH": str(ROOT)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    both = [subprocess.Popen([sys.executable, "-c", LAUNCHER], env=environ, **pipes) for _ in range(2)]
    for launcher in both:
        said = launcher.communicate("", timeout=120)[0].splitlines()
        assert len(said) == 2, said
        assert len(set(said)) == 1, said
        assert said[0].startswith(f"launcher {launcher.pid} started at "), said


def test_ds_vit_launch_gives_its_ranks_an_identifier():
    # Catches: an identifier that does not reach the ranks.
    for run in ("r1", "r2"):
        [command] = Local(run, {}, num_ranks=2).commands(Job(("train.py",), "/", {}, "logs")).values()
        assert Job.decode(command[-1]).environ["DS_VIT_RUN_ID"] == run


def test_a_rank_that_waits_to_be_ended_is_silent():
    # Catches: "SIGTERM while no training is under way" below the line of another rank that says what is wrong.
    script = """
import os, time
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.fault_tolerance.signals import end_at_signals
from ds_vit.training.program import guarded
end_at_signals("train.py")
time.sleep = lambda seconds: os.kill(os.getpid(), 15)
def body(process):
    raise UserError("wrong")
guarded("train.py", body, "")
"""
    environ = {**os.environ, **ON_CPU, "PYTHONPATH": str(ROOT), "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (-15, "")


def test_an_mpi4py_of_another_mpi():
    """Ranks of mpirun that each meet nobody: a traceback, or as many runs as ranks."""
    with (
        mock.patch("ds_vit.engine.start.init_distributed", return_value=True),
        mock.patch("torch.distributed.get_world_size", return_value=1),
        pytest.raises(UserError, match=r"the launcher started 2 ranks and 1 have met: mpi4py belongs to another MPI"),
        program.process_group(Process("openmpi", 1, 2, 1, None), on_cpu=True),
    ):
        pass
