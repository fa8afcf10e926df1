"""Preparations before an engine: DeepSpeed's log, the rendezvous of the ranks, this rank's device and threads."""

from __future__ import annotations

import datetime
import logging
import os
import socket
import urllib.parse
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ds_vit.engine.patches import without_compiled_collectives
from ds_vit.fault_tolerance.errors import OtherRun
from ds_vit.launching.process import SCHEME

_RUN_KEY = "ds_vit/run"  # in the store where the ranks meet: the token of the run that it belongs to
_ANSWER_SECONDS = 60.0  # for rank 0 between the two calls that create the store and write the token


def quiet_deepspeed(verbose: bool) -> None:
    """Limit DeepSpeed's log to warnings, or show it; call it before `import deepspeed`, which logs too."""
    if verbose:
        from deepspeed.utils.logging import set_log_level_from_string

        set_log_level_from_string("info")  # DeepSpeed 0.19 creates its logger for warnings
        return
    logger = logging.getLogger("DeepSpeed")
    if not any(isinstance(f, WarningsOnly) for f in logger.filters):
        logger.addFilter(WarningsOnly())
    warnings.filterwarnings("ignore", category=FutureWarning, module="deepspeed")
    # DeepSpeed calls collectives by names that torch deprecates; the warning names torch's own module as the caller.
    warnings.filterwarnings("ignore", message=r"`torch\.distributed\.", category=FutureWarning)
    # torch 2.15 names it forward_sync_buffers, which 2.10 does not know (DistributedDataParallel).
    warnings.filterwarnings("ignore", message=".*broadcast_buffers", category=FutureWarning)
    warnings.filterwarnings("ignore", message="This DataLoader will create")  # timm's 4 workers on a small machine
    warnings.filterwarnings("ignore", message=".*c10d::.*autograd kernel was not registered.*")


class WarningsOnly(logging.Filter):
    """A filter instead of a level, because DeepSpeed sets its logger's level itself, more than once."""

    _EXPECTED = (
        "Setting accelerator to CPU",
        "untested optimizer",  # every optimizer that optim/build.py lets through is tested with ZeRO
        "unable to import 'fp_quantizer'",
    )

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.getMessage()
        return record.levelno >= logging.WARNING and not any(piece in text for piece in self._EXPECTED)


def init_distributed(arguments: Mapping[str, Any]) -> bool:
    """Create the process group, unless it exists.

    Returns:
        Whether the process group was created here (the caller then destroys it).

    Raises:
        UserError: the port of the rendezvous is in use, or another run uses it.
    """
    import deepspeed

    mine = not dist.is_initialized()
    with without_compiled_collectives():
        deepspeed.init_distributed(**(arguments if mine else {}), verbose=False)
    return mine


def _meet(url: str, timeout: datetime.timedelta, **_: Any) -> Iterator[tuple[dist.Store, int, int]]:
    """torch's `env://` rendezvous, begun once rank 0's token has shown that the ranks there are of the run in `url`.

    Raises:
        UserError: rank 0's port is in use, or another run's rank 0 has it.
    """
    run, found = urllib.parse.unquote(urllib.parse.urlsplit(url).netloc), "no token of ds_vit"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    problem = f"port {port} of the rendezvous is in use on {socket.gethostname()}, perhaps by another run"
    store = None
    try:
        # torch counts connections, and takes the first ones for the run's ranks; without a world size it counts none.
        store, rank, _ = next(dist.rendezvous("env://?world_size=-1", timeout=timeout))
        problem = f"rank {rank} of this run ({run}) reached another run at {address}:{port}"
        if "TORCHELASTIC_USE_AGENT_STORE" not in os.environ:  # else it may exist long before rank 0
            store.set_timeout(datetime.timedelta(seconds=_ANSWER_SECONDS))
        found = (store.compare_set(_RUN_KEY, "", run) if rank == 0 else store.get(_RUN_KEY)).decode()
    except RuntimeError as error:  # torch's DistNetworkError, also of a run that ends, and DistStoreError
        if store is None and "EADDRINUSE" not in str(error):
            raise
    if found != run:
        raise OtherRun(
            f"{problem}{f' ({found})' * (store is not None)}; choose another with the launcher's --master_port "
            f"{port + 1} (mpirun, srun: MASTER_PORT={port + 1} in the environment)"
        )
    yield from dist.rendezvous("env://", timeout=timeout)


dist.register_rendezvous_handler(SCHEME, _meet)


def device_of(local_rank: int) -> torch.device:
    """This rank's accelerator (made current), or the CPU."""
    from deepspeed.accelerator import get_accelerator

    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        return torch.device("cpu")
    accelerator.set_device(local_rank)
    return torch.device(accelerator.device_name(local_rank))


def share_cores(local_world_size: int | None) -> None:
    """On a CPU, give each rank its share of the cores; two ranks with all cores each run several times slower."""
    if "OMP_NUM_THREADS" not in os.environ and local_world_size:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_world_size))
