"""The run's output folder: claimed once, the same one on every host, never one that already holds a run."""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

from ds_vit.config.run_folder import RunFolder
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.launching.process import Process

DEFAULT_PARENT = "runs"


def default_folder(model: str) -> str:
    """`runs/<time>-<model>`."""
    return f"{DEFAULT_PARENT}/{time.strftime('%Y%m%d-%H%M%S')}-{model.split('/')[-1]}"


def check_folder(output: str, *, goes_on: bool = False) -> None:
    """Refuse a folder that holds a run already, or that cannot be written.

    Args:
        output: the folder.
        goes_on: the run in it is the one that shall go on.

    Raises:
        UserError: says which and what to do.
    """
    folder = Path(output)
    try:
        holds_run = RunFolder(folder).metrics.exists()
        parent = folder
        while not parent.exists():
            parent = parent.parent
    except OSError as error:  # a name that is too long, a folder that cannot be looked into
        raise UserError(f"--output {output}: {error.strerror or error}") from None
    if holds_run and not goes_on:
        raise UserError(
            f"--output {output} already holds a run (metrics.jsonl); choose another folder, remove it, or "
            "go on with it by --resume auto"
        )
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise UserError(f"--output {output}: {parent} is not a folder that can be written to")


def check_shared(output: str, process: Process, environ: Mapping[str, str] = os.environ, timeout: float = 90.0) -> None:
    """On several hosts, make sure that `output` is one folder: rank 0 leaves a mark, each host answers.

    Plain files, because no process group exists yet; the marks are removed again. Nothing is done on one host.

    Raises:
        UserError: a host does not see rank 0's folder (or did not come up) within `timeout` seconds.
    """
    if not process.spans_hosts or process.local_rank != 0:
        return
    run = hashlib.blake2b(
        f"{environ.get('MASTER_ADDR', '')}:{environ.get('MASTER_PORT', '')}:{process.world_size}".encode(),
        digest_size=6,
    ).hexdigest()
    folder = Path(output)
    folder.mkdir(parents=True, exist_ok=True)
    call = folder / f".host-check-{run}"
    deadline = time.monotonic() + timeout
    host = socket.gethostname()
    if process.rank != 0:
        answer = folder / f".host-check-{run}-{process.rank}"
        started = time.time()
        # A mark that a killed run left is old; rank 0's is renewed until every host has answered.
        while not (call.exists() and call.stat().st_mtime > started - 5):
            if time.monotonic() > deadline:
                raise UserError(
                    f"--output {output} on host {host} is not the folder that rank 0 writes to (no mark of it "
                    f"after {timeout:.0f} s); give a path on a file system that all hosts share"
                )
            time.sleep(0.1)
        answer.touch()
        return
    hosts = process.world_size // (process.local_world_size or 1)
    try:
        while True:
            call.touch()
            answers = [p for p in folder.glob(f".host-check-{run}-*") if p.stat().st_mtime > time.time() - timeout]
            if len(answers) >= hosts - 1:
                return
            if time.monotonic() > deadline:
                raise UserError(
                    f"--output {output} of rank 0 on host {host} was seen by {len(answers)} of {hosts - 1} other hosts "
                    f"after {timeout:.0f} s; give a path on a file system that all hosts share"
                )
            time.sleep(0.1)
    finally:
        for mark in folder.glob(f".host-check-{run}*"):
            mark.unlink(missing_ok=True)
