"""The memory of a rank: what is free, what a run says that needs more, and `--auto-batch`, which takes what fits.

It takes the largest micro-batch that fits on every rank; accumulation keeps the global batch.

A micro-batch is legal where micro-batch x accumulation x data-parallel ranks is the global batch. In a pipeline
accumulation is also the number m of micro-batches that go through its p stages, and (p - 1) / (m + p - 1) of a step is
bubble. A larger micro-batch makes that worse, so that only those are tried that leave at least as many of them as there
are stages; where the batch is too small for it, one image at a time.

How the setting travels: `config/rules.py` rejects -b and --grad-accum-steps with it, `resolve/data.py` a fixed micro-
batch in the JSON. The run is then resolved with the micro-batch that it would have without the flag, and changed here:
before the ranks meet where all of them get the same result (--memory on a CPU), or for --dry-run; else when they have
met, because free memory differs from rank to rank. They take what fits on the fullest one. `config.yaml` keeps the
flag, so that a run that resumes elsewhere searches again, with the same global batch.
"""

from __future__ import annotations

import contextlib
import gc
import re
import resource
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

from ds_vit.config.batch import BatchSizes, ways_to_share
from ds_vit.config.deepspeed_json import BATCH_KEYS
from ds_vit.config.units import in_words, parse_bytes
from ds_vit.device import free_bytes
from ds_vit.engine.start import device_of
from ds_vit.fault_tolerance.errors import UserError, first_line, is_out_of_memory, memory_errors
from ds_vit.launching.process import Process
from ds_vit.models.keyed_init import initialise
from ds_vit.models.layers import BlockLayer, Layer
from ds_vit.models.sequential import run_layers
from ds_vit.parallel.groups import gather_objects
from ds_vit.parallel.tensor.collectives import TensorParallel
from ds_vit.planner.counting import cost_key, kept_by_layers
from ds_vit.planner.memory import on_device
from ds_vit.tasks.task import ChainTask
from ds_vit.training.cost import Cost
from ds_vit.training.resolve.deepspeed import sum_micro_batches
from ds_vit.training.run import Run

# An estimate lacks some temporary memory. On a CPU, ViT-S in fp32 grew by 15 to 21 % more than its estimate; there is
# no error to catch: the system kills a process that uses too much.
_ALLOWANCE = 1.25
_ESTIMATED = "estimated, with a quarter more for what is not counted"


@dataclass(frozen=True)
class Memory:
    """The bytes that a rank may use, and where the number comes from."""

    bytes: int
    whose: str


@dataclass(frozen=True)
class Found:
    """The micro-batch that fits on a rank.

    Attributes:
        micro_batch: the largest; 0 where not one image fits.
        needs: bytes of a rank with it, or with one image.
        larger: the next legal one, or None.
        larger_needs: bytes of a rank with that.
        memory: of the rank.
        how: "measured" or estimated, for people.
    """

    micro_batch: int
    needs: int
    larger: int | None
    larger_needs: int
    memory: Memory
    how: str


@dataclass(frozen=True)
class MemoryAdvice:
    """The memory of a rank: what is free for it, and which settings of this run lower its need.

    Attributes:
        run: of this rank.
        free: before the model is built.
    """

    run: Run
    free: Memory

    @property
    def remedies(self) -> str:
        """The flags that lower the memory of this run."""
        run, batch, task = self.run, self.run.batch, self.run.model.task
        stage, dp, pp = run.engine.zero_stage, run.layout.dp, run.layout.pp
        found = []
        if run.optimizer is not None:
            if isinstance(task, ChainTask) and not run.config.auto_batch and len(legal(run)) > 1:
                found.append("--auto-batch in place of -b")
            if smaller := [way for way in ways_to_share(batch.global_batch, dp) if way.micro_batch < batch.micro_batch]:
                way = smaller[-1]
                found.append(f"-b {way.micro_batch} --grad-accum-steps {way.accumulation} (the same global batch)")
            if "grad_checkpointing" not in task.refused_flags:
                if not run.engine.checkpointing.interval:
                    found.append("--grad-checkpointing")
                elif run.engine.checkpointing.selective:
                    found.append("--grad-checkpointing full")
            if dp > 1 and stage < (1 if pp > 1 else 3):
                found.append(f"--set zero_optimization.stage={stage + 1}")
        rows = run.eval_share.micro_batch if run.data.evaluates else 0
        if rows > (batch.micro_batch if run.optimizer is not None else 1):
            found.append(f"--validation-batch-size {rows // 2}")
        return ", ".join(found or ["more ranks or hosts, or a smaller --model"])

    def warning(self, needed: int) -> list[tuple[str, str]]:
        """The row of the start table if a rank needs more bytes than are free."""
        if needed <= self.free.bytes:
            return []
        numbers = f"a rank needs {in_words(needed)}, and {in_words(self.free.bytes)} are {self.free.whose}"
        return [("warning", f"{numbers}: it is likely to run out; try {self.remedies}")]

    def errors(self) -> contextlib.AbstractContextManager[None]:
        """For the block, running out of memory is one line with the numbers and the remedies."""
        return memory_errors(self._advise)

    def _advise(self, of_loader: bool) -> str:
        numbers = f"{in_words(self.free.bytes)} were {self.free.whose} at the start"
        with contextlib.suppress(Exception):  # the run has ended for another reason, which must be seen
            numbers = f"{in_words(Cost(self.run).fullest(self.run.batch).together)} per rank predicted, {numbers}"
        return f"{numbers}; try {'fewer --workers, ' if of_loader else ''}{self.remedies}"


def choose_batch(run: Run, *, on_cpu: bool) -> Run:
    """Choose by estimates, before the ranks meet: for --dry-run, and where every rank gets the same result.

    Args:
        run: with any legal batch.
        on_cpu: there is no accelerator.

    Raises:
        UserError: not one image fits.
    """
    return _choose(run, by_estimate(_with_sums(run), memory_of_rank(run.config.memory, run.process, on_cpu=on_cpu)))


def agree_on_batch(run: Run, *, on_cpu: bool) -> Run:
    """Choose the micro-batch that fits on every rank (a collective); the arguments are those of `choose_batch`.

    Raises:
        UserError: not one image fits on some rank, or the trial of a rank failed; on all ranks alike.
    """
    summed = _with_sums(run)
    found: Found | str
    try:
        room = memory_of_rank(run.config.memory, run.process, on_cpu=on_cpu)
        if on_cpu:
            found = by_estimate(summed, room)
        else:
            found = by_trying(summed, room, TrialStep(summed, device_of(run.process.local_rank)))
    except Exception as error:  # the other ranks wait for an answer
        if not is_out_of_memory(error):
            traceback.print_exc()
        found = f"rank {dist.get_rank()}: {first_line(error)}"
    _give_back()  # what the trial took
    answers: list[Found | str] = gather_objects(found)
    if failures := [answer for answer in answers if isinstance(answer, str)]:
        raise UserError(f"--auto-batch could not try a micro-batch: {failures[0]}; give one by -b")
    of_ranks = [answer for answer in answers if isinstance(answer, Found)]
    return _choose(run, min(of_ranks, key=lambda found: (found.micro_batch, -found.needs)))


def legal(run: Run) -> tuple[BatchSizes, ...]:
    """The batch arithmetics to choose from, by rising micro-batch; see the head of this file."""
    batch, pp = run.batch, run.layout.pp
    if not isinstance(run.model.task, ChainTask):
        return (batch,)  # the loss may couple the samples of a batch
    ways = ways_to_share(batch.global_batch, batch.dp)
    return tuple(way for way in ways if way.accumulation >= pp or way.micro_batch == 1)


def _with_sums(run: Run) -> Run:
    """With the gradients in the type that the most micro-batches would be summed in."""
    return replace(run, engine=sum_micro_batches(run.engine, legal(run)[0]))


def by_estimate(run: Run, memory: Memory) -> Found:
    """The largest micro-batch whose estimate, with a quarter more, is within `memory` in every pipeline stage."""
    cost = Cost(run)
    return by_trying(run, memory, lambda batch: round(_ALLOWANCE * cost.fullest(batch).together), _ESTIMATED)


def by_trying(run: Run, memory: Memory, try_one: Callable[[BatchSizes], int], how: str = "measured") -> Found:
    """The largest micro-batch with which `try_one` runs and stays within `memory`; smaller ones are tried first.

    Args:
        run: of this rank.
        memory: bytes that this rank may take.
        try_one: allocates a step's memory temporarily; returns the bytes of the rank, or raises
            torch.OutOfMemoryError where the device has too little.
        how: `try_one` gets its numbers, for people.
    """
    fits, needs = 0, 0
    for batch in legal(run):
        try:
            taken = try_one(batch)
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            # The device has not said how much more it would have taken: what was measured, and the estimate's step.
            stage, before = Cost(run).stages[run.stage], replace(batch, micro_batch=fits)
            step = stage.on_device(batch).together - (stage.on_device(before).together if fits else 0)
            return Found(fits, needs or step, batch.micro_batch, needs + step, memory, how if fits else _ESTIMATED)
        if taken > memory.bytes:
            return Found(fits, needs or taken, batch.micro_batch, taken, memory, how)
        fits, needs = batch.micro_batch, taken
    return Found(fits, needs, None, 0, memory, how)


def memory_of_rank(memory: str, process: Process, *, on_cpu: bool) -> Memory:
    """The memory that this rank may take: --memory, else what is free on its device, or its share of this machine's."""
    if memory:
        return Memory(parse_bytes(memory, "--memory"), f"--memory {memory}")
    if not on_cpu:
        # DeepSpeed's own question goes to NVML by the number in CUDA_VISIBLE_DEVICES, which may be a name.
        free = free_bytes(torch.device(get_accelerator().device_name(process.local_rank)))
        return Memory(free, "free on the device")
    ranks = process.local_world_size or process.world_size
    among = f", among {ranks} ranks" if ranks > 1 else ""
    found = Memory(_free_memory() // ranks, f"free on this machine{among}")
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return found
    own = Memory(max(0, limit - psutil.Process().memory_info().vms), "free below the limit of this process (ulimit -v)")
    return min(found, own, key=lambda memory: memory.bytes)


def _free_memory(groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this machine has free, or its control groups (a container, a job) if those are allowed less.

    Args:
        groups: lists them, as `0::/PATH` and, of version 1, `N:memory:/PATH`.
        root: where their files are. In a container the path may be that of the host, and its own group be the root.
    """
    free = psutil.virtual_memory().available
    listed = (line.split(":", 2) for line in (groups.read_text().split() if groups.is_file() else ()))
    own = [root / kind / path.strip("/") for _, kind, path in listed]
    for folder in (folder for one in own for folder in (one, *one.parents)):
        for limit_name, used_name in (("memory.max", "anon"), ("memory.limit_in_bytes", "total_rss")):
            with contextlib.suppress(OSError, ValueError):  # no such group, or one without a limit
                limit = int((folder / limit_name).read_text())
                # Not all of its use: the page cache makes room.
                used = re.search(rf"^{used_name} (\d+)", (folder / "memory.stat").read_text(), re.MULTILINE)
                free = min(free, max(0, limit - int(used[1]))) if used else free
    return free


def _choose(run: Run, found: Found) -> Run:
    """The run with the batch that fits, and a line that says why.

    Raises:
        UserError: not one image fits.
    """
    there = f"{in_words(found.memory.bytes)} per rank ({found.memory.whose})"
    ways = legal(run)
    if not found.micro_batch:
        cost = Cost(_with_sums(run))
        states = max(on_device(stage.states(), cost.rules).states for stage in cost.stages)
        raise UserError(
            f"--auto-batch: not even a micro-batch of {ways[0].micro_batch} fits: it needs {in_words(found.needs)} "
            f"({found.how}), {in_words(states)} of it for weights, gradients and the optimizer, and there are {there}; "
            "use a higher ZeRO stage, --grad-checkpointing, offload, more --pp or --tp, or a smaller --model"
            + (", or give more by --memory" if run.config.memory else "")
        )
    batch = next(way for way in ways if way.micro_batch == found.micro_batch)
    if found.larger is not None:
        then = f"a micro-batch of {found.larger} would need {in_words(found.larger_needs)}"
    elif batch.accumulation == 1:
        then = "it is a rank's whole share of the batch"
    else:
        then = f"a larger one would leave fewer micro-batches than the {run.layout.pp} pipeline stages"
    note = f"--auto-batch: {batch}; {in_words(found.needs)} ({found.how}) of {there}; {then}"
    return _with_batch(run, batch, note)


def _with_batch(run: Run, batch: BatchSizes, note: str) -> Run:
    """The same run in other micro-batches of the same global batch; lines for people name the new ones."""
    assert batch.global_batch == run.batch.global_batch, f"{batch} is not {run.batch}"
    lines = tuple(line.replace(str(run.batch), str(batch)) for line in run.engine.notes)
    engine = sum_micro_batches(replace(run.engine, notes=lines), batch)
    origins = {**engine.origins, **dict.fromkeys(BATCH_KEYS[1:], "--auto-batch")}
    engine = replace(engine, json=engine.json.replace(batch.as_json()), origins=origins)
    data = replace(run.data, notes=(*run.data.notes, note))
    return replace(run, batch=batch, data=data, engine=engine)


# ---- a trial on a device ---------------------------------------------------------------------------------------------

_STAYS_FREE = 0.05  # of the device


class TrialStep:
    """A training step's memory, allocated temporarily without the other ranks.

    A rank that runs out of memory inside a collective would leave the others waiting in it, so this is no step of
    DeepSpeed's. The layers of this rank's stage run for real, in the run's types, forward for as many micro-batches as
    its place in the pipeline has under way, and backward; of blocks that are alike one is built and counts for all.
    Weights, gradients, masters, the optimizer's state and ZeRO's bucket are held as one piece of the size that the
    estimate says, which is exact for them, and a twentieth of the device stays free for collectives, the allocator's
    gaps and other temporary memory of a step.

    Args:
        run: of this rank.
        device: of the training.
    """

    def __init__(self, run: Run, device: torch.device) -> None:
        self.run, self.device = run, device
        cost, task = Cost(run), run.model.task
        self.cost = cost
        self.stage = cost.stages[run.stage]
        start, stop = run.model.bounds[run.stage : run.stage + 2]
        self.inputs = kept_by_layers(cost.layers)[start].inputs
        self.layers = self._build(cost.layers[start:stop], start)
        assert isinstance(task, ChainTask), "resolve_model rejects --auto-batch for other tasks"
        tp = TensorParallel.planned(run.config)
        self.loss = task.loss(tp if run.model.class_parallel else None)
        built = nn.ModuleList(dict.fromkeys(self.layers))
        here = 0 if run.engine.zero_stage == 3 else sum(p.numel() * p.element_size() for p in built.parameters())
        states = on_device(self.stage.states(), cost.rules).states + self._bytes_of_zero()
        self.margin = round(_STAYS_FREE * get_accelerator().total_memory(device.index))
        self.held_bytes = max(0, states - here)

    def _bytes_of_zero(self) -> int:
        """Bytes that ZeRO holds in addition to the states while activations are at their peak."""
        states = self.stage.states(accumulated=True)  # of which there is the more to hold
        rules = self.stage.rules
        # At stage 2 with offload the partition that a second micro-batch is reduced into, next to the sum so far.
        return states.buckets + states.gathered + (states.gradients if rules.stage == 2 and not rules.flat else 0)

    def _build(self, on_meta: list[Layer], start: int) -> list[Layer]:
        """The stage's layers on the device; those of blocks that are alike are one and the same."""
        model = self.run.model
        fresh = model.task.layers(model.whole)[start : start + len(on_meta)]
        first: dict[str, Layer] = {}
        layers = []
        for number, (layer, shape) in enumerate(zip(fresh, on_meta, strict=True)):
            name = str(cost_key(shape.block)) if isinstance(shape, BlockLayer) else str(number)
            layers.append(first.setdefault(name, layer))

        def on_layer(layer: Layer) -> None:
            self.cost.of_rank([layer])
            layer.train()

        initialise(model.whole, [*first.values()], seed=self.run.config.seed, device=self.device, on_layer=on_layer)
        return layers

    def __call__(self, batch: BatchSizes) -> int:
        """Take the memory of a micro-batch.

        Returns:
            The bytes that this rank had at most, without what stays free.

        Raises:
            torch.OutOfMemoryError: the device has too few.
        """
        _give_back()  # what an earlier try left behind
        accelerator = get_accelerator()
        accelerator.reset_peak_memory_stats()
        held = torch.empty(self.held_bytes + self.margin, dtype=torch.uint8, device=self.device)
        under_way = [self._forward(batch.micro_batch) for _ in range(min(self.stage.ahead, batch.accumulation))]
        while under_way:
            outputs = under_way.pop(0)
            torch.autograd.backward(outputs, [torch.ones_like(tensor) for tensor in outputs])
        accelerator.synchronize()
        taken = accelerator.max_memory_allocated() - self.margin
        del held
        for layer in self.layers:
            layer.zero_grad()
        return max(0, taken)

    def _forward(self, rows: int) -> list[torch.Tensor]:
        """The start of a micro-batch's backward pass: the loss, or outputs that the next stage sends gradients of."""
        settings = self.run.engine
        inputs = tuple(self._like(tensor, rows if place < 2 else None) for place, tensor in enumerate(self.inputs))
        of_operands = torch.float16 if settings.precision.name.endswith("fp16") else torch.bfloat16
        with torch.autocast(self.device.type, dtype=of_operands, enabled=settings.autocast):
            outputs = run_layers(self.layers, inputs, settings.checkpointing.interval, settings.recompute)
            if not isinstance(outputs, tuple):
                outputs = (self.loss(outputs, self._targets(rows, inputs[1])),)
        return [tensor for tensor in outputs if tensor.requires_grad]

    def _like(self, tensor: torch.Tensor, rows: int | None) -> torch.Tensor:
        """Zeros of a micro-batch in place of a tensor on the meta device; None: as many rows as it has."""
        shape = tensor.shape if rows is None else (rows, *tensor.shape[1:])
        made = torch.zeros(shape, dtype=tensor.dtype, device=self.device)
        return made.requires_grad_(self.run.stage > 0 and made.is_floating_point())

    def _targets(self, rows: int, keys: torch.Tensor) -> dict[str, Any]:
        """The inputs of the loss other than the outputs."""
        fields = [field for field in self.run.model.task.training_fields if field.stage == "last"]
        made = {
            field.name: torch.zeros(rows, *field.shape, dtype=field.dtype or self.run.engine.dtype, device=self.device)
            for field in fields
        }
        return {**made, "keys": keys}


def _give_back() -> None:
    """Let go of what nothing refers to."""
    gc.collect()
    get_accelerator().empty_cache()
