"""Programs on every host at once: over ssh as DeepSpeed's launcher does it, or on this machine; in bounded time.

Each host's answer is its facts, its clock against ours, and how many hosts' marks it sees in the output folder. A host
that does not answer has a reason instead.
"""

from __future__ import annotations

import contextlib
import json
import queue
import shlex
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import ds_vit
from ds_vit.launching.hosts import Host
from ds_vit.tools.doctor.facts import WORD, Ask, Facts

ROOT = Path(ds_vit.__file__).resolve().parent.parent
"""The folder that `ds_vit` is imported from, here and, as DeepSpeed's launcher has it, on every host."""

_CONNECT_SECONDS = 10
_PROBE = "ds_vit.tools.doctor.facts"


@dataclass(frozen=True)
class Answer:
    """What is known of a host.

    Attributes:
        host: as the hostfile names it.
        facts: None where it did not answer.
        problem: why not, in a line; `remedy` what to do.
        clock_ahead_seconds: (at least, at most) how far its clock is ahead of ours; None where it was not compared.
        marks: hosts whose mark it sees in the output folder.
    """

    host: Host
    facts: Facts | None = None
    problem: str = ""
    remedy: str = ""
    clock_ahead_seconds: tuple[float, float] | None = None
    marks: int = 0


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

    def command(self, host: str, module: str, arguments: Sequence[str] = ()) -> list[str]:
        """The argument list that runs a module of ours on a host; nothing in it reaches a shell unquoted."""
        path = self.environ.get("PYTHONPATH", "")
        variables = {**self.environ, "PYTHONPATH": f"{ROOT}:{path}" if path else str(ROOT)}
        settings = [f"{name}={value}" for name, value in variables.items()]
        words = ["env", *settings, sys.executable, "-m", module, *arguments]
        if self.local:
            return words
        port = ["-p", str(self.ssh_port)] if self.ssh_port else []
        options = ["-o", "BatchMode=yes", "-o", f"ConnectTimeout={_CONNECT_SECONDS}", *port]
        remote = f"cd {shlex.quote(str(self.cwd))} && exec {shlex.join(words)}"
        return ["ssh", *options, "--", host, remote]


class Program:
    """A program on a host. Its answers are the lines with `WORD`; its other output is kept for messages.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, host: Host, command: Sequence[str], cwd: Path) -> None:
        self.host = host
        self.output: deque[str] = deque(maxlen=100)
        self._answers: queue.Queue[str | None] = queue.Queue()
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True, errors="replace", cwd=cwd
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if WORD in line:
                self._answers.put(line.split(WORD, 1)[1])
            elif line.strip():
                self.output.append(line.strip())
        self._answers.put(None)

    def ask(self, line: str, deadline: float) -> str | None:
        """Send a line and wait for its answer until `deadline`, `time.monotonic()` seconds; None where none comes."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        return self.receive(deadline)

    def receive(self, deadline: float) -> str | None:
        """The next answer; None where none comes until `deadline`, or the program has ended."""
        try:
            return self._answers.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            return None

    def end(self) -> None:
        """Close stdin, upon which the program ends (on the other side of an ssh too); kill what does not."""
        with contextlib.suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(5)


# What the output of ssh or of the probe contains → (what is wrong, what to do).
_REASONS = (
    ("permission denied", "ssh asks for a password: {last}", "ssh-copy-id {name}"),
    ("host key verification", "ssh does not know the host's key", "ssh-keyscan {name} >> ~/.ssh/known_hosts"),
    (
        "could not resolve",
        "the name is not known: {last}",
        "correct the hostfile, or add the host to DNS or /etc/hosts",
    ),
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
        return f"ssh fails: {words['last']}", "ssh {name} true, until it works without a word".format(**words)
    if code in (-9, -15):
        return "no answer in time", "ssh {name} true; the host is down, or imports slowly from its disk".format(**words)
    return f"the probe failed: {words['last']}", f"ssh {words['name']} {shlex.quote(sys.executable)} -m {_PROBE}"


class Conversation:
    """One host's probe: started, asked, ended. Every wait ends with `deadline`, `time.monotonic()` seconds."""

    def __init__(self, host: Host, command: Sequence[str], cwd: Path) -> None:
        self.host = host
        self.answer = Answer(host)
        self._program: Program | None = None
        try:
            self._program = Program(host, command, cwd)
        except OSError as error:
            remedy = f"install {command[0]} on this machine"
            self.answer = Answer(host, problem=f"{command[0]}: {error.strerror}", remedy=remedy)

    def ask(self, ask: Ask, deadline: float) -> None:
        """Get the facts, or the reason why there are none."""
        if self._program is None:
            return
        text = self._program.ask(json.dumps(asdict(ask)), deadline)
        if text is not None:
            self.answer = replace(self.answer, facts=Facts.unpack(text))
            return
        if time.monotonic() >= deadline:
            self._program.process.kill()
        self._program.end()
        code, output = self._program.process.returncode, list(self._program.output)
        problem, remedy = explain(self.host.name, code, output)
        self.answer = replace(self.answer, problem=problem, remedy=remedy)

    def compare(self, deadline: float) -> None:
        """Read the clock three times: its answer lies between our sending and our receiving."""
        if self._program is None or self.answer.facts is None:
            return
        at_least, at_most = -float("inf"), float("inf")
        for _ in range(3):
            sent = time.time()
            text = self._program.ask("", deadline)
            received = time.time()
            if text is None:
                return
            reply = json.loads(text)
            at_least = max(at_least, reply["seconds"] - received)
            at_most = min(at_most, reply["seconds"] - sent)
            self.answer = replace(self.answer, marks=reply["marks"], clock_ahead_seconds=(at_least, at_most))

    def end(self) -> None:
        """Let the probe remove its mark and end."""
        if self._program is not None:
            self._program.end()


def ask_all(hosts: Sequence[Host], ask: Ask, way: Way, seconds: float) -> list[Answer]:
    """Every host's answer, in the order of `hosts`; takes `seconds` at most, and a little to end the probes.

    Each resolves two names, its own and the first host's: 1,024 hosts would make a million look-ups of all.
    """
    deadline = time.monotonic() + seconds

    def question(talk: Conversation) -> Ask:
        names = tuple(dict.fromkeys((hosts[0].name, talk.host.name)))
        return replace(ask, names=names, port=ask.port if talk is talks[0] else 0)

    with ThreadPoolExecutor(max_workers=min(64, len(hosts))) as pool:
        talks = list(pool.map(lambda host: Conversation(host, way.command(host.name, _PROBE), way.cwd), hosts))
        try:
            list(pool.map(lambda talk: talk.ask(question(talk), deadline), talks))
            # Only now have all hosts left their marks in the output folder.
            list(pool.map(lambda talk: talk.compare(min(deadline, time.monotonic() + 20)), talks))
        finally:
            list(pool.map(lambda talk: talk.end(), talks))
    return [talk.answer for talk in talks]
