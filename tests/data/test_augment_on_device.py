"""--augment-on device: the draws of the CPU path, its pixels within stated bounds, in every layout the same bits."""

from __future__ import annotations

import itertools
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from micro_batches import load
from picture_folders import smooth_photo, write_photos
from PIL import Image
from timm.data.auto_augment import NAME_TO_OP, AugmentOp, AutoAugment
from torchvision.transforms import InterpolationMode
from torchvision.transforms.functional import pil_modes_mapping

from ds_vit import randomness
from ds_vit.config.augmentation import AugmentConfig, MixConfig
from ds_vit.config.parser import parse
from ds_vit.data.augment import on_device
from ds_vit.data.augment.on_device import _FAMILIES, _FLIPS, Crop, Cut, CuttingTransform
from ds_vit.data.augment.steps import Operation, apply, as_pixels, draw, recording
from ds_vit.data.augment.transforms import train_transform
from ds_vit.data.fields import ImageField, LabelField
from ds_vit.data.sampler import Share
from ds_vit.data.settings import CropConfig, ImageConfig
from ds_vit.data.sources.datasets import open_source
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.planner.counting import most_allocated
from ds_vit.tasks.dino.fields import crop_fields

SIZE = (40, 52)
GPU = pytest.param(
    "cuda",
    marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
)
CONFIGS = {
    "timm's defaults": {},
    "RandAugment": {"aa": "rand-m9-mstd0.5-inc1", "vflip": 0.3},
    "3-Augment": {"aa": "3a", "color_jitter": 0.3, "train_interpolation": "bicubic"},
    "AutoAugment": {"aa": "original-mstd0.5", "train_interpolation": "bilinear"},
    "SimCLR": {"color_jitter": (0.4, 0.4, 0.2, 0.1), "color_jitter_prob": 0.8, "grayscale_prob": 0.2,
               "gaussian_blur_prob": 0.5},
}  # fmt: skip
# Grey levels by which an operation may differ from Pillow's: of any pixel, and of the mean over an image.
EXACT = (0, 0.0)
BOUNDS = {
    **dict.fromkeys((*_FLIPS, *_FAMILIES), EXACT),
    "AutoContrast": (1, 0.2),  # float32 for float64
    **dict.fromkeys(("Rotate", "ShearX", "ShearY", "TranslateX", "TranslateY"), (1, 0.2)),
    **dict.fromkeys(("TranslateXRel", "TranslateYRel"), (1, 0.2)),
    "GaussianBlur": (2, 0.2),
    "KernelBlur": (1, 0.1),
    "Hue": (16, 2.0),  # Pillow rounds hue and saturation to one of 256
}
CROP_BOUND = (8, 0.5)  # Pillow 13 resizes some tall crops along the columns first
PIPELINE_BOUND = 1.0  # grey levels of the mean over all images: a contrast may turn 1 into 2, a threshold into 255


def _on_device(cuts: list[Cut], device: str = "cpu", size: tuple[int, int] = SIZE) -> torch.Tensor:
    memory = torch.empty(sum(cut.data.size for cut in cuts), dtype=torch.uint8)
    return on_device.augmented(on_device.packed(cuts, size, memory), torch.device(device)).cpu()


def _whole(image: Image.Image, operation: Operation) -> Cut:
    pixels = np.array(image)
    box = (0, 0, image.height, image.width)
    return Cut(pixels.reshape(-1), Crop(pixels.size, box, "bilinear", [operation]))


def _within(found: torch.Tensor, expected: torch.Tensor, bound: tuple[int, float]) -> None:
    apart = (found - expected).abs()
    assert apart.max() <= bound[0], apart.amax(dim=(1, 2, 3))
    assert apart.mean(dim=(1, 2, 3)).max() <= bound[1], apart.mean(dim=(1, 2, 3))


# Operation by operation


def _cases() -> dict[str, list[tuple[Image.Image, Operation]]]:
    """By the name of an operation: images, and the operation as it is drawn for them."""
    cases = {
        name: [(smooth_photo(seed=seed), Operation(name, arguments)) for seed in range(4) for arguments in values]
        for name, values in {
            **{name: [()] for name in ("hflip", "vflip")},
            "Hue": [(0.1,), (-0.3,), (0.5,)],
            "KernelBlur": [(0.1, 23), (0.9, 23), (2.0, 23)],
        }.items()
    }
    hparams = {"translate_const": 14, "img_mean": (124, 116, 104)}
    for name, magnitude in itertools.product(NAME_TO_OP, (0, 4, 7, 10)):
        policy = recording(AutoAugment([[AugmentOp(name, prob=1.0, magnitude=magnitude, hparams=dict(hparams))]]))
        for number in range(6):
            (operation,) = draw(policy, randomness.mix(number, magnitude))
            photo = smooth_photo(seed=number).point(lambda value: 20 + value * 3 // 4)
            cases.setdefault(name, []).append((photo, operation))
    return cases


CASES = _cases()


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("name", CASES)
def test_an_operation_is_within_its_bound(name, device):
    """Would catch another rounding, filter, sign, centre or fill colour than Pillow's."""
    cuts = [_whole(image, operation) for image, operation in CASES[name]]
    expected = torch.stack([as_pixels(apply(image, [operation])) for image, operation in CASES[name]]).float()
    _within(_on_device(cuts, device), expected, BOUNDS[CASES[name][0][1].name])
    originals = torch.stack([as_pixels(image) for image, _ in CASES[name]])
    assert (expected - originals).abs().mean() > 0.05  # else nothing was compared


@pytest.fixture(scope="module")
def photos(real_images) -> list[Image.Image]:
    """100 images of CIFAR-10 and 100 of ImageNet, of one size."""
    found = []
    for archive in ("cifar10/train.tar", "imagenet-sample/images.tar"):
        with tarfile.open(real_images / archive) as tar:
            members = itertools.islice((member for member in tar if member.isreg()), 100)
            found += [Image.open(tar.extractfile(member)).convert("RGB").resize(SIZE[::-1]) for member in members]
    return found


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", sorted({cases[0][1].name for cases in CASES.values()}))
def test_an_operation_is_within_its_bound_on_real_images(photos, name):
    """Would catch what smooth photos do not show: areas of one colour, edges of one pixel, few values."""
    drawn = [operation for cases in CASES.values() for _, operation in cases if operation.name == name]
    pairs = list(zip(photos, itertools.cycle(drawn), strict=False))
    found = _on_device([_whole(image, operation) for image, operation in pairs])
    expected = torch.stack([as_pixels(apply(image, [operation])) for image, operation in pairs]).float()
    _within(found, expected, BOUNDS[name])


def test_an_image_does_not_depend_on_the_others(monkeypatch):
    """Would catch pixels that change with the micro-batch, and a lot of crops that is lost or out of order."""
    augment = AugmentConfig(aa="rand-m9-mstd0.5-inc1", gaussian_blur_prob=0.5)
    cutting = CuttingTransform(train_transform(ImageConfig(SIZE), augment), augment)
    cuts = [cutting(smooth_photo(20 + 31 * (n % 5), 300 - 29 * (n % 7), n), randomness.mix(n)) for n in range(20)]
    together = _on_device(cuts)
    assert torch.equal(torch.cat([_on_device(cuts[n : n + 3]) for n in range(0, 20, 3)]), together)
    monkeypatch.setattr(on_device, "_AT_ONCE", 300_000)
    assert torch.equal(_on_device(cuts), together)


@pytest.mark.parametrize("size", [96, 224, 384])
def test_the_planned_memory_is_what_photos_take(size):
    """Would catch memory that --auto-batch does not know of, and a plan that is far above it."""
    photo, planned, taken = Image.new("RGB", (500, 375)), on_device.bytes_of_photo((size, size)), []
    for flags in CONFIGS.values():
        augment = AugmentConfig(**flags)
        cutting = CuttingTransform(train_transform(ImageConfig((size, size)), augment), augment)
        cuts = [cutting(photo, randomness.mix(key)) for key in range(32)]
        memory = torch.empty(sum(cut.data.size for cut in cuts), dtype=torch.uint8)
        crops = on_device.packed(cuts, (size, size), memory)
        taken.append(most_allocated(lambda crops=crops: on_device.augmented(crops, torch.device("meta"))) / 32)
    assert planned / 2 < max(taken) < planned, taken


def test_every_operation_has_a_function_and_a_bound():
    """Would catch a name that is drawn and cannot be applied, and one that no test looks at."""
    assert {operation.name for cases in CASES.values() for _, operation in cases} == set(BOUNDS)


@pytest.mark.parametrize("device", ["cpu", GPU])
@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
def test_crops_are_within_their_bound(interpolation, device):
    """Would catch a crop beside its box, a resize without antialiasing, and an image of a pixel that ends the run."""
    augment = AugmentConfig(train_interpolation=interpolation, hflip=0.0, color_jitter=0.0)
    transform = train_transform(ImageConfig(SIZE), augment)
    photos = [smooth_photo(30 + 17 * (n % 9), 40 + 29 * (n % 7), n) for n in range(24)] + [smooth_photo(1, 1)] * 12
    keys = [randomness.mix(n) for n in range(36)]
    cuts = [CuttingTransform(transform, augment)(photo, key) for photo, key in zip(photos, keys, strict=True)]
    assert any(not cut.data.size for cut in cuts)  # which Pillow makes black
    expected = torch.stack([transform(photo, key) for photo, key in zip(photos, keys, strict=True)]).float()
    _within(_on_device(cuts, device), expected, CROP_BOUND)


# All of it


@pytest.mark.parametrize("config", CONFIGS)
def test_a_worker_hands_over_what_the_cpu_would_draw(config):
    """Would catch any other draw: Pillow, given what is handed over, makes the CPU path's pixels to the bit."""
    augment = AugmentConfig(**CONFIGS[config])
    transform = train_transform(ImageConfig(SIZE), augment)
    cutting = CuttingTransform(transform, augment)
    changed = 0
    for number in range(40):
        photo, key = smooth_photo(60 + number, 90, number), randomness.mix(number)
        cut = cutting(photo, key)
        _, _, height, width = cut.crop.box
        resample = pil_modes_mapping[InterpolationMode(cut.crop.interpolation)]
        image = Image.fromarray(cut.data.reshape(height, width, 3)).resize(SIZE[::-1], resample)
        assert torch.equal(as_pixels(apply(image, cut.crop.operations)), transform(photo, key)), number
        changed += bool(cut.crop.operations)
    assert changed > 15


IMAGE = ImageConfig(img_size=(16, 20))
AUGMENT = {"aa": "rand-m9-mstd0.5-inc1", "vflip": 0.3, "reprob": 0.5, "recount": 2}
MIX = MixConfig(mixup=0.8, cutmix=1.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """29 images of different sizes as PNG and JPEG, in noise enough that none is like another; one is cut short."""
    root = tmp_path_factory.mktemp("images")
    path = write_photos(root, 29, "png", "jpg")
    path.write_bytes(path.read_bytes()[:200])
    return root


@pytest.mark.parametrize("crops", [None, CropConfig(16, num_local=3)], ids=["an image", "crops"])
@pytest.mark.parametrize("device", ["cpu", GPU])
def test_all_of_it_is_within_its_bound(folder, device, crops):
    """Would catch erasing, mixing or a replaced image on other rows than on the CPU."""
    source, share = open_source("", str(folder), "train"), Share(0, 1, 12)
    found = []
    for on in ("cpu", "device"):
        augment, mix = AugmentConfig(**({} if crops else AUGMENT), augment_on=on), MixConfig() if crops else MIX
        fields = [*(crop_fields(IMAGE, crops, augment) if crops else [ImageField("images", IMAGE, augment)])]
        fields.append(LabelField("targets", 3, mix=mix))
        options = {"fields": fields, "image": IMAGE, "mix": mix, "on_bad_image": "skip", "pin_memory": device == "cuda"}
        batches = load(source, share, 0, 4, **options)
        found.append((batches.tensors(device if on == "device" else "cpu"), batches.num_skipped))
    (here, skipped), (there, skipped_there) = found
    assert torch.equal(here.pop("targets"), there["targets"])
    assert skipped == skipped_there > 0
    for name in [name for name in here if "images" in name]:
        apart = (here[name] - there[name]).abs() * 255 * torch.tensor(IMAGE.std)[:, None, None]
        assert 0.0 < apart.mean() <= PIPELINE_BOUND
        assert apart.mean(dim=(-3, -2, -1)).max() <= 8 * PIPELINE_BOUND


@pytest.mark.parametrize(
    ("flag", "reason"),
    [
        ("--aa augmix-m5", "the device supports policies of rand, 3a, original and v0"),
        ("--train-interpolation lanczos", "the device supports bilinear, bicubic and random"),
        ("--train-crop-mode rkrc", "the device supports rrc"),
    ],
)
def test_what_the_device_cannot_do_is_refused(flag, reason):
    """Would catch a flag that is passed over on the device."""
    with pytest.raises(UserError, match=f"--augment-on device and {flag} are both given: {reason}; keep one"):
        parse(["--deepspeed_config", "x.json", "--augment-on", "device", *flag.split()])
