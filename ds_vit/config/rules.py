"""Rules between flags: flags without effect, exclusions and numbers that must fit; most are read from `Flag`."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from ds_vit.config.deepspeed_json import leaves
from ds_vit.config.flag import Condition, Flag, Scope, spelling, texts_of
from ds_vit.config.schema import KEY_OF_FLAG, RunConfig
from ds_vit.config.units import Interval, all_sizes, parse_seconds, parse_set

SCHEDULER_KEY_OF_FLAG: Mapping[str, str] = {
    **dict.fromkeys(("sched", "min_lr", "wsd_decay_fraction"), "scheduler.type"),
    **dict.fromkeys(("warmup_steps", "warmup_epochs"), "scheduler.params.warmup_num_steps"),
    "warmup_lr": "scheduler.params.warmup_min_lr",
}
"""Flag → the key that replaces it in a DeepSpeed JSON with a scheduler, unless it is "auto"."""


@functools.cache
def replacements(kind: type[RunConfig]) -> frozenset[tuple[str, str]]:
    """Flags, each with another one that it replaces in a recipe if it is on the command line."""
    pairs = [(name, other) for name, meta in kind.flags().items() for other, why in meta.excludes.items() if not why]
    pairs += [("val_fraction", "val_split"), ("memory", "batch_size"), ("memory", "grad_accum_steps")]
    return frozenset((*pairs, *((other, name) for name, other in pairs)))


def flags_set_by(pairs: Sequence[str]) -> set[str]:
    """The flags whose keys of the JSON --set gives a value, in a block too; an "auto" leaves a key to its flag.

    A whole scheduler replaces the flags of the schedule.
    """
    values = parse_set(pairs)
    keys = leaves(values)
    of_flag = {**KEY_OF_FLAG, **SCHEDULER_KEY_OF_FLAG}
    replaced = {name for name, key in of_flag.items() if keys.get(key, "auto") != "auto"}
    if "scheduler" in values and "scheduler.type" in keys:
        replaced |= {name for name, key in SCHEDULER_KEY_OF_FLAG.items() if keys.get(key) != "auto"}
    return replaced


# ---- conditions ------------------------------------------------------------------------------------------------------


def _parts(condition: str) -> list[tuple[str, bool, list[str]]]:
    """`tp!=1` → its flag, whether it asks for a difference, and the patterns; no pattern asks for the flag to be on."""
    cut = [(part.replace("!=", "=").partition("="), "!=" in part) for part in condition.split(" or ")]
    return [(name, differs, patterns.split("|") if patterns else []) for (name, _, patterns), differs in cut]


def _holds(condition: Condition, config: RunConfig) -> bool:
    asked = condition if isinstance(condition, str) else condition[0]
    if not isinstance(asked, str):
        return bool(asked(config))
    for name, differs, patterns in _parts(asked):
        value = getattr(config, name)
        matches = any(fnmatchcase(text, pattern) for text in texts_of(value) for pattern in patterns)
        if matches != differs if patterns else value:
            return True
    return False


def _in_words(condition: Condition, *, is_needed: bool) -> str:
    """The end of "--flag has no effect …"."""
    if not isinstance(condition, str):
        return condition[1]
    values = {name: [] if differs else patterns for name, differs, patterns in _parts(condition)}
    shown = [f"{spelling(name)} {_or(patterns).replace('*', '…')}".strip() for name, patterns in values.items()]
    return f"{'with' if not is_needed else 'unless' if any(values.values()) else 'without'} {_or(shown)}"


def _or(words: Sequence[str]) -> str:
    return " or ".join([", ".join(words[:-1]), *words[-1:]] if len(words) > 1 else words)


def conditions_of(meta: Flag) -> list[tuple[Condition, bool, str]]:
    """A flag's conditions, whether each must hold for an effect, and the end of "--flag has no effect …"."""
    both = ((meta.idle_if, False), (meta.needs, True))
    return [(one, is_needed, _in_words(one, is_needed=is_needed)) for ones, is_needed in both for one in ones]


def idle_flags(config: RunConfig) -> dict[str, str]:
    """Each flag without effect in this combination, by its recipe name → why."""
    idle: dict[str, str] = {}
    for name, meta in config.flags().items():
        if config.eval_only and Scope.EVALUATION not in meta.scope:
            idle[name] = "with --eval-only (weights are given by --initial-checkpoint)"
            continue
        for condition, is_needed, words in conditions_of(meta):
            if _holds(condition, config) != is_needed:
                idle.setdefault(name, words)
    return idle


# ---- problems --------------------------------------------------------------------------------------------------------


def find_problems(config: RunConfig, invalid: Mapping[str, str]) -> Iterator[str]:
    """Missing flags, contradictions and flags without effect, for people.

    Args:
        config: the settings.
        invalid: flags whose values are invalid → these as text; they are not missing, and turn on what needs them.
    """
    asked = config.model_copy(update=invalid)
    if not asked.deepspeed_config:
        shipped = "ds_configs/zero1_bf16.json, on a CPU with ds_configs/cpu_zero1_fp32.json"
        yield f"--deepspeed_config FILE is missing; begin with {shipped}"
    if not asked.dataset and not asked.data_dir:
        yield "no data: give --data-dir DIR with train/ and val/ in it, or --dataset digits"
    by_set = flags_set_by(config.set)
    for name, meta in config.flags().items():
        if meta.key and name in by_set & config.model_fields_set:
            yield f"{written(name, config)} and --set {meta.key} are both given; keep one"
        if getattr(config, name) == config.default_of(name):
            continue
        for condition, why in meta.excludes.items():
            other, _, patterns = _parts(condition)[0]
            if _holds(condition, config) if patterns else getattr(config, other) != config.default_of(other):
                both = f"{written(name, config)} and {written(other, config)} are both given"
                yield f"{both}{why and f': {why}'}; keep one"
    yield from _misfits(config)
    for name, reason in idle_flags(asked).items():
        if config.is_requested(name):
            yield f"{spelling(name)} has no effect {reason}; drop it"


def written(name: str, config: RunConfig) -> str:
    """A flag with its value, as it is typed."""
    value = getattr(config, name)
    if isinstance(value, bool):
        return spelling(name) if value else f"--no{spelling(name)[1:]}"
    return f"{spelling(name)} {' '.join(texts_of(value))}"


def _misfits(config: RunConfig) -> Iterator[str]:
    """Values of several flags that do not fit together."""
    early, limit = config.stop_before_seconds, config.time_limit
    if early is not None and limit and early >= parse_seconds(limit, "--time-limit"):
        yield f"--stop-before-seconds {early:g} leaves nothing of --time-limit {limit}; give fewer seconds"
    if config.drop and "drop_rate" in config.model_kwargs:
        rate = config.model_kwargs["drop_rate"]
        yield f"--drop {config.drop} and --model-kwargs drop_rate={rate} are both given; keep one"
    if config.resume == "auto" and not config.output:
        yield "--resume auto looks for checkpoints in the run's folder: give it by --output DIR"
    if config.rollback and Interval.parse(config.checkpoint_interval, "--checkpoint-interval").seconds:
        interval = written("checkpoint_interval", config)
        yield f"--rollback {config.rollback} does not work with {interval}; give it in steps, or epoch"
    num_folders = 1 if isinstance(config.data_dir, str) else len(config.data_dir)
    if num_folders > 1 and len(config.data_weights) not in (0, num_folders):
        yield f"--data-weights has {len(config.data_weights)} numbers for the {num_folders} folders of --data-dir"
    flag, sizes = all_sizes(config.img_size_schedule, config.train_img_sizes)
    if sizes and config.img_size not in (None, sizes[-1]):
        yield f"{flag} ends at {sizes[-1]}, and --img-size is {config.img_size}; make them equal, or drop it"
