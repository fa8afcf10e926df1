"""An optimizer says for itself what it needs: a new one is a class with its rules, and a line in optim/build.py."""

import ast
import re
from types import MappingProxyType

import pytest
import timm
import torch
from project import ROOT

from ds_vit.optim import build
from ds_vit.optim.build import (
    build_optimizer,
    optimizer_class,
    parameter_groups,
    rules_of,
)
from ds_vit.optim.muon import Muon
from ds_vit.optim.per_parameter import OptimizerRules


class HalfRules(OptimizerRules):
    own_arguments = frozenset({"slow"})
    spelled_otherwise = MappingProxyType({"rate": 'write it as "lr"'})

    def notes(self, arguments):
        return [f"slow: {arguments['slow']}"]

    def fallback(self, model, arguments):
        return frozenset(name for name, _ in model.named_parameters() if arguments["slow"] in name)

    def identity(self, fallback):
        return {"slowed": sorted(fallback)}

    def rows(self, trained, fallback):
        return [("Half", f"{len(fallback)} slow")]


class Half(torch.optim.SGD):
    """What somebody would add."""

    rules = HalfRules()

    def __init__(self, params, lr=0.1, weight_decay=0.0):
        super().__init__(params, lr=lr, weight_decay=weight_decay)


def test_a_new_optimizer_needs_its_class_and_a_line(monkeypatch):
    """An argument that only a named optimizer gets through, or a check that knows the names of today's."""
    monkeypatch.setitem(build._OURS, "Half", Half)
    block = {"type": "half", "params": {"lr": 0.2, "slow": "head"}}
    cls, arguments = optimizer_class(block, "c")
    assert (cls, arguments) == (Half, {"lr": 0.2, "slow": "head"})
    rules = rules_of(cls)
    model = timm.create_model("vit_tiny_patch16_224", depth=1, num_classes=10)
    apart = rules.fallback(model, arguments)
    assert apart == {"head.weight", "head.bias"}
    assert rules.notes(arguments) == ["slow: head"]
    groups = parameter_groups(list(model.named_parameters()), 0.1, frozenset(), apart)
    assert [(len(group["params"]), group["use_fallback"]) for group in groups][1] == (2, True)
    optimizer = build_optimizer(cls, groups, arguments, torch.device("cpu"))
    assert optimizer.defaults["lr"] == 0.2
    assert rules.identity(apart) == {"slowed": ["head.bias", "head.weight"]}
    with pytest.raises(ValueError, match=re.escape('params.rate: write it as "lr"')):
        optimizer_class({"type": "Half", "params": {"rate": 1, "slow": "x"}}, "c")


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Lamb", "Lion", "Adagrad"])
def test_an_elementwise_optimizer_has_nothing_to_say(name):
    """A default that splits groups or enters a checkpoint's identity would change runs that go on."""
    rules = rules_of(optimizer_class({"type": name, "params": {}}, "c")[0])
    assert rules.fallback(torch.nn.Linear(2, 2), {}) is None
    assert (rules.notes({}), rules.identity(None), rules.rows(["w"], None)) == ([], {}, [])
    assert rules.shown_to_deepspeed


def test_muon_says_what_it_needs():
    """Notes that come although the arguments were written down, or an identity that forgets a name."""
    rules = rules_of(Muon)
    assert "0.2·√max(out, in)" in rules.notes({"lr": 1})[0]
    assert rules.notes({"nesterov": True}) == []
    assert rules.identity(frozenset({"b", "a"})) == {"left_to_adamw": {"a": "AdamW's", "b": "AdamW's"}}
    assert rules.rows(["a", "b", "c"], frozenset({"a", "frozen"})) == [("Muon", "of 2 matrices; AdamW for 1 tensors")]
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
