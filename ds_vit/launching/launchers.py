"""The launchers: the command that starts a run's ranks on its hosts, and how a signal reaches them.

A launcher is created once per run and makes a new `Command` for every attempt, with a port that is free at that time.
Arguments that pass through a shell (DeepSpeed's pdsh command) are quoted here, or refused.
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
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ds_vit.fault_tolerance.errors import UserError
from ds_vit.launching.environment import forwarded, render
from ds_vit.launching.hosts import Host, first_host, read_hosts
from ds_vit.launching.ports import free_port
from ds_vit.launching.rank import PROBED, Job, signal_ranks

_PACKAGE = Path(__file__).resolve().parents[1]
_SHIPPED = _PACKAGE / "shipped"  # of a wheel
RANK_PY = (_SHIPPED if _SHIPPED.is_dir() else _PACKAGE.parent) / "launch" / "rank.py"
_SSH_SECONDS = 60


@dataclass(frozen=True)
class Command:
    """What to start: arguments (no shell), folder and whole environment."""

    argv: tuple[str, ...]
    cwd: Path
    environ: Mapping[str, str]


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
    def command(self, job: Job) -> Command:
        """The command of the next attempt.

        Raises:
            UserError: it cannot start, and why.
        """

    def send(self, launcher: subprocess.Popen, signum: int) -> None:
        """Send SIGUSR1 ("save and end") or SIGKILL to the ranks.

        mpirun and srun forward SIGUSR1 to all ranks. They kill the ranks without saving on SIGTERM.
        """
        os.kill(launcher.pid, signal.SIGUSR1 if signum == signal.SIGUSR1 else signal.SIGTERM)

    def _rank_words(self, job: Job) -> list[str]:
        return [str(RANK_PY), f"--run={self.run}", job.encode()]


@dataclass
class Local(Launcher):
    """DeepSpeed's launcher on this machine.

    Attributes:
        num_ranks: None for one rank per GPU.
        include: DeepSpeed's, e.g. "localhost:0,2".
    """

    num_ranks: int | None = None
    include: str = ""

    def command(self, job: Job) -> Command:
        ranks = ["--num_gpus", str(self.num_ranks)] if self.num_ranks else []
        ranks += ["--include", self.include] if self.include else []
        argv = [*_deepspeed(), *ranks, "--master_port", str(free_port(self.port or 0)), *self._rank_words(job)]
        return Command(tuple(argv), Path(job.cwd), self.environ)

    def send(self, launcher: subprocess.Popen, signum: int) -> None:
        signal_ranks(self.run, signum)


@dataclass
class Hostfile(Launcher):
    """DeepSpeed's launcher over pdsh and ssh.

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
    _folder: tempfile.TemporaryDirectory | None = field(default=None, repr=False)

    def hosts(self) -> tuple[Host, ...]:
        """The hosts of the run, rank 0's first."""
        return filtered(read_hosts(str(self.hostfile), self.environ), self.include, self.exclude)

    def command(self, job: Job) -> Command:
        if _unsafe(sys.executable):
            raise UserError(
                f"DeepSpeed writes the path of Python, {sys.executable!r}, into remote commands without quotes; "
                "create the environment at a path with only letters, digits and . _ - /"
            )
        if shutil.which("pdsh", path=self.environ.get("PATH")) is None:
            raise UserError("pdsh is not installed on this machine: apt-get install pdsh, or use launch/mpi.sh")
        hosts = self.hosts()
        port = self._probe(hosts)
        self._on_hosts(hosts, ["--signal=KILL"])  # processes of an earlier attempt
        self._folder = self._folder or tempfile.TemporaryDirectory(prefix="ds-vit-")
        variables = dict(job.environ)
        variables["PYTHONPATH"] = os.pathsep.join(
            filter(None, [str(RANK_PY.parent.parent), variables.get("PYTHONPATH")])
        )
        env_file = Path(self._folder.name, "deepspeed_env")
        env_file.write_text(render(variables))
        names = ["--include", self.include] if self.include else ["--exclude", self.exclude] if self.exclude else []
        names += ["--ssh_port", str(self.ssh_port)] if self.ssh_port else []
        address = self.address or hosts[0].name.rpartition("@")[2]
        argv = [*_deepspeed(), "--hostfile", str(self.hostfile.resolve()), "--force_multi", "--no_ssh_check", *names]
        argv += ["--master_addr", address, "--master_port", str(port)]
        # pdsh passes the rest to a shell on every host; DeepSpeed quotes only arguments with blanks.
        script, *words = self._rank_words(replace(job, environ={}))
        # From the root folder, whose name needs no quotes: DeepSpeed writes `cd <here>;` into the remote command.
        return Command((*argv, shlex.quote(script), *words), Path("/"), self._launcher_environ(env_file))

    def _launcher_environ(self, env_file: Path) -> dict[str, str]:
        """The environment of DeepSpeed's launcher, without variables that it would not quote correctly."""
        exported = forwarded(self.environ)
        environ = {name: value for name, value in self.environ.items() if name not in exported or not _unsafe(value)}
        keep_alive = "-o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=15 -o ServerAliveCountMax=3"
        # ssh uses the first of a repeated option.
        environ["PDSH_SSH_ARGS_APPEND"] = f"{environ.get('PDSH_SSH_ARGS_APPEND', '')} {keep_alive}".strip()
        return environ | {"DS_ENV_FILE": str(env_file)}

    def send(self, launcher: subprocess.Popen, signum: int) -> None:
        self._on_hosts(self.hosts(), [f"--signal={signal.Signals(signum).name.removeprefix('SIG')}"])

    def _probe(self, hosts: Sequence[Host]) -> int:
        """Find this clone on every host, and a free port on the first.

        Raises:
            UserError: hosts that cannot be reached or have no clone, with ssh's message; or incompatible hosts.
        """
        port = [f"--port={self.port}"] if self.port else []
        answers = self._on_hosts(hosts[:1], ["--probe", *port]) | self._on_hosts(hosts[1:], ["--probe"])
        found = {name: re.search(rf"^{PROBED}(.*)$", text, re.MULTILINE) for name, text in answers.items()}
        bad = {name: answers[name] for name, match in found.items() if match is None}
        if bad:
            lines = [f"{name}: {' '.join(text.split()) or 'no answer'}" for name, text in bad.items()]
            raise UserError(
                f"{len(bad)} of {len(hosts)} hosts cannot be used; {'; '.join(lines)}. "
                f"Check with: ssh HOST {shlex.quote(sys.executable)} {shlex.quote(str(RANK_PY))} --probe"
            )
        facts = {name: json.loads(match.group(1)) for name, match in found.items() if match}
        check_hosts(hosts, facts)
        return facts[hosts[0].name]["port"]

    def _on_hosts(self, hosts: Sequence[Host], words: Sequence[str]) -> dict[str, str]:
        """Run launch/rank.py with these arguments on every host at once; host → its output."""
        remote = shlex.join([sys.executable, str(RANK_PY), f"--run={self.run}", *words])
        options = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=15"]
        options += ["-p", str(self.ssh_port)] if self.ssh_port else []

        def ask(host: Host) -> str:
            try:
                done = subprocess.run(
                    ["ssh", *options, host.name, remote],
                    env=dict(self.environ),
                    stdin=subprocess.DEVNULL,
                    capture_output=True,
                    text=True,
                    timeout=_SSH_SECONDS,
                )
            except subprocess.TimeoutExpired:
                return f"ssh has not answered within {_SSH_SECONDS} s"
            return done.stdout + done.stderr

        with ThreadPoolExecutor(max_workers=64) as pool:
            return dict(zip((host.name for host in hosts), pool.map(ask, hosts), strict=True))


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
    mpirun: tuple[str, ...] = ("mpirun",)
    hostfile: Path | None = None
    address: str | None = None
    _folder: tempfile.TemporaryDirectory | None = field(default=None, repr=False)

    def command(self, job: Job) -> Command:
        family = self._family()
        hosts = read_hosts(str(self.hostfile), self.environ) if self.hostfile else ()
        address = self.address or (hosts[0].name.rpartition("@")[2] if hosts else _own_address())
        meeting = {"MASTER_ADDR": address, "MASTER_PORT": str(free_port(self.port or 0))}
        job = replace(job, environ={**job.environ, **meeting})
        # No binding: a rank would share one core with all its loader workers.
        if family == "openmpi":
            argv = [*self.mpirun, "-np", str(self.num_ranks), "--bind-to", "none"]
            argv += ["--hostfile", str(self.hostfile.resolve())] if self.hostfile else []
        else:
            argv = [*self.mpirun, "-n", str(self.num_ranks)]
            argv += ["-genv", "I_MPI_PIN", "0"] if family == "intel" else ["-bind-to", "none"]
            argv += ["-f", str(self._machinefile(hosts))] if hosts else []
        return Command((*argv, sys.executable, "-u", *self._rank_words(job)), Path(job.cwd), self.environ)

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
    """srun inside a job of sbatch or salloc: one task a rank.

    Attributes:
        srun: the command and its options.
    """

    srun: tuple[str, ...] = ("srun",)

    def command(self, job: Job) -> Command:
        nodes = self.environ.get("SLURM_JOB_NODELIST")
        if not nodes or not self.environ.get("SLURM_JOB_ID"):
            raise UserError("SLURM_JOB_ID is not set: start this by sbatch launch/slurm.sbatch, or inside salloc")
        first = first_host(nodes)
        if self.port or first.partition(".")[0] == socket.gethostname().partition(".")[0]:
            port = free_port(self.port or 0)
        else:  # on a login node the first node cannot be probed without a step, but the job has it exclusively
            port = 20000 + int(self.environ["SLURM_JOB_ID"]) % 10000
        job = replace(job, environ={**job.environ, "MASTER_ADDR": first, "MASTER_PORT": str(port)})
        argv = [*self.srun, "--kill-on-bad-exit=1", sys.executable, "-u", *self._rank_words(job)]
        return Command(tuple(argv), Path(job.cwd), self.environ)


def filtered(hosts: Sequence[Host], include: str, exclude: str) -> tuple[Host, ...]:
    """The hosts that DeepSpeed's `--include` or `--exclude` select, in the hostfile's order.

    Raises:
        UserError: both are given, a host is not in the hostfile, or none is left.
    """
    if include and exclude:
        raise UserError("--include and --exclude cannot be combined; give one")
    slots = {host.name: host.slots for host in hosts}
    left = dict.fromkeys(slots, 0) if include else dict(slots)
    for item in filter(None, (include or exclude).split("@")):
        name, _, numbers = item.partition(":")
        if name not in slots:
            raise UserError(f"{'--include' if include else '--exclude'} {name}: the hostfile has {', '.join(slots)}")
        if not re.fullmatch(r"\d+(,\d+)*|", numbers):
            raise UserError(f"{item!r} is not of the form NAME or NAME:0,2")
        count = len(set(numbers.split(","))) if numbers else slots[name]
        left[name] = count if include else left[name] - count
    chosen = tuple(Host(name, count) for name, count in left.items() if count > 0)
    if not chosen:
        raise UserError("no host is left to run on")
    return chosen


def check_hosts(hosts: Sequence[Host], facts: Mapping[str, Mapping[str, Any]]) -> None:
    """Compare what the hosts have told of themselves.

    Args:
        hosts: with the slots that the run would use.
        facts: host → `ds_vit.launching.rank.probe` there.

    Raises:
        UserError: two names for one machine, more ranks than GPUs, or other code or packages than on the first host.
    """
    first, *others = (host.name for host in hosts)
    names: dict[str, str] = {}
    for host in hosts:
        here = facts[host.name]
        other = names.setdefault(here["machine"], host.name)
        if other != host.name:
            raise UserError(f"{other} and {host.name} are one machine: keep one of the names in the hostfile")
        if here["gpus"] and host.slots > here["gpus"]:
            raise UserError(f"{host.name}: {host.slots} slots, but {here['gpus']} GPUs: write slots={here['gpus']}")
    for name in others:
        for package, version in facts[first]["versions"].items():
            if (there := facts[name]["versions"].get(package)) != version:
                raise UserError(f"{package} is {version} on {first} and {there} on {name}: make them the same")
        if facts[name]["code"] != facts[first]["code"]:
            raise UserError(
                f"the code of ds_vit on {name} is not that on {first} (checksums {facts[name]['code']} and "
                f"{facts[first]['code']}): git status and git pull there, or put the clone on a shared disk"
            )


def mpi_family(version: str) -> str:
    """ "openmpi", "intel" or "mpich", by the text of `mpirun --version`.

    Raises:
        UserError: it is none of them.
    """
    for sign, family in {"Open MPI": "openmpi", "Open-MPI": "openmpi", "Intel(R)": "intel", "HYDRA": "mpich"}.items():
        if sign in version:
            return family
    raise UserError(f"mpirun --version says {version[:80]!r}: neither Open MPI nor MPICH nor Intel MPI")


def _deepspeed() -> list[str]:
    """DeepSpeed's launcher, run by this interpreter: a script's first line cannot contain a path with a blank."""
    script = Path(sys.executable).with_name("deepspeed")
    return [sys.executable, str(script)] if script.exists() else [sys.executable, "-m", "deepspeed.launcher.runner"]


def _own_address() -> str:
    """This machine's address on its default route; loopback without one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, contextlib.suppress(OSError):
        probe.connect(("192.0.2.1", 9))  # sends nothing; the kernel selects the interface of the default route
        return probe.getsockname()[0]
    return "127.0.0.1"


def _unsafe(text: str) -> bool:
    return shlex.quote(text) != text
