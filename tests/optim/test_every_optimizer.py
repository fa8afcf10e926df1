"""Every optimizer that the JSON may name: its curve in every kind of layout, and after a change of layout half-way."""

import contextlib
import functools
import math
from types import SimpleNamespace
from typing import Any

import oracle
import pytest
import torch
from curves import assert_same_curve, train_in
from project import ROOT
from timm.optim import Lion, param_groups_weight_decay

from ds_vit.checkpoint.load import _set_scalars
from ds_vit.optim.build import OPTIMIZERS, build_optimizer, optimizer_class

LOSS_RTOL, NORM_RTOL = 1e-5, 1e-4
CHANGE = 4
KWARGS = oracle.DEEP_KWARGS | {"depth": 3}

# The arguments are those with which an optimizer keeps all the states that it can keep. Learning rates differ because
# the methods do: each moves the loss by several per cent in ten steps. eps as in docs/numerics.md.
BLOCKS: dict[str, dict[str, Any]] = {
    "AdamW": {"type": "AdamW", "params": {"lr": 2e-3, "eps": 1e-6}},
    "AdamW-amsgrad": {"type": "AdamW", "params": {"lr": 2e-3, "eps": 1e-6, "amsgrad": True}},
    "Adam": {"type": "Adam", "params": {"lr": 2e-3, "eps": 1e-6, "adam_w_mode": False}},
    "SGD": {"type": "SGD", "params": {"lr": 0.3}},
    "SGD-nesterov": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}},
    "SGD-dampening": {"type": "SGD", "params": {"lr": 0.3, "momentum": 0.9, "dampening": 0.5}},
    "Adagrad": {"type": "Adagrad", "params": {"lr": 0.01, "eps": 1e-6}},
    "Adagrad-accumulator": {
        "type": "Adagrad",
        "params": {"lr": 0.02, "lr_decay": 0.1, "initial_accumulator_value": 1e-4},
    },
    "Adadelta": {"type": "Adadelta", "params": {"lr": 1.0, "eps": 1e-5}},
    "Adamax": {"type": "Adamax", "params": {"lr": 4e-3, "eps": 1e-6}},
    "NAdam": {"type": "NAdam", "params": {"lr": 2e-3, "eps": 1e-6, "decoupled_weight_decay": True}},
    "RAdam": {"type": "RAdam", "params": {"lr": 5e-3, "eps": 1e-6, "betas": [0.9, 0.9]}},
    "RMSprop": {"type": "RMSprop", "params": {"lr": 5e-4, "eps": 1e-5}},
    "RMSprop-centered": {"type": "RMSprop", "params": {"lr": 2e-4, "eps": 1e-5, "centered": True, "momentum": 0.9}},
    "Lion": {"type": "Lion", "params": {"lr": 5e-4}},
    "Lamb": oracle.BLOCKS["lamb"],
    "Lars": oracle.BLOCKS["lars"],
    "Muon": oracle.BLOCKS["muon"],
}
for _block in BLOCKS.values():
    _block["params"]["weight_decay"] = oracle.WEIGHT_DECAY

# name → pp, dp, tp, ZeRO stage
LAYOUTS = {
    "dp2-zero0": (1, 2, 1, 0),
    "dp2-zero1": (1, 2, 1, 1),
    "pp2-zero1": (2, 1, 1, 1),
    "dp2-zero3": (1, 2, 1, 3),
    "tp2-zero1": (1, 1, 2, 1),
    "pp2-zero0": (2, 1, 1, 0),
    "dp2-zero2": (1, 2, 1, 2),
    "tp2-zero3": (1, 1, 2, 3),
}


def plain_optimizer(kind: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    """What a plain loop uses: torch's or timm's own class over the model's own parameters."""
    block = BLOCKS[kind]
    if block["type"] in ("Lamb", "Lars", "Muon"):
        return oracle.timm_optimizer(kind.lower(), model)
    params = {k: v for k, v in block["params"].items() if k not in ("weight_decay", "adam_w_mode")}
    decay = block["params"].get("weight_decay", 0.0)
    groups = param_groups_weight_decay(model, decay, no_weight_decay_list=model.no_weight_decay())
    cls = Lion if block["type"] == "Lion" else getattr(torch.optim, block["type"])
    return cls(groups, **params)


@pytest.fixture(scope="module")
def cifar(tmp_path_factory, real_images):
    """32 CIFAR-10 images and random initial weights."""
    return oracle.cifar_with_weights(real_images, tmp_path_factory.mktemp("every-optimizer"), **KWARGS)


@pytest.fixture(scope="module")
def plain(cifar):
    """The plain loop's curve of an optimizer."""
    return functools.cache(lambda kind: oracle.train_plainly(cifar, kind, plain_optimizer, model_kwargs=KWARGS).rows)


def train(ranks, folder, kind, layout, output, *words):
    """Our run in a layout: its rows."""
    blocks = {"optimizer": BLOCKS[kind]}
    argv = oracle.command(folder, "adamw", LAYOUTS[layout], output, *words, blocks=blocks, model_kwargs=KWARGS)
    return train_in(ranks, math.prod(LAYOUTS[layout][:3]), argv)


def test_none_is_left_out():
    """An optimizer that is offered and never tested, or offered and not in the docs."""
    assert {block["type"] for block in BLOCKS.values()} == set(OPTIMIZERS)
    text = (ROOT / "docs" / "optimizers.md").read_text()
    assert [name for name in OPTIMIZERS if name not in text and name.upper() not in text] == []


@pytest.mark.sampled(9)
@pytest.mark.parametrize("kind", BLOCKS)
def test_the_reference_moves(plain, kind):
    """A reference that stands still, or whose clipping does nothing, proves nothing."""
    rows = plain(kind)
    assert min(row["grad_norm"] for row in rows) > 3 * oracle.CLIP
    assert 0.02 < abs(rows[-1]["loss"] / rows[0]["loss"] - 1) < 0.9


@pytest.mark.parametrize(
    "kind", [kind for kind, block in BLOCKS.items() if block["type"] not in ("Lamb", "Lars", "Muon")]
)
def test_counts_come_back_where_the_optimizer_keeps_them(kind):
    """A count or rate on the CPU beside states on a GPU, which the next step would refuse."""

    def optimizer():
        parameter = torch.nn.Parameter(torch.empty(4, device="meta"))  # it stands for another device than the CPU
        cls, arguments = optimizer_class(BLOCKS[kind]["type"], BLOCKS[kind]["params"], "c")
        return parameter, build_optimizer(cls, [{"params": [parameter]}], arguments, parameter.device)

    def zero_map():
        return SimpleNamespace(base=base, shards=[SimpleNamespace(parameter=parameter)])

    def scalars():
        tensors = {k: v for k, v in base.state[parameter].items() if torch.is_tensor(v) and v.dim() == 0}
        return {k: (v.device.type, v.dtype) for k, v in tensors.items()}

    parameter, base = optimizer()
    parameter.grad = torch.empty_like(parameter)
    with contextlib.suppress(RuntimeError):  # ASGD then reads a number, which no meta tensor has; its states are made
        base.step()
    made = scalars()
    saved = {key: {"value": 2.0, "tensor": True} for key in made}
    parameter, base = optimizer()
    _set_scalars(zero_map(), saved)
    assert scalars() == made


def cases():
    """Each optimizer in a layout and on to another, the layouts in turn."""
    names = [*LAYOUTS]
    for number, kind in enumerate(BLOCKS):
        first, other = names[number % len(names)], names[(number + 3) % len(names)]
        yield kind, first, other


@pytest.mark.sampled(9)
@pytest.mark.parametrize(("kind", "layout", "other"), list(cases()))
def test_equals_one_process_and_resumes_in_another_layout(ranks, cifar, plain, kind, layout, other, tmp_path):
    """States of the wrong shape, groups that are lost under ZeRO, a state or count that a checkpoint leaves behind."""
    saving = ["--checkpoint-interval", CHANGE, "--keep-checkpoints", 0]
    path = tmp_path / "run" / "checkpoints" / f"step-{CHANGE:08}"
    rows = train(ranks, cifar, kind, layout, tmp_path / "run", *saving)
    resumed = train(ranks, cifar, kind, other, tmp_path / "other", "--resume", path)
    for expected, found in ((plain(kind), rows), (plain(kind)[CHANGE:], resumed)):
        assert_same_curve(expected, found, rtol=LOSS_RTOL, keys=("loss",))
        assert_same_curve(expected, found, rtol=NORM_RTOL, keys=("grad_norm",))
