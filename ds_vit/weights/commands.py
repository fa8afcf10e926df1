"""Weights for other tools, and from them: `ds-vit export` and `ds-vit import`.

ds-vit export runs/first --to hf
ds-vit import google/checkpoint-folder --to weights.safetensors

An export is written to a temporary folder, loaded back by its tool, and compared with the source by the logits of
random images; then the folder is renamed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from ds_vit import config as flags
from ds_vit.data.settings import PIXEL_FLAGS
from ds_vit.weights.export import FORMATS, TOLERANCE, export
from ds_vit.weights.files import add_weights_arguments, weights_line
from ds_vit.weights.imports import import_weights
from ds_vit.weights.source import MODEL_FLAGS

_LOADED_WITH = {
    "timm": "timm.create_model('local-dir:{}', pretrained=True)",
    "open_clip": "open_clip.create_model_and_transforms('local-dir:{}')",
    "onnx": "onnxruntime.InferenceSession('{}/model.onnx')",
}


def main(argv: Sequence[str]) -> int:
    """Run `ds-vit export …` or `ds-vit import …`.

    Returns:
        0; 1 if an export differs from its source by more than the tolerance and is not kept.

    Raises:
        UserError: invalid input.
    """
    command, *words = argv
    given = flags.read_words(build_parser(command), words)
    if command == "import":
        print(import_weights(**given))
        return 0
    difference = export(**given)
    print(weights_line(**given))
    print(difference)
    for note in difference.notes:
        print(f"note: {note}")
    if not difference.within:
        largest = f"the largest difference {difference.largest:.1e} is beyond {TOLERANCE:g}"
        print(f"ds-vit export: error: {largest}; {difference.folder} is not kept", file=sys.stderr)
        return 1
    if given["to"] in _LOADED_WITH:
        print(f"load it with {_LOADED_WITH[given['to']].format(difference.folder)}")
    return 0


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
    parser.add_argument("--to", choices=FORMATS, required=True, help="the tool to write for")
    parser.add_argument("--output", metavar="DIR", help="a new folder [export-<tool> next to the weights]")
    parser.add_argument("--labels", metavar="FILE", help="names of the classes, one per line [the run's]")
    return parser


def _import_parser() -> argparse.ArgumentParser:
    parser = flags.build_parser(
        "ds-vit import",
        "Write weights under timm's names.",
        only=MODEL_FLAGS,
        show_defaults=False,
        examples="ds-vit import google/checkpoint-folder --to weights.safetensors\n"
        "ds-vit import weights.pth --to weights.safetensors --model vit_base_patch16_224",
    )
    parser.add_argument("source", metavar="SOURCE", help="a Hugging Face, open_clip or timm folder, or a file")
    parser.add_argument("--to", metavar="FILE", required=True, help="the .safetensors file to write")
    return parser
