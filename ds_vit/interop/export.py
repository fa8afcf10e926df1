"""Write weights for another tool: a timm folder, a Hugging Face folder, ONNX."""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ds_vit.fault_tolerance.errors import UserError
from ds_vit.interop import hf, onnx_graph, timm_folder
from ds_vit.interop.check import Difference, Predict, compare
from ds_vit.interop.source import load_source
from ds_vit.interop.stored_weights import find_weights

# Tool → packages beside the required ones, what refuses a model, writes a folder, and loads it back.
_TOOLS: Mapping[str, tuple[tuple[str, ...], Any]] = {
    "timm": ((), timm_folder),
    "hf": (("transformers",), hf),
    "onnx": (("onnx", "onnxruntime", "onnxscript"), onnx_graph),
}
FORMATS = tuple(_TOOLS)


def export(
    source: str | Path,
    to: str,
    *,
    weights: str = "raw",
    checkpoint: str = "",
    output: str | Path | None = None,
    labels: str | Path | None = None,
    **settings: Any,
) -> Difference:
    """Write weights for another tool, and check them there.

    Args:
        source: a run's output folder, a checkpoint folder, or a file or folder that `--initial-checkpoint` accepts.
        to: "timm" (a folder that `timm.create_model("local-dir:…", pretrained=True)` reads), "hf" (a folder that
            `ViTForImageClassification.from_pretrained` reads) or "onnx" (model.onnx, batch of any size).
        weights: "raw", or "ema" for the moving average.
        checkpoint: which one of a run's; see `find_weights`.
        output: the folder to write, which must not hold anything; default `export-<to>` beside the weights.
        labels: a file of class names, one a line, in the order of the logits; None for those that lie with the
            weights.
        settings: model and pixel flags by their recipe names; they have the last word over the run's config.yaml.

    Returns:
        The largest difference of logits on random images between the source and the export as its tool loads it.
        Where it is not `within` the tolerance nothing is kept.

    Raises:
        UserError: input that cannot be, a model that the tool has no class for, or a missing package.
    """
    if to not in _TOOLS:
        raise UserError(f"cannot export to {to!r}; known are {', '.join(_TOOLS)}")
    packages, tool = _TOOLS[to]
    require(packages, f"--to {to}")
    found = find_weights(source, weights, checkpoint)
    folder = Path(output) if output else found.folder / f"export-{to}"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists already; remove it, or name another folder with --output")
    exported = load_source(found, settings, labels)
    tool.refuse(exported)
    partial = folder.with_name(f".{folder.name}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    except OSError as error:
        raise UserError(f"--output {folder}: {error.strerror}") from None
    try:
        tool.write(exported, partial)
        predict: Predict = tool.load(partial)
        difference = compare(exported.model, predict, exported.img_size, folder, tool.reader())
        if difference.within:
            if folder.exists():
                folder.rmdir()
            partial.rename(folder)
        return difference
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def require(packages: tuple[str, ...], why: str) -> None:
    """Refuse, with the command that helps, where a package is missing.

    Raises:
        UserError: names the packages.
    """
    missing = []
    for package in packages:
        try:
            importlib.import_module(package)
        except ImportError:
            missing.append(package)
    if missing:
        raise UserError(f"{why} needs {', '.join(missing)}: bash launch/setup.sh export")
