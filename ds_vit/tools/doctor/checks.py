"""The checks of `ds-vit doctor`: pure functions from the hosts' facts and the network measurements to findings.

A finding names the hosts, the fault with its numbers, and the remedy. An "error" stops a run or makes its result wrong;
a "warning" makes it slow or fragile. A healthy cluster has no findings.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ds_vit.fault_tolerance.errors import enumerate_some
from ds_vit.launching.hosts import Host
from ds_vit.tools.doctor.facts import CUDA, DRIVER, Facts, Interface, Port

MAX_LATENCY_SECONDS = 0.005
"""The largest latency between two hosts of a cluster. TCP takes 20 to 200 microseconds, InfiniBand 2 to 10."""

_GIB = 2**30
_MIN_OUTPUT_BYTES = 2 * _GIB  # a checkpoint of ViT-B with AdamW takes 1 GB, and two exist temporarily
_MIN_SHM_BYTES = 256 * 2**20  # Docker's default is 64 MiB: loader workers die of a bus error
_SLOW_SHARE = 0.5  # of the median bandwidth of the pairs
_LINK_SHARE = 0.25  # of the adapters' rates, of which NCCL normally reaches much more


@dataclass(frozen=True)
class HostAnswer:
    """The facts of a host, or why it did not answer.

    Attributes:
        host: as the hostfile names it.
        facts: None if it did not answer.
        problem: why it did not answer, in one line; else "".
        remedy: how to solve that.
    """

    host: Host
    facts: Facts | None = None
    problem: str = ""
    remedy: str = ""


@dataclass(frozen=True)
class NetworkResult:
    """The measurements of the network, or why the ranks could not measure.

    Attributes:
        hosts: their names, which the pairs in `measured` index.
        measured: from `network.measure`; None if there are no measurements.
        problem: why not, in one line; else "".
        culprits: the hosts where it failed.
    """

    hosts: tuple[str, ...]
    measured: Mapping[str, Any] | None = None
    problem: str = ""
    culprits: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """A fault.

    Attributes:
        check: the kind of fault, in one word.
        severity: "error" or "warning".
        hosts: names as in the hostfile.
        what: the fault, with its numbers.
        remedy: how to repair it, with a command if there is one.
    """

    check: str
    severity: str
    hosts: tuple[str, ...]
    what: str
    remedy: str


@dataclass(frozen=True)
class PlannedRun:
    """The settings of the run that the cluster is checked for.

    Attributes:
        environ: the variables that are set on every host.
        data_dir: --data-dir, "" for none.
        output: --output, "" for none.
        port: the TCP port on which rank 0 will listen.
    """

    environ: Mapping[str, str]
    data_dir: str = ""
    output: str = ""
    port: int = 0


@dataclass(frozen=True)
class HostView:
    """The input of a check: a host that answered, and the run.

    Attributes:
        name: as in the hostfile.
        slots: as in the hostfile.
        facts: the answer of the host.
        run: the planned run.
        first: the name of rank 0's host.
        num_hosts: number of hosts of the run, with those that did not answer.
    """

    name: str
    slots: int
    facts: Facts
    run: PlannedRun
    first: str
    num_hosts: int


def examine(answers: Sequence[HostAnswer], run: PlannedRun, figures: NetworkResult | None = None) -> list[Finding]:
    """All findings of the hosts' answers and of the network measurements, errors first."""
    known = [(answer.host, answer.facts) for answer in answers if answer.facts is not None]
    views = [HostView(host.name, host.slots, facts, run, answers[0].host.name, len(answers)) for host, facts in known]
    silent = [answer for answer in answers if answer.facts is None]
    findings = [Finding("ssh", "error", (a.host.name,), a.problem, a.remedy) for a in silent]
    findings += _compare_hosts(views)
    for check in (_environment, _names, _resources, _interfaces, _adapters):
        hosts = defaultdict(list)  # a fault that several hosts have is one finding
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


def _compare_hosts(views: Sequence[HostView]) -> Iterator[Finding]:
    """Findings of values that differ between hosts but must not, and of two names for one machine."""

    def compare(
        check: str, severity: str, what: str, value: Callable[[Facts], str | None], remedy: str
    ) -> Iterator[Finding]:
        """The hosts whose value is not the most frequent one; None leaves a host out."""
        groups: dict[str, list[str]] = defaultdict(list)
        for view in views:
            if (own := value(view.facts)) is not None:
                groups[own].append(view.name)
        if len(groups) > 1:
            norm = max(groups, key=lambda value: len(groups[value]))  # of equals the first
            odd = tuple(name for value, names in groups.items() if value != norm for name in names)
            values = "; ".join(f"{value or 'none'} on {enumerate_some(names, 6)}" for value, names in groups.items())
            yield Finding(check, severity, odd, f"{what}: {values}", remedy)

    yield from compare("code", "error", "the code of ds_vit differs, by checksum", lambda facts: facts.code, _PULL)
    yield from compare("data", "error", "the data differs, by checksum", lambda facts: facts.data or None, _COPY)
    what = "some hosts have no accelerators"
    yield from compare(
        "accelerators", "error", what, lambda facts: "accelerators" if facts.accelerators else "", _LEAVE_OUT
    )
    what = "the accelerators differ"
    yield from compare(
        "accelerators", "warning", what, lambda facts: ", ".join(sorted(set(facts.accelerators))) or None, _LEAVE_OUT
    )
    for name in dict.fromkeys(name for view in views for name in view.facts.versions):
        severity, remedy = ("warning", "bring the drivers to one version") if name == DRIVER else ("error", _SAME)
        yield from compare(
            "versions",
            severity,
            f"{name} differs",
            lambda facts, name=name: facts.versions.get(name, "missing"),
            remedy,
        )
    names_of = defaultdict(list)
    for view in views:
        names_of[view.facts.identity].append(view.name)
    for same in names_of.values():
        if len(same) > 1:
            what = f"{' and '.join(same)} are one machine; its accelerators would be assigned {len(same)} times"
            yield Finding("hosts", "error", tuple(same), what, "keep one of the names in the hostfile")


# ---- one host --------------------------------------------------------------------------------------------------------

Fault = tuple[str, str, str, str]
"""(check, severity, what, remedy)."""


def _environment(view: HostView) -> Iterator[Fault]:
    """Packages are installed, torch can use the accelerators, and the hostfile's slots match their number."""
    facts, have, cores = view.facts, len(view.facts.accelerators), view.facts.cores
    missing = [name for name, version in facts.versions.items() if version == "missing"]
    if missing:
        yield "versions", "error", f"{', '.join(missing)} is not installed", "pip install ds-vit"
    if have and facts.torch_accelerators == 0:
        driver, built_for = (facts.versions.get(name) or "?" for name in (DRIVER, CUDA))
        what = f"the driver {driver} lists {have} accelerators, but torch (CUDA {built_for}) can use none"
        remedy = "install a newer driver, or a torch for an older CUDA; CUDA_VISIBLE_DEVICES must not be empty"
        yield "accelerators", "error", what, remedy
    if view.slots > (have or cores):
        places = f"{have} accelerators" if have else f"no accelerator and {cores} cores"
        remedy = f"write slots={have or cores} or fewer in the hostfile"
        yield "slots", "error", f"{view.slots} slots, but {places}", remedy
    if view.slots < have:
        what = f"{view.slots} slots, and {have} accelerators: {have - view.slots} stay idle"
        yield "slots", "warning", what, f"write slots={have} in the hostfile"


def _names(view: HostView) -> Iterator[Fault]:
    """Every host resolves rank 0's host, and a host that others connect to does not resolve itself to loopback."""
    if view.num_hosts == 1:
        return
    if view.facts.resolves.get(view.first) == ():
        what = f"{view.first}, the host of rank 0, has no address here"
        yield "names", "error", what, "add it to DNS or /etc/hosts, or use addresses"
    own = view.facts.resolves.get(view.name, ())
    is_connected_to = view.name == view.first or not view.run.environ.get("GLOO_SOCKET_IFNAME")
    if is_connected_to and own and all(map(is_loopback, own)):
        what = f"{view.name} is {own[0]} on itself, where no other host can reach it"
        yield "names", "error", what, "correct /etc/hosts there (Debian's 127.0.1.1 line)"


def _resources(view: HostView) -> Iterator[Fault]:
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
        remedy = "mount -o remount,size=16G /dev/shm there (docker run --shm-size=16g, or --ipc=host)"
        yield "shm", "error", what, remedy


def _interfaces(view: HostView) -> Iterator[Fault]:
    """The network interfaces that gloo and NCCL are set to use exist and are up."""
    others = (i.name for i in view.facts.interfaces if i.addresses and not any(map(is_loopback, i.addresses)))
    there = ", ".join(others) or "none"
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        wanted = view.run.environ.get(variable, "")
        if not wanted or wanted.startswith("^"):
            continue
        matching = _chosen(wanted, view.facts.interfaces, exact=variable.startswith("GLOO"))
        if not matching:
            remedy = f"{variable}=<name> in .deepspeed_env, with a name that every host has; here: {there}"
            yield "interface", "error", f"{variable}={wanted}, but there is no such interface", remedy
        elif not any(interface.up for interface in matching):
            remedy = f"ip link set {matching[0].name} up there, or another interface ({there})"
            yield "interface", "error", f"{variable}={wanted}: {matching[0].name} is down", remedy


def _adapters(view: HostView) -> Iterator[Fault]:
    """InfiniBand and RoCE: the ports in NCCL_IB_HCA, or at least one, are active, and memory can be registered."""
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
            what = f"NCCL_IB_HCA={wanted}, but there is no adapter {item} (there: {there})"
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


def _check_network(figures: NetworkResult, views: Sequence[HostView]) -> Iterator[Finding]:
    """Findings of the measurements: ranks that cannot connect, slow pairs, adapters far below their rate."""
    if figures.problem:
        remedy = "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME in .deepspeed_env; a firewall between the hosts"
        yield Finding(
            "collectives", "error", figures.culprits, f"the ranks cannot communicate: {figures.problem}", remedy
        )
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
            yield Finding(
                "bandwidth", "warning", names, what, "see the adapters that NCCL_DEBUG=INFO names; set NCCL_IB_HCA"
            )


def slowest(figures: NetworkResult) -> str:
    """The slowest pair of hosts, for people; "" for fewer than two hosts."""
    pairs = figures.measured["pairs"] if figures.measured else []
    if not pairs:
        return ""
    worst = min(pairs, key=lambda pair: pair["bytes_per_second"])
    a, b = figures.hosts[worst["a"]], figures.hosts[worst["b"]]
    return f"{a} - {b}: {worst['latency_seconds'] * 1e6:.0f} us, {gbits(worst['bytes_per_second'])}"


def gbits(bytes_per_second: float) -> str:
    """A rate in Gbit/s, for people."""
    return f"{bytes_per_second * 8e-9:.2f} Gbit/s"


def _active(view: HostView) -> list[Port]:
    return [port for port in view.facts.ports if port.state == "ACTIVE"]


def _chosen(wanted: str, interfaces: Sequence[Interface], *, exact: bool) -> list[Interface]:
    """The interfaces that a variable selects: NCCL matches prefixes of names unless `=` comes first, gloo names."""
    names = [name for name in wanted.lstrip("=").split(",") if name]
    exact = exact or wanted.startswith("=")
    return [i for i in interfaces if any(i.name == n if exact else i.name.startswith(n) for n in names)]


def is_loopback(address: str) -> bool:
    """Whether an address is a loopback address."""
    return address.startswith("127.") or address == "::1"
