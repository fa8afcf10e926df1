"""Every key of DeepSpeed's JSON with a value that is not its default, at every stage where it could act.

    verdict = without_ranks(case, folder)                           # "refused", "idle", "same", or None: it must run
    [verdict] = run_on_ranks(ranks, [(case.data, case.place)], folder)  # "works", "refused" or "traceback"

A case is a change to the smallest file that trains; its curve is compared with that file's own.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import json
import math
import pickle
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from curves import read_rows
from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig,
    DeepSpeedZeroOffloadParamConfig,
)
from pydantic import BaseModel
from ranks import RankFailure, RankPool
from runs import resolved

from ds_vit.fault_tolerance.errors import UserError

if TYPE_CHECKING:
    from ds_vit.training.run import Run

WORLD = 2

# SGD and a norm in every row: a factor in the gradients shows in both. Two samples a rank, accumulated.
BASE: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "gradient_clipping": 1.0,
    "optimizer": {"type": "SGD", "params": {"lr": 0.2, "momentum": 0.9}},
    "zero_optimization": {"stage": 0, "reduce_bucket_size": 100_000, "allgather_bucket_size": 100_000},
}
# Depth 2 for two pipeline stages; small partitions for ZeRO-3, where a persistent parameter is not partitioned.
ARGS = [
    *("--model", "vit_tiny_patch16_224", "--model-kwargs", "patch_size=8", "embed_dim=24", "depth=2", "num_heads=2"),
    *("--img-size", "16", "--dataset", "digits", "--val-split", "", "--no-aug", "--workers", "0"),
    *("--max-steps", "2", "--log-interval", "1"),
]
CONSTANT = ["--warmup-steps", "0", "--sched", "constant"]
BF16 = {"bf16": {"enabled": True}}
BF16_FP32_SUMS = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
ALL_STAGES = (0, 1, 2, 3, "pp2")


@dataclass(frozen=True, eq=False)
class Case:
    """One key in one place.

    Attributes:
        key: its dotted name.
        value: what it is set to.
        place: the ZeRO stage, or "pp2" for two pipeline stages at ZeRO-1.
        beside: what else stands in the file; the reference has it too.
        rtol: of loss and norm against the file without the key.
        columns: which of the two are compared.
    """

    key: str
    value: Any
    place: int | str
    beside: Mapping[str, Any] = field(default_factory=dict)
    rtol: float = 1e-5
    columns: tuple[str, ...] = ("loss", "grad_norm")

    @property
    def data(self) -> dict[str, Any]:
        """The file."""
        out = self.reference
        block = out
        *above, last = self.key.split(".")
        for name in above:
            block = block.setdefault(name, {})
        block[last] = copy.deepcopy(self.value)
        return out

    @property
    def reference(self) -> dict[str, Any]:
        """The file without the key."""
        out = merged(BASE, self.beside)
        out["zero_optimization"]["stage"] = 1 if self.place == "pp2" else self.place
        if self.place == 3:
            out["zero_optimization"].setdefault("stage3_param_persistence_threshold", 0)
        return out

    def __str__(self) -> str:
        value = json.dumps(self.value).replace(" ", "").replace('"', "")
        beside = "".join(f"-{key}" for key in self.beside)
        return f"{self.key}={value[:40]}-{self.place}{beside}"


def merged(data: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """`data` with blocks of `changes` merged into its blocks; another optimizer takes the place of the first."""
    out = copy.deepcopy(dict(data))
    for key, value in changes.items():
        both = key != "optimizer" and isinstance(value, Mapping) and isinstance(out.get(key), Mapping)
        out[key] = merged(out[key], value) if both else copy.deepcopy(value)
    return out


LOOSE = 2e-2
CPU_NVME_NONE = [{"device": "cpu"}, {"device": "nvme", "nvme_path": "/tmp"}, {"device": "none"}]
# Where one value that is not the default does not say enough, or would not do anything.
OF_ITS_OWN: dict[str, list[Any]] = {
    "overlap_comm": [True, False],
    "cpu_offload": [True, False],
    "cpu_offload_param": [True, False],
    "stage3_prefetch_bucket_size": [0, 1000],
    "stage3_max_live_parameters": [0, 1000],
    "stage3_max_reuse_distance": [0, 1000],
    "offload_param": CPU_NVME_NONE,
    "offload_optimizer": CPU_NVME_NONE,
    "zenflow": [{"topk_ratio": 0.1}],
    "stage3_module_granularity_threshold": [1000, 1_000_000],
    "zero_hpz_partition_size": [2],
    "leaf_module": [
        {"classes": ["timm.models.vision_transformer.Block"]},
        {"names": ["layers.1"]},
        {"name_suffixes": ["mlp"]},
        {"classes": ["no.such.Class"]},
    ],
    "nvme_path": ["/tmp"],
    "buffer_count": [6],
    "ratio": [0.5, 0.0],
    "cpuadam_cores_perc": [0.5],
    "loss_scale": [128.0],
    "initial_scale_power": [8],
    "loss_scale_window": [10],
    "hysteresis": [1],
    "min_loss_scale": [2],
}


def values_of(model: type[BaseModel], *without: str) -> dict[str, list[Any]]:
    """Each key of a block, by the model that reads it, with the values to try: a switch's other one, a small size."""
    names = {field.alias or name: field.default for name, field in model.model_fields.items() if name not in without}
    return {
        name: OF_ITS_OWN.get(name, [not default if default is None or isinstance(default, bool) else 1000])
        for name, default in names.items()
    }


ZERO = values_of(DeepSpeedZeroConfig, "stage")
OFFLOAD = {
    "offload_param": values_of(DeepSpeedZeroOffloadParamConfig, "device"),
    "offload_optimizer": values_of(DeepSpeedZeroOffloadOptimizerConfig, "device"),
}
FP16 = values_of(DeepSpeedFP16Config)
BF16_KEYS = values_of(DeepSpeedBF16Config, "enabled")
RECOMPUTATION = """
    partition_activations contiguous_memory_optimization cpu_checkpointing synchronize_checkpoint_boundary profile
"""
BLOCKS: dict[str, list[Any]] = {
    "torch_autocast.dtype": ["bfloat16", "float16", "torch.bfloat16", "bf16"],
    "torch_autocast.lower_precision_safe_modules": [["torch.nn.Linear"], ["no.such.Module"]],
    "data_types.grad_accum_dtype": ["fp32", "bf16", "fp16"],
    "data_types.param_dtype": ["fp32", "bf16"],
    "data_types.buffer_dtype": ["fp32", "bf16"],
    "data_types.keep_in_fp32_modules": [["norm"]],
    "pipeline.stages": [2, 4],
    "pipeline.partition": ["uniform"],
    "pipeline.seed_layers": [True],
    "pipeline.activation_checkpoint_interval": [1],
    "pipeline.use_reentrant": [True, False],
    "pipeline.pipe_partitioned": [False],
    "pipeline.grad_partitioned": [False],
    **{f"activation_checkpointing.{key}": [True] for key in RECOMPUTATION.split()},
    "activation_checkpointing.number_checkpoints": [2],
    "flops_profiler": [
        {"enabled": True, "profile_step": 2, "detailed": False, "recompute_fwd_factor": 1.0}
        | {"module_depth": 1, "top_modules": 3, "output_file": "{folder}/flops.txt"},
        {"enabled": True},
    ],
    "optimizer.legacy_fusion": [True],
    "scheduler": [
        {"type": "WarmupLR", "params": {"warmup_max_lr": 0.2, "warmup_num_steps": 2}},
        {"type": "WarmupDecayLR", "params": {"total_num_steps": 10, "warmup_max_lr": 0.2, "warmup_num_steps": 2}},
        {"type": "WarmupCosineLR", "params": {"total_num_steps": 10, "warmup_num_steps": 2}},
        {"type": "OneCycle", "params": {"cycle_min_lr": 0.1, "cycle_max_lr": 0.2}},
        {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": 0.1}},
        {"type": "NoSuchLR"},
    ],
}
TOP_SWITCHES = """
    prescale_gradients dump_state disable_python_gc disable_allgather zero_force_ds_cpu_optimizer wall_clock_breakdown
    memory_breakdown dataloader_drop_last use_data_before_expert_parallelism
"""
TOP: dict[str, list[Any]] = {
    **{key: [True] for key in TOP_SWITCHES.split()},
    "managed_gradient_accumulation": [False],
    "communication_data_type": ["fp32", "bf16", "fp16"],
    "seq_parallel_communication_data_type": ["bf16"],
    "gradient_predivide_factor": [2.0],
    "gradient_allreduce_op": ["sum"],
    "steps_per_print": [1],
    "zero_allow_untested_optimizer": [True, False],
    "comms_logger": [
        {"enabled": True, "verbose": True},
        {"enabled": True, "prof_all": False, "prof_ops": ["all_reduce"], "debug": True},
    ],
    "timers": [{"throughput": {"enabled": False}}, {"throughput": {"synchronized": False}}],
    "aio": [
        {"block_size": 262144, "queue_depth": 32, "intra_op_parallelism": 2},
        {"single_submit": True, "overlap_events": False, "use_gds": True},
    ],
    "autotuning": [{"enabled": False, "fast": False}, {"enabled": True}],
    "hybrid_engine": [{"enabled": False, "max_out_tokens": 100}, {"enabled": True}],
    "data_efficiency": [{"enabled": False, "seed": 3}, {"enabled": True}],
    "checkpoint": [{"tag_validation": "Fail"}, {"load_universal": True}, {"parallel_write": {"pipeline_stage": True}}],
    "datastates_ckpt": [{"host_cache_size": 1}],
    "log_level": ["info"],
    "weight_quantization": [{"post_init_quant": {}}],
    "compile": [{"deepcompile": True}, {"deepcompile": False, "debug_log": True}],
    "tensor_parallel": [{"autotp_size": 2}],
    "expert_parallel": [{"enabled": False}, {"enabled": True}],
    "vocabulary_size": [100],
    "sequence_parallel_size": [1, 2],
    "data_parallel_size": [2],
}
MONITORS: dict[str, list[Any]] = {
    "tensorboard": [{"enabled": True, "output_path": "{folder}"}, {"job_name": "x", "output_path": "{folder}"}],
    "csv_monitor": [{"enabled": True, "output_path": "{folder}"}, {"job_name": "x", "output_path": "{folder}"}],
    "wandb": [{"enabled": True}, {"group": "g", "team": "t", "project": "p"}],
    "comet": [
        {"enabled": True},
        {"samples_log_interval": 2, "project": "p", "workspace": "w", "api_key": "k", "experiment_name": "n"},
        {"experiment_key": "k", "online": False, "mode": "create"},
    ],
}
# An optimizer that must know each parameter's place, with the settings that change the layout of flat memory.
LAMB = {"optimizer": {"type": "Lamb", "params": {"lr": 0.02, "eps": 1e-6, "weight_decay": 0.05}}}
MOVES_MEMORY: dict[str, tuple[Any, tuple[int | str, ...]]] = {
    "contiguous_gradients": (False, (1, 2)),
    "parameter_alignment": (True, (1, 2, "pp2")),
    "offload_optimizer": ({"device": "cpu"}, (1, 3)),
    "offload_param": ({"device": "cpu"}, (3,)),
    "sub_group_size": (1000, (3,)),
    "stage3_param_persistence_threshold": (1000, (3,)),
}


def _cases() -> Iterator[Case]:
    for key, values in ZERO.items():
        for value in values:
            for place in ALL_STAGES:
                yield Case(f"zero_optimization.{key}", value, place)
    for key, settings in OFFLOAD.items():
        beside = {"zero_optimization": {key: {"device": "cpu"}}}
        for name, values in settings.items():
            for value in values:
                for place in (3,) if key == "offload_param" else (1, 2, 3, "pp2"):
                    yield Case(f"zero_optimization.{key}.{name}", value, place, beside)
    for name, (value, places) in MOVES_MEMORY.items():
        yield from (Case(f"zero_optimization.{name}", value, place, LAMB) for place in places)
    unclipped = {"gradient_clipping": 0.0}
    for place in (1, 2, "pp2"):  # there is no norm then
        yield Case("zero_optimization.compute_grad_norm", False, place, unclipped, columns=("loss",))
    for name, values in FP16.items():
        yield from (Case(f"fp16.{name}", value, 1) for value in values)
    for name, values in BF16_KEYS.items():
        for value in values:
            yield Case(f"bf16.{name}", value, 1)
            yield from (Case(f"bf16.{name}", value, place, BF16, LOOSE) for place in (1, 2, 3, "pp2"))
            yield from (Case(f"bf16.{name}", value, place, BF16_FP32_SUMS, LOOSE) for place in (1, "pp2"))
    both = {"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    yield from (Case("bf16", {"enabled": True, **both}, place, BF16, LOOSE) for place in (1, 2, 3, "pp2"))
    for block in ("bf16", "torch_autocast"):
        yield from (Case(f"{block}.enabled", True, place, rtol=LOOSE) for place in ALL_STAGES)
    for name, values in BLOCKS.items():
        for value in values:
            if name.startswith("torch_autocast"):
                yield Case(name, value, 1)
                yield from (Case(name, value, place, AUTOCAST, LOOSE) for place in (0, 1, 3, "pp2"))
            elif name.startswith("data_types"):
                yield from (Case(name, value, place, rtol=LOOSE) for place in (0, 1, 3))
                yield from (Case(name, value, place, BF16, LOOSE) for place in (1, 3, "pp2"))
            elif name.startswith("scheduler"):
                yield from (Case(name, value, place, rtol=math.inf) for place in (1, "pp2"))  # it sets the rate
            else:
                yield from (Case(name, value, place) for place in (1, 3, "pp2"))
    for name, values in TOP.items():
        rounds = name == "communication_data_type"
        for value in values:
            places = (
                ALL_STAGES if rounds or name in ("prescale_gradients", "gradient_predivide_factor") else (0, 3, "pp2")
            )
            yield from (Case(name, value, place, rtol=LOOSE if rounds else 1e-5) for place in places)
    for name, values in MONITORS.items():
        yield from (Case(name, value, place) for value in values for place in (1, "pp2"))
    for value in ("fp32", "bf16"):
        yield from (Case("communication_data_type", value, place, BF16, LOOSE) for place in (1, 2, 3, "pp2"))
    all_reduce = {"zero_optimization": {"reduce_scatter": False}}
    for name, value in (("prescale_gradients", True), ("gradient_predivide_factor", 2.0)):
        yield from (Case(name, value, place, all_reduce) for place in (1, 2, 3, "pp2"))
    yield from (Case("gradient_predivide_factor", 2.0, place, {"prescale_gradients": True}) for place in (0, 1, "pp2"))


CASES = list(_cases())


@dataclass(frozen=True)
class Verdict:
    """How a run ended: "works", "idle", "refused" or "traceback", what it said, and the rows of metrics.jsonl."""

    kind: str
    text: str
    rows: list[dict[str, Any]] = field(default_factory=list)


def _write(folder: Path, case_data: Mapping[str, Any], place: int | str) -> list[str]:
    """Write a file, and give the command line that trains with it."""
    folder.mkdir()
    path = folder / "config.json"
    path.write_text(json.dumps(case_data).replace("{folder}", str(folder)))
    pp = "2" if place == "pp2" else "1"
    schedule = [] if "scheduler" in case_data else CONSTANT
    words = ["--deepspeed_config", str(path), "--output", str(folder / "out"), "--checkpoint-interval", "0"]
    return [*ARGS, *schedule, *words, "--pp", pp]


def _essence(plan: Run) -> tuple[Any, ...]:
    """All of a plan that a JSON file decides."""
    told = {key: value for key, value in plan.engine.json.dump().items() if value != {}}
    text = json.dumps(told, sort_keys=True, default=str)
    return (
        text,
        plan.batch,
        plan.engine.precision,
        plan.engine.checkpointing,
        (plan.optimizer.cls, plan.optimizer.arguments),
        plan.optimizer.weight_decay,
        plan.optimizer.lr,
        plan.schedule.rate,
    )


def without_ranks(case: Case, folder: Path) -> Verdict | None:
    """The verdict where it can be known without a run: refused, or the same run as without the key; None elsewhere.

    A run that is the same has the key named idle, or at its default.
    """
    from ds_vit.training.resolve.deepspeed import IDLE

    argv = _write(folder / "case", case.data, case.place)
    try:
        plan = resolved(argv, WORLD)
    except ValueError as error:
        # The way out of train.py: a UserError becomes a line for each thing and exit code 2, else there is a traceback.
        head, *lines = str(error).split("\n")
        listed = not lines or head == f"{len(lines)} things are wrong:"
        return Verdict("refused" if isinstance(error, UserError) and listed else "traceback", str(error))
    finally:
        (folder / "case").rename(folder / f"done-{len(list(folder.iterdir()))}")
    reference = folder / f"reference-{zlib.crc32(f'{json.dumps(case.reference)}{case.place}'.encode())}"
    if not reference.exists():
        argv = _write(reference, case.reference, case.place)
        (reference / "essence").write_text(str(_essence(resolved(argv, WORLD))))
    if str(_essence(plan)) != (reference / "essence").read_text():
        return None
    said = [note.removeprefix(IDLE) for note in plan.notes if note.startswith(IDLE)]
    names = [name for note in said for name in note.partition(" (")[0].split(", ")]
    named = any(case.key == name or case.key.startswith(f"{name}.") for name in names)
    return Verdict("idle" if named else "same", "\n".join(said))


def run_on_ranks(ranks: RankPool, files: Sequence[tuple[Mapping[str, Any], int | str]], folder: Path) -> list[Verdict]:
    """Train two steps on two ranks with each of the files, one after the other in one world.

    After a traceback, or a rank that waits for ever, the next file gets new ranks.
    """
    argvs = [_write(folder / f"run-{number}", data, place) for number, (data, place) in enumerate(files)]
    verdicts: list[Verdict] = []
    while len(verdicts) < len(files):
        first = len(verdicts)
        journal = folder / f"journal-{first}"
        failure = ""
        try:
            ranks.run(WORLD, _run_each, argvs[first:], str(journal), timeout=60 + 20 * len(files))
        except RankFailure as error:
            failure = str(error)
        logs = [_read_journal(journal, rank) for rank in range(WORLD)]
        for outcomes in zip_longest(*logs):
            verdicts.append(_verdict([o for o in outcomes if o is not None], argvs[len(verdicts)]))
        if failure and (len(verdicts) == first or verdicts[-1].kind != "traceback"):
            verdicts.append(Verdict("traceback", failure))
    return verdicts


_Outcome = tuple[int | None, bool, str]  # exit code, None after a traceback; whether the ranks met; what was printed


def _verdict(outcomes: list[_Outcome], argv: list[str]) -> Verdict:
    text = "\n".join(said for _, _, said in outcomes)
    codes = {code for code, _, _ in outcomes}
    if len(outcomes) == WORLD and codes == {0}:
        return Verdict("works", text, read_rows(argv[argv.index("--output") + 1]))
    refused = codes == {2} and len(outcomes) == WORLD and not any(met for _, met, _ in outcomes)
    return Verdict("refused" if refused else "traceback", text)


def _read_journal(journal: Path, rank: int) -> list[_Outcome]:
    path = Path(f"{journal}-{rank}")
    return [pickle.loads(bytes.fromhex(line)) for line in path.read_text().splitlines()] if path.exists() else []


# What follows runs in the ranks.


def _run_each(argvs: list[list[str]], journal: str) -> None:
    """Run the command lines in turn, and write how each one ended; an end that is no orderly one is the last."""
    import os

    from deepspeed.utils import groups

    gc.collect()
    gc.freeze()  # what was imported need not be searched after each run
    before = {name: value for name, value in vars(groups).items() if not callable(value) and not name.startswith("__")}
    with open(f"{journal}-{os.environ['RANK']}", "a") as log:
        for argv in argvs:
            outcome = run_on_a_rank(argv)
            log.write(pickle.dumps(outcome).hex() + "\n")
            log.flush()
            assert outcome[0] in (0, 2), outcome[2]
            _forget(before)


def run_on_a_rank(argv: list[str]) -> _Outcome:
    """One run, with what it prints."""
    import traceback

    from ds_vit import train
    from ds_vit.engine import start

    met = []
    meet = start.init_distributed
    out = io.StringIO()
    code = None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        start.init_distributed = lambda arguments: met.append(True) or meet(arguments)
        try:
            code = train.main(argv)
        except Exception:
            traceback.print_exc()
        finally:
            start.init_distributed = meet
    return code, bool(met), out.getvalue()


def _forget(groups_before: Mapping[str, Any]) -> None:
    """Have DeepSpeed's modules forget the run, as a new process would."""
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.runtime.zero.partition_parameters import Init
    from deepspeed.utils import groups

    Init.param_id = 0
    DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__[0][0] = 0
    vars(groups).update(groups_before)
    gc.enable()
    gc.collect()
