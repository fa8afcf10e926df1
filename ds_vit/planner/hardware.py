"""Accelerators and links: a YAML file each in data/, every figure with its source; or the user's own, by its path."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import yaml

from ds_vit.fault_tolerance.errors import UserError, first_line, read_text

_DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Link:
    """What joins ranks.

    Attributes:
        name: for people.
        bytes_per_second: one way, of a GPU.
        efficiency: what collectives of large messages reach of it.
        latency_seconds: of a small message, from a rank to the next.
        gather_share: what gathering reaches of the rate of a sum.
        scatter_share: what a sum of which each rank keeps its share reaches of it.
        gather_latency_seconds: of a small gathered message, from a rank to the next.
        scatter_latency_seconds: the same of a small sum of which each rank keeps its share.
    """

    name: str
    bytes_per_second: float
    efficiency: float
    latency_seconds: float
    gather_share: float
    scatter_share: float
    gather_latency_seconds: float
    scatter_latency_seconds: float

    @property
    def reached(self) -> float:
        """Bytes a second of a large collective."""
        return self.bytes_per_second * self.efficiency


@dataclass(frozen=True)
class Accelerator:
    """A GPU, or a core of a CPU.

    Attributes:
        name: for people.
        memory_bytes: that it has.
        bf16_tflops: dense peak.
        fp32_tflops: the same.
        memory_bytes_per_second: peak of its memory.
        memory_efficiency: what a copy reaches of it.
        watts: under load.
        gpus_per_node: of the usual host.
        inside: link between the GPUs of a host: its name, or in a file of one's own the file of the link beside it.
        matmul_efficiency: least dimension of a product of matrices → share of the peak that it reaches.
        attention_efficiency: share of the peak that fused attention reaches, forward and back.
        elementwise_efficiency: share of a copy's rate that everything else reaches: norms, GELU, sums, new memory.
        hidden_share: of the backward passes, behind which gradients can travel.
        seconds_per_operation: of the host, for one operation.
        reserved_bytes: that no tensor can have.
        images_per_worker: JPEG files of ImageNet's size that a process of the host makes ready in a second.
    """

    name: str
    memory_bytes: float
    bf16_tflops: float
    fp32_tflops: float
    memory_bytes_per_second: float
    memory_efficiency: float
    watts: float
    gpus_per_node: int
    inside: str
    matmul_efficiency: Mapping[int, float]
    attention_efficiency: float
    elementwise_efficiency: float
    hidden_share: float
    seconds_per_operation: float
    reserved_bytes: float
    images_per_worker: float

    @property
    def copied_per_second(self) -> float:
        """Bytes that a copy reads and writes in a second."""
        return self.memory_bytes_per_second * self.memory_efficiency

    def flops_per_second(self, of_type: int, width: int) -> float:
        """What a product of matrices of this least width reaches.

        Args:
            of_type: bytes of an element.
            width: its least dimension; 0 for attention.
        """
        peak = 1e12 * (self.bf16_tflops if of_type == 2 else self.fp32_tflops)
        return peak * (_between(self.matmul_efficiency, width) if width else self.attention_efficiency)


def _between(table: Mapping[int, float], width: int) -> float:
    """A table's value at a width, on the line between its neighbours."""
    widths = sorted(table)
    if width <= widths[0]:
        return table[widths[0]] * max(width / widths[0], 0.05)
    if width >= widths[-1]:
        return table[widths[-1]]
    above = next(i for i, other in enumerate(widths) if other >= width)
    low, high = widths[above - 1], widths[above]
    return table[low] + (table[high] - table[low]) * (width - low) / (high - low)


Kind = TypeVar("Kind", Accelerator, Link)


def accelerator(name: str) -> Accelerator:
    """Of a name (`h200`) or of a file (`mine.yaml`).

    Raises:
        UserError: there is none (the nearest is named), or a figure is missing.
    """
    found = _load(Accelerator, "accelerators", name, "--gpu")
    if found.inside.endswith((".yaml", ".yml")):  # a file beside this one
        return dataclasses.replace(found, inside=str(Path(name).parent / found.inside))
    return found


def accelerator_of_device(name: str) -> Accelerator | None:
    """That of data/ whose name is part of the device's own (`NVIDIA H200`); None where there is none."""
    known = [key for key in names("accelerators") if key.replace("_", " ").upper() in name.upper()]
    return accelerator(max(known, key=len)) if name and known else None


def link(name: str, flag: str = "--link") -> Link:
    """Of a name (`ib400`) or of a file; as `accelerator`."""
    return _load(Link, "links", name, flag)


def names(kind: str) -> list[str]:
    """Those that data/ has: of `accelerators` or of `links`."""
    return sorted(path.stem for path in (_DATA / kind).glob("*.yaml"))


def sources(kind: str, name: str) -> dict[str, str]:
    """Each figure of a file of data/ → where it is from."""
    table = yaml.safe_load((_DATA / kind / f"{name}.yaml").read_text())
    return {key: entry["source"] for key, entry in table.items() if isinstance(entry, Mapping)}


def _load(kind: type[Kind], folder: str, name: str, flag: str) -> Kind:
    if name.endswith((".yaml", ".yml")):
        path = Path(name)
    elif name.lower() in names(folder):
        path = _DATA / folder / f"{name.lower()}.yaml"
    else:
        known = names(folder)
        near = difflib.get_close_matches(name.lower(), known, n=1, cutoff=0.3)
        raise UserError(
            f"{flag} {name}: there is no such one; the nearest is {near[0] if near else known[0]} (known: "
            f"{', '.join(known)}), or give a file like those of ds_vit/planner/data/{folder}/ by its path"
        )
    try:
        table = yaml.safe_load(read_text(path, flag))
    except yaml.YAMLError as error:
        raise UserError(f"{flag} {name} is no YAML: {first_line(error)}") from None
    return _filled(kind, table if isinstance(table, Mapping) else {}, f"{flag} {name}")


def _filled(kind: type[Kind], table: Mapping[str, Any], where: str) -> Kind:
    """The figures of a file; each is `{value: …, source: …}` or the value alone."""
    wanted = [field.name for field in fields(kind)]
    values = {
        key: entry["value"] if isinstance(entry, Mapping) and "value" in entry else entry
        for key, entry in table.items()
    }
    if missing := [key for key in wanted if key not in values]:
        raise UserError(f"{where} does not say {', '.join(missing)}; it needs all of {', '.join(wanted)}")
    if extra := [key for key in values if key not in wanted]:
        near = difflib.get_close_matches(extra[0], wanted, n=1, cutoff=0.0)[0]
        raise UserError(f"{where}: there is no figure {extra[0]!r}; the nearest is {near!r}")
    try:
        found = kind(**{key: _number(key, value) for key, value in values.items()})
    except (TypeError, ValueError):
        raise UserError(f"{where}: some figure is no number; compare the files of ds_vit/planner/data/") from None
    if isinstance(found, Accelerator) and found.gpus_per_node < 1:
        raise UserError(f"{where}: gpus_per_node is {found.gpus_per_node}; a host has at least 1")
    return found


def _number(key: str, value: Any) -> Any:
    """A figure in its type: YAML takes 5e9 for a word."""
    if key in ("name", "inside"):
        return value
    if key == "matmul_efficiency":
        return {int(width): float(share) for width, share in value.items()}
    return int(value) if key == "gpus_per_node" else float(value)
