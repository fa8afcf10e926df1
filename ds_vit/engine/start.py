"""Before there is an engine: DeepSpeed's chatter, the ranks' meeting, this rank's device and cores."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from ds_vit.engine.patches.gloo import use_in_place_collectives
from ds_vit.engine.patches.process import without_compiled_collectives
from ds_vit.launching.process import explain_taken_port


def quiet_deepspeed(verbose: bool) -> None:
    """Keep DeepSpeed's chatter to warnings; must run before `import deepspeed` to catch what it says on import."""
    if verbose:
        return
    logger = logging.getLogger("DeepSpeed")
    if not any(isinstance(f, WarningsOnly) for f in logger.filters):
        logger.addFilter(WarningsOnly())
    warnings.filterwarnings("ignore", category=FutureWarning, module="deepspeed")
    # torch 2.15's word for it, forward_sync_buffers, is not known to 2.10 (engine/patches/overlap.py).
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
    """Meet the other ranks, unless the process group exists already.

    Returns:
        Whether the process group was made here (and is to be destroyed by the caller).

    Raises:
        UserError: the port where they are to meet is taken.
    """
    import deepspeed

    mine = not dist.is_initialized()
    with explain_taken_port(), without_compiled_collectives():
        deepspeed.init_distributed(**(arguments if mine else {}), verbose=False)
    use_in_place_collectives(deepspeed.comm.comm.cdb)
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
