"""The command `ds-vit doctor`: ask the hosts, examine the answers, measure the network, say what is wrong.

ds-vit doctor                                         this machine
ds-vit doctor --hostfile hostfile --output runs/x     every host of a run, over ssh
ds-vit doctor --images data                           decode every image of a data set
srun ds-vit doctor                                    as ranks of a launcher (mpirun, torchrun, deepspeed too)
"""

from __future__ import annotations

import json
import os
import shlex
import socket
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import ds_vit
from ds_vit.fault_tolerance import exit_codes
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.launching.hosts import TIMED_OUT, Ended, Host, collected, on_hosts, read_hosts
from ds_vit.launching.process import Process, discover, rendezvous
from ds_vit.tools.doctor.checks import Finding, HostAnswer, NetworkResult, PlannedRun, examine, gbits, slowest
from ds_vit.tools.doctor.facts import DRIVER, WORD, Facts, gather
from ds_vit.tools.doctor.network import measure

_ROOT = Path(ds_vit.__file__).resolve().parent.parent  # the folder that `ds_vit` is imported from, on every host
_PROBE = "ds_vit.tools.doctor.facts"

EXIT_FINDINGS = 1
"""Exit code when there is a finding of the grade "error"; 0 without, 2 for invalid input."""

_MAX_RANKS_ON_CPU = 2  # a host: more measure its cores

# The variables that this command's programs need of those a launcher sets on every host: no tokens in a process list.
_SENT = ("NCCL_", "GLOO_", "UCX_", "FI_", "TORCH_", "DS_ACCELERATOR", "OMP_", "PYTHONPATH", "LD_LIBRARY_PATH", "CUDA_")


@dataclass(frozen=True)
class Diagnosis:
    """The answers, the figures and the findings."""

    answers: Sequence[HostAnswer]
    figures: NetworkResult | None
    findings: Sequence[Finding]

    @property
    def exit_code(self) -> int:
        """0 for a cluster that can be used; warnings do not count."""
        return EXIT_FINDINGS if any(finding.severity == "error" for finding in self.findings) else exit_codes.OK


def add_arguments(parser: ArgumentParser) -> None:
    """The flags of `ds-vit doctor`."""
    parser.add_argument("--hostfile", metavar="FILE|slurm|pbs", help="ask these hosts (default: this machine)")
    parser.add_argument("--data-dir", default="", metavar="DIR", help="the run's data: there, and the same everywhere")
    parser.add_argument("--images", metavar="DIR", help="decode all images below DIR and list damaged ones; no more")
    parser.add_argument("--output", default="", metavar="DIR", help="the run's folder: writable, with room")
    parser.add_argument("--master_port", "--master-port", type=int, default=29500, help="rank 0's port [%(default)s]")
    parser.add_argument("--master_addr", "--master-addr", help="where rank 0 is reached (default: the first host)")
    parser.add_argument("--ssh-port", type=int, help="of every sshd")
    parser.add_argument("--env-file", action="append", default=[], metavar="FILE", help="as for launch/run_hostfile.sh")
    parser.add_argument("--timeout", type=float, default=90.0, help="seconds for the questions, and for the network")
    parser.add_argument("--no-collectives", action="store_true", help="leave the network's measurement out")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of tables")


def doctor(arguments: Namespace, environ: Mapping[str, str] = os.environ) -> int:
    """Carry out `ds-vit doctor`.

    Returns:
        0 for a healthy cluster, 1 with a finding of the grade "error".

    Raises:
        UserError: a hostfile or an environment file that cannot be read, a port that is none.
    """
    if arguments.images:
        from ds_vit.monitoring.metrics import make_console
        from ds_vit.tools.doctor.images import check_images

        return check_images(arguments.images, make_console())
    if not 0 < arguments.master_port < 65536:
        raise UserError(f"--master_port {arguments.master_port}: a port is between 1 and 65535")
    if arguments.timeout <= 0:
        raise UserError(f"--timeout {arguments.timeout:g}: it takes a number of seconds above 0")
    cwd = Path.cwd()
    sent = {n: v for n, v in collected(environ, cwd, arguments.env_file).items() if n.startswith(_SENT)}
    if "CUDA_VISIBLE_DEVICES" in environ and not arguments.hostfile:
        sent["CUDA_VISIBLE_DEVICES"] = environ["CUDA_VISIBLE_DEVICES"]
    run = PlannedRun(sent, arguments.data_dir, arguments.output, arguments.master_port)
    process = discover(environ)
    if process.world_size == 1:
        way = Way(environ, sent, cwd, arguments.timeout, arguments.ssh_port, local=not arguments.hostfile)
        diagnosis = _ask_hosts(arguments, run, way)
    elif arguments.hostfile:
        raise UserError(f"--hostfile has no effect on ranks of a launcher ({process.world_size}); drop it")
    else:
        try:
            diagnosis = _ask_ranks(arguments, run, process)
        except RuntimeError as error:
            if process.local_rank == 0:
                where = f"rank {process.rank} of {process.world_size} on {socket.gethostname()}"
                print(f"ds-vit doctor: {where} cannot meet the others: {str(error).splitlines()[0]}", file=sys.stderr)
            return EXIT_FINDINGS
    if process.rank == 0:
        _show(diagnosis, as_json=arguments.json)
    return diagnosis.exit_code


def _ask_hosts(arguments: Namespace, run: PlannedRun, way: Way) -> Diagnosis:
    """Ask the hosts of the hostfile, or this machine, and time messages between those that answer."""
    hosts = (Host(socket.gethostname(), 1),) if way.local else read_hosts(arguments.hostfile, way.environ)
    answers = ask_all(hosts, run, way)
    if way.local and (facts := answers[0].facts) is not None:
        everything = len(facts.accelerators) or min(2, facts.cores)
        answers = [replace(answers[0], host=Host(answers[0].host.name, everything))]
    found = {finding.check for finding in examine(answers, run)}
    reachable = [answer for answer in answers if answer.facts is not None]
    figures = None
    if not arguments.no_collectives and reachable and "hosts" not in found:
        address = arguments.master_addr or ("127.0.0.1" if way.local else reachable[0].host.name.split("@")[-1])
        port = arguments.master_port + (1 if "port" in found and arguments.master_port < 65535 else 0)
        figures = start_ranks(reachable, way, address, port)
    return Diagnosis(answers, figures, examine(answers, run, figures))


def _ask_ranks(arguments: Namespace, run: PlannedRun, process: Process) -> Diagnosis:
    """Started by a launcher, its ranks gather the facts and measure (a collective).

    Raises:
        RuntimeError: the ranks cannot meet.
    """
    import datetime

    import torch.distributed as dist

    from ds_vit.engine.start import device_of, init_distributed, quiet_deepspeed
    from ds_vit.parallel.groups import gather_objects

    quiet_deepspeed(False)
    device = device_of(process.local_rank)
    backend = dist.get_default_backend_for_device(device)
    limit = datetime.timedelta(seconds=arguments.timeout)
    made = init_distributed({**rendezvous(process), "dist_backend": backend, "timeout": limit})
    names = gather_objects((socket.gethostname(), process.local_rank))
    leaders = [rank for rank, (_, local_rank) in enumerate(names) if local_rank == 0]
    hosts = [names[rank][0] for rank in leaders]
    facts = ""
    if process.local_rank == 0:
        facts = gather({hosts[0], socket.gethostname()}, data_dir=run.data_dir, output=run.output).pack()
    of_all = gather_objects(facts)
    measured = None if arguments.no_collectives else measure(process.rank, device, leaders)
    answers = [
        HostAnswer(Host(name, end - leader), Facts.unpack(of_all[leader]))
        for name, leader, end in zip(hosts, leaders, [*leaders[1:], process.world_size], strict=True)
    ]
    figures = NetworkResult(tuple(hosts), measured=measured) if measured else None
    dist.barrier()
    if made:
        dist.destroy_process_group()
    return Diagnosis(answers, figures, examine(answers, run, figures))


# ---- programs on the hosts -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """The settings with which programs are started on hosts.

    Attributes:
        environ: of this process.
        sent: variables that are set there.
        cwd: the folder to start in, on every host, as DeepSpeed's launcher does.
        seconds: for a program.
        ssh_port: None for ssh's own choice.
        local: start them here, without ssh.
    """

    environ: Mapping[str, str]
    sent: Mapping[str, str]
    cwd: Path
    seconds: float
    ssh_port: int | None = None
    local: bool = False

    def run(self, modules: Sequence[tuple[Host, str, object]]) -> list[Ended]:
        """Run modules of ours on hosts, all at once, each with an argument as JSON."""
        path = self.sent.get("PYTHONPATH", "")
        sent = {**self.sent, "PYTHONPATH": f"{_ROOT}:{path}" if path else str(_ROOT)}
        settings = [f"{name}={value}" for name, value in sent.items()]
        start = ["sh", "-c", 'cd "$0" && exec "$@"', str(self.cwd), "env", *settings, sys.executable, "-m"]
        programs = [
            ("" if self.local else host.name, [*start, module, json.dumps(argument)])
            for host, module, argument in modules
        ]
        return on_hosts(programs, self.environ, self.seconds, self.ssh_port)


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
        return f"ssh fails: {words['last']}", f"ssh {words['name']} true must print nothing"
    if code == TIMED_OUT:
        return "no answer in time", f"ssh {words['name']} true; the host is down, or imports slowly from its disk"
    return f"the probe failed: {words['last']}", f"ssh {words['name']} {shlex.quote(sys.executable)} -m {_PROBE}"


def ask_all(hosts: Sequence[Host], run: PlannedRun, way: Way) -> list[HostAnswer]:
    """Every host's answer, in the order of `hosts`.

    Each resolves two names, its own and the first host's: 1,024 hosts would make a million look-ups of all.
    """

    def question(host: Host) -> object:
        names = list(dict.fromkeys((hosts[0].name, host.name)))
        port = run.port if host == hosts[0] else 0
        return {"names": names, "port": port, "data_dir": run.data_dir, "output": run.output}

    answers = []
    for host, ended in zip(hosts, way.run([(host, _PROBE, question(host)) for host in hosts]), strict=True):
        facts = ended.marked(WORD)
        problem, remedy = ("", "") if facts else explain(host.name, ended.code, ended.lines)
        answers.append(HostAnswer(host, Facts.unpack(facts) if facts else None, problem, remedy))
    return answers


def start_ranks(answers: Sequence[HostAnswer], way: Way, address: str, port: int) -> NetworkResult:
    """Start ranks on the hosts that are reachable, and wait for their figures; rank 0 listens at this address."""
    names = tuple(answer.host.name for answer in answers)
    places: list[tuple[Host, int]] = []  # of every rank: its host and local rank
    for answer in answers:
        most = len(answer.facts.accelerators) if answer.facts else 0
        places += [(answer.host, local) for local in range(min(answer.host.slots, most or _MAX_RANKS_ON_CPU))]
    if len(places) == 1:
        return NetworkResult(names)
    leaders = [rank for rank, (_, local_rank) in enumerate(places) if local_rank == 0]
    shared = {"address": f"tcp://{address}:{port}", "seconds": way.seconds / 2, "leaders": leaders}
    shared["world"] = len(places)
    ended = way.run(
        [
            (host, "ds_vit.tools.doctor.network", {**shared, "rank": rank, "local_rank": local_rank})
            for rank, (host, local_rank) in enumerate(places)
        ]
    )
    if answer_of_rank_0 := ended[0].marked(WORD):
        return NetworkResult(names, measured=json.loads(answer_of_rank_0))
    first = min(range(len(places)), key=lambda rank: (ended[rank].code == 0, ended[rank].at))
    if ended[first].code == TIMED_OUT:
        return NetworkResult(
            names, problem=f"the ranks did not meet and finish within {way.seconds:.0f} s", culprits=names
        )
    lines = ended[first].lines or [f"exit code {ended[first].code}"]
    errors = [line for line in lines if "rror" in line and not line.startswith(("[W", "File"))]
    return NetworkResult(names, problem=(errors or lines)[-1][:300], culprits=(places[first][0].name,))


# ---- output --------------------------------------------------------------------------------------------------------


def to_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """{"healthy", "findings", "hosts": name → answer, "network"} in plain types."""
    figures = diagnosis.figures
    return {
        "healthy": diagnosis.exit_code == exit_codes.OK,
        "findings": [asdict(finding) for finding in diagnosis.findings],
        "hosts": {answer.host.name: asdict(answer) for answer in diagnosis.answers},
        "network": asdict(figures) | {"slowest": slowest(figures)} if figures is not None else None,
    }


def _show(diagnosis: Diagnosis, *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(to_json(diagnosis), default=list))
        return
    from ds_vit.monitoring.metrics import make_console, say

    console = make_console()
    for answer in diagnosis.answers:
        say(console, f"{answer.host.name}, {answer.host.slots} slots: {_summary(answer.facts)}")
    if diagnosis.figures is not None and (measured := diagnosis.figures.measured):
        reduced, ranks = measured["all_reduce"], f"{measured['world_size']} ranks, {measured['backend']}"
        text = f"{reduced['seconds'] * 1e3:.2f} ms, bus bandwidth {gbits(reduced['bus_bytes_per_second'])}"
        say(console, f"network: all-reduce of {reduced['bytes'] / 2**20:.0f} MiB over {ranks}: {text}")
        if pair := slowest(diagnosis.figures):
            say(console, f"slowest pair: {pair}")
    for finding in diagnosis.findings:
        say(console, f"{finding.severity}: {finding.check}, {', '.join(finding.hosts)}: {finding.what}")
        say(console, f"    {finding.remedy}")
    severities = [finding.severity for finding in diagnosis.findings]
    counts = {"host": len(diagnosis.answers), **{word: severities.count(word) for word in ("error", "warning")}}
    hosts, *found = (f"{count} {word}{'' if count == 1 else 's'}" for word, count in counts.items())
    say(console, f"{hosts}: {', '.join(found)}" + ("" if diagnosis.findings else ": healthy"))


def _summary(facts: Facts | None) -> str:
    """A host in a few words."""
    if facts is None:
        return "no answer"
    kinds = {kind: facts.accelerators.count(kind) for kind in facts.accelerators}
    have = ", ".join(f"{count} x {kind}" for kind, count in kinds.items()) or f"no accelerator, {facts.cores} cores"
    return f"{have}; torch {facts.versions.get('torch', '?')}, driver {facts.versions.get(DRIVER) or 'none'}"
