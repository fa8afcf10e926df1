"""Ask every host at once: over ssh as DeepSpeed's launcher goes, or this machine itself; in bounded time.

Each host's answer is its facts, its clock against ours, and how many hosts' marks it sees in the output folder. A host
that does not answer has a reason instead.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, Any

import ds_vit
from ds_vit.launching.hosts import Host
from ds_vit.tools.doctor.facts import Ask, Facts
from ds_vit.tools.doctor.probe import WORD

ROOT = Path(ds_vit.__file__).resolve().parent.parent
"""The folder that `ds_vit` is imported from, here and, as DeepSpeed's launcher has it, on every host."""

_CONNECT_SECONDS = 10


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
        environ: variables that go there.
        cwd: the folder to start in, on every host, as DeepSpeed's launcher does.
        ssh_port: None for ssh's own choice.
        local: start them here, without ssh.
    """

    environ: Mapping[str, str]
    cwd: Path
    ssh_port: int | None = None
    local: bool = False

    def command(self, host: str, module: str, arguments: Sequence[str] = ()) -> list[str]:
        """The argument list that runs a module of ours on a host; nothing in it is seen unquoted by a shell."""
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


class Conversation:
    """One host's probe: started, asked, let go; every wait ends with `deadline`, `time.monotonic()` seconds."""

    def __init__(self, host: Host, command: Sequence[str], cwd: Path) -> None:
        self.host = host
        self.answer = Answer(host)
        self._errors = ""
        self._process: subprocess.Popen[str] | None = None
        try:
            pipe = subprocess.PIPE
            self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=cwd)
        except OSError as error:
            self.answer = Answer(
                host, problem=f"{command[0]}: {error.strerror}", remedy=f"install {command[0]} on this machine"
            )
            return
        assert self._process.stderr is not None
        self._reader = threading.Thread(target=self._read_errors, args=(self._process.stderr,), daemon=True)
        self._reader.start()

    def ask(self, ask: Ask, deadline: float) -> None:
        """Get the facts, or the reason why there are none."""
        if self._process is None:
            return
        text = self._line(self._process, json.dumps(asdict(ask)), deadline)
        if text is not None:
            self.answer = replace(self.answer, facts=Facts.unpack(text))
            return
        timed_out = time.monotonic() >= deadline
        self._end()
        problem, remedy = explain(self.host.name, self._process.returncode, self._errors, timed_out)
        self.answer = replace(self.answer, problem=problem, remedy=remedy)

    def compare(self, deadline: float) -> None:
        """Twice the time: the first answer bounds how far the clock is behind, the second how far it is ahead."""
        if self._process is None or self.answer.facts is None:
            return
        at_least, at_most = -float("inf"), float("inf")
        for _ in range(3):
            sent = time.time()
            text = self._line(self._process, "", deadline)
            received = time.time()
            if text is None:
                return
            said = json.loads(text)
            at_least = max(at_least, said["seconds"] - received)
            at_most = min(at_most, said["seconds"] - sent)
            self.answer = replace(self.answer, marks=said["marks"], clock_ahead_seconds=(at_least, at_most))

    def end(self) -> None:
        """Let the probe remove its mark and go; kill it if it does not."""
        if self._process is not None and self._process.poll() is None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(10)
        self._end()

    @staticmethod
    def _line(process: subprocess.Popen[str], line: str, deadline: float) -> str | None:
        """Send a line and wait for an answer; None where none comes in time."""
        assert process.stdin is not None
        assert process.stdout is not None
        killer = threading.Timer(max(0.0, deadline - time.monotonic()), process.kill)
        killer.start()
        try:
            process.stdin.write(line + "\n")
            process.stdin.flush()
            while text := process.stdout.readline():
                if WORD in text:
                    return text.split(WORD, 1)[1]
        except (OSError, ValueError):
            pass
        finally:
            killer.cancel()
        return None

    def _read_errors(self, stream: IO[str]) -> None:
        for line in stream:
            self._errors = (self._errors + line)[-4000:]

    def _end(self) -> None:
        if self._process is None:
            return
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(5)


def explain(name: str, code: int, errors: str, timed_out: bool) -> tuple[str, str]:
    """(what is wrong, what to do) for a host whose probe did not answer."""
    said = [line.strip() for line in errors.splitlines() if line.strip()]
    last = said[-1] if said else f"exit code {code}"
    lower = errors.lower()
    quoted = shlex.quote(name)
    if "permission denied" in lower and code == 255:
        return f"ssh asks for a password: {last}", f"ssh-copy-id {quoted}"
    if "host key verification failed" in lower:
        return "ssh does not know the host's key", f"ssh-keyscan {quoted} >> ~/.ssh/known_hosts, once you trust it"
    if "could not resolve" in lower:
        return f"the name is not known: {last}", "correct the hostfile, or add the host to DNS or /etc/hosts"
    if "connection refused" in lower:
        return f"ssh is refused: {last}", f"start sshd on {quoted} (systemctl start ssh), or give --ssh-port"
    if code == 255:
        return f"ssh fails: {last}", f"ssh {quoted} true, until it works without a word"
    if code == 127 or ("no such file or directory" in lower and "cd:" not in lower):
        return f"no {sys.executable} there: {last}", "install the same environment under the same path on every host"
    if "cd:" in lower or "can't cd" in lower:
        return f"the working folder is not there: {last}", "start from a folder that every host has"
    if "no module named" in lower:
        return f"the package cannot be imported: {last}", "install the same environment on every host"
    if timed_out or code in (-9, -15):
        return "no answer in time", f"ssh {quoted} true; a host that is down, or very slow to import from its disk"
    return f"the probe failed: {last}", f"ssh {quoted} {shlex.quote(sys.executable)} -m ds_vit.tools.doctor.probe"


def ask_all(hosts: Sequence[Host], ask: Ask, way: Way, seconds: float) -> list[Answer]:
    """Every host's answer, in the order of `hosts`; takes `seconds` at most, and a little for the goodbyes.

    Each resolves two names: its own, and that of the first host.
    """
    deadline = time.monotonic() + seconds
    with ThreadPoolExecutor(max_workers=min(64, len(hosts))) as pool:

        def all_of(function: Callable[..., Any], items: Sequence[Any]) -> list[Any]:
            return list(pool.map(function, items))

        talks = all_of(
            lambda host: Conversation(host, way.command(host.name, "ds_vit.tools.doctor.probe"), way.cwd), hosts
        )
        try:
            first = talks[0]

            def asked(talk: Conversation) -> Ask:
                # Not all of them: 1,024 hosts would make a million look-ups.
                names = tuple(dict.fromkeys((first.host.name, talk.host.name)))
                return replace(ask, names=names, port=ask.port if talk is first else 0)

            all_of(lambda talk: talk.ask(asked(talk), deadline), talks)
            # Only now have all hosts left their marks in the output folder.
            all_of(lambda talk: talk.compare(min(deadline, time.monotonic() + 20)), talks)
        finally:
            all_of(lambda talk: talk.end(), talks)
    return [talk.answer for talk in talks]
