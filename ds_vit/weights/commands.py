"""Weights for other tools, and from them: `ds-vit export` and `ds-vit import`.

ds-vit export runs/first --to hf
ds-vit import google/checkpoint-folder --to weights.safetensors

An export is written to a temporary folder, loaded back by its tool, and compared with the source by the logits of
random images; then the folder is renamed.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ds_vit.checkpoint.tensors import save_weights
from ds_vit.config import parser as flags
from ds_vit.data.settings import PIXEL_FLAGS
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.models.zoo import create_model
from ds_vit.weights.export import TOLERANCE, export, formats
from ds_vit.weights.files import add_weights_arguments, class_names, names_as_metadata, open_prefixed, weights_line
from ds_vit.weights.initial_checkpoint import InitialCheckpoint, require_tensors
from ds_vit.weights.source import MODEL_FLAGS, model_spec


def import_weights(source: str | Path, to: str | Path, **settings: Any) -> str:
    """Write weights under timm's names.

    Args:
        source: a file or folder that `--initial-checkpoint` accepts, such as one of Hugging Face, open_clip or timm.
        to: the .safetensors file to write.
        settings: model flags by their recipe names; with a model, names and shapes are compared with it.

    Returns:
        A line that describes the file.

    Raises:
        UserError: the source cannot be read, does not fit, or the file exists.
    """
    source, to = Path(source), Path(to)
    if to.suffix != ".safetensors":
        raise UserError(f"--to {to}: the file's name must end in .safetensors")
    if to.exists():
        raise UserError(f"--to {to} exists already; remove it, or name another file")
    if not to.parent.is_dir() or not os.access(to.parent, os.W_OK | os.X_OK):
        raise UserError(f"--to {to}: {to.parent} is not a folder that can be written to")
    if settings and "model" not in settings:
        raise UserError(f"--{next(iter(settings)).replace('_', '-')} has no effect without --model; drop it")
    state, _ = open_prefixed(source)
    try:
        require_tensors(state)
    except UserError as error:
        raise UserError(f"{source}: {error}") from None
    fits = ""
    if settings:
        spec = model_spec(settings)
        new = InitialCheckpoint(source, create_model(spec, for_training=False)).newly_initialised
        fits = f", which fits {spec.name}" + (f" except its classifier ({', '.join(new)})" if new else "")
    save_weights(to.parent, state, max_bytes=2**62, name=to.stem, metadata=names_as_metadata(class_names(source)))
    elements = sum(tensor.numel() for tensor in state.values())
    return f"{to}: {len(state)} tensors of {elements:,} elements{fits}; read back and equal to the source"


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
    if call := formats()[given["to"]].loaded_with:
        print(f"load it with {call.format(difference.folder)}")
    return 0


def build_parser(command: str) -> flags.Parser:
    """The command line of `ds-vit export` or `ds-vit import`."""
    if command == "import":
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
    parser = flags.build_parser(
        "ds-vit export",
        "Write a run's weights for another tool, and check them there.",
        only=MODEL_FLAGS + PIXEL_FLAGS,
        show_defaults=False,
        examples="ds-vit export runs/first --to hf\nds-vit export runs/first --to onnx --weights ema --output onnx",
    )
    add_weights_arguments(parser)
    metavar = f"{{{','.join(formats())}}}"  # a task from outside may have others
    parser.add_argument("--to", metavar=metavar, required=True, help="the tool to write for")
    parser.add_argument("--output", metavar="DIR", help="a new folder [export-<tool> next to the weights]")
    parser.add_argument("--labels", metavar="FILE", help="names of the classes, one per line [the run's]")
    return parser
