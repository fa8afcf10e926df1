"""What one host says about itself: a plain data class, gathered on that host within seconds, without importing torch.

Torch is imported only where there are GPUs, to see whether it sees them.
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
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib import util
from pathlib import Path

import ds_vit
from ds_vit.launching.host_identity import PACKAGES, code_checksum, identity, version

_SAMPLES = 8  # files of the data whose content is compared
_SAMPLE_BYTES = 65536


@dataclass(frozen=True)
class Ask:
    """What a host is asked.

    Attributes:
        names: to be resolved: the host's own, and rank 0's.
        port: where rank 0 will listen; asked of the first host alone, else 0.
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
    """A network interface; `kind` is loopback, virtual, ethernet or infiniband, `gbits` 0 where it is not known."""

    name: str
    kind: str = "ethernet"
    up: bool = True
    addresses: tuple[str, ...] = ()
    gbits: float = 0.0
    mtu: int = 1500


@dataclass(frozen=True)
class Port:
    """A port of an RDMA adapter, as /sys/class/infiniband tells; `link` is InfiniBand or Ethernet (RoCE)."""

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
        torch_accelerators: how many torch sees; None where it was not asked.
    """

    host: str
    identity: str = ""
    executable: str = ""
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
        return json.dumps(asdict(self))

    @classmethod
    def unpack(cls, text: str) -> Facts:
        """The counterpart of `pack`; what a newer host says besides is left out."""
        values = {f.name: json.loads(text)[f.name] for f in fields(cls) if f.name in json.loads(text)}
        for name, kind in (("interfaces", Interface), ("ports", Port)):
            values[name] = tuple(kind(**item) for item in values.get(name, ()))
        values["interfaces"] = tuple(
            Interface(**{**asdict(item), "addresses": tuple(item.addresses)}) for item in values["interfaces"]
        )
        values["accelerators"] = tuple(values.get("accelerators", ()))
        values["resolves"] = {name: tuple(found) for name, found in values.get("resolves", {}).items()}
        return cls(**values)


def gather(ask: Ask) -> Facts:
    """The facts of the host that this runs on. What cannot be found out stays at its default; nothing raises."""
    drivers = _text("/proc/driver/nvidia/version")
    found = re.search(r"Kernel Module\D*([\d.]+)", drivers)
    accelerators = _accelerators()
    data, data_problem = _data(ask.data_dir)
    output_problem, output_free = _output(ask)
    return Facts(
        host=socket.gethostname(),
        identity=identity(),
        executable=sys.executable,
        python=platform.python_version(),
        packages={name: version(name) for name in PACKAGES},
        cuda=_torch_cuda(),
        nccl=_nccl(),
        driver=found.group(1) if found else "",
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
        gpudirect=_gpudirect() if accelerators else None,
        memlock_bytes=_limit(resource.RLIMIT_MEMLOCK),
        open_files=_limit(resource.RLIMIT_NOFILE),
        shm_bytes=_shm(),
        resolves={name: _resolve(name) for name in ask.names},
        port_problem=_port_problem(ask.port),
    )


def mark(ask: Ask) -> Path | None:
    """The file by which this host shows the others that it writes to the same output folder; None without one."""
    folder = _existing(ask.output) if ask.output else None
    return folder / f".{ask.token}-{identity()}" if folder is not None else None


def marks(ask: Ask) -> int:
    """How many hosts have left their mark in the output folder, as this host sees it."""
    folder = _existing(ask.output) if ask.output else None
    return len(list(folder.glob(f".{ask.token}-*"))) if folder is not None else 0


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


def _nccl() -> str:
    for suffix in ("cu13", "cu12", "cu11"):
        if (found := version(f"nvidia-nccl-{suffix}")) != "missing":
            return found
    return ""


def _accelerators() -> tuple[str, ...]:
    """The names of the GPUs of this host, as the driver lists them."""
    if shutil.which("nvidia-smi") is None:
        return ()
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
        return tuple(re.findall(r"^GPU \d+: (.*?) \(UUID", done.stdout, re.MULTILINE))
    return ()


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
    try:
        names = sorted(entry.name for entry in os.scandir(root))
        samples = []
        for name in names:
            digest.update(f"{name}\0".encode())
            folder = root / name
            inside = sorted(os.listdir(folder)) if folder.is_dir() else []
            digest.update("\0".join(inside).encode())
            samples += _some_files(folder, inside)
        if not names:
            return "", f"--data-dir {data_dir} is empty"
        for path in samples[:_SAMPLES]:
            with path.open("rb") as file:
                digest.update(str(path.stat().st_size).encode() + file.read(_SAMPLE_BYTES))
    except OSError as error:
        return "", f"--data-dir {data_dir} cannot be read: {error.strerror}: {error.filename}"
    return digest.hexdigest(), ""


def _some_files(folder: Path, inside: Sequence[str]) -> list[Path]:
    """The first file or two under a folder of files, or of class folders."""
    if folder.is_file():
        return [folder]
    for name in inside[:1]:
        first = folder / name
        if first.is_dir():
            return [first / n for n in sorted(os.listdir(first))[:2] if (first / n).is_file()]
    return [folder / n for n in inside[:2] if (folder / n).is_file()]


def _existing(path: str) -> Path | None:
    """The path, or the nearest folder above it that exists."""
    folder = Path(path).absolute()
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    return folder if folder.is_dir() else None


def _output(ask: Ask) -> tuple[str, int | None]:
    """(problem, free bytes) where the run is to be written; leaves this host's mark there."""
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


def _shm() -> int | None:
    with contextlib.suppress(OSError):
        return shutil.disk_usage("/dev/shm").total
    return None


def _resolve(name: str) -> tuple[str, ...]:
    try:
        return tuple(sorted({str(info[4][0]) for info in socket.getaddrinfo(name.split("@")[-1], None)}))
    except OSError:
        return ()


def _port_problem(port: int) -> str:
    if not port:
        return ""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError as error:
            return f"port {port}: {error.strerror}"
    return ""


def _interfaces() -> Iterator[Interface]:
    """The network interfaces with an address, or that the user names; by `ip`-free means."""
    addresses = _addresses()
    for folder in sorted(Path("/sys/class/net").glob("*")):
        kind = {"772": "loopback", "32": "infiniband"}.get(_text(folder / "type"), "ethernet")
        if kind == "ethernet" and not (folder / "device").exists():
            kind = "virtual"
        speed, mtu = _text(folder / "speed"), _text(folder / "mtu")
        gbits = int(speed) / 1000 if speed.isdecimal() else 0.0
        up = _text(folder / "operstate") in ("up", "unknown") and bool(int(_text(folder / "flags") or "0", 16) & 1)
        found = tuple(addresses.get(folder.name, ()))
        yield Interface(folder.name, kind, up, found, gbits, int(mtu) if mtu.isdecimal() else 0)


def _addresses() -> dict[str, list[str]]:
    """Interface → its addresses."""
    with contextlib.suppress(ImportError):
        import psutil  # DeepSpeed brings it

        found = psutil.net_if_addrs()
        wanted = (socket.AF_INET, socket.AF_INET6)
        return {name: [a.address for a in items if a.family in wanted] for name, items in found.items()}
    return {}


def _ports(root: Path = Path("/sys/class/infiniband")) -> Iterator[Port]:
    """The ports of the RDMA adapters."""
    for device in sorted(root.glob("*")):
        for folder in sorted((device / "ports").glob("*")):
            rate = re.match(r"[\d.]+", _text(folder / "rate"))
            yield Port(
                device=device.name,
                port=int(folder.name),
                state=_text(folder / "state").split(":")[-1].strip(),  # "4: ACTIVE"
                gbits=float(rate.group()) if rate else 0.0,  # "400 Gb/sec (4X NDR)"
                link=_text(folder / "link_layer"),
            )


def _gpudirect() -> bool:
    """Whether the kernel lets an adapter read a GPU's memory."""
    modules = _text("/proc/modules")
    return "nvidia_peermem" in modules or "nv_peer_mem" in modules
