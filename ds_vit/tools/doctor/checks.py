"""From all hosts' facts and the network's figures to findings: pure functions.

A finding says on which hosts, what is wrong (with the numbers) and what to do. "error" is what stops a run or makes it
wrong, "warning" what makes it slow or fragile. A healthy cluster has none.
"""

from __future__ import annotations

import ipaddress
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ds_vit.launching.host_identity import PACKAGES
from ds_vit.tools.doctor.facts import Facts, Interface
from ds_vit.tools.doctor.network import Figures
from ds_vit.tools.doctor.remote import Answer

CLOCK_SECONDS = 2.0
"""Clocks that differ by more are a finding: file times, logs and tickets of shared file systems go wrong."""

MAX_LATENCY_SECONDS = 0.005
"""Between two hosts of one cluster: TCP takes 20 to 200 microseconds, InfiniBand 2 to 10."""

_GIB = 2**30
_MIN_OUTPUT_BYTES = 2 * _GIB  # a checkpoint of ViT-B with AdamW's moments has 1 GB, and two exist temporarily
_MIN_SHM_BYTES = 256 * 2**20  # Docker's default is 64 MiB: loader workers die of a bus error
_MIN_OPEN_FILES = 1024
_SLOW_SHARE = 0.5  # of the median pair's bandwidth
_LINK_SHARE = 0.25  # of the link's rate: gloo and one TCP connection reach that, NCCL much more
_LOST_SHARE = 0.004  # of TCP's segments; without any loss busy hosts send one in a thousand again
_FEW_SEGMENTS = 4  # sent again prove nothing


@dataclass(frozen=True)
class Finding:
    """What is wrong.

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
        output: `--output`, "" for none.
        port: where rank 0 will listen.
    """

    environ: Mapping[str, str]
    output: str = ""
    port: int = 0


Findings = Iterator[Finding]
Fault = tuple[str, str, str, str]
"""(check, severity, what, remedy) on one host."""


def examine(answers: Sequence[Answer], run: Run) -> list[Finding]:
    """All findings of the hosts' answers, errors first."""
    findings = [*_compare_hosts(answers, run), *_check_output(answers, run)]
    for answer in answers:
        if answer.facts is None:
            findings.append(Finding("ssh", "error", (answer.host.name,), answer.problem, answer.remedy))
            continue
        for check in (_check_accelerators, _check_names, _check_paths, _check_interfaces, _check_adapters):
            for fault in check(answer, answer.facts, answers, run):
                findings.append(Finding(fault[0], fault[1], (answer.host.name,), *fault[2:]))
    return errors_first(findings)


def errors_first(findings: Sequence[Finding]) -> list[Finding]:
    """The findings in the order in which people read them."""
    return sorted(findings, key=lambda finding: finding.severity != "error")


# ---- hosts compared with each other ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Differing:
    """Values by host, where they are not all equal; `odd` are the hosts of the rarer values."""

    by_value: Mapping[str, Sequence[str]]
    odd: tuple[str, ...]

    def __str__(self) -> str:
        def names(hosts: Sequence[str]) -> str:
            return ", ".join(hosts[:6]) + (f" and {len(hosts) - 6} more" if len(hosts) > 6 else "")

        return "; ".join(f"{value or 'none'} on {names(hosts)}" for value, hosts in self.by_value.items())


def grouped(values: Mapping[str, str]) -> Differing | None:
    """Group hosts by a value; None where all agree. With as many on each side the first host's value is the norm."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name, value in values.items():
        groups[value].append(name)
    if len(groups) < 2:
        return None
    norm = max(groups, key=lambda value: len(groups[value]))  # of equals the first
    odd = tuple(name for value, names in groups.items() if value != norm for name in names)
    return Differing(dict(groups), odd)


_SAME = "install the same environment on every host (one virtual environment on a shared disk is the easiest)"
_COPY = "copy it again (rsync -a --checksum), or use a shared disk"
_PULL = "git status and git pull there, or put the clone on a shared disk"
_LEAVE_OUT = "leave those hosts out; the slowest sets the pace"


def _rates(facts: Facts) -> str:
    return ", ".join(sorted({f"{port.gbits:g}" for port in facts.ports if port.state == "ACTIVE"}))


# (check, severity, what differs, its value on a host, remedy)
_COMPARED: tuple[tuple[str, str, str, Callable[[Facts], str], str], ...] = (
    *(
        ("versions", "error", f"{name} differs", lambda facts, name=name: facts.packages.get(name, "missing"), _SAME)
        for name in PACKAGES
    ),
    ("versions", "error", "Python differs", lambda facts: ".".join(facts.python.split(".")[:2]), _SAME),
    ("versions", "error", "the CUDA that torch is built for differs", lambda facts: facts.cuda, _SAME),
    ("versions", "error", "NCCL differs", lambda facts: facts.nccl, _SAME),
    (
        *("versions", "warning", "the NVIDIA driver differs", lambda facts: facts.driver),
        "bring the drivers to one version",
    ),
    ("code", "error", "the code of ds_vit differs, by checksum", lambda facts: facts.code, _PULL),
    ("data", "error", "the data differs, by checksum (names, or a few files)", lambda facts: facts.data, _COPY),
    (
        *("accelerators", "warning", "the accelerators differ"),
        *(lambda facts: ", ".join(sorted(set(facts.accelerators))), _LEAVE_OUT),
    ),
    (
        *("infiniband", "warning", "the rates of the active adapters differ (Gbit/s)", _rates),
        "ibstat there: a cable or a port that has come up at a lower rate",
    ),
)


def _compare_hosts(answers: Sequence[Answer], run: Run) -> Findings:
    """Values that must be the same on all hosts, and two names for one machine."""
    known = {answer.host.name: answer.facts for answer in answers if answer.facts is not None}
    for check, severity, what, value, remedy in _COMPARED:
        values = {name: value(facts) for name, facts in known.items() if check != "data" or facts.data}
        if differing := grouped(values):
            some_without = check == "accelerators" and "" in differing.by_value
            severity = "error" if some_without else severity
            yield Finding(check, severity, differing.odd, f"{what}: {differing}", remedy)
    for package in PACKAGES:
        if known and all(facts.packages.get(package) == "missing" for facts in known.values()):
            yield Finding("versions", "error", tuple(known), f"{package} is not installed", "pip install ds-vit")
    names = defaultdict(list)
    for name, facts in known.items():
        names[facts.identity].append(name)
    for same in names.values():
        if len(same) > 1:
            what = f"{' and '.join(same)} are one machine; its accelerators would be assigned {len(same)} times"
            yield Finding("hosts", "error", tuple(same), what, "keep one of the names in the hostfile")
    used = {a.host.name: interface_of(a, run) for a in answers if a.facts is not None}
    mtus = {name: str(i.mtu) for name, i in used.items() if i is not None and not any(map(is_loopback, i.addresses))}
    if differing := grouped(mtus):
        remedy = "ip link set dev NAME mtu N: one value on every host; large messages may hang otherwise"
        what = f"the largest packet (MTU) of the interface differs: {differing}"
        yield Finding("interface", "warning", differing.odd, what, remedy)


def _check_output(answers: Sequence[Answer], run: Run) -> Findings:
    """One folder that every host can write to, with room."""
    known = [(answer, answer.facts) for answer in answers if run.output and answer.facts is not None]
    for answer, facts in known:
        name, free = (answer.host.name,), facts.output_free_bytes
        if (free is not None and free < _MIN_OUTPUT_BYTES) or "No space" in facts.output_problem:
            what = f"{(free or 0) / _GIB:.2f} GiB are free for --output {run.output}"
            remedy = f"at least {_MIN_OUTPUT_BYTES // _GIB} GiB for checkpoints: make room, or choose another folder"
            yield Finding("disk", "error", name, what, remedy)
        elif facts.output_problem:
            remedy = "give a folder on a file system that every host can write to"
            yield Finding("output", "error", name, facts.output_problem, remedy)
    num_machines = len({facts.identity for _, facts in known})
    apart = tuple(answer.host.name for answer, _ in known if answer.marks < num_machines)
    if len(known) > 1 and apart and not any(facts.output_problem for _, facts in known):
        what = f"--output {run.output} is not one folder: a host's file is not seen on the others"
        yield Finding("output", "error", apart, what, "give a path on a file system that all hosts share")


# ---- one host --------------------------------------------------------------------------------------------------------


def _check_accelerators(answer: Answer, facts: Facts, answers: Sequence[Answer], run: Run) -> Iterator[Fault]:
    """Torch sees what the driver lists; no more slots than accelerators, or than cores where there is none."""
    asked, have = answer.host.slots, len(facts.accelerators)
    if have and facts.torch_accelerators == 0:
        what = f"the driver {facts.driver} lists {have} accelerators, and torch (CUDA {facts.cuda}) can use none"
        remedy = "a newer driver, or a torch for an older CUDA; CUDA_VISIBLE_DEVICES must not be empty"
        yield "accelerators", "error", what, remedy
    remedy = f"write slots={have or facts.cores} in the hostfile"
    if have and asked > have:
        yield "slots", "error", f"{asked} slots, but {have} accelerators", remedy
    elif have and asked < have:
        yield "slots", "warning", f"{asked} slots, and {have} accelerators: {have - asked} stay idle", remedy
    elif not have and asked > facts.cores:
        yield "slots", "error", f"{asked} slots, but no accelerator and {facts.cores} cores", f"{remedy}, or fewer"


def _check_names(answer: Answer, facts: Facts, answers: Sequence[Answer], run: Run) -> Iterator[Fault]:
    """Rank 0's host has an address here; this name is not the loopback; the port is free and the clock right."""
    first, name = answers[0], answer.host.name
    if len(answers) > 1:
        if facts.resolves.get(first.host.name) == ():
            what = f"{first.host.name}, the host of rank 0, has no address here"
            yield "names", "error", what, "add it to DNS or /etc/hosts, or use addresses"
        own = facts.resolves.get(name, ())
        counts = answer is first or not run.environ.get("GLOO_SOCKET_IFNAME")
        if counts and not is_address(name) and own and all(map(is_loopback, own)):
            what = f"{name} is {own[0]} on itself, where no other host can reach it"
            yield "names", "error", what, "correct /etc/hosts there (Debian's 127.0.1.1 line)"
    if answer is first and facts.port_problem:
        what = f"{facts.port_problem} (another run, or one that was left behind)"
        remedy = f"--master_port with another number, or on that host: ss -ltnp 'sport = :{run.port}'"
        yield "port", "error", what, remedy
    at_least, at_most = answer.clock_ahead_seconds or (0.0, 0.0)
    ahead = at_least if at_least > 0 else min(at_most, 0.0)
    if abs(ahead) > CLOCK_SECONDS:
        what = f"its clock is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} this machine's"
        yield "clock", "error", what, "timedatectl set-ntp true there (chrony or ntpd)"


def _check_paths(answer: Answer, facts: Facts, answers: Sequence[Answer], run: Run) -> Iterator[Fault]:
    """The data is there; shared memory for loader workers, and open files."""
    if facts.data_problem:
        yield "data", "error", facts.data_problem, "mount or copy the data there, under the same path"
    if facts.shm_bytes is not None and facts.shm_bytes < _MIN_SHM_BYTES:
        what = f"/dev/shm has {facts.shm_bytes / 2**20:.0f} MiB: loader workers and NCCL die of a bus error"
        remedy = "mount -o remount,size=16G /dev/shm there (docker run --shm-size=16g, or --ipc=host)"
        yield "shm", "error", what, remedy
    if facts.open_files is not None and facts.open_files < _MIN_OPEN_FILES:
        what = f"`ulimit -n` is {facts.open_files}: loader workers and sockets run out of files"
        yield "files", "error", what, "nofile 65536 in /etc/security/limits.conf there"


def _check_interfaces(answer: Answer, facts: Facts, answers: Sequence[Answer], run: Run) -> Iterator[Fault]:
    """The interfaces that gloo and NCCL are to use are there and up."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        wanted = run.environ.get(variable, "")
        if not wanted or wanted.startswith("^"):
            continue
        matching = _chosen(wanted, facts.interfaces, exact=variable.startswith("GLOO"))
        others = (i.name for i in facts.interfaces if i.addresses and not any(map(is_loopback, i.addresses)))
        there = ", ".join(others) or "none"
        if not matching:
            remedy = f"{variable}=<name> in .deepspeed_env, with a name that every host has; here: {there}"
            yield "interface", "error", f"{variable}={wanted}, and there is no such interface", remedy
        elif not any(i.up for i in matching):
            remedy = f"ip link set {matching[0].name} up there, or another interface ({there})"
            yield "interface", "error", f"{variable}={wanted}: {matching[0].name} is down", remedy


def _check_adapters(answer: Answer, facts: Facts, answers: Sequence[Answer], run: Run) -> Iterator[Fault]:
    """InfiniBand and RoCE: the ports that are asked for are there and active; memory can be pinned."""
    wanted = run.environ.get("NCCL_IB_HCA", "")
    asked = [] if wanted.startswith("^") else [item for item in wanted.lstrip("=").split(",") if item]
    remedy = "ibstat there: cable, switch port, subnet manager"
    for item in asked:
        device, _, number = item.partition(":")
        matching = [
            port
            for port in facts.ports
            if (port.device == device if wanted.startswith("=") else port.device.startswith(device))
            and number in ("", str(port.port))
        ]
        if not matching:
            there = ", ".join(f"{p.device}:{p.port}" for p in facts.ports) or "none"
            what = f"NCCL_IB_HCA={wanted}, and there is no adapter {item} (there: {there})"
            yield "infiniband", "error", what, "correct NCCL_IB_HCA in .deepspeed_env (ibdev2netdev)"
        elif not any(port.state == "ACTIVE" for port in matching):
            yield "infiniband", "error", f"adapter {item} is {matching[0].state}, not ACTIVE", remedy
    if not facts.ports:
        return
    if not asked and not any(port.state == "ACTIVE" for port in facts.ports):
        states = ", ".join(f"{p.device}:{p.port} {p.state}" for p in facts.ports)
        what = f"no port of its adapters is active ({states}): NCCL would use TCP"
        yield "infiniband", "error", what, remedy
    if facts.memlock_bytes is not None and facts.memlock_bytes < _GIB:
        what = f"`ulimit -l` is {facts.memlock_bytes // 1024} KiB: an adapter cannot register its buffers"
        remedy = "memlock unlimited in /etc/security/limits.conf (and LimitMEMLOCK=infinity for sshd and slurmd)"
        yield "memlock", "error", what, remedy
    if facts.gpudirect is False:
        what = "the kernel module nvidia_peermem is not loaded: adapters may have to copy through host memory"
        yield "gpudirect", "warning", what, "modprobe nvidia_peermem there (or NCCL's DMA-BUF)"


# ---- the network -----------------------------------------------------------------------------------------------------


def check_network(figures: Figures, answers: Sequence[Answer], run: Run) -> Findings:
    """Findings in what the ranks measured: no meeting, lost packets, slow pairs, less than the link should give."""
    remedy = "the interface: GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME in .deepspeed_env; a firewall between the hosts"
    if figures.problem:
        yield Finding("collectives", "error", figures.culprits, f"ranks cannot talk: {figures.problem}", remedy)
    if figures.measured is None:
        return
    for host, tcp in zip(figures.hosts, figures.measured["tcp"], strict=False):  # none where it was not measured
        if tcp["again"] > max(_FEW_SEGMENTS, _LOST_SHARE * tcp["sent"]):
            what = f"{tcp['again'] / tcp['sent']:.1%} of its TCP segments were lost and sent again ({tcp['again']})"
            remedy = "ip -s link show DEV and ethtool -S DEV there: cable, duplex, switch port; tc qdisc show"
            yield Finding("loss", "error", (host,), what, remedy)
    pairs = figures.measured["pairs"]
    by_name = {answer.host.name: answer for answer in answers}
    usual = statistics.median([pair["bytes_per_second"] for pair in pairs] or [0.0])
    for pair in pairs:
        names = (figures.hosts[pair["a"]], figures.hosts[pair["b"]])
        latency, rate = pair["latency_seconds"], pair["bytes_per_second"]
        link = min(link_of(by_name[name], run)[1] for name in names)
        if latency > MAX_LATENCY_SECONDS:
            what = f"a small message takes {latency * 1e3:.1f} ms one way (a cluster's network: well below 1 ms)"
            remedy = f"ping {names[1]} from {names[0]}: cable, switch, a route through another building, tc qdisc"
            yield Finding("latency", "error", names, what, remedy)
        elif len(pairs) > 2 and rate < _SLOW_SHARE * usual:
            what = f"{gbits(rate)} between them, {gbits(usual)} between the others"
            yield Finding("bandwidth", "error", names, what, "ethtool or ibstat on both: a port at a lower rate")
        elif link and rate * 8e-9 < _LINK_SHARE * link:
            what = f"{gbits(rate)} between them over a link of {link:g} Gbit/s"
            yield Finding("bandwidth", "warning", names, what, "iperf3 between them: errors, or another interface")


def slowest(figures: Figures) -> str:
    """The slowest pair of hosts, for people; "" for fewer than two hosts."""
    pairs = figures.measured["pairs"] if figures.measured else []
    if not pairs:
        return ""
    worst = min(pairs, key=lambda pair: pair["bytes_per_second"])
    a, b = figures.hosts[worst["a"]], figures.hosts[worst["b"]]
    return f"{a} - {b}: {worst['latency_seconds'] * 1e6:.0f} us, {gbits(worst['bytes_per_second'])}"


def gbits(bytes_per_second: float) -> str:
    """Bytes a second in a network's unit."""
    return f"{bytes_per_second * 8e-9:.2f} Gbit/s"


def interface_of(answer: Answer, run: Run) -> Interface | None:
    """The interface that this host's ranks would use: the one that is named, else that of its own address."""
    facts = answer.facts
    assert facts is not None
    wanted = run.environ.get("NCCL_SOCKET_IFNAME" if facts.accelerators else "GLOO_SOCKET_IFNAME", "")
    if wanted and not wanted.startswith("^"):
        return next(iter(_chosen(wanted, facts.interfaces, exact=not facts.accelerators)), None)
    own = facts.resolves.get(answer.host.name, ())
    return next((i for i in facts.interfaces if set(i.addresses) & set(own)), None)


def link_of(answer: Answer, run: Run) -> tuple[str, float]:
    """(text, Gbit/s; 0 where not known) of the link between hosts: `4 x InfiniBand 400 Gbit/s`, `TCP over eth0`."""
    facts = answer.facts
    if facts is None:
        return "unknown", 0.0
    active = [port for port in facts.ports if port.state == "ACTIVE"]
    if active and facts.accelerators:
        kind = "RoCE" if active[0].link == "Ethernet" else "InfiniBand"
        return f"{len(active)} x {kind} {active[0].gbits:g} Gbit/s", sum(port.gbits for port in active)
    interface = interface_of(answer, run)
    if interface is None:
        return "unknown", 0.0
    rate = f", {interface.gbits:g} Gbit/s" if interface.gbits else ""
    return f"TCP over {interface.name}{rate}", interface.gbits


def _chosen(wanted: str, interfaces: Sequence[Interface], *, exact: bool) -> list[Interface]:
    """NCCL takes beginnings of names unless `=` comes first; gloo takes names."""
    names = [name for name in wanted.lstrip("=").split(",") if name]
    exact = exact or wanted.startswith("=")
    return [i for i in interfaces if any(i.name == n if exact else i.name.startswith(n) for n in names)]


def is_address(name: str) -> bool:
    """Whether a name is an IP address."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def is_loopback(address: str) -> bool:
    """Whether an address, which may name its interface after a %, leads to its own host."""
    bare = address.split("%")[0]
    return is_address(bare) and ipaddress.ip_address(bare).is_loopback
