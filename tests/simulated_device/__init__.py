"""A simulated accelerator for tests: races, limits and host synchronisations of a GPU, on a machine without one.

`device.cpp` says how it behaves. torch knows it as the device `sim`, DeepSpeed as its accelerator. A backend cannot be
unloaded, so only processes that end with their test call `start`: ranks (tests/support/ranks.py).

    def body():
        simulated_device.start()
        torch.ones(3, device="sim").sum()
        assert not simulated_device.host_synchronisations()
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import importlib
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.utils import cpp_extension

NAME = "sim"

_SOURCE = Path(__file__).with_name("device.cpp")
_FLAGS = (
    "-std=c++20",
    "-O0",
    "-fPIC",
    "-shared",
    "-w",
    f"-D_GLIBCXX_USE_CXX11_ABI={torch._C._GLIBCXX_USE_CXX11_ABI:d}",
)


def missing_compiler() -> str | None:
    """Why the device cannot be built here, if so."""
    return None if _compiler() else "no C++ compiler (set CXX)"


def library() -> Path:
    """The compiled device, built unless its source, the flags and torch are those of an earlier build.

    It lies outside the tree, in `DS_VIT_TEST_CACHE` (default `~/.cache/ds_vit_tests`).
    """
    key = hashlib.sha256("\0".join([_SOURCE.read_text(), torch.__version__, *_FLAGS]).encode()).hexdigest()[:16]
    folder = Path(os.environ.get("DS_VIT_TEST_CACHE", Path.home() / ".cache" / "ds_vit_tests"))
    folder.mkdir(parents=True, exist_ok=True)
    built = folder / f"simulated_device-{key}.so"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # one build for all test processes
        if not built.exists():
            _build(built)
    return built


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def _build(built: Path) -> None:
    part = built.with_suffix(".part")
    includes = [word for path in cpp_extension.include_paths() for word in ("-isystem", path)]
    libraries = [f"-L{cpp_extension.TORCH_LIB_PATH}", "-lc10", "-ltorch_cpu", "-ltorch"]
    command = [str(_compiler()), *_FLAGS, *includes, str(_SOURCE), *libraries, "-o", str(part)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"the simulated device does not compile:\n{done.stderr[-6000:]}")
    part.replace(built)


def start(library: Path) -> None:
    """Make this rank one with a simulated accelerator: for torch, for DeepSpeed, and for its process group."""
    torch.ops.load_library(library)
    from simulated_device import accelerator, collectives, torch_module

    torch_module.register()
    accelerator.register()
    collectives.register()


def on_device(body: Callable[[], None]) -> Callable[..., None]:
    """Turn a function into a test that runs it in a process with the device, as the only rank."""

    def test(ranks, device_library) -> None:
        ranks.run(1, run_body, device_library, body.__module__, body.__name__)

    functools.update_wrapper(test, body)
    del test.__wrapped__  # pytest would look for the fixtures of the body
    test.body = body
    return test


def run_body(library: Path, module: str, name: str) -> None:
    """Run the function that `on_device` has wrapped; in the rank."""
    start(library)
    getattr(importlib.import_module(module), name).body()


def host_synchronisations() -> dict[str, int]:
    """How often the host has waited for the device since `reset`, by the operation that waited."""
    return dict(torch.ops.simulated.host_synchronisations())


def launches() -> int:
    """How many operations other than views have run since `reset`."""
    return int(torch.ops.simulated.launches())


def reset() -> None:
    """Forget the host synchronisations, launches and races so far."""
    torch.ops.simulated.reset()


@contextmanager
def no_host_synchronisations() -> Iterator[None]:
    """An operation for which the host would wait raises within it: its traceback shows where."""
    torch.ops.simulated.refuse_host_synchronisations(True)
    try:
        yield
    finally:
        torch.ops.simulated.refuse_host_synchronisations(False)


def set_memory_limit(bytes: int, device: int = 0) -> None:
    """What the device has in all; 16 GiB unless set. An allocation beyond it raises torch.OutOfMemoryError."""
    torch.ops.simulated.set_memory_limit(device, bytes)
