"""The way of the data: sources, sample order, augmentation, mixing, micro-batches, and the model's inputs.

    source.py, sources.py, folders.py    where images come from
    order.py                             which sample stands at which row of which step, and whose row it is
    settings.py                          the flags of augmentation and mixing, checked
    augment.py, steps.py, policies.py    the transforms; each random step is a keyed draw and its application
    erasing.py, mixing.py                boxes and lambdas drawn with the sample, applied to the batch on its device
    batches.py, finish.py                micro-batches read in worker processes, and the model's inputs from them

Nothing here draws from a process's random generator: a micro-batch is a pure function of (source, settings, seed,
step, share), whatever the number of ranks and workers.
"""

from ds_vit.data.batches import Loader, MicroBatch, eval_loader, train_loader
from ds_vit.data.finish import finish_images, finish_keys, finish_targets, finish_valid
from ds_vit.data.order import SampleOrder, Share, evaluation_rows, num_evaluation_batches
from ds_vit.data.settings import AugmentConfig, ImageConfig, MixConfig
from ds_vit.data.source import ImageDecodeError, Source
from ds_vit.data.sources import open_source

__all__ = [
    "AugmentConfig",
    "ImageConfig",
    "ImageDecodeError",
    "Loader",
    "MicroBatch",
    "MixConfig",
    "SampleOrder",
    "Share",
    "Source",
    "eval_loader",
    "evaluation_rows",
    "finish_images",
    "finish_keys",
    "finish_targets",
    "finish_valid",
    "num_evaluation_batches",
    "open_source",
    "train_loader",
]
