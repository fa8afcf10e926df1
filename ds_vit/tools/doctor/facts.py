"""What one host reports: a plain data class, gathered on that host within seconds, without importing torch.

Torch is imported only where there are GPUs, to check whether it can use them. The doctor starts this file on every
host: python -m ds_vit.tools.doctor.facts, with an `Ask` as a line of JSON on stdin. It answers with the facts, and each
further line with the time here and the marks in the output folder. It ends when stdin closes.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import re
import resource
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib import util
from pathlib import Path

import psutil
from pydantic import TypeAdapter

import ds_vit
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.launching.gpus import listed_gpus
from ds_vit.launching.host_identity import PACKAGES, code_checksum, identity, version
from ds_vit.launching.ports import free_port

WORD = "DS-VIT-DOCTOR "
"""How a line of an answer begins: a login script cannot have printed it."""

_SAMPLES = 8  # files of the data whose content is compared
_SAMPLE_BYTES = 65536


@dataclass(frozen=True)
class Ask:
    """What a host is asked.

    Attributes:
        names: to be resolved: the host's own, and rank 0's.
        port: where rank 0 will listen; asked of the first host only, else 0.
        data_dir, output: paths of the run; "" for none.
        token: names this inquiry, for the marks in `output`.
    """

    names: tuple[str, ...] = ()
    port: int = 0
    data_dir: str = ""
    output: str = ""
    token: str = "doctor"


@dataclass(frozen=True)
class Interface:
    """A network interface; `gbits` is 0 where the rate is not known, as of a virtual one."""

    name: str
    up: bool = True
    addresses: tuple[str, ...] = ()
    gbits: float = 0.0
    mtu: int = 1500


@dataclass(frozen=True)
class Port:
    """A port of an RDMA adapter, from /sys/class/infiniband; `link` is InfiniBand or Ethernet (RoCE)."""

    device: str
    port: int = 1
    state: str = "ACTIVE"
    gbits: float = 0.0
    link: str = "InfiniBand"


@dataclass(frozen=True)
class Facts:
    """One host. Bytes are bytes, None is unlimited or unknown; a `…_problem` is a sentence, "" for none.

    Attributes:
        identity: the same for two names of one machine, different for two machines.
        code: checksum of the package; `data` of names and a few files of the data, "" without `data_dir`.
        resolves: of the names asked for, each → addresses that it has here.
        torch_accelerators: how many torch can use; None where it was not asked.
    """

    host: str
    identity: str = ""
    python: str = ""
    packages: dict[str, str] = field(default_factory=dict)
    cuda: str = ""
    nccl: str = ""
    driver: str = ""
    accelerators: tuple[str, ...] = ()
    torch_accelerators: int | None = None
    cores: int = 1
    code: str = ""
    code_path: str = ""
    data: str = ""
    data_problem: str = ""
    output_problem: str = ""
    output_free_bytes: int | None = None
    interfaces: tuple[Interface, ...] = ()
    ports: tuple[Port, ...] = ()
    gpudirect: bool | None = None
    memlock_bytes: int | None = None
    open_files: int | None = None
    shm_bytes: int | None = None
    resolves: dict[str, tuple[str, ...]] = field(default_factory=dict)
    port_problem: str = ""

    def pack(self) -> str:
        """One line of JSON."""
        return TypeAdapter(Facts).dump_json(self).decode()

    @classmethod
    def unpack(cls, text: str) -> Facts:
        """The counterpart of `pack`; fields of a newer version are ignored."""
        return TypeAdapter(cls).validate_json(text)


def gather(ask: Ask) -> Facts:
    """The facts of the host that this runs on. What cannot be found out stays at its default; nothing raises."""
    driver = re.search(r"Kernel Module\D*([\d.]+)", _text("/proc/driver/nvidia/version"))
    accelerators = listed_gpus()
    data, data_problem = _data(ask.data_dir)
    output_problem, output_free = _output(ask)
    modules = _text("/proc/modules")
    return Facts(
        host=socket.gethostname(),
        identity=identity(),
        python=platform.python_version(),
        packages={name: version(name) for name in PACKAGES},
        cuda=_torch_cuda(),
        nccl=next((v for n in (13, 12, 11) if (v := version(f"nvidia-nccl-cu{n}")) != "missing"), ""),
        driver=driver.group(1) if driver else "",
        accelerators=accelerators,
        torch_accelerators=_torch_accelerators() if accelerators else None,
        cores=len(os.sched_getaffinity(0)),
        code=code_checksum(),
        code_path=str(Path(ds_vit.__file__).parent),
        data=data,
        data_problem=data_problem,
        output_problem=output_problem,
        output_free_bytes=output_free,
        interfaces=tuple(_interfaces()),
        ports=tuple(_ports()),
        gpudirect="nvidia_peermem" in modules or "nv_peer_mem" in modules if accelerators else None,
        memlock_bytes=_limit(resource.RLIMIT_MEMLOCK),
        open_files=_limit(resource.RLIMIT_NOFILE),
        shm_bytes=shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else None,
        resolves={name: _resolve(name) for name in ask.names},
        port_problem=_port_problem(ask.port),
    )


def mark(ask: Ask) -> Path | None:
    """The file by which this host shows the others that it writes to the same output folder; None without one."""
    folder = _existing(ask.output) if ask.output else None
    return folder / f".{ask.token}-{identity()}" if folder is not None else None


def marks(ask: Ask) -> int:
    """How many hosts have left their mark in the output folder, as this host sees it."""
    own = mark(ask)
    return len(list(own.parent.glob(f".{ask.token}-*"))) if own is not None else 0


def remove_mark(ask: Ask) -> None:
    """Remove this host's mark."""
    own = mark(ask)
    if own is not None:
        with contextlib.suppress(OSError):
            own.unlink(missing_ok=True)


def _text(path: str | Path) -> str:
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return ""


def _torch_cuda() -> str:
    """The CUDA version that torch was built for, read without importing it."""
    spec = util.find_spec("torch")
    text = _text(Path(spec.origin).parent / "version.py") if spec and spec.origin else ""
    found = re.search(r"^cuda.*=\s*'([\d.]+)'", text, re.MULTILINE)
    return found.group(1) if found else ""


def _torch_accelerators() -> int | None:
    with contextlib.suppress(ImportError, RuntimeError):
        import torch

        return torch.cuda.device_count()
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
            digest.update("\0".join([entry.name, *(path.name for path in inside), ""]).encode())
            deeper = sorted(inside[0].iterdir()) if inside and inside[0].is_dir() else inside
            samples += [path for path in (deeper[:2] or [entry]) if path.is_file()]
        for path in samples[:_SAMPLES]:
            with path.open("rb") as file:
                digest.update(str(path.stat().st_size).encode() + file.read(_SAMPLE_BYTES))
    except OSError as error:
        return "", f"--data-dir {data_dir} cannot be read: {error.strerror}: {error.filename}"
    return digest.hexdigest(), ""


def _existing(path: str) -> Path | None:
    """The path, or the nearest folder above it that exists."""
    folder = Path(path).absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder if folder.is_dir() else None


def _output(ask: Ask) -> tuple[str, int | None]:
    """(problem, free bytes) of the folder that the run is to be written to; leaves this host's mark there."""
    if not ask.output:
        return "", None
    path = mark(ask)
    if path is None:
        return f"--output {ask.output} is not a folder", None
    try:
        free = shutil.disk_usage(path.parent).free
        path.write_text("ds-vit doctor\n")
        return "", free
    except OSError as error:
        return f"{path.parent} cannot be written to: {error.strerror}", None


def _limit(which: int) -> int | None:
    soft = resource.getrlimit(which)[0]
    return None if soft == resource.RLIM_INFINITY else soft


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
        # A virtual interface reports a rate that means nothing.
        is_hardware = Path("/sys/class/net", name, "device").exists()
        yield Interface(name, stats.isup, own, stats.speed / 1000 if is_hardware else 0.0, stats.mtu)


def _ports(root: Path = Path("/sys/class/infiniband")) -> Iterator[Port]:
    """The ports of the RDMA adapters."""
    for folder in sorted(root.glob("*/ports/*")):
        rate = re.match(r"[\d.]+", _text(folder / "rate"))
        yield Port(
            device=folder.parts[-3],
            port=int(folder.name),
            state=_text(folder / "state").split(":")[-1].strip(),  # "4: ACTIVE"
            gbits=float(rate.group()) if rate else 0.0,  # "400 Gb/sec (4X NDR)"
            link=_text(folder / "link_layer"),
        )


def main() -> int:
    """Answer until the input ends; the mark is removed whatever happens."""
    ask = TypeAdapter(Ask).validate_json(sys.stdin.readline())
    try:
        print(WORD + gather(ask).pack(), flush=True)
        for _ in sys.stdin:
            print(WORD + json.dumps({"seconds": time.time(), "marks": marks(ask)}), flush=True)
    finally:
        remove_mark(ask)
    return 0


if __name__ == "__main__":
    sys.exit(main())
