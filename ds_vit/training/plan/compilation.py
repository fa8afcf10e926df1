"""Whether --compile can be had: a compiler on this machine, and a mode that goes with the layout."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

from ds_vit.config import RunConfig
from ds_vit.fault_tolerance.errors import UserError

_OF_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")
_GRAPHS_ARE_REPLAYED = (
    "replays CUDA graphs, each of which writes into the memory of its last outputs, and here one graph serves many "
    "blocks and micro-batches; use max-autotune-no-cudagraphs or default"
)


def check_compilation(config: RunConfig, *, on_cpu: bool) -> tuple[str, ...]:
    """Lines for people about compilation.

    Raises:
        UserError: no compiler, or a mode that cannot be or has no effect.
    """
    if not config.compile:
        return ()
    mode = config.compile_mode
    if on_cpu and mode == "reduce-overhead":
        raise UserError("--compile-mode reduce-overhead has no effect: a CPU has no CUDA graphs; drop it")
    if not on_cpu and mode in _OF_CUDA_GRAPHS:
        raise UserError(f"--compile-mode {mode} {_GRAPHS_ARE_REPLAYED}")
    missing = _missing_on_cpu() if on_cpu else _missing_on_gpu()
    if missing:
        raise UserError(
            "--compile needs a C++ compiler (g++ or clang++) and Python's headers on a CPU, Triton and a C compiler on "
            f"a GPU: {missing}; install it or drop --compile"
        )
    return ("--compile: the first step and the first evaluation compile the blocks, which may take minutes",)


def _missing_on_cpu() -> str | None:
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except exc.InvalidCxxCompiler:
        return "there is no C++ compiler on this machine's PATH"
    return _missing_headers()


def _missing_on_gpu() -> str | None:
    from torch.utils._triton import has_triton

    if not has_triton():
        return "Triton cannot be imported, or does not know this GPU"
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        return "there is no C compiler on this machine's PATH"
    return _missing_headers()


def _missing_headers() -> str | None:
    folder = sysconfig.get_paths()["include"]
    return None if (Path(folder) / "Python.h").is_file() else f"there is no Python.h in {folder}"
