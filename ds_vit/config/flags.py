"""`RunConfig`: the typed, frozen table of every flag. Flags that timm has keep timm's spelling, meaning and default."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


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

    task: str = _flag("classification", _M, "what is trained for", neutral=("classification",))
    mask_ratio: float = _flag(0.75, _M, "--task mae: share of the patches that are hidden", type=float)
    decoder_dim: int = _flag(512, _M, "--task mae: width of the decoder", type=int)
    decoder_depth: int = _flag(8, _M, "--task mae: blocks of the decoder", type=int)
    decoder_heads: int = _flag(16, _M, "--task mae: attention heads of the decoder", type=int)
    norm_pix_loss: bool = _flag(False, _M, "--task mae: each patch is painted less its mean, over its deviation")
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
        None, _O, "a step whose loss or gradient norm is over this many times its recent mean is bad too", type=float
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
    allow_schedule_change: bool = _flag(False, _R, "go on from a checkpoint with another learning-rate schedule")
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
