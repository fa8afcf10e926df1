"""Images per second of the loader against timm's create_loader, with the same number of workers, and of decoders alone.

    python docs/benchmarks/loader.py [--data DIR] [--workers 2] [--turns 8]

DIR holds imagenet-sample/images.tar (250 ImageNet JPEG files) and cifar10/test.tar. Both sides end in normalised
float32 on the CPU. They take turns, each with its workers alive, what they had read ahead thrown away first; the
fastest turn of each counts, and the quartiles of the ratio turn by turn stand behind it. CPU time is that of the
process and its workers, the mean of all turns, which a busy machine disturbs less; --workers 0 reads in the process.
"""

import argparse
import io
import itertools
import os
import statistics
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

DEIT3 = {"aa": "3a", "color_jitter": 0.3}
RAND = {"aa": "rand-m9-mstd0.5"}
# (what, images, size, flags, images per turn)
ROWS = (
    ("crop 224, flip, colour jitter", "imagenet", 224, {}, 250),
    ("the same with `--decode fast`", "imagenet", 224, {"decode": "fast"}, 250),
    ("rand-m9-mstd0.5 at 224", "imagenet", 224, RAND, 250),
    ("DeiT-III (3a, jitter 0.3) at 32", "cifar10", 32, DEIT3, 4000),
    ("DeiT-III (3a, jitter 0.3) at 224", "cifar10", 224, DEIT3, 500),
)


def unpack(data: Path, folder: Path) -> dict[str, Path]:
    """Folders whose train/ holds class folders; a CIFAR class keeps 300 files."""
    for name, tar_name in (("imagenet", "imagenet-sample/images.tar"), ("cifar10", "cifar10/test.tar")):
        count: dict[str, int] = {}
        with tarfile.open(data / tar_name) as tar:
            for member in tar:
                if not member.isreg():
                    continue
                path = Path(member.name)
                label = path.stem.split("_")[0] if name == "imagenet" else path.parent.name
                count[label] = count.get(label, 0) + 1
                if count[label] <= 300:
                    target = folder / name / "train" / label / path.name
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_bytes(tar.extractfile(member).read())
    return {name: folder / name for name in ("imagenet", "cifar10")}


def timms(folder: Path, size: int, flags: dict, batch: int, workers: int) -> Iterator[int]:
    """Batch after batch of timm's loader, as its train.py makes it; how many images each had."""
    import torch
    from timm.data import create_dataset, create_loader

    flags = {k: v for k, v in flags.items() if k != "decode"}
    loader = create_loader(
        create_dataset("", root=str(folder), split="train"),
        (3, size, size),
        batch,
        is_training=True,
        auto_augment=flags.pop("aa", None),
        interpolation="random",
        num_workers=workers,
        persistent_workers=workers > 0,
        device=torch.device("cpu"),
        **flags,
    )
    while True:
        for images, _ in loader:
            yield len(images)


def ours(folder: Path, size: int, flags: dict, batch: int, workers: int) -> Iterator[int]:
    """Batch after batch of our loader, finished on the CPU; how many images each had."""
    from ds_vit.config.augmentation import AugmentConfig
    from ds_vit.data.field import finished
    from ds_vit.data.fields import ImageField, LabelField
    from ds_vit.data.loader import Loader
    from ds_vit.data.reader import Reader
    from ds_vit.data.rows import TrainRows
    from ds_vit.data.sampler import SampleOrder, Share
    from ds_vit.data.settings import ImageConfig
    from ds_vit.data.sources.datasets import open_source

    source = open_source("", str(folder), "train")
    images = ImageField("images", ImageConfig((size, size)), AugmentConfig(**flags))
    rows = TrainRows(SampleOrder(len(source), batch, seed=0), Share(0, 1, batch))
    reader = Reader(source, [images, LabelField("targets", source.num_classes)], rows)
    for micro_batch in Loader(reader, range(10**6), workers):
        yield len(finished([images], micro_batch, device="cpu")["images"])


class Side:
    """A loader with its worker processes alive."""

    def __init__(self, make: Callable[..., Iterator[int]], *settings: object) -> None:
        others = set(psutil.Process().children())
        self.batches = make(*settings)
        next(self.batches)
        self._workers = set(psutil.Process().children()) - others

    def _cpu_seconds(self) -> float:
        times = [process.cpu_times() for process in (psutil.Process(), *self._workers)]
        return sum(t.user + t.system for t in times)

    def turn(self, images: int, read_ahead: int) -> tuple[float, float]:
        """Over the next `images` ones, after those that were waiting: seconds per image, and CPU seconds per image."""
        for _ in range(read_ahead):
            next(self.batches)
        cpu, start, seen = self._cpu_seconds(), time.perf_counter(), 0
        while seen < images:
            seen += next(self.batches)
        return (time.perf_counter() - start) / seen, (self._cpu_seconds() - cpu) / seen


def decoders() -> dict[str, Callable[[bytes], object]]:
    """The libraries that are installed here: bytes to uint8 pixels of the whole image."""
    import torch
    from PIL import Image

    found: dict[str, Callable[[bytes], object]] = {"Pillow": lambda d: Image.open(io.BytesIO(d)).convert("RGB")}

    def tensor(data: bytes) -> torch.Tensor:
        return torch.frombuffer(bytearray(data), dtype=torch.uint8)

    try:
        import simplejpeg

        found["simplejpeg"] = lambda d: simplejpeg.decode_jpeg(d, "RGB")
        found["simplejpeg, fast"] = lambda d: simplejpeg.decode_jpeg(d, "RGB", fastdct=True, fastupsample=True)
    except ImportError:
        pass
    from torchvision.io import ImageReadMode, decode_jpeg

    found["torchvision"] = lambda d: decode_jpeg(tensor(d), mode=ImageReadMode.RGB).permute(1, 2, 0).numpy()
    try:
        from torchcodec.decoders import decode_jpeg as of_torchcodec

        found["torchcodec"] = lambda d: of_torchcodec(tensor(d)).permute(1, 2, 0).numpy()
    except (ImportError, RuntimeError, OSError):
        pass
    return found


def decoding(folders: dict[str, Path], turns: int) -> None:
    """Print the decoders' milliseconds per image, and how many images differ from Pillow's."""
    import numpy as np

    print("| decoder, ms per image (images unlike Pillow's) |", " | ".join(folders), "|\n|---|---|---|")
    files = {n: [p.read_bytes() for p in sorted((f / "train").rglob("*.*"))[:250]] for n, f in folders.items()}
    best: dict[tuple[str, str], float] = {}
    for _, (name, run), (kind, datas) in itertools.product(range(turns), decoders().items(), files.items()):
        start = time.perf_counter()
        for data in datas:
            run(data)
        best[name, kind] = min(best.get((name, kind), 1e9), (time.perf_counter() - start) / len(datas))
    for name, run in decoders().items():
        cells = []
        for kind, datas in files.items():
            pillow = decoders()["Pillow"]
            unlike = sum(not np.array_equal(np.asarray(run(d)), np.asarray(pillow(d))) for d in datas)
            cells.append(f"{best[name, kind] * 1e3:.3f} ({unlike})")
        print(f"| {name} | {' | '.join(cells)} |")


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = Path(os.environ.get("DS_VIT_TEST_DATA", ROOT.parent / "shared" / "data"))
    parser.add_argument("--data", type=Path, default=default, metavar="DIR", help="[DS_VIT_TEST_DATA]")
    parser.add_argument("--workers", type=int, default=2, help="of each side [%(default)s]")
    parser.add_argument("--turns", type=int, default=8, help="of each side [%(default)s]")
    parser.add_argument("--only", nargs="+", type=int, metavar="N", help="rows of the second table, from 0")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folders = unpack(arguments.data, Path(temporary))
        if not arguments.only:
            decoding(folders, arguments.turns)
            print()
        print("| fastest turn | timm, images/s | ds_vit, images/s | ratio | quartiles by turn | ratio of CPU time |")
        print("|---|---|---|---|---|---|")
        for number, (what, kind, size, flags, images) in enumerate(ROWS):
            if arguments.only and number not in arguments.only:
                continue
            batch = 25 if images <= 500 else 100
            sides = [Side(make, folders[kind], size, flags, batch, arguments.workers) for make in (timms, ours)]
            read_ahead = 2 * arguments.workers + 2
            turns = [[s.turn(images, read_ahead) for s in sides] for _ in range(arguments.turns)]
            wall, our_wall = (min(seconds for seconds, _ in side) for side in zip(*turns, strict=True))
            cpu, our_cpu = (statistics.mean(cpu for _, cpu in side) for side in zip(*turns, strict=True))
            low, _, high = statistics.quantiles((a[0] / b[0] for a, b in turns), n=4)
            rates = f"{1 / wall:.1f} | {1 / our_wall:.1f} | {wall / our_wall:.2f} | {low:.2f} to {high:.2f}"
            print(f"| {what} | {rates} | {cpu / our_cpu:.2f} ({cpu * 1e3:.2f} : {our_cpu * 1e3:.2f} ms) |", flush=True)
            for side in sides:
                side.batches.close()


if __name__ == "__main__":
    main()
