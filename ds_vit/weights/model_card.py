"""The model card of an export, in the form of Hugging Face: the task, data, steps and weights a model comes from."""

from __future__ import annotations

from importlib.metadata import version

from ds_vit.tasks.exports import Exported
from ds_vit.weights.files import StoredWeights


def model_card(stored: StoredWeights, exported: Exported, library: str, *, has_head: bool) -> str:
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
