"""Against an outside oracle: our losses are those of a plain single-process loop of timm and torch."""

import itertools

import oracle
import pytest
import torch
from curves import assert_same_curve
from oracle_runs import train
from pairwise import cover
from PIL import Image
from torchvision.transforms.functional import normalize, to_tensor

from ds_vit.data import SampleOrder, open_source

RTOL = 1e-5


@pytest.fixture(scope="module")
def cifar(tmp_path_factory, real_images):
    """64 CIFAR-10 images in class folders, random weights in timm's names, and the plain loop's curve."""
    folder = tmp_path_factory.mktemp("oracle")
    oracle.cifar_folder(real_images / "cifar10" / "train.tar", folder, 64, "train")
    oracle.write_weights(folder / "weights.safetensors", num_classes=10)
    return folder, oracle.train_plainly(folder, folder / "weights.safetensors", num_classes=10)


def test_the_oracle_clips_hard_and_learns(cifar):
    """An oracle whose clipping does nothing, or that does not move, would let a wrong factor through."""
    rows = cifar[1]
    assert min(row["grad_norm"] for row in rows) > 5 * oracle.CLIP
    assert rows[-1]["loss"] < 0.98 * rows[0]["loss"]


def layouts():
    """ZeRO stage x ranks x batch whole or in four x recomputation: every pair of choices; the product if asked for."""
    factors = {"stage": (0, 1, 2, 3), "world": (1, 2, 4), "pieces": (1, 4), "mode": ("", "full", "selective")}
    product = [dict(zip(factors, choice, strict=True)) for choice in itertools.product(*factors.values())]
    chosen = cover(product[::-1])  # of two as good the one with more ranks
    for case in product:
        stage, world, pieces, mode = case.values()
        name = f"{stage}-{world}-{'pieces' if pieces > 1 else 'whole'}-{mode}"
        marks = () if case in chosen else pytest.mark.exhaustive
        yield pytest.param(*case.values(), id=name, marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "world", "pieces", "mode"), list(layouts()))
def test_cifar10_equals_plain_timm(ranks, cifar, stage, world, pieces, mode):
    """A wrong average, norm, clip, decay, order or cast in any ZeRO stage, rank count, micro-batch or recomputation."""
    folder, plain = cifar
    words = ["--data-dir", folder, *(["--grad-checkpointing", mode] if mode else [])]
    micro = 64 // world // pieces
    rows = train(ranks, world, folder, stage, *words, micro=micro, accumulation=pieces)
    assert_same_curve(plain, rows, rtol=RTOL)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_digits_equal_plain_timm(ranks, tmp_path, stage):
    """The embedded data set: its pixels, labels and the same machinery."""
    source = open_source("digits", None, "train")
    order = SampleOrder(len(source), 64, seed=42)

    def batch(step):
        indices, _ = order.rows(step, range(64))
        images = [source.image(int(i)).resize((32, 32), Image.Resampling.BICUBIC) for i in indices]
        pixels = torch.stack([normalize(to_tensor(image), [0.5] * 3, [0.5] * 3) for image in images])
        return pixels, torch.tensor([source.target(int(i)) for i in indices])

    oracle.write_weights(tmp_path / "weights.safetensors", num_classes=10)
    batches = [batch(step) for step in range(oracle.STEPS)]
    plain = oracle.train_on(batches, tmp_path / "weights.safetensors", num_classes=10)
    rows = train(ranks, 2, tmp_path, stage, "--dataset", "digits", micro=16, accumulation=2)
    assert_same_curve(plain, rows, rtol=RTOL)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("stage", "block", "world"),
    [
        (0, {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}, 2),
        (1, {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, 2),
        (2, {"bf16": {"enabled": True}}, 1),
        (2, {"bf16": {"enabled": True}}, 4),
        (3, {"bf16": {"enabled": True}}, 2),
    ],
    ids=lambda v: str(v)[:16],
)
def test_bf16_stays_near_fp32(ranks, cifar, stage, block, world):
    """bf16 within 0.3 % of the fp32 curve: a loss quantised to bf16, or norms summed in it, would leave it."""
    folder, plain = cifar
    rows = train(ranks, world, folder, stage, "--data-dir", folder, micro=64 // world, accumulation=1, **block)
    assert_same_curve(plain, rows, rtol=3e-3, keys=("loss",))
    assert oracle.largest_deviation(plain, rows, "loss") > 1e-6  # it did run in bf16


SGD = {"type": "SGD", "params": {"lr": oracle.SGD_LR, "momentum": 0.9, "weight_decay": oracle.WEIGHT_DECAY}}


@pytest.fixture(scope="module")
def sgd_curve(cifar):
    """The plain loop with SGD, which scales with the gradient where Adam does not."""
    folder, _ = cifar
    return oracle.train_plainly(folder, folder / "weights.safetensors", num_classes=10, optimizer="SGD")


def train_sgd(ranks, world, folder, stage, **changes):
    """Our trainer with SGD; --lr has the last word over the JSON."""
    words = ["--data-dir", folder, "--lr", oracle.SGD_LR]
    return train(
        ranks, world, folder, stage, *words, micro=32 // world, accumulation=2, **{"optimizer": SGD, **changes}
    )


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 4])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_sgd_equals_plain_timm(ranks, cifar, sgd_curve, stage, world):
    """A constant factor in the gradient, which AdamW would hide."""
    assert_same_curve(sgd_curve, train_sgd(ranks, world, cifar[0], stage), rtol=RTOL)


@pytest.mark.parametrize(
    "breakage",
    [
        {"gradient_clipping": 0.0},
        {"gradient_clipping": 0.1001},
        {"optimizer": {"type": "SGD", "params": {**SGD["params"], "weight_decay": 0.051}}},
        {"optimizer": {"type": "SGD", "params": {**SGD["params"], "nesterov": True}}},
        {"optimizer": {"type": "AdamW", "params": {"weight_decay": 0.05}}},
    ],
    ids=["no clipping", "clipping off by 0.1 %", "weight decay off by 2 %", "nesterov", "another optimizer"],
)
def test_the_oracle_sees_a_small_mistake(ranks, cifar, sgd_curve, breakage):
    """The comparison must fail when the arithmetic is wrong by little."""
    rows = train_sgd(ranks, 1, cifar[0], 1, **breakage)
    with pytest.raises(AssertionError, match="the curves part"):
        assert_same_curve(sgd_curve, rows, rtol=RTOL)
