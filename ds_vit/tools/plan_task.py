"""`ds-vit plan` for a recipe of clip, siglip, mae, dino or distillation: the layouts of a run with several towers.

ds-vit plan --recipe launch/recipes/clip_vit_b16.yaml --gpus 8 --gpu h100
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from ds_vit.config import from_values
from ds_vit.config.deepspeed_rules import Checkpointing
from ds_vit.config.parser import parse_kwargs
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.launching.process import Process
from ds_vit.parallel.layout import Layout
from ds_vit.planner.counting import LayerWork, count_flops
from ds_vit.planner.memory import LayerMemory, MemoryRules, unaligned_matrices
from ds_vit.planner.search import PlanRequest, Search, json_at_stage
from ds_vit.tasks import find_task
from ds_vit.training.build import resolve_parts
from ds_vit.training.build_engine import EngineConfig
from ds_vit.training.cost import Cost


class TaskSearch(Search):
    """Layouts of a task with more than the chain of one ViT: data-parallel ones, from the run's own model of memory.

    Args:
        request: what to plan.
        config: of the engine of such a run, in any layout of one pipeline stage and one tensor-parallel rank.

    Raises:
        UserError: as `Search`.
    """

    def __init__(self, request: PlanRequest, config: EngineConfig) -> None:
        self.cost = Cost(config)
        if (request.pp or 1) > 1 or (request.tp or 1) > 1:
            raise UserError(f"--recipe: --task {config.model.task.name} is planned with --pp 1 --tp 1 only; drop them")
        super().__init__(request)

    def describe(self) -> None:
        self.model, self.depth, self.degrees = self.cost.config.model.whole, 0, [1]

    def _stages(self, tp: int) -> list[int]:
        return [1]

    def _count(self, tp: int) -> tuple[list[LayerMemory], list[LayerWork]]:
        self._unaligned[tp] = unaligned_matrices(self.cost.layers)
        return self.cost.layer_memory, self.cost.works

    def _rules(self, json: Mapping[str, Any], layout: Layout, checkpointing: Checkpointing) -> MemoryRules:
        return self.cost.rules_of(json, layout, checkpointing)

    def _training_flops(self) -> int:
        return count_flops(self.model, self.cost.config.model.frozen).training


def run_of(arguments: argparse.Namespace, request: PlanRequest) -> EngineConfig:
    """The engine of a run of the recipe on one rank; its data only say how many classes there are."""
    given: dict[str, Any] = {"pp": 1, "tp": 1, "grad_checkpointing": "", "batch_size": 2, "max_steps": 10}
    given |= {"deepspeed_config": json_at_stage(request.json, 1), "dataset": "digits"}
    given |= {name: getattr(arguments, name) for name in ("model", "img_size", "model_ema") if getattr(arguments, name)}
    if isinstance(arguments.model_kwargs, list) and arguments.model_kwargs:
        given["model_kwargs"] = parse_kwargs(arguments.model_kwargs)
    task = find_task(*from_values(given, arguments.recipe))
    given |= {"dataset": "glyphs"} if task.has_text else {}
    given |= {"num_classes": request.spec.num_classes} if task.has_classes else {}
    config, explicit = from_values(given, arguments.recipe)
    one_rank = Process("none", 0, 1, 0, 1)
    return resolve_parts(config, explicit, one_rank, on_cpu=False, with_weights=False).engine
