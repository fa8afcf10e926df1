"""Cores near a GPU: read from a made-up /sys."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ds_vit.device import pci_address
from ds_vit.launching.numa import addresses_of_ranks, cores_near, cores_to_share

GPU = "0000:3b:00.0"


def machine(root: Path, nodes: dict[int, str], node_of_gpu: str | None) -> Path:
    """A /sys with these nodes' cores and one GPU."""
    for node, cores in nodes.items():
        folder = root / "devices" / "system" / "node" / f"node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
    if node_of_gpu is not None:
        (root / "bus" / "pci" / "devices" / GPU).mkdir(parents=True)
        (root / "bus" / "pci" / "devices" / GPU / "numa_node").write_text(f"{node_of_gpu}\n")
    return root


TWO = {0: "0-3,8-11", 1: "4-7,12,14-15"}


@pytest.mark.parametrize(
    ("nodes", "node_of_gpu", "usable", "near"),
    [
        (TWO, "0", range(16), {0, 1, 2, 3, 8, 9, 10, 11}),
        (TWO, "1", range(16), {4, 5, 6, 7, 12, 14, 15}),
        (TWO, "1", range(6), {4, 5}),
        (TWO, "1", range(4), ()),
        (TWO, "1", (4, 5), ()),
        (TWO, "-1", range(16), ()),
        (TWO, "7", range(16), ()),
        (TWO, None, range(16), ()),
        ({0: "0-15"}, "0", range(16), ()),
        ({0: "0-3", 1: "", 2: "4-7"}, "1", range(8), ()),
        ({}, None, range(4), ()),
    ],
    ids=["first", "second", "some of it", "none of it", "bound already", "unknown", "gone", "no GPU there", "one node",
         "memory alone", "no nodes"],
)  # fmt: skip
def test_cores_near_a_gpu(tmp_path, nodes, node_of_gpu, usable, near):
    """Would catch the other node's cores, cores that the process may not use, and a process bound for nothing."""
    assert cores_near(GPU, set(usable), machine(tmp_path, nodes, node_of_gpu)) == set(near)


def test_a_node_is_shared_by_the_ranks_whose_gpus_hang_there(tmp_path):
    """Would catch all processes of a host squeezed onto the one node that has the GPUs, the other's cores idle."""
    sys = machine(tmp_path, TWO, "0")
    other = "0000:5e:00.0"
    (sys / "bus" / "pci" / "devices" / other).mkdir()
    (sys / "bus" / "pci" / "devices" / other / "numa_node").write_text("1\n")
    first = {0, 1, 2, 3, 8, 9, 10, 11}
    assert cores_to_share(GPU, [GPU, other], 8, set(range(16)), sys) == first
    assert cores_to_share(GPU, [GPU, GPU], 4, set(range(16)), sys) == first
    assert cores_to_share(GPU, [GPU, GPU], 5, set(range(16)), sys) == set()
    assert addresses_of_ranks(torch.device("cpu"), 3) == [None] * 3


def test_a_device_without_an_address(tmp_path):
    """Would catch a run on a CPU that asks the GPU's driver."""
    assert pci_address(torch.device("cpu")) is None
    assert cores_near(None, {0, 1}, machine(tmp_path, TWO, "0")) == set()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_gpus_address_is_one_of_the_systems():
    """Would catch an address that Linux writes in another way."""
    assert (Path("/sys/bus/pci/devices") / pci_address(torch.device("cuda:0"))).is_dir()
