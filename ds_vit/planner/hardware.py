"""Accelerators and links: one YAML file each in data/, every figure with its source, or a user's file by its path."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, TypeVar

import numpy as np
import yaml
from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass

from ds_vit.fault_tolerance.errors import UserError, did_you_mean, first_line, read_text

_DATA = Path(__file__).parent / "data"


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Link:
    """The link between ranks.

    Attributes:
        name: for people.
        bytes_per_second: one way, of a GPU.
        efficiency: share of it that collectives of large messages reach.
        latency_seconds: of a small message, from a rank to the next.
        gather_share: rate of an all-gather over that of an all-reduce.
        scatter_share: rate of a reduce-scatter over that of an all-reduce.
        gather_latency_seconds: of a small all-gather, from a rank to the next.
        scatter_latency_seconds: of a small reduce-scatter, from a rank to the next.
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
        """Bytes per second of a large collective."""
        return self.bytes_per_second * self.efficiency


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Accelerator:
    """A GPU, or a core of a CPU.

    Attributes:
        name: for people.
        memory_bytes: that it has.
        bf16_tflops: dense peak.
        fp32_tflops: the same.
        memory_bytes_per_second: peak of its memory.
        memory_efficiency: share of it that a copy reaches.
        watts: under load.
        gpus_per_node: of the usual host.
        inside: link between the GPUs of a host: its name, or in a user's file the file of the link next to it.
        matmul_efficiency: least dimension of a product of matrices → share of the peak that it reaches.
        attention_efficiency: share of the peak that fused attention reaches, forward and backward.
        elementwise_efficiency: share of a copy's rate that everything else reaches: norms, GELU, sums, new memory.
        hidden_share: of the backward passes, behind which gradients can travel.
        seconds_per_operation: of the host, for one operation.
        reserved_bytes: that no tensor can use.
        images_per_worker: JPEG files of ImageNet's size that a process of the host decodes and augments in a second.
    """

    name: str
    memory_bytes: float
    bf16_tflops: float
    fp32_tflops: float
    memory_bytes_per_second: float
    memory_efficiency: float
    watts: float
    gpus_per_node: Annotated[int, Field(ge=1)]
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
        """The rate of a product of matrices of this least width.

        Args:
            of_type: bytes of an element.
            width: its least dimension; 0 for attention.
        """
        peak = 1e12 * (self.bf16_tflops if of_type == 2 else self.fp32_tflops)
        return peak * (_between(self.matmul_efficiency, width) if width else self.attention_efficiency)


def _between(table: Mapping[int, float], width: int) -> float:
    """A table's value at a width: interpolated, and below the least width in proportion to it."""
    widths = sorted(table)
    return float(np.interp(max(width, widths[0] / 20), [0, *widths], [0.0, *(table[one] for one in widths)]))


Kind = TypeVar("Kind", Accelerator, Link)


def accelerator(name: str) -> Accelerator:
    """The accelerator of a name (`h200`) or of a file (`mine.yaml`).

    Raises:
        UserError: an unknown name (the nearest is given), or a figure that is missing, unknown or invalid.
    """
    found = _load(Accelerator, "accelerators", name, "--gpu")
    if found.inside.endswith((".yaml", ".yml")):  # a file next to this one
        return dataclasses.replace(found, inside=str(Path(name).parent / found.inside))
    return found


def accelerator_of_device(name: str) -> Accelerator | None:
    """The one of data/ whose name is part of the device's (`NVIDIA H200`); None where there is none."""
    known = [key for key in names("accelerators") if key.replace("_", " ").upper() in name.upper()]
    return accelerator(max(known, key=len)) if name and known else None


def link(name: str, flag: str = "--link") -> Link:
    """The link of a name (`ib400`) or of a file; as `accelerator`."""
    return _load(Link, "links", name, flag)


def names(kind: str) -> list[str]:
    """The names in data/: of `accelerators` or of `links`."""
    return sorted(path.stem for path in (_DATA / kind).glob("*.yaml"))


def _load(kind: type[Kind], folder: str, name: str, flag: str) -> Kind:
    known = names(folder)
    if name.endswith((".yaml", ".yml")):
        path = Path(name)
    elif name.lower() in known:
        path = _DATA / folder / f"{name.lower()}.yaml"
    else:
        raise UserError(
            f"{flag} {name} is unknown{did_you_mean(name.lower(), known, 0.3)} (known: {', '.join(known)}), or give a "
            f"file like those of ds_vit/planner/data/{folder}/ by its path"
        )
    try:
        table = yaml.safe_load(read_text(path, flag))
    except yaml.YAMLError as error:
        raise UserError(f"{flag} {name} is no YAML: {first_line(error)}") from None
    # A figure is `{value: …, source: …}` or the value itself.
    figures = {
        key: entry["value"] if isinstance(entry, Mapping) and "value" in entry else entry
        for key, entry in (table.items() if isinstance(table, Mapping) else ())
    }
    try:
        return kind(**figures)
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise UserError(f"{flag} {name}: {wrong} (compare the files of ds_vit/planner/data/{folder}/)") from None
