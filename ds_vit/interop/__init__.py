"""Weights for other tools, and from them: `ds-vit export` and `ds-vit import`.

ds-vit export runs/first --to hf
ds-vit import google/checkpoint-folder --to weights.safetensors

An export is written beside its place, loaded back by the tool it is for, and compared with the weights it came from by
their logits on random images; only then is it put in its place.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ds_vit import config as flags
from ds_vit.data.settings import PIXEL_FLAGS
from ds_vit.interop.check import TOLERANCE, Difference
from ds_vit.interop.export import FORMATS, export
from ds_vit.interop.imports import import_weights
from ds_vit.interop.source import MODEL_FLAGS
from ds_vit.interop.stored_weights import add_weights_arguments

__all__ = ["TOLERANCE", "Difference", "build_parser", "export", "import_weights", "main"]


def main(argv: Sequence[str]) -> int:
    """Run `ds-vit export …` or `ds-vit import …`.

    Returns:
        0; 1 where an export differs from its source by more than the tolerance, and is not kept.

    Raises:
        UserError: input that cannot be.
    """
    command, *words = argv
    return _export(words) if command == "export" else _import(words)


def build_parser(command: str) -> argparse.ArgumentParser:
    """The command line of `ds-vit export` or `ds-vit import`."""
    return _export_parser() if command == "export" else _import_parser()


def _export_parser() -> argparse.ArgumentParser:
    parser = flags.build_parser(
        "ds-vit export",
        "Write a run's weights for another tool, and check them there.",
        only=MODEL_FLAGS + PIXEL_FLAGS,
        show_defaults=False,
        examples="ds-vit export runs/first --to hf\nds-vit export runs/first --to onnx --weights ema --output onnx",
    )
    add_weights_arguments(parser)
    parser.add_argument("--to", choices=FORMATS, required=True, help="the tool that shall read them")
    parser.add_argument("--output", metavar="DIR", help="a new folder [export-<tool> beside the weights]")
    parser.add_argument("--labels", metavar="FILE", help="names of the classes, one a line [the run's]")
    return parser


def _import_parser() -> argparse.ArgumentParser:
    parser = flags.build_parser(
        "ds-vit import",
        "Write weights under timm's names.",
        only=MODEL_FLAGS,
        show_defaults=False,
        examples="ds-vit import google/checkpoint-folder --to weights.safetensors\n"
        "ds-vit import deepspeed-checkpoint --to weights.safetensors --model vit_base_patch16_224",
    )
    parser.add_argument(
        "source", metavar="SOURCE", help="a Hugging Face or timm folder, a DeepSpeed checkpoint, or a file"
    )
    parser.add_argument("--to", metavar="FILE", required=True, help="the .safetensors file to write")
    return parser


def _take(words: dict[str, Any], **defaults: Any) -> list[Any]:
    return [words.pop(name, default) for name, default in defaults.items()]


def _export(argv: Sequence[str]) -> int:
    words = flags.read_words(build_parser("export"), argv)
    source, to, weights, checkpoint, output, labels = _take(
        words, source="", to="", weights="raw", checkpoint="", output=None, labels=None
    )
    found = export(source, to, weights=weights, checkpoint=checkpoint, output=output, labels=labels, **words)
    print(found)
    if not found.within:
        print(f"ds-vit export: error: {found.failure}", file=sys.stderr)
        return 1
    if to in _LOADED:
        print(f"load it with {_LOADED[to].format(found.folder)}")
    return 0


_LOADED = {
    "timm": "timm.create_model('local-dir:{}', pretrained=True)",
    "onnx": "onnxruntime.InferenceSession('{}/model.onnx')",
}


def _import(argv: Sequence[str]) -> int:
    words = flags.read_words(build_parser("import"), argv)
    source, to = _take(words, source="", to="")
    print(import_weights(source, Path(to), **words))
    return 0
