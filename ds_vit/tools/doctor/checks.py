"""From all hosts' answers to findings: pure functions, one a kind of fault.

A finding says on which hosts, what is wrong (with the numbers) and what to do. "error" is what stops a run or makes it
wrong, "warning" what makes it slow or fragile. A healthy cluster has none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from ds_vit.launching.host_identity import PACKAGES
from ds_vit.tools.doctor.facts import Facts
from ds_vit.tools.doctor.findings import Finding, Found, Run, answered, differences, grouped
from ds_vit.tools.doctor.interfaces import chosen, interface_of, is_address, is_loopback
from ds_vit.tools.doctor.remote import Answer

CLOCK_SECONDS = 2.0
"""Clocks that differ by more are a finding: file times, logs and tickets of shared file systems go wrong."""

_GIB = 2**30
_MIN_OUTPUT_BYTES = 2 * _GIB  # a checkpoint of ViT-B with AdamW's moments has 1 GB, and two exist for a moment
_MIN_SHM_BYTES = 256 * 2**20  # Docker's default is 64 MiB: loader workers die of a bus error
_MIN_OPEN_FILES = 1024


def examine(answers: Sequence[Answer], run: Run) -> list[Finding]:
    """All findings, errors first."""
    findings = [finding for check in CHECKS for finding in check(answers, run)]
    return sorted(findings, key=lambda finding: finding.severity != "error")


def reached(answers: Sequence[Answer], run: Run) -> Found:
    """Every host answers, not the first alone."""
    for answer in answers:
        if answer.facts is None:
            yield Finding("ssh", "error", (answer.host.name,), answer.problem, answer.remedy)


def distinct(answers: Sequence[Answer], run: Run) -> Found:
    """No machine has two names in the list."""
    names = defaultdict(list)
    for answer, facts in answered(answers):
        names[facts.identity].append(answer.host.name)
    for same in names.values():
        if len(same) > 1:
            what = f"{' and '.join(same)} are one machine; its accelerators would be given out {len(same)} times"
            yield Finding("hosts", "error", tuple(same), what, "keep one of the names in the hostfile")


def versions(answers: Sequence[Answer], run: Run) -> Found:
    """The same software everywhere."""
    same = "install the same environment on every host (one virtual environment on a shared disk is the easiest)"
    for name in PACKAGES:
        versions = differences(answers, lambda facts, name=name: facts.packages.get(name, "missing"))
        if versions:
            yield Finding("versions", "error", versions.odd, f"{name} differs: {versions}", same)
        missing = [a.host.name for a, facts in answered(answers) if facts.packages.get(name) == "missing"]
        if missing and not versions:
            yield Finding("versions", "error", tuple(missing), f"{name} is not installed", "pip install ds-vit")
    wanted: list[tuple[str, str, Callable[[Facts], str], str]] = [
        ("Python", "error", lambda facts: ".".join(facts.python.split(".")[:2]), same),
        ("the CUDA that torch is built for", "error", lambda facts: facts.cuda or "none", same),
        ("NCCL", "error", lambda facts: facts.nccl or "none", same),
        ("the NVIDIA driver", "warning", lambda facts: facts.driver or "none", "bring the drivers to one version"),
    ]
    for what, severity, value, remedy in wanted:
        versions = differences(answers, value)
        if versions:
            yield Finding("versions", severity, versions.odd, f"{what} differs: {versions}", remedy)


def code(answers: Sequence[Answer], run: Run) -> Found:
    """The same ds_vit everywhere."""
    differing = differences(answers, lambda facts: facts.code)
    if differing:
        paths = {a.host.name: facts.code_path for a, facts in answered(answers)}
        what = f"the code of ds_vit differs from the other hosts' (checksums {differing}; in {paths[differing.odd[0]]})"
        remedy = "git status and git pull there, or put the clone on a shared disk"
        yield Finding("code", "error", differing.odd, what, remedy)


def slots(answers: Sequence[Answer], run: Run) -> Found:
    """No more slots than accelerators, or cores where there is none."""
    for answer, facts in answered(answers):
        asked, have = answer.host.slots, len(facts.accelerators)
        name = (answer.host.name,)
        if have and asked > have:
            remedy = f"write slots={have} in the hostfile"
            yield Finding("slots", "error", name, f"{asked} slots, but {have} accelerators", remedy)
        elif have and asked < have:
            what = f"{asked} slots, and {have} accelerators: {have - asked} stay idle"
            yield Finding("slots", "warning", name, what, f"write slots={have} in the hostfile")
        elif not have and asked > facts.cores:
            what = f"{asked} slots, but no accelerator and {facts.cores} cores"
            yield Finding("slots", "error", name, what, f"write slots={facts.cores} or fewer in the hostfile")


def accelerators(answers: Sequence[Answer], run: Run) -> Found:
    """Torch sees what the driver lists, and all hosts have the same."""
    for answer, facts in answered(answers):
        have, seen = len(facts.accelerators), facts.torch_accelerators
        if have and seen == 0:
            what = f"the driver {facts.driver} lists {have} accelerators, and torch (CUDA {facts.cuda}) can use none"
            remedy = "a newer driver, or a torch for an older CUDA; CUDA_VISIBLE_DEVICES must not be empty"
            yield Finding("accelerators", "error", (answer.host.name,), what, remedy)
    kinds = differences(answers, lambda facts: ", ".join(sorted(set(facts.accelerators))) or "none")
    if kinds:
        some_without = any(not facts.accelerators for _, facts in answered(answers))
        severity = "error" if some_without else "warning"
        what = f"the accelerators differ: {kinds}"
        yield Finding("accelerators", severity, kinds.odd, what, "leave those hosts out; the slowest sets the pace")


def names(answers: Sequence[Answer], run: Run) -> Found:
    """Every host finds rank 0's, and does not take itself for the loopback interface."""
    if len(answers) < 2:
        return
    master = answers[0].host.name
    for answer, facts in answered(answers):
        found = facts.resolves.get(master)
        if found is not None and not found:
            what = f"{master}, the host of rank 0, has no address here"
            yield Finding("names", "error", (answer.host.name,), what, "add it to DNS or /etc/hosts, or use addresses")
        own = facts.resolves.get(answer.host.name, ())
        by_name = answer.host.name if not is_address(answer.host.name) else ""
        counts = answer is answers[0] or not run.environ.get("GLOO_SOCKET_IFNAME")
        if counts and by_name and own and all(is_loopback(address) for address in own):
            what = f"{by_name} is {own[0]} on itself, where no other host can reach it"
            remedy = "correct /etc/hosts there (Debian's 127.0.1.1 line)"
            yield Finding("names", "error", (answer.host.name,), what, remedy)


def port(answers: Sequence[Answer], run: Run) -> Found:
    """Rank 0's port is free."""
    first = answers[0]
    if first.facts is not None and first.facts.port_problem:
        what = f"{first.facts.port_problem} (another run, or one that was left behind)"
        remedy = f"--master_port with another number, or on that host: ss -ltnp 'sport = :{run.port}'"
        yield Finding("port", "error", (first.host.name,), what, remedy)


def clocks(answers: Sequence[Answer], run: Run) -> Found:
    """The clocks agree."""
    for answer in answers:
        if answer.clock_ahead_seconds is None:
            continue
        at_least, at_most = answer.clock_ahead_seconds
        ahead = at_least if at_least > 0 else at_most if at_most < 0 else 0.0
        if abs(ahead) > CLOCK_SECONDS:
            what = f"its clock is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} this machine's"
            remedy = "timedatectl set-ntp true there (chrony or ntpd)"
            yield Finding("clock", "error", (answer.host.name,), what, remedy)


def data(answers: Sequence[Answer], run: Run) -> Found:
    """The same data under the same path."""
    for answer, facts in answered(answers):
        if facts.data_problem:
            remedy = "mount or copy the data there, under the same path"
            yield Finding("data", "error", (answer.host.name,), facts.data_problem, remedy)
    differing = differences(answers, lambda facts: facts.data, left_out="")
    if differing:
        what = f"the data differs from the other hosts' (checksums {differing}: names, or a few files)"
        remedy = "copy it again (rsync -a --checksum), or use a shared disk"
        yield Finding("data", "error", differing.odd, what, remedy)


def output(answers: Sequence[Answer], run: Run) -> Found:
    """One folder that every host can write to, with room."""
    known = [(answer, facts) for answer, facts in answered(answers) if run.output]
    for answer, facts in known:
        name, free = (answer.host.name,), facts.output_free_bytes
        full = free is not None and free < _MIN_OUTPUT_BYTES
        if full or "No space" in facts.output_problem:
            what = f"{(free or 0) / _GIB:.2f} GiB are free for --output {run.output}"
            remedy = f"at least {_MIN_OUTPUT_BYTES // _GIB} GiB for checkpoints: make room, or choose another folder"
            yield Finding("disk", "error", name, what, remedy)
        elif facts.output_problem:
            remedy = "give a folder on a file system that every host can write to"
            yield Finding("output", "error", name, facts.output_problem, remedy)
    fine = [answer for answer, facts in known if not facts.output_problem]
    apart = [answer.host.name for answer in fine if answer.marks < len({f.identity for _, f in known})]
    if len(fine) == len(known) > 1 and apart:
        what = f"--output {run.output} is not one folder: a host's file is not seen on the others"
        yield Finding("output", "error", tuple(apart), what, "give a path on a file system that all hosts share")


def interfaces(answers: Sequence[Answer], run: Run) -> Found:
    """The interfaces that gloo and NCCL are told to take are there and up, and of one size of packet."""
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        wanted = run.environ.get(variable, "")
        if not wanted or wanted.startswith("^"):
            continue
        for answer, facts in answered(answers):
            matching = chosen(wanted, facts.interfaces, exact=variable.startswith("GLOO"))
            there = ", ".join(i.name for i in facts.interfaces if i.kind != "loopback" and i.addresses) or "none"
            remedy = f"{variable}=<name> in .deepspeed_env, with a name that every host has; here: {there}"
            if not matching:
                what = f"{variable}={wanted}, and there is no such interface"
                yield Finding("interface", "error", (answer.host.name,), what, remedy)
            elif not any(i.up for i in matching):
                what = f"{variable}={wanted}: {matching[0].name} is down"
                remedy = f"ip link set {matching[0].name} up there, or another interface ({there})"
                yield Finding("interface", "error", (answer.host.name,), what, remedy)
    taken = {a.host.name: interface_of(a, run) for a, _ in answered(answers)}
    mtus = {name: str(i.mtu) if i is not None and i.kind != "loopback" else "" for name, i in taken.items()}
    sizes = grouped(mtus, left_out="")
    if sizes:
        what = f"the largest packet (MTU) of the interface differs: {sizes}"
        remedy = "ip link set dev NAME mtu N: one value on every host; large messages may hang otherwise"
        yield Finding("interface", "warning", sizes.odd, what, remedy)


def adapters(answers: Sequence[Answer], run: Run) -> Found:
    """InfiniBand and RoCE: ports active, of one speed, those that are asked for there; memory can be pinned."""
    wanted = run.environ.get("NCCL_IB_HCA", "")
    for answer, facts in answered(answers):
        name = (answer.host.name,)
        asked = [item for item in wanted.lstrip("^=").split(",") if item] if not wanted.startswith("^") else []
        for item in asked:
            device, _, number = item.partition(":")
            fits = [
                port
                for port in facts.ports
                if (port.device == device if wanted.startswith("=") else port.device.startswith(device))
                and (not number or port.port == int(number))
            ]
            if not fits:
                there = ", ".join(f"{p.device}:{p.port}" for p in facts.ports) or "none"
                what = f"NCCL_IB_HCA={wanted}, and there is no adapter {item} (there: {there})"
                yield Finding("infiniband", "error", name, what, "correct NCCL_IB_HCA in .deepspeed_env (ibdev2netdev)")
            elif not any(port.state == "ACTIVE" for port in fits):
                what = f"adapter {item} is {fits[0].state}, not ACTIVE"
                yield Finding("infiniband", "error", name, what, "ibstat there: cable, switch port, subnet manager")
        if facts.ports and not asked and not any(port.state == "ACTIVE" for port in facts.ports):
            states = ", ".join(f"{p.device}:{p.port} {p.state}" for p in facts.ports)
            what = f"no port of its adapters is active ({states}): NCCL would go over TCP"
            yield Finding("infiniband", "error", name, what, "ibstat there: cable, switch port, subnet manager")
        if facts.ports and facts.memlock_bytes is not None and facts.memlock_bytes < 2**30:
            what = f"`ulimit -l` is {facts.memlock_bytes // 1024} KiB: an adapter cannot register its buffers"
            remedy = "memlock unlimited in /etc/security/limits.conf (and LimitMEMLOCK=infinity for sshd and slurmd)"
            yield Finding("memlock", "error", name, what, remedy)
        if facts.ports and facts.gpudirect is False:
            what = "the kernel module nvidia_peermem is not loaded: adapters may have to go through host memory"
            yield Finding("gpudirect", "warning", name, what, "modprobe nvidia_peermem there (or NCCL's DMA-BUF way)")
    rates = differences(
        answers, lambda facts: ", ".join(sorted({f"{p.gbits:g}" for p in facts.ports if p.state == "ACTIVE"}))
    )
    if rates:
        what = f"the active adapters' rates (Gbit/s) differ: {rates or 'none'}"
        remedy = "ibstat there: a port that came up slower, or a host without InfiniBand"
        yield Finding("infiniband", "warning", rates.odd, what, remedy)


def limits(answers: Sequence[Answer], run: Run) -> Found:
    """Shared memory for loader workers, and open files."""
    for answer, facts in answered(answers):
        name = (answer.host.name,)
        if facts.shm_bytes is not None and facts.shm_bytes < _MIN_SHM_BYTES:
            what = f"/dev/shm has {facts.shm_bytes / 2**20:.0f} MiB: loader workers and NCCL die of a bus error"
            remedy = "mount -o remount,size=16G /dev/shm there (docker run --shm-size=16g, or --ipc=host)"
            yield Finding("shm", "error", name, what, remedy)
        if facts.open_files is not None and facts.open_files < _MIN_OPEN_FILES:
            what = f"`ulimit -n` is {facts.open_files}: loader workers and sockets run out of files"
            yield Finding("files", "error", name, what, "nofile 65536 in /etc/security/limits.conf there")


CHECKS: tuple[Callable[[Sequence[Answer], Run], Found], ...] = (
    reached,
    distinct,
    versions,
    code,
    accelerators,
    slots,
    names,
    port,
    clocks,
    data,
    output,
    interfaces,
    adapters,
    limits,
)
