"""JPEG files decoded on the device that trains, against decoding and augmentation in worker processes.

    python docs/benchmarks/decode_on_device.py --data-dir photos [--device cuda] [--workers 8] [--img-size 224]

Three ways take turns, each with its workers alive and what they had read ahead thrown away first: all in the workers,
augmentation on the device, and decoding on the device too (--augment-on device --decode fast). What a way ends in is
normalised float32 on the device. The fastest turn of each counts; processor time is that of this process and its
workers, mean of all turns. The second table has the device's part, for files in memory: decoding only, and with
augmentation; and a process of simplejpeg's. The third compares the ways with a training step of --models in bf16: the
slowest part limits the run. It takes ds-vit[jpeg]; --device cpu shows that it runs, and says nothing about a GPU.
"""

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import timm
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent))
from loader import Side  # next to this file
from torchvision.transforms.functional import pil_to_tensor

from ds_vit.config.augmentation import AugmentConfig
from ds_vit.data.decode import File, Jpeg, decode_on, open_image, require_fast
from ds_vit.data.field import finished
from ds_vit.data.fields import ImageField
from ds_vit.data.loader import Loader
from ds_vit.data.reader import Reader
from ds_vit.data.rows import TrainRows
from ds_vit.data.sampler import SampleOrder, Share
from ds_vit.data.settings import ImageConfig
from ds_vit.data.sources.datasets import open_source
from ds_vit.data.sources.source import Source

WAYS = {
    "all in the workers": {},
    "augmentation on the device": {"augment_on": "device"},
    "decoding on the device too": {"augment_on": "device", "decode": "fast"},
}


def loaded(source: Source, flags: dict, words: argparse.Namespace, workers: int) -> tuple[Loader, Callable]:
    """Micro-batches, and what finishes one on the device."""
    device = torch.device(words.device)
    images = ImageField("images", ImageConfig((words.img_size, words.img_size)), AugmentConfig(aa=words.aa, **flags))
    rows = TrainRows(SampleOrder(len(source), words.batch, seed=0), Share(0, 1, words.batch))
    loader = Loader(Reader(source, [images], rows), range(10**6), workers, pin_memory=device.type == "cuda")
    return loader, lambda batch: finished([images], batch, device=device)["images"]


def batches(source: Source, flags: dict, words: argparse.Namespace) -> Iterator[int]:
    """Batch after batch, finished on the device; how many images each had."""
    loader, finish = loaded(source, flags, words, words.workers)
    for batch in loader:
        images = finish(batch)
        if words.device == "cuda":
            torch.cuda.synchronize()
        yield len(images)


def fastest(run: Callable[[], object], turns: int, device: torch.device) -> float:
    """Seconds of the fastest of several calls."""
    seconds = []
    for _ in range(turns + 1):  # the first starts the decoder
        start = time.perf_counter()
        run()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        seconds.append(time.perf_counter() - start)
    return min(seconds[1:])


def step_rate(name: str, words: argparse.Namespace) -> float:
    """Images per second of a training step of timm's model."""
    device = torch.device(words.device)
    model = timm.create_model(name, img_size=words.img_size, num_classes=1000).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    images = torch.randn(words.batch, 3, words.img_size, words.img_size, device=device)
    targets = torch.arange(words.batch, device=device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(images), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return words.batch / fastest(step, words.turns, device)


def limits(rates: dict[str, float], both: float, words: argparse.Namespace) -> None:
    """Print which part limits a run of each model, by way of loading."""
    print(f"\n| {words.device}, batches of {words.batch} | step, images/s | all in the workers | on the device |")
    print("|---|---|---|---|")
    here, _, there = rates.values()
    for name in words.models:
        step = step_rate(name, words)
        loading = "loader and transfer" if here < step else "step"
        parts = {"step": step, "decoding and augmentation": both, "loader and transfer": there}
        print(f"| {name} | {step:,.0f} | the {loading} limits it | the {min(parts, key=parts.__getitem__)} limits it |")


def decoding(source: Source, words: argparse.Namespace) -> float:
    """Print what the device's part gives, and how far its pixels are from Pillow's; gives decoding with augmentation.

    It is in images per second.
    """
    device, images, files = torch.device(words.device), [], []
    for number in range(min(words.batch, len(source))):
        name = source.describe(number)
        image = open_image(source.encoded(number), name, "fast")
        handed_over = image.for_another_decoder() if isinstance(image, Jpeg) else None
        if handed_over is not None:
            images.append(image)
            memory = torch.frombuffer(bytearray(handed_over[0]), dtype=torch.uint8)
            files.append(File(memory, name, (image.height, image.width)))
    there = len(files) / fastest(lambda: list(decode_on(device, files)), words.turns, device)
    loader, finish = loaded(source, WAYS["decoding on the device too"], words, workers=0)
    batch = next(iter(loader))
    both = batch.rows.num_rows / fastest(lambda: finish(batch), words.turns, device)
    here = len(files) / fastest(lambda: [image.image() for image in images], words.turns, torch.device("cpu"))
    apart = [
        (pixels.cpu().float() - pil_to_tensor(image.image()).float()).abs().mean().item()
        for pixels, image in zip(itertools.chain.from_iterable(decode_on(device, files)), images, strict=True)
    ]
    print(f"\n| decoding alone, {len(files)} files at once | images/s |\n|---|---|")
    print(f"| torchcodec on {device} | {there:,.0f} |\n| simplejpeg, one process | {here:,.0f} |")
    print(f"| decoding and augmentation on {device}, {batch.rows.num_rows} files | {both:,.0f} |")
    print(f"\nThe device's pixels are {statistics.mean(apart):.2f} grey levels from Pillow's on average.")
    return both


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", required=True, metavar="DIR", help="with train/, of JPEG files")
    parser.add_argument("--device", default="cuda", help="[%(default)s]")
    parser.add_argument("--workers", type=int, default=8, help="[%(default)s]")
    parser.add_argument("--img-size", type=int, default=224, help="[%(default)s]")
    parser.add_argument("--aa", default="rand-m9-mstd0.5", help="[%(default)s]")
    parser.add_argument("--batch", type=int, default=128, help="[%(default)s]")
    parser.add_argument("--images", type=int, default=4096, help="a turn [%(default)s]")
    parser.add_argument("--turns", type=int, default=5, help="[%(default)s]")
    models = ["vit_base_patch16_224", "vit_large_patch16_224"]
    parser.add_argument("--models", nargs="+", default=models, help="timm's, whose steps are compared [%(default)s]")
    words = parser.parse_args()
    require_fast(on_device=True)
    source = open_source("", words.data_dir, "train")
    sides = {name: Side(batches, source, flags, words) for name, flags in WAYS.items()}
    ahead = 2 * words.workers + 2
    turns = [[side.turn(words.images, ahead) for side in sides.values()] for _ in range(words.turns)]
    what = f"{words.workers} workers, {words.device}, --aa {words.aa} at {words.img_size}"
    print(f"| {what} | images/s | processor, ms per image |")
    print("|---|---|---|")
    rates = {}
    for name, of_side in zip(sides, zip(*turns, strict=True), strict=True):
        rates[name], cpu = 1 / min(wall for wall, _ in of_side), statistics.mean(cpu for _, cpu in of_side)
        print(f"| {name} | {rates[name]:,.0f} | {cpu * 1e3:.2f} |")
    for side in sides.values():
        side.batches.close()
    limits(rates, decoding(source, words), words)


if __name__ == "__main__":
    main()
