"""`ds-vit predict` and `ds-vit embed`: what stands on their command lines, and how the results are written."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from rich.table import Table

from ds_vit import config as flags
from ds_vit.data.settings import PIXEL_FLAGS
from ds_vit.fault_tolerance import exit_codes
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.monitoring.metrics import make_console
from ds_vit.tools.predict import Prediction, Unreadable, collect, embed, predict_each
from ds_vit.weights.files import add_weights_arguments
from ds_vit.weights.source import MODEL_FLAGS, Exported

_EXAMPLES = {
    "predict": """
ds-vit predict runs/first cat.jpg dog.jpg
ds-vit predict runs/first photos --output classes.csv
ds-vit predict runs/first cat.jpg --top-k 3 --json
ds-vit predict model.safetensors cat.jpg --model vit_tiny_patch16_224.augreg_in21k_ft_in1k
""",
    "embed": """
ds-vit embed runs/first photos --output features.npz
ds-vit embed model.safetensors photos --model vit_tiny_patch16_224 --output features.npz
""",
}
_Written = tuple[int, Sequence[Unreadable]]  # how many images, and those that are left out


def main(argv: Sequence[str]) -> int:
    """Run `ds-vit predict …` or `ds-vit embed …`.

    Returns:
        0; 65 where images could not be read: each is named on stderr, the others are done.

    Raises:
        UserError: input that cannot be.
    """
    command, *words = argv
    given = flags.read_words(build_parser(command), words)
    return _embed(**given) if command == "embed" else _predict(**given)


def build_parser(command: str) -> argparse.ArgumentParser:
    """The command line of `ds-vit predict` or `ds-vit embed`."""
    does = "Write the features of images." if command == "embed" else "Predict the classes of images."
    only = (*MODEL_FLAGS, *PIXEL_FLAGS, *(("bce_loss",) if command == "predict" else ()))
    parser = flags.build_parser(f"ds-vit {command}", does, only, show_defaults=False, examples=_EXAMPLES[command])
    add_weights_arguments(parser)
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="image files, and folders of them")
    parser.add_argument("-b", "--batch-size", type=int, metavar="N", help="images at once [32]")
    parser.add_argument(
        "-j", "--workers", type=int, metavar="N", help="processes that decode [by the number of images]"
    )
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:1, … [the accelerator, else the CPU]")
    if command == "embed":
        what = "write there: features float32 [N, D], and images, their N names"
        parser.add_argument("--output", metavar="FILE.npz", required=True, help=what)
        return parser
    parser.add_argument("-k", "--top-k", type=int, metavar="K", help="classes an image [5]")
    parser.add_argument("--labels", metavar="FILE", help="names of the classes, one a line [the run's]")
    parser.add_argument("--json", action="store_true", help="one JSON object in place of a table or CSV")
    parser.add_argument(
        "--output", metavar="FILE.csv|FILE.json", help="write there [a table of files, CSV of a folder, on stdout]"
    )
    return parser


def _predict(source: str, images: Sequence[str], output: str | None = None, **words: Any) -> int:
    form = _form(images, words.pop("json", False), output)
    exported, rows = predict_each(source, images, **words)
    with _opened(output) as file:
        num_images, unreadable = _WRITE[form](exported, rows, file)
    return _report(num_images, unreadable, output)


def _embed(source: str, images: Sequence[str], output: str, **words: Any) -> int:
    if Path(output).suffix != ".npz":
        raise UserError(f"--output {output}: the file's name must end in .npz")
    with _opened(output, "wb") as file:
        found = embed(source, images, **words)
        np.savez(file, features=found.features, images=np.array(found.images))
    return _report(len(found.images), found.unreadable, output)


def _form(images: Sequence[str], as_json: bool, output: str | None) -> str:
    """What to write: a table of files, CSV of a folder, or what --json or the name of --output says."""
    suffix = Path(output).suffix if output else ""
    if output and suffix not in (".csv", ".json"):
        raise UserError(f"--output {output}: the file's name must end in .csv or .json")
    if as_json and suffix == ".csv":
        raise UserError(f"--json and --output {output} contradict each other; drop one")
    if as_json or suffix:
        return "csv" if suffix == ".csv" else "json"
    return "csv" if any(Path(path).is_dir() for path in images) else "table"


@contextmanager
def _opened(output: str | None, mode: str = "w") -> Iterator[Any]:
    """The file to write, which a reader sees whole or not at all; stdout for None."""
    if output is None:
        yield sys.stdout
        return
    path = Path(output)
    partial_path = path.with_name(f".{path.name}.partial")
    try:
        text = "b" not in mode
        file = partial_path.open(mode, newline="" if text else None, encoding="utf-8" if text else None)
    except OSError as error:
        raise UserError(f"--output {output}: {error.strerror}") from None
    try:
        with file:
            yield file
        partial_path.replace(path)
    finally:
        partial_path.unlink(missing_ok=True)


def _write_csv(exported: Exported, rows: Iterable[Prediction | Unreadable], file: TextIO) -> _Written:
    """A line an image, as it comes: image,class1,probability1,class2,…"""
    unreadable: list[Unreadable] = []
    num_images = 0
    writer = csv.writer(file, lineterminator="\n")
    for row in rows:
        if isinstance(row, Unreadable):
            unreadable.append(row)
            continue
        if not num_images:
            header = ["image", *(f"{w}{n}" for n in range(1, len(row.classes) + 1) for w in ("class", "probability"))]
            writer.writerow(header)
        writer.writerow([row.image, *(v for one in row.classes for v in (one.name, f"{one.probability:.6f}"))])
        num_images += 1
    return num_images, unreadable


def _write_json(exported: Exported, rows: Iterable[Prediction | Unreadable], file: TextIO) -> _Written:
    """The fields of `Predictions`."""
    found = collect(exported, rows)
    file.write(json.dumps(asdict(found), indent=2, ensure_ascii=False) + "\n")
    return len(found.images), found.unreadable


def _write_table(exported: Exported, rows: Iterable[Prediction | Unreadable], file: TextIO) -> _Written:
    found = collect(exported, rows)
    alone = ", each class by itself" if found.by == "sigmoid" else ""
    title = f"{found.model}, probabilities by {found.by}{alone}"
    table = Table("image", "class", title=title, title_justify="left", title_style="bold")
    table.columns[0].overflow = table.columns[1].overflow = "fold"
    table.add_column("probability", justify="right")
    for prediction in found.images:
        for place, one in enumerate(prediction.classes):
            last = place == len(prediction.classes) - 1
            name = "" if place else prediction.image
            table.add_row(name, one.name, f"{100 * one.probability:.2f} %", end_section=last)
    if found.images:
        make_console().print(table, markup=False)
    return len(found.images), found.unreadable


_WRITE = {"csv": _write_csv, "json": _write_json, "table": _write_table}


def _report(num_images: int, unreadable: Sequence[Unreadable], output: str | None) -> int:
    """Say on stderr where the result is and what could not be read, and give the exit code."""
    for one in unreadable:
        print(f"{one.image}: cannot be read ({one.reason})", file=sys.stderr)
    if unreadable:
        total = num_images + len(unreadable)
        print(f"{len(unreadable):,} of {total:,} images could not be read and are left out", file=sys.stderr)
    if output:
        print(f"{output}: {num_images:,} images", file=sys.stderr)
    return exit_codes.UNREADABLE if unreadable else exit_codes.OK
