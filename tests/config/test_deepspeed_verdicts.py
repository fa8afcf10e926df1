"""No key of DeepSpeed's JSON ends in a traceback, and none that is accepted moves the curve."""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from curves import assert_same_curve, train_in
from pydantic import BaseModel
from pydantic_core import PydanticUndefined
from ranks import RankPool

from ds_vit.config.deepspeed_json import overlay
from ds_vit.config.deepspeed_keys import DeepSpeedJson, model_of
from ds_vit.config.deepspeed_verdicts import NAMED, idle_keys
from ds_vit.config.schema import RunConfig
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.training.resolve.deepspeed import IDLE, read

# SGD and a norm in every row: a factor in the gradients shows in both. Two samples a rank, accumulated.
BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "SGD", "params": {"lr": 0.2, "momentum": 0.9}},
    "zero_optimization": {"reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000},
}
# Depth 2 for two pipeline stages; small partitions for ZeRO-3, where a persistent parameter is not partitioned.
ARGS = [
    *("--model", "vit_tiny_patch16_224", "--model-kwargs", "patch_size=8", "embed_dim=24", "depth=2", "num_heads=2"),
    *("--img-size", "16", "--dataset", "digits", "--val-split", "", "--no-aug", "--workers", "0"),
    *("--warmup-steps", "0", "--sched", "constant", "--max-steps", "2", "--log-interval", "1"),
]
PLACES: dict[str, dict[str, Any]] = {f"ZeRO-{stage}": {"zero_optimization.stage": stage} for stage in range(4)}
PLACES["ZeRO-3"]["zero_optimization.stage3_param_persistence_threshold"] = 0
PLACES["two stages"] = PLACES["ZeRO-1"]
PRECISIONS = {"fp32": {}, "bf16": {"bf16.enabled": True}, "autocast": {"torch_autocast.enabled": True}}
# Every file has these, or a place or a precision is one of them; and old spellings. Other tests set them.
ELSEWHERE = {
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("optimizer.type", "optimizer.params", "scheduler.type", "scheduler.params", "zero_optimization.stage"),
    *("bf16.enabled", "torch_autocast.enabled", "zero_optimization.cpu_offload", "zero_optimization.cpu_offload_param"),
    "zero_optimization.stage3_gather_fp16_weights_on_model_save",
}
# Where the opposite of a switch, or 1000 for a number, is not a value to try.
VALUES: dict[str, list[Any]] = {
    "zero_optimization.overlap_comm": [True, False],
    "zero_optimization.stage3_prefetch_bucket_size": [0, 1000],
    "zero_optimization.stage3_max_live_parameters": [0, 1000],
    "zero_optimization.offload_param": [{"device": "cpu"}, {"device": "nvme", "nvme_path": "/tmp"}, {"device": "none"}],
    "zero_optimization.offload_optimizer": [{"device": "cpu"}, {"device": "nvme", "nvme_path": "/tmp"}],
    "zero_optimization.zenflow": [{"topk_ratio": 0.1}],
    "zero_optimization.zero_hpz_partition_size": [2],
    "zero_optimization.leaf_module": [{"classes": ["timm.models.vision_transformer.Block"]}, {"names": ["layers.1"]}],
    "zero_optimization.offload_param.nvme_path": ["/tmp"],
    "zero_optimization.offload_optimizer.nvme_path": ["/tmp"],
    "zero_optimization.offload_optimizer.ratio": [0.5],
    "zero_optimization.offload_optimizer.cpuadam_cores_perc": [0.5],
    "torch_autocast.dtype": ["torch.bfloat16", "bf16"],
    "torch_autocast.lower_precision_safe_modules": [["torch.nn.Linear"], ["no.such.Module"]],
    "data_types.grad_accum_dtype": ["fp32", "bf16"],
    "data_types.param_dtype": ["fp32", "bf16"],
    "data_types.buffer_dtype": ["fp32", "bf16"],
    "data_types.keep_in_fp32_modules": [["norm"]],
    "pipeline.activation_checkpoint_interval": [1],
    "activation_checkpointing.number_checkpoints": [2],
    "flops_profiler.profile_step": [2],
    "flops_profiler.module_depth": [1],
    "flops_profiler.output_file": ["{folder}/flops.txt"],
    "timers.throughput": [{"enabled": False}, {"synchronized": False}],
    "tensorboard.output_path": ["{folder}"],
    "csv_monitor.output_path": ["{folder}"],
    "communication_data_type": ["fp32", "bf16"],
    "gradient_predivide_factor": [2.0],
    "gradient_allreduce_op": ["sum"],
    "steps_per_print": [1],
    "managed_gradient_accumulation": [False],
    "sequence_parallel_size": [1, 2],
    "compile": [{"deepcompile": True}, {"debug_log": True}],
    **{key: [{"enabled": True}] for key in ("autotuning", "hybrid_engine", "data_efficiency", "expert_parallel")},
}
# A key that needs another one, or says nothing without it.
COMPANIONS: dict[str, dict[str, Any]] = {
    "zero_optimization.compute_grad_norm": {"gradient_clipping": 0.0},
    "bf16.bf16_master_weights_and_grads": {"bf16.bf16_optimizer_states": True},
    "bf16.bf16_optimizer_states": {"bf16.bf16_master_weights_and_grads": True},
    **{f"{block}.enabled": {f"{block}.output_path": "{folder}"} for block in ("tensorboard", "csv_monitor")},
}
ROUNDING = ("communication_data_type", "data_types.grad_accum_dtype")
OFFLOADS = ("zero_optimization.offload_param", "zero_optimization.offload_optimizer")


def keys(model: type[BaseModel] = DeepSpeedJson, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted names of the keys that the models have, with their defaults."""
    for name, field in model.model_fields.items():
        key, block = f"{prefix}{field.alias or name}", model_of(field.annotation)
        if block is not None and (model is DeepSpeedJson or key in OFFLOADS):
            yield from keys(block, f"{key}.")
        if block is None or key in VALUES:
            yield key, field.default


def choices() -> dict[str, list[Any]]:
    """Each key → values that are not its default."""
    found = {}
    typed = dict(keys())
    named = dict.fromkeys(sorted(NAMED - DeepSpeedJson.model_fields.keys() - typed.keys()))
    for key, default in (typed | named).items():
        if key not in ELSEWHERE and not key.endswith(".device"):
            is_switch = default in (None, PydanticUndefined) or isinstance(default, bool)
            found[key] = VALUES.get(key, [not default if is_switch else "x" if isinstance(default, str) else 1000])
    return found


def values_of(chosen: Mapping[str, Any]) -> dict[str, Any]:
    """The values by dotted names, with what they need; copies, since `overlay` sets keys in blocks that are values."""
    values: dict[str, Any] = {}
    for key in sorted(chosen):
        block = key.rpartition(".")[0]
        values |= {f"{block}.device": "cpu"} if block in OFFLOADS else {}
        values |= {key: chosen[key]} | COMPANIONS.get(key, {})
    return copy.deepcopy(values)


def problems(data: Mapping[str, Any], pp: int) -> str:
    """What is wrong with a file, in lines; an exception that is no `UserError` would be a traceback."""
    try:
        read(RunConfig(deepspeed_config=data, pp=pp), on_cpu=True)
    except UserError as error:
        return str(error)
    return ""


@functools.cache
def legal_values(place: str, precision: str) -> dict[str, list[Any]]:
    """Each key → those of its values that a file of the place may have that has no other key."""
    base, pp = place_of(place, precision)
    return {
        key: legal
        for key, values in choices().items()
        if (legal := [v for v in values if not problems(overlay(base, values_of({key: v}), "base"), pp)])
    }


@functools.cache
def files_of(place: str, precision: str) -> list[dict[str, Any]]:
    """Two files in which each accepted key is set: all to their first values, and every second one to its last.

    Over all places the second ones set each key without each other key.
    """
    number, (base, pp) = WHERE.index((place, precision)), place_of(place, precision)
    firsts, lasts = {}, {}
    legal, places = legal_values(place, precision), {key: index for index, key in enumerate(choices())}
    for key, values in legal.items():
        firsts[key] = values[0]
        if (places[key] >> number % 7 & 1) == number // 7:
            lasts[key] = values[-1]
    files = []
    for chosen in (firsts, lasts):
        while wrong := problems(overlay(base, values_of(chosen), "base"), pp):
            named = {*re.findall(r"\w+(?:\.\w+)*", wrong)}
            left = {k: v for k, v in chosen.items() if not named & values_of({k: v}).keys()}
            assert left.keys() < chosen.keys(), wrong
            chosen = left
        files.append(values_of(chosen))
    return files


def rows_of(ranks: RankPool, folder: Path, data: Mapping[str, Any], pp: int) -> list[dict[str, Any]]:
    folder.mkdir()
    (folder / "c.json").write_text(json.dumps(data).replace("{folder}", str(folder)))
    return train_in(ranks, 2, [*ARGS, "--deepspeed_config", folder / "c.json", "--pp", pp, "--output", folder / "run"])


WHERE = [(place, precision) for place in PLACES for precision in PRECISIONS if (place, precision) != ("ZeRO-0", "bf16")]


def place_of(place: str, precision: str) -> tuple[dict[str, Any], int]:
    """The file without the keys to try, and its pipeline stages."""
    return overlay(BASE, PLACES[place] | PRECISIONS[precision], "base"), 2 if place == "two stages" else 1


@pytest.mark.slow
def test_the_files_have_each_key_that_is_legal_somewhere():
    """A key that the test below leaves out of all its files, as the problem of another one."""
    legal: set[str] = set()
    tried: set[str] = set()
    for where in WHERE:
        of_place, files = legal_values(*where), files_of(*where)
        legal |= of_place.keys()
        tried = tried.union(*files)
        assert len(of_place.keys() - files[0].keys()) <= 3, f"{where}: {of_place.keys() - files[0].keys()}"
    assert legal - tried == set()
    assert len(legal) > 100, "most keys are refused everywhere"


@pytest.fixture(scope="module")
def plain(ranks, tmp_path_factory):
    """Of a precision, a number of stages and a clipping, of which a key may need another one: the rows at ZeRO-1."""

    @functools.cache
    def rows(precision: str, pp: int, clip: float) -> list[dict[str, Any]]:
        data, _ = place_of("ZeRO-1", precision)
        return rows_of(ranks, tmp_path_factory.mktemp("plain") / "run", {**data, "gradient_clipping": clip}, pp)

    return rows


@pytest.mark.slow
@pytest.mark.parametrize(("place", "precision"), WHERE, ids=lambda name: name)
def test_no_key_ends_in_a_traceback_or_moves_the_curve(ranks, plain, tmp_path, place, precision):
    """Each key is refused before the ranks meet, named without effect, or works; what works trains as without it."""
    base, pp = place_of(place, precision)
    for turn, values in enumerate(files_of(place, precision)):
        data = overlay(base, copy.deepcopy(values), "base")
        told, _ = read(RunConfig(deepspeed_config=data, pp=pp), on_cpu=True)
        idle = set(idle_keys(DeepSpeedJson.of(data)))
        assert [note for note in told.notes if note.startswith(IDLE)] == [f"{IDLE}{', '.join(sorted(idle))}"]
        for key in values:
            is_idle = any(f"{key}.".startswith(f"{name}.") for name in idle)
            assert (told.json.given(key) is None) == is_idle, f"{key} does nothing, and nothing says so"
        rows = rows_of(ranks, tmp_path / str(turn), data, pp)
        rounds = precision != "fp32" or "bf16" in (values.get(key) for key in ROUNDING)
        columns = ("loss",) if values.get("zero_optimization.compute_grad_norm") is False else ("loss", "grad_norm")
        expected = plain(precision, pp, data["gradient_clipping"])
        assert_same_curve(expected, rows, rtol=2e-2 if rounds else 1e-5, keys=columns)
