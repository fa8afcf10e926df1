"""The schema of settings: `RunConfig` has one typed field per flag, with the flag's metadata (`flag.py`).

Flags that timm has keep timm's spelling, meaning and default. The command line, recipes and every list of flag names
are generated from these fields.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from ds_vit.config.augmentation import AugmentConfig, MixConfig, parse_schedule
from ds_vit.config.flag import (
    ABOVE_0_TO_1,
    EPOCHS,
    EPOCHS_FROM_1,
    EVALUATION,
    FREE,
    FROM_0_BELOW_1,
    IMAGES,
    NOTED,
    PAIR,
    PIXELS,
    PROBABILITY,
    RATE,
    RECORDED,
    SECONDS,
    SHARE,
    START,
    STEPS,
    STEPS_FROM_1,
    WEIGHTS,
    Range,
    Rule,
    Scope,
    flag,
    flag_of,
    spelling_of,
)
from ds_vit.config.units import Interval, parse_bytes, parse_seconds, parse_set, parse_steps

COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
"""Modes of torch.compile."""
CUDA_GRAPH = ("auto", "on", "off")
SCHEDULES = ("cosine", "linear", "constant", "wsd")
PROGRAM_DATASET = "python"
"""The value of `dataset` in a run whose images a Python program passes (`ds_vit.api.train`)."""

# Flags that only some tasks have.
_of_mae = partial(flag_of, "mae")
_of_pairs = partial(flag_of, "clip siglip")
_of_texts = partial(flag_of, "clip siglip bridgetower")
_of_tables = partial(flag, scope=FREE | RECORDED, task="clip siglip bridgetower")
_of_classifiers = partial(flag, task="classification")
_of_dino = partial(flag_of, "dino")
_of_crops = partial(_of_dino, section="augmentation")
_of_optimizer = partial(_of_dino, section="optimizer")
_of_head = partial(_of_dino, section="model")

# Ranges and rules that several flags share, or that are too long for one line.
_LOSS_WEIGHT = Range(0, 10**6)
_TEMPERATURE = Range(0, 100, above=True)
_DEGREE = Range(1, 4096)
_WIDTH = Range(1, 2**16)
_BLOCKS = Range(1, 1000)
_RECOMPUTED = Rule(
    "must be full, selective or a number of blocks, at least 1 and at most 1,000",
    lambda word: word in ("full", "selective") or (word.isdecimal() and len(word) < 5 and _BLOCKS.holds(int(word))),
)
_WORKERS = Range(0, 1024, word="auto")
_SEVERAL_SIZES = Rule("must be two sizes or more, each once", lambda x: len({*x}) == len(x) > 1)
_NAME = Rule("must name a folder", lambda text: not text.isspace())
_SEPARATOR = Rule("must be one character", lambda text: len(text.replace("\\t", "\t")) <= 1)
_CHANNELS = Rule("must be one number or three", lambda x: len(x) in (1, 3))


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The layout, the output folder, checkpoints, logs and evaluation of a run."""

    deepspeed_config: str = flag("", "DeepSpeed JSON file", FREE | RECORDED, metavar="FILE")
    set: Sequence[str] = flag(
        (),
        "override values of the DeepSpeed JSON: zero_optimization.stage=2",
        FREE | EVALUATION,
        read=parse_set,
        nargs="+",
        metavar="K=V",
    )
    pp: int = flag(1, "pipeline stages", FREE | EVALUATION, span=_DEGREE)
    tp: int = flag(1, "tensor-parallel ranks", FREE | EVALUATION, span=_DEGREE)
    tp_across_hosts: bool = flag(False, "let tensor-parallel groups span two hosts", FREE | EVALUATION)
    sequence_parallel: bool = flag(False, "shard the tokens between the layers that --tp shards", FREE | EVALUATION)
    class_parallel: str = flag(
        "auto", "shard the classifier over classes under --tp", FREE | EVALUATION, choices=("auto", "on", "off")
    )
    check_replicas: int = flag(0, "steps between bitwise comparisons of replicas", FREE, span=STEPS)
    pp_partition: str = flag(
        "", "first layer of each stage and the number of layers: 0,7,14; auto: the fastest", FREE | EVALUATION
    )

    output: str = flag(
        "", "folder of the run (default: runs/<time>-<model>)", FREE | EVALUATION, rule=_NAME, metavar="DIR"
    )
    seed: int = flag(42, "random seed", EVALUATION, span=Range(-(2**63), 2**63 - 1))
    resume: str = flag("none", "checkpoint to resume from: none, auto or a path", START)
    allow_batch_change: bool = flag(False, "resume with another global batch", START)
    allow_schedule_change: bool = flag(False, "resume with another schedule, augmentation, loss or optimizer", START)
    checkpoint_interval: str = flag(
        "epoch",
        "500 (steps), 30m or epoch between checkpoints (0: only when interrupted)",
        FREE,
        read=Interval.parse,
        neutral=("0",),
    )
    keep_checkpoints: int = flag(2, "checkpoints to keep in addition to the best one (0: all)", FREE, span=STEPS)
    stop_before_seconds: float | None = flag(None, "save and stop this long before the time limit", START, span=SECONDS)
    time_limit: str = flag("", "save and stop after this time: 90m, 24h", START, read=parse_seconds)
    log_samples: bool = flag(False, "write the samples of each step to samples/ in the output folder", FREE)
    log_images: int = flag(16, "images of the first step in augmented.png (0: none)", FREE, span=Range(0, 4096))
    profile_steps: str = flag("", "profile the steps A to B - 1 into profile/", FREE, read=parse_steps, metavar="A:B")
    log_interval: int | None = flag(
        None,
        "steps between lines of metrics.jsonl (default: a fiftieth of the run, at most 50)",
        FREE,
        span=STEPS_FROM_1,
    )
    wandb: bool = flag(
        False, "also log to Weights & Biases", FREE | EVALUATION, short=("--log-wandb",), key="wandb.enabled"
    )
    wandb_project: str = flag("", "--wandb: project of the run", FREE | EVALUATION, key="wandb.project")
    eval_interval: int = flag(1, "epochs between evaluations (0: only at the end)", NOTED, neutral=(0,), span=EPOCHS)
    eval_metric: str = flag("", "metric that decides which weights are best (default: the task's first)", NOTED)
    validation_batch_size: int | None = flag(
        None, "images per rank in evaluation", FREE | EVALUATION, short=("-vb",), span=IMAGES
    )
    eval_only: bool = flag(False, "evaluate the initial weights and stop", EVALUATION)
    eval_knn: int = flag(
        0,
        "evaluate the features by N nearest neighbours",
        NOTED | EVALUATION,
        short=("--knn",),
        span=Range(0, 10**6),
        const=20,
    )
    eval_linear_probe: bool = flag(False, "also evaluate the features by a linear classifier", NOTED | EVALUATION)
    zeroshot: str = _of_pairs(
        "",
        "data to classify by the names of its classes, as --dataset or --data-dir name it",
        NOTED | EVALUATION,
        metavar="NAME|DIR",
    )
    zeroshot_templates: str = flag(
        "simple",
        "--zeroshot: sentences of a class: none, simple, openai or a file",
        NOTED | EVALUATION,
        task="clip siglip",
        metavar="none|simple|openai|FILE",
    )
    stall_seconds: float | None = flag(
        None, "end a run after so long without progress (several ranks: 300; 0: never)", FREE | EVALUATION, span=SECONDS
    )
    dry_run: bool = flag(False, "show the run, its memory and its files without starting it", START | EVALUATION)
    verbose: bool = flag(False, "show all of DeepSpeed's log", FREE | EVALUATION)


@dataclass(frozen=True, kw_only=True)
class ModelSettings:
    """The task, the model and its initial weights."""

    task: str = flag("classification", "training task", WEIGHTS)
    mask_ratio: float = _of_mae(0.75, "share of the patches that are masked", RECORDED, span=SHARE)
    decoder_dim: int = _of_mae(512, "width of the decoder", RECORDED, span=_WIDTH)
    decoder_depth: int = _of_mae(8, "blocks of the decoder", RECORDED, span=_BLOCKS)
    decoder_heads: int = _of_mae(16, "attention heads of the decoder", RECORDED, span=_BLOCKS)
    text_model: str = _of_pairs("", "text tower (clip_base, siglip_base)", WEIGHTS, metavar="NAME")
    text_width: int | None = _of_pairs(None, "width of the text tower", WEIGHTS, span=_WIDTH)
    text_depth: int | None = _of_pairs(None, "blocks of the text tower", WEIGHTS, span=_BLOCKS)
    text_heads: int | None = _of_pairs(None, "attention heads of the text tower", WEIGHTS, span=_BLOCKS)
    text_pool: str = _of_pairs(
        "",
        "feature of a caption: its end token, its last token, or attention pooling",
        WEIGHTS,
        choices=("end", "last", "map"),
    )
    embed_dim: int | None = _of_pairs(None, "width of the features of both towers", WEIGHTS, span=_WIDTH)
    lock_image: bool = _of_pairs(False, "freeze the image tower except its projection")
    lock_image_unlocked_groups: int = flag(
        0, "--lock-image: groups of layers at its end that are trained", span=Range(0, 10_000), task="clip siglip"
    )
    lock_text: bool = _of_pairs(False, "freeze the text tower")
    norm_pix_loss: bool = _of_mae(False, "predict pixels normalised per patch", RECORDED)
    tokenizer: str = _of_texts("bytes", "bytes (UTF-8), clip or a tokenizer.json", WEIGHTS, metavar="bytes|clip|PATH")
    context_length: int | None = _of_texts(
        None, "tokens of a caption (bytes: 256, else 77, 64 and 50)", WEIGHTS, span=Range(2, 2**16)
    )
    model: str = flag("vit_base_patch16_224", "timm name, hf-hub:ORG/NAME or local-dir:FOLDER", WEIGHTS)
    model_kwargs: Mapping[str, Any] = flag({}, "arguments of the constructor", WEIGHTS, nargs="*", metavar="K=V")
    num_classes: int | None = flag(None, "classes of the head (default: the data's)", WEIGHTS, span=Range(1, 10**7))
    img_size: int | None = flag(None, "image side in pixels (default: the model's)", WEIGHTS, span=PIXELS)
    img_size_schedule: str = flag(
        "", "sides of the images, and when each starts", read=parse_schedule, metavar="128:0,160:0.4,224:0.8"
    )
    train_img_sizes: Sequence[int] = flag(
        (), "sides from which each step draws one", nargs="+", span=PIXELS, rule=_SEVERAL_SIZES, metavar="SIZE"
    )
    drop: float = flag(0.0, "dropout before the head", span=FROM_0_BELOW_1)
    drop_path: float = flag(0.0, "stochastic depth rate of the last block", span=FROM_0_BELOW_1)
    pretrained: bool = flag(False, "start from the weights of this --model (cache, Hub or folder)", FREE | EVALUATION)
    initial_checkpoint: str = flag(
        "", "weights to start from: a run, or a file in timm's names", FREE | EVALUATION, metavar="RUN|FILE"
    )
    resample_patch_embed: bool = flag(False, "resample patch kernels of another patch size", FREE | EVALUATION)
    grad_checkpointing: str = flag(
        "",
        "recompute activations in the backward pass: full (each block; the default word), selective (all except "
        "matrix products and attention), or N blocks together",
        FREE,
        rule=_RECOMPUTED,
        const="full",
        metavar="full|selective|N",
    )
    compile: bool = flag(False, "run the blocks through torch.compile", FREE | EVALUATION)
    compile_mode: str = flag("default", "mode of torch.compile", FREE | EVALUATION, choices=COMPILE_MODES)
    cuda_graph: str = flag(
        "auto",
        "replay a micro-batch's passes as CUDA graphs; auto: in layouts verified on a GPU",
        FREE,
        choices=CUDA_GRAPH,
    )
    freeze: Sequence[str] = flag((), "patterns of timm parameter names to freeze", NOTED, nargs="+")
    linear_probe: bool = flag(False, "train only the classifier head", NOTED)


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """The images and how they are read."""

    dataset: str = flag(
        "",
        "digits, glyphs, torch/cifar10, wds/SHARDS, hfds/FOLDER, csv/FILE, …; empty: folders in --data-dir",
        NOTED | RECORDED,
    )
    data_dir: str | Sequence[str] = flag(
        "", "folder with train/ and val/ (or .tar files); several are mixed", FREE | RECORDED, nargs="+", metavar="DIR"
    )
    csv_img_key: str = _of_tables("", "column of images (csv/: filepath)", metavar="NAME")
    csv_caption_key: str = _of_tables("", "column of captions, or key in .json files (csv/: title)", metavar="NAME")
    csv_separator: str = _of_tables(
        "",
        "--dataset csv/…: separator of the columns, such as \\t or , (default: the one in the header)",
        rule=_SEPARATOR,
        metavar="CHAR",
    )
    data_weights: Sequence[float] = flag(
        (),
        "share of an epoch for each --data-dir (default: each image once)",
        NOTED,
        nargs="+",
        span=Range(0, 10**9, above=True),
    )
    train_split: str = flag("train", "name of the training split", NOTED | RECORDED)
    val_split: str = flag("validation", "name of the evaluation split; '': none", NOTED | RECORDED, neutral=("",))
    val_fraction: float | None = flag(None, "share of the training split to evaluate on", NOTED | RECORDED, span=SHARE)
    dataset_download: bool = flag(False, "let torchvision download the dataset", FREE | EVALUATION)
    workers: int | str = flag(
        4, "loader processes per rank (0: none; auto)", FREE | RECORDED, short=("-j",), span=_WORKERS, metavar="auto|N"
    )
    allow_empty_classes: bool = flag(False, "allow class folders without images", FREE | RECORDED)
    on_bad_image: str = flag(
        "skip", "replace an image that cannot be decoded, or end the run", NOTED | RECORDED, choices=("error", "skip")
    )
    exif_rotation: str = flag("off", "turn images as their EXIF orientation says", WEIGHTS, choices=("on", "off"))
    max_bad_images: float = flag(
        0.01, "save and stop if a larger share of an epoch's images cannot be decoded", FREE, span=PROBABILITY
    )


@dataclass(frozen=True, kw_only=True)
class ImageSettings:
    """The input of the model and of evaluation."""

    mean: Sequence[float] | None = flag(None, "pixel mean", WEIGHTS, nargs="+", span=Range(0, 1), rule=_CHANNELS)
    std: Sequence[float] | None = flag(
        None, "pixel standard deviation", WEIGHTS, nargs="+", span=ABOVE_0_TO_1, rule=_CHANNELS
    )
    interpolation: str = flag("", "resize filter of evaluation (default: the model's)", NOTED | WEIGHTS)
    crop_pct: float | None = flag(
        None, "evaluation crop: share of a side (default: the model's)", NOTED | WEIGHTS, span=ABOVE_0_TO_1
    )
    crop_mode: str = flag("", "mode of the evaluation crop", NOTED | WEIGHTS, choices=("center", "squash", "border"))
    aug_repeats: int = flag(0, "repeated augmentation: copies of a sample", neutral=(1,), span=Range(0, 1000))


@dataclass(frozen=True, kw_only=True)
class LossSettings:
    """The loss of a classifier."""

    bce_loss: bool = flag(False, "binary cross-entropy instead of softmax", WEIGHTS)
    bce_sum: bool = flag(False, "sum the binary cross-entropy over classes")
    bce_target_thresh: float | None = flag(None, "binarise soft targets above this", span=FROM_0_BELOW_1)


@dataclass(frozen=True, kw_only=True)
class DistillationSettings:
    """A fixed teacher, and the loss against it."""

    kd_model_name: str = _of_classifiers(
        "", "teacher to distil from: timm name, hf-hub:ORG/NAME or local-dir:FOLDER", NOTED
    )
    kd_checkpoint: str = _of_classifiers(
        "", "weights of the teacher: a run, or a file for --kd-model-name", NOTED, metavar="RUN|FILE"
    )
    kd_distill_type: str = _of_classifiers(
        "logit",
        "what the student learns from the teacher: its logits, its features, or its logits by a distillation token",
        choices=("logit", "feature", "token"),
    )
    kd_loss_type: str = _of_classifiers(
        "kl",
        "--kd-distill-type logit: the teacher's probabilities (kl), or its most probable class (hard)",
        choices=("kl", "hard"),
    )
    kd_temperature: float = _of_classifiers(
        4.0, "temperature of both softmaxes under kl", span=Range(0, 10**4, above=True)
    )
    distill_loss_weight: float | None = _of_classifiers(
        None, "weight of the loss against the teacher (1, or 1 - --task-loss-weight)", span=RATE
    )
    task_loss_weight: float | None = _of_classifiers(None, "weight of the loss against the labels (1)", span=RATE)
    kd_token_distill_type: str = _of_classifiers(
        "soft",
        "--kd-distill-type token: the teacher's probabilities (soft), or its most probable class (hard)",
        choices=("soft", "hard"),
    )


@dataclass(frozen=True, kw_only=True)
class OptimizerSettings:
    """The optimizer, the batch and bad steps."""

    lr: float | None = flag(None, "base learning rate (default: the JSON's)", span=RATE, key="optimizer.params.lr")
    weight_decay: float | None = flag(None, "weight decay", span=RATE, key="optimizer.params.weight_decay")
    clip_grad: float | None = flag(None, "largest norm after clipping", span=Range(0, 10**9), key="gradient_clipping")
    layer_decay: float | None = flag(None, "layer-wise learning-rate decay", neutral=(1.0,), span=ABOVE_0_TO_1)
    lr_scale_by_batch: str = flag("none", "scale --lr with the global batch", NOTED, choices=("none", "linear", "sqrt"))
    lr_base_size: int = flag(256, "global batch of the unscaled learning rate", NOTED, span=IMAGES)
    model_ema: bool = flag(False, "keep an exponential moving average of the weights, and evaluate it too", NOTED)
    model_ema_decay: float = flag(0.9998, "decay of the average", NOTED, span=FROM_0_BELOW_1)
    model_ema_warmup: bool = flag(False, "let the decay of the average grow from 0", NOTED)
    norm_dtype: str = flag(
        "float32", "precision of the norm layers in a 16-bit model", NOTED | EVALUATION, choices=("float32", "model")
    )
    tf32: bool = flag(False, "let fp32 matrix products use a GPU's TF32 cores", NOTED | EVALUATION)
    on_nonfinite: str = flag("stop", "at a step whose gradient is not finite", NOTED, choices=("stop", "skip"))
    spike_factor: float | None = flag(
        None,
        "reject a step whose loss or gradient norm exceeds this multiple of its recent mean",
        NOTED,
        span=Range(1, 10**9, above=True),
    )
    rollback: int = flag(0, "times to return to the last checkpoint at a rejected step", NOTED, span=STEPS)
    grad_stats_interval: int = flag(0, "steps between gradient statistics by layer (0: none)", FREE, span=STEPS)
    batch_size: int | None = flag(
        None,
        'micro-batch per rank where the JSON says "auto" (128)',
        FREE | EVALUATION,
        span=IMAGES,
        short=("-b",),
        key="train_micro_batch_size_per_gpu",
    )
    grad_accum_steps: int | None = flag(
        None, 'micro-batches per step where the JSON says "auto"', span=IMAGES, key="gradient_accumulation_steps"
    )
    auto_batch: bool = flag(
        False, "use the largest micro-batch that fits, and keep the global batch by accumulation", FREE
    )
    memory: str = flag(
        "", "--auto-batch: memory of a rank (default: what is free)", FREE, read=parse_bytes, metavar="BYTES"
    )


@dataclass(frozen=True, kw_only=True)
class ScheduleSettings:
    """The length of the run and the learning rate."""

    epochs: int | None = flag(None, "length of training and of the schedule (300)", NOTED, span=EPOCHS_FROM_1)
    max_steps: int | None = flag(None, "stop after this many optimizer steps", FREE, span=STEPS_FROM_1)
    sched: str = flag("cosine", "learning-rate schedule", NOTED, neutral=("constant",), choices=SCHEDULES)
    warmup_steps: int | None = flag(None, "warm-up in optimizer steps", NOTED, neutral=(0,), span=STEPS)
    warmup_epochs: float | None = flag(
        None, "warm-up in epochs (5, at most a tenth of the run)", NOTED, neutral=(0.0,), span=EPOCHS
    )
    warmup_lr: float = flag(1e-5, "learning rate that warm-up starts from", NOTED, neutral=(0.0,), span=RATE)
    min_lr: float = flag(0.0, "learning rate that the schedule ends at", NOTED, span=RATE)
    wsd_decay_fraction: float = flag(0.1, "share of the run in which wsd decays", NOTED, span=ABOVE_0_TO_1)


@dataclass(frozen=True, kw_only=True)
class SelfDistillationSettings:
    """The heads, crops, teacher and losses of DINO and iBOT.

    Defaults follow DINOv2 (facebookresearch/dinov2, dinov2/configs).
    """

    prototypes: int = _of_head(65536, "prototypes of a head", WEIGHTS, span=Range(2, 2**24))
    head_hidden_dim: int = _of_head(2048, "hidden width of a head", WEIGHTS, span=Range(1, 2**16))
    head_bottleneck_dim: int = _of_head(256, "width before the prototypes", WEIGHTS, span=Range(1, 2**16))
    global_crops_scale: Sequence[float] = _of_crops((0.32, 1.0), "area of a global crop", span=ABOVE_0_TO_1, **PAIR)
    local_crops_scale: Sequence[float] = _of_crops((0.05, 0.32), "area of a local crop", span=ABOVE_0_TO_1, **PAIR)
    local_crops_number: int = _of_crops(8, "local crops of an image (0: none)", span=Range(0, 64))
    local_crops_size: int | None = _of_crops(
        None, "side of a local crop (default: the multiple of the patch size nearest 96)", span=PIXELS
    )
    mask_sample_probability: float = _of_dino(
        0.5, "probability that a global crop has masked patches", span=PROBABILITY
    )
    mask_ratio_min_max: Sequence[float] = _of_dino(
        (0.1, 0.5), "smallest and largest share of a masked crop's patches", span=PROBABILITY, **PAIR
    )
    centering: str = _of_dino(
        "ema", "keep assignments balanced by a running mean or by Sinkhorn-Knopp", choices=("ema", "sinkhorn")
    )
    ibot_weight: float = _of_dino(1.0, "weight of the loss over masked patches (0: no masks)", span=_LOSS_WEIGHT)
    koleo_weight: float = _of_dino(0.1, "weight of the KoLeo loss", span=_LOSS_WEIGHT)
    student_temp: float = _of_dino(0.1, "temperature of the student", span=_TEMPERATURE)
    teacher_temp: float = _of_dino(0.07, "temperature of the teacher", span=_TEMPERATURE)
    warmup_teacher_temp: float = _of_dino(0.04, "temperature of the teacher at the start", span=_TEMPERATURE)
    warmup_teacher_temp_epochs: int = _of_dino(30, "epochs until the teacher reaches --teacher-temp", span=EPOCHS)
    teacher_momentum: float = _of_dino(0.992, "share of its weights that the teacher keeps at a step", span=PROBABILITY)
    teacher_momentum_end: float = _of_dino(1.0, "--teacher-momentum at the end of the run", span=PROBABILITY)
    freeze_last_layer_epochs: int = _of_optimizer(
        1, "epochs in which the prototypes have a learning rate of 0", span=EPOCHS
    )
    patch_embed_lr_mult: float = _of_optimizer(0.2, "factor on the learning rate of the patch embedding", span=RATE)
    weight_decay_end: float | None = _of_optimizer(
        None, "weight decay at the end of the run, reached along a cosine", span=RATE
    )


SECTIONS: Mapping[str, tuple[type, ...]] = {
    "run": (RunSettings,),
    "model": (ModelSettings,),
    "data": (DataSettings,),
    "augmentation": (ImageSettings, AugmentConfig, MixConfig),
    "loss": (LossSettings, SelfDistillationSettings),
    "distillation": (DistillationSettings,),
    "optimizer": (OptimizerSettings,),
    "schedule": (ScheduleSettings,),
}
"""The groups of --help and of config.yaml, in their order. A field's metadata may name another group than its class."""


@dataclass(frozen=True, kw_only=True)
class RunConfig(
    ScheduleSettings,
    OptimizerSettings,
    DistillationSettings,
    SelfDistillationSettings,
    LossSettings,
    MixConfig,
    AugmentConfig,
    ImageSettings,
    DataSettings,
    ModelSettings,
    RunSettings,
):
    """Every flag of `launch/train.py`, by its name in a recipe; defaults are timm's where timm has the flag."""

    @property
    def augment(self) -> AugmentConfig:
        """The augmentation settings."""
        return AugmentConfig(**{f.name: getattr(self, f.name) for f in dataclasses.fields(AugmentConfig)})

    @property
    def mix(self) -> MixConfig:
        """The mixup and cutmix settings."""
        return MixConfig(**{f.name: getattr(self, f.name) for f in dataclasses.fields(MixConfig)})


SECTION_OF: Mapping[str, str] = {
    f.name: f.metadata["section"] or section
    for section, classes in SECTIONS.items()
    for cls in classes
    for f in dataclasses.fields(cls)
}
FIELDS: dict[str, dataclasses.Field] = {
    f.name: f for f in sorted(dataclasses.fields(RunConfig), key=lambda f: [*SECTIONS].index(SECTION_OF[f.name]))
}
"""The flags by their names in a recipe, in the order of --help."""
KEY_OF_FLAG: Mapping[str, str] = {name: f.metadata["key"] for name, f in FIELDS.items() if f.metadata["key"]}
"""Flag → its key in the DeepSpeed JSON, for the flags that set one."""


def names_with(scope: Scope) -> tuple[str, ...]:
    """The recipe names of the flags that have this scope."""
    return tuple(name for name, f in FIELDS.items() if scope in f.metadata["scope"])


FIXED_ON_RESUME = frozenset(FIELDS) - KEY_OF_FLAG.keys() - {*names_with(Scope.FREE), *names_with(Scope.NOTED)}
"""The flags that a resumed run must not change. Those in `KEY_OF_FLAG` are compared as resolved with the JSON."""


def names_of_task(task: str) -> frozenset[str]:
    """The flags of this task that not all tasks have."""
    return frozenset(name for name, f in FIELDS.items() if task in f.metadata["task"].split())


def number_or_auto(word: Any) -> int | str:
    """`auto`, or a whole number."""
    return word if word == "auto" else int(str(word))


def _kinds_of(hint: Any) -> tuple[Any, ...]:
    """`Sequence[float] | None` → Sequence[float], NoneType."""
    return get_args(hint) if isinstance(hint, UnionType) else (hint,)


_KINDS = {name: _kinds_of(hint) for name, hint in get_type_hints(RunConfig).items()}
MULTI_VALUED = frozenset(name for name, kinds in _KINDS.items() if any(get_origin(kind) is Sequence for kind in kinds))
"""The flags that take several values."""
SINGLE_VALUED = frozenset(name for name, kinds in _KINDS.items() if any(get_origin(kind) is None for kind in kinds[:1]))
"""The flags whose only value is stored as it is, not as a sequence of one."""
TYPES: dict[str, Callable[[Any], Any]] = {
    **{name: (get_args(kinds[0]) or kinds)[0] for name, kinds in _KINDS.items()},
    "workers": number_or_auto,
}
"""Flag → the function that converts one of its words, from the annotation of the field."""


def describe_values(name: str) -> str:
    """The values that a flag takes, for messages: "a whole number", "2 numbers"."""
    if TYPES[name] is bool:
        return "true or false"
    if TYPES[name] is number_or_auto:
        return "auto or a whole number"
    kind = "whole number" if TYPES[name] is int else "number" if TYPES[name] is float else "word"
    count = FIELDS[name].metadata["nargs"]
    if name in SINGLE_VALUED:
        return f"a {kind}"
    return f"{count} {kind}s" if isinstance(count, int) else f"{kind}s"


def default_of(name: str) -> Any:
    """The default of a flag, by its recipe name."""
    f = FIELDS[name]
    return f.default if f.default_factory is dataclasses.MISSING else f.default_factory()


def spelling(name: str) -> str:
    """A flag as it is written on the command line: `drop_path` → `--drop-path`."""
    return spelling_of(FIELDS[name])


def is_requested(name: str, config: RunConfig, explicit: Collection[str]) -> bool:
    """Whether a flag was given (`explicit`) with a value that is neither its default nor neutral."""
    value = getattr(config, name)
    return name in explicit and value != default_of(name) and value not in FIELDS[name].metadata["neutral"]
