"""Programs on every host at once: over ssh as DeepSpeed's launcher does it, or on this machine; in bounded time.

Each host's answer is its facts. A host that does not answer has a reason instead.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import ds_vit
from ds_vit.launching.hosts import Host
from ds_vit.tools.doctor.facts import WORD, Ask, Facts

ROOT = Path(ds_vit.__file__).resolve().parent.parent
"""The folder that `ds_vit` is imported from, here and, as DeepSpeed's launcher has it, on every host."""

_PROBE = "ds_vit.tools.doctor.facts"


@dataclass(frozen=True)
class Answer:
    """What is known of a host.

    Attributes:
        host: as the hostfile names it.
        facts: None where it did not answer.
        problem: why not, in a line; `remedy` what to do.
    """

    host: Host
    facts: Facts | None = None
    problem: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class Way:
    """How programs are started on a host.

    Attributes:
        environ: variables that are set there.
        cwd: the folder to start in, on every host, as DeepSpeed's launcher does.
        ssh_port: None for ssh's own choice.
        local: start them here, without ssh.
    """

    environ: Mapping[str, str]
    cwd: Path
    ssh_port: int | None = None
    local: bool = False

    def command(self, host: str, module: str, *arguments: str) -> list[str]:
        """The argument list that runs a module of ours on a host; nothing in it reaches a shell unquoted."""
        path = self.environ.get("PYTHONPATH", "")
        variables = {**self.environ, "PYTHONPATH": f"{ROOT}:{path}" if path else str(ROOT)}
        settings = [f"{name}={value}" for name, value in variables.items()]
        words = ["env", *settings, sys.executable, "-m", module, *arguments]
        if self.local:
            return words
        port = ["-p", str(self.ssh_port)] if self.ssh_port else []
        # A shared connection that outlives this ssh would keep its output open.
        options = ["-o", "BatchMode=yes", "-o", "ConnectTimeout=10", "-o", "ControlMaster=no", *port]
        remote = f"cd {shlex.quote(str(self.cwd))} && exec {shlex.join(words)}"
        return ["ssh", *options, "--", host, remote]


@dataclass(frozen=True)
class Ended:
    """A program that has ended.

    Attributes:
        answer: the line with `WORD`; "" for none.
        code: its exit code; `KILLED` where its time was up.
        output: its other lines.
    """

    answer: str
    code: int
    output: Sequence[str]


KILLED = -9


def run_program(command: Sequence[str], cwd: Path, seconds: float, text: str = "") -> Ended:
    """Run a program with this input until it ends or its time is up."""
    try:
        done = subprocess.run(
            command, input=text.encode(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=seconds, cwd=cwd
        )
        code, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired as error:
        code, output = KILLED, error.stdout or b""
    except OSError as error:  # no ssh, or no open files left
        return Ended("", 127, [f"cannot start {command[0]}: {error.strerror}"])
    lines = [line.strip() for line in output.decode(errors="replace").splitlines() if line.strip()]
    answer = next((line.split(WORD, 1)[1] for line in lines if WORD in line), "")
    return Ended(answer, code, [line for line in lines if WORD not in line])


# What the output of ssh or of the probe contains → (what is wrong, what to do).
_REASONS = (
    ("cannot start", "this machine {last}", "install it on this machine; `ulimit -n` must allow 3 files per host"),
    ("permission denied", "ssh asks for a password: {last}", "ssh-copy-id {name}"),
    ("host key verification", "ssh does not know the host's key", "ssh-keyscan {name} >> ~/.ssh/known_hosts"),
    ("could not resolve", "the name is not known: {last}", "correct the hostfile, or add it to DNS or /etc/hosts"),
    ("connection refused", "ssh is refused: {last}", "start sshd on {name} (systemctl start ssh), or give --ssh-port"),
    ("cd:", "the working folder is not there: {last}", "start from a folder that every host has"),
    ("no module named", "the package cannot be imported: {last}", "install the same environment on every host"),
    ("no such file", "no {python} there: {last}", "install the same environment under the same path on every host"),
)


def explain(name: str, code: int, output: Sequence[str]) -> tuple[str, str]:
    """(what is wrong, what to do) for a host whose probe did not answer; `code` is negative where it was killed."""
    words = {"last": output[-1] if output else f"exit code {code}", "name": shlex.quote(name), "python": sys.executable}
    lower = "\n".join(output).lower()
    for part, problem, remedy in _REASONS:
        if part in lower:
            return problem.format(**words), remedy.format(**words)
    if code == 255:
        return f"ssh fails: {words['last']}", f"ssh {words['name']} true, until it works without a word"
    if code == KILLED:
        return "no answer in time", f"ssh {words['name']} true; the host is down, or imports slowly from its disk"
    return f"the probe failed: {words['last']}", f"ssh {words['name']} {shlex.quote(sys.executable)} -m {_PROBE}"


def ask_all(hosts: Sequence[Host], ask: Ask, way: Way, seconds: float) -> list[Answer]:
    """Every host's answer, in the order of `hosts`.

    Each resolves two names, its own and the first host's: 1,024 hosts would make a million look-ups of all.
    """

    def answer(host: Host) -> Answer:
        names = tuple(dict.fromkeys((hosts[0].name, host.name)))
        own = replace(ask, names=names, port=ask.port if host == hosts[0] else 0)
        ended = run_program(way.command(host.name, _PROBE), way.cwd, seconds, json.dumps(asdict(own)))
        if ended.answer:
            return Answer(host, Facts.unpack(ended.answer))
        problem, remedy = explain(host.name, ended.code, ended.output)
        return Answer(host, problem=problem, remedy=remedy)

    with ThreadPoolExecutor(max_workers=len(hosts)) as pool:
        return list(pool.map(answer, hosts))
