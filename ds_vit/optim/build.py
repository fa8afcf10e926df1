"""Build the optimizer that the DeepSpeed JSON names, and its parameter groups, without JIT-compiled kernels.

ZeRO passes an optimizer one flat tensor per group. Elementwise optimizers give the same result on it; they are torch's
or timm's, except Adagrad, whose constructor in torch depends on the shapes of the parameters (adagrad.py). LAMB, LARS
and Muon are this package's and receive the map of parameters by `attach`. The others are rejected by name.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from timm.optim import Lion

from ds_vit.device import has_fused_step
from ds_vit.fault_tolerance.errors import UserError, did_you_mean
from ds_vit.optim.adagrad import Adagrad
from ds_vit.optim.lamb import Lamb
from ds_vit.optim.lars import Lars
from ds_vit.optim.muon import Muon
from ds_vit.optim.per_parameter import OptimizerRules, PerParameterOptimizer
from ds_vit.optim.rate_factors import RateFactors, scale_steps
from ds_vit.parallel.zero_map import ZeroMap

_TORCH = ("AdamW", "Adam", "SGD", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop")
# Not torch's: Lion is timm's, the others are this package's.
_OTHERS: tuple[type[torch.optim.Optimizer], ...] = (Lion, Adagrad, Lamb, Lars, Muon)
_CLASSES = {cls.__name__.lower(): cls for cls in (*(getattr(torch.optim, name) for name in _TORCH), *_OTHERS)}
OPTIMIZERS = tuple(cls.__name__ for cls in _CLASSES.values())
"""The names that an `optimizer` block may have, in upper or lower case."""
# DeepSpeed's arguments that only choose an implementation; `build_optimizer` takes torch's fused or foreach one.
_IMPLEMENTATION_ARGUMENTS = ("torch_adam", "adam_w_mode", "fp32_optimizer_states", "fused", "foreach")
# Argument → why it is unsupported.
_UNSUPPORTED_ARGUMENTS = {
    "capturable": "CUDA graphs of a whole step are unsupported",
    "differentiable": "gradients through an optimizer step are unsupported",
    "caution": "it divides by the mean of a mask over a whole parameter, and under ZeRO an optimizer sees one flat "
    "tensor, so the result would depend on the layout",
}
_ELEMENTWISE = OptimizerRules()
# Optimizers that cannot step before `attach` → states per element. Muon's fallback is AdamW, which has more.
_NUM_STATES: dict[type, int] = {Lamb: 2, Lars: 1, Muon: 1}
STATES_OF_FALLBACK = 2
_UNSUPPORTED = {
    "adafactor": "Adafactor factors matrices, and under ZeRO an optimizer sees one flat tensor, so the result would "
    "depend on the layout",
    "lbfgs": "L-BFGS needs a closure over the whole batch, which DeepSpeed does not give",
    "sparseadam": "SparseAdam needs sparse gradients, which a ViT does not have",
}
_REMOVED = ("asgd", "rprop")


def optimizer_class(
    name: str | None, params: Mapping[str, Any], path: str
) -> tuple[type[torch.optim.Optimizer], dict[str, Any]]:
    """The class and arguments of the JSON's `optimizer` block.

    Names are read as DeepSpeed reads them: in upper or lower case, and "Adam" is AdamW unless `adam_w_mode` is false.

    Args:
        name: its "type".
        params: its "params".
        path: the file, named in messages.

    Returns:
        The class and its keyword arguments (without lr where the block has none).

    Raises:
        UserError: an unknown or unsupported optimizer, or an argument that it does not take.
    """
    if name is None:
        raise UserError(f'{path}: "optimizer" has no "type"; AdamW and SGD are the usual ones')
    if "max_grad_norm" in params:
        raise UserError(f'{path}: optimizer.params.max_grad_norm: write "gradient_clipping" at the top level instead')
    cls = _class_named(name, adam_w=params.get("adam_w_mode", True), path=path)
    params = {key: value for key, value in params.items() if key not in _IMPLEMENTATION_ARGUMENTS}
    _check_arguments(cls, params, path)
    _check_values(cls, params, path)
    return cls, params


def _class_named(name: str, *, adam_w: bool, path: str) -> type[torch.optim.Optimizer]:
    lowered = name.lower()
    if lowered in _UNSUPPORTED:
        raise UserError(f"{path}: optimizer {name} is unsupported: {_UNSUPPORTED[lowered]}; the nearest is AdamW")
    if lowered in _REMOVED:
        raise UserError(f"{path}: optimizer {name} was removed; use AdamW (its runs still predict and export)")
    if lowered not in _CLASSES:
        near = next(iter(difflib.get_close_matches(lowered, _CLASSES, cutoff=0.3)), "adamw")
        raise UserError(f"{path}: there is no optimizer {name!r} here; the nearest is {_CLASSES[near].__name__}")
    return _CLASSES["adamw" if lowered == "adam" and adam_w else lowered]


def _check_arguments(cls: type[torch.optim.Optimizer], params: dict[str, Any], path: str) -> None:
    """Raise for arguments that the class does not take; drop `bias_correction: true` and make `betas` a tuple."""
    rules = rules_of(cls)
    accepted = {*inspect.signature(cls.__init__).parameters, *rules.own_arguments} - {"self", "params"}
    if "bias_correction" in params and "bias_correction" not in accepted and params.pop("bias_correction") is not True:
        raise UserError(f"{path}: optimizer.params.bias_correction: {cls.__name__} always corrects; delete it")
    for key in params:
        if key in _UNSUPPORTED_ARGUMENTS and key in accepted and params[key]:
            reason = _UNSUPPORTED_ARGUMENTS[key]
            raise UserError(f"{path}: optimizer.params.{key} of {cls.__name__}: {reason}; delete it")
        if key in rules.spelled_otherwise:
            raise UserError(f"{path}: optimizer.params.{key}: {rules.spelled_otherwise[key]}")
        if key not in accepted:
            nearest = did_you_mean(key, accepted)
            raise UserError(f"{path}: optimizer.params.{key}: {cls.__name__} has no such argument{nearest}")
    if "betas" in params:
        betas = params["betas"]
        if not isinstance(betas, (list, tuple)) or len(betas) != 2:
            raise UserError(f"{path}: optimizer.params.betas must be two numbers [0.9, 0.999], not {betas!r}")
        params["betas"] = tuple(betas)


def states_per_element(cls: type[torch.optim.Optimizer], arguments: Mapping[str, Any]) -> int:
    """The number of fp32 states that the optimizer keeps for each element of a parameter.

    Args:
        cls: from `optimizer_class`.
        arguments: keyword arguments of the class.
    """
    if cls in _NUM_STATES:
        return _NUM_STATES[cls]
    parameter = torch.nn.Parameter(torch.zeros(2, 2))
    parameter.grad = torch.ones(2, 2)
    optimizer = cls([parameter], **{"lr": 1e-3, **arguments})
    optimizer.step()
    return sum(torch.is_tensor(v) and v.shape == parameter.shape for v in optimizer.state[parameter].values())


def rules_of(cls: type[torch.optim.Optimizer]) -> OptimizerRules:
    """The rules of an optimizer class: its own, or those of elementwise optimizers."""
    return getattr(cls, "rules", _ELEMENTWISE)


def _check_values(cls: type[torch.optim.Optimizer], params: Mapping[str, Any], path: str) -> None:
    """Check the arguments by constructing the optimizer, before a process group exists.

    The learning rate and the weight decay are checked with their flags.
    """
    others = {"lr", "weight_decay", *rules_of(cls).own_arguments}
    arguments = {key: value for key, value in params.items() if key not in others}
    try:
        cls([torch.zeros(1, requires_grad=True)], lr=1.0, **arguments)
    except (TypeError, ValueError) as error:
        raise UserError(f"{path}: optimizer.params of {cls.__name__}: {error}") from error


def parameter_groups(
    parameters: Sequence[tuple[str, torch.nn.Parameter]],
    weight_decay: float,
    undecayed: frozenset[str],
    fallback: frozenset[str] | None = None,
) -> list[dict[str, Any]]:
    """Split the trained parameters into decayed and undecayed groups, and these by `fallback` where it is given.

    Args:
        parameters: (timm name, parameter), in the model's order; frozen ones are in no group.
        weight_decay: of the decayed groups.
        undecayed: timm names that are not decayed.
        fallback: timm names whose groups get `use_fallback`; None for an optimizer with one update rule.

    Returns:
        At most two groups, or four with `fallback`; decayed ones first.
    """
    groups: dict[tuple[bool, bool], dict[str, Any]] = {}
    for name, parameter in parameters:
        if not parameter.requires_grad:
            continue
        is_undecayed, use_fallback = name in undecayed, fallback is not None and name in fallback
        settings: dict[str, Any] = {"params": [], "weight_decay": 0.0 if is_undecayed else weight_decay}
        if fallback is not None:
            settings["use_fallback"] = use_fallback
        groups.setdefault((is_undecayed, use_fallback), settings)["params"].append(parameter)
    return [groups[key] for key in sorted(groups)]


def build_optimizer(
    cls: type[torch.optim.Optimizer], groups: list[dict[str, Any]], arguments: Mapping[str, Any], device: torch.device
) -> torch.optim.Optimizer:
    """Construct the optimizer, with the fused implementation if the class has one for this device, else foreach."""
    others = {"weight_decay", *rules_of(cls).own_arguments}
    arguments = {key: value for key, value in arguments.items() if key not in others}
    accepted = inspect.signature(cls.__init__).parameters
    if "fused" in accepted and has_fused_step(device):
        arguments["fused"] = True
    elif "foreach" in accepted:
        arguments["foreach"] = True
    return cls(groups, **arguments)


def check_rate_factors(cls: type[torch.optim.Optimizer], arguments: Mapping[str, Any], asked_by: str) -> None:
    """Reject per-parameter learning rates where the update is not proportional to the learning rate.

    Args:
        cls: the optimizer.
        arguments: of the JSON.
        asked_by: what asks for them, for the message: "--layer-decay".

    Raises:
        UserError: names the argument.
    """
    if arguments.get("corrected_weight_decay"):
        raise UserError(
            f"{asked_by} does not work with corrected_weight_decay of {cls.__name__}, which decays by the square of "
            "the learning rate; delete it from optimizer.params"
        )


def describe_default_decay(cls: type[torch.optim.Optimizer], weight_decay: float | None, path: str) -> list[str]:
    """A line for people if the weight decay is 0 only because it was left out, and the class has another default.

    Args:
        cls: the optimizer.
        weight_decay: None if neither the JSON nor a flag sets it; it is then 0, as in DeepSpeed's optimizers.
        path: the JSON, named in the line.

    Returns:
        No line, or one.
    """
    own = inspect.signature(cls.__init__).parameters["weight_decay"].default
    if weight_decay is not None or not own:
        return []
    return [
        f"{path} does not mention optimizer.params.weight_decay: DeepSpeed's default 0 holds ({cls.__name__}'s own is "
        f"{own:g}); --weight-decay sets it"
    ]


def attach(optimizer: torch.optim.Optimizer, zero_map: ZeroMap, factors: Mapping[str, float]) -> RateFactors:
    """Attach the map of ZeRO's flat tensors and the per-parameter learning rates to an optimizer.

    Args:
        optimizer: from `build_optimizer`, after `deepspeed.initialize`.
        zero_map: the map of this rank.
        factors: timm name → factor on the learning rate, from `rate_factors`.

    Returns:
        The rates in use, through which a caller can hold parameters at 0.
    """
    rates = RateFactors(factors)
    if isinstance(optimizer, PerParameterOptimizer):
        optimizer.attach(zero_map, rates)
    else:
        scale_steps(optimizer, zero_map, rates)
    return rates
