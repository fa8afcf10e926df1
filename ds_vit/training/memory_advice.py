"""Too little memory: the warning at a run's start, and what a rank says that runs out: the numbers and the remedies."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass

from ds_vit.config.batch import ways_to_share
from ds_vit.config.units import in_words
from ds_vit.fault_tolerance.errors import memory_errors
from ds_vit.tasks.task import ChainTask
from ds_vit.training.auto_batch import Memory, legal
from ds_vit.training.build_engine import EngineConfig
from ds_vit.training.cost import Cost


@dataclass(frozen=True)
class MemoryAdvice:
    """The memory of a rank: what is free for it, and which settings of this run lower its need.

    Attributes:
        config: of the engine.
        free: before the model is built.
        eval_rows: images of an evaluation's batch; 0 where nothing is evaluated.
        auto_batch: the run chooses its micro-batch itself.
    """

    config: EngineConfig
    free: Memory
    eval_rows: int = 0
    auto_batch: bool = False

    @property
    def remedies(self) -> str:
        """The flags that lower the memory of this run."""
        config, batch, task = self.config, self.config.batch, self.config.model.task
        stage, dp, pp = config.zero_stage, config.layout.dp, config.layout.pp
        found = []
        if config.optimizer is not None:
            if isinstance(task, ChainTask) and not self.auto_batch and len(legal(config)) > 1:
                found.append("--auto-batch in place of -b")
            if smaller := [way for way in ways_to_share(batch.global_batch, dp) if way.micro_batch < batch.micro_batch]:
                way = smaller[-1]
                found.append(f"-b {way.micro_batch} --grad-accum-steps {way.accumulation} (the same global batch)")
            if "grad_checkpointing" not in task.refused_flags:
                if not config.checkpointing.interval:
                    found.append("--grad-checkpointing")
                elif config.checkpointing.selective:
                    found.append("--grad-checkpointing full")
            if dp > 1 and stage < (1 if pp > 1 else 3):
                found.append(f"--set zero_optimization.stage={stage + 1}")
        if self.eval_rows > (batch.micro_batch if config.optimizer is not None else 1):
            found.append(f"--validation-batch-size {self.eval_rows // 2}")
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
        with contextlib.suppress(Exception):  # the meta device takes host memory too, and knows not every layer
            numbers = f"{in_words(Cost(self.config).fullest(self.config.batch).together)} per rank predicted, {numbers}"
        return f"{numbers}; try {'fewer --workers, ' if of_loader else ''}{self.remedies}"
