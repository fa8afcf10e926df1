"""From all hosts' facts and the network's figures to findings: pure functions, one for each part of a host.

A finding says on which hosts, what is wrong (with the numbers) and what to do. "error" is what stops a run or makes it
wrong, "warning" what makes it slow or fragile. A healthy cluster has none.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ds_vit.launching.hosts import Host
from ds_vit.tools.doctor.facts import CUDA, DRIVER, Facts, Interface, Port

MAX_LATENCY_SECONDS = 0.005
"""Between two hosts of one cluster: TCP takes 20 to 200 microseconds, InfiniBand 2 to 10."""

_GIB = 2**30
_MIN_OUTPUT_BYTES = 2 * _GIB  # a checkpoint of ViT-B with AdamW's moments has 1 GB, and two exist temporarily
_MIN_SHM_BYTES = 256 * 2**20  # Docker's default is 64 MiB: loader workers die of a bus error
_SLOW_SHARE = 0.5  # of the median pair's bandwidth
_LINK_SHARE = 0.25  # of the adapters' rates: NCCL reaches much more over them


@dataclass(frozen=True)
class HostAnswer:
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
class Figures:
    """What the ranks measured; see `network.measure`. `problem` where they could not, on the hosts `culprits`."""

    hosts: tuple[str, ...]
    measured: Mapping[str, Any] | None = None
    problem: str = ""
    culprits: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """A fault.

    Attributes:
        check: one word for the kind of fault.
        severity: "error" or "warning".
        hosts: names as the hostfile has them.
        what: the fault, with its numbers.
        remedy: what to do, a command where there is one.
    """

    check: str
    severity: str
    hosts: tuple[str, ...]
    what: str
    remedy: str


@dataclass(frozen=True)
class Run:
    """What the run would use.

    Attributes:
        environ: the variables that are set on every host.
        data_dir, output: the flags, "" for none.
        port: where rank 0 will listen.
    """

    environ: Mapping[str, str]
    data_dir: str = ""
    output: str = ""
    port: int = 0


@dataclass(frozen=True)
class View:
    """A host that answered, as a check sees it.

    Attributes:
        name, slots: as in the hostfile.
        facts: its answer.
        run: what it is to be part of.
        first: the name of rank 0's host.
        num_hosts: of the run.
    """

    name: str
    slots: int
    facts: Facts
    run: Run
    first: str
    num_hosts: int


def examine(answers: Sequence[HostAnswer], run: Run, figures: Figures | None = None) -> list[Finding]:
    """All findings of the hosts' answers, and of what their ranks measured; errors first."""
    known = [(answer.host, answer.facts) for answer in answers if answer.facts is not None]
    views = [View(host.name, host.slots, facts, run, answers[0].host.name, len(answers)) for host, facts in known]
    silent = [answer for answer in answers if answer.facts is None]
    findings = [Finding("ssh", "error", (a.host.name,), a.problem, a.remedy) for a in silent]
    findings += _compare_hosts(views)
    for check in (_environment, _names, _places, _interfaces, _adapters):
        hosts = defaultdict(list)
        for view in views:
            for fault in check(view):
                hosts[fault].append(view.name)
        findings += [
            Finding(name, severity, tuple(names), what, remedy)
            for (name, severity, what, remedy), names in hosts.items()
        ]
    if figures is not None:
        findings += _check_network(figures, views)
    return sorted(findings, key=lambda finding: finding.severity != "error")


# ---- hosts compared with each other ----------------------------------------------------------------------------------

_SAME = "install the same environment on every host (one virtual environment on a shared disk is the easiest)"
_COPY = "copy it again (rsync -a --checksum), or use a shared disk"
_PULL = "git status and git pull there, or put the clone on a shared disk"
_LEAVE_OUT = "leave those hosts out; the slowest sets the pace"

# (check, severity, what differs, its value on a host or None for no part in the comparison, remedy)
_COMPARED: tuple[tuple[str, str, str, Callable[[View], str | None], str], ...] = (
    ("code", "error", "the code of ds_vit differs, by checksum", lambda view: view.facts.code, _PULL),
    ("data", "error", "the data differs, by checksum", lambda view: view.facts.data or None, _COPY),
    (
        *("accelerators", "error", "some hosts have no accelerators"),
        *(lambda view: "accelerators" if view.facts.accelerators else "", _LEAVE_OUT),
    ),
    (
        *("accelerators", "warning", "the accelerators differ"),
        *(lambda view: ", ".join(sorted(set(view.facts.accelerators))) or None, _LEAVE_OUT),
    ),
)


def _compare_hosts(views: Sequence[View]) -> Iterator[Finding]:
    """Values that must be the same on all hosts, and two names for one machine."""
    rows = list(_COMPARED)
    for name in dict.fromkeys(name for view in views for name in view.facts.versions):
        severity, remedy = ("warning", "bring the drivers to one version") if name == DRIVER else ("error", _SAME)
        rows.append(("versions", severity, f"{name} differs", partial(_version, name), remedy))
    for check, severity, what, value, remedy in rows:
        groups: dict[str, list[str]] = defaultdict(list)
        for view in views:
            if (own := value(view)) is not None:
                groups[own].append(view.name)
        if len(groups) > 1:
            norm = max(groups, key=lambda value: len(groups[value]))  # of equals the first
            odd = tuple(name for value, names in groups.items() if value != norm for name in names)
            values = "; ".join(f"{value or 'none'} on {_some(names)}" for value, names in groups.items())
            yield Finding(check, severity, odd, f"{what}: {values}", remedy)
    names_of = defaultdict(list)
    for view in views:
        names_of[view.facts.identity].append(view.name)
    for same in names_of.values():
        if len(same) > 1:
            what = f"{' and '.join(same)} are one machine; its accelerators would be assigned {len(same)} times"
            yield Finding("hosts", "error", tuple(same), what, "keep one of the names in the hostfile")


def _version(name: str, view: View) -> str:
    return view.facts.versions.get(name, "missing")


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


# ---- one host --------------------------------------------------------------------------------------------------------

Fault = tuple[str, str, str, str]
"""(check, severity, what, remedy)."""


def _environment(view: View) -> Iterator[Fault]:
    """Packages, accelerators that torch can use, and as many as the hostfile says."""
    facts, have, cores = view.facts, len(view.facts.accelerators), view.facts.cores
    missing = [name for name, version in facts.versions.items() if version == "missing"]
    if missing:
        yield "versions", "error", f"{', '.join(missing)} is not installed", "pip install ds-vit"
    if have and facts.torch_accelerators == 0:
        driver, built_for = (facts.versions.get(name) or "?" for name in (DRIVER, CUDA))
        what = f"the driver {driver} lists {have} accelerators, and torch (CUDA {built_for}) can use none"
        remedy = "a newer driver, or a torch for an older CUDA; CUDA_VISIBLE_DEVICES must not be empty"
        yield "accelerators", "error", what, remedy
    if view.slots > (have or cores):
        places = f"{have} accelerators" if have else f"no accelerator and {cores} cores"
        remedy = f"write slots={have or cores} or fewer in the hostfile"
        yield "slots", "error", f"{view.slots} slots, but {places}", remedy
    if view.slots < have:
        what = f"{view.slots} slots, and {have} accelerators: {have - view.slots} stay idle"
        yield "slots", "warning", what, f"write slots={have} in the hostfile"


def _names(view: View) -> Iterator[Fault]:
    """Of several hosts: each finds rank 0's, and none that others must reach calls itself a loopback address."""
    if view.num_hosts == 1:
        return
    if view.facts.resolves.get(view.first) == ():
        what = f"{view.first}, the host of rank 0, has no address here"
        yield "names", "error", what, "add it to DNS or /etc/hosts, or use addresses"
    own = view.facts.resolves.get(view.name, ())
    counts = view.name == view.first or not view.run.environ.get("GLOO_SOCKET_IFNAME")
    if counts and own and all(map(is_loopback, own)):
        what = f"{view.name} is {own[0]} on itself, where no other host can reach it"
        yield "names", "error", what, "correct /etc/hosts there (Debian's 127.0.1.1 line)"


def _places(view: View) -> Iterator[Fault]:
    """Rank 0's port, the data, the output folder and shared memory."""
    facts, run = view.facts, view.run
    if facts.port_problem:
        remedy = f"--master_port with another number, or on that host: ss -ltnp 'sport = :{run.port}'"
        yield "port", "error", f"{facts.port_problem} (another run, or one that was left behind)", remedy
    if facts.data_problem:
        yield "data", "error", facts.data_problem, "mount or copy the data there, under the same path"
    free, shm = facts.output_free_bytes, facts.shm_bytes
    if free is not None and free < _MIN_OUTPUT_BYTES:
        remedy = f"at least {_MIN_OUTPUT_BYTES // _GIB} GiB for checkpoints: make room, or choose another folder"
        yield "disk", "error", f"{free / _GIB:.2f} GiB are free for --output {run.output}", remedy
    if facts.output_problem:
        yield "output", "error", facts.output_problem, "give a folder on a file system that every host can write to"
    if shm is not None and shm < _MIN_SHM_BYTES:
        what = f"/dev/shm has {shm / 2**20:.0f} MiB: loader workers and NCCL die of a bus error"
        yield (
            "shm",
            "error",
            what,
            "mount -o remount,size=16G /dev/shm there (docker run --shm-size=16g, or --ipc=host)",
        )


def _interfaces(view: View) -> Iterator[Fault]:
    """The interfaces that gloo and NCCL are to use are there and up."""
    others = (i.name for i in view.facts.interfaces if i.addresses and not any(map(is_loopback, i.addresses)))
    there = ", ".join(others) or "none"
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        wanted = view.run.environ.get(variable, "")
        if not wanted or wanted.startswith("^"):
            continue
        matching = _chosen(wanted, view.facts.interfaces, exact=variable.startswith("GLOO"))
        if not matching:
            remedy = f"{variable}=<name> in .deepspeed_env, with a name that every host has; here: {there}"
            yield "interface", "error", f"{variable}={wanted}, and there is no such interface", remedy
        elif not any(interface.up for interface in matching):
            remedy = f"ip link set {matching[0].name} up there, or another interface ({there})"
            yield "interface", "error", f"{variable}={wanted}: {matching[0].name} is down", remedy


def _adapters(view: View) -> Iterator[Fault]:
    """InfiniBand and RoCE: the ports that are asked for, or else one, are active, and memory can be registered."""
    wanted, ports = view.run.environ.get("NCCL_IB_HCA", ""), view.facts.ports
    asked = [] if wanted.startswith("^") else [item for item in wanted.lstrip("=").split(",") if item]
    remedy = "ibstat there: cable, switch port, subnet manager"
    there = ", ".join(f"{port.device}:{port.port} {port.state}" for port in ports) or "none"
    for item in asked:
        device, _, number = item.partition(":")
        matching = [
            port
            for port in ports
            if (port.device == device if wanted.startswith("=") else port.device.startswith(device))
            and number in ("", str(port.port))
        ]
        if not matching:
            what = f"NCCL_IB_HCA={wanted}, and there is no adapter {item} (there: {there})"
            yield "infiniband", "error", what, "correct NCCL_IB_HCA in .deepspeed_env (ibdev2netdev)"
        elif not any(port.state == "ACTIVE" for port in matching):
            yield "infiniband", "error", f"adapter {item} is {matching[0].state}, not ACTIVE", remedy
    if ports and not asked and not _active(view):
        what = f"no port of its adapters is active ({there}): NCCL would use TCP"
        yield "infiniband", "error", what, remedy
    limit = view.facts.memlock_bytes
    if ports and limit is not None and limit < _GIB:
        what = f"`ulimit -l` is {limit // 1024} KiB: an adapter cannot register its buffers"
        remedy = "memlock unlimited in /etc/security/limits.conf (and LimitMEMLOCK=infinity for sshd and slurmd)"
        yield "memlock", "error", what, remedy


# ---- the network -----------------------------------------------------------------------------------------------------


def _check_network(figures: Figures, views: Sequence[View]) -> Iterator[Finding]:
    """Findings in what the ranks measured: no meeting, slow pairs, less than the adapters should give."""
    if figures.problem:
        remedy = "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME in .deepspeed_env; a firewall between the hosts"
        yield Finding("collectives", "error", figures.culprits, f"ranks cannot talk: {figures.problem}", remedy)
    pairs = figures.measured["pairs"] if figures.measured else []
    usual = statistics.median([pair["bytes_per_second"] for pair in pairs] or [0.0])
    links = {view.name: sum(port.gbits for port in _active(view)) for view in views if view.facts.accelerators}
    for pair in pairs:
        names = (figures.hosts[pair["a"]], figures.hosts[pair["b"]])
        latency, rate = pair["latency_seconds"], pair["bytes_per_second"]
        link = min(links.get(name, 0.0) for name in names)
        if latency > MAX_LATENCY_SECONDS:
            what = f"a small message takes {latency * 1e3:.1f} ms one way (a cluster's network: well below 1 ms)"
            remedy = f"ping {names[1]} from {names[0]}: cable, switch, a route through another building, tc qdisc"
            yield Finding("latency", "error", names, what, remedy)
        elif len(pairs) > 2 and rate < _SLOW_SHARE * usual:
            what = f"{gbits(rate)} between them, {gbits(usual)} between the others"
            remedy = "ip -s link, ethtool or ibstat on both: a port at a lower rate, lost packets"
            yield Finding("bandwidth", "error", names, what, remedy)
        elif link and rate * 8e-9 < _LINK_SHARE * link:
            what = f"{gbits(rate)} between them over adapters of {link:g} Gbit/s"
            yield Finding("bandwidth", "warning", names, what, "NCCL_DEBUG=INFO says what NCCL takes: NCCL_IB_HCA")


def slowest(figures: Figures) -> str:
    """The slowest pair of hosts, for people; "" for fewer than two hosts."""
    pairs = figures.measured["pairs"] if figures.measured else []
    if not pairs:
        return ""
    worst = min(pairs, key=lambda pair: pair["bytes_per_second"])
    a, b = figures.hosts[worst["a"]], figures.hosts[worst["b"]]
    return f"{a} - {b}: {worst['latency_seconds'] * 1e6:.0f} us, {gbits(worst['bytes_per_second'])}"


def gbits(bytes_per_second: float) -> str:
    """Bytes per second in a network's unit."""
    return f"{bytes_per_second * 8e-9:.2f} Gbit/s"


def _active(view: View) -> list[Port]:
    return [port for port in view.facts.ports if port.state == "ACTIVE"]


def _chosen(wanted: str, interfaces: Sequence[Interface], *, exact: bool) -> list[Interface]:
    """NCCL takes beginnings of names unless `=` comes first; gloo takes names."""
    names = [name for name in wanted.lstrip("=").split(",") if name]
    exact = exact or wanted.startswith("=")
    return [i for i in interfaces if any(i.name == n if exact else i.name.startswith(n) for n in names)]


def is_loopback(address: str) -> bool:
    """Whether an address leads to its own host."""
    return address.startswith("127.") or address == "::1"
