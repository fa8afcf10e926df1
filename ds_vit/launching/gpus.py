"""The GPUs that the driver lists, and those that torch cannot use; without torch."""

from __future__ import annotations

import contextlib
import re
import shutil
import subprocess
from collections.abc import Mapping

from ds_vit.fault_tolerance.errors import UserError

# NVIDIA's minor-version compatibility; launch/setup.sh has the same numbers, which it needs before Python packages.
_MINIMUM_DRIVER = {"13": 580, "12": 525}


def listed_gpus() -> tuple[str, ...]:
    """The names of the GPUs of this host, as the driver lists them."""
    return tuple(re.findall(r"^GPU \d+: (.*?) \(UUID", _nvidia_smi("-L"), re.MULTILINE))


def minimum_driver(built_for: str) -> int | None:
    """The oldest driver (its major version) that a torch built for this CUDA version runs on; None if not known."""
    return _MINIMUM_DRIVER.get(built_for.partition(".")[0])


def refuse_unusable_gpus(torch_version: str, built_for: str, environ: Mapping[str, str]) -> None:
    """Where torch finds no GPU: end before a training on the CPU that nobody asked for.

    Args:
        torch_version: of the installed torch.
        built_for: the CUDA version of its build; empty for a build without CUDA.
        environ: DS_ACCELERATOR or CUDA_VISIBLE_DEVICES in it say that the CPU may be intended.

    Raises:
        UserError: the driver lists GPUs, and nothing in the environment hides them.
    """
    if "DS_ACCELERATOR" in environ or "CUDA_VISIBLE_DEVICES" in environ or not (gpus := listed_gpus()):
        return
    why = "it is built without CUDA"
    if built_for:
        why, needed = f"it is built for CUDA {built_for}", minimum_driver(built_for)
        driver = _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0].strip()
        if needed and driver and int(driver.partition(".")[0]) < needed:
            why += f", which needs driver {needed} or newer, and the driver is {driver}"
    raise UserError(
        f"nvidia-smi lists {len(gpus)} GPU{'s' * (len(gpus) > 1)} ({gpus[0]}), but torch {torch_version} can use none: "
        f"{why}; docs/install_cluster.md says how to install another torch; DS_ACCELERATOR=cpu trains on the CPU"
    )


def _nvidia_smi(*words: str) -> str:
    """What nvidia-smi prints; empty where it is absent or fails."""
    if shutil.which("nvidia-smi") is None:
        return ""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=30)
        return done.stdout if done.returncode == 0 else ""
    return ""
