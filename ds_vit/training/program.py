"""The frame of every program: errors become exit codes, and the process group is created and destroyed."""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import io
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from ds_vit.fault_tolerance import exit_codes
from ds_vit.fault_tolerance.errors import OtherRun, OutOfMemory, UserError, memory_errors
from ds_vit.fault_tolerance.exit_codes import Diverged
from ds_vit.launching.process import Process, discover, rendezvous


def guarded(program: str, body: Callable[[Process], int], interrupted: str, process: Process | None = None) -> int:
    """Run the body of a program; a `UserError` becomes one line, any other error shows its traceback.

    Args:
        program: its name in messages.
        body: called with this rank; returns the exit code.
        interrupted: printed after Ctrl-C.
        process: this rank; None to read it from the launcher's environment.

    Returns:
        One of `fault_tolerance.exit_codes`.
    """
    is_local_main = True
    _end_without_collection()
    _print_any_name()
    try:
        process = process or discover()
        is_local_main = process.local_rank == 0
        with memory_errors(lambda of_loader: "end other programs on this machine, or use one with more memory"):
            return body(process)
    except UserError as error:
        num_met = 0 if error.alike else _ranks_that_have_met()
        # An error of every rank is printed once per host; an error of one rank during the run by that rank.
        speaks = is_local_main or num_met > 0
        if isinstance(error, OutOfMemory) and num_met > 1:
            speaks = _is_first()  # of the ranks that have run out of memory, often all at one step
        if not speaks:
            # A launcher ends all ranks with the first that exits, which must not be a silent one.
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(20 if isinstance(error, OtherRun) else 5)
        if speaks or isinstance(error, OtherRun):
            where = f" (rank {process.rank})" if process is not None and num_met > 1 else ""
            _say(f"{program}: error{where}: {error}")
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


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Import without garbage collection: what is imported stays, and searching it takes a fifth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.freeze()
            gc.unfreeze()  # into the oldest generation, which is searched least
            gc.enable()


@functools.cache
def _end_without_collection() -> None:
    """Have the interpreter end without a search of all modules for garbage, which takes about a second."""
    atexit.register(gc.freeze)


def _print_any_name() -> None:
    """Let stdout and stderr print any name of a file or class: its own bytes, or escapes where they are not UTF-8."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="surrogateescape" if stream.encoding == "utf-8" else "backslashreplace")


def _say(sentence: str) -> None:
    """One line on stderr, and in the last lines of torchrun, which prints the error file of a failed rank."""
    print(sentence, file=sys.stderr, flush=True)
    if error_file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        info = {"py_callstack": sentence, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):
            Path(error_file).write_text(json.dumps({"message": {"message": sentence, "extraInfo": info}}))


def _ranks_that_have_met() -> int:
    """The size of the process group, 0 before there is one; does not import torch."""
    dist = sys.modules.get("torch.distributed")
    return dist.get_world_size() if dist is not None and dist.is_initialized() else 0


def _is_first() -> bool:
    """Whether no other rank has called this; False where rank 0, which holds the ranks' store, has ended."""
    import torch.distributed as dist

    with contextlib.suppress(RuntimeError):
        return dist.distributed_c10d._get_default_store().add("ds_vit/out_of_memory", 1) == 1
    return False


@contextlib.contextmanager
def process_group(process: Process, *, on_cpu: bool, again: bool = False) -> Iterator[None]:
    """Join the other ranks for the block, unless the process group exists already.

    Args:
        process: this rank.
        on_cpu: there is no accelerator.
        again: this process may train again, so keep the group until it exits: DeepSpeed 0.19.8 reuses the groups of the
            first engine in the second.

    Raises:
        UserError: the ranks do not meet, or fewer than the launcher started.
    """
    import torch.distributed as dist

    from ds_vit.engine.start import device_of, init_distributed, share_cores

    if on_cpu:
        share_cores(process.local_world_size)
    device_of(process.local_rank)  # NCCL uses the current device, which is the first one by default
    made_group = init_distributed(rendezvous(process))
    if made_group and dist.get_world_size() != process.world_size:
        raise UserError(
            f"the launcher started {process.world_size} ranks and {dist.get_world_size()} have met: mpi4py belongs to "
            "another MPI than mpirun (pip install --no-binary mpi4py mpi4py); or set MASTER_ADDR and MASTER_PORT"
        )
    yield
    # Not after an error: another rank may be inside a collective, and destroying the group would wait for it.
    if made_group and again:
        atexit.register(dist.destroy_process_group)
    elif made_group:
        dist.destroy_process_group()
