"""The launchers: the commands that start a run's ranks on its hosts, and how a signal reaches them.

A launcher is created once per run and makes new commands for every attempt, with a port that is free at that time.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ds_vit.fault_tolerance.errors import UserError
from ds_vit.launching.hosts import Ended, Host, first_host, on_hosts, read_hosts, ssh_command
from ds_vit.launching.process import RUN_ID
from ds_vit.launching.rank import PROBED, Job, signal_ranks
from ds_vit.launching.this_host import free_port, listed_gpus

_PACKAGE = Path(__file__).resolve().parents[1]
_SHIPPED = _PACKAGE / "shipped"  # of a wheel
RANK_PY = (_SHIPPED if _SHIPPED.is_dir() else _PACKAGE.parent) / "launch" / "rank.py"
_SSH_SECONDS = 60


@dataclass
class Launcher(ABC):
    """How the ranks of one run are started.

    Attributes:
        run: unique name of the run, which identifies its ranks on a host.
        environ: the environment of the launching process.
        port: of the rendezvous; None for a free one at every attempt.
    """

    run: str
    environ: Mapping[str, str]
    port: int | None = None

    @abstractmethod
    def commands(self, job: Job) -> dict[str, list[str]]:
        """The commands of the next attempt, which run side by side in `job.cwd`: their arguments, by the host that an
        ssh goes to, or "".

        Raises:
            UserError: it cannot start, and why.
        """

    def send(self, pids: Sequence[int], signum: int) -> None:
        """Send SIGUSR1 ("save and end"), SIGINT (the same, by Ctrl-C) or SIGKILL to the ranks.

        mpirun and srun forward SIGUSR1 to all ranks. They kill the ranks without saving on SIGTERM and SIGINT.

        Args:
            pids: processes of `commands`.
            signum: the signal.
        """
        for pid in pids:
            os.kill(pid, signal.SIGTERM if signum == signal.SIGKILL else signal.SIGUSR1)

    def _rank_words(self, job: Job, address: str, port: int, **of_host: Any) -> list[str]:
        """`launch/rank.py` for a rank, or with a host's fields of `Job` for its ranks, which meet at this address."""
        meeting = {"MASTER_ADDR": address, "MASTER_PORT": str(port), RUN_ID: self.run}
        job = replace(job, environ={**job.environ, **meeting}, **of_host)
        return [sys.executable, "-u", str(RANK_PY), f"--run={self.run}", job.encode()]


@dataclass
class Local(Launcher):
    """Ranks on this machine.

    Attributes:
        num_ranks: None for one rank per GPU.
        include: DeepSpeed's, e.g. "localhost:0,2".
    """

    num_ranks: int | None = None
    include: str = ""

    def commands(self, job: Job) -> dict[str, list[str]]:
        (slots,) = filtered([Host("localhost", self.num_ranks or self._num_gpus())], self.include, "").values()
        port = free_port(self.port or 0)
        return {"": self._rank_words(job, "127.0.0.1", port, slots=slots, world_size=len(slots))}

    def _num_gpus(self) -> int:
        """The GPUs that a rank sees; those of the machine for `include`, whose numbers are the machine's."""
        if self.environ.get("DS_ACCELERATOR") == "cpu":
            return 1
        visible = None if self.include else self.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = listed_gpus() if visible is None else list(filter(None, visible.split(",")))
        return len(gpus) or 1

    def send(self, pids: Sequence[int], signum: int) -> None:
        signal_ranks(self.run, signum)


@dataclass
class Hostfile(Launcher):
    """Ranks on the hosts of a hostfile, by an ssh to each.

    Attributes:
        hostfile: as DeepSpeed reads it.
        include, exclude: DeepSpeed's filters, `name@name:0,2`.
        address: of rank 0; None for the first host's name.
        ssh_port: of every sshd; None for ssh's default.
    """

    hostfile: Path = Path("hostfile")
    include: str = ""
    exclude: str = ""
    address: str | None = None
    ssh_port: int | None = None

    def hosts(self) -> dict[str, list[int]]:
        """The hosts of the run, rank 0's first, and the slots that it uses there."""
        return filtered(read_hosts(str(self.hostfile), self.environ), self.include, self.exclude)

    def commands(self, job: Job) -> dict[str, list[str]]:
        hosts = self.hosts()
        port = self._probe(hosts)
        self._on_hosts(hosts, "--signal=KILL")  # processes of an earlier attempt
        address = self.address or next(iter(hosts)).rpartition("@")[2]
        world_size = sum(map(len, hosts.values()))
        commands: dict[str, list[str]] = {}
        first = 0
        for name, slots in hosts.items():
            words = self._rank_words(job, address, port, slots=slots, first=first, world_size=world_size)
            commands[name] = ssh_command(name, words, self.environ, self.ssh_port)
            first += len(slots)
        return commands

    def send(self, pids: Sequence[int], signum: int) -> None:
        self._on_hosts(self.hosts(), f"--signal={signal.Signals(signum).name.removeprefix('SIG')}")

    def _probe(self, hosts: Mapping[str, Sequence[int]]) -> int:
        """Find this clone on every host, and a free port on the first.

        Raises:
            UserError: hosts that cannot be reached or have no clone, with ssh's message; or incompatible hosts.
        """
        first, *others = hosts
        port = [f"--port={self.port}"] if self.port else []
        answers = self._on_hosts([first], "--probe", *port) | self._on_hosts(others, "--probe")
        facts = {name: json.loads(text) for name, ended in answers.items() if (text := ended.marked(PROBED))}
        if bad := [name for name in hosts if name not in facts]:
            lines = [f"{name}: {answers[name].failure(_SSH_SECONDS)}" for name in bad]
            raise UserError(
                f"{len(bad)} of {len(hosts)} hosts cannot be used; {'; '.join(lines)}. "
                f"Check with: ssh HOST {shlex.quote(sys.executable)} {shlex.quote(str(RANK_PY))} --probe"
            )
        check_hosts(hosts, facts)
        return facts[first]["port"]

    def _on_hosts(self, hosts: Iterable[str], *words: str) -> dict[str, Ended]:
        """Run launch/rank.py with these arguments on every host at once."""
        remote = [sys.executable, str(RANK_PY), f"--run={self.run}", *words]
        ended = on_hosts([(host, remote) for host in hosts], self.environ, _SSH_SECONDS, self.ssh_port)
        return dict(zip(hosts, ended, strict=True))


@dataclass
class Mpi(Launcher):
    """mpirun of Open MPI, MPICH or Intel MPI.

    Attributes:
        num_ranks: on all hosts.
        mpirun: the command and its options.
        hostfile: as DeepSpeed reads it; None for this machine or the scheduler's hosts.
        address: of rank 0; None for the first host of the hostfile, else this machine.
    """

    num_ranks: int = 1
    mpirun: Sequence[str] = ("mpirun",)
    hostfile: Path | None = None
    address: str | None = None
    _folder: tempfile.TemporaryDirectory | None = field(default=None, repr=False)

    def commands(self, job: Job) -> dict[str, list[str]]:
        family = self._family()
        hosts = read_hosts(str(self.hostfile), self.environ) if self.hostfile else ()
        address = self.address or (hosts[0].name.rpartition("@")[2] if hosts else _own_address())
        # No binding: a rank would share one core with all its loader workers.
        if family == "openmpi":
            argv = [*self.mpirun, "-np", str(self.num_ranks), "--bind-to", "none"]
            argv += ["--hostfile", str(self.hostfile.resolve())] if self.hostfile else []
        else:
            argv = [*self.mpirun, "-n", str(self.num_ranks)]
            argv += ["-genv", "I_MPI_PIN", "0"] if family == "intel" else ["-bind-to", "none"]
            argv += ["-f", str(self._machinefile(hosts))] if hosts else []
        return {"": [*argv, *self._rank_words(job, address, free_port(self.port or 0))]}

    def _family(self) -> str:
        """The MPI of this mpirun, from the output of `--version`."""
        program = shutil.which(self.mpirun[0], path=self.environ.get("PATH"))
        if program is None:
            raise UserError(f"{self.mpirun[0]} is not on PATH: load the cluster's MPI, or `bash launch/setup.sh mpi`")
        done = subprocess.run(
            [program, "--version"], env=dict(self.environ), capture_output=True, text=True, timeout=60
        )
        return mpi_family(done.stdout + done.stderr)

    def _machinefile(self, hosts: Sequence[Host]) -> Path:
        """The hosts as Hydra reads them: `name:slots`."""
        self._folder = self._folder or tempfile.TemporaryDirectory(prefix="ds-vit-")
        path = Path(self._folder.name, "machinefile")
        path.write_text("".join(f"{host.name}:{host.slots}\n" for host in hosts))
        return path


@dataclass
class Slurm(Launcher):
    """srun inside a job of sbatch or salloc: one task per rank.

    Attributes:
        srun: the command and its options.
    """

    srun: Sequence[str] = ("srun",)

    def commands(self, job: Job) -> dict[str, list[str]]:
        nodes = self.environ.get("SLURM_JOB_NODELIST")
        if not nodes or not self.environ.get("SLURM_JOB_ID"):
            raise UserError("SLURM_JOB_ID is not set: start this by sbatch launch/slurm.sbatch, or inside salloc")
        first = first_host(nodes)
        if self.port or first.partition(".")[0] == socket.gethostname().partition(".")[0]:
            port = free_port(self.port or 0)
        else:  # on a login node the first node cannot be probed without a step, but the job has it exclusively
            port = 20000 + int(self.environ["SLURM_JOB_ID"]) % 10000
        return {"": [*self.srun, "--kill-on-bad-exit=1", *self._rank_words(job, first, port)]}


def filtered(hosts: Sequence[Host], include: str, exclude: str) -> dict[str, list[int]]:
    """The slots that DeepSpeed's `--include` or `--exclude` select, by host, in the hostfile's order.

    Raises:
        UserError: both are given, a host or slot is not in the hostfile, or none is left.
    """
    if include and exclude:
        raise UserError("--include and --exclude cannot be combined; give one")
    flag = "--include" if include else "--exclude"
    slots = {host.name: list(range(host.slots)) for host in hosts}
    named: dict[str, set[int]] = {name: set() for name in slots}
    for item in filter(None, (include or exclude).split("@")):
        name, _, numbers = item.partition(":")
        if name not in slots:
            raise UserError(f"{flag} {name}: the hosts are {', '.join(slots)}")
        if not re.fullmatch(r"\d+(,\d+)*|", numbers):
            raise UserError(f"{item!r} is not of the form NAME or NAME:0,2")
        chosen = set(map(int, numbers.split(","))) if numbers else set(slots[name])
        if not chosen <= set(slots[name]):
            raise UserError(f"{flag} {item}: {name} has slots 0 to {slots[name][-1]}")
        named[name] |= chosen
    left = {name: [slot for slot in own if (slot in named[name]) == bool(include)] for name, own in slots.items()}
    left = {name: own for name, own in left.items() if own}
    if not left:
        raise UserError("no host is left to run on")
    return left


def check_hosts(hosts: Mapping[str, Sequence[int]], facts: Mapping[str, Mapping[str, Any]]) -> None:
    """Compare what the hosts have told of themselves.

    Args:
        hosts: with the slots that the run would use.
        facts: host → `ds_vit.launching.rank.probe` there.

    Raises:
        UserError: two names for one machine, more ranks than GPUs, or other code or packages than on the first host.
    """
    first, *others = hosts
    names: dict[str, str] = {}
    for name, slots in hosts.items():
        here = facts[name]
        other = names.setdefault(here["machine"], name)
        if other != name:
            raise UserError(f"{other} and {name} are one machine: keep one of the names in the hostfile")
        if here["gpus"] and len(slots) > here["gpus"]:
            raise UserError(f"{name}: {len(slots)} slots, but {here['gpus']} GPUs: write slots={here['gpus']}")
    for name in others:
        for what, version in facts[first]["versions"].items():
            if (there := facts[name]["versions"].get(what)) != version:
                same = "install the same packages, git pull there, or put both on a shared disk"
                raise UserError(f"{what} is {version} on {first} and {there} on {name}: {same}")


def mpi_family(version: str) -> str:
    """ "openmpi", "intel" or "mpich", by the text of `mpirun --version`.

    Raises:
        UserError: it is none of them.
    """
    for sign, family in {"Open MPI": "openmpi", "Open-MPI": "openmpi", "Intel(R)": "intel", "HYDRA": "mpich"}.items():
        if sign in version:
            return family
    raise UserError(f"mpirun --version says {version[:80]!r}: neither Open MPI nor MPICH nor Intel MPI")


def _own_address() -> str:
    """This machine's address on its default route; loopback without one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # sends nothing; the kernel selects the interface of the default route
        return probe.getsockname()[0]
    return "127.0.0.1"
