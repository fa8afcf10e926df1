"""Which network interface the ranks of a host would talk through, and how fast it is."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence

from ds_vit.tools.doctor.facts import Interface
from ds_vit.tools.doctor.findings import Run
from ds_vit.tools.doctor.remote import Answer


def interface_of(answer: Answer, run: Run) -> Interface | None:
    """The interface that this host's ranks would talk through: the one that is named, else that of its own address."""
    facts = answer.facts
    assert facts is not None
    wanted = run.environ.get("NCCL_SOCKET_IFNAME" if facts.accelerators else "GLOO_SOCKET_IFNAME", "")
    if wanted and not wanted.startswith("^"):
        return next(iter(chosen(wanted, facts.interfaces, exact=not facts.accelerators)), None)
    own = facts.resolves.get(answer.host.name, ())
    return next((i for i in facts.interfaces if set(i.addresses) & set(own)), None)


def link_of(answer: Answer, run: Run) -> tuple[str, float]:
    """(words, Gbit/s; 0 where not known) of the way between hosts: `4 x InfiniBand 400 Gbit/s`, `TCP over eth0`."""
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
    # A virtual interface reports a rate that means nothing.
    gbits = 0.0 if interface.kind in ("virtual", "loopback") else interface.gbits
    return f"TCP over {interface.name}" + (f", {gbits:g} Gbit/s" if gbits else ""), gbits


def chosen(wanted: str, interfaces: Sequence[Interface], *, exact: bool) -> list[Interface]:
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
    """Whether an address, which may name its interface behind a %, leads to its own host."""
    return is_address(address.split("%")[0]) and ipaddress.ip_address(address.split("%")[0]).is_loopback
