"""This host: its identity and versions, its GPUs and a free port; without torch, in a fraction of a second."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import random
import re
import socket
import subprocess
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import ds_vit
from ds_vit.fault_tolerance.errors import UserError

PACKAGES = ("torch", "torchvision", "timm", "deepspeed", "numpy", "safetensors", "pillow")
"""Packages whose versions have to be the same on every host."""

# CUDA's major version → the oldest driver for it, by NVIDIA's minor-version compatibility; launch/setup.sh has the same
# numbers, which it needs before Python packages.
_MINIMUM_DRIVER = {"13": 580, "12": 525}

_EPHEMERAL_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST = 10000


def identity() -> str:
    """The same for two names of one machine, different for two machines.

    Two containers with a network each count as two machines, two names of one network as one.
    """
    boot = platform.node()
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with contextlib.suppress(OSError):
        boot += f"-{os.stat('/proc/self/ns/net').st_ino}"
    return hashlib.blake2b(boot.encode(), digest_size=6).hexdigest()


def code_checksum() -> str:
    """A checksum over the files of this package."""
    digest = hashlib.blake2b(digest_size=8)
    root = Path(ds_vit.__file__).parent
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def version(package: str) -> str:
    """A package's version, "missing" where it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "missing"


def versions() -> dict[str, str]:
    """The versions of Python (major and minor) and of `PACKAGES`."""
    python = ".".join(platform.python_version_tuple()[:2])
    return {"Python": python, **{name: version(name) for name in PACKAGES}}


def listed_gpus() -> tuple[str, ...]:
    """The names of the GPUs of this host, as the driver lists them."""
    return tuple(re.findall(r"^GPU \d+: (.*?) \(UUID", _nvidia_smi("-L"), re.MULTILINE))


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
        why, needed = f"it is built for CUDA {built_for}", _MINIMUM_DRIVER.get(built_for.partition(".")[0])
        driver = _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader").partition("\n")[0].strip()
        if needed and driver and int(driver.partition(".")[0]) < needed:
            why += f", which needs driver {needed} or newer, and the driver is {driver}"
    raise UserError(
        f"nvidia-smi lists {len(gpus)} GPU{'s' * (len(gpus) > 1)} ({gpus[0]}), but torch {torch_version} can use none: "
        f"{why}; docs/install_cluster.md says how to install another torch; DS_ACCELERATOR=cpu trains on the CPU"
    )


def _nvidia_smi(*words: str) -> str:
    """What nvidia-smi prints; empty where it is absent or fails."""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(["nvidia-smi", *words], capture_output=True, text=True, timeout=30)
        return done.stdout if done.returncode == 0 else ""
    return ""


def free_port(port: int = 0) -> int:
    """A TCP port that is free, `port` itself where it is given.

    Ranks bind it seconds later, when their imports are done. The kernel gives the ports of its ephemeral range to every
    connection that starts meanwhile, so this one lies below that range.

    Raises:
        UserError: `port` is in use, or no port is free.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for candidate in [port] if port else [*_below_ephemeral(tries=64), 0]:
            try:
                probe.bind(("", candidate))
            except OSError as error:
                refusal = error.strerror
            else:
                return probe.getsockname()[1]
    raise UserError(f"port {candidate} on {socket.gethostname()}: {refusal}")


def _below_ephemeral(tries: int) -> list[int]:
    """Ports drawn by the system's own generator: a program's seed would give all its runs the same ones."""
    try:
        lowest_ephemeral = int(_EPHEMERAL_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):  # not Linux
        return []
    ports = range(_LOWEST, lowest_ephemeral)
    return random.SystemRandom().sample(ports, min(tries, len(ports)))
