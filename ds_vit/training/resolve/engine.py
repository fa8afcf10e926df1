"""Resolves the degrees of parallelism, and checks --compile and --cuda-graph."""

from __future__ import annotations

import shutil
import sysconfig
from pathlib import Path

from ds_vit.config.schema import RunConfig
from ds_vit.device import has_graphs
from ds_vit.engine.settings import EngineSettings
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.launching.process import Process
from ds_vit.parallel.layout import Layout, check_tp_inside_hosts
from ds_vit.tasks.task import Task
from ds_vit.training.resolve.deepspeed import PRECISIONS
from ds_vit.training.run import World

RECORDED_GRAPHS: frozenset[tuple[str, int, str, bool, bool]] = frozenset()
"""(task, ZeRO stage, precision, whether dp > 1, whether --compile) for which recorded runs on a GPU have shown that
replayed steps are right and faster: where --cuda-graph auto is on. docs/performance.md has those that are faster; no
recorded run has shown that one is right."""


def resolve_layout(config: RunConfig, process: Process, engine: EngineSettings) -> Layout:
    """The degrees of parallelism.

    Raises:
        UserError: degrees that do not fit the ranks or the hosts, or that DeepSpeed does not support with this JSON.
    """
    layout = Layout.of_world(process.world_size, config.pp, config.tp)
    check_tp_inside_hosts(layout, process, config.tp_across_hosts)
    scales = engine.precision.name == "autocast-fp16" and not config.eval_only
    if scales and engine.zero_stage == 0 and config.pp * config.tp > 1:
        raise UserError(
            f"{engine.path}: torch_autocast in float16 at ZeRO stage 0 keeps a separate loss scale on every rank, "
            f'which does not work with --pp {config.pp} --tp {config.tp}; use stage 1, or "dtype": "bfloat16"'
        )
    flag = f"--check-replicas {config.check_replicas}"
    if config.check_replicas and layout.dp * layout.tp == 1:
        raise UserError(f"{flag} has no effect with {layout}: no two ranks hold the same weights; drop it")
    if config.check_replicas and engine.zero_stage == 3:
        raise UserError(f"{flag} has no effect at ZeRO stage 3, where every weight exists once; use stage 0 to 2")
    return layout


def check_compilation(config: RunConfig, *, on_cpu: bool) -> tuple[str, ...]:
    """Check --compile; returns lines to print about it.

    Raises:
        UserError: no compiler, or a mode that is invalid or has no effect.
    """
    if not config.compile:
        return ()
    mode = config.compile_mode
    if on_cpu and mode == "reduce-overhead":
        raise UserError("--compile-mode reduce-overhead has no effect: a CPU has no CUDA graphs; drop it")
    if not on_cpu and mode in ("reduce-overhead", "max-autotune"):
        raise UserError(
            f"--compile-mode {mode} replays CUDA graphs, which overwrite their last outputs, and here one graph serves "
            "many blocks and micro-batches; use max-autotune-no-cudagraphs or default"
        )
    if missing := _missing_for_compiling(on_cpu=on_cpu):
        raise UserError(f"--compile: {missing}; install it or drop --compile")
    return ("--compile: the first step and the first evaluation compile the blocks, which may take minutes",)


def describe_machine(world: World, engine: EngineSettings) -> tuple[str, ...]:
    """A line for people if a run uses less of the machine than its command suggests."""
    if (world.num_gpus or 0) > 1 and world.process.launcher == "none":
        number = world.num_gpus
        return (f"one of {number} GPUs is used; `ds-vit launch train …` with the same flags trains on all {number}",)
    asks_for_gpu = any(map(engine.json.is_on, PRECISIONS))  # by name or "auto"; a CPU is slow in 16 bits, or takes fp32
    if world.num_gpus == 0 and asks_for_gpu and not world.cpu_is_meant:
        return (
            f"warning: no usable GPU: this run trains on the CPU, in {engine.precision.name}, although "
            f"{engine.path} is made for GPUs; if that is intended, set DS_ACCELERATOR=cpu",
        )
    return ()


def replays_steps(config: RunConfig, engine: EngineSettings, layout: Layout, task: Task, *, on_cpu: bool) -> bool:
    """Whether the passes of a micro-batch are captured and replayed as CUDA graphs.

    Raises:
        UserError: --cuda-graph on where they cannot be replayed.
    """
    # As the task or its class states it: a class derived from another may do more.
    reason = (vars(type(task)) | vars(task)).get("not_replayed", Task.not_replayed)
    obstacles = (
        (on_cpu, "a CPU has no CUDA graphs"),
        (not on_cpu and not has_graphs(), "this accelerator has no CUDA graphs"),
        (engine.zero_stage == 3, "ZeRO stage 3 gathers weights by hooks, which a replay does not run"),
        (layout.pp > 1, f"--pp {layout.pp} exchanges activations between replays"),
        (not engine.json.flat_gradients, "the JSON offloads the optimizer to the host"),
        (engine.checkpointing.cpu, "the JSON keeps activations in the host's memory"),
        (engine.json.flops_profiler.enabled, "the JSON's flops_profiler counts by hooks"),
        (engine.json.wall_clock_breakdown, "the JSON's wall_clock_breakdown times by hooks"),
        (engine.json.steps_per_print is not None, "the JSON's steps_per_print waits for the device"),
        (bool(reason), f"--task {task.name} is not replayed: {reason}"),
    )
    found = next((words for is_so, words in obstacles if is_so), "")
    if config.cuda_graph == "on" and found:
        raise UserError(f"--cuda-graph on: {found}; drop it")
    row = (task.name, engine.zero_stage, engine.precision.name, layout.dp > 1, config.compile)
    recorded = row in RECORDED_GRAPHS and not task.fixed_towers  # a distilled step has its student's name
    return not found and (config.cuda_graph == "on" or (config.cuda_graph == "auto" and recorded))


def _missing_for_compiling(*, on_cpu: bool) -> str:
    """The first part of a compiler that this machine lacks; "" where it has all."""
    if on_cpu:
        from torch._inductor import cpp_builder, exc

        try:
            cpp_builder.get_cpp_compiler()
        except exc.InvalidCxxCompiler:
            return "there is no C++ compiler (g++ or clang++) on this machine's PATH"
    else:
        from torch.utils._triton import has_triton

        if not has_triton():
            return "Triton cannot be imported, or does not support this GPU"
        if not any(map(shutil.which, ("cc", "gcc", "clang"))):
            return "there is no C compiler on this machine's PATH"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return "" if header.is_file() else f"there is no {header}"
