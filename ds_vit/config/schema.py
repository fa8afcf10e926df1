"""The settings of a run: `RunConfig` has one typed field per flag, with the flag's metadata (`flag.py`).

Flags that timm has keep timm's spelling, meaning and default. The command line, recipes, the checks between flags and
every list of flag names are generated from it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError

from ds_vit.config import units
from ds_vit.config.augmentation import AugmentConfig, MixConfig
from ds_vit.config.flag import (
    EVALUATION,
    FREE,
    IDENTITY,
    NOTED,
    RECORDED,
    START,
    WEIGHTS,
    Below1,
    Epochs,
    Images,
    Pixels,
    Probability,
    Rate,
    Scope,
    Seconds,
    Settings,
    Share,
    Steps,
    StepsFrom1,
    UpTo1,
    Weight,
    checked,
    flag,
    read_by,
    spelling,
    texts_of,
)
from ds_vit.fault_tolerance.errors import did_you_mean
from ds_vit.tasks import flags as shared
from ds_vit.tasks.bridgetower import flags as bridgetower
from ds_vit.tasks.clip import flags as clip
from ds_vit.tasks.dino import flags as dino
from ds_vit.tasks.distillation import flags as distillation
from ds_vit.tasks.mae import flags as mae
from ds_vit.tasks.segmentation import flags as segmentation

PROGRAM_DATASET = "python"
"""The value of `dataset` in a run whose images a Python program passes (`ds_vit.api.train`)."""

# Types that several flags share, and conditions that are too long for one line.
Degree = Annotated[int, Field(ge=1, le=4096)]
FOLDER_NAME = checked("must name a folder", lambda text: not text.isspace())
CHANNELS = checked("must be one number or three", lambda x: len(x) in (1, 3))
SEVERAL_SIZES = checked("must be two sizes or more, each once", lambda x: not x or len({*x}) == len(x) > 1)
RECOMPUTED = checked(
    "must be full, selective or a number of blocks, at least 1 and at most 1,000",
    lambda word: word in ("", "full", "selective") or (word.isdecimal() and len(word) < 5 and 1 <= int(word) <= 1000),
)
NO_CHECKPOINT = (
    lambda c: c.checkpoint_interval == "0" and c.resume == "none",
    "with --checkpoint-interval 0: there is no checkpoint to return to",
)
SEVERAL_FOLDERS = (lambda c: not isinstance(c.data_dir, str), "with one --data-dir")
_NOTHING = "with --val-split '': nothing is evaluated"
EVALUATES = ("eval_only or val_split or zeroshot", _NOTHING)
RESIZES = ("no_aug or eval_only or val_split or zeroshot", _NOTHING)  # training without augmentation does, too
NOT_ONLY_ZEROSHOT = (lambda c: c.val_split or not c.zeroshot, "with --val-split '': only --zeroshot is evaluated")


class LayoutSettings(Settings, section="run", scope=FREE | EVALUATION):
    """The DeepSpeed JSON and the layout of the ranks."""

    deepspeed_config: str | dict[str, Any] = flag("", "DeepSpeed JSON file", FREE | RECORDED, metavar="FILE")
    set: Annotated[tuple[str, ...], read_by(units.parse_set)] = flag(
        (), "override values of the DeepSpeed JSON: zero_optimization.stage=2", metavar="K=V"
    )
    pp: Degree = flag(1, "pipeline stages")
    tp: Degree = flag(1, "tensor-parallel ranks")
    tp_across_hosts: bool = flag(False, "let tensor-parallel groups span two hosts", needs="tp!=1")
    sequence_parallel: bool = flag(False, "shard the tokens between the layers that --tp shards", needs="tp!=1")
    class_parallel: Literal["auto", "on", "off"] = flag(
        "auto", "shard the classifier over classes under --tp", needs="tp!=1"
    )
    pp_partition: str = flag(
        "", "first layer of each stage and the number of layers: 0,7,14; auto: the fastest", needs="pp!=1"
    )
    check_replicas: Steps = flag(0, "steps between bitwise comparisons of replicas", FREE)


class OutputSettings(Settings, section="run", scope=FREE):
    """The output folder, checkpoints and logs."""

    output: Annotated[str, FOLDER_NAME] = flag(
        "", "folder of the run (default: runs/<time>-<model>)", FREE | EVALUATION, metavar="DIR"
    )
    seed: Annotated[int, Field(ge=-(2**63), le=2**63 - 1)] = flag(42, "random seed", EVALUATION)
    checkpoint_interval: Annotated[str, read_by(units.Interval.parse, empty=True)] = flag(
        "epoch", "500 (steps), 30m or epoch between checkpoints (0: only when interrupted)", neutral=("0",)
    )
    keep_checkpoints: Steps = flag(2, "checkpoints to keep in addition to the best one (0: all)")
    log_samples: bool = flag(False, "write the samples of each step to samples/ in the output folder")
    log_images: Annotated[int, Field(ge=0, le=4096)] = flag(16, "images of the first step in augmented.png (0: none)")
    profile_steps: Annotated[str, read_by(units.parse_steps)] = flag(
        "", "profile the steps A to B - 1 into profile/", metavar="A:B"
    )
    log_interval: StepsFrom1 | None = flag(
        None, "steps between lines of metrics.jsonl (default: a fiftieth of the run, at most 50)"
    )
    wandb: bool = flag(
        False, "also log to Weights & Biases", FREE | EVALUATION, key="wandb.enabled", short=("--log-wandb",)
    )
    wandb_project: str = flag("", "--wandb: project of the run", FREE | EVALUATION, key="wandb.project")
    stall_seconds: Seconds | None = flag(
        None, "end a run after so long without progress (several ranks: 300; 0: never)", FREE | EVALUATION
    )
    verbose: bool = flag(False, "show all of DeepSpeed's log", FREE | EVALUATION)
    eval_only: bool = flag(False, "evaluate the initial weights and stop", EVALUATION)


class StartSettings(Settings, section="run", scope=START):
    """One start of the run."""

    resume: str = flag("none", "checkpoint to resume from: none, auto or a path")
    allow_batch_change: bool = flag(False, "resume with another global batch", needs="resume!=none")
    allow_schedule_change: bool = flag(
        False, "resume with another schedule, augmentation, loss or optimizer", needs="resume!=none"
    )
    stop_before_seconds: Seconds | None = flag(None, "save and stop this long before the time limit")
    time_limit: Annotated[str, read_by(units.parse_seconds)] = flag("", "save and stop after this time: 90m, 24h")
    dry_run: bool = flag(False, "show the run, its memory and its files without starting it", START | EVALUATION)


class EvaluationSettings(Settings, section="run", scope=NOTED, needs=EVALUATES):
    """Evaluation."""

    eval_interval: Epochs = flag(1, "epochs between evaluations (0: only at the end)", neutral=(0,))
    eval_first: bool = flag(False, "also evaluate the weights that training starts from, as those of step 0")
    eval_metric: str = flag("", "metric that decides which weights are best (default: the task's first)")
    validation_batch_size: Images | None = flag(
        None, "images per rank in evaluation", FREE | EVALUATION, short=("-vb",)
    )
    eval_knn: Annotated[int, Field(ge=0, le=10**6)] = flag(
        0,
        "evaluate the features by N nearest neighbours",
        NOTED | EVALUATION,
        needs=NOT_ONLY_ZEROSHOT,
        short=("--knn",),
        const=20,
    )
    eval_linear_probe: bool = flag(
        False, "also evaluate the features by a linear classifier", NOTED | EVALUATION, needs=NOT_ONLY_ZEROSHOT
    )


class ModelSettings(Settings, section="model", scope=WEIGHTS):
    """The task and the model."""

    task: str = flag("classification", "training task; PACKAGE.MODULE:CLASS for a class of your own")
    task_source: str = flag(
        "",
        "file and hash of such a class, as a run records them: a warning if it has changed",
        FREE | WEIGHTS,
        needs="task=*:*",
    )
    model: str = flag("vit_base_patch16_224", "timm name, hf-hub:ORG/NAME or local-dir:FOLDER")
    model_kwargs: Annotated[dict[str, Any], BeforeValidator(units.parse_kwargs)] = flag(
        {}, "arguments of the constructor", metavar="K=V"
    )
    num_classes: Annotated[int, Field(ge=1, le=10**7)] | None = flag(None, "classes of the head (default: the data's)")
    img_size: Pixels | None = flag(None, "image side in pixels (default: the model's)")


class TrainedModelSettings(Settings, section="model", scope=IDENTITY):
    """The model as it is trained."""

    img_size_schedule: Annotated[str, read_by(units.parse_schedule)] = flag(
        "",
        "sides of the images, and when each starts",
        excludes={"train_img_sizes": ""},
        metavar="128:0,160:0.4,224:0.8",
    )
    train_img_sizes: Annotated[tuple[Pixels, ...], SEVERAL_SIZES] = flag(
        (), "sides from which each step draws one", metavar="SIZE"
    )
    drop: Below1 = flag(0.0, "dropout before the head")
    drop_path: Below1 = flag(0.0, "stochastic depth rate of the last block")
    freeze: tuple[str, ...] = flag(
        (), "patterns of timm parameter names to freeze", NOTED, excludes={"linear_probe": ""}
    )
    linear_probe: bool = flag(False, "train only the classifier head", NOTED)


class ComputationSettings(Settings, section="model", scope=FREE | EVALUATION):
    """Initial weights, and how the model is computed."""

    pretrained: bool = flag(
        False, "start from the weights of this --model (cache, Hub or folder)", excludes={"initial_checkpoint": ""}
    )
    initial_checkpoint: str = flag("", "weights to start from: a run, or a file in timm's names", metavar="RUN|FILE")
    resample_patch_embed: bool = flag(
        False, "resample patch kernels of another patch size", needs="pretrained or initial_checkpoint"
    )
    grad_checkpointing: Annotated[str, RECOMPUTED] = flag(
        "",
        "recompute activations in the backward pass: full (each block; the default word), selective (all except "
        "matrix products and attention), or N blocks together",
        FREE,
        const="full",
        metavar="full|selective|N",
    )
    compile: bool = flag(
        False,
        "run the blocks through torch.compile",
        excludes=dict.fromkeys(
            ("grad_checkpointing=selective", "img_size_schedule", "train_img_sizes"),
            "--compile makes one graph of fixed shapes",
        ),
    )
    compile_mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = flag(
        "default", "mode of torch.compile", needs="compile"
    )
    cuda_graph: Literal["auto", "on", "off"] = flag(
        "auto", "replay a micro-batch's passes as CUDA graphs; auto: in layouts verified on a GPU", FREE
    )


class DataSettings(Settings, section="data", scope=NOTED | RECORDED):
    """The images."""

    dataset: str = flag(
        "", "digits, glyphs, torch/cifar10, wds/SHARDS, hfds/FOLDER, csv/FILE, …; empty: folders in --data-dir"
    )
    train_split: str = flag("train", "name of the training split")
    val_split: str = flag(
        "validation",
        "name of the evaluation split; '': none",
        idle_if=[("val_fraction", "with --val-fraction, which splits --train-split"), "dataset=digits|glyphs"],
        neutral=("",),
    )
    val_fraction: Share | None = flag(
        None, "share of the training split to evaluate on", needs=[EVALUATES, NOT_ONLY_ZEROSHOT]
    )
    on_bad_image: Literal["error", "skip"] = flag("skip", "replace an image that cannot be decoded, or end the run")
    data_weights: tuple[Annotated[float, Field(gt=0, le=10**9)], ...] = flag(
        (), "share of an epoch for each --data-dir (default: each image once)", NOTED, needs=SEVERAL_FOLDERS
    )


class ReadingSettings(Settings, section="data", scope=FREE | RECORDED):
    """How images are read."""

    data_dir: str | tuple[str, ...] = flag(
        "",
        "folder with train/ and val/ (or .tar files); several are mixed",
        idle_if="dataset=digits|glyphs",
        metavar="DIR",
    )
    workers: Annotated[int, Field(ge=0, le=1024)] | Literal["auto"] = flag(
        4, "loader processes per rank (0: none; auto)", short=("-j",), metavar="auto|N"
    )
    allow_empty_classes: bool = flag(False, "allow class folders without images")
    dataset_download: bool = flag(
        False, "let torchvision download the dataset", FREE | EVALUATION, needs="dataset=torch/*"
    )
    exif_rotation: Literal["on", "off"] = flag(
        "off", "turn images as their EXIF orientation says", WEIGHTS, idle_if="dataset=digits|glyphs"
    )
    max_bad_images: Probability = flag(
        0.01,
        "save and stop if a larger share of an epoch's images cannot be decoded",
        FREE,
        idle_if="on_bad_image=error",
    )


class ImageSettings(Settings, section="augmentation", scope=NOTED | WEIGHTS):
    """The input of the model and of evaluation."""

    interpolation: Literal["", "nearest", "bilinear", "bicubic", "box", "hamming", "lanczos"] = flag(
        "", "resize filter of evaluation (default: the model's)", needs=RESIZES
    )
    crop_pct: UpTo1 | None = flag(None, "evaluation crop: share of a side (default: the model's)", needs=EVALUATES)
    crop_mode: Literal["", "center", "squash", "border"] = flag("", "mode of the evaluation crop", needs=EVALUATES)
    mean: Annotated[tuple[Probability, ...], CHANNELS] | None = flag(None, "pixel mean", WEIGHTS)
    std: Annotated[tuple[UpTo1, ...], CHANNELS] | None = flag(None, "pixel standard deviation", WEIGHTS)
    aug_repeats: Annotated[int, Field(ge=0, le=1000)] = flag(
        0, "repeated augmentation: copies of a sample", IDENTITY, neutral=(1,)
    )


class LossSettings(Settings, section="loss", scope=IDENTITY):
    """The loss of a classifier."""

    bce_loss: bool = flag(False, "binary cross-entropy instead of softmax", WEIGHTS)
    bce_sum: bool = flag(False, "sum the binary cross-entropy over classes", needs="bce_loss")
    bce_target_thresh: Below1 | None = flag(None, "binarise soft targets above this", needs="bce_loss")


class OptimizerSettings(Settings, section="optimizer", scope=IDENTITY):
    """The numbers of the optimizer."""

    lr: Rate | None = flag(None, "base learning rate (default: the JSON's)", key="optimizer.params.lr")
    weight_decay: Rate | None = flag(None, "weight decay", key="optimizer.params.weight_decay")
    clip_grad: Rate | None = flag(None, "largest norm after clipping", key="gradient_clipping")
    layer_decay: UpTo1 | None = flag(None, "layer-wise learning-rate decay", neutral=(1.0,))


class StepSettings(Settings, section="optimizer", scope=NOTED):
    """The learning rate's scale, the moving average, and bad steps."""

    lr_scale_by_batch: Literal["none", "linear", "sqrt"] = flag("none", "scale --lr with the global batch")
    lr_base_size: Images = flag(256, "global batch of the unscaled learning rate", needs="lr_scale_by_batch!=none")
    model_ema: bool = flag(False, "keep an exponential moving average of the weights, and evaluate it too")
    model_ema_decay: Below1 = flag(0.9998, "decay of the average", needs="model_ema")
    model_ema_warmup: bool = flag(False, "let the decay of the average grow from 0", needs="model_ema")
    norm_dtype: Literal["float32", "model"] = flag(
        "float32", "precision of the norm layers in a 16-bit model", NOTED | EVALUATION
    )
    tf32: bool = flag(False, "let fp32 matrix products use a GPU's TF32 cores", NOTED | EVALUATION)
    on_nonfinite: Literal["stop", "skip"] = flag("stop", "at a step whose gradient is not finite")
    spike_factor: Annotated[float, Field(gt=1, le=10**9)] | None = flag(
        None, "reject a step whose loss or gradient norm exceeds this multiple of its recent mean"
    )
    rollback: Steps = flag(0, "times to return to the last checkpoint at a rejected step", idle_if=NO_CHECKPOINT)


class BatchSettings(Settings, section="optimizer", scope=FREE):
    """The batch of a rank."""

    grad_stats_interval: Steps = flag(0, "steps between gradient statistics by layer (0: none)")
    batch_size: Images | None = flag(
        None,
        'micro-batch per rank where the JSON says "auto" (128)',
        FREE | EVALUATION,
        key="train_micro_batch_size_per_gpu",
        short=("-b",),
    )
    grad_accum_steps: Images | None = flag(
        None, 'micro-batches per step where the JSON says "auto"', IDENTITY, key="gradient_accumulation_steps"
    )
    auto_batch: bool = flag(
        False,
        "use the largest micro-batch that fits, and keep the global batch by accumulation",
        excludes={"batch_size": "", "grad_accum_steps": ""},
    )
    memory: Annotated[str, read_by(units.parse_bytes)] = flag(
        "", "--auto-batch: memory of a rank (default: what is free)", needs="auto_batch", metavar="BYTES"
    )


class ScheduleSettings(Settings, section="schedule", scope=NOTED):
    """The length of the run and the learning rate."""

    epochs: Annotated[int, Field(ge=1, le=10**6)] | None = flag(None, "length of training and of the schedule (300)")
    max_steps: StepsFrom1 | None = flag(None, "stop after this many optimizer steps", FREE)
    sched: Literal["cosine", "linear", "constant", "wsd"] = flag(
        "cosine", "learning-rate schedule", neutral=("constant",)
    )
    warmup_steps: Steps | None = flag(None, "warm-up in optimizer steps", excludes={"warmup_epochs": ""}, neutral=(0,))
    warmup_epochs: Weight | None = flag(None, "warm-up in epochs (5, at most a tenth of the run)", neutral=(0.0,))
    warmup_lr: Rate = flag(
        1e-5, "learning rate that warm-up starts from", idle_if="warmup_steps=0 or warmup_epochs=0", neutral=(0.0,)
    )
    min_lr: Rate = flag(0.0, "learning rate that the schedule ends at", idle_if="sched=constant")
    wsd_decay_fraction: UpTo1 = flag(0.1, "share of the run in which wsd decays", needs="sched=wsd")


class RunConfig(
    ScheduleSettings,
    BatchSettings,
    StepSettings,
    OptimizerSettings,
    distillation.DistillationSettings,
    dino.SelfDistillationSettings,
    LossSettings,
    dino.CropSettings,
    MixConfig,
    AugmentConfig,
    ImageSettings,
    shared.TableSettings,
    ReadingSettings,
    DataSettings,
    ComputationSettings,
    TrainedModelSettings,
    dino.HeadSettings,
    shared.TokenSettings,
    clip.LockSettings,
    clip.TextTowerSettings,
    mae.MaskedAutoencoderSettings,
    segmentation.SegmentationSettings,
    ModelSettings,
    shared.ZeroShotSettings,
    EvaluationSettings,
    StartSettings,
    OutputSettings,
    LayoutSettings,
):
    """Every flag of `launch/train.py`, by its name in a recipe; defaults are timm's where timm has the flag."""

    @classmethod
    @functools.cache
    def fixed_on_resume(cls) -> frozenset[str]:
        """The flags that a resumed run must not change; those in `KEY_OF_FLAG` are compared with the resolved JSON."""
        may_change = {*KEY_OF_FLAG, *cls.names_with(Scope.FREE), *cls.names_with(Scope.NOTED)}
        return frozenset(cls.flags().keys() - may_change)

    def is_requested(self, name: str) -> bool:
        """Whether a flag was given with a value that is neither its default nor neutral."""
        value = getattr(self, name)
        is_neutral = value == self.default_of(name) or value in self.flags()[name].neutral
        return name in self.model_fields_set and not is_neutral


TASKS: Mapping[str, tuple[str, Sequence[type[Settings]]]] = {
    "classification": ("ds_vit.tasks.classification.task:Classification", distillation.SETTINGS),
    "mae": ("ds_vit.tasks.mae.task:MaskedAutoencoding", mae.SETTINGS),
    "clip": ("ds_vit.tasks.clip.task:Clip", clip.SETTINGS),
    "siglip": ("ds_vit.tasks.clip.task:SigLip", clip.SETTINGS),
    "bridgetower": ("ds_vit.tasks.bridgetower.task:BridgeTowerTask", bridgetower.SETTINGS),
    "dino": ("ds_vit.tasks.dino.task:SelfDistillation", dino.SETTINGS),
    "segmentation": ("ds_vit.tasks.segmentation.task:Segmentation", segmentation.SETTINGS),
}
"""Word of `--task` → its class, imported when it is asked for, and its flags in addition to those of every run."""
KEY_OF_FLAG: Mapping[str, str] = {name: meta.key for name, meta in RunConfig.flags().items() if meta.key}
"""Flag → its key in the DeepSpeed JSON, for the flags that set one."""

LAYOUT_FLAGS = ("pp", "tp", *(name for name, meta in RunConfig.flags().items() if {"pp!=1", "tp!=1"} & {*meta.needs}))
"""The degrees of the model's layout, and the flags that have an effect only with them."""


def names_in(settings: Sequence[type[Settings]]) -> frozenset[str]:
    """The recipe names of the flags of these classes."""
    return frozenset(name for kind in settings for name in kind.flags())


@functools.cache
def tasks_of(name: str) -> tuple[str, ...]:
    """The built-in tasks that a flag belongs to; empty for a flag of every run."""
    return tuple(task for task, (_, settings) in TASKS.items() if name in names_in(settings))


def what_is_wrong(
    values: Mapping[str, Any], kind: type[RunConfig] = RunConfig
) -> tuple[RunConfig, dict[str, list[str]]]:
    """The settings from those of the values that are valid; of each other one, by its name, what is wrong with it."""
    wrong: dict[str, list[str]] = {}
    while True:
        try:
            return kind.model_validate({name: values[name] for name in values if name not in wrong}), wrong
        except ValidationError as error:
            details: dict[str, list[Any]] = {}
            for detail in error.errors():
                details.setdefault(str(detail["loc"][0]), []).append(detail)
            wrong |= {name: _problems(kind, name, values[name], of_name) for name, of_name in details.items()}


_OUT_OF_RANGE = {"finite_number", "greater_than", "greater_than_equal", "less_than", "less_than_equal"}


def _problems(kind: type[Settings], name: str, value: Any, details: Sequence[Any]) -> list[str]:
    """What pydantic found wrong with a value, for people."""
    types = {detail["type"] for detail in details}
    if "value_error" in types:
        error = next(detail["ctx"]["error"] for detail in details if detail["type"] == "value_error")
        return [*getattr(error, "problems", (str(error),))]
    if keys := [detail["input"] for detail in details if detail["loc"][-1] == "[key]"]:
        return [f"{spelling(name)}: a key must be text, not {key!r}" for key in keys]
    shown = " ".join(texts_of(value))
    if types == {"literal_error"} and isinstance(details[0]["input"], str):
        words = kind.kinds(name)[0].words
        return [f"{spelling(name)} {shown} is none of {', '.join(words)}{did_you_mean(shown, words)}"]
    if types & _OUT_OF_RANGE and not types & {"missing", "too_long"}:
        return [f"{spelling(name)} {kind.range_of(name)}, not {shown}"]
    is_list = isinstance(value, (list, tuple)) and any(one.length is not None for one in kind.kinds(name))
    return [f"{spelling(name)} takes {kind.values_of(name)}, not {shown if is_list else repr(value)}"]
