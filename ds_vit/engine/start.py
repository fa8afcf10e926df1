"""Before there is an engine: DeepSpeed's chatter, the ranks' meeting, this rank's device and cores."""

from __future__ import annotations

import contextlib
import logging
import os
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from ds_vit.engine.gloo import exchange_in_place
from ds_vit.launching.process import port_in_words


def quiet_deepspeed(verbose: bool) -> None:
    """Keep DeepSpeed's chatter to warnings; must run before `import deepspeed` to catch what it says on import."""
    if verbose:
        return
    logger = logging.getLogger("DeepSpeed")
    if not any(isinstance(f, WarningsOnly) for f in logger.filters):
        logger.addFilter(WarningsOnly())
    warnings.filterwarnings("ignore", category=FutureWarning, module="deepspeed")
    # torch 2.15's word for it, forward_sync_buffers, is not known to 2.10 (engine/overlap.py).
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


@contextlib.contextmanager
def without_compiled_collectives() -> Iterator[None]:
    """Keep `deepspeed.init_distributed` on a CPU from compiling one: 50 s, and an error where ninja is missing.

    The table in which it looks for the operator is made when it is first asked for, by trying the compiler on all
    operators; another one in its place saves that too.
    """
    import deepspeed

    made = vars(deepspeed.ops).get("__compatible_ops__")
    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}
    try:
        yield
    finally:
        if made is None:
            del deepspeed.ops.__compatible_ops__
        else:
            deepspeed.ops.__compatible_ops__ = made


def init_distributed(arguments: Mapping[str, Any]) -> bool:
    """Meet the other ranks, unless the process group exists already.

    Returns:
        Whether the process group was made here (and is to be destroyed by the caller).

    Raises:
        UserError: the port where they are to meet is taken.
    """
    import deepspeed

    mine = not dist.is_initialized()
    with port_in_words(), without_compiled_collectives():
        deepspeed.init_distributed(**(arguments if mine else {}), verbose=False)
    exchange_in_place(deepspeed.comm.comm.cdb)
    return mine


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
