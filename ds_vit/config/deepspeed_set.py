"""`--set KEY.PATH=VALUE`: values of the DeepSpeed JSON from the command line, over the file's."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ds_vit.fault_tolerance.errors import UserError

KEY_OF_FLAG: Mapping[str, str] = {
    "lr": "optimizer.params.lr",
    "weight_decay": "optimizer.params.weight_decay",
    "clip_grad": "gradient_clipping",
    "batch_size": "train_micro_batch_size_per_gpu",
    "grad_accum_steps": "gradient_accumulation_steps",
}
"""Flags that have a key of the JSON for their own."""


def parse_set(pairs: Sequence[str] | str) -> dict[str, Any]:
    """`["optimizer.type=SGD", "optimizer.params.lr=0.1"]` → `{"optimizer.type": "SGD", "optimizer.params.lr": 0.1}`.

    A value is read as JSON, and as a word where it is none: `true`, `1e-3` and `[0.9,0.95]` have the types that they
    have in a file. Of a key that stands twice the last value counts.

    Raises:
        UserError: a piece without `=`, or a key with an empty part.
    """
    out: dict[str, Any] = {}
    for pair in [pairs] if isinstance(pairs, str) else pairs:
        key, equals, text = str(pair).partition("=")
        if not equals or not all(key.split(".")):
            raise UserError(f"--set takes KEY.PATH=VALUE, such as zero_optimization.stage=2, not {pair!r}")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        out[key] = value
    return out


def overlay(data: Mapping[str, Any], values: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The JSON with the values of `parse_set` in it; a block that is not there is made.

    Args:
        data: the file's.
        values: by dotted name.
        path: the file, named in messages.

    Raises:
        UserError: a part of a name is no block in the file.
    """
    out = copy.deepcopy(dict(data))
    for key, value in values.items():
        *blocks, last = key.split(".")
        inner: Any = out
        for depth, name in enumerate(blocks, 1):
            inner = inner.setdefault(name, {})
            if not isinstance(inner, dict):
                whole = ".".join(blocks[:depth])
                raise UserError(f'--set {key}: "{whole}" in {path} is no block but {inner!r}')
        inner[last] = value
    return out


def leaves(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a JSON by their dotted names; an empty block counts as a value."""
    out: dict[str, Any] = {}
    for key, value in data.items():
        name = f"{prefix}{key}"
        out |= leaves(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return out
