"""The way of the data: sources, sample order, augmentation, mixing, micro-batches, and the model's inputs.

    sources/       where images come from
    sampler.py     which sample stands at which row of which step, and whose row it is
    settings.py    the model's input: size, normalisation, evaluation's crop
    decode.py      an image file's bytes to pixels
    augment/       the transforms, erasing and mixing; each random step is a keyed draw and its application
    loader.py      micro-batches read in worker processes
    device.py      the model's inputs from them, on the device

Nothing here draws from a process's random generator: a micro-batch is a pure function of (source, settings, seed,
step, share), whatever the number of ranks and workers.
"""

from ds_vit.config.augmentation import AugmentConfig, MixConfig
from ds_vit.data.batches import MicroBatch
from ds_vit.data.decode import ImageDecodeError
from ds_vit.data.device import finish_images, finish_keys, finish_targets, finish_valid
from ds_vit.data.loader import Loader, eval_loader, train_loader
from ds_vit.data.sampler import SampleOrder, Share, evaluation_keys, evaluation_rows, num_evaluation_batches
from ds_vit.data.settings import ImageConfig
from ds_vit.data.sources.class_checks import unreadable_classes
from ds_vit.data.sources.datasets import open_source
from ds_vit.data.sources.folders import NoSuchSplit
from ds_vit.data.sources.mixture import mixed
from ds_vit.data.sources.source import Source
from ds_vit.data.sources.subset import hold_out

__all__ = [
    "AugmentConfig",
    "ImageConfig",
    "ImageDecodeError",
    "Loader",
    "MicroBatch",
    "MixConfig",
    "NoSuchSplit",
    "SampleOrder",
    "Share",
    "Source",
    "eval_loader",
    "evaluation_keys",
    "evaluation_rows",
    "finish_images",
    "finish_keys",
    "finish_targets",
    "finish_valid",
    "hold_out",
    "mixed",
    "num_evaluation_batches",
    "open_source",
    "train_loader",
    "unreadable_classes",
]
