"""What turns errors into exit codes: the frame of every program, whether a launcher starts it once a rank or not."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from ds_vit.fault_tolerance import exit_codes
from ds_vit.fault_tolerance.exit_codes import Diverged
from ds_vit.launching.process import Process, discover


def guarded(program: str, body: Callable[[Process], int], interrupted: str) -> int:
    """Run the body of a program that a launcher starts once a rank; what is wrong with its input becomes one line.

    Args:
        program: its name in messages.
        body: what it does, given this rank; gives the exit code.
        interrupted: what to say after Ctrl-C.

    Returns:
        The exit code, as `main`.
    """
    rank, is_local_main = 0, True
    try:
        process = discover()
        rank, is_local_main = process.rank, process.local_rank == 0
        return body(process)
    except ValueError as error:
        # A ValueError that was not raised in this package is a bug, and shows where.
        raised_in = Path(traceback.extract_tb(error.__traceback__)[-1].filename)
        if not raised_in.is_relative_to(Path(__file__).parents[1]):
            traceback.print_exc()
            return 1
        # What is wrong everywhere is said once on each host; what one rank meets in mid-run, by that rank.
        if is_local_main or dist.is_initialized():
            where = f" (rank {rank})" if dist.is_initialized() and dist.get_world_size() > 1 else ""
            print(f"{program}: error{where}: {error}", file=sys.stderr, flush=True)
        else:
            time.sleep(2)  # a launcher ends all ranks with the first that exits: the one that speaks comes first
        return exit_codes.BAD_INPUT
    except Diverged as error:
        if is_local_main:
            print(f"{program}: {error}", file=sys.stderr, flush=True)
        return exit_codes.DIVERGED
    except KeyboardInterrupt:
        if is_local_main:
            print(f"{program}: interrupted; {interrupted}", file=sys.stderr, flush=True)
        return exit_codes.CTRL_C
