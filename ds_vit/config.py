"""The run's configuration: flags, a YAML recipe and the DeepSpeed JSON come together here, and only here.

`RunConfig` is the typed, frozen table of every flag; the command line and the recipe are generated from it. A flag that
would have no effect, a contradiction and an illegal combination are refused here, in plain words, before any process
group exists. Flags that timm has keep timm's spelling, meaning and default.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import difflib
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import yaml

from ds_vit.durations import Interval, parse_seconds


def _flag(
    default: Any,
    section: str,
    text: str,
    *,
    short: Sequence[str] = (),
    neutral: Sequence[Any] = (),
    type: Any = None,
    nargs: int | str | None = None,
    choices: Sequence[str] | None = None,
    spelling: str | None = None,
    metavar: str | None = None,
) -> Any:
    """A dataclass field that is also a flag; `neutral` values may always be written, even where they do nothing."""
    meta = {
        "section": section,
        "help": text,
        "short": tuple(short),
        "neutral": tuple(neutral),
        "type": type,
        "nargs": nargs,
        "choices": choices,
        "spelling": spelling,
        "metavar": metavar,
    }
    if isinstance(default, (dict, list)):
        return field(default_factory=lambda: default.copy(), metadata=meta)
    return field(default=default, metadata=meta)


_M, _D, _A, _L, _O, _S, _R = "model", "data", "augmentation", "loss", "optimizer", "schedule", "run"


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Every flag of `launch/train.py`, by the name it has in a recipe; defaults are timm's where timm has the flag."""

    deepspeed_config: str = _flag("", _R, "DeepSpeed JSON file", spelling="--deepspeed_config", metavar="FILE")
    pp: int = _flag(1, _R, "pipeline stages", neutral=(1,), type=int)
    tp: int = _flag(1, _R, "tensor-parallel ranks", neutral=(1,), type=int)
    tp_across_hosts: bool = _flag(False, _R, "let tensor-parallel groups lie on two hosts")
    sequence_parallel: bool = _flag(False, _R, "cut the tokens too, between the layers that --tp cuts")
    class_parallel: str = _flag(
        "auto", _R, "cut the classifier over classes under --tp", neutral=("auto",), choices=("auto", "on", "off")
    )
    check_replicas: int = _flag(0, _R, "steps between bitwise comparisons of replicas", neutral=(0,), type=int)
    pp_partition: str = _flag("", _R, "first layer of each stage and the number of layers: 0,7,14", neutral=("",))

    model: str = _flag("vit_base_patch16_224", _M, "timm name of a VisionTransformer or Eva model")
    model_kwargs: Mapping[str, Any] = _flag({}, _M, "arguments of the model's constructor", nargs="*", metavar="K=V")
    num_classes: int | None = _flag(None, _M, "classes of the head (default: the data's)", type=int)
    img_size: int | None = _flag(None, _M, "image side in pixels (default: the model's)", type=int)
    drop: float = _flag(0.0, _M, "dropout before the head", neutral=(0.0,), type=float)
    drop_path: float = _flag(0.0, _M, "stochastic depth rate of the last block", neutral=(0.0,), type=float)
    initial_checkpoint: str = _flag(
        "", _M, "weights to start from: .safetensors or .pth in timm's names", metavar="FILE"
    )
    grad_checkpointing: bool = _flag(False, _M, "recompute activations in the backward pass")
    freeze: Sequence[str] = _flag((), _M, "timm parameter names (patterns) that are not trained", nargs="+", type=str)
    linear_probe: bool = _flag(False, _M, "train the classifier head alone")

    dataset: str = _flag("", _D, "digits, torch/cifar10, …; empty: image folders or tars in --data-dir")
    data_dir: str = _flag("", _D, "folder that holds train/ and val/ or validation/ (or .tar files)", metavar="DIR")
    train_split: str = _flag("train", _D, "name of the training split")
    val_split: str = _flag("validation", _D, "name of the evaluation split; '': no evaluation", neutral=("",))
    dataset_download: bool = _flag(False, _D, "let torchvision download the data set")
    workers: int = _flag(4, _D, "loader processes a rank (0: load in the training process)", short=("-j",), type=int)
    on_bad_image: str = _flag("error", _D, "an image that cannot be decoded", choices=("error", "skip"))

    no_aug: bool = _flag(False, _A, "resize and crop only")
    mean: Sequence[float] | None = _flag(None, _A, "pixel mean, 0 to 1 (default: the model's)", nargs="+", type=float)
    std: Sequence[float] | None = _flag(None, _A, "pixel deviation (default: the model's)", nargs="+", type=float)
    interpolation: str = _flag("", _A, "resize filter of evaluation (default: the model's)")
    crop_pct: float | None = _flag(None, _A, "centre-crop share of evaluation (default: the model's)", type=float)
    crop_mode: str = _flag("", _A, "evaluation crop", choices=("center", "squash", "border"))
    train_crop_mode: str = _flag("", _A, "training crop", choices=("rrc", "rkrc", "rkrr"))
    train_interpolation: str = _flag("random", _A, "resize filter of training")
    scale: Sequence[float] = _flag((0.08, 1.0), _A, "random-resized crop: area", nargs=2, type=float)
    ratio: Sequence[float] = _flag((3 / 4, 4 / 3), _A, "random-resized crop: aspect ratio", nargs=2, type=float)
    hflip: float = _flag(0.5, _A, "horizontal flip probability", neutral=(0.0,), type=float)
    vflip: float = _flag(0.0, _A, "vertical flip probability", neutral=(0.0,), type=float)
    color_jitter: float = _flag(0.4, _A, "colour jitter strength (off under --aa)", neutral=(0.0,), type=float)
    color_jitter_prob: float | None = _flag(None, _A, "probability of the colour jitter", type=float)
    grayscale_prob: float = _flag(0.0, _A, "probability of turning grey", neutral=(0.0,), type=float)
    gaussian_blur_prob: float = _flag(0.0, _A, "probability of blurring", neutral=(0.0,), type=float)
    aa: str = _flag("", _A, "policy: rand-m9-mstd0.5-inc1, augmix-m5, 3a, original, v0, …", neutral=("", "none"))
    aug_repeats: int = _flag(0, _A, "repeated augmentation: copies of a sample in an epoch", neutral=(0, 1), type=int)
    reprob: float = _flag(0.0, _A, "random erasing probability", neutral=(0.0,), type=float)
    remode: str = _flag("pixel", _A, "random erasing filling", choices=("const", "rand", "pixel"))
    recount: int = _flag(1, _A, "random erasing count", type=int)
    mixup: float = _flag(0.0, _A, "mixup alpha", neutral=(0.0,), type=float)
    cutmix: float = _flag(0.0, _A, "cutmix alpha", neutral=(0.0,), type=float)
    cutmix_minmax: Sequence[float] | None = _flag(
        None, _A, "cutmix box side, smallest and largest", nargs=2, type=float
    )
    mixup_prob: float = _flag(1.0, _A, "probability of mixing a pair", type=float)
    mixup_switch_prob: float = _flag(0.5, _A, "probability of cutmix where both are on", type=float)
    mixup_off_epoch: int = _flag(0, _A, "stop mixing from this epoch on (0: never)", neutral=(0,), type=int)

    smoothing: float = _flag(0.1, _L, "label smoothing", neutral=(0.0,), type=float)
    bce_loss: bool = _flag(False, _L, "binary cross-entropy in place of softmax")
    bce_sum: bool = _flag(False, _L, "sum the binary cross-entropy over classes")
    bce_target_thresh: float | None = _flag(None, _L, "binarise soft targets above this", type=float)

    lr: float | None = _flag(None, _O, "base learning rate (default: the JSON's)", type=float)
    weight_decay: float | None = _flag(None, _O, 'value for an "auto" weight_decay in the JSON', type=float)
    clip_grad: float | None = _flag(None, _O, 'value for an "auto" gradient_clipping in the JSON', type=float)
    layer_decay: float | None = _flag(None, _O, "layer-wise learning-rate decay", neutral=(None, 1.0), type=float)
    lr_scale_by_batch: str = _flag(
        "none",
        _O,
        "scale the learning rate with global batch / --lr-base-size",
        neutral=("none",),
        choices=("none", "linear", "sqrt"),
    )
    lr_base_size: int = _flag(256, _O, "global batch that the unscaled learning rate is meant for", type=int)
    model_ema: bool = _flag(False, _O, "keep an exponential moving average of the weights, and evaluate it too")
    model_ema_decay: float = _flag(0.9998, _O, "decay of the average", type=float)
    model_ema_warmup: bool = _flag(False, _O, "let the decay of the average grow from 0")
    norm_dtype: str = _flag(
        "float32",
        _O,
        "type that norms compute in where the model is in 16 bits",
        neutral=("float32",),
        choices=("float32", "model"),
    )
    tf32: bool = _flag(False, _O, "let fp32 matrix products use a GPU's TF32 cores")
    on_nonfinite: str = _flag("stop", _O, "a step whose gradient is not finite", choices=("stop", "skip"))
    spike_factor: float | None = _flag(
        None, _O, "treat a loss or gradient norm above this many times its recent mean alike", type=float
    )
    rollback: int = _flag(
        0,
        _O,
        "where a run would stop over a bad step: go back to the last checkpoint and leave out the samples since then, "
        "at most this many times",
        neutral=(0,),
        type=int,
    )
    grad_stats_interval: int = _flag(
        0, _O, "steps between gradient statistics by layer (0: none)", neutral=(0,), type=int
    )
    batch_size: int | None = _flag(
        None, _O, 'micro-batch a rank where the JSON says "auto" (128)', short=("-b",), type=int
    )
    grad_accum_steps: int | None = _flag(None, _O, 'accumulation where the JSON says "auto" (1)', type=int)

    epochs: int | None = _flag(None, _S, "length of training and of the schedule (300)", type=int)
    max_steps: int | None = _flag(None, _S, "stop after this many optimizer steps", type=int)
    sched: str = _flag(
        "cosine", _S, "learning-rate schedule", neutral=("constant",), choices=("cosine", "linear", "constant", "wsd")
    )
    warmup_steps: int | None = _flag(None, _S, "warm-up in optimizer steps", neutral=(0,), type=int)
    warmup_epochs: float | None = _flag(None, _S, "warm-up in epochs (5)", neutral=(0.0,), type=float)
    warmup_lr: float = _flag(1e-5, _S, "learning rate that warm-up starts from", neutral=(0.0,), type=float)
    min_lr: float = _flag(0.0, _S, "learning rate that the schedule ends at", neutral=(0.0,), type=float)
    wsd_decay_fraction: float = _flag(0.1, _S, "share of the run in which wsd decays", type=float)

    output: str = _flag("", _R, "folder of the run (default: runs/<time>-<model>)", metavar="DIR")
    seed: int = _flag(42, _R, "seed of everything random", type=int)
    resume: str = _flag("none", _R, "checkpoint to go on from: none, auto or a path", neutral=("none",))
    allow_batch_change: bool = _flag(False, _R, "go on from a checkpoint with another global batch")
    checkpoint_interval: str = _flag(
        "0", _R, "optimizer steps (500) or time (30m) between checkpoints; 0: when interrupted alone", neutral=("0",)
    )
    keep_checkpoints: int = _flag(2, _R, "checkpoints to keep beside the best one (0: all)", type=int)
    stop_before_seconds: float | None = _flag(
        None, _R, "save and stop this long before --time-limit or the end of a Slurm job", type=float
    )
    time_limit: str = _flag("", _R, "save and stop after this time: 90m, 24h", neutral=("",))
    log_samples: bool = _flag(False, _R, "write which samples each step used, to samples/ in the output folder")
    log_interval: int = _flag(50, _R, "optimizer steps between lines of metrics.jsonl", type=int)
    eval_interval: int = _flag(1, _R, "epochs between evaluations (0: at the end alone)", neutral=(0,), type=int)
    validation_batch_size: int | None = _flag(None, _R, "images a rank in evaluation", short=("-vb",), type=int)
    eval_only: bool = _flag(False, _R, "evaluate the initial weights and stop")
    stall_seconds: float | None = _flag(
        None, _R, "end a run that makes no progress for so long (300 with several ranks; 0: never)", type=float
    )
    verbose: bool = _flag(False, _R, "let DeepSpeed say everything it has to say")


FIELDS: dict[str, dataclasses.Field] = {f.name: f for f in dataclasses.fields(RunConfig)}


def default_of(name: str) -> Any:
    """The default of a flag, by its recipe name."""
    f = FIELDS[name]
    return f.default if f.default is not dataclasses.MISSING else f.default_factory()


def spelling(name: str) -> str:
    """How a flag is written on the command line: `drop_path` → `--drop-path`."""
    return FIELDS[name].metadata["spelling"] or "--" + name.replace("_", "-")


class _Parser(argparse.ArgumentParser):
    """argparse, with an unknown flag answered by the nearest known one, and errors as ValueError."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def build_parser(
    program: str = "train.py",
    description: str = "Train a Vision Transformer through DeepSpeed: "
    "deepspeed launch/train.py --deepspeed_config FILE …",
    only: Collection[str] | None = None,
    show_defaults: bool = True,
) -> argparse.ArgumentParser:
    """A command line, generated from RunConfig; a value left out is absent from the namespace.

    Args:
        program: its name in messages.
        description: what it does, for --help.
        only: the flags that it takes, by their recipe names; None for all.
        show_defaults: whether --help shows training's defaults.
    """
    parser = _Parser(prog=program, allow_abbrev=False, argument_default=argparse.SUPPRESS, description=description)
    parser.add_argument("--recipe", metavar="FILE", help="YAML file of flags; the command line has the last word")
    parser.add_argument("--local_rank", "--local-rank", help=argparse.SUPPRESS)
    parser.add_argument("--deepspeed", action="store_true", help=argparse.SUPPRESS)
    groups = {}
    for name, f in FIELDS.items():
        if only is not None and name not in only:
            continue
        meta = f.metadata
        group = groups.setdefault(meta["section"], parser.add_argument_group(meta["section"]))
        names = [*meta["short"], spelling(name)]
        dashed = "--" + name.replace("_", "-")
        if dashed not in names:
            names.append(dashed)
        options: dict[str, Any] = {"help": _help(name, show_defaults), "dest": name}
        if f.type == "bool":
            group.add_argument(*names, action="store_true", **options)
            continue
        for key in ("type", "nargs", "choices", "metavar"):
            if meta[key] is not None:
                options[key] = meta[key]
        group.add_argument(*names, **options)
    return parser


def _help(name: str, show_default: bool) -> str:
    default = default_of(name) if show_default else None
    shown = "" if default in (None, "", (), {}, False) else f" [{default}]"
    if isinstance(default, tuple) and default:
        shown = f" [{' '.join(f'{value:g}' for value in default)}]"
    return (FIELDS[name].metadata["help"] + shown).replace("%", "%%")


def _literal(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def parse_kwargs(pairs: Sequence[str] | Mapping[str, Any]) -> dict[str, Any]:
    """`["patch_size=4", "act_layer=gelu"]` → `{"patch_size": 4, "act_layer": "gelu"}`, as timm's --model-kwargs.

    Raises:
        ValueError: a piece without `=`.
    """
    if isinstance(pairs, Mapping):
        return dict(pairs)
    out: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise ValueError(f"--model-kwargs takes key=value pieces, not {pair!r}")
        out[key.replace("-", "_")] = _literal(value)
    return out


def load_recipe(path: str) -> dict[str, Any]:
    """Read a YAML file of flags (dashes or underscores) into recipe names and values of the flags' types.

    A relative `deepspeed_config`, `data_dir` or `initial_checkpoint` is looked for beside the recipe first.

    Raises:
        ValueError: the file is missing, malformed, or has an unknown key or a value of another type.
    """
    file = Path(path)
    try:
        data = yaml.safe_load(file.read_text()) or {}
    except OSError as error:
        raise ValueError(f"--recipe {path}: {error.strerror or error}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ValueError(f"{path}{where}: malformed YAML: {getattr(error, 'problem', error)}") from None
    if not isinstance(data, dict):
        raise ValueError(f"{path}: a recipe is a table of flags, not a {type(data).__name__}")
    out: dict[str, Any] = {}
    for key, value in data.items():
        name = str(key).replace("-", "_")
        if name not in FIELDS:
            raise ValueError(f'{path}: there is no flag "{key}"{_nearest_flag(name)}')
        if name in out:
            raise ValueError(f'{path}: "{key}" stands twice')
        out[name] = _from_yaml(name, value, path)
    for name in ("deepspeed_config", "data_dir", "initial_checkpoint"):
        if out.get(name) and not Path(out[name]).is_absolute() and (file.parent / out[name]).exists():
            out[name] = str(file.parent / out[name])
    return out


def _from_yaml(name: str, value: Any, path: str) -> Any:
    """Give a YAML value the type that the command line would have given it."""
    f = FIELDS[name]
    meta = f.metadata
    if value is None:
        return default_of(name)
    if name == "model_kwargs":
        return parse_kwargs(value)
    wrong = ValueError(f"{path}: {name}: {value!r} is not what {spelling(name)} takes")
    if f.type == "bool":
        if not isinstance(value, bool):
            raise wrong
        return value
    convert = meta["type"] or str

    def one(item: Any) -> Any:
        if isinstance(item, (bool, list, dict)) or (convert is int and isinstance(item, float) and item != int(item)):
            raise wrong
        try:
            return convert(item)
        except (TypeError, ValueError):
            raise wrong from None

    if meta["nargs"] is not None:
        items = value if isinstance(value, list) else [value]
        if isinstance(meta["nargs"], int) and len(items) != meta["nargs"]:
            raise wrong
        return [one(item) for item in items]
    out = one(value)
    if meta["choices"] and out not in meta["choices"] and out != f.default:
        raise ValueError(f"{path}: {name}: {out!r} is not one of {', '.join(meta['choices'])}")
    return out


def _nearest_flag(name: str) -> str:
    close = difflib.get_close_matches(name, list(FIELDS), n=1, cutoff=0.6)
    return f"; the nearest is {spelling(close[0])}" if close else ""


def parse(argv: Sequence[str] | None = None) -> tuple[RunConfig, frozenset[str]]:
    """Read the command line and its recipe into one frozen table.

    Returns:
        The table, and the names that somebody wrote down (on the command line or in the recipe).

    Raises:
        ValueError: an unknown flag (the nearest is named), a value of the wrong kind, or flags that cannot stand
            together or would have no effect.
    """
    return from_values(read_words(build_parser(), argv))


def read_words(parser: argparse.ArgumentParser, argv: Sequence[str] | None = None) -> dict[str, Any]:
    """What stands on a command line of `build_parser`, over what stands in its --recipe; nothing is checked together.

    Args:
        parser: from `build_parser`, with further arguments or without.
        argv: the words; None for this process's.

    Raises:
        ValueError: an unknown flag (the nearest is named), or a value of the wrong kind.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    namespace, unknown = parser.parse_known_args(argv)
    if unknown:
        word = unknown[0].split("=")[0]
        hint = _nearest_flag(word.lstrip("-").replace("-", "_")) if word.startswith("-") else ""
        raise ValueError(f"there is no flag {word}{hint}" if word.startswith("-") else f"{word!r} follows no flag")
    given = vars(namespace)
    for name in ("local_rank", "deepspeed"):
        given.pop(name, None)
    recipe = given.pop("recipe", None)
    if "model_kwargs" in given:
        given["model_kwargs"] = parse_kwargs(given["model_kwargs"])
    return {**(load_recipe(recipe) if recipe else {}), **given}


def from_values(values: Mapping[str, Any]) -> tuple[RunConfig, frozenset[str]]:
    """The table from the values that somebody wrote down, by their recipe names; see `parse`.

    Raises:
        ValueError: an unknown name (the nearest flag is named), or flags that cannot stand together.
    """
    values = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    for name in values:
        if name not in FIELDS:
            raise ValueError(f'there is no setting "{name}"{_nearest_flag(name)}')
    if values.get("aa") == "none":
        values["aa"] = ""
    config = RunConfig(**values)
    explicit = frozenset(values)
    check(config, explicit)
    return config, explicit


def check(config: RunConfig, explicit: frozenset[str]) -> None:
    """Refuse what cannot be, what contradicts itself, and what would have no effect.

    Raises:
        ValueError: says which flags, with their numbers, and what to do.
    """

    def written(name: str) -> bool:
        """Whether somebody asked for something with this flag: not its default, not a neutral value."""
        value = getattr(config, name)
        return name in explicit and value != default_of(name) and value not in FIELDS[name].metadata["neutral"]

    if not config.deepspeed_config:
        raise ValueError("--deepspeed_config FILE is missing; ds_configs/ has one for each ZeRO stage and precision")
    _check_ranges(config)
    _check_checkpoints(config)
    if not config.dataset and not config.data_dir:
        raise ValueError("no data: give --data-dir DIR with train/ and val/ in it, or --dataset digits")
    if config.freeze and config.linear_probe:
        raise ValueError("--linear-probe freezes all but the head already; drop --freeze")
    if config.warmup_steps is not None and config.warmup_epochs is not None:
        raise ValueError("--warmup-steps and --warmup-epochs are both given; keep one")
    for name, reason in _idle_flags(config):
        if written(name):
            raise ValueError(f"{spelling(name)} has no effect {reason}; drop it")


def _check_ranges(config: RunConfig) -> None:
    def must(ok: bool, name: str, what: str) -> None:
        if not ok:
            raise ValueError(f"{spelling(name)} must be {what}, not {getattr(config, name)}")

    for name in ("drop", "drop_path"):
        must(0 <= getattr(config, name) < 1, name, "at least 0 and below 1")
    for name in (
        "hflip",
        "vflip",
        "grayscale_prob",
        "gaussian_blur_prob",
        "reprob",
        "mixup_prob",
        "mixup_switch_prob",
    ):
        must(0 <= getattr(config, name) <= 1, name, "between 0 and 1")
    must(0 <= config.smoothing < 1, "smoothing", "at least 0 and below 1")
    for name in (
        "epochs",
        "max_steps",
        "img_size",
        "num_classes",
        "log_interval",
        "recount",
        "validation_batch_size",
        "lr_base_size",
    ):
        value = getattr(config, name)
        must(value is None or value >= 1, name, "at least 1")
    for name in (
        "workers",
        "eval_interval",
        "warmup_steps",
        "warmup_epochs",
        "mixup",
        "cutmix",
        "aug_repeats",
        "grad_stats_interval",
        "rollback",
    ):
        value = getattr(config, name)
        must(value is None or value >= 0, name, "at least 0")
    for name in ("lr", "min_lr", "warmup_lr", "weight_decay", "clip_grad", "stall_seconds"):
        value = getattr(config, name)
        must(value is None or (value >= 0 and value < float("inf")), name, "a number >= 0")
    must(config.layer_decay is None or 0 < config.layer_decay <= 1, "layer_decay", "above 0 and at most 1")
    must(0 <= config.model_ema_decay < 1, "model_ema_decay", "at least 0 and below 1")
    must(config.spike_factor is None or config.spike_factor > 1, "spike_factor", "above 1")
    must(0 < config.wsd_decay_fraction <= 1, "wsd_decay_fraction", "above 0 and at most 1")
    for name in ("mean", "std"):
        value = getattr(config, name)
        must(value is None or len(value) in (1, 3), name, "one number or three")
    must(config.std is None or min(config.std) > 0, "std", "above 0")


def _check_checkpoints(config: RunConfig) -> None:
    """What the flags of checkpoints and interruption must be."""
    Interval.parse(config.checkpoint_interval, "--checkpoint-interval")
    if config.time_limit:
        parse_seconds(config.time_limit, "--time-limit")
    if config.keep_checkpoints < 0:
        raise ValueError(f"--keep-checkpoints must be at least 0 (0 keeps all), not {config.keep_checkpoints}")
    if config.stop_before_seconds is not None and config.stop_before_seconds < 0:
        raise ValueError(f"--stop-before-seconds must be at least 0, not {config.stop_before_seconds}")
    if config.resume == "auto" and not config.output:
        raise ValueError("--resume auto looks for checkpoints in the run's folder: give it by --output DIR")


def _idle_flags(config: RunConfig) -> list[tuple[str, str]]:
    """(flag, why it does nothing here) for this combination."""
    idle: list[tuple[str, str]] = []
    if config.no_aug:
        names = (
            "scale ratio hflip vflip color_jitter color_jitter_prob grayscale_prob gaussian_blur_prob aa reprob remode "
            "recount train_interpolation train_crop_mode"
        )
        idle += [(name, "under --no-aug") for name in names.split()]
    if config.aa and "3a" not in config.aa:  # 3-Augment is the one policy that keeps the jitter
        names = ("color_jitter", "color_jitter_prob")
        idle += [(name, "under --aa, which replaces the colour jitter") for name in names]
    elif not config.color_jitter:
        idle += [("color_jitter_prob", "without --color-jitter")]
    if not config.reprob:
        idle += [(name, "without --reprob") for name in ("remode", "recount")]
    mixing = config.mixup > 0 or config.cutmix > 0 or config.cutmix_minmax is not None
    if not mixing:
        idle += [(n, "without --mixup or --cutmix") for n in ("mixup_prob", "mixup_switch_prob", "mixup_off_epoch")]
    elif config.mixup == 0 or (config.cutmix == 0 and config.cutmix_minmax is None):
        idle += [("mixup_switch_prob", "unless --mixup and --cutmix are both on")]
    if config.cutmix_minmax is not None:
        idle += [("cutmix", "beside --cutmix-minmax, which draws the box itself")]
    if not config.bce_loss:
        idle += [(name, "without --bce-loss") for name in ("bce_sum", "bce_target_thresh")]
    if config.checkpoint_interval == "0" and config.resume == "none":
        idle += [("rollback", "without --checkpoint-interval: there is nothing to go back to")]
    if config.resume == "none":
        idle += [("allow_batch_change", "without --resume")]
    if config.eval_only:
        names = (
            "resume",
            "checkpoint_interval",
            "keep_checkpoints",
            "rollback",
            "stop_before_seconds",
            "time_limit",
            "log_samples",
        )
        idle += [(name, "with --eval-only (weights are given by --initial-checkpoint)") for name in names]
    if config.tp == 1:
        names = ("sequence_parallel", "class_parallel", "tp_across_hosts")
        idle += [(name, "without --tp") for name in names]
    if config.pp == 1:
        idle += [("pp_partition", "without --pp")]
    if config.dataset == "digits":
        idle += [(n, "with --dataset digits") for n in ("data_dir", "train_split", "val_split", "dataset_download")]
    elif not config.dataset.startswith("torch/"):
        idle += [("dataset_download", "unless --dataset is a torch/… name")]
    if config.warmup_steps == 0 or config.warmup_epochs == 0:
        idle += [("warmup_lr", "without warm-up")]
    if config.sched == "constant":
        idle += [("min_lr", "with --sched constant")]
    if config.lr_scale_by_batch == "none":
        idle += [("lr_base_size", "without --lr-scale-by-batch")]
    if not config.model_ema:
        idle += [(name, "without --model-ema") for name in ("model_ema_decay", "model_ema_warmup")]
    if config.sched != "wsd":
        idle += [("wsd_decay_fraction", "unless --sched wsd")]
    return idle


def to_yaml(values: Mapping[str, Any]) -> str:
    """A recipe that says the same again."""

    def plain(value: Any) -> Any:
        if isinstance(value, (tuple, list)):
            return [plain(item) for item in value]
        return dict(value) if isinstance(value, Mapping) else value

    return yaml.safe_dump({name: plain(value) for name, value in values.items()}, sort_keys=False, allow_unicode=True)
