"""Schedules against timm's scheduler, and the optimizer block of the JSON."""

import ast
import re
from types import SimpleNamespace

import pytest
import timm
import torch
from project import ROOT
from timm.scheduler import CosineLRScheduler
from timm.utils import ModelEmaV3
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ds_vit.optim.build import build_optimizer, optimizer_class, parameter_groups, rules_of
from ds_vit.optim.ema import Ema
from ds_vit.optim.lamb import Lamb
from ds_vit.optim.muon import Muon, _owners
from ds_vit.optim.schedules import LearningRate


@pytest.mark.parametrize("warmup", [0, 7])
def test_cosine_is_timms(warmup):
    """A cosine that differs from timm's, stepped on updates, in warm-up, decay or at the end."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
    timm = CosineLRScheduler(
        optimizer, t_initial=40, lr_min=0.01, warmup_t=warmup, warmup_lr_init=1e-3, t_in_epochs=False, cycle_limit=1
    )
    ours = LearningRate("cosine", 0.3, 40, warmup, 1e-3, 0.01)
    for step in range(45):
        assert ours.lr(step) == pytest.approx(timm._get_lr(step)[0], rel=1e-12)


def test_linear_constant_and_wsd():
    """Closed forms at the corners."""
    linear = LearningRate("linear", 1.0, 10, min_lr=0.5)
    assert [linear.lr(s) for s in (0, 5, 10, 99)] == [1.0, 0.75, 0.5, 0.5]
    constant = LearningRate("constant", 1.0, 10, warmup_steps=2, warmup_lr=0.0)
    assert [constant.lr(s) for s in (0, 1, 2, 99)] == [0.0, 0.5, 1.0, 1.0]
    wsd = LearningRate("wsd", 1.0, 100, warmup_steps=10, warmup_lr=0.0, decay_fraction=0.2)
    assert [wsd.lr(s) for s in (5, 10, 80, 90, 100)] == [0.5, 1.0, 1.0, 0.5, 0.0]


def test_schedule_refuses_what_cannot_be():
    """A warm-up that never ends, a minimum above the base."""
    with pytest.raises(ValueError, match="warm-up of 10 steps does not fit into a run of 10"):
        LearningRate("cosine", 1.0, 10, warmup_steps=10)
    with pytest.raises(ValueError, match="above the base"):
        LearningRate("cosine", 1.0, 10, min_lr=2.0)


@pytest.mark.parametrize(
    ("name", "params", "cls"),
    [
        ("AdamW", {}, torch.optim.AdamW),
        ("adamw", {"torch_adam": True}, torch.optim.AdamW),
        ("Adam", {}, torch.optim.AdamW),  # DeepSpeed: Adam means AdamW …
        ("Adam", {"adam_w_mode": False}, torch.optim.Adam),  # … unless told otherwise
        ("SGD", {"momentum": 0.9}, torch.optim.SGD),
        ("RAdam", {}, torch.optim.RAdam),
    ],
)
def test_optimizer_names(name, params, cls):
    """A JSON's optimizer read otherwise than DeepSpeed reads it."""
    assert optimizer_class(name, params, "c")[0] is cls


def test_lion_is_elementwise():
    """Lion must not need DeepSpeed's CUDA build."""
    cls, arguments = optimizer_class("Lion", {"lr": 1e-4, "betas": [0.9, 0.99]}, "c")
    assert cls.__name__ == "Lion"
    assert arguments == {"lr": 1e-4, "betas": (0.9, 0.99)}


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"type": "Adafactor"}, "Adafactor factors matrices"),
        ({"type": "Muon", "params": {"ns_dtype": "float16"}}, "ns_dtype 'float16' is not one of 'float32', 'bfloat16'"),
        ({"type": "Muon", "params": {"ns_coefficients": "cubic"}}, "Unknown coefficients preset 'cubic'"),
        ({"type": "Muon", "params": {"momentum": 1.0}}, "must be at least 0 and below 1"),
        ({"type": "Muon", "params": {"eps": -1}}, "Muon's eps -1 must not be negative"),
        ({"type": "Muon", "params": {"betas": [0.9]}}, "betas must be two numbers [0.9, 0.999], not [0.9]"),
        ({"type": "Muon", "params": {"adam_lr": 0.1}}, 'Muon here is timm\'s; write "fallback_lr_scale": adam_lr / lr'),
        ({"type": "Muon", "params": {"beta": 0.1}}, "Muon has no such argument; the nearest is betas"),
        ({"type": "AdamW", "params": {"betas": [0.9, 2]}}, "optimizer.params of AdamW: Invalid beta parameter"),
        ({"type": "OneBitAdam"}, "there is no optimizer 'OneBitAdam' here; the nearest is NAdam"),
        ({"type": "AdamW", "params": {"beta": 1}}, "AdamW has no such argument; the nearest is betas"),
        ({"type": "AdamW", "params": {"max_grad_norm": 1}}, '"gradient_clipping"'),
        (
            {"type": "Lion", "params": {"caution": True}},
            "caution of Lion: it divides by the mean of a mask over a whole",
        ),
        ({"type": "AdamW", "params": {"differentiable": True}}, "differentiable of AdamW: gradients through"),
        ({"type": "NAdam", "params": {"capturable": True}}, "capturable of NAdam: CUDA graphs"),
        ({"type": "Adagrad", "params": {"lr_decay": -1}}, "params of Adagrad: Invalid lr_decay value: -1"),
        ({"type": "Lars", "params": {"momentum": -1}}, "params of Lars: Invalid momentum value: -1"),
        ({"type": "Rprop", "params": {"lr": 0.1}}, "optimizer Rprop was removed; use AdamW"),
        ({}, 'no "type"'),
    ],
)
def test_optimizers_refused(block, message):
    """An optimizer that would be another one in every layout, or an argument that DeepSpeed would crash on."""
    with pytest.raises(ValueError, match=re.escape(message)):
        optimizer_class(block.get("type"), block.get("params", {}), "c")


def test_groups_leave_frozen_and_undecayed_out():
    """Decay on a bias, or a frozen tensor in the optimizer."""
    a, b, c = (torch.nn.Parameter(torch.ones(2)) for _ in range(3))
    c.requires_grad_(False)
    groups = parameter_groups([("w", a), ("b", b), ("f", c)], 0.1, frozenset({"b"}))
    assert [(g["params"], g["weight_decay"]) for g in groups] == [([a], 0.1), ([b], 0.0)]
    optimizer = build_optimizer(torch.optim.AdamW, groups, {"lr": 1e-3, "weight_decay": 0.1}, torch.device("cpu"))
    assert optimizer.defaults["fused"] is True
    assert [g["weight_decay"] for g in optimizer.param_groups] == [0.1, 0.0]


def test_what_muon_leaves_to_adamw():
    """A token or table that is orthogonalized, a matrix that is not, a pattern that no parameter has."""
    model = timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=10)
    small = {name for name, p in model.named_parameters() if p.ndim < 2} | {"cls_token", "pos_embed"}
    assert Muon.rules.fallback(model, {}) == small
    left = Muon.rules.fallback(model, {"fallback_list": ["head.*"]})
    assert left == small | {"head.weight"}
    with pytest.raises(ValueError, match=re.escape("no parameter of this model is named 'haed.*'")):
        Muon.rules.fallback(model, {"fallback_list": ["haed.*"]})
    with pytest.raises(ValueError, match=re.escape("'head.*' is no list of names; write one such as ['head.*']")):
        Muon.rules.fallback(model, {"fallback_list": "head.*"})
    groups = parameter_groups(list(model.named_parameters()), 0.1, frozenset(small), left)
    assert [(len(g["params"]), g["weight_decay"], g["use_fallback"]) for g in groups] == [
        *((5, 0.1, False), (1, 0.1, True), (len(small), 0.0, True))
    ]
    held = [group["state_keys"] for group in Muon(groups).param_groups]
    assert held == [("momentum_buffer",), ("exp_avg", "exp_avg_sq"), ("exp_avg", "exp_avg_sq")]


def test_muons_work_is_shared_out():
    """A rank that works on most matrices while others wait; equal work for a rank that must fetch it all."""
    held = [[SimpleNamespace(name=f"w{n}", length=1 + (rank == 2)) for n in range(20)] for rank in range(4)]
    costs = {f"w{n}": float(1 + n) for n in range(20)}
    owners = _owners(held, costs)
    assert owners["w19"] == 2
    loads = [sum(costs[name] for name, owner in owners.items() if owner == rank) for rank in range(4)]
    assert max(loads) - min(loads) <= 20


@pytest.mark.parametrize("warmup", [False, True])
def test_the_averages_decay_is_timms(warmup):
    """A warm-up that is one update off, or that never reaches the decay."""
    theirs = ModelEmaV3(torch.nn.Linear(1, 1), decay=0.99, use_warmup=warmup, warmup_power=2 / 3)
    ours = Ema(SimpleNamespace(shards=[]), 0.99, warmup)
    for update in (1, 2, 3, 10, 100, 999, 1000, 1001, 100_000):
        assert ours.decay_at(update) == pytest.approx(theirs.get_decay(update), abs=1e-12)


class OverlapChecked(TorchDispatchMode):
    """Fails where an operation writes a tensor whose memory it also gets as another argument."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        memory = {}
        for value, argument in zip(args, func._schema.arguments, strict=False):
            written = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in {id(t): t for t in tree_leaves(value) if isinstance(t, torch.Tensor)}.values():
                memory.setdefault(tensor.untyped_storage().data_ptr(), []).append(written)
        overlapping = [pointer for pointer, uses in memory.items() if len(uses) > 1 and any(uses)]
        assert not overlapping, f"{func} writes a tensor that it also reads as another argument"
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_lambs_update_is_torchs_adams_without_aliased_operands(device, dtype):
    """An update other than Adam's, or one that depends on the order in which a kernel reads and writes its operands."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(n, dtype=dtype, device=device)) for n in (1, 7, 64, 1000, 70_001)]
    theirs = [torch.nn.Parameter(torch.zeros_like(p)) for p in parameters]
    ours, adam = Lamb(parameters), torch.optim.Adam(theirs, lr=1.0, eps=1e-6, foreach=True)
    for _ in range(3):
        for one, other in zip(parameters, theirs, strict=True):
            one.grad = torch.randn(one.shape, device=device).to(dtype)
            other.grad = one.grad.clone()
            other.data.zero_()
        with OverlapChecked():
            updates = ours._adam(ours.param_groups[0], parameters)
        adam.step()
        assert min(update.abs().max() for update in updates) > 0.1
        for update, expected in zip(updates, theirs, strict=True):
            torch.testing.assert_close(update, expected.detach(), rtol=0, atol=torch.finfo(dtype).eps * 16)


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lamb", "Lion", "Adagrad"])
def test_an_elementwise_optimizer_has_nothing_to_say(name):
    """A default that splits groups would change runs that resume."""
    rules = rules_of(optimizer_class(name, {}, "c")[0])
    assert rules.fallback(torch.nn.Linear(2, 2), {}) is None
    assert rules.notes({}) == []
    assert rules.shown_to_deepspeed


def test_muon_says_what_it_needs():
    """Notes that come although the arguments were written down."""
    rules = rules_of(Muon)
    assert "0.2·√max(out, in)" in rules.notes({"lr": 1})[0]
    assert rules.notes({"nesterov": True}) == []
    assert not rules.shown_to_deepspeed


def test_nobody_asks_which_optimizer_it_is():
    """`is Muon` outside of the optimizers: the next one would need another branch in every such place."""
    asking = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "ds_vit").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Compare) and any(isinstance(n, ast.Name) and n.id == "Muon" for n in ast.walk(node))
    }
    assert not asking
