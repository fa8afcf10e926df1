"""ds_vit from Python: the same run as the command line's.

from ds_vit.api import train
summary = train(deepspeed_config="ds_configs/cpu_zero1_fp32.json", dataset="digits", model="vit_tiny_patch16_224",
                img_size=16, model_kwargs={"patch_size": 4}, epochs=1)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ds_vit import config as flags
from ds_vit.launching.process import discover

if TYPE_CHECKING:
    from ds_vit.tools.predict import Predictions


def train(**settings: Any) -> dict[str, Any]:
    """Train as `launch/train.py` does, with its flags as keyword arguments (underscores for dashes).

    Every rank calls it; a process group that exists already is used and left alone.

    Returns:
        What summary.json holds, on every rank.

    Raises:
        UserError: an unknown setting (the nearest is named), or anything that the command line would refuse.
    """
    from ds_vit.train import run

    config, explicit = flags.from_values(settings)
    return run(config, explicit, discover())


def evaluate(source: str, **settings: Any) -> dict[str, Any]:
    """Exact accuracy of a run's weights, a checkpoint or a file, as `launch/eval.py`; every rank calls it.

    Args:
        source: a run's output folder, a checkpoint folder, or a file.
        settings: `weights`, `checkpoint` and `output`, and flags that have the last word over the run's config.yaml.

    Returns:
        What eval.json holds, on every rank.

    Raises:
        UserError: anything that the command line would refuse.
    """
    from ds_vit.tools.evaluate import evaluate_weights

    return evaluate_weights(source, **settings)


def predict(source: str, images: Sequence[str], **settings: Any) -> Predictions:
    """The most probable classes of images, with names and probabilities, as `ds-vit predict`.

    Args:
        source: a run's output folder, a checkpoint folder, or a file.
        images: files, and folders of them.
        settings: `top_k`, `weights`, `checkpoint`, `labels`, `batch_size`, `workers` and `device` as of
            `ds_vit.tools.predict.predict`, and flags of the model and its pixels.

    Returns:
        `Predictions`: each image with its classes, and the images that could not be read.

    Raises:
        UserError: anything that the command line would refuse.
    """
    from ds_vit.tools import predict as tool

    return tool.predict(source, images, **settings)


def export(source: str, to: str, **settings: Any) -> Any:
    """Write weights for another tool, as `ds-vit export`.

    Args:
        source: a run's output folder, a checkpoint folder, or a file.
        to: "timm", "hf" or "onnx".
        settings: `weights`, `checkpoint`, `output` and `labels`, and flags of the model and its pixels.

    Returns:
        An `exchange.Difference`: the folder, and the largest difference of logits to the source. Where it is not
        `within` the tolerance, nothing is kept.

    Raises:
        UserError: anything that the command line would refuse.
    """
    from ds_vit.interop import export as write

    return write(source, to, **settings)
