"""The rank pool: run a function on 1 to 8 real gloo ranks, as cheaply as a function call.

    def all_sum(x):
        tensor = torch.tensor(x)
        torch.distributed.all_reduce(tensor)
        return tensor.item()

    def test_sum(ranks):
        assert ranks.run(4, all_sum, 2) == [8, 8, 8, 8]

One server process imports torch, timm and DeepSpeed once a session (the standard library's forkserver); the ranks of a
job are forked from it in a few milliseconds, run one function and exit. So a rank is warm, yet no job can see what an
earlier one left behind. Resetting DeepSpeed in living ranks is not enough: besides `cdb`, `Init.param_id` and the
module counter of `DeepSpeedZeRoOffload`, 0.19.8 keeps the process groups in `utils/groups.py` and
`runtime/pipe/p2p.py`, the autocast type in `runtime/torch_autocast.py` and the settings of activation checkpointing in
module globals. And a rank that fails closes its sockets as it exits: its peers fail too, instead of waiting.

A job meets through a file, so no port can be taken. A rank takes 0.2 GB of its own; the rest it shares with the server.
"""

from __future__ import annotations

import datetime
import faulthandler
import functools
import gc
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import resource
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest import mock

from ds_vit.launching.this_host import free_port

MAX_WORLD_SIZE = 8
"""A job of more ranks is refused: on a small machine it would only measure the scheduler."""

GRACE_SECONDS = 10.0
"""What the other ranks get to end by themselves once one rank has failed."""

_DUMP_SECONDS = 5.0
"""What a hung rank gets to write its stacks before it is killed."""

_OUTPUT_CHARS = 6000
"""How much of the end of a rank's output a failure shows."""

# The environment the server starts in, for what is read at import. The ranks never leave this machine nor use its GPU.
_ENVIRONMENT = {
    "DS_ACCELERATOR": "cpu",
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # of pyarrow, which scikit-learn imports where it is installed
}

# Imported once by the server. `muon_optimizer` stands for what `deepspeed.initialize` imports late: 600 modules of
# torch's compiler, 0.8 s in every process. A name that is not there costs time, nothing else.
_PRELOAD = [
    "garbage_later",
    *("torch", "torchvision", "timm", "timm.loss", "timm.optim", "deepspeed", "pytest", "hypothesis", "simplejpeg"),
    *("deepspeed.runtime.zero.muon.muon_optimizer", "deepspeed.module_inject.auto_ep_layer"),
    *("deepspeed.ops.triton_ops", "deepspeed.runtime.superoffload.superoffload_stage3", "deepspeed.utils.pin_memory"),
    *("torch.utils.tensorboard", "sklearn.datasets", "sklearn.datasets.data", "huggingface_hub.serialization"),
    *("rich.progress", "rich._emoji_codes", "ds_vit.train", "ds_vit.training.resolve", "ds_vit.engine.pipeline"),
    # With the trainer nearly all of the package: 0.3 s in every rank.
    *("ds_vit.training.trainer", "ds_vit.training.auto_batch", "ds_vit.training.evaluation", "ds_vit.training.output"),
    *("ds_vit.training.step_log", "tensorboard.plugins.hparams.plugin_data_pb2", "preloaded"),
]


class RankFailure(AssertionError):
    """At least one rank raised, died or hung. Its text holds every failing rank's traceback and output.

    Attributes:
        ranks: the failing ranks, the first failure first.
    """

    def __init__(self, message: str, ranks: list[int]) -> None:
        super().__init__(message)
        self.ranks = ranks


@dataclass(frozen=True)
class _Outcome:
    """How one rank ended: it returned `value`, or `failure` says what happened at `seconds` of the job.

    The first line of `failure` is the whole of it in short.
    """

    rank: int
    seconds: float
    value: Any = None
    failure: str | None = None


class RankPool:
    """Runs functions on fresh, warm ranks: processes joined by gloo, with DeepSpeed's communication initialised."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context("forkserver")

    def run(
        self, world_size: int, fn: Callable[..., Any], /, *args: Any, timeout: float = 120.0, **kwargs: Any
    ) -> list[Any]:
        """Run `fn(*args, **kwargs)` on every rank of a new world; element r of the result is what rank r returned.

        In `fn`, `torch.distributed` and `deepspeed.comm` are initialised (gloo), RANK, LOCAL_RANK, WORLD_SIZE,
        LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set as a launcher would, and the generators of python, numpy
        and torch are seeded with 0. Torch uses one thread. Nothing else of this process reaches the ranks: neither
        what a test patched nor the environment it set.

        Args:
            world_size: number of ranks, 1 to `MAX_WORLD_SIZE`.
            fn: a module-level function; arguments and result must be picklable (tensors travel by value).
            timeout: seconds until a rank that has not returned counts as hung.

        Raises:
            ValueError: `world_size` out of range, or `fn` cannot be found by its module and name.
            RankFailure: a rank raised, died or hung. Every rank of the job has ended by then.
        """
        __tracebackhide__ = True
        if not 1 <= world_size <= MAX_WORLD_SIZE:
            raise ValueError(f"world_size {world_size}: a job has 1 to {MAX_WORLD_SIZE} ranks")
        try:
            job = pickle.dumps((fn, args, kwargs))
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise ValueError(
                f"{fn!r} or its arguments cannot be sent to the ranks ({error}); "
                "fn must be a function at the top level of a module"
            ) from error
        self._start()
        with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
            outcomes = self._supervise(Path(folder), world_size, job, timeout)
            failed = sorted((o for o in outcomes if o.failure is not None), key=lambda o: o.seconds)
            if failed:
                raise RankFailure(_report(fn, world_size, failed, Path(folder)), [o.rank for o in failed])
        return [o.value for o in sorted(outcomes, key=lambda o: o.rank)]

    def _start(self) -> None:
        """Start the server, unless it runs; it sees `_ENVIRONMENT`, this process keeps its own."""
        self._context.set_forkserver_preload(_PRELOAD)
        # What it imports must be what the ranks would import, who get this process's path.
        path = os.pathsep.join(folder for folder in sys.path if folder)
        with mock.patch.dict(os.environ, {**_ENVIRONMENT, "PYTHONPATH": path}):
            multiprocessing.forkserver.ensure_running()

    def _supervise(self, folder: Path, world_size: int, job: bytes, timeout: float) -> list[_Outcome]:
        """Start the ranks, wait for all of them, and leave none behind, whatever happens."""
        start = time.monotonic()
        deadline = start + timeout
        port = free_port()  # for MASTER_PORT: the ranks meet through a file, only code under test may look at it
        outcomes: list[_Outcome] = []
        processes: dict[int, BaseProcess] = {}
        try:
            for rank in range(world_size):
                process = self._context.Process(target=_rank_main, args=(rank, world_size, folder, port, job))
                process.start()
                processes[rank] = process
            running = dict(processes)
            while running:
                ended = wait([p.sentinel for p in running.values()], timeout=max(0.0, deadline - time.monotonic()))
                if not ended:
                    return outcomes + self._end_hung(running, folder, time.monotonic() - start, outcomes)
                for rank in [r for r, p in running.items() if p.sentinel in ended]:
                    process = running.pop(rank)
                    process.join()
                    outcomes.append(_outcome(rank, process.exitcode, folder, start))
                if any(o.failure for o in outcomes):
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            return outcomes
        finally:
            for process in processes.values():
                process.kill()
                process.join()

    @staticmethod
    def _end_hung(
        running: dict[int, BaseProcess], folder: Path, seconds: float, ended: list[_Outcome]
    ) -> list[_Outcome]:
        """Make the ranks that still run write their stacks (SIGABRT, faulthandler), and kill them."""
        after_failure = any(o.failure for o in ended)
        for process in running.values():
            os.kill(process.pid, signal.SIGABRT)
        wait_until = time.monotonic() + _DUMP_SECONDS
        outcomes = []
        for rank, process in running.items():
            process.join(max(0.0, wait_until - time.monotonic()))
            process.kill()
            process.join()
            reason = f"still waiting {GRACE_SECONDS:g} s after the first failure" if after_failure else "hung"
            stacks = _tail(_stacks_file(folder, rank)) or "(it wrote no stacks)"
            outcomes.append(_Outcome(rank, seconds, failure=f"{reason}; killed after {seconds:.1f} s\n{stacks}"))
        return outcomes


def _result_file(folder: Path, rank: int) -> Path:
    return folder / f"result-{rank}"


def _output_file(folder: Path, rank: int) -> Path:
    return folder / f"output-{rank}"


def _stacks_file(folder: Path, rank: int) -> Path:
    return folder / f"stacks-{rank}"


def _outcome(rank: int, exit_code: int | None, folder: Path, start: float) -> _Outcome:
    """Read what an ended rank left: a result, a failure, or nothing (it died)."""
    path = _result_file(folder, rank)
    returned = path.exists()
    if returned:
        end, value, failure = pickle.loads(path.read_bytes())
        if failure is not None or exit_code == 0:
            return _Outcome(rank, end - start, value, failure)
    how = f"was killed by {signal.Signals(-exit_code).name}" if exit_code and exit_code < 0 else f"exited {exit_code}"
    when = "after it had returned" if returned else "without returning"
    stacks = _tail(_stacks_file(folder, rank))
    return _Outcome(rank, time.monotonic() - start, failure=f"{how} {when}\n{stacks}".rstrip())


def _report(fn: Callable[..., Any], world_size: int, failed: list[_Outcome], folder: Path) -> str:
    """One text for people: every failing rank's traceback, the first failure first, then what the ranks printed."""
    called = fn.func if isinstance(fn, functools.partial) else fn
    first, name = failed[0], f"{called.__module__}.{called.__qualname__}"
    short = str(first.failure).partition("\n")[0]
    lines = [f"rank {first.rank}: {short} ({len(failed)} of {world_size} ranks failed in {name})"]
    for outcome in failed:
        lines += [f"---- rank {outcome.rank}, after {outcome.seconds:.2f} s ----", str(outcome.failure)]
    for rank in range(world_size):
        output = _tail(_output_file(folder, rank))
        if output:
            lines += [f"---- output of rank {rank} ----", output]
    return "\n".join(lines)


def _tail(path: Path) -> str:
    """The last `_OUTPUT_CHARS` characters of a file, if there is one."""
    lines = path.read_text(errors="replace").rstrip().splitlines() if path.exists() else []
    # Of a crash: hundreds of names, behind the stacks.
    text = "\n".join(line for line in lines if not line.startswith("Extension modules:"))
    return text if len(text) <= _OUTPUT_CHARS else f"[… {len(text) - _OUTPUT_CHARS} more]\n{text[-_OUTPUT_CHARS:]}"


# What follows runs in the ranks.


def _rank_main(rank: int, world_size: int, folder: Path, port: int, job: bytes) -> None:
    """A rank's life: join the group, run the job, leave the result or the failure in a file."""
    threading.Thread(target=_end_with_session, daemon=True).start()
    # What the server imported: DeepSpeed collects garbage at each start, at ZeRO-3 and for its memory breakdown, and to
    # search 600,000 objects takes 0.4 s each time. It stays frozen where the program under test would search it again.
    gc.freeze()
    gc.enable()
    gc.unfreeze = _leave_frozen
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a session begun in the background has it ignored
    # For a loader's workers, as in a process of one's own; the pool's way would import everything anew in each.
    multiprocessing.set_start_method("fork", force=True)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a rank that is made to show its stacks leaves no core file
    with _output_file(folder, rank).open("wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    faulthandler.enable(file=_stacks_file(folder, rank).open("w"), all_threads=True)  # open until the process ends
    value, failure = None, None
    try:
        with _world(rank, world_size, folder, port):
            fn, args, kwargs = pickle.loads(job)
            value = fn(*args, **kwargs)
        result = pickle.dumps((time.monotonic(), value, None))
    except BaseException as error:
        failure = _format(error)
        result = pickle.dumps((time.monotonic(), None, failure))
    sys.stdout.flush()
    sys.stderr.flush()
    part = folder / f"part-{rank}"
    part.write_bytes(result)
    part.rename(_result_file(folder, rank))
    if failure is not None:
        # Leave now: the sockets must close before the peers run into their timeouts, and an orderly end may wait for
        # threads that wait for the peers.
        os._exit(1)


def _leave_frozen() -> None:
    """In the place of `gc.unfreeze`: a rank is gone before garbage matters."""


def _end_with_session() -> None:
    """Wait for pytest to end, however it is killed, and end too. (A clean end finds no rank: `run` leaves none.)"""
    multiprocessing.parent_process().join()
    os._exit(1)


@contextmanager
def _world(rank: int, world_size: int, folder: Path, port: int):
    """Join a gloo world through a file in `folder`; leave it together."""
    import random

    import deepspeed
    import numpy as np
    import torch
    import torch.distributed as dist

    from ds_vit.engine.patches import without_compiled_collectives

    os.environ.update(
        _ENVIRONMENT,
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_WORLD_SIZE=str(world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    deepspeed.utils.logger.setLevel("WARNING")
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=datetime.timedelta(minutes=30),
    )
    with without_compiled_collectives():
        deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    yield
    if dist.is_initialized():
        dist.barrier()  # a rank that leaves early would close the sockets that the others still read
        dist.destroy_process_group()


def _format(error: BaseException) -> str:
    """The error in a line, and the traceback as pytest prints it, with the local variables, less this file's frames."""
    import pytest

    trace = pytest.ExceptionInfo.from_exception(error).getrepr(
        style="short",
        showlocals=True,
        truncate_locals=True,
        tbfilter=lambda info: info.traceback.filter(lambda entry: str(entry.path) != __file__) or info.traceback,
    )
    return f"{type(error).__name__}: {error}".partition("\n")[0] + f"\n{trace}"
