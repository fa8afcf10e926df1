"""The facts that one host reports: a plain data class, gathered there within seconds, without importing torch.

Torch is imported only where there are GPUs, to check whether it can use them. The doctor starts this file on every
host: python -m ds_vit.tools.doctor.facts, with the arguments of `gather` as JSON.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from importlib import util
from pathlib import Path

import psutil
from pydantic import TypeAdapter

from ds_vit.fault_tolerance.errors import UserError
from ds_vit.launching.this_host import code_checksum, free_port, identity, listed_gpus, version, versions

WORD = "DS-VIT-DOCTOR "
"""The beginning of an answer's line, which no login script prints."""

CUDA, DRIVER = "torch's CUDA", "NVIDIA driver"
"""Keys of `Facts.versions`."""

_SAMPLES = 8  # files of the data whose content is compared
_SAMPLE_BYTES = 65536


@dataclass(frozen=True)
class Interface:
    """A network interface."""

    name: str
    up: bool = True
    addresses: tuple[str, ...] = ()


@dataclass(frozen=True)
class Port:
    """A port of an RDMA adapter, from /sys/class/infiniband (InfiniBand or RoCE)."""

    device: str
    port: int = 1
    state: str = "ACTIVE"
    gbits: float = 0.0


@dataclass(frozen=True)
class Facts:
    """One host. Bytes are bytes, None is unlimited or unknown; a `…_problem` is a sentence, "" for none.

    Attributes:
        identity: the same for two names of one machine, different for two machines.
        versions: of Python, the packages ("missing" for none), torch's CUDA, NCCL and the driver.
        torch_accelerators: how many torch can use; None where it was not asked.
        code: checksum of the package; `data` of names and a few files of the data, "" without `data_dir`.
        resolves: of the names asked for, each → addresses that it has here.
    """

    host: str
    identity: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    accelerators: tuple[str, ...] = ()
    torch_accelerators: int | None = None
    cores: int = 1
    code: str = ""
    data: str = ""
    data_problem: str = ""
    output_problem: str = ""
    output_free_bytes: int | None = None
    interfaces: tuple[Interface, ...] = ()
    ports: tuple[Port, ...] = ()
    memlock_bytes: int | None = None
    shm_bytes: int | None = None
    resolves: dict[str, tuple[str, ...]] = field(default_factory=dict)
    port_problem: str = ""

    def pack(self) -> str:
        """One line of JSON, in which paths need not be UTF-8: pydantic's JSON must be."""
        return json.dumps(asdict(self))

    @classmethod
    def unpack(cls, text: str) -> Facts:
        """The counterpart of `pack`; fields of a newer version are ignored."""
        return _FACTS.validate_python(json.loads(text))


_FACTS = TypeAdapter(Facts)  # slow to build


def gather(names: Iterable[str] = (), port: int = 0, data_dir: str = "", output: str = "") -> Facts:
    """The facts of the host that this runs on. Facts that cannot be determined keep their defaults; nothing raises.

    Args:
        names: to be resolved: the host's own, and rank 0's.
        port: where rank 0 will listen; asked of the first host only, else 0.
        data_dir, output: paths of the run; "" for none.
    """
    accelerators = listed_gpus()
    data, data_problem = _data(data_dir)
    output_problem, output_free = _output(output)
    memlock = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return Facts(
        host=socket.gethostname(),
        identity=identity(),
        versions=versions() | _other_versions(),
        accelerators=accelerators,
        torch_accelerators=_torch_accelerators() if accelerators else None,
        cores=len(os.sched_getaffinity(0)),
        code=code_checksum(),
        data=data,
        data_problem=data_problem,
        output_problem=output_problem,
        output_free_bytes=output_free,
        interfaces=tuple(_interfaces()),
        ports=tuple(_ports()),
        memlock_bytes=None if memlock == resource.RLIM_INFINITY else memlock,
        shm_bytes=shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None,
        resolves={name: _resolve(name) for name in names},
        port_problem=_port_problem(port),
    )


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""


def _other_versions() -> dict[str, str]:
    """Versions of other software, "" where it is missing; torch's CUDA is read without importing torch."""
    spec = util.find_spec("torch")
    torch = _text(Path(spec.origin).parent / "version.py") if spec and spec.origin else ""
    built_for = re.search(r"^cuda.*=\s*'([\d.]+)'", torch, re.MULTILINE)
    driver = re.search(r"Kernel Module\D*([\d.]+)", _text("/proc/driver/nvidia/version"))
    nccl = next((v for n in (13, 12, 11) if (v := version(f"nvidia-nccl-cu{n}")) != "missing"), "")
    return {CUDA: built_for[1] if built_for else "", "NCCL": nccl, DRIVER: driver[1] if driver else ""}


def _torch_accelerators() -> int | None:
    with contextlib.suppress(ImportError, RuntimeError):
        import torch

        return torch.accelerator.device_count()
    return None


def _data(data_dir: str) -> tuple[str, str]:
    """(checksum, problem): the names of the first two levels, sizes and beginnings of a few files."""
    if not data_dir:
        return "", ""
    root = Path(data_dir)
    if not root.is_dir():
        return "", f"--data-dir {data_dir} is not there"
    digest = hashlib.blake2b(digest_size=8)
    samples: list[Path] = []
    try:
        entries = sorted(root.iterdir())
        if not entries:
            return "", f"--data-dir {data_dir} is empty"
        for entry in entries:
            inside = sorted(entry.iterdir()) if entry.is_dir() else []
            digest.update(os.fsencode("\0".join([entry.name, *(path.name for path in inside), ""])))
            deeper = sorted(inside[0].iterdir()) if inside and inside[0].is_dir() else inside
            samples += [path for path in (deeper[:2] or [entry]) if path.is_file()]
        for path in samples[:_SAMPLES]:
            with path.open("rb") as file:
                digest.update(str(path.stat().st_size).encode() + file.read(_SAMPLE_BYTES))
    except OSError as error:
        return "", f"--data-dir {data_dir} cannot be read: {error.strerror}: {error.filename}"
    return digest.hexdigest(), ""


def _output(output: str) -> tuple[str, int | None]:
    """(problem, free bytes) of the folder that the run is to be written to, or the nearest above it that exists."""
    if not output:
        return "", None
    path = Path(output).absolute()
    folder = next(folder for folder in (path, *path.parents) if folder.exists())
    free = None
    try:
        free = shutil.disk_usage(folder).free
        with tempfile.TemporaryFile(dir=folder):
            return "", free
    except OSError as error:
        return f"--output {output}: {folder} cannot be written to: {error.strerror}", free


def _resolve(name: str) -> tuple[str, ...]:
    try:
        return tuple(sorted({str(info[4][0]) for info in socket.getaddrinfo(name.split("@")[-1], None)}))
    except OSError:
        return ()


def _port_problem(port: int) -> str:
    try:
        free_port(port)
    except UserError as error:
        return str(error)
    return ""


def _interfaces() -> Iterator[Interface]:
    addresses = psutil.net_if_addrs()
    for name, stats in sorted(psutil.net_if_stats().items()):
        own = tuple(a.address for a in addresses.get(name, ()) if a.family in (socket.AF_INET, socket.AF_INET6))
        yield Interface(name, stats.isup, own)


def _ports(root: Path = Path("/sys/class/infiniband")) -> Iterator[Port]:
    """The ports of the RDMA adapters."""
    for folder in sorted(root.glob("*/ports/*")):
        rate = re.match(r"[\d.]+", _text(folder / "rate"))
        yield Port(
            device=folder.parts[-3],
            port=int(folder.name),
            state=_text(folder / "state").split(":")[-1].strip(),  # "4: ACTIVE"
            gbits=float(rate.group()) if rate else 0.0,  # "400 Gb/sec (4X NDR)"
        )


def main() -> int:
    """Answer on stdout."""
    print(WORD + gather(**json.loads(sys.argv[1] if sys.argv[1:] else "{}")).pack(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
