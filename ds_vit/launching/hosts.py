"""The hosts of a run and their slots, from hostfiles, Slurm and PBS, and the variables that go to every host.

    ds-vit hosts --from slurm --output hostfile

A slot is a rank's place: one accelerator, or one CPU rank. `.deepspeed_env` is DeepSpeed's; unlike DeepSpeed
0.19, comments and blank lines in it are allowed.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ds_vit.fault_tolerance.errors import UserError, read_text, text_lines

_SSH_OPTIONS = (
    *("-oBatchMode=yes", "-oConnectTimeout=15", "-oServerAliveInterval=15", "-oServerAliveCountMax=3"),
    "-oControlMaster=no",  # a shared connection that outlives this ssh would keep its output open
)

# Names reach ssh as arguments: no leading dash (an option), nothing that a shell expands.
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:%@-]*")
_HOSTFILE_LINE = re.compile(r"(\S+)\s+slots=(\d+)(?:\s.*)?")  # DeepSpeed's runner.py: ^(\S+)\s+slots=(\d+)
_NODE_LINE = re.compile(r"([^\s:]+):(\d+)|\S+")

FORWARDED = (
    *("NCCL_", "GLOO_", "UCX_", "FI_", "SHARP_", "MV2_", "TORCH_", "PYTORCH_", "DS_", "DEEPSPEED_", "OMP_", "MKL_"),
    *("HF_", "MLFLOW", "PYTHON", "LD_LIBRARY_PATH"),
)
"""Beginnings of the names of variables that go from the launching machine to every host."""

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Host:
    """A host of a run and the number of ranks that it takes (1 or more)."""

    name: str
    slots: int

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise UserError(f"{self.name!r} is not a host name: letters, digits and . _ - : % @, no dash first")
        if self.slots < 1:
            raise UserError(f"host {self.name} has {self.slots} slots; it needs at least 1, or leave the host out")


def parse_hosts(text: str, path: str = "hostfile") -> tuple[Host, ...]:
    """Read a DeepSpeed hostfile, `name slots=N` a line; or a node file of PBS or a machine file of MPI.

    These have a name a line and slot, or `name:N`; repeats add up. Blank lines and lines of `#` are left out.

    Raises:
        UserError: a line of another form, a host twice in a hostfile, or no host at all; with the line's number.
    """
    lines = list(numbered_lines(text))
    is_hostfile = any("slots" in line for _, line in lines)
    slots: Counter[str] = Counter()
    seen: dict[str, int] = {}
    for number, line in lines:
        where = f"{path}, line {number}: "
        match = (_HOSTFILE_LINE if is_hostfile else _NODE_LINE).fullmatch(line)
        if match is None:
            form = "of the form `name slots=N`" if is_hostfile else "one host name"
            raise UserError(f"{where}{line!r} is not {form}")
        host = _host(match[1] or line, int(match[2] or 1), where)
        if is_hostfile and host.name in seen:
            raise UserError(f"{where}host {host.name} is already on line {seen[host.name]}; keep one")
        seen[host.name] = number
        slots[host.name] += host.slots
    if not slots:
        raise UserError(f"{path} names no host; a line is `name slots=N`")
    return tuple(Host(name, count) for name, count in slots.items())


def to_hostfile(hosts: tuple[Host, ...]) -> str:
    """The text of a DeepSpeed hostfile; `parse_hosts` gives the same hosts back."""
    return "".join(f"{host.name} slots={host.slots}\n" for host in hosts)


def first_host(nodelist: str) -> str:
    """The first name of Slurm's list: `n[08-10]-ib,gpu1` → "n08-ib"; a container often has no `scontrol`."""
    return re.sub(r"\[(\d+)[^]]*\]", r"\1", nodelist).partition(",")[0]


def expand_nodelist(text: str, environ: Mapping[str, str]) -> list[str]:
    """`n[1-3,7]-ib,gpu[08-10]` → every name, in order, by `scontrol show hostnames`.

    Raises:
        UserError: there is no `scontrol`, or it rejects the list.
    """
    command = ["scontrol", "show", "hostnames", text]
    try:
        done = subprocess.run(command, env=dict(environ), capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", "") or str(error)
        raise UserError(f"{' '.join(command)}: {reason.strip()}; write a hostfile and give --from FILE") from None
    return done.stdout.split()


def expand_counts(text: str) -> list[int]:
    """`4(x2),3` → [4, 4, 3]: Slurm's tasks per node, in the order of its node list.

    Raises:
        UserError: anything else.
    """
    counts: list[int] = []
    for item in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", item.strip())
        if match is None:
            raise UserError(f"Slurm's tasks per node: {text!r} is not a list of counts such as 4(x2),3")
        counts += [int(match.group(1))] * int(match.group(2) or 1)
    return counts


def from_slurm(environ: Mapping[str, str]) -> tuple[Host, ...]:
    """The hosts of a Slurm job: GPUs per node where the job asked for them so, tasks per node otherwise.

    Raises:
        UserError: not inside a job, or variables that contradict each other.
    """
    nodes = environ.get("SLURM_JOB_NODELIST") or environ.get("SLURM_NODELIST")
    if not nodes:
        raise UserError("SLURM_JOB_NODELIST is not set: this is not inside a Slurm job (salloc, sbatch)")
    names = expand_nodelist(nodes, environ)
    gpus = environ.get("SLURM_GPUS_PER_NODE", "")  # "4", "h100:4" or "h100:2,a100:2"
    if gpus:
        try:
            counts = [sum(int(kind.split(":")[-1]) for kind in gpus.split(","))] * len(names)
        except ValueError:
            raise UserError(f"SLURM_GPUS_PER_NODE={gpus!r} is not a number of GPUs; give --slots N") from None
    else:
        tasks = environ.get("SLURM_TASKS_PER_NODE") or environ.get("SLURM_STEP_TASKS_PER_NODE") or "1"
        counts = expand_counts(tasks)
        if len(counts) == 1:
            counts *= len(names)
    if len(counts) != len(names):
        raise UserError(f"{nodes} has {len(names)} hosts, and SLURM_TASKS_PER_NODE has {len(counts)} counts")
    return tuple(_host(name, count, "SLURM_JOB_NODELIST: ") for name, count in zip(names, counts, strict=True))


def from_pbs(environ: Mapping[str, str]) -> tuple[Host, ...]:
    """The hosts of a PBS job: how often each occurs in the file that PBS_NODEFILE names.

    Raises:
        UserError: not inside a job, or the file cannot be read.
    """
    path = environ.get("PBS_NODEFILE")
    if not path:
        raise UserError("PBS_NODEFILE is not set: this is not inside a PBS job (qsub)")
    return parse_hosts(read_text(path, "PBS_NODEFILE="), path)


_SCHEDULERS = {"slurm": from_slurm, "pbs": from_pbs}


def read_hosts(source: str | None, environ: Mapping[str, str], slots: int | None = None) -> tuple[Host, ...]:
    """The hosts of a run.

    Args:
        source: "slurm", "pbs", a file (a hostfile, or a list of names), or None for the scheduler of this job.
        environ: where a scheduler left its lists.
        slots: ranks per host, in place of what the source says.

    Raises:
        UserError: there is no such source, or it is not of its form.
    """
    if source is None:
        signs = {"SLURM_JOB_NODELIST": "slurm", "SLURM_NODELIST": "slurm", "PBS_NODEFILE": "pbs"}
        source = next((scheduler for variable, scheduler in signs.items() if environ.get(variable)), None)
    if source is None:
        raise UserError(f"no job of {', '.join(_SCHEDULERS)} around this process; give --from FILE")
    if source == "lsf":
        raise UserError("--from lsf was removed; write a hostfile (`name slots=N` a line) and give --from FILE")
    hosts = _SCHEDULERS[source](environ) if source in _SCHEDULERS else parse_hosts(read_text(source, ""), source)
    return hosts if slots is None else tuple(Host(host.name, slots) for host in hosts)


def read_environment(path: str | Path) -> dict[str, str]:
    """Read `NAME=VALUE` lines; lines of `#` and blank lines are left out, `export ` before a name too.

    A value is taken as it stands; one pair of quotes around all of it is removed. Nothing is expanded.

    Raises:
        UserError: the file cannot be read, a line of another form, or a name twice; with the line's number.
    """
    variables: dict[str, str] = {}
    for number, line in numbered_lines(read_text(path, "environment file ")):
        name, equals, value = line.removeprefix("export ").partition("=")
        name, value = name.strip(), value.strip()
        if not equals or not _VARIABLE.fullmatch(name):
            raise UserError(f"{path}, line {number}: {line!r} is not of the form NAME=VALUE")
        if name in variables:
            raise UserError(f"{path}, line {number}: {name} is set twice; keep one line")
        if len(value) > 1 and value[0] == value[-1] and value[0] in "\"'":
            value = value[1:-1]
        variables[name] = value
    return variables


def collected(environ: Mapping[str, str], cwd: Path, files: Sequence[str | Path] = ()) -> dict[str, str]:
    """The variables for every host; later ones win: the environment, `.deepspeed_env` (home, then `cwd`), `files`.

    Of the environment, what steers communication, DeepSpeed and Python goes to every host.

    Raises:
        UserError: a file that cannot be read or is not of its form.
    """
    variables = {name: text for name, text in environ.items() if name.startswith(FORWARDED) and name != "DS_ENV_FILE"}
    usual = environ.get("DS_ENV_FILE", ".deepspeed_env")
    places = [Path(environ["HOME"]) / usual] if environ.get("HOME") else []
    for path in [*(path for path in dict.fromkeys([*places, cwd / usual]) if path.is_file()), *files]:
        variables |= read_environment(path)
    return variables


# ---- Programs on the hosts -------------------------------------------------------------------------------------------

TIMED_OUT = -9
"""`Ended.code` of a program whose time was up."""


@dataclass(frozen=True)
class Ended:
    """A program that has ended on a host: its exit code, the lines of its output, and when (`time.monotonic()`)."""

    code: int
    lines: Sequence[str]
    at: float = 0.0

    def marked(self, mark: str) -> str:
        """The rest of the first line with this mark, which a login script cannot have printed; "" for none."""
        return next((line.partition(mark)[2] for line in self.lines if mark in line), "")

    def failure(self, seconds: float) -> str:
        """Why the program failed, with its output; `seconds` is its time limit."""
        text = " ".join(self.lines)
        if self.code == TIMED_OUT:
            return f"no answer in {seconds:g} s{f' ({text})' if text else ''}"
        return text or f"exit code {self.code}"


def ssh_command(host: str, words: Sequence[str], environ: Mapping[str, str], port: int | None = None) -> list[str]:
    """The arguments that run a command on a host; nothing in it reaches the shell there unquoted."""
    # DeepSpeed's launcher has its ssh options in this variable; ssh uses the first of a repeated option.
    own = [*shlex.split(environ.get("PDSH_SSH_ARGS_APPEND", "")), *_SSH_OPTIONS, *(["-p", str(port)] if port else [])]
    return ["ssh", *own, "--", host, shlex.join(words)]


def on_hosts(
    programs: Sequence[tuple[str, Sequence[str]]], environ: Mapping[str, str], seconds: float, port: int | None = None
) -> list[Ended]:
    """Run programs at once until they end or their time is up.

    Args:
        programs: each its host, or "" for this machine, and its words.
        environ: of ssh, or of a program on this machine.
        seconds: for each.
        port: of every sshd; None for ssh's own choice.
    """

    def run(program: tuple[str, Sequence[str]]) -> Ended:
        host, words = program
        command = ssh_command(host, words, environ, port) if host else words
        try:
            done = subprocess.run(
                command,
                env=dict(environ),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=seconds,
            )
            code, output = done.returncode, done.stdout
        except subprocess.TimeoutExpired as error:
            code, output = TIMED_OUT, error.stdout or b""
        except OSError as error:  # no ssh, or no open files left
            code, output = 127, f"cannot start {command[0]}: {error.strerror}".encode()
        lines = [line.strip() for line in output.decode(errors="replace").splitlines() if line.strip()]
        return Ended(code, lines, time.monotonic())

    with ThreadPoolExecutor(max_workers=max(1, len(programs))) as pool:
        return list(pool.map(run, programs))


def numbered_lines(text: str) -> Iterator[tuple[int, str]]:
    """(number, stripped line) of what is neither blank nor a comment."""
    for number, line in enumerate(text_lines(text), 1):
        line = line.strip()
        if line and not line.startswith("#"):
            yield number, line


def _host(name: str, slots: int, where: str) -> Host:
    try:
        return Host(name, slots)
    except UserError as error:
        raise UserError(f"{where}{error}") from None
