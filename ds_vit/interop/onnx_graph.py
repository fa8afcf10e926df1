"""ONNX: model.onnx with a batch of any size, and timm's config.json beside it for how the images are prepared."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch

from ds_vit.interop.check import Predict
from ds_vit.interop.source import Exported
from ds_vit.interop.timm_folder import write_config
from ds_vit.models.weight_files import names_as_metadata


def reader() -> str:
    """Which tool loads it back."""
    import onnxruntime

    return f"onnxruntime {onnxruntime.__version__}"


def refuse(exported: Exported) -> None:
    """torch exports every model here."""


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch's exporter prints its progress, and warns of what it then does right."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "torch.export")]
    levels = [logger.level for logger in loggers]
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)


def write(exported: Exported, folder: Path) -> None:
    """Write model.onnx (input `images` float32 [batch, 3, H, W], output `logits`) and config.json.

    Its metadata has `class_names`, a JSON list, where the names are known. Weights above ONNX's limit of 2 GB go into
    model.onnx.data beside it.
    """
    images = torch.zeros(2, 3, *exported.img_size)
    large = sum(tensor.numel() * tensor.element_size() for tensor in exported.model.state_dict().values()) > 1.5e9
    with _quiet():
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
    write_config(exported, folder / "config.json")


def load(folder: Path) -> Predict:
    """The graph as onnxruntime runs it on the CPU."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])
