"""Run a program as one of several ranks that share one accelerator; torchrun starts the ranks.

    torchrun --nproc_per_node 2 docs/benchmarks/one_gpu.py [--backend gloo] launch/train.py FLAGS    # or, as one rank:
    python docs/benchmarks/one_gpu.py launch/train.py FLAGS

DeepSpeed receives an accelerator whose only device is the first. NCCL rejects two ranks on a device unless its
environment says otherwise, which `nccl_settings` does. This shows correctness only; the speed says nothing.

gloo is used where torch has no NCCL for the device, and with `--backend gloo`. It reduces and gathers a GPU's tensors
by way of pinned memory. Its point-to-point transfers would take the address of a GPU for the host's ("Bad address"),
so they go through host memory here.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import DeepSpeedAccelerator, get_accelerator, set_accelerator


def nccl_settings(rank: str, version: tuple[int, ...]) -> dict[str, str]:
    """NCCL's environment in which ranks share a device.

    Before 2.30 NCCL finds ranks that share one by the names of their hosts and the device's address on the bus. So each
    rank gives a separate host name, and reaches the others through loopback sockets. InfiniBand, NVLink SHARP and
    GPUDirect RDMA are off.

    Args:
        rank: of this process.
        version: of NCCL.
    """
    if version >= (2, 30):
        return {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    loopback = {
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_IB_DISABLE": "1",
        "NCCL_NVLS_ENABLE": "0",
        "NCCL_NET_GDR_LEVEL": "LOC",
    }
    return {"NCCL_HOSTID": f"rank{rank}", **loopback}


def shared(kind: type[DeepSpeedAccelerator], backend: str) -> DeepSpeedAccelerator:
    """An accelerator of this kind of which every rank has the first device; its ranks exchange by this backend."""

    class Shared(kind):  # type: ignore[valid-type]
        def __init__(self) -> None:
            super().__init__()
            self._communication_backend_name = backend

        def device_name(self, device_index: int | None = None) -> str:
            return super().device_name(None if device_index is None else 0)

        def device(self, device_index: int | None = None) -> torch.device:
            return super().device(None if device_index is None else 0)

        def set_device(self, device_index: int) -> None:
            super().set_device(0)

    return Shared()


def send_by_way_of_the_host() -> None:
    """Replace torch's blocking point-to-point transfers, which DeepSpeed's pipeline uses."""
    send, recv = dist.send, dist.recv

    def send_from_host(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        send(tensor.cpu(), *args, **kwargs)

    def recv_on_host(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> int:
        received = torch.empty_like(tensor, device="cpu")
        source = recv(received, *args, **kwargs)
        tensor.copy_(received)
        return source

    dist.send, dist.recv = send_from_host, recv_on_host


def leave_groups_unbound() -> None:
    """Drop the device that DeepSpeed binds the groups to: torch then splits new groups off, which gloo's cannot do."""
    init = dist.init_process_group

    def init_unbound(*args: Any, device_id: torch.device | None = None, **kwargs: Any) -> None:
        init(*args, **kwargs)

    # DeepSpeed reads the signature for `device_id`.
    dist.init_process_group = init_unbound


def main() -> None:
    """Prepare this rank and become the program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("nccl", "gloo"), help="of the ranks (NCCL where torch has it)")
    parser.add_argument("program", help="a Python file")
    parser.add_argument("words", nargs=argparse.REMAINDER, help="its arguments")
    arguments = parser.parse_args()
    accelerator = get_accelerator()
    has_nccl = accelerator.communication_backend_name() == "nccl" and dist.is_nccl_available()
    backend = arguments.backend or ("nccl" if has_nccl else "gloo")
    set_accelerator(shared(type(accelerator), backend))
    if backend == "nccl":
        os.environ |= nccl_settings(os.environ.get("RANK", "0"), torch.cuda.nccl.version())
    else:
        send_by_way_of_the_host()
        leave_groups_unbound()
    sys.argv = [arguments.program, *arguments.words]
    runpy.run_path(arguments.program, run_name="__main__")


if __name__ == "__main__":
    main()
