"""The parameters without weight decay and those that are frozen: pure functions on timm's names."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase

from timm.optim import param_groups_weight_decay
from torch import nn

from ds_vit.fault_tolerance.errors import UserError, did_you_mean
from ds_vit.models.sequential import timm_names
from ds_vit.models.zoo import TimmViT

_UNDECAYED = frozenset({"mask_token", "text.pos_embed"})
"""Parameters that ds_vit adds to timm's models: not decayed, like their class token and position embeddings."""


def no_weight_decay_names(model: TimmViT) -> frozenset[str]:
    """timm's rule (`timm.optim.param_groups_weight_decay`): vectors, biases and what the model itself names.

    timm's ViTs name their position embeddings and tokens, and we do so for what we add to them. BridgeTower names none.
    """
    parameters = dict(model.named_parameters())
    undecayed = model.no_weight_decay() | _UNDECAYED
    groups = param_groups_weight_decay(model, weight_decay=1.0, no_weight_decay_list=undecayed)
    names = {id(parameter): name for name, parameter in parameters.items()}
    return frozenset(
        names[id(parameter)] for group in groups if group["weight_decay"] == 0.0 for parameter in group["params"]
    )


def classifier_names(model: TimmViT) -> frozenset[str]:
    """timm's names of the parameters of the classifier (`get_classifier()`)."""
    found = model.get_classifier()  # of a model with a distillation token two
    heads = found if isinstance(found, tuple) else (found,)
    own = {id(parameter) for head in heads for parameter in head.parameters()}
    return frozenset(name for name, parameter in model.named_parameters() if id(parameter) in own)


def frozen_names(
    model: TimmViT, patterns: Sequence[str] = (), linear_probe: bool = False, locked: Collection[str] = ()
) -> frozenset[str]:
    """The parameters that are not trained: those that the model itself fixes, and those requested.

    Args:
        model: the description of the model.
        patterns: shell patterns on timm's names; a pattern that matches a module freezes all of it (`blocks.[0-5]`).
        linear_probe: freeze everything but the classifier; without patterns.
        locked: names that the task freezes.

    Raises:
        UserError: a pattern matches nothing, nothing is left to train, or there is no classifier to probe with.
    """
    names = [name for name, _ in model.named_parameters()]
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad} | {*locked}
    if linear_probe:
        if not classifier_names(model):
            raise UserError("linear probing trains only the classifier, and this model has none")
        return frozenset(names) - classifier_names(model)
    for pattern in patterns:
        matched = {name for name in names if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")}
        if not matched:
            modules = [
                name for name, module in model.named_modules() if name and any(True for _ in module.parameters())
            ]
            near = did_you_mean(pattern, [*modules, *names], cutoff=0.0, most=3)
            raise UserError(f"--freeze {pattern!r} matches no parameter{near}")
        frozen |= matched
    if len(frozen) == len(names):
        raise UserError(f"--freeze {' '.join(patterns)} leaves none of the {len(names)} parameters to train")
    return frozenset(frozen)


def freeze(module: nn.Module, names: Collection[str]) -> None:
    """Freeze the parameters with these timm names that `module` holds."""
    own = timm_names(module)
    for name, parameter in module.named_parameters():
        if own[name] in names:
            parameter.requires_grad_(False)
