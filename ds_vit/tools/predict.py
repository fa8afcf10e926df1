"""`ds-vit predict` and `ds-vit embed`: the classes of images or of their pixels, or features, with trained weights.

ds-vit predict runs/first cat.jpg dog.jpg
ds-vit predict runs/first photos --output classes.csv
ds-vit predict runs/first cat.jpg --top-k 3 --json
ds-vit predict runs/clip cat.jpg --labels "a cat" "a dog"
ds-vit predict runs/segmentation photos --output predictions
ds-vit predict model.safetensors cat.jpg --model vit_tiny_patch16_224.augreg_in21k_ft_in1k
ds-vit embed runs/first photos --output features.npz
ds-vit embed runs/clip photos --texts captions.txt --output features.npz
ds-vit embed model.safetensors photos --model vit_tiny_patch16_224 --output features.npz

Images are prepared as in evaluation: the same decoding, resizing, crop and normalisation, by the same code. The model
is timm's own, in fp32, whatever the run computed in.
"""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TextIO, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table

from ds_vit.config import parser as flags
from ds_vit.config.run_folder import to_json, written_whole
from ds_vit.data.decode import ImageDecodeError
from ds_vit.data.field import finished
from ds_vit.data.fields import ImageField
from ds_vit.data.loader import Loader
from ds_vit.data.reader import Reader
from ds_vit.data.rows import EvalRows
from ds_vit.data.sampler import Share
from ds_vit.data.settings import PIXEL_FLAGS
from ds_vit.data.sources.folders import ImageFiles, find_images
from ds_vit.data.text import build_tokenizer
from ds_vit.fault_tolerance import exit_codes
from ds_vit.fault_tolerance.errors import UserError, memory_errors, read_text, stripped_lines, written
from ds_vit.monitoring.metrics import make_console
from ds_vit.tasks.exports import ArrayPredictor, Exported, TextTower
from ds_vit.tasks.registry import all_tasks
from ds_vit.weights.files import add_weights_arguments, find_weights, tokenizer_name, weights_line
from ds_vit.weights.source import MODEL_FLAGS, load_source

_MOST_WORKERS = 4  # timm's default


T = TypeVar("T")
Row = dict[str, Any]
"""An image: its path as "image", and its "classes", the most probable first, each with "number" (of its logit), "name"
(LABEL_<number> where nothing says it) and "probability"; or the "reason" why it cannot be read. Of a model that gives
each pixel a class: the class numbers as "mask", int [H, W], and the largest "classes", each with its "share"."""


def predict_each(
    source: str | Path,
    images: Sequence[str | os.PathLike[str]],
    *,
    top_k: int | None = None,
    weights: str = "",
    checkpoint: str = "",
    labels: str | Path | Sequence[str] | None = None,
    batch_size: int = 32,
    workers: int | None = None,
    device: str = "auto",
    **settings: Any,
) -> tuple[Exported, Iterator[Row]]:
    """Predict images one after the other.

    Args:
        source: a run's output folder, a checkpoint folder, or a file or folder that `--initial-checkpoint` accepts.
        images: files, and folders of them.
        top_k: how many classes per image; default 5 (of pixels 3), or all where there are fewer.
        weights, checkpoint: which of a run's; see `find_weights`.
        labels: a file of class names, one per line; default those that lie with the weights. Of weights with a text
            tower the texts to compare images with, or a file of them.
        batch_size: images at once; of pixels, windows of an image.
        workers: processes that decode; default 0 for up to two batches, else up to 4.
        device: "cpu", "cuda", "cuda:1", …; "auto" is the accelerator where there is one.
        settings: model and pixel flags and `bce_loss` by their recipe names; they have the last word over the run's
            config.yaml.

    Returns:
        The model, and a row for each image in the order given.

    Raises:
        UserError: invalid input.
    """
    found = find_weights(source, weights, checkpoint)  # a missing run is said before a missing image
    files = find_images(images)
    texts, file = _texts_of(labels)
    exported = load_source(found, settings, file, with_text=True)
    forward = _Forward(batch_size, workers, device)
    predictor = exported.predictor
    if isinstance(predictor, TextTower):
        return _predict_texts(exported, predictor, texts, files, top_k, forward)
    if texts and file is None:
        raise UserError(f"--labels takes one file of class names for weights with a classifier, not {len(texts)} words")
    num_classes = exported.model.num_classes
    if not num_classes:
        raise UserError(
            f"{source} has no classifier: its run's task has no classes; `ds-vit embed` writes its features"
        )
    if predictor is not None:
        if workers is not None:
            raise UserError(f"--workers has no effect for {source}: images are read one after the other; drop it")
        return exported, forward.of_pixels(exported, predictor, files, _top_k(top_k, num_classes, 3))
    top_k = _top_k(top_k, num_classes)
    return exported, forward.of_images(exported, files, lambda logits: _most_probable(exported, logits, top_k))


def _top_k(top_k: int | None, num_classes: int, default: int = 5) -> int:
    if top_k is not None and not 1 <= top_k <= num_classes:
        raise UserError(f"--top-k {top_k} must lie between 1 and the model's {num_classes} classes")
    return top_k or min(default, num_classes)


def embed(
    source: str | Path,
    images: Sequence[str | os.PathLike[str]] = (),
    *,
    texts: str | Path | Sequence[str] = (),
    weights: str = "",
    checkpoint: str = "",
    batch_size: int = 32,
    workers: int | None = None,
    device: str = "auto",
    **settings: Any,
) -> dict[str, Any]:
    """The features of images: what the model's classifier gets. Weights need not have one.

    Args:
        source, images: as of `predict_each`; without images, of texts only.
        texts: for weights with a text tower: their features too; or a file with one per line.
        weights, checkpoint, batch_size, workers, device, settings: as of `predict_each`.

    Returns:
        The paths of N images in the order given, without those that could not be read, as "images"; "features" float32
        [N, D], pooled, and normalised where the model does that (of weights with a text tower, of length 1); the rows
        of the others as "unreadable"; with texts, "texts" and "text_features" float32 [M, D], of length 1.

    Raises:
        UserError: invalid input, or no image that can be read.
    """
    stored = find_weights(source, weights, checkpoint)
    files = find_images(images) if images else []
    words, _ = _texts_of(texts or None)
    if not files and not words:
        raise UserError("there is nothing to embed: give images, or --texts FILE")
    exported = load_source(stored, settings, classifier=False, with_text=True)
    tower = exported.predictor if isinstance(exported.predictor, TextTower) else None
    if words and tower is None:
        raise UserError(f"--texts: {source} has no text tower; drop it")
    forward = _Forward(batch_size, workers, device)
    of_texts = forward.of_texts(exported, tower, words)[0].numpy() if words and tower else None
    found: list[Row] = []
    if files:
        found = list(forward.of_images(exported, files, lambda own: {"features": own}, pre_logits=tower is None))
    unreadable = [row for row in found if "reason" in row]
    read = [row for row in found if "reason" not in row]
    if files and not read:
        raise UserError(f"none of {len(files)} images can be read; the first, {files[0]}: {unreadable[0]['reason']}")
    width = tower.width if tower else exported.model.num_features
    features = torch.stack([row["features"] for row in read]) if read else torch.empty(0, width)
    features = F.normalize(features, dim=1) if tower else features
    result = {"images": [row["image"] for row in read], "features": features.numpy(), "unreadable": unreadable}
    return result | ({"texts": list(words), "text_features": of_texts} if words else {})


def _texts_of(labels: str | Path | Sequence[str] | None) -> tuple[tuple[str, ...], str | Path | None]:
    """Texts, or those of the file that a single word names; and that word, which may name a file of classes."""
    if labels is None:
        return (), None
    words: list[str | Path] = [labels] if isinstance(labels, (str, Path)) else list(labels)
    word = words[0] if len(words) == 1 else None
    if word is not None and (isinstance(word, Path) or os.path.isfile(word)):
        return stripped_lines(read_text(word, "")), word
    return tuple(map(str, words)), word


def _predict_texts(
    exported: Exported,
    tower: TextTower,
    texts: Sequence[str],
    files: Sequence[str],
    top_k: int | None,
    forward: _Forward,
) -> tuple[Exported, Iterator[Row]]:
    """Which of some texts each image resembles, by the model's own logit scale and bias."""
    if not texts:
        raise UserError(f'{exported.path} has no classes: give texts, --labels "a cat" "a dog", or a file')
    features, (scale, *bias) = forward.of_texts(exported, tower, texts)
    exported, top_k = replace(exported, labels=tuple(texts), bce=bool(bias)), _top_k(top_k, len(texts))

    def described(image: torch.Tensor) -> Row:
        similarities = F.normalize(image, dim=0) @ features.T
        return _most_probable(exported, scale.exp() * similarities + sum(bias), top_k)

    return exported, forward.of_images(exported, files, described)


# ---- images and texts through the model ------------------------------------------------------------------------------


class _Forward:
    """How images and texts go through a model; the arguments are those of `predict_each`.

    Raises:
        UserError: one of them is invalid.
    """

    def __init__(self, batch_size: int, workers: int | None, device: str) -> None:
        if batch_size < 1:
            raise UserError(f"--batch-size must be at least 1, not {batch_size}")
        if workers is not None and workers < 0:
            raise UserError(f"--workers must be at least 0, not {workers}")
        self._batch_size, self._workers, self._device = batch_size, workers, _find_device(device)

    @torch.inference_mode()
    def of_texts(self, exported: Exported, texts: TextTower, words: Sequence[str]) -> tuple[torch.Tensor, torch.Tensor]:
        """Features of texts float32 [M, E], of length 1; logit scale (its logarithm) and bias, [1 or 2]; on the CPU."""
        tokenizer = build_tokenizer(exported.tokenizer, texts.context_length)
        if (recorded := tokenizer_name(exported.path)) not in ("", tokenizer.name):
            raise UserError(
                f"{exported.path} was trained with --tokenizer {recorded}, and {exported.tokenizer}, which the "
                f"run's config.yaml names, is {tokenizer.name}: restore that file, or name the right one there"
            )
        tower = texts.tower.to(self._device)
        ids = torch.from_numpy(np.stack([tokenizer.encode(text) for text in words]))
        parts = [tower(part, torch.zeros_like(part[:, 0])) for part in ids.to(self._device).split(self._batch_size)]
        features, logits = torch.cat(parts).cpu().tensor_split((texts.width,), 1)
        return F.normalize(features, dim=1), logits[0]

    @torch.inference_mode()
    def of_images(
        self,
        exported: Exported,
        files: Sequence[str],
        described: Callable[[torch.Tensor], Row],
        *,
        pre_logits: bool = False,
    ) -> Iterator[Row]:
        """What is to be said of each file's logits, or classifier's input (`pre_logits`), fp32 on the CPU, in order."""
        source, batch_size, workers = ImageFiles(list(files)), self._batch_size, self._workers
        if workers is None:
            workers = 0 if len(files) <= 2 * batch_size else min(_MOST_WORKERS, len(os.sched_getaffinity(0)))
        rows = EvalRows(len(source), Share(0, 1, min(batch_size, len(source))))
        fields = [ImageField("images", exported.image)]
        reader = Reader(source, fields, rows, on_bad_image="skip")
        loader = Loader(reader, range(len(rows)), workers, pin_memory=self._device.type != "cpu")
        indices = iter(range(len(source)))  # there is none for the rows that pad the last batch
        smaller = f"--batch-size {batch_size // 2}, " if batch_size > 1 else ""
        with memory_errors(lambda of_loader: f"try {smaller}--workers 0 or another --device"):
            model = exported.model.to(self._device)
            for batch in _tracked(loader, len(loader)):
                features = model.forward_features(finished(fields, batch, device=self._device)["images"])
                outputs = model.forward_head(features, pre_logits=pre_logits).float().cpu()
                reasons = dict(batch.skipped)
                for output, valid, index in zip(outputs, batch.rows.valid.tolist(), indices, strict=False):
                    row = described(output) if valid else {"reason": reasons[index]}
                    yield {"image": source.describe(index), **row}

    @torch.inference_mode()
    def of_pixels(self, exported: Exported, masks: ArrayPredictor, files: Sequence[str], top_k: int) -> Iterator[Row]:
        """The classes of each file's pixels; files are read one after the other."""
        source, model = ImageFiles(list(files)), exported.model

        def forward(images: torch.Tensor) -> torch.Tensor:
            return torch.cat([model(part.to(self._device)).float() for part in images.split(self._batch_size)])

        with memory_errors(lambda of_loader: "try --batch-size 1 or another --device"):
            model.to(self._device)
            for index, file in enumerate(_tracked(files, len(files))):
                try:
                    mask = masks.classes(source.encoded(index), file, forward)
                    shares = torch.bincount(mask.flatten(), minlength=model.num_classes) / mask.numel()
                    yield {"image": file, "mask": mask.numpy(), "classes": _largest(exported, shares, top_k)}
                except ImageDecodeError as error:
                    yield {"image": file, "reason": error.reason}


def _tracked(items: Iterable[T], number: int) -> Iterable[T]:
    """A progress bar on stderr, where that is a terminal."""
    console = Console(stderr=True)
    hidden = not console.is_terminal or number == 1
    return track(items, "images", number, console=console, transient=True, disable=hidden)


def _find_device(name: str) -> torch.device:
    """The device of a name that torch knows; "auto": the accelerator, or the CPU where there is none."""
    there = torch.accelerator.current_accelerator(check_available=True)
    if name == "auto":
        return there or torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UserError(f"--device {name} is no device; give auto, cpu, cuda or cuda:1") from None
    count = torch.accelerator.device_count() if there else 0
    if device.type != "cpu" and (there is None or device.type != there.type or (device.index or 0) >= count):
        raise UserError(f"--device {name}: there is {f'{there.type} with {count} devices' if there else 'only a CPU'}")
    return device


def _most_probable(exported: Exported, logits: torch.Tensor, top_k: int) -> Row:
    probabilities = logits.sigmoid() if exported.bce else logits.softmax(0)
    return {"classes": _largest(exported, probabilities, top_k)}


def _largest(exported: Exported, values: torch.Tensor, top_k: int) -> list[Row]:
    """The classes with the largest values [C]: probabilities, or shares of the pixels."""
    what = "share" if _by(exported) == "pixels" else "probability"
    names = exported.labels or tuple(f"LABEL_{number}" for number in range(exported.model.num_classes))
    best = values.topk(top_k)
    pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [{"number": number, "name": names[number], what: value} for number, value in pairs]


def _by(exported: Exported) -> str:
    """The source of the classes' values: "by" of `collect`."""
    if isinstance(exported.predictor, ArrayPredictor):
        return "pixels"
    return "sigmoid" if exported.bce else "softmax"


def collect(exported: Exported, rows: Iterable[Row]) -> dict[str, Any]:
    """The result of `predict_each` as one object.

    Returns:
        The timm name as "model"; the file that was read as "weights"; "by": "softmax", or "sigmoid" for weights that
        were trained with binary cross-entropy or SigLIP's loss (a probability is then only of its class, and they need
        not sum to 1), or "pixels" for a model that gives each pixel a class; the rows in the order given as "images",
        those that could not be read as "unreadable".
    """
    rows = list(rows)
    return {
        "model": exported.model.pretrained_cfg["architecture"],
        "weights": str(exported.path),
        "by": _by(exported),
        "images": [row for row in rows if "classes" in row],
        "unreadable": [row for row in rows if "reason" in row],
    }


# ---- the command line ------------------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """Run `ds-vit predict …` or `ds-vit embed …`.

    Returns:
        0; 65 where images could not be read: each is named on stderr, the others are done.

    Raises:
        UserError: invalid input.
    """
    command, *words = argv
    given = flags.read_words(build_parser(command), words)
    return _embed(**given) if command == "embed" else _predict(**given)


def build_parser(command: str) -> flags.Parser:
    """The command line of `ds-vit predict` or `ds-vit embed`."""
    does = "Write the features of images." if command == "embed" else "Predict the classes of images or pixels."
    of_tasks = (flag for task in all_tasks() for flag in task.predict_flags)
    only = (*MODEL_FLAGS, *PIXEL_FLAGS, "exif_rotation", *(of_tasks if command == "predict" else ()))
    examples = "\n".join(line for line in str(__doc__).splitlines() if line.startswith(f"ds-vit {command} "))
    parser = flags.build_parser(f"ds-vit {command}", does, only, show_defaults=False, examples=examples)
    add_weights_arguments(parser)
    number = "*" if command == "embed" else "+"
    parser.add_argument("images", nargs=number, metavar="IMAGE", help="image files, and folders of them")
    parser.add_argument("-b", "--batch-size", type=int, metavar="N", help="images at once [32]")
    parser.add_argument(
        "-j", "--workers", type=int, metavar="N", help="processes that decode [by the number of images]"
    )
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda, cuda:1, … [the accelerator, else the CPU]")
    if command == "embed":
        parser.add_argument("--texts", metavar="FILE", help="of a run with a text tower: texts to embed, one per line")
        what = "write there: features float32 [N, D], and images, their N names; text_features and texts"
        parser.add_argument("--output", metavar="FILE.npz", required=True, help=what)
        return parser
    parser.add_argument("-k", "--top-k", type=int, metavar="K", help="classes per image [5; of pixels 3]")
    parser.add_argument(
        "--labels",
        nargs="+",
        metavar="FILE|TEXT",
        help="file with the names of the classes, one per line [the run's]; with a text tower, texts or a file",
    )
    parser.add_argument("--json", action="store_true", help="one JSON object in place of a table or CSV")
    what = "write there [a table of files, CSV of a folder, on stdout]; a run with masks writes a folder [predictions]"
    parser.add_argument("--output", metavar="FILE.csv|FILE.json|FOLDER", help=what)
    return parser


def _predict(source: str, images: Sequence[str], output: str | None = None, **words: Any) -> int:
    as_json, table = words.pop("json", False), output
    exported, rows = predict_each(source, images, **words)
    if isinstance(exported.predictor, ArrayPredictor):
        output, table = output or "predictions", None
        rows = _written(exported.predictor, rows, _stems(images), Path(output))
    form = _form(images, as_json, table)
    # Names of files need not be UTF-8.
    with _opened(table, mode="w", newline="", encoding="utf-8", errors="surrogateescape") as file:
        print(weights_line(source, **words), file=sys.stderr, flush=True)
        if form == "csv":
            num_read, unreadable = _write_csv(rows, file)
        else:
            found = collect(exported, rows)
            num_read, unreadable = len(found["images"]), found["unreadable"]
            if form == "json":
                file.write(to_json(found, indent=2) + "\n")
            else:
                _print_table(found)
    return _report(num_read, unreadable, output)


def _stems(images: Sequence[str]) -> dict[str, str]:
    """Where the mask of each image is written: its path below the folder that was given, else its name; no suffix."""
    first: dict[str, str] = {}
    for given in images:
        for file in find_images([given]):
            name = os.path.relpath(file, given) if os.path.isdir(given) else os.path.basename(file)
            if (other := first.setdefault(stem := os.path.splitext(name)[0], file)) != file:
                raise UserError(f"{other} and {file} would have one mask, {stem}.png; predict one at a time")
    return {file: stem for stem, file in first.items()}


def _written(masks: ArrayPredictor, rows: Iterable[Row], stems: dict[str, str], folder: Path) -> Iterator[Row]:
    """The rows with the path of each mask in place of it, once it is written into a new folder."""
    if folder.suffix in (".csv", ".json"):
        raise UserError(f"--output {folder}: name the folder of the masks; the table is printed, with --json as JSON")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists already; remove it, or name another folder with --output")
    for row in rows:
        if "mask" in row:
            with written(f"--output {folder}"):
                row["mask"] = str(masks.write(row["image"], row["mask"], folder, stems[row["image"]]))
        yield row


def _embed(source: str, output: str, images: Sequence[str] = (), **words: Any) -> int:
    if Path(output).suffix != ".npz":
        raise UserError(f"--output {output}: the file's name must end in .npz")
    if "texts" in words:
        words["texts"] = Path(words["texts"])
    with _opened(output, mode="wb") as file:
        found = embed(source, images, **words)
        unreadable = found.pop("unreadable")
        np.savez(file, **found)
    print(weights_line(source, **words), file=sys.stderr)
    return _report(len(found["images"]), unreadable, output, len(found.get("texts", ())))


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
def _opened(output: str | None, **how: Any) -> Iterator[Any]:
    """The file to write, which a reader sees whole or not at all; stdout for None."""
    if output is None:
        yield sys.stdout
        return
    with written_whole(Path(output)) as partial:
        with written(f"--output {output}"):
            file = partial.open(**how)
        with file:
            yield file


def _write_csv(rows: Iterable[Row], file: TextIO) -> tuple[int, list[Row]]:
    """A line per image, as it comes: image,class1,probability1,class2,…; gives their number, and the other rows."""
    writer, num_read, unreadable = None, 0, []
    for row in rows:
        if "reason" in row:
            unreadable.append(row)
            continue
        cells = {"image": row["image"]}
        for place, one in enumerate(row["classes"], 1):
            *_, (measure, value) = one.items()
            cells |= {f"class{place}": one["name"], f"{measure}{place}": f"{value:.6f}"}
        if writer is None:
            writer = csv.DictWriter(file, cells, lineterminator="\n")
            writer.writeheader()
        writer.writerow(cells)
        num_read += 1
    return num_read, unreadable


def _print_table(found: dict[str, Any]) -> None:
    separately = ", each class by itself" if found["by"] == "sigmoid" else ""
    measure, what = ("share", "shares of") if found["by"] == "pixels" else ("probability", "probabilities by")
    title = f"{found['model']}, {what} {found['by']}{separately}"
    table = Table("image", "class", title=title, title_justify="left", title_style="bold")
    table.columns[0].overflow = table.columns[1].overflow = "fold"
    table.add_column(measure, justify="right")
    for row in found["images"]:
        for place, one in enumerate(row["classes"], 1):
            name = row["image"] if place == 1 else ""
            last = place == len(row["classes"])
            table.add_row(name, one["name"], f"{100 * one[measure]:.2f} %", end_section=last)
    if found["images"]:
        make_console().print(table, markup=False)


def _report(num_read: int, unreadable: Sequence[Row], output: str | None, num_texts: int = 0) -> int:
    """Say on stderr where the result is and what could not be read, and give the exit code."""
    for row in unreadable:
        print(f"{row['image']}: cannot be read ({row['reason']})", file=sys.stderr)
    if num_bad := len(unreadable):
        print(f"{num_bad:,} of {num_read + num_bad:,} images could not be read and are left out", file=sys.stderr)
    if output:
        texts = f", {num_texts:,} texts" if num_texts else ""
        print(f"{output}: {num_read:,} images{texts}", file=sys.stderr)
    return exit_codes.UNREADABLE if unreadable else exit_codes.OK
