"""What is computed in which type: norms, masters, pure bf16, loss scales; LAMB on fp32 masters."""

import contextlib
import itertools
import json
from copy import deepcopy

import oracle
import pytest
import timm
import torch
from curves import assert_same_curve, read_rows, train_in, train_rows
from project import write_config
from runs import pretend_fp16, run_quietly
from safetensors.torch import load_file
from timm.utils import ModelEmaV3
from vits import KINDS, small_kwargs
from zero_layouts import BF16, WRAPPER, words

from ds_vit.models.conversions import norms_in_fp32

pytestmark = pytest.mark.slow

NUM_IMAGES = 32
# Slow enough that ten steps do not carry the rounding of 16 bits on to the third digit.
LR = 0.004
LAMB = {**oracle.BLOCKS["lamb"], "params": {**oracle.BLOCKS["lamb"]["params"], "lr": LR}}
PURE = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}


def command(cifar32, path, stage, changes, dp, flags=(), steps=oracle.STEPS):
    """Full-batch steps as in the emulation."""
    argv = words(cifar32, stage, changes, path)
    argv[argv.index("--max-steps") + 1] = steps
    argv[argv.index("-b") + 1] = NUM_IMAGES // dp
    argv += ["--smoothing", 0, "--mean", 0.5, 0.5, 0.5, "--std", 0.5, 0.5, 0.5]
    return [*argv, "--log-interval", 1, "--sched", "constant", "--warmup-steps", 0, *flags]


@pytest.fixture(scope="module")
def emulated(cifar32):
    """One process: a bf16 model with norms in fp32, fp32 masters, timm's Lamb on them."""
    images, labels = oracle.images_and_labels(cifar32)
    model = timm.create_model(oracle.MODEL, num_classes=10, img_size=oracle.IMG_SIZE, **oracle.DEEP_KWARGS)
    masters = deepcopy(model)
    for each in (model, masters):
        each.load_state_dict(load_file(str(cifar32 / "weights.safetensors")))
    model.bfloat16()
    assert norms_in_fp32(model) == 2 * 6 + 1
    optimizer, ema = oracle.timm_optimizer("lamb", masters, lr=LR), ModelEmaV3(masters, decay=oracle.EMA_DECAY)
    rows = []
    for step in range(1, oracle.STEPS + 1):
        model.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images.bfloat16()).float(), labels)
        loss.backward()
        for master, p in zip(masters.parameters(), model.parameters(), strict=True):
            master.grad = p.grad.float()
        norm = torch.nn.utils.clip_grad_norm_(masters.parameters(), oracle.CLIP)
        optimizer.step()
        ema.update(masters, step=step)
        model.load_state_dict(masters.state_dict())
        rows.append({"kind": "train", "step": step, "loss": loss.item(), "grad_norm": norm.item()})
    return rows, masters.state_dict(), ema.module.state_dict()


CASES = {
    "ZeRO-2 dp2": (2, 2, [], BF16),
    "ZeRO-3 dp2": (2, 3, [], BF16),
    "BF16_Optimizer pp2": (2, 1, ["--pp", 2], WRAPPER),
    "ZeRO-1 tp2": (2, 1, ["--tp", 2], BF16),
}


@pytest.mark.parametrize("case", CASES)
def test_lamb_on_fp32_masters(ranks, cifar32, emulated, case, tmp_path):
    """Norms of the 16-bit weights, moments in bf16, an average of rounded weights."""
    world, stage, flags, changes = CASES[case]
    changes = {**changes, "communication_data_type": "fp32", "optimizer": LAMB}
    dp = 1 if flags else world
    argv = command(cifar32, tmp_path / "config.json", stage, changes, dp, flags)
    argv += ["--output", tmp_path / "run", "--model-ema", "--model-ema-decay", oracle.EMA_DECAY]
    assert_emulated(train_in(ranks, world, argv), tmp_path / "run", emulated, cifar32)


def assert_emulated(rows, output, emulated, cifar32):
    """The curve within 1e-3, and weights that went the same way: bf16 gradients leave no more of single weights."""
    assert_same_curve(emulated[0], rows, rtol=1e-3, keys=("loss",))
    start = load_file(str(cifar32 / "weights.safetensors"))
    for file, expected in (("model", emulated[1]), ("ema", emulated[2])):
        ours = load_file(str(output / f"{file}.safetensors"))
        far = {n: torch.linalg.norm(expected[n] - start[n]) for n in expected}
        off = {n: (torch.linalg.norm(ours[n] - expected[n]) / far[n]).item() for n in expected if far[n] > 1e-3}
        worst = max(off, key=off.get)
        assert off[worst] < 0.3, f"{worst} ends {off[worst]:.2f} of its way from where it should"
        assert any((ours[n] != ours[n].bfloat16().float()).any() for n in ours), "fp32 masters are no bf16 numbers"


CAST_UP = (torch.nn.LayerNorm, torch.nn.RMSNorm, torch.nn.GroupNorm, timm.layers.RmsNorm)
NORMS = {name: kind for name, kind in vars(timm.layers).items() if isinstance(kind, type) and issubclass(kind, CAST_UP)}


@pytest.mark.parametrize("name", list(NORMS))
def test_a_norm_in_fp32_computes_what_timm_does(name):
    """A norm of feature maps over the wrong dimension, or without the activation that ends it (hybrid models)."""
    torch.manual_seed(0)
    norm = NORMS[name](8, 4) if name in ("GroupNorm", "GroupNormAct") else NORMS[name](8)
    for parameter in norm.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(2, 8, 8, 8)
    expected = norm(x)
    assert norms_in_fp32(norm) == 1
    torch.testing.assert_close(norm(x), expected)


def roundings(actual, exact):
    """How many roundings to `actual`'s type it is off at most, elements that cancel aside."""
    unit = exact.abs() * torch.finfo(actual.dtype).eps / 2 + exact.abs().max() * 2**-20
    return float(((actual.double() - exact).abs() / unit).max())


@pytest.mark.parametrize("kind", ["LayerNorm", "GroupNorm"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_torchs_kernels_on_16_bits_lose_gradients_of_weights(kind, dtype):
    """Why norms are cast up: the kernels' forward pass on 16 bits is as good, their weights' gradients are not.

    On a CPU they add up in 16 bits; on a GPU, by torch's source, past 65,536 rows of few features. When this fails,
    look there again: the casts in models/dtypes.py may go.
    """
    torch.manual_seed(0)
    shape, make = {
        "LayerNorm": ((4, 197, 192), lambda: torch.nn.LayerNorm(192)),
        "GroupNorm": ((4, 192, 14, 14), lambda: torch.nn.GroupNorm(4, 192)),
    }[kind]
    x, gradient = torch.randn(shape).to(dtype), torch.randn(shape).to(dtype)
    norm = make().to(dtype)
    torch.nn.init.normal_(norm.weight)
    sides = {"exact": deepcopy(norm).double(), "native": norm, "cast up": deepcopy(norm)}
    assert norms_in_fp32(sides["cast up"]) == 1
    found = {}
    for name, norm in sides.items():
        own = norm.weight.dtype
        given = x.to(own, copy=True).requires_grad_()
        out = norm(given)
        out.backward(gradient.to(own))
        found[name] = [out.detach(), given.grad, norm.weight.grad, norm.bias.grad]
    errors = {name: [roundings(a, b) for a, b in zip(found[name], found["exact"], strict=True)] for name in found}
    assert max(errors["cast up"]) <= 1.0
    assert errors["native"][0] <= 1.0
    assert errors["native"][2] > 10.0


@pytest.mark.parametrize("stage", [2, 3])
def test_pure_bf16(ranks, cifar32, tmp_path, stage):
    """Masters and moments in bf16 train, are averaged in fp32, and are what the JSON asked for."""
    changes = {**PURE, "optimizer": oracle.BLOCKS["lamb"]}
    argv = command(cifar32, tmp_path / "config.json", stage, changes, 2)
    output = tmp_path / "run"
    rows = train_in(ranks, 2, [*argv, "--model-ema", "--model-ema-decay", 0.8, "--output", output])
    losses = [row["loss"] for row in train_rows(rows)]
    assert losses[-1] < losses[0] - 0.1
    weights, average = (load_file(str(output / f"{name}.safetensors")) for name in ("model", "ema"))
    assert all((w == w.bfloat16().float()).all() for w in weights.values()), "bf16 masters"
    assert any((w != w.bfloat16().float()).any() for w in average.values()), "an fp32 average"


@pytest.mark.parametrize(("kind", "size", "stage"), [("Eva with rotary tables", 56, 1), ("DINOv3", 64, 3)])
def test_rotary_models_in_bf16(ranks, tmp_path, kind, size, stage):
    """DeepSpeed casts parameters and leaves buffers: the rotary table would meet bf16 tokens in fp32."""
    config = write_config(tmp_path / "config.json", stage, **BF16)
    argv = ["--model", KINDS[kind], "--img-size", size, "--dataset", "digits", "-b", 4, "--workers", 0]
    argv += ["--model-kwargs", *(f"{key}={value}" for key, value in small_kwargs(KINDS[kind]).items())]
    argv += ["--deepspeed_config", config, "--val-split", "", "--max-steps", 2, "--log-interval", 1]
    rows = train_rows(train_in(ranks, 1, argv))
    assert len(rows) == 2
    assert all(row["loss"] < 5 for row in rows)


LAYOUTS = {
    "dp2 ZeRO-2": (2, 2, []),
    "dp2 ZeRO-3": (2, 3, []),
    "pp2 tp2": (4, 1, ["--pp", 2, "--tp", 2]),
}


@contextlib.contextmanager
def an_outlier():
    """On a rank: fp16 on a CPU, and in steps 4 and 6 a gradient on the last replica that no 16 bits hold."""
    from unittest import mock

    from ds_vit.tasks.classification import task as classification

    build_loss, calls = classification.build_loss, itertools.count(1)
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def planted(rule):
        loss = build_loss(rule)

        def with_outlier(logits, targets):
            value = loss(logits, targets)
            if next(calls) not in (4, 6) or rank < world // 2:
                return value
            return value + (value - value.detach()) * 1e12

        return with_outlier

    with pretend_fp16(), mock.patch.object(classification, "build_loss", planted):
        yield


def train_in_fp16(ranks, cifar32, folder, layout, prepare_rank, steps, changes=None, **fp16):
    """The rows of a layout in fp16."""
    world, stage, flags = layout
    fp16 = {"enabled": True, "hysteresis": 1, "loss_scale_window": 1000, **fp16}
    changes = {"fp16": fp16, "optimizer": oracle.BLOCKS["lamb"], **(changes or {})}
    argv = command(cifar32, folder / "config.json", stage, changes, 1 if flags else world, flags, steps=steps)
    said = ranks.run(world, run_quietly, [str(word) for word in [*argv, "--output", folder / "run"]], prepare_rank)
    assert [code for code, *_ in said] == [0] * world, said[0][2]
    assert json.loads((folder / "run" / "summary.json").read_text())["precision"] == "fp16"
    return read_rows(folder / "run")


ONE = (1, 1, [])


@pytest.fixture(scope="module")
def with_outliers(ranks, cifar32, tmp_path_factory):
    """The rows of one rank."""
    return train_in_fp16(ranks, cifar32, tmp_path_factory.mktemp("one"), ONE, an_outlier, 9, initial_scale_power=10)


def assert_overflow_is_handled(one, other):
    """The scale is halved and the step skipped in the same steps; the curve goes on; the metrics have all of it."""
    rows = train_rows(other)
    skips = [row for row in other if row["kind"] == "skip"]
    assert [row["loss_scale"] for row in train_rows(one)] == [row["loss_scale"] for row in rows]
    assert len(skips) >= 2
    assert [row["step"] for row in skips] == [row["step"] for row in one if row["kind"] == "skip"]
    assert all(row["reason"] == "overflow" and row["layer"] for row in skips)
    assert [row["skipped_steps"] for row in skips] == list(range(1, len(skips) + 1))
    for before, after in itertools.pairwise(rows):
        assert after["loss_scale"] == before["loss_scale"] / (2 if before["grad_norm"] is None else 1)
    assert_same_curve(one, other, rtol=5e-3, keys=("loss",))
    assert rows[-1]["loss"] < rows[0]["loss"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_overflow_on_one_replica_skips_everywhere(ranks, cifar32, tmp_path, with_outliers, layout):
    """A rank that skips alone, a scale that goes its own way, a skip that the metrics do not show."""
    rows = train_in_fp16(ranks, cifar32, tmp_path, LAYOUTS[layout], an_outlier, 9, initial_scale_power=10)
    assert [row["step"] for row in rows if row["kind"] == "skip"] == [4, 6]
    assert_overflow_is_handled(with_outliers, rows)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_scale_that_grows_changes_nothing(ranks, cifar32, tmp_path, layout):
    """DeepSpeed divides by the scale after it has doubled it: half of the gradient, clipped as if half as long."""
    sgd = {"type": "SGD", "params": {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.0}}
    changes, runs = {"optimizer": sgd, "gradient_clipping": 0.5}, []
    for window in (1000, 2):
        folder = tmp_path / str(window)
        folder.mkdir()
        fp16 = {"initial_scale_power": 4, "loss_scale_window": window, "hysteresis": 2}
        runs.append(train_in_fp16(ranks, cifar32, folder, LAYOUTS[layout], pretend_fp16, 7, changes, **fp16))
    assert [row["loss_scale"] for row in train_rows(runs[0])] == [16.0] * 7
    assert train_rows(runs[1])[-1]["loss_scale"] >= 64
    assert_same_curve(*runs, rtol=1e-3, keys=("loss", "grad_norm"))
