"""TCP ports at which ranks can meet."""

from __future__ import annotations

import random
import socket
from pathlib import Path

from ds_vit.fault_tolerance.errors import UserError

_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 10000


def free_port(port: int = 0) -> int:
    """A TCP port that is free, `port` itself where it is given.

    Ranks bind it seconds later, when their imports are done. The kernel gives the ports of its ephemeral range to every
    connection that starts meanwhile, so this one lies below that range.

    Raises:
        UserError: `port` is in use, or no port is free.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for candidate in [port] if port else [*_below_ephemeral(tries=64), 0]:
            try:
                probe.bind(("", candidate))
            except OSError as error:
                refusal = error.strerror
            else:
                return probe.getsockname()[1]
    raise UserError(f"port {candidate} on {socket.gethostname()}: {refusal}")


def _below_ephemeral(tries: int) -> list[int]:
    """Ports drawn by the system's own generator: a program's seed would give all its runs the same ones."""
    try:
        lowest_ephemeral = int(_EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):  # not Linux
        return []
    ports = range(_LOWEST, lowest_ephemeral)
    return random.SystemRandom().sample(ports, min(tries, len(ports)))
