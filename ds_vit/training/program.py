"""What turns errors into exit codes: the frame of every program, whether a launcher starts it once a rank or not."""

from __future__ import annotations

import atexit
import contextlib
import sys
import time
import traceback
from collections.abc import Callable, Iterator

from ds_vit.fault_tolerance import exit_codes
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.fault_tolerance.exit_codes import Diverged
from ds_vit.launching.last_word import say_last
from ds_vit.launching.process import Process, discover, rendezvous


def guarded(program: str, body: Callable[[Process], int], interrupted: str, process: Process | None = None) -> int:
    """Run the body of a program; an error for people becomes one line, any other one shows its traceback.

    Args:
        program: its name in messages.
        body: what it does, given this rank; gives the exit code.
        interrupted: what to say after Ctrl-C.
        process: this rank; None for what the launcher's environment says.

    Returns:
        One of `fault_tolerance.exit_codes`.
    """
    is_local_main = True
    try:
        process = process or discover()
        is_local_main = process.local_rank == 0
        return body(process)
    except UserError as error:
        num_met = _ranks_that_have_met()
        # What is wrong everywhere is said once on each host; what one rank meets in mid-run, by that rank.
        if is_local_main or num_met:
            where = f" (rank {process.rank})" if process is not None and num_met > 1 else ""
            _say(f"{program}: error{where}: {error}")
        else:
            time.sleep(5)  # a launcher ends all ranks with the first that exits: the one that speaks comes first
        return error.exit_code
    except Diverged as error:
        if is_local_main:
            _say(f"{program}: {error}")
        return exit_codes.DIVERGED
    except KeyboardInterrupt:
        if is_local_main:
            _say(f"{program}: interrupted; {interrupted}")
        return exit_codes.CTRL_C
    except Exception:
        traceback.print_exc()
        return exit_codes.BUG


def _say(sentence: str) -> None:
    """One line on stderr, and once more where the launcher's output ends."""
    print(sentence, file=sys.stderr, flush=True)
    say_last(sentence)


def _ranks_that_have_met() -> int:
    """The size of the process group, 0 before there is one; torch is not imported for the question."""
    dist = sys.modules.get("torch.distributed")
    return dist.get_world_size() if dist is not None and dist.is_initialized() else 0


@contextlib.contextmanager
def process_group(process: Process, *, on_cpu: bool, again: bool = False) -> Iterator[None]:
    """Meet the other ranks for the block, unless the process group exists already.

    Args:
        process: this rank.
        on_cpu: there is no accelerator.
        again: this process may come here again, and the group stays until it ends: DeepSpeed 0.19.8 keeps the groups
            of the first engine, and finds them gone in the second one.
    """
    import torch.distributed as dist

    from ds_vit.engine.start import device_of, init_distributed, share_cores

    if on_cpu:
        share_cores(process.local_world_size)
    device_of(process.local_rank)  # NCCL takes objects on the current device alone, and that is the first one till now
    made_group = init_distributed(rendezvous(process))
    yield
    # Not after an error: another rank may be inside a collective, where a goodbye would wait for it.
    if made_group and again:
        atexit.register(dist.destroy_process_group)
    elif made_group:
        dist.destroy_process_group()
