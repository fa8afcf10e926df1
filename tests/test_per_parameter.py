"""LAMB, LARS, layer-wise decay and the moving average are timm's, in every layout."""

import json
from pathlib import Path

import oracle
import per_parameter as timm_side
import pytest
import torch
from curves import assert_same_curve, train_in
from safetensors.torch import load_file

ROOT = Path(__file__).parents[1]
LOSS_RTOL, WEIGHT_RTOL = 1e-5, 1e-4
NUM_IMAGES = 32
LAYOUTS = [
    (pp, dp, tp, stage)
    for pp in (1, 2, 4)
    for dp in (1, 2, 4)
    for tp in (1, 2)
    for stage in ((0, 1, 2, 3) if pp == 1 else (0, 1))
    if pp * dp * tp <= 8
]


def name(layout):
    """A test's id."""
    return "pp{}-dp{}-tp{}-zero{}".format(*layout)


@pytest.fixture(scope="module")
def cifar(tmp_path_factory, real_images):
    """32 CIFAR-10 images and random initial weights."""
    folder = tmp_path_factory.mktemp("per-parameter")
    oracle.cifar_folder(real_images / "cifar10" / "train.tar", folder, NUM_IMAGES, "train")
    oracle.write_weights(folder / "weights.safetensors", num_classes=10, **timm_side.KWARGS)
    return folder


@pytest.fixture(scope="module")
def plain(cifar):
    """timm's curve, weights and average, by optimizer."""
    return {kind: timm_side.train_plainly(cifar, kind) for kind in timm_side.BLOCKS}


def train(ranks, folder, kind, layout, output, params=None, precision=None, words=()):
    """Our run: its rows, final weights and average."""
    pp, dp, tp, stage = layout
    data = json.loads((ROOT / "ds_configs" / f"cpu_zero{stage}_fp32.json").read_text())
    block = timm_side.BLOCKS[kind]
    data["optimizer"] = {"type": block["type"], "params": {**block["params"], **(params or {})}}
    data |= {"gradient_clipping": timm_side.CLIP, **(precision or {})}
    output.mkdir(parents=True)
    config = output.parent / f"{output.name}.json"
    config.write_text(json.dumps(data))
    micro = NUM_IMAGES // dp // 2
    argv = ["--model", oracle.MODEL, *oracle.kwargs_words(timm_side.KWARGS), "--img-size", oracle.IMG_SIZE]
    argv += ["--no-aug", "--smoothing", 0, "--mean", 0.5, 0.5, 0.5, "--std", 0.5, 0.5, 0.5, "--val-split", ""]
    argv += ["--sched", "constant", "--warmup-epochs", 0, "--max-steps", timm_side.STEPS, "--log-interval", 1]
    argv += ["--workers", 0, "--data-dir", folder, "--initial-checkpoint", folder / "weights.safetensors"]
    argv += ["--deepspeed_config", config, "--pp", pp, "--tp", tp, "-b", micro, "--grad-accum-steps", 2]
    argv += ["--output", output, "--model-ema", "--model-ema-decay", timm_side.EMA_DECAY]
    rows = train_in(ranks, pp * dp * tp, [*argv, *timm_side.WORDS[kind], *words])
    return rows, load_file(str(output / "model.safetensors")), load_file(str(output / "ema.safetensors"))


def furthest(a, b):
    """The tensor that differs most, relative to its norm."""
    assert a.keys() == b.keys()
    parts = {n: (torch.linalg.norm(a[n] - b[n]) / torch.linalg.norm(b[n]).clamp_min(1e-12)).item() for n in a}
    worst = max(parts, key=parts.get)
    return parts[worst], worst


def assert_same(ours, theirs):
    """Curve, weights and average."""
    assert_same_curve(theirs[0], ours[0], rtol=LOSS_RTOL)
    for a, b in zip(ours[1:], theirs[1:], strict=True):
        part, tensor = furthest(a, b)
        assert part <= WEIGHT_RTOL, f"{tensor}: {part:.2e} relative"


@pytest.mark.parametrize("kind", timm_side.BLOCKS)
def test_the_reference_moves_and_is_clipped(cifar, plain, kind):
    """A reference that stands still, or whose clipping does nothing, proves nothing."""
    rows, weights, average = plain[kind]
    assert min(row["grad_norm"] for row in rows) > 3 * timm_side.CLIP
    assert abs(rows[-1]["loss"] - rows[0]["loss"]) > 0.02 * rows[0]["loss"]
    assert furthest(weights, load_file(str(cifar / "weights.safetensors")))[0] > 100 * WEIGHT_RTOL
    assert furthest(weights, average)[0] > 100 * WEIGHT_RTOL


@pytest.mark.parametrize("layout", LAYOUTS, ids=name)
@pytest.mark.parametrize("kind", timm_side.BLOCKS)
def test_equals_timm(ranks, cifar, plain, kind, layout, tmp_path):
    """A norm over the wrong ranks, a segment off by one, padding that counts, an average of the wrong weights."""
    assert_same(train(ranks, cifar, kind, layout, tmp_path / "run"), plain[kind])
