"""`ds-vit bench data`: the loader's rate on the user's own images and flags, stage by stage, and its bottleneck.

ds-vit bench data --deepspeed_config ds_configs/zero1_bf16.json --data-dir photos --workers 8 --aa rand-m9-mstd0.5

The stages are timed in this process, image after image, over samples of the run's first epoch (processor time where
nothing waits); a loader with its workers is then timed as a whole. Of several tries of a stage the fastest counts.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import time
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ds_vit.config import parser as flags
from ds_vit.data.augment.crops import MultiCrop
from ds_vit.data.augment.on_device import Crops, CuttingTransform, augmented
from ds_vit.data.augment.steps import RandomResizedCrop, shielded
from ds_vit.data.augment.transforms import TrainTransform
from ds_vit.data.decode import Box, Jpeg, open_image
from ds_vit.data.field import finished, origins
from ds_vit.data.fields import ImageField, Pictures
from ds_vit.data.loader import Loader
from ds_vit.data.reader import Reader
from ds_vit.data.rows import TrainRows
from ds_vit.data.settings import Data
from ds_vit.engine.start import device_of
from ds_vit.launching.process import Process, discover
from ds_vit.tools.bench import seconds_of

if TYPE_CHECKING:
    from ds_vit.training.run import Run

STAGES = ("read", "decode", "augment", "collate", "transfer")
ON_DEVICE = "augment on device"  # with --augment-on device: the way there, and all but erasing and mixing
_TRIES = 3
# Stage → what it is called, and what makes it shorter; a flag that the run has already is left out.
_REMEDIES = {
    "read": ("reading", "a local disk", "ds-vit shards"),
    "decode": ("decoding", "--decode fast", "smaller files: ds-vit shards --resize"),
    "augment": ("augmentation", "--augment-on device", "fewer operations"),
    "collate": ("batching", "a smaller --img-size"),
}


class _Sample(NamedTuple):
    number: int
    key: int
    data: Any  # of a file; pixels where the data set's own code gives them: reading and decoding are one
    name: str


@dataclasses.dataclass(frozen=True)
class DataBench:
    """What was measured, in seconds per image of one process, and what follows.

    Attributes:
        images: how many were read.
        cores: that this process may use.
        workers: of a rank.
        ranks: on this machine.
        seconds: stage → of one process, and of the device where it augments. Reading is from the system's cache where
            the files were read before.
        images_per_second: of one rank's loader as the flags have it, measured as a whole.
        would_give: what to change → images per second that a rank may expect of it.
        bottleneck: in a sentence.
    """

    images: int
    cores: int
    workers: int
    ranks: int
    seconds: dict[str, float]
    images_per_second: float
    would_give: dict[str, float]
    bottleneck: str


def bench_data(words: Sequence[str], images: int, process: Process | None = None) -> DataBench:
    """Time the loader of a run with these flags on its own training images.

    Args:
        words: flags of a training run.
        images: how many to read.
        process: of whose run the loader is; of the launcher's where None.

    Raises:
        UserError: what training with these flags would raise.
    """
    from deepspeed.accelerator import get_accelerator

    from ds_vit.training.inputs import with_workers
    from ds_vit.training.resolve import resolve
    from ds_vit.training.run import World

    process = process or discover()
    run = with_workers(resolve(flags.parse(words), World(process, get_accelerator().device_name() == "cpu")))
    device = device_of(process.local_rank)
    samples = _samples(run.data, images)
    seconds = _stages(run, samples, device)
    ranks = process.local_world_size or 1
    cores = len(os.sched_getaffinity(0))
    rate = _loader_rate(run, len(samples), device)
    number, possible = run.data.workers.number, cores // ranks
    used = ["--decode fast"] if run.config.decode == "fast" else []
    used += ["--augment-on device"] if run.config.augment_on == "device" or device.type == "cpu" else []
    return DataBench(
        images=len(samples),
        cores=cores,
        workers=number,
        ranks=ranks,
        seconds=seconds,
        images_per_second=rate,
        would_give={f"--workers {possible}": rate * possible / max(1, number)} if possible > max(1, number) else {},
        bottleneck=_bottleneck(seconds, rate, number, used),
    )


def _samples(data: Data, images: int) -> list[_Sample]:
    """The first samples of the run, each at most once."""
    source, order = data.train_source, data.order
    found: dict[int, _Sample] = {}
    for step in range(order.steps_per_epoch):
        indices, keys = order.rows(step, range(order.global_batch))
        for index, key in zip(indices.tolist(), keys.tolist(), strict=True):
            if len(found) == images:
                return list(found.values())
            found[index] = _Sample(index, key, source.entry("image", index), source.describe(index))
    return list(found.values())


def _fastest(run: Callable[[], object], images: int, clock: Callable[[], float] = time.process_time) -> float:
    """Seconds per image of the fastest try; of the processor where other programs should not count."""
    return min(seconds_of(run, clock=clock) for _ in range(_TRIES)) / images


def _stages(run: Run, samples: Sequence[_Sample], device: torch.device) -> dict[str, float]:
    source = run.data.train_source
    fields = run.model.task.training_fields
    clock = time.perf_counter  # reading and transfer wait
    read = _fastest(lambda: [source.entry("image", sample.number) for sample in samples], len(samples), clock)
    with shielded():
        decode, both = (_fastest(each, len(samples)) for each in _decode_and_augment(run, samples))
    loader = _loader(run, workers=0)
    batches = list(itertools.islice(loader, max(1, len(samples) // run.share.micro_batch)))
    rows = sum(batch.rows.num_rows for batch in batches)
    whole = _fastest(lambda: list(itertools.islice(loader, len(batches))), rows)

    def transfer() -> None:
        for batch in batches:
            finished(fields, batch, device=device)

    def augment_there() -> None:
        for batch in batches:
            for part in batch.packed.values():
                if isinstance(part, Pictures) and isinstance(part.pixels, Crops):
                    augmented(part.pixels, device)

    augment = max(0.0, both - decode)
    collate = max(0.0, whole - read - decode - augment)
    to_device = _fastest(transfer, rows, clock)
    found = dict(zip(STAGES, (read, decode, augment, collate, to_device), strict=True))
    if run.config.augment_on == "device":
        there = min(_fastest(augment_there, rows, clock), to_device)
        found |= {"transfer": to_device - there, ON_DEVICE: there}
    return found


def _loader(run: Run, workers: int) -> Loader:
    """Of the first data-parallel rank, which reads all fields of a sample, without images of other sizes."""
    data, task = run.data, run.model.task
    rows = TrainRows(data.order, dataclasses.replace(run.share, dp_rank=0), run.config, task.image.img_size)
    reader = Reader(data.train_source, origins(task.training_fields), rows, on_bad_image=run.config.on_bad_image)
    return Loader(reader, range(10**9 // data.order.global_batch * run.share.accumulation), workers)


def _decode_and_augment(run: Run, samples: Sequence[_Sample]) -> tuple[Callable[[], None], Callable[[], None]]:
    """Only decoding what the crop needs, and decoding with augmentation."""
    transform = next(field for field in run.model.task.training_fields if isinstance(field, ImageField)).transform
    size, turn = run.model.task.image.img_size, run.model.task.image.exif_rotation

    def opened(sample: _Sample) -> Any:
        return open_image(sample.data, sample.name, run.config.decode, exif_rotation=turn)

    def box(sample: _Sample) -> Box:
        image = opened(sample)
        drawn = transform.drawn if isinstance(transform, CuttingTransform) else transform
        if not isinstance(drawn, TrainTransform) or not isinstance(drawn.crop, RandomResizedCrop):
            return 0, 0, image.height, image.width
        return drawn.draw(sample.key, (image.height, image.width))[0][0]

    boxes = [box(sample) for sample in samples]

    def decode() -> None:
        for sample, box in zip(samples, boxes, strict=True):
            image = opened(sample)
            if isinstance(transform, MultiCrop):
                transform.decoded(image, transform.draw(sample.key, (image.height, image.width)))
            elif isinstance(transform, CuttingTransform):
                transform.bytes_of(image, box)
            elif isinstance(image, Jpeg):
                image.scaled(box, size) if image.fast else image.crop(box)

    def both() -> None:
        for sample in samples:
            transform(opened(sample), sample.key)

    return decode, both


def _loader_rate(run: Run, images: int, device: torch.device) -> float:
    """Images per second of a rank's loader once its workers run."""
    batches = iter(_loader(run, run.data.workers.number))
    for _ in range(2 * run.data.workers.number + 1):
        next(batches)
    start, seen = time.perf_counter(), 0
    while seen < images:
        batch = next(batches)
        finished(run.model.task.training_fields, batch, device=device)
        seen += batch.rows.num_rows
    rate = seen / (time.perf_counter() - start)
    batches.close()
    return rate


def _bottleneck(seconds: dict[str, float], rate: float, workers: int, used: Collection[str] = ()) -> str:
    of_worker = {stage: seconds[stage] for stage in STAGES[:-1]}
    stage = max(of_worker, key=of_worker.__getitem__)
    share = of_worker[stage] / sum(of_worker.values())
    there = seconds.get(ON_DEVICE, 0.0)
    if there > sum(of_worker.values()) / max(1, workers):
        return f"augmentation on the device is the bottleneck: it can do {1.0 / there:,.0f} images/s"
    if rate * 1.1 * seconds["transfer"] > 1.0:
        return f"the way to the device is the bottleneck: transfer and normalisation take {rate:,.0f} images/s"
    name, *remedies = _REMEDIES[stage]
    remedy = ", or ".join(one for one in remedies if one not in used)
    who = f"--workers {workers}" if workers else "the training process itself (--workers 0)"
    return f"{name} is the bottleneck, {share:.0%} of the loader's time: {who} gives {rate:,.0f} images/s; try {remedy}"


def table(result: DataBench) -> list[tuple[str, ...]]:
    """Header and lines."""
    lines: list[tuple[str, ...]] = [("of one process", "ms per image", "images/s")]
    for stage, seconds in result.seconds.items():
        lines.append((stage, f"{seconds * 1e3:.3f}", f"{1.0 / seconds:,.0f}" if seconds else ""))
    lines.append((f"the loader, --workers {result.workers}", "", f"{result.images_per_second:,.0f}"))
    lines += [(f"with {change}", "", f"about {rate:,.0f}") for change, rate in result.would_give.items()]
    return lines


def title(result: DataBench) -> str:
    """What was measured on what, and the bottleneck."""
    return (
        f"{result.images:,} images, {result.cores} cores, {result.ranks} rank{'s' if result.ranks > 1 else ''} here\n"
        f"{result.bottleneck}"
    )
