"""DeepSpeed's JSON as a file: read it, lay --set over it, and find values by their dotted names."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ds_vit.fault_tolerance.errors import UserError, read_text

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
MASTERS_IN_BF16 = "bf16.bf16_master_weights_and_grads"
MONITORS = ("tensorboard", "csv_monitor", "wandb", "comet")


def derived_path(path: str | Path) -> Path:
    """The file next to a run's deepspeed.json that records the origin of its values; other JSON files have none."""
    return Path(path).with_suffix(".derived.json")


def load_json(path: str | Path) -> dict[str, Any]:
    """Read a DeepSpeed JSON file; one named `.hjson` may have comments and trailing commas.

    DeepSpeed reads every file as Hjson, which turns a line with a missing comma into one long string.

    Raises:
        UserError: the file is missing, malformed (with line and column), has a duplicate key, or is not an object.
    """
    import hjson

    path = Path(path)
    text, is_hjson = read_text(path, "--deepspeed_config "), path.suffix == ".hjson"

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        keys = [key for key, _ in pairs]
        for key in keys:
            if keys.count(key) > 1:
                raise UserError(f'{path}: the key "{key}" is given twice in one block; keep one')
        return dict(pairs)

    try:
        data = (hjson if is_hjson else json).loads(text, object_pairs_hook=unique)
    except (json.JSONDecodeError, hjson.HjsonDecodeError) as error:
        kind, hint = ("Hjson", "") if is_hjson else ("JSON", " (comments and trailing commas need .hjson)")
        where = f"{path}, line {error.lineno}, column {error.colno}"
        raise UserError(f"{where}: malformed {kind}: {error.msg}{hint}") from None
    except UserError:
        raise
    except (RecursionError, ValueError) as error:  # brackets without end, a number of thousands of digits
        raise UserError(f"{path}: malformed JSON: {error}") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: a DeepSpeed configuration is one JSON object, not a {type(data).__name__}")
    for leaf in leaves(data).values() if is_hjson else ():
        if isinstance(leaf, str) and any(c in leaf for c in '{}":,\n'):  # unquoted, which hides a missing comma
            line = text[: text.find(leaf)].count("\n") + 1
            raise UserError(f"{path}, line {line}: {leaf!r} would be one string; a comma is missing before or in it")
    return data


def overlay(data: Mapping[str, Any], values: Mapping[str, Any], path: str) -> dict[str, Any]:
    """The JSON with the values of `parse_set` in it; missing blocks are created.

    Args:
        data: the file's.
        values: by dotted name.
        path: the file, named in messages.

    Raises:
        UserError: a part of a name is not a block in the file.
    """
    out = without(data, ())
    for key, value in values.items():
        *blocks, last = key.split(".")
        inner: Any = out
        for depth, name in enumerate(blocks, 1):
            inner = inner.setdefault(name, {})
            if not isinstance(inner, dict):
                raise UserError(f'--set {key}: "{".".join(blocks[:depth])}" in {path} is not a block but {inner!r}')
        inner[last] = value
    return out


def leaves(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The values of a JSON by their dotted names; an empty block counts as a value."""
    out: dict[str, Any] = {}
    for key, value in data.items():
        name = f"{prefix}{key}"
        out |= leaves(value, f"{name}.") if isinstance(value, Mapping) and value else {name: value}
    return out


def value_of(data: Mapping[str, Any], name: str) -> Any:
    """The value under a dotted name; None where a part of it is missing."""
    value: Any = data
    for key in name.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def is_on(block: Any) -> bool:
    """Whether a block of the file is enabled; "auto" counts as enabled, and so does true in place of a block."""
    return bool(block.get("enabled") if isinstance(block, Mapping) else block)


def without(data: Mapping[str, Any], names: Collection[str], block: str = "") -> dict[str, Any]:
    """The JSON without some keys, by dotted names; it need not have them. Blocks of the copy are separate objects."""
    kept = {key: value for key, value in data.items() if f"{block}{key}" not in names}
    return {
        key: without(value, names, f"{block}{key}.") if isinstance(value, Mapping) else value
        for key, value in kept.items()
    }
