"""The checks of `ds-vit doctor`: pure functions from the hosts' facts and the network measurements to findings.

A finding names the hosts, the fault with its numbers, and the remedy. An "error" stops a run or makes its result wrong;
a "warning" makes it slow or fragile. A healthy cluster has no findings.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
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
        what: the fault, with its numbers.
        remedy: how to repair it, with a command if there is one.
        hosts: names as in the hostfile; `examine` fills in those of a fault in one host's facts.
    """

    check: str
    severity: str
    what: str
    remedy: str
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class PlannedRun:
    """The settings of the run that the cluster is checked for.

    Attributes:
        environ: the variables that are set on every host.
        data_dir: --data-dir, "" for none.
        output: --output, "" for none.
        port: the TCP port on which rank 0 will listen.
        hosts: names as in the hostfile, rank 0's first, with those that did not answer; `examine` fills them in.
    """

    environ: Mapping[str, str]
    data_dir: str = ""
    output: str = ""
    port: int = 0
    hosts: tuple[str, ...] = ()


def examine(answers: Sequence[HostAnswer], run: PlannedRun, figures: NetworkResult | None = None) -> list[Finding]:
    """All findings of the hosts' answers and of the network measurements, errors first."""
    run = replace(run, hosts=tuple(answer.host.name for answer in answers))
    known = [(answer.host, answer.facts) for answer in answers if answer.facts is not None]
    silent = [answer for answer in answers if answer.facts is None]
    findings = [Finding("ssh", "error", a.problem, a.remedy, (a.host.name,)) for a in silent]
    findings += _compare_hosts(known)
    for check in (_environment, _names, _resources, _interfaces, _adapters):
        hosts = defaultdict(list)  # a fault that several hosts have is one finding
        for host, facts in known:
            for fault in check(host, facts, run):
                hosts[fault].append(host.name)
        findings += [replace(fault, hosts=tuple(names)) for fault, names in hosts.items()]
    if figures is not None:
        findings += _check_network(figures, known)
    return sorted(findings, key=lambda finding: finding.severity != "error")


# ---- hosts compared with each other ----------------------------------------------------------------------------------

_SAME = "install the same environment on every host (one virtual environment on a shared disk is the easiest)"
_COPY = "copy it again (rsync -a --checksum), or use a shared disk"
_PULL = "git status and git pull there, or put the clone on a shared disk"
_LEAVE_OUT = "leave those hosts out; the slowest sets the pace"


def _compare_hosts(known: Sequence[tuple[Host, Facts]]) -> Iterator[Finding]:
    """Findings of values that differ between hosts but must not, and of two names for one machine."""
    every = [facts for _, facts in known]

    def compare(check: str, severity: str, what: str, values: Sequence[str | None], remedy: str) -> Iterator[Finding]:
        """The hosts whose value is not the most frequent one; None leaves a host out."""
        groups: dict[str, list[str]] = defaultdict(list)
        for (host, _), value in zip(known, values, strict=True):
            if value is not None:
                groups[value].append(host.name)
        if len(groups) > 1:
            norm = max(groups, key=lambda value: len(groups[value]))  # of equals the first
            odd = tuple(name for value, names in groups.items() if value != norm for name in names)
            found = "; ".join(f"{value or 'none'} on {enumerate_some(names, 6)}" for value, names in groups.items())
            yield Finding(check, severity, f"{what}: {found}", remedy, odd)

    yield from compare("code", "error", "the code of ds_vit differs, by checksum", [f.code for f in every], _PULL)
    yield from compare("data", "error", "the data differs, by checksum", [f.data or None for f in every], _COPY)
    have = ["accelerators" if facts.accelerators else "" for facts in every]
    yield from compare("accelerators", "error", "some hosts have no accelerators", have, _LEAVE_OUT)
    kinds = [", ".join(sorted(set(facts.accelerators))) or None for facts in every]
    yield from compare("accelerators", "warning", "the accelerators differ", kinds, _LEAVE_OUT)
    for name in dict.fromkeys(name for facts in every for name in facts.versions):
        severity, remedy = ("warning", "bring the drivers to one version") if name == DRIVER else ("error", _SAME)
        versions = [facts.versions.get(name, "missing") for facts in every]
        yield from compare("versions", severity, f"{name} differs", versions, remedy)
    names_of = defaultdict(list)
    for host, facts in known:
        names_of[facts.identity].append(host.name)
    for same in names_of.values():
        if len(same) > 1:
            what = f"{' and '.join(same)} are one machine; its accelerators would be assigned {len(same)} times"
            yield Finding("hosts", "error", what, "keep one of the names in the hostfile", tuple(same))


# ---- one host --------------------------------------------------------------------------------------------------------


def _environment(host: Host, facts: Facts, run: PlannedRun) -> Iterator[Finding]:
    """Packages are installed, torch can use the accelerators, and the hostfile's slots match their number."""
    have, cores = len(facts.accelerators), facts.cores
    missing = [name for name, version in facts.versions.items() if version == "missing"]
    if missing:
        yield Finding("versions", "error", f"{', '.join(missing)} is not installed", "pip install ds-vit")
    if have and facts.torch_accelerators == 0:
        driver, built_for = (facts.versions.get(name) or "?" for name in (DRIVER, CUDA))
        what = f"the driver {driver} lists {have} accelerators, but torch (CUDA {built_for}) can use none"
        remedy = "install a newer driver, or a torch for an older CUDA; CUDA_VISIBLE_DEVICES must not be empty"
        yield Finding("accelerators", "error", what, remedy)
    if host.slots > (have or cores):
        places = f"{have} accelerators" if have else f"no accelerator and {cores} cores"
        remedy = f"write slots={have or cores} or fewer in the hostfile"
        yield Finding("slots", "error", f"{host.slots} slots, but {places}", remedy)
    if host.slots < have:
        what = f"{host.slots} slots, and {have} accelerators: {have - host.slots} stay idle"
        yield Finding("slots", "warning", what, f"write slots={have} in the hostfile")


def _names(host: Host, facts: Facts, run: PlannedRun) -> Iterator[Finding]:
    """Every host resolves rank 0's host, and a host that others connect to does not resolve itself to loopback."""
    if len(run.hosts) == 1:
        return
    if facts.resolves.get(run.hosts[0]) == ():
        what = f"{run.hosts[0]}, the host of rank 0, has no address here"
        yield Finding("names", "error", what, "add it to DNS or /etc/hosts, or use addresses")
    own = facts.resolves.get(host.name, ())
    is_connected_to = host.name == run.hosts[0] or not run.environ.get("GLOO_SOCKET_IFNAME")
    if is_connected_to and own and all(map(is_loopback, own)):
        what = f"{host.name} is {own[0]} on itself, where no other host can reach it"
        yield Finding("names", "error", what, "correct /etc/hosts there (Debian's 127.0.1.1 line)")


def _resources(host: Host, facts: Facts, run: PlannedRun) -> Iterator[Finding]:
    """Rank 0's port, the data, the output folder and shared memory."""
    if facts.port_problem:
        remedy = f"--master_port with another number, or on that host: ss -ltnp 'sport = :{run.port}'"
        yield Finding("port", "error", f"{facts.port_problem} (another run, or one that was left behind)", remedy)
    if facts.data_problem:
        yield Finding("data", "error", facts.data_problem, "mount or copy the data there, under the same path")
    free, shm = facts.output_free_bytes, facts.shm_bytes
    if free is not None and free < _MIN_OUTPUT_BYTES:
        remedy = f"at least {_MIN_OUTPUT_BYTES // _GIB} GiB for checkpoints: make room, or choose another folder"
        yield Finding("disk", "error", f"{free / _GIB:.2f} GiB are free for --output {run.output}", remedy)
    if facts.output_problem:
        remedy = "give a folder on a file system that every host can write to"
        yield Finding("output", "error", facts.output_problem, remedy)
    if shm is not None and shm < _MIN_SHM_BYTES:
        what = f"/dev/shm has {shm / 2**20:.0f} MiB: loader workers and NCCL die of a bus error"
        remedy = "mount -o remount,size=16G /dev/shm there (docker run --shm-size=16g, or --ipc=host)"
        yield Finding("shm", "error", what, remedy)


def _interfaces(host: Host, facts: Facts, run: PlannedRun) -> Iterator[Finding]:
    """The network interfaces that gloo and NCCL are set to use exist and are up."""
    others = (i.name for i in facts.interfaces if i.addresses and not any(map(is_loopback, i.addresses)))
    there = ", ".join(others) or "none"
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        wanted = run.environ.get(variable, "")
        if not wanted or wanted.startswith("^"):
            continue
        matching = _chosen(wanted, facts.interfaces, exact=variable.startswith("GLOO"))
        if not matching:
            remedy = f"{variable}=<name> in .deepspeed_env, with a name that every host has; here: {there}"
            yield Finding("interface", "error", f"{variable}={wanted}, but there is no such interface", remedy)
        elif not any(interface.up for interface in matching):
            remedy = f"ip link set {matching[0].name} up there, or another interface ({there})"
            yield Finding("interface", "error", f"{variable}={wanted}: {matching[0].name} is down", remedy)


def _adapters(host: Host, facts: Facts, run: PlannedRun) -> Iterator[Finding]:
    """InfiniBand and RoCE: the ports in NCCL_IB_HCA, or at least one, are active, and memory can be registered."""
    wanted, ports = run.environ.get("NCCL_IB_HCA", ""), facts.ports
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
            yield Finding("infiniband", "error", what, "correct NCCL_IB_HCA in .deepspeed_env (ibdev2netdev)")
        elif not any(port.state == "ACTIVE" for port in matching):
            yield Finding("infiniband", "error", f"adapter {item} is {matching[0].state}, not ACTIVE", remedy)
    if ports and not asked and not _active(facts):
        what = f"no port of its adapters is active ({there}): NCCL would use TCP"
        yield Finding("infiniband", "error", what, remedy)
    limit = facts.memlock_bytes
    if ports and limit is not None and limit < _GIB:
        what = f"`ulimit -l` is {limit // 1024} KiB: an adapter cannot register its buffers"
        remedy = "memlock unlimited in /etc/security/limits.conf (and LimitMEMLOCK=infinity for sshd and slurmd)"
        yield Finding("memlock", "error", what, remedy)


# ---- the network -----------------------------------------------------------------------------------------------------


def _check_network(figures: NetworkResult, known: Sequence[tuple[Host, Facts]]) -> Iterator[Finding]:
    """Findings of the measurements: ranks that cannot connect, slow pairs, adapters far below their rate."""
    if figures.problem:
        remedy = "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME in .deepspeed_env; a firewall between the hosts"
        what = f"the ranks cannot communicate: {figures.problem}"
        yield Finding("collectives", "error", what, remedy, figures.culprits)
    pairs = figures.measured["pairs"] if figures.measured else []
    usual = statistics.median([pair["bytes_per_second"] for pair in pairs] or [0.0])
    links = {host.name: sum(port.gbits for port in _active(facts)) for host, facts in known if facts.accelerators}
    for pair in pairs:
        names = (figures.hosts[pair["a"]], figures.hosts[pair["b"]])
        latency, rate = pair["latency_seconds"], pair["bytes_per_second"]
        link = min(links.get(name, 0.0) for name in names)
        if latency > MAX_LATENCY_SECONDS:
            what = f"a small message takes {latency * 1e3:.1f} ms one way (a cluster's network: well below 1 ms)"
            remedy = f"ping {names[1]} from {names[0]}: cable, switch, a route through another building, tc qdisc"
            yield Finding("latency", "error", what, remedy, names)
        elif len(pairs) > 2 and rate < _SLOW_SHARE * usual:
            what = f"{gbits(rate)} between them, {gbits(usual)} between the others"
            remedy = "ip -s link, ethtool or ibstat on both: a port at a lower rate, lost packets"
            yield Finding("bandwidth", "error", what, remedy, names)
        elif link and rate * 8e-9 < _LINK_SHARE * link:
            what = f"{gbits(rate)} between them over adapters of {link:g} Gbit/s"
            remedy = "see the adapters that NCCL_DEBUG=INFO names; set NCCL_IB_HCA"
            yield Finding("bandwidth", "warning", what, remedy, names)


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


def _active(facts: Facts) -> list[Port]:
    return [port for port in facts.ports if port.state == "ACTIVE"]


def _chosen(wanted: str, interfaces: Sequence[Interface], *, exact: bool) -> list[Interface]:
    """The interfaces that a variable selects: NCCL matches prefixes of names unless `=` comes first, gloo names."""
    names = [name for name in wanted.lstrip("=").split(",") if name]
    exact = exact or wanted.startswith("=")
    return [i for i in interfaces if any(i.name == n if exact else i.name.startswith(n) for n in names)]


def is_loopback(address: str) -> bool:
    """Whether an address is a loopback address."""
    return address.startswith("127.") or address == "::1"
