"""Write weights for another tool (a folder of timm, Hugging Face or open_clip, ONNX), load them there and compare."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import timm
import torch

from ds_vit.checkpoint.tensors import make_empty, remove, save_weights
from ds_vit.fault_tolerance.errors import UserError, did_you_mean, written
from ds_vit.models.zoo import create_model
from ds_vit.tasks.exports import Exported, Format, Predict, Save, quiet, read_transformers, write_timm_config
from ds_vit.tasks.registry import all_tasks
from ds_vit.weights.files import StoredWeights, find_weights, names_as_metadata
from ds_vit.weights.source import load_source, load_whole, settings_of

TOLERANCE = 1e-4
_BATCHES = (1, 3)  # two sizes: a batch size fixed in the export shows


@dataclass(frozen=True)
class Difference:
    """The result of checking an export.

    Attributes:
        folder: of the export; it exists if the difference is `within` the tolerance.
        reader: the tool that loaded it back.
        largest: largest difference of a logit.
        scale: largest magnitude of a logit of the source.
        notes: lines for people about what the tool does in another way.
    """

    folder: Path
    reader: str
    largest: float
    scale: float
    notes: tuple[str, ...] = ()

    @property
    def within(self) -> bool:
        """Whether the difference is within the tolerance, relative to the logits where they are larger than 1."""
        return self.largest <= TOLERANCE * max(1.0, self.scale)  # False for NaN

    def __str__(self) -> str:
        return (
            f"{self.folder}: loaded back by {self.reader}; largest difference of the logits {self.largest:.1e} "
            f"(largest logit {self.scale:.2f})"
        )


def _write_timm(exported: Exported, folder: Path, save: Save) -> tuple[str, ...]:
    """Write config.json, model.safetensors (one file, however large: timm reads no shards), and a head if there is one.

    transformers' `AutoModelForImageClassification` reads the same folder, its `AutoModel` one without a classifier.
    """
    save(folder, exported.model.state_dict(), max_bytes=2**62, metadata=names_as_metadata(exported.labels))
    write_timm_config(exported, folder / "config.json")
    if not exported.head:
        return ()
    save(folder, exported.head, max_bytes=2**62, name="head")
    return ("head.safetensors has the projection head, and separate norms if any, which timm's model lacks",)


def _load_timm(folder: Path) -> Predict:
    return timm.create_model(f"local-dir:{folder}", pretrained=True).eval()


def _load_hf(folder: Path) -> Predict:
    """The folder as transformers loads it: logits, or features of a model without a classifier."""
    if json.loads((folder / "config.json").read_text())["num_classes"]:
        model = read_transformers(folder, "AutoModelForImageClassification")
        return lambda images: model(pixel_values=images).logits
    encoder = read_transformers(folder, "AutoModel")
    return lambda images: encoder(pixel_values=images).pooler_output


def _write_onnx(exported: Exported, folder: Path, save: Save) -> tuple[str, ...]:
    """Write model.onnx (input `images` float32 [batch, 3, H, W], output `logits`) and timm's config.json.

    Its metadata has `class_names`, a JSON list, if the names are known. Weights above ONNX's limit of 2 GB go into
    model.onnx.data in the same folder.
    """
    images = torch.zeros(2, 3, *exported.image.img_size)
    large = sum(tensor.numel() * tensor.element_size() for tensor in exported.model.state_dict().values()) > 1.5e9
    with quiet():
        program = torch.onnx.export(
            exported.model,
            (images,),
            input_names=["images"],
            output_names=["logits"],
            dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
            dynamo=True,
            verbose=False,
        )
    program.model.metadata_props.update(names_as_metadata(exported.labels))
    program.save(folder / "model.onnx", external_data=large)
    write_timm_config(exported, folder / "config.json")
    return ()


def _load_onnx(folder: Path) -> Predict:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])


_ONNX = ("onnx", "onnxruntime", "onnxscript")
_OF_TIMM = {
    "timm": Format(
        "timm", (), _write_timm, _load_timm, loaded_with="timm.create_model('local-dir:{}', pretrained=True)"
    ),
    "hf": Format("transformers", ("transformers",), _write_timm, _load_hf),
    "onnx": Format(
        "onnxruntime", _ONNX, _write_onnx, _load_onnx, loaded_with="onnxruntime.InferenceSession('{}/model.onnx')"
    ),
}


def formats() -> dict[str, Format]:
    """The formats by the words of --to; those of a task are for its runs, and else there is one of timm's."""
    return _OF_TIMM | {to: form for task in all_tasks() for to, form in task.export_formats.items()}


def _load(
    stored: StoredWeights, settings: dict[str, Any], labels: str | Path | None, to: str
) -> tuple[Exported, Format]:
    """The model to export, and the format for it."""
    values, task = settings_of(stored, settings)
    form = task.export_formats.get(to)
    whole = task.has_classes and bool(task.export_formats)  # timm has no model with its classifier
    if form is None and (task.takes_pairs or (whole and to != "onnx")):
        raise UserError(
            f"--to {to} has no counterpart of --task {task.name}; use --to {' or '.join(task.export_formats)}"
        )
    if form is None and to not in _OF_TIMM:
        tasks = " and ".join(other.name for other in all_tasks() if to in other.export_formats)
        raise UserError(
            f"{stored.path} is of --task {task.name}, and --to {to} writes models of --task {tasks}; --to timm writes "
            "a folder with one of timm's, which other tools read by its name"
        )
    if not task.export_formats:
        return load_source(stored, settings, labels), _OF_TIMM[to]
    exported = load_whole(stored, values, task, labels)
    if form is None and not whole:
        exported = _main_tower(exported)
    return exported, form or _OF_TIMM[to]


def _main_tower(exported: Exported) -> Exported:
    """The main tower as timm's model: its features are the logits of a classifier with a bias of zeros."""
    classes = exported.model.num_classes
    spec = replace(exported.spec, num_classes=classes)
    tower = create_model(spec, for_training=False, classifier=False, device="cpu")
    state = {"head.bias": torch.zeros(classes), **exported.model.state_dict()}
    tower.load_state_dict({name: state[name] for name in tower.state_dict()})
    return replace(exported, model=tower.eval(), pipeline_tag="")


def export(
    source: str | Path,
    to: str,
    *,
    weights: str = "",
    checkpoint: str = "",
    output: str | Path | None = None,
    labels: str | Path | None = None,
    **settings: Any,
) -> Difference:
    """Write weights for another tool, and check them there.

    Args:
        source: a run's output folder, a checkpoint folder, or a file or folder that `--initial-checkpoint` accepts.
        to: "timm" (a folder that `timm.create_model("local-dir:…", pretrained=True)` reads), "hf" (the same
            folder, which `AutoModelForImageClassification.from_pretrained` reads too; of a run with a text tower one of
            `CLIPModel` or `SiglipModel`, of --task bridgetower of `BridgeTowerForContrastiveLearning`), "onnx"
            (model.onnx, batch of any size) or "open_clip" (a folder that
            `open_clip.create_model_and_transforms("local-dir:…")` reads). "timm" and "onnx" have the image tower only.
        weights, checkpoint: which of a run's; see `find_weights`.
        output: the folder to write, which must not hold anything; default `export-<to>` in the folder of the weights.
        labels: a file of class names, one per line, in the order of the logits; None for those stored with the weights.
        settings: model and pixel flags by their recipe names; they override the run's config.yaml.

    Returns:
        The largest difference of logits on random images between the source and the export as its tool loads it.
        The folder is kept only if it is `within` the tolerance.

    Raises:
        UserError: invalid input, a model that the tool has no class for, or a missing package.
    """
    stored = find_weights(source, weights, checkpoint)
    known = formats()  # with those of the run's task
    if to not in known:
        raise UserError(f"cannot export to {to!r}; known are {', '.join(known)}{did_you_mean(to, known)}")
    if missing := [package for package in known[to].packages if find_spec(package) is None]:
        raise UserError(f"--to {to} needs {', '.join(missing)}: bash launch/setup.sh {known[to].extra}")
    folder = Path(output) if output else stored.folder / f"export-{to}"
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{folder} exists already; remove it, or name another folder with --output")
    exported, form = _load(stored, settings, labels, to)
    note = "--exif-rotation on: turn photos by their EXIF orientation first, which the export does not say"
    of_images = (note,) if exported.image.exif_rotation else ()
    partial = folder.with_name(f".{folder.name}.partial")
    with written(f"--output {folder}"):
        make_empty(partial)
    try:
        notes = (*of_images, *form.write(exported, partial, save_weights))
        if card := _model_card(stored, exported, form.reader, has_head=(partial / "head.safetensors").is_file()):
            (partial / "README.md").write_text(card)
        largest, scale = _compare(form.predict(exported), form.load(partial), exported.image.img_size)
        difference = Difference(folder, f"{form.reader} {version(form.reader)}", largest, scale, notes)
        if difference.within:
            partial.replace(folder)
        return difference
    finally:
        remove(partial)


def _model_card(stored: StoredWeights, exported: Exported, library: str, *, has_head: bool) -> str:
    """README.md of an export.

    Args:
        stored: the weights, in files of a run.
        exported: the model that is written.
        library: the package that reads it.
        has_head: `head.safetensors` is written next to it.

    Returns:
        Markdown, with what the header of the weights says; empty for weights without such a header.
    """
    origin = stored.origin
    if not origin:
        return ""
    image, batch = exported.image, origin["global_batch"]
    rows = {
        "task": origin["task"],
        "data": f"{origin['data']}, {origin['images']:,} images",
        "training": f"{origin['step']:,} steps of {batch:,} images",
        "initial weights": origin["initial_weights"] or "random",
        "weights": stored,
        "images": f"{image.img_size[0]} x {image.img_size[1]} pixels, mean {image.mean}, std {image.std}",
        "written by": ", ".join(f"{name} {version(name)}" for name in ("ds_vit", "torch", "timm", "deepspeed")),
    }
    lines = [f"| {key} | {value} |" for key, value in rows.items()]
    if has_head:
        lines += ["", "`head.safetensors` has what timm's model lacks: the head, and further norms if any."]
    kind = exported.pipeline_tag or ("image-classification" if exported.labels else "image-feature-extraction")
    front = ["---", f"library_name: {library}", f"pipeline_tag: {kind}", "---"]
    return "\n".join([*front, f"# {origin['model']}", "", "| | |", "|---|---|", *lines, ""])


@torch.no_grad()
def _compare(model: Predict, other: Predict, img_size: tuple[int, int]) -> tuple[float, float]:
    """Compare two models, [B, 3, H, W] → logits [B, C], on random images in batches of 1 and 3.

    Returns:
        The largest difference of a logit, and the largest magnitude of a logit of `model`.
    """
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randn(size, 3, *img_size, generator=generator) for size in _BATCHES]
    expected, given = (torch.cat([predict(images) for images in batches]) for predict in (model, other))
    # torch's max keeps a NaN
    largest = float((expected - given).abs().max()) if expected.shape == given.shape else float("inf")
    return largest, float(expected.abs().max())
