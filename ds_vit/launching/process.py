"""This process's rank from the launcher's environment, and the rendezvous of the ranks.

No other file of the trainer reads its rank from the environment.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import sys
import urllib.parse
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ds_vit.fault_tolerance.errors import UserError
from ds_vit.launching.hosts import expand_counts, first_host
from ds_vit.launching.this_host import free_port

SCHEME = "ds-vit"
"""Of the URL that `rendezvous` gives to `init_distributed`; `ds_vit.engine.start` registers it with torch."""

RUN_ID = "DS_VIT_RUN_ID"
"""Variable that identifies a run; `ds-vit launch` sets it for its ranks."""

_OMPI = "OMPI_COMM_WORLD_"
# (launcher, rank, world size, local rank, local world size, what identifies the run on all its hosts), in order of
# precedence. DeepSpeed's launcher sets LOCAL_SIZE, torchrun LOCAL_WORLD_SIZE; both set RANK, WORLD_SIZE and LOCAL_RANK.
# In a Slurm job mpirun's ranks also have the variables of srun, which started mpirun's daemons, so srun comes last.
_LAUNCHERS: tuple[tuple[str, str, str, str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("env", "RANK", "WORLD_SIZE", "LOCAL_RANK", ("LOCAL_WORLD_SIZE", "LOCAL_SIZE"), ("TORCHELASTIC_RUN_ID",)),
    ("openmpi", _OMPI + "RANK", _OMPI + "SIZE", _OMPI + "LOCAL_RANK", (_OMPI + "LOCAL_SIZE",), ("PMIX_NAMESPACE",)),
    ("mpich", "PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", ("MPI_LOCALNRANKS",), ()),
    ("slurm", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", (), ("SLURM_JOB_ID", "SLURM_STEP_ID")),
)


@dataclass(frozen=True)
class Process:
    """This process among the run's ranks, before any process group exists.

    Attributes:
        launcher: "env" (deepspeed, torchrun), "openmpi", "mpich", "slurm" (srun), or "none" for plain python.
        rank: 0 to world_size - 1 over all hosts.
        local_rank: 0 to local_world_size - 1 on this host; selects the accelerator.
        local_world_size: ranks on this host, or None if the launcher does not set it.
    """

    launcher: str
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int | None

    @property
    def spans_hosts(self) -> bool:
        """Whether ranks run on other hosts too (assumed if the launcher does not say)."""
        return self.world_size > 1 and self.local_world_size != self.world_size


def launch_words(process: Process, environ: Mapping[str, str] = os.environ) -> str:
    """The launcher and its arguments that start the same ranks on one host; "" for one rank, or if unknown."""
    if process.world_size == 1 or process.spans_hosts:
        return ""
    count = process.world_size
    if process.launcher == "env" and "TORCHELASTIC_RUN_ID" in environ:
        return f"torchrun --nproc-per-node {count}"
    if process.launcher == "env" and "LOCAL_SIZE" in environ:
        return f"deepspeed --num_accelerators {count}"
    return {"openmpi": f"mpirun -n {count} python", "mpich": f"mpirun -n {count} python"}.get(process.launcher, "")


def discover(environ: Mapping[str, str] = os.environ) -> Process:
    """Read this process's rank from the launcher's environment; plain `python` is one rank of one.

    Raises:
        UserError: a rank without a world size, or a value that is not a number.
    """
    for launcher, rank_name, world_name, local_name, local_world_names, _ in _LAUNCHERS:
        if rank_name not in environ or _belongs_to_another(launcher, environ):
            continue
        if world_name not in environ:
            raise UserError(f"{rank_name} is set but {world_name} is not; unset it to run one rank, or use a launcher")
        try:
            rank, world = int(environ[rank_name]), int(environ[world_name])
            local = int(environ.get(local_name, "0"))
            local_world = next((int(environ[name]) for name in local_world_names if name in environ), None)
            if launcher == "slurm":
                local_world = _slurm_tasks_here(environ)
        except ValueError:
            raise UserError(f"{rank_name}, {world_name} and {local_name} must be whole numbers") from None
        if not 0 <= rank < world:
            raise UserError(f"{rank_name}={rank} is not in 0 to {world - 1} ({world_name}={world})")
        return Process(launcher, rank, world, local, local_world)
    return Process("none", 0, 1, 0, 1)


def _belongs_to_another(launcher: str, environ: Mapping[str, str]) -> bool:
    """Whether a rank's variable is set, but not for this process.

    The script of a Slurm job has SLURM_PROCID=0 without being a task; `srun --mpi=pmi2` sets PMI_RANK without
    the local rank that MPICH's and Intel's own mpirun add.
    """
    if launcher == "slurm":
        return "SLURM_STEP_NUM_TASKS" not in environ
    return launcher == "mpich" and "MPI_LOCALRANKID" not in environ and "SLURM_STEP_NUM_TASKS" in environ


def _slurm_tasks_here(environ: Mapping[str, str]) -> int | None:
    """This node's number of tasks of a Slurm step, from a list such as 4(x2),3."""
    counts, node = environ.get("SLURM_STEP_TASKS_PER_NODE"), environ.get("SLURM_NODEID")
    if counts is None or node is None:
        return None
    tasks = expand_counts(counts)
    return tasks[int(node)] if int(node) < len(tasks) else None


def job_end(environ: Mapping[str, str] = os.environ) -> float | None:
    """When the scheduler will end this job, as `time.time()`; None if unknown (Slurm sets it)."""
    end = environ.get("SLURM_JOB_END_TIME", "")
    return float(end) if end.isdigit() else None


def run_token(process: Process, environ: Mapping[str, str] = os.environ, argv: Sequence[str] = ()) -> str:
    """Equal for the ranks of one run, different for other runs; the ranks compare it when they meet.

    A launcher that sets no identifier is identified by its process on one host. On several hosts only a hash of the
    command line is left, which two runs of one command share (`argv`, by default this process's).
    """
    rank_name, *_, names = next(row[1:] for row in _LAUNCHERS if row[0] == process.launcher)
    values = {name: environ.get(name, "none") for name in ((RUN_ID,) if RUN_ID in environ else names)}
    if values and "none" not in values.values():  # torchrun's with --master_port is "none"
        return " ".join(f"{name}={value}" for name, value in values.items())
    if not process.spans_hosts and (launcher := _launcher_process(rank_name)):
        return launcher
    words = [word for word in (argv or sys.argv)[1:] if not re.match("--local[-_]rank=", word)]
    return f"command line {hashlib.blake2b(repr(words).encode(), digest_size=6).hexdigest()}"


def _launcher_process(rank_name: str) -> str:
    """The nearest ancestor above this rank and its wrapper scripts; "" if unknown."""
    pid = os.getppid()
    with contextlib.suppress(OSError):  # not Linux, another user's process, or no ancestor in this container
        while True:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()  # proc(5), from the third
            if f"\0{rank_name}=".encode() not in b"\0" + Path(f"/proc/{pid}/environ").read_bytes():
                return f"launcher {pid} started at {fields[19]}"
            pid = int(fields[1])
    return ""


def rendezvous(process: Process, environ: MutableMapping[str, str] = os.environ) -> dict[str, object]:
    """The arguments of `deepspeed.init_distributed` for this launcher's ranks.

    Plain `python` gets the environment of a single rank, on a free port of the loopback interface. srun's ranks use
    MASTER_ADDR and MASTER_PORT, else the step's first node and a port derived from the job number. mpirun's ranks use
    both variables if they are set, else the loopback interface on one host; on several, mpi4py finds the address.
    """
    if process.launcher == "none":
        single = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        environ.update(single, MASTER_PORT=str(free_port()))
        return {"auto_mpi_discovery": False}
    run = {"init_method": f"{SCHEME}://{urllib.parse.quote(run_token(process, environ), safe='')}"}
    if process.launcher == "slurm":
        environ.setdefault("MASTER_ADDR", first_host(environ.get("SLURM_STEP_NODELIST", "127.0.0.1")))
        port = 20000 + (int(environ["SLURM_JOB_ID"]) * 8 + int(environ["SLURM_STEP_ID"])) % 10000
        environ.setdefault("MASTER_PORT", str(port))
    elif process.launcher != "env" and not process.spans_hosts:
        environ.setdefault("MASTER_ADDR", "127.0.0.1")
        environ.setdefault("MASTER_PORT", "29500")
    if process.launcher != "env" and not {"MASTER_ADDR", "MASTER_PORT"} <= environ.keys():
        return {"auto_mpi_discovery": True, "distributed_port": int(environ.get("MASTER_PORT", "29500")), **run}
    ranks = {"RANK": process.rank, "WORLD_SIZE": process.world_size, "LOCAL_RANK": process.local_rank}
    environ.update({name: str(value) for name, value in ranks.items()})
    return {"auto_mpi_discovery": False, **run}
