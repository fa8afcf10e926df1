"""Initial weights from a file (`--initial-checkpoint`) or of timm (`--pretrained`), checked and loaded layer by layer.

Names and shapes are compared with the model's before anything is loaded. Position embeddings of another size, and on
request patch kernels, are resampled by timm's own `checkpoint_filter_fn`, which also translates foreign names. The
result for each tensor is kept, to be reported.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import timm
import torch
from timm.models import vision_transformer
from timm.models._hub import HF_WEIGHTS_NAME, _get_safe_alternatives
from torch import nn

from ds_vit.fault_tolerance.errors import UserError, enumerate_some, first_line
from ds_vit.models.hub import hub_file
from ds_vit.models.layers import MAIN_TOWER, Layer
from ds_vit.models.linear import added_names
from ds_vit.models.param_groups import classifier_names
from ds_vit.models.zoo import TimmViT, names_and_shapes
from ds_vit.tasks.registry import part_of
from ds_vit.tasks.task import Task
from ds_vit.weights.files import class_names, config_beside, open_prefixed, tokenizer_name

_PATCH_BIAS = "patch_embed.proj.bias"
_RESAMPLED = ("pos_embed", "patch_embed.proj.weight")  # their shapes depend on the image or patch size


def _filter_function(model: TimmViT) -> Callable[..., dict[str, torch.Tensor]]:
    """timm's `checkpoint_filter_fn` as timm binds it for this name when it loads its own weights."""
    name = model.pretrained_cfg["architecture"]
    module = timm.models.model_entrypoint(name).__module__
    filter_function = import_module(module).checkpoint_filter_fn
    if module.endswith(".deit"):
        return partial(filter_function, adapt_layer_scale=True)
    if "flexi" in name:
        return partial(filter_function, interpolation="bilinear", antialias=False)
    if "radio" in name:
        align_corners = any(part in name for part in vision_transformer._RADIO_ALIGN_CORNERS)
        return partial(filter_function, interpolation="bilinear", antialias=False, align_corners=align_corners)
    return filter_function


def require_tensors(contents: Mapping[str, Any]) -> None:
    """Reject a dictionary that holds other values than tensors, or nothing."""
    others = [f"{name} ({type(v).__name__})" for name, v in contents.items() if not isinstance(v, torch.Tensor)]
    if others or not contents:
        raise UserError(f"it is no state dict: it holds {enumerate_some(others)}")


def _translate(model: TimmViT, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors as timm's filter returns them: resampled, and under timm's names.

    Of another library's model, those that it has; numbers without dimensions get one where the model's have one.
    """
    if not isinstance(model, get_args(TimmViT)):
        wanted = {name: shape for name, shape in names_and_shapes(model).items() if name in tensors}
        return {name: tensors[name].view(s) if s == (1,) else tensors[name] for name, s in wanted.items()}
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints each bias that the model lacks; `_fit` reports them
            return _filter_function(model)(tensors, model)
    except (AssertionError, AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise UserError(f"timm cannot translate it ({type(error).__name__}: {first_line(error)})") from error


def _other_shapes(given: Mapping[str, torch.Size], wanted: Mapping[str, torch.Size]) -> dict[str, torch.Size]:
    """The shapes, in the file, of kernels and positions that have another one in the model.

    Under foreign names too: a file has one kernel of as many channels, and positions whose name says so.
    """
    other = {}
    kernel, positions = (wanted.get(name, torch.Size()) for name in _RESAMPLED[::-1])
    for name, shape in given.items():
        if len(shape) == 4 and shape[:2] == kernel[:2] and shape != kernel:
            other["patch_embed.proj.weight"] = shape
        is_position = name.rsplit(".", 1)[-1].startswith("pos") and len(shape) in (2, 3)
        if name == "pos_embed" and "register_tokens" in given:  # of DINOv2, with the class token's, which timm merges
            shape = torch.Size((1, shape[-2] - 1, shape[-1]))
        if is_position and positions and shape[-1] == positions[-1] and shape[-2] != positions[-2]:
            other["pos_embed"] = shape
    return other


def _new_classifier(
    model: TimmViT, wanted: Mapping[str, torch.Size], given: Mapping[str, torch.Size], *, beside_others: bool
) -> tuple[str, ...]:
    """The classifier's parameters, if the file has none, one of another number of classes, or a projection.

    Args:
        model: the description of the model.
        wanted, given: shapes in the model and in the file.
        beside_others: the file has parts that the model has not: a classifier without bias is a projection for them.
    """
    own = sorted(classifier_names(model))
    there = [name for name in own if name in given]
    other_classes = all(given[name][0] != wanted[name][0] and given[name][1:] == wanted[name][1:] for name in there)
    is_projection = beside_others and there == ["head.weight"] != own
    return tuple(own) if is_projection or (other_classes and there in ([], own)) else ()


def _check_lost_biases(model: TimmViT, ignored: Mapping[str, torch.Tensor]) -> None:
    """UserError if the model has no biases of query and value where those of a DINOv3 are not zero."""
    lost = [name for name in ignored if name.endswith("attn.qkv.bias")]  # split, it has other names
    if any(third.any() for name in lost for third in ignored[name].chunk(3)[::2]):
        name = model.pretrained_cfg["architecture"]
        raise UserError(
            f"it has biases of query and value ({enumerate_some(lost)}), and the model none; use {name}_qkvb"
        )


class InitialCheckpoint:
    """A file of initial weights that fits a model.

    Attributes:
        path: of the file.
        newly_initialised: the classifier's parameters, if the file has none or one of another number of classes, and
            those of each of `Task.parts` that the file has nothing of. They keep their drawn values.
        left_out: tensors of tasks' parts, such as a text tower, that the file has and the model does not, by name.
        adapted: resampled tensors by name, with their shape in the file.
        tokenizer: the name of the tokenizer of the file's text tower; empty if the file does not say it.
        ignored: unused tensors of the file, with their shape: a classifier of other classes, and those that timm's
            translation of foreign names leaves out or merges into others.
        tower: of the model, that these are the values of; `MAIN_TOWER` for one without further towers too.
        source: where the file comes from, for people.
    """

    def __init__(
        self,
        path: str | Path,
        model: TimmViT,
        *,
        resample_patch_embed: bool = False,
        classes: Sequence[str] = (),
        tower: str = MAIN_TOWER,
        task: type[Task] = Task,
        source: str = "",
    ) -> None:
        """Open a checkpoint and compare its names and shapes with the model's.

        Args:
            path: see `files.py`.
            model: the description of the model, on the meta device.
            resample_patch_embed: let kernels of another patch size be resampled, as positions are.
            classes: names of the model's classes; if the file names the same in another order, its classifier follows.
            tower: of which `model` is the description.
            task: whose main tower or whole model that is; without one, a ViT of timm's.
            source: as the attribute; by default the path.

        Raises:
            UserError: the file cannot be read, its patch size is another one, or names or shapes differ in more than
                the number of classes; the first five differences are named.
        """
        self.source = source or str(path)
        self.path = path = Path(path)
        separate = any(names.tower == tower for names in task.foreign_names)
        tensors, self._cut_off = open_prefixed(path, tower if separate else MAIN_TOWER)
        self.tower, self._task = tower, task
        self._wanted = names_and_shapes(model)
        self._parts = {
            part: names
            for part in task.parts
            if (names := sorted(name for name, _ in model.named_parameters() if name.startswith(part)))
        }
        self._averages = tuple(teacher for teacher, student in task.teachers.items() if student == tower)
        others = [name for name in tensors if part_of(name) and name not in self._wanted]
        self.left_out = {name: tensors.pop(name) for name in others if not name.startswith(tuple(self._parts))}
        self.tokenizer = tokenizer_name(path) if task.has_text else ""
        shapes = {name: x.shape for name, x in (tensors | self.left_out).items() if isinstance(x, torch.Tensor)}
        try:
            config_of = partial(config_beside, path)
            if found := [x for names in task.foreign_names for x in names.differences(model, shapes, config_of)]:
                raise UserError("; ".join(found))
            self._fit(model, dict(tensors), resample_patch_embed)
        except UserError as error:
            architecture = model.pretrained_cfg["architecture"]
            raise UserError(f"initial checkpoint {path} does not fit {architecture}: {error}") from error
        self._classifier = classifier_names(model) - {*self.newly_initialised}
        self._rows, note = self._class_rows(class_names(path), classes)
        remarks = (names.remark(tensors | self._values) for names in task.foreign_names if names.tower == tower)
        self._note = "; ".join(filter(None, (note, *remarks)))

    def _class_rows(self, theirs: Sequence[str], ours: Sequence[str]) -> tuple[list[int] | None, str]:
        """The file's row of each class where the order differs, and a line for people."""
        theirs = list(theirs)
        if not self._classifier or not theirs or not ours or theirs == list(ours):
            return None, ""
        if len({*theirs}) == len(theirs) and sorted(theirs) == sorted(ours):
            return [theirs.index(name) for name in ours], "classifier rows reordered by the names of the classes"
        unknown = sorted({*ours} - {*theirs})
        return None, f"the file's classes have other names (not {enumerate_some(unknown)}): its rows are used by number"

    def _fit(self, model: TimmViT, tensors: dict[str, torch.Tensor], resample_patch_embed: bool) -> None:
        """Translate and compare; UserError for what differs."""
        wanted, parts = self._wanted, tuple(self._parts)
        opened = {name: tensor for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor)}
        tensors = self._task.fit_tensors(model, tensors)
        of_parts = {name: tensors.pop(name) for name in [*tensors] if name.startswith(parts)}
        self._foreign = any(not name.startswith("head.") for name in set(tensors) - set(wanted))
        self._of_timm = isinstance(model, get_args(TimmViT))
        parameters = [name for name, _ in model.named_parameters() if name in opened]
        if integers := [name for name in parameters if not opened[name].is_floating_point()]:
            raise UserError(
                f"it holds no floating-point numbers in {len(integers)} tensors ({enumerate_some(integers)}): convert "
                "quantised weights back first"
            )
        shapes = {name: tensor.shape for name, tensor in opened.items()}
        self.adapted = _other_shapes({name: shapes[name] for name in shapes if name not in of_parts}, wanted)
        if "patch_embed.proj.weight" in self.adapted and not resample_patch_embed:
            theirs, ours = (tuple(s["patch_embed.proj.weight"][2:]) for s in (self.adapted, wanted))
            raise UserError(
                f"it is of patches of {theirs[0]} x {theirs[1]} pixels, and the model's are {ours[0]} x {ours[1]}; "
                f"give --model-kwargs patch_size={theirs[0]}, or have its kernels resampled by --resample-patch-embed"
            )
        if self._foreign:  # timm knows files by parameters of the encoder itself: the mask token of a published DINOv2
            others = {name: tensor for name, tensor in (of_parts | self.left_out).items() if "." not in name}
            values = _translate(model, tensors | others)
            values = {name: tensor for name, tensor in values.items() if name not in self.left_out}
        else:  # a model of the user's own may have shapes that timm's filter does not read
            changed, values = self.adapted if self._of_timm else tensors, tensors
            with contextlib.suppress(UserError):  # positions of other tokens, which the differences below name
                values = tensors | _translate(model, {name: tensors[name] for name in changed})
        require_tensors(values | of_parts)
        values = {name: tensor for name, tensor in values.items() if tensor.numel()}
        self._values = self._task.fit_tensors(model, values) | of_parts
        if _PATCH_BIAS in wanted and self._of_timm:  # an export of such a model to another tool has it in the positions
            self._values.setdefault(_PATCH_BIAS, torch.zeros(wanted[_PATCH_BIAS]))
        if not any(name.startswith("head.") for name in wanted):
            self._values = {name: tensor for name, tensor in self._values.items() if not name.startswith("head.")}
        given = {name: tensor.shape for name, tensor in self._values.items()}
        new = [
            *_new_classifier(model, wanted, given, beside_others=bool(self.left_out)),
            *(name for names in self._parts.values() if not given.keys() & {*names} for name in names),
            *(name for name in added_names(model) if name not in given),
        ]
        self.newly_initialised = tuple(dict.fromkeys(new))  # a part may have the classifier
        in_file, in_model = ({name: str(tuple(s)) for name, s in shapes.items()} for shapes in (given, wanted))
        differences = [
            f"{name} is {in_file.get(name, 'missing')} in the file and {in_model.get(name, 'missing')} in the model"
            for name in in_model | in_file
            if name not in self.newly_initialised and in_file.get(name) != in_model.get(name)
        ]
        if differences:
            raise UserError(
                f"a model of {len(wanted)} tensors, in {len(differences)} places: {'; '.join(differences[:5])}; "
                "give the --model and --model-kwargs of the file"
            )
        used = set(wanted) - set(self.newly_initialised)
        if self._foreign:  # under other names, in the same memory
            memory = {tensor.untyped_storage().data_ptr() for tensor in self._values.values()}
            used |= {name for name, tensor in opened.items() if tensor.untyped_storage().data_ptr() in memory}
        self.ignored = {name: shape for name, shape in shapes.items() if name not in used and shape.numel()}
        _check_lost_biases(model, {name: opened[name] for name in self.ignored})

    @property
    def towers(self) -> frozenset[str]:
        """The towers of the model that may have values here; a teacher begins as its student."""
        further = {part.removesuffix(".") for part in self._parts}
        return frozenset((self.tower, *self._averages, *further))

    @property
    def summary(self) -> str:
        """The tensors that are loaded, resampled, newly initialised and ignored, for people."""
        num_taken = len(self._wanted) - len(self.newly_initialised) - len(self.adapted)
        how = "under names that timm translates" if self._foreign and self._of_timm else "as they are"
        parts = [f"{num_taken} of {len(self._wanted)} tensors taken {how}"]
        adapted = [f"{name} {tuple(s)} in the file to {tuple(self._wanted[name])}" for name, s in self.adapted.items()]
        ignored = [f"{name} {tuple(shape)}" for name, shape in sorted(self.ignored.items())]
        parts += [f"resampled: {', '.join(adapted)}"] if adapted else []
        parts += [f"newly initialised: {enumerate_some(self.newly_initialised)}"] if self.newly_initialised else []
        parts += [f"ignored: {enumerate_some(ignored)}"] if ignored else []
        parts += [f'names begin with "{self._cut_off}" in the file, which is cut off'] if self._cut_off else []
        parts += [self._note] if self._note else []
        return "; ".join(parts)

    def covers(self, layer: nn.Module) -> bool:
        """Whether the file gives every value of a layer."""
        return not any(self._name(layer, local) in self.newly_initialised for local in layer.state_dict())

    def _name(self, layer: nn.Module, local: str) -> str:
        """The name in the file of a layer's tensor, where a teacher has its student's."""
        prefix = layer.prefix if isinstance(layer, Layer) else ""
        name = local if prefix.removesuffix(".") in self._averages else prefix + local
        return name if self.tower == MAIN_TOWER else name.removeprefix(f"{self.tower}.")

    @cached_property
    def fingerprint(self) -> str:
        """Equal for files of the same values; of each tensor at most 1,024 elements are read, from all over it."""
        digest = hashlib.blake2b(digest_size=16)
        for name in sorted(self._values):
            value = self._values[name]
            flat = value.reshape(-1)
            read = flat[:: max(1, flat.numel() // 1024)].to(torch.float64)
            digest.update(f"{name} {tuple(value.shape)} ".encode() + read.numpy().tobytes())
        return digest.hexdigest()

    def load(self, layer: nn.Module) -> None:
        """Copy the file's values into a layer of `take_apart`; only these are read.

        Raises:
            UserError: one of them is NaN or infinite.
        """
        with torch.no_grad():
            for local, tensor in layer.state_dict().items():
                name = self._name(layer, local)
                if name not in self.newly_initialised:
                    value = self._values[name]
                    if num_bad := value.numel() - int(value.isfinite().sum()):
                        bad = f"{name} has {num_bad:,} NaN or infinite values of {value.numel():,}"
                        raise UserError(f"weights {self.path}: {bad}; its run diverged: take an earlier checkpoint")
                    tensor.copy_(value[self._rows] if self._rows and name in self._classifier else value)


def find_pretrained(
    model: TimmViT, flag: str = "--pretrained", instead: str = "--initial-checkpoint"
) -> tuple[Path, str]:
    """The weights that a model's name refers to: timm's or a repository's, downloaded if they are not in the cache, or
    those in its folder.

    Args:
        model: from `create_model`; its `pretrained_cfg` says which: the tag given, else timm's default.
        flag: that asks for them, for messages.
        instead: the flag that takes a file of them.

    Returns:
        The file in the cache, or the folder; the name with its tag, the repository and the revision, for people.

    Raises:
        UserError: timm has none of that name, or they are neither cached nor can be downloaded; the message names
            the file and where to put it.
    """
    cfg = model.pretrained_cfg
    if cfg.get("source") == "local-dir":
        return Path(cfg["file"]), cfg["file"]
    name = f"{cfg['architecture']}.{cfg['tag']}" if cfg.get("tag") else cfg["architecture"]
    repository = cfg.get("hf_hub_id")
    if not repository:
        way_out = "drop the flag, or use one of the names of `timm.list_pretrained('vit_*')`"
        if cfg.get("url"):
            way_out = f"download {cfg['url']} and give that file by {instead}"
        raise UserError(f"{flag}: timm has no weights of {name} on the Hugging Face Hub; {way_out}")
    whole = cfg.get("hf_hub_filename") or HF_WEIGHTS_NAME
    files = [*_get_safe_alternatives(whole), whole]  # timm's order: safetensors first
    what = f"{flag}: the weights of {name} are"
    in_place = f" in place of {flag}" if flag == "--pretrained" else ""  # a teacher's file needs its name
    path = hub_file(repository, files, what, f", or give that file by {instead}{in_place}")
    return path, f"{name} ({repository}, revision {path.parent.name[:12]})"
