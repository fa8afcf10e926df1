"""The CPU cores on a GPU's NUMA node.

A loader process writes into the memory of its NUMA node, and a GPU reads another node's memory more slowly.
"""

from __future__ import annotations

import re
from collections.abc import Sequence, Set
from pathlib import Path

import torch

from ds_vit.device import is_accelerator, pci_address


def cores_near(pci: str | None, usable: Set[int], sys: Path = Path("/sys")) -> frozenset[int]:
    """The usable cores on the node that a device hangs on; none where there is nothing to choose.

    Args:
        pci: the device's address, as 0000:3b:00.0; None for a device without one.
        usable: cores that this process may use.
        sys: where Linux tells of the hardware.
    """
    lists = {int(file.parent.name[4:]): file for file in (sys / "devices/system/node").glob("node[0-9]*/cpulist")}
    node = sys / "bus/pci/devices" / (pci or "") / "numa_node"
    if len(lists) < 2 or not node.is_file():
        return frozenset()
    file = lists.get(int(node.read_text()))  # -1 where the firmware does not say
    near = usable & _numbers(file.read_text()) if file else frozenset()
    return frozenset(near if near < usable else ())


def cores_to_share(
    pci: str | None, of_ranks: Sequence[str | None], processes: int, usable: Set[int], sys: Path = Path("/sys")
) -> frozenset[int]:
    """The cores near a rank's device, where they are enough for all ranks of this host whose device hangs there.

    Args:
        pci: address of the rank's own device.
        of_ranks: those of this host's ranks, its own among them.
        processes: that each rank wants to run there.
        usable, sys: as for `cores_near`.
    """
    near = cores_near(pci, usable, sys)
    ranks = sum(cores_near(other, usable, sys) == near for other in of_ranks)
    return near if processes * ranks <= len(near) else frozenset()


def addresses_of_ranks(device: torch.device, local_world_size: int | None) -> list[str | None]:
    """The devices of this host's ranks; if each rank sees only its own, they count as being on one node."""
    ranks = local_world_size or 1
    if not is_accelerator(device) or torch.accelerator.device_count() < ranks:
        return [pci_address(device)] * ranks
    return [pci_address(torch.device(device.type, number)) for number in range(ranks)]


def _numbers(text: str) -> frozenset[int]:
    """Of a list such as 0-15,32-47."""
    ranges = re.findall(r"(\d+)(?:-(\d+))?", text)
    return frozenset(number for first, last in ranges for number in range(int(first), int(last or first) + 1))
