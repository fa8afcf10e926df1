"""timm's models as descriptions: a `VisionTransformer`, `VisionTransformerDistilled` or `Eva` on the meta device, or an
error that says why not.

Nothing here changes a timm model. `create_model` calls timm's factory without allocating memory, and rejects
unsupported models before any process group exists.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, NamedTuple, TypeAlias, get_args

import timm
import torch
from timm.models import Eva, VisionTransformer, VisionTransformerDistilled
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ds_vit.fault_tolerance.errors import UserError, did_you_mean, first_line
from ds_vit.models import large_sizes
from ds_vit.models.hub import Described, describe

TimmViT: TypeAlias = VisionTransformer | Eva

# timm's modules whose names build one of the two classes, exactly as timm implements it, and ours.
_OWN = large_sizes.__name__.rsplit(".", 1)[-1]
_MODULES = ("vision_transformer", "eva", "deit", "vision_transformer_hybrid", "vitamin", _OWN)

# Constructor arguments that a flag or this package decides.
_RESERVED = {
    "num_classes": "use --num-classes",
    "img_size": "use --img-size",
    "drop_path_rate": "use --drop-path",
    "device": "it follows the launcher",
    "dtype": "it follows the DeepSpeed JSON",
    "dynamic_img_size": "the image size of a run is fixed; use --img-size",
    "dynamic_img_pad": "the image size of a run is fixed; use --img-size",
}


@dataclass(frozen=True)
class ModelSpec:
    """A timm model, in timm's terms.

    Attributes:
        name: a timm name, with or without a pretrained tag (`vit_base_patch16_224.augreg_in21k`), one of
            large_sizes.py, `local-dir:FOLDER` or `hf-hub:ORG/NAME`.
        num_classes: outputs of the classifier.
        img_size: height and width in pixels, one number for a square; None is the model's own.
        drop_path_rate: stochastic depth rate of the last block, from 0 at the first; None is the model's own.
        model_kwargs: further arguments of timm's constructor.
        teacher: the fixed model that this one is distilled from; None for none.
    """

    name: str
    num_classes: int = 1000
    img_size: int | tuple[int, int] | None = None
    drop_path_rate: float | None = None
    model_kwargs: Mapping[str, Any] = field(default_factory=dict)
    teacher: TeacherSpec | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any], **resolved: Any) -> ModelSpec:
        """The spec of flags by their recipe names; `resolved` has attributes that are others there."""
        given = {"img_size": values.get("img_size"), "model_kwargs": values.get("model_kwargs") or {}}
        return cls(values["model"], **{**given, **resolved})


class TeacherSpec(NamedTuple):
    """A fixed teacher.

    Attributes:
        model: timm's; its classes and image size are those of the student.
        pixels: mean and std of its images, by name; those missing are the model's own.
    """

    model: ModelSpec
    pixels: Mapping[str, Any]


def supported_names() -> list[str]:
    """Every timm name that builds one of the classes, and the larger sizes of large_sizes.py, sorted."""
    return sorted({name for module in _MODULES for name in timm.list_models(module=module)})


def require_supported_name(name: str) -> None:
    """Reject models that timm does not have or that cannot be split.

    Raises:
        UserError: the message lists the nearest names.
    """
    architecture = describe(name).architecture
    if timm.is_model(architecture) and timm.models.is_model_in_modules(architecture, _MODULES):
        return
    hint = did_you_mean(architecture, supported_names(), most=3) or "; `timm.list_models('vit_*')` lists names"
    if not timm.is_model(architecture):
        raise UserError(f"timm {timm.__version__} has no model named {name!r}{hint}")
    family = timm.models.model_entrypoint(architecture).__module__.rsplit(".", 1)[-1]
    raise UserError(
        f"model {name!r} is of timm's {family!r} family; ds_vit trains models of the classes VisionTransformer "
        f"and Eva only{hint}"
    )


def _constructor_arguments(spec: ModelSpec, model: Described) -> dict[str, Any]:
    """timm's keyword arguments of a spec; UserError for names that timm does not have or that a flag sets."""
    kind = Eva if timm.models.is_model_in_modules(model.architecture, ("eva",)) else VisionTransformer
    parameters = inspect.signature(kind.__init__).parameters
    legal = [name for name in parameters if name != "self"]
    for key, value in spec.model_kwargs.items():
        if key in _RESERVED:
            raise UserError(f"model_kwargs cannot set {key!r}: {_RESERVED[key]}")
        if key not in legal:
            near = did_you_mean(key, legal, cutoff=0.0)
            raise UserError(f"timm's {kind.__name__} has no argument {key!r} in model_kwargs{near}")
        types = {parameters[key].annotation, *get_args(parameters[key].annotation)}
        if isinstance(value, str) and bool in types and str not in types:
            raise UserError(f"model_kwargs {key}={value!r}: it is true or false; write {key}=true or {key}=false")
    given = {**model.arguments, **spec.model_kwargs}
    if given.get("in_chans", 3) != 3:
        raise UserError(f"model_kwargs in_chans={given['in_chans']}: images are read in three colours")
    arguments: dict[str, Any] = {**given, "num_classes": spec.num_classes, "dynamic_img_size": False}
    if spec.img_size is not None:
        arguments["img_size"] = spec.img_size
    if spec.drop_path_rate is not None:
        arguments["drop_path_rate"] = spec.drop_path_rate
    return arguments


def _check_classifier(model: TimmViT, name: str) -> None:
    """Reject a model without logits, or with logits for every token."""
    if model.num_classes < 1:
        raise UserError(f"model {name!r} with num_classes 0 has no classifier to train; give --num-classes")
    if not model.global_pool:
        raise UserError(f"model {name!r} with global_pool '' gives logits for every token; use 'token' or 'avg'")


def _check_trainable(model: TimmViT, name: str) -> None:
    """Reject modules whose training would depend on the layout, or whose draws cannot be keyed."""
    for module_name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise UserError(
                f"model {name!r} holds BatchNorm ({module_name}), whose statistics follow the micro-batch: its loss "
                "would depend on the layout, so it can be evaluated but not trained; take a name without a BatchNorm "
                "stem, for example vit_base_patch16_224"
            )
        attention_dropout = getattr(getattr(module, "attn_drop", None), "p", 0.0) or getattr(module, "attn_drop_p", 0.0)
        if attention_dropout:
            raise UserError(
                f"attn_drop_rate {attention_dropout} ({module_name}): attention dropout happens inside the fused "
                "attention kernel, where its draws cannot be keyed by sample; set it to 0 and use --drop-path or "
                "proj_drop_rate"
            )
        if isinstance(module, nn.modules.dropout._DropoutNd) and not 0.0 <= module.p < 1.0:
            raise UserError(f"dropout rate {module.p} ({module_name}) must lie in [0, 1)")
        if getattr(module, "aug_active", False):
            neutral = {"shift_coords": 0.0, "jitter_coords": 1.0, "rescale_coords": 1.0}
            random = [key for key, value in neutral.items() if getattr(module, key) not in (None, value)]
            if random:
                active = ", ".join(f"rope_{key}={getattr(module, key)}" for key in random)
                switch = " ".join(f"rope_{key}={neutral[key]}" for key in random)
                raise UserError(
                    f"model {name!r} draws random RoPE coordinates once per batch in training ({active}), which would "
                    f"depend on the micro-batch; switch it off with --model-kwargs {switch}"
                )
            module.aug_active = False  # neutral settings: spare the draws and keep the cached table


def fills_nothing(func: Any, args: tuple[Any, ...]) -> bool:
    """Whether an operator of torch would change a tensor in place that has no memory (on the meta device)."""
    return bool(args) and isinstance(args[0], torch.Tensor) and args[0].is_meta and func._schema.name.endswith("_")


class NothingToFill(TorchDispatchMode):
    """Skips operations that fill tensors on the meta device.

    timm's constructors initialise each parameter there too, and torch computes each operation's shapes in Python, which
    takes half of the time of a description.
    """

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """The tensor itself, or torch's result."""
        return args[0] if fills_nothing(func, args) else func(*args, **(kwargs or {}))


def create_model(
    spec: ModelSpec, *, for_training: bool = True, device: str = "meta", classifier: bool = True
) -> TimmViT:
    """timm's model of a spec, on the meta device its structure, names and shapes without memory.

    `dynamic_img_size`, which some names switch on, is switched off: the image size of a run is fixed, and a fixed
    size lets rotary tables be computed once. Parameters and names do not depend on it.

    Args:
        spec: what to build.
        for_training: also reject models that can be evaluated but not trained identically in every layout.
        device: of its tensors; except on the meta device they have timm's initial values.
        classifier: whether training requires one; only then may it have a distillation token.

    Returns:
        a `VisionTransformer` or `Eva`.

    Raises:
        UserError: the name is unknown or of another class, an argument is unknown, reserved or refused by timm, or
            (for training) the model has BatchNorm, attention dropout, random RoPE or no classifier.
    """
    require_supported_name(spec.name)
    described = describe(spec.name)
    arguments = _constructor_arguments(spec, described)
    try:
        with NothingToFill():
            model = timm.create_model(
                described.name, pretrained_cfg=described.pretrained_cfg, device=device, **arguments
            )
    except (AssertionError, KeyError, RuntimeError, TypeError, ValueError, ZeroDivisionError) as error:
        shown = ", ".join(f"{key}={value!r}" for key, value in arguments.items())
        raise UserError(f"timm cannot build {spec.name!r} with {shown}: {first_line(error)}") from error
    model.to(device)  # timm makes some activations without a device (PReLU has a weight)
    kinds = (VisionTransformer, Eva, *((VisionTransformerDistilled,) if classifier else ()))
    if type(model) not in kinds:
        near = did_you_mean(spec.name.replace("distilled_", ""), supported_names())
        differs = "whose forward differs from VisionTransformer's and Eva's"
        raise UserError(f"model {spec.name!r} is timm's {type(model).__name__}, {differs}{near}")
    if min(model.patch_embed.grid_size) < 1:
        raise UserError(f"img_size {spec.img_size} is smaller than one patch of {spec.name!r}")
    if not len(model.blocks):
        raise UserError(f"model {spec.name!r} has no blocks; depth must be 1 or more")
    if for_training:
        if classifier:
            _check_classifier(model, spec.name)
        _check_trainable(model, spec.name)
    return model


def image_size(model: TimmViT) -> tuple[int, int]:
    """(height, width) in pixels of the images that the model takes."""
    height, width = model.patch_embed.img_size
    return height, width


def require_whole_patches(
    model: TimmViT, name: str, sizes: Iterable[int] | None = None, flag: str = "--img-size"
) -> None:
    """Check that images have no pixels outside of patches.

    Args:
        model: named as `name`.
        name: for messages.
        sizes: sides of a flag's square images; None for images of the model's size.
        flag: its spelling.

    Raises:
        UserError: they have.
    """
    patches = model.patch_embed.patch_size
    for size, patch in zip(image_size(model), patches, strict=True) if sizes is None else product(sizes, patches):
        if size % patch:
            near = max(1, round(size / patch)) * patch
            why = f"no multiple of the patch size {patch} of {name!r}"
            raise UserError(f"images of {size} pixels are {why}; the nearest for {flag} is {near}")


def require_all_patches(model: TimmViT, name: str) -> None:
    """Raise UserError if a model, named as `name`, leaves patches out, or pixels that lie in no patch."""
    if not isinstance(model.patch_drop, (nn.Identity, type(None))):
        dropped = f"model_kwargs patch_drop_rate {model.patch_drop.prob} of {name!r} leaves patches out"
        raise UserError(f"{dropped}, and the task needs all of them; drop it")
    require_whole_patches(model, name)


def num_parameters(model: nn.Module) -> int:
    """The number of parameters of a model, trained or not; on the meta device too."""
    return sum(parameter.numel() for parameter in model.parameters())


def names_and_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """timm's state dict as names and shapes: parameters and persistent buffers, in timm's order."""
    return {name: tensor.shape for name, tensor in model.state_dict().items()}
