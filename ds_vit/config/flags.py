"""`RunConfig`: the typed, frozen table of every flag. Flags that timm has keep timm's spelling, meaning and default."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from ds_vit.config.augmentation import AugmentConfig, MixConfig
from ds_vit.config.flag import (
    ABOVE_0_TO_1,
    AT_LEAST_0,
    AT_LEAST_1,
    FROM_0_BELOW_1,
    NOT_NEGATIVE,
    Rule,
    flag,
    spelling_of,
)

SECTIONS = _R, _M, _D, _A, _L, _O, _S = "run", "model", "data", "augmentation", "loss", "optimizer", "schedule"
"""The groups of --help and of config.yaml, in their order."""
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
"""torch.compile's."""
_ABOVE_1 = Rule("must be above 1", lambda x: x > 1)
_KEEP = Rule("must be at least 0 (0 keeps all)", lambda x: x >= 0)
_SHARE = Rule("must be above 0 and below 1", lambda x: 0 < x < 1)
_RECOMPUTED = Rule(
    "must be full, selective or a number of blocks of at least 1",
    lambda word: word in ("full", "selective") or (word.isdecimal() and int(word) >= 1),
)
_WORKERS = Rule("must be auto or at least 0", lambda number: number == "auto" or number >= 0)
_SEVERAL_SIZES = Rule(
    "must be two sizes or more, each once and at least 1", lambda x: len({*x}) == len(x) > 1 and min(x) >= 1
)
_PIXEL_MEAN = Rule("must be one number or three", lambda x: len(x) in (1, 3))
_WEIGHTS = Rule("must be numbers above 0", lambda x: all(0 < weight < float("inf") for weight in x))
_DEVIATION = Rule("must be above 0, one number or three", lambda x: len(x) in (1, 3) and min(x) > 0)


OF_THE_PROGRAM = "python"
"""The `dataset` of a run whose images a program gave (`ds_vit.api.train`)."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(MixConfig, AugmentConfig):
    """Every flag of `launch/train.py`, by the name it has in a recipe; defaults are timm's where timm has the flag.

    Those of augmentation and mixing come from `AugmentConfig` and `MixConfig`.
    """

    deepspeed_config: str = flag("", _R, "DeepSpeed JSON file", spelling="--deepspeed_config", metavar="FILE")
    set: Sequence[str] = flag(
        (), _R, "values of the DeepSpeed JSON, over the file's: zero_optimization.stage=2", nargs="+", metavar="K=V"
    )
    pp: int = flag(1, _R, "pipeline stages")
    tp: int = flag(1, _R, "tensor-parallel ranks")
    tp_across_hosts: bool = flag(False, _R, "let tensor-parallel groups lie on two hosts")
    sequence_parallel: bool = flag(False, _R, "cut the tokens too, between the layers that --tp cuts")
    class_parallel: str = flag("auto", _R, "cut the classifier over classes under --tp", choices=("auto", "on", "off"))
    check_replicas: int = flag(0, _R, "steps between bitwise comparisons of replicas", rule=AT_LEAST_0)
    pp_partition: str = flag("", _R, "first layer of each stage and the number of layers: 0,7,14; auto: the fastest")

    task: str = flag("classification", _M, "what is trained for")
    mask_ratio: float = flag(0.75, _M, "--task mae: share of the patches that are hidden")
    decoder_dim: int = flag(512, _M, "--task mae: width of the decoder")
    decoder_depth: int = flag(8, _M, "--task mae: blocks of the decoder")
    decoder_heads: int = flag(16, _M, "--task mae: attention heads of the decoder")
    norm_pix_loss: bool = flag(False, _M, "--task mae: each patch is painted less its mean, over its deviation")
    model: str = flag("vit_base_patch16_224", _M, "timm name of a VisionTransformer or Eva model")
    model_kwargs: Mapping[str, Any] = flag({}, _M, "arguments of the model's constructor", nargs="*", metavar="K=V")
    num_classes: int | None = flag(None, _M, "classes of the head (default: the data's)", rule=AT_LEAST_1)
    img_size: int | None = flag(None, _M, "image side in pixels (default: the model's)", rule=AT_LEAST_1)
    img_size_schedule: str = flag(
        "",
        _M,
        "progressive resizing: sides, and the share of the run from which on each holds; the last is the model's",
        metavar="128:0,160:0.4,224:0.8",
    )
    train_img_sizes: Sequence[int] = flag(
        (),
        _M,
        "sides of which each step draws one; the largest is the model's",
        nargs="+",
        rule=_SEVERAL_SIZES,
        metavar="SIZE",
    )
    drop: float = flag(0.0, _M, "dropout before the head", rule=FROM_0_BELOW_1)
    drop_path: float = flag(0.0, _M, "stochastic depth rate of the last block", rule=FROM_0_BELOW_1)
    drop_path_compute: str = flag(
        "auto",
        _M,
        "compute a branch for all samples or for those alone that drop-path keeps (auto: where it is faster)",
        choices=("auto", "all", "kept"),
    )
    pretrained: bool = flag(False, _M, "start from timm's weights of this name, from the Hugging Face cache or Hub")
    initial_checkpoint: str = flag(
        "", _M, "weights to start from: .safetensors or .pth in timm's names", metavar="FILE"
    )
    resample_patch_embed: bool = flag(False, _M, "let the kernels of weights of another patch size be resampled")
    grad_checkpointing: str = flag(
        "",
        _M,
        "recompute activations in the backward pass: full (each block; so without a word), selective (all but matrix "
        "products and attention), or so many blocks together",
        rule=_RECOMPUTED,
        const="full",
        metavar="full|selective|N",
    )
    compile: bool = flag(False, _M, "run the blocks through torch.compile; the first step takes a minute or more")
    compile_mode: str = flag("default", _M, "what torch.compile is to look for", choices=COMPILE_MODES)
    freeze: Sequence[str] = flag((), _M, "timm parameter names (patterns) that are not trained", nargs="+")
    linear_probe: bool = flag(False, _M, "train the classifier head alone")

    dataset: str = flag(
        "", _D, "digits, torch/cifar10, wds/SHARDS, hfds/FOLDER, …; empty: image folders or tars in --data-dir"
    )
    data_dir: str | Sequence[str] = flag(
        "",
        _D,
        "folder that holds train/ and val/ or validation/ (or .tar files); several are mixed",
        nargs="+",
        metavar="DIR",
    )
    data_weights: Sequence[float] = flag(
        (), _D, "share of an epoch that each --data-dir gets (default: each image once)", nargs="+", rule=_WEIGHTS
    )
    train_split: str = flag("train", _D, "name of the training split")
    val_split: str = flag("validation", _D, "name of the evaluation split; '': no evaluation", neutral=("",))
    val_fraction: float | None = flag(
        None, _D, "share of the training split that is held out for evaluation, in place of --val-split", rule=_SHARE
    )
    dataset_download: bool = flag(False, _D, "let torchvision download the data set")
    workers: int | str = flag(
        4,
        _D,
        "loader processes a rank (0: load in the training process; auto: by the cores of its host)",
        short=("-j",),
        rule=_WORKERS,
        metavar="auto|N",
    )
    allow_empty_classes: bool = flag(False, _D, "let class folders stand that hold no image, or none that is readable")
    on_bad_image: str = flag("error", _D, "an image that cannot be decoded", choices=("error", "skip"))

    mean: Sequence[float] | None = flag(
        None, _A, "pixel mean, 0 to 1 (default: the model's)", nargs="+", rule=_PIXEL_MEAN
    )
    std: Sequence[float] | None = flag(None, _A, "pixel deviation (default: the model's)", nargs="+", rule=_DEVIATION)
    interpolation: str = flag("", _A, "resize filter of evaluation (default: the model's)")
    crop_pct: float | None = flag(None, _A, "centre-crop share of evaluation (default: the model's)")
    crop_mode: str = flag("", _A, "evaluation crop", choices=("center", "squash", "border"))
    aug_repeats: int = flag(
        0, _A, "repeated augmentation: copies of a sample in an epoch", neutral=(1,), rule=AT_LEAST_0
    )

    bce_loss: bool = flag(False, _L, "binary cross-entropy in place of softmax")
    bce_sum: bool = flag(False, _L, "sum the binary cross-entropy over classes")
    bce_target_thresh: float | None = flag(None, _L, "binarise soft targets above this")

    lr: float | None = flag(None, _O, "base learning rate (default: the JSON's)", rule=NOT_NEGATIVE)
    weight_decay: float | None = flag(None, _O, "weight decay (default: the JSON's)", rule=NOT_NEGATIVE)
    clip_grad: float | None = flag(None, _O, "largest norm of the gradient (default: the JSON's)", rule=NOT_NEGATIVE)
    layer_decay: float | None = flag(None, _O, "layer-wise learning-rate decay", neutral=(1.0,), rule=ABOVE_0_TO_1)
    lr_scale_by_batch: str = flag(
        "none", _O, "scale the learning rate with global batch / --lr-base-size", choices=("none", "linear", "sqrt")
    )
    lr_base_size: int = flag(256, _O, "global batch that the unscaled learning rate is meant for", rule=AT_LEAST_1)
    model_ema: bool = flag(False, _O, "keep an exponential moving average of the weights, and evaluate it too")
    model_ema_decay: float = flag(0.9998, _O, "decay of the average", rule=FROM_0_BELOW_1)
    model_ema_warmup: bool = flag(False, _O, "let the decay of the average grow from 0")
    norm_dtype: str = flag(
        "float32", _O, "type that norms compute in where the model is in 16 bits", choices=("float32", "model")
    )
    tf32: bool = flag(False, _O, "let fp32 matrix products use a GPU's TF32 cores")
    on_nonfinite: str = flag("stop", _O, "a step whose gradient is not finite", choices=("stop", "skip"))
    spike_factor: float | None = flag(
        None, _O, "a step whose loss or gradient norm is over this many times its recent mean is bad too", rule=_ABOVE_1
    )
    rollback: int = flag(
        0,
        _O,
        "where a run would stop over a bad step: go back to the last checkpoint and leave out the samples since then, "
        "at most this many times",
        rule=AT_LEAST_0,
    )
    grad_stats_interval: int = flag(0, _O, "steps between gradient statistics by layer (0: none)", rule=AT_LEAST_0)
    batch_size: int | None = flag(None, _O, 'micro-batch a rank where the JSON says "auto" (128)', short=("-b",))
    grad_accum_steps: int | None = flag(None, _O, 'accumulation where the JSON says "auto" (1)')
    auto_batch: bool = flag(
        False,
        _O,
        "take the largest micro-batch that fits, and keep the global batch by accumulation: found on a GPU by trying, "
        "on a CPU and with --dry-run by the estimate of --dry-run",
    )
    memory: str = flag(
        "", _O, "--auto-batch: what a rank may take, such as 8GiB (default: what is free)", metavar="BYTES"
    )

    epochs: int | None = flag(None, _S, "length of training and of the schedule (300)", rule=AT_LEAST_1)
    max_steps: int | None = flag(None, _S, "stop after this many optimizer steps", rule=AT_LEAST_1)
    sched: str = flag(
        "cosine", _S, "learning-rate schedule", neutral=("constant",), choices=("cosine", "linear", "constant", "wsd")
    )
    warmup_steps: int | None = flag(None, _S, "warm-up in optimizer steps", neutral=(0,), rule=AT_LEAST_0)
    warmup_epochs: float | None = flag(None, _S, "warm-up in epochs (5)", neutral=(0.0,), rule=AT_LEAST_0)
    warmup_lr: float = flag(1e-5, _S, "learning rate that warm-up starts from", neutral=(0.0,), rule=NOT_NEGATIVE)
    min_lr: float = flag(0.0, _S, "learning rate that the schedule ends at", rule=NOT_NEGATIVE)
    wsd_decay_fraction: float = flag(0.1, _S, "share of the run in which wsd decays", rule=ABOVE_0_TO_1)

    output: str = flag("", _R, "folder of the run (default: runs/<time>-<model>)", metavar="DIR")
    seed: int = flag(42, _R, "seed of everything random")
    resume: str = flag("none", _R, "checkpoint to go on from: none, auto or a path")
    allow_batch_change: bool = flag(False, _R, "go on from a checkpoint with another global batch")
    allow_schedule_change: bool = flag(False, _R, "go on from a checkpoint with another learning-rate schedule")
    checkpoint_interval: str = flag(
        "epoch",
        _R,
        "steps (500) or time (30m) between checkpoints, or epoch: at each one's end (0: when interrupted alone)",
        neutral=("0",),
    )
    keep_checkpoints: int = flag(2, _R, "checkpoints to keep beside the best one (0: all)", rule=_KEEP)
    stop_before_seconds: float | None = flag(
        None, _R, "save and stop this long before --time-limit or the end of a Slurm job", rule=AT_LEAST_0
    )
    time_limit: str = flag("", _R, "save and stop after this time: 90m, 24h")
    log_samples: bool = flag(False, _R, "write which samples each step used, to samples/ in the output folder")
    log_images: int = flag(
        16, _R, "images of the first step, as the model sees them, in augmented.png (0: none)", rule=AT_LEAST_0
    )
    profile_steps: str = flag(
        "", _R, "profile the steps from A up to, and without, B into profile/ in the output folder", metavar="A:B"
    )
    log_interval: int = flag(
        50, _R, "optimizer steps between lines of metrics.jsonl; 1 for a short run", rule=AT_LEAST_1
    )
    eval_interval: int = flag(1, _R, "epochs between evaluations (0: at the end alone)", neutral=(0,), rule=AT_LEAST_0)
    validation_batch_size: int | None = flag(None, _R, "images a rank in evaluation", short=("-vb",), rule=AT_LEAST_1)
    eval_only: bool = flag(False, _R, "evaluate the initial weights and stop")
    eval_knn: int = flag(
        0,
        _R,
        "evaluate the features too, by so many nearest neighbours in the training split (20 without a number)",
        rule=AT_LEAST_0,
        const=20,
    )
    eval_linear_probe: bool = flag(False, _R, "evaluate the features too, by a linear classifier of them")
    stall_seconds: float | None = flag(
        None, _R, "end a run that makes no progress for so long (300 with several ranks; 0: never)", rule=NOT_NEGATIVE
    )
    dry_run: bool = flag(False, _R, "resolve, check and show the run with its memory and files; start nothing")
    verbose: bool = flag(False, _R, "let DeepSpeed say everything it has to say")

    def __post_init__(self) -> None:
        """Values are not checked here but in `rules.check`: the command line may replace a recipe's."""

    @property
    def augment(self) -> AugmentConfig:
        """The settings of augmentation alone, checked."""
        return AugmentConfig(**{f.name: getattr(self, f.name) for f in dataclasses.fields(AugmentConfig)})

    @property
    def mix(self) -> MixConfig:
        """The settings of mixing alone, checked."""
        return MixConfig(**{f.name: getattr(self, f.name) for f in dataclasses.fields(MixConfig)})


FIELDS: dict[str, dataclasses.Field] = {
    f.name: f for f in sorted(dataclasses.fields(RunConfig), key=lambda f: SECTIONS.index(f.metadata["section"]))
}


def _type_of_word(hint: Any) -> type:
    """`Sequence[float] | None` → float."""
    inner = get_args(hint)
    return _type_of_word(inner[0]) if inner else hint


def number_or_auto(word: Any) -> int | str:
    """`auto`, or a whole number."""
    return word if word == "auto" else int(str(word))


TYPES: dict[str, Callable[[Any], Any]] = {
    **{name: _type_of_word(hint) for name, hint in get_type_hints(RunConfig).items()},
    "workers": number_or_auto,
}
"""The type of each word of a flag, from the annotation of its field."""


def default_of(name: str) -> Any:
    """The default of a flag, by its recipe name."""
    f = FIELDS[name]
    return f.default if f.default_factory is dataclasses.MISSING else f.default_factory()


def spelling(name: str) -> str:
    """How a flag is written on the command line: `drop_path` → `--drop-path`."""
    return spelling_of(FIELDS[name])


def is_asked_for(name: str, config: RunConfig, explicit: Collection[str]) -> bool:
    """Whether a flag was given (`explicit`) and asks for something: neither its default nor a neutral value."""
    value = getattr(config, name)
    return name in explicit and value != default_of(name) and value not in FIELDS[name].metadata["neutral"]
