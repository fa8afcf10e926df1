"""Data: sources, sample order, augmentation, mixing, micro-batches, and the model's inputs.

    sources/       where images come from
    sampler.py     which sample is at which row of which step, and on which rank
    settings.py    the model's input: size, normalisation, evaluation's crop; several crops of an image
    decode.py      an image file's bytes to pixels
    text.py        a caption to token ids
    augment/       the transforms, erasing and mixing; each random step is a keyed draw and its application
    batches.py     what a micro-batch holds
    loader.py      micro-batches read in worker processes
    device.py      the model's inputs from them, on the device

Nothing here draws from a process's random generator: a micro-batch is a pure function of (source, settings, seed,
step, share), whatever the number of ranks and workers.
"""

from ds_vit.config.augmentation import AugmentConfig, MixConfig
from ds_vit.data.batches import MicroBatch
from ds_vit.data.decode import ImageDecodeError
from ds_vit.data.device import (
    finish_images,
    finish_keys,
    finish_local_images,
    finish_targets,
    finish_texts,
    finish_valid,
)
from ds_vit.data.loader import Loader, eval_loader, train_loader
from ds_vit.data.sampler import SampleOrder, Share, evaluation_keys, evaluation_rows, num_evaluation_batches
from ds_vit.data.settings import CropConfig, ImageConfig
from ds_vit.data.sources.captions import CaptionKeys
from ds_vit.data.sources.combined import across_classes, hold_out, mixed
from ds_vit.data.sources.datasets import open_source
from ds_vit.data.sources.source import NoSuchSplit, Source, unreadable_classes
from ds_vit.data.text import Tokenizer, build_tokenizer, default_context_length, describe_cut_captions

__all__ = [
    "AugmentConfig",
    "CaptionKeys",
    "CropConfig",
    "ImageConfig",
    "ImageDecodeError",
    "Loader",
    "MicroBatch",
    "MixConfig",
    "NoSuchSplit",
    "SampleOrder",
    "Share",
    "Source",
    "Tokenizer",
    "across_classes",
    "build_tokenizer",
    "default_context_length",
    "describe_cut_captions",
    "eval_loader",
    "evaluation_keys",
    "evaluation_rows",
    "finish_images",
    "finish_keys",
    "finish_local_images",
    "finish_targets",
    "finish_texts",
    "finish_valid",
    "hold_out",
    "mixed",
    "num_evaluation_batches",
    "open_source",
    "train_loader",
    "unreadable_classes",
]
