"""`--task mae`: the curve of a plain loop in every layout, exact evaluation, and files that other tools take."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch
from curves import train_in, train_rows
from project import ROOT

from ds_vit import config as flags
from ds_vit.launching.process import Process
from ds_vit.models import SequentialViT, initialise, no_weight_decay_names, take_apart, timm_names
from ds_vit.tasks.losses import MaskedPatchLoss
from ds_vit.training.inputs import InputPipeline
from ds_vit.training.plan import prepare

STEPS, BATCH, CLIP = 10, 16, 0.1
NAME = "vit_tiny_patch16_224"
KWARGS = {"patch_size": 4, "embed_dim": 24, "depth": 3, "num_heads": 6}
DECODER = ["--decoder-dim", 24, "--decoder-depth", 2, "--decoder-heads", 6]
MODEL = ["--model", NAME, "--img-size", 16, "--model-kwargs", *(f"{k}={v}" for k, v in KWARGS.items()), "--workers", 0]
MAE = ["--task", "mae", *MODEL, *DECODER]
RUN = ["--drop-path", 0.1, "--sched", "constant", "--warmup-epochs", 0, "--epochs", 1, "--log-interval", 1]
OPTIMIZERS = {
    "SGD": {"type": "SGD", "params": {"lr": 0.3, "momentum": 0.9, "weight_decay": 0.05}},
    "AdamW": {"type": "AdamW", "params": {"lr": 2e-3, "betas": [0.9, 0.95], "eps": 1e-6, "weight_decay": 0.05}},
}
# What is painted differs between the two, so that both targets are tried.
WORDS = {"SGD": ["--norm-pix-loss"], "AdamW": []}


def command(folder, words, stage=1, optimizer="SGD"):
    """The command line of a run on the digits, but for its ranks."""
    data = json.loads((ROOT / "ds_configs" / f"cpu_zero{stage}_fp32.json").read_text())
    data |= {"gradient_clipping": CLIP, "optimizer": OPTIMIZERS[optimizer]}
    path = folder / f"zero{stage}-{optimizer}.json"
    path.write_text(json.dumps(data))
    return [str(word) for word in ["--deepspeed_config", path, "--dataset", "digits", *words]]


def planned(argv):
    """The plan of a run on one rank, in this process."""
    process = Process("none", rank=0, local_rank=0, world_size=1, local_world_size=1)
    return prepare(*flags.parse(argv), process, on_cpu=True)


def inputs(plan):
    """The run's own batches."""
    engine = SimpleNamespace(device=torch.device("cpu"), dtype=torch.float32)
    return InputPipeline(plan, engine, SimpleNamespace(waited=lambda seconds: None))


def plain_model(plan):
    """The model as it begins, and its loss."""
    layers = take_apart(plan.model)
    initialise(plan.model, layers, seed=plan.config.seed, device="cpu")
    settings = plan.model.settings
    return SequentialViT(layers), MaskedPatchLoss((4, 4), settings.mask_ratio, settings.norm_pix_loss)


def plain(plan, optimizer):
    """(loss, gradient norm) of each step in torch alone, whole batches in one process."""
    whole, loss_of = plain_model(plan)
    names, free = timm_names(whole), no_weight_decay_names(plan.model)
    trained = {names[local]: p for local, p in whole.named_parameters() if p.requires_grad}
    groups = [
        {"params": [p for name, p in trained.items() if name not in free]},
        {"params": [p for name, p in trained.items() if name in free], "weight_decay": 0.0},
    ]
    how = OPTIMIZERS[optimizer]
    stepper = getattr(torch.optim, how["type"])(groups, **how["params"])
    rows = []
    for _, batch in zip(range(STEPS), inputs(plan).training(), strict=False):
        assert torch.equal(batch["images"], batch["pixels"])
        stepper.zero_grad()
        loss = loss_of(whole(batch["images"], batch["keys"]), batch["pixels"], batch["keys"])
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(trained.values(), CLIP)
        stepper.step()
        rows.append((loss.item(), norm.item()))
    assert all(norm > 1.5 * CLIP for _, norm in rows), "clipping does nothing: a wrong factor would not show"
    assert min(loss for loss, _ in rows[5:]) < rows[0][0] - 0.02, "nothing is learned"
    return rows


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """The plain curve for each optimizer."""
    curves = {}

    def curve(optimizer):
        if optimizer not in curves:
            words = [*MAE, *RUN, *WORDS[optimizer], "-b", BATCH, "--max-steps", STEPS]
            folder = tmp_path_factory.mktemp("plain")
            curves[optimizer] = plain(planned(command(folder, words, optimizer=optimizer)), optimizer)
        return curves[optimizer]

    return curve


# name: (ranks, ZeRO stage, micro-batch, accumulation, optimizer, further flags)
LAYOUTS = {
    "pp2": (2, 1, 4, 4, "SGD", ["--pp", 2]),
    "dp2": (2, 1, 8, 1, "AdamW", []),
    "tp2": (2, 1, 16, 1, "AdamW", ["--tp", 2]),
    "pp3 uneven": (3, 0, 4, 4, "AdamW", ["--pp", 3, "--pp-partition", "0,2,7,8"]),
    "dp2 ZeRO-3, each block recomputed": (2, 3, 4, 2, "SGD", ["--grad-checkpointing"]),
    "pp2, the bridge ends the first stage": (2, 1, 8, 2, "SGD", ["--pp", 2, "--pp-partition", "0,5,8"]),
    "one rank, micro-batches of one image": (1, 0, 1, 16, "SGD", []),
    "dp2 ZeRO-0": (2, 0, 8, 1, "SGD", []),
    "dp2 ZeRO-2": (2, 2, 4, 2, "AdamW", []),
    "dp4 ZeRO-3": (4, 3, 4, 1, "AdamW", []),
    "tp2 sequence parallel": (2, 1, 16, 1, "SGD", ["--tp", 2, "--sequence-parallel"]),
    "tp2 dp2 ZeRO-3": (4, 3, 4, 2, "SGD", ["--tp", 2]),
    "tp2 pp2 sequence parallel": (4, 1, 4, 4, "AdamW", ["--tp", 2, "--pp", 2, "--sequence-parallel"]),
    "pp2 dp2, blocks recomputed": (4, 1, 4, 2, "SGD", ["--pp", 2, "--grad-checkpointing"]),
}


def assert_curve(rows, expected):
    """Losses to 1e-5 and norms to 1e-4, at every step."""
    rows = train_rows(rows)
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    assert [row["loss"] for row in rows] == pytest.approx([loss for loss, _ in expected], rel=1e-5)
    assert [row["grad_norm"] for row in rows] == pytest.approx([norm for _, norm in expected], rel=1e-4)


@pytest.mark.sampled(5)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_curve_is_that_of_a_plain_loop(ranks, expected, tmp_path, layout):
    """Other pixels at the end of the pipeline than at its start; a mask, a mean or a factor that follows the ranks."""
    world, stage, micro, accumulation, optimizer, words = LAYOUTS[layout]
    words = [*MAE, *RUN, *WORDS[optimizer], *words, "--max-steps", STEPS]
    argv = command(tmp_path, [*words, "-b", micro, "--grad-accum-steps", accumulation], stage, optimizer)
    assert_curve(train_in(ranks, world, argv), expected(optimizer))
