"""This process among the run's ranks: what the launcher's environment says of it, and how the ranks meet.

No other file of the trainer reads from the environment which rank it is.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Mapping, MutableMapping
from dataclasses import dataclass

from ds_vit.fault_tolerance.errors import UserError
from ds_vit.launching.hosts import expand_counts, expand_nodelist
from ds_vit.launching.ports import free_port

_OMPI = "OMPI_COMM_WORLD_"
# (launcher, rank, world size, local rank, local world size), in the order in which they are looked for. DeepSpeed's
# launcher calls the local world LOCAL_SIZE, torchrun LOCAL_WORLD_SIZE; both set RANK, WORLD_SIZE and LOCAL_RANK. mpirun
# inside a Slurm job has srun's variables of its own daemons around it, so they come last.
_LAUNCHERS: tuple[tuple[str, str, str, str, tuple[str, ...]], ...] = (
    ("env", "RANK", "WORLD_SIZE", "LOCAL_RANK", ("LOCAL_WORLD_SIZE", "LOCAL_SIZE")),
    ("openmpi", _OMPI + "RANK", _OMPI + "SIZE", _OMPI + "LOCAL_RANK", (_OMPI + "LOCAL_SIZE",)),
    ("mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", ("MPI_LOCALNRANKS",)),
    ("slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", ()),
)


@dataclass(frozen=True)
class Process:
    """This process among the run's ranks, as the launcher's environment tells, before any process group exists.

    Attributes:
        launcher: "env" (deepspeed, torchrun), "openmpi", "mpich", "slurm" (srun), or "none" for plain python.
        rank: 0 to world_size - 1 over all hosts.
        local_rank: this host's 0 to local_world_size - 1; picks the accelerator.
        local_world_size: ranks on this host, or None where the launcher does not say.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None

    @property
    def spans_hosts(self) -> bool:
        """Whether ranks run on other hosts too (taken for true where the launcher does not say)."""
        return self.world_size > 1 and self.local_world_size != self.world_size


def discover(environ: Mapping[str, str] = os.environ) -> Process:
    """Read this process's place from the launcher's environment; plain `python` is one rank of one.

    Raises:
        UserError: the launcher set a rank but not the world size, or something that is not a number.
    """
    for launcher, rank_name, world_name, local_name, local_world_names in _LAUNCHERS:
        if rank_name not in environ or _is_not_told(launcher, environ):
            continue
        if world_name not in environ:
            raise UserError(f"{rank_name} is set but {world_name} is not; unset it to run alone, or use a launcher")
        try:
            rank, world = int(environ[rank_name]), int(environ[world_name])
            local = int(environ.get(local_name, "0"))
            local_world = next((int(environ[name]) for name in local_world_names if name in environ), None)
            if launcher == "slurm":
                local_world = _slurm_tasks_here(environ)
        except ValueError:
            raise UserError(f"{rank_name}, {world_name} and {local_name} must be whole numbers") from None
        if not 0 <= rank < world:
            raise UserError(f"{rank_name}={rank} lies outside the world of {world_name}={world} ranks")
        return Process(launcher, rank, world, local, local_world)
    return Process("none", 0, 1, 0, 1)


def _is_not_told(launcher: str, environ: Mapping[str, str]) -> bool:
    """Whether a rank's variable is there, but is not this process's.

    The script of a Slurm job has SLURM_PROCID=0 without being a task; `srun --mpi=pmi2` sets PMI_RANK without
    the local rank that MPICH's and Intel's own mpirun add.
    """
    if launcher == "slurm":
        return "SLURM_STEP_NUM_TASKS" not in environ
    return launcher == "mpich" and "MPI_LOCALRANKID" not in environ and "SLURM_STEP_NUM_TASKS" in environ


def _slurm_tasks_here(environ: Mapping[str, str]) -> int | None:
    """This node's tasks of a Slurm step: its place in a list such as 4(x2),3."""
    counts, node = environ.get("SLURM_STEP_TASKS_PER_NODE"), environ.get("SLURM_NODEID")
    if counts is None or node is None:
        return None
    tasks = expand_counts(counts)
    return tasks[int(node)] if int(node) < len(tasks) else None


def job_end(environ: Mapping[str, str] = os.environ) -> float | None:
    """When the scheduler will end this job, as `time.time()`; None where it does not say (Slurm does)."""
    end = environ.get("SLURM_JOB_END_TIME", "")
    return float(end) if end.isdigit() else None


def rendezvous(process: Process, environ: MutableMapping[str, str] = os.environ) -> dict[str, object]:
    """The arguments of `deepspeed.init_distributed` that make this launcher's ranks meet.

    A plain `python` is given the environment of a launcher's only rank, on a free port of the loopback interface. Under
    srun the ranks meet at MASTER_ADDR and MASTER_PORT, else on the step's first node at a port made from the job's
    number. Under mpirun they meet there if both are set, else mpi4py tells them where.
    """
    if process.launcher == "none":
        port = str(free_port())
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environ.update(alone)
    if process.launcher in ("none", "env"):
        return {"auto_mpi_discovery": False}
    if process.launcher == "slurm" and "MASTER_ADDR" not in environ:
        environ["MASTER_ADDR"] = expand_nodelist(environ.get("SLURM_STEP_NODELIST", "127.0.0.1"))[0]
    if process.launcher == "slurm" and "MASTER_PORT" not in environ:
        environ["MASTER_PORT"] = str(20000 + (int(environ["SLURM_JOB_ID"]) * 8 + int(environ["SLURM_STEP_ID"])) % 10000)
    if "MASTER_ADDR" in environ and "MASTER_PORT" in environ:
        ranks = {"RANK": process.rank, "WORLD_SIZE": process.world_size, "LOCAL_RANK": process.local_rank}
        environ.update({name: str(value) for name, value in ranks.items()})
        return {"auto_mpi_discovery": False}
    return {"auto_mpi_discovery": True, "distributed_port": int(environ.get("MASTER_PORT", "29500"))}


@contextlib.contextmanager
def port_in_words(environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Within the block ranks meet, of which one listens at MASTER_PORT.

    Raises:
        UserError: the port is taken.
    """
    try:
        yield
    except RuntimeError as error:  # torch's DistNetworkError
        if "EADDRINUSE" not in str(error):
            raise
        port = int(environ.get("MASTER_PORT", "29500"))
        raise UserError(
            f"port {port}, at which the ranks were to meet, is taken on {socket.gethostname()}, as by another run: "
            f"give this one its own, by --master_port {port + 1} before launch/train.py (of deepspeed and torchrun) or "
            f"MASTER_PORT={port + 1} in the environment"
        ) from None
