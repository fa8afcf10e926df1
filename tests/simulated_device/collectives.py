"""Collectives on the simulated device: gloo's, on the same memory, with the order of NCCL's.

A collective runs on a stream of its group, after what the current stream has launched so far. `work.wait()` makes the
current stream wait for it: using a tensor before that is a race, which the device reports.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import deepspeed
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend

from ds_vit.engine.patches import without_compiled_collectives
from simulated_device import NAME
from simulated_device.torch_module import FOREIGN

_OUTPUTS = {
    **dict.fromkeys(("allreduce", "allreduce_coalesced", "broadcast", "reduce", "recv", "recv_anysource"), 0),
    **dict.fromkeys(("allgather", "all_gather_single", "allgather_coalesced", "all_gather_single_coalesced"), 0),
    **dict.fromkeys(("reduce_scatter", "reduce_scatter_single", "reduce_scatter_single_coalesced"), 0),
    **dict.fromkeys(("alltoall", "all_to_all_single", "gather", "scatter"), 0),
    "send": None,
    "barrier": None,
}
"""Of each collective, which argument it writes; it reads all others."""


class SimulatedBackend(Backend):
    """A process group of the device around one of gloo."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self.gloo = dist.ProcessGroupGloo(store, rank, size, timeout)
        self.stream = torch.Stream(NAME)

    def getBackendName(self) -> str:
        return "simulated"

    def run(self, name: str, *args) -> SimulatedWork:
        """Start gloo's collective of this name on the host's view of the tensors."""
        output = _OUTPUTS[name]
        writes = [] if output is None else list(_tensors(args[output]))
        self.stream.wait_stream(torch.accelerator.current_stream())
        with self.stream:
            torch.ops.simulated.launch(name, list(_tensors(args)), writes)
            if torch.ops.simulated.is_capturing():
                on_host = [_on_host(arg, of_graph=True) for arg in args]
                torch.ops.simulated.record_foreign(len(FOREIGN))
                FOREIGN.append(lambda: getattr(self.gloo, name)(*on_host).wait())
                return SimulatedWork(None, self.stream, self.stream.record_event(), args, writes)
            done = self.stream.record_event()
        work = getattr(self.gloo, name)(*map(_on_host, args))
        return SimulatedWork(work, self.stream, done, args, writes)


class SimulatedWork(dist.Work):
    """A collective that runs, or that a graph records; it keeps its tensors, and the current stream waits for it."""

    def __init__(
        self, work: dist.Work | None, stream: torch.Stream, done: torch.Event, args: tuple, outputs: list[torch.Tensor]
    ) -> None:
        super().__init__()
        self.work, self.stream, self.done, self.args, self.outputs = work, stream, done, args, outputs

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        if self.work is not None:
            self.work.wait()
        torch.accelerator.current_stream().wait_event(self.done)
        self.args = ()
        return True

    def is_completed(self) -> bool:
        return self.work.is_completed() and self.done.query()

    def get_future(self) -> torch.futures.Future:
        """As of NCCL: `wait` makes the current stream wait for the collective."""
        self.work.wait()
        future: torch.futures.Future = torch.futures.Future(devices=[self.stream.device])
        with self.stream:  # behind which the future records its event
            future.set_result(self.outputs)
        return future


def _collective(name: str):
    def call(self: SimulatedBackend, *args):
        return self.run(name, *args)

    return call


for _name in _OUTPUTS:
    setattr(SimulatedBackend, _name, _collective(_name))


def register() -> None:
    """Give the ranks' world collectives on the device: the same world anew, with both backends."""
    dist.Backend.register_backend("simulated", SimulatedBackend, devices=[NAME])
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.accelerator.set_device_index(rank)
    store = dist.PrefixStore("simulated", dist.distributed_c10d._get_default_store())
    dist.barrier()  # a peer may still be connecting to the group that ends here
    dist.destroy_process_group()
    dist.init_process_group(f"cpu:gloo,{NAME}:simulated", store=store, rank=rank, world_size=world_size)
    deepspeed.comm.comm.cdb = None
    with without_compiled_collectives():
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)


def _tensors(value) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def _on_host(value, of_graph=False):
    if isinstance(value, torch.Tensor):
        return torch.ops.simulated.host(value.detach(), of_graph)
    return [_on_host(part, of_graph) for part in value] if isinstance(value, list) else value
