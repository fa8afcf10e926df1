"""How a run is cut over ranks, and where this rank stands."""

from __future__ import annotations

from dataclasses import dataclass

from ds_vit.config import RunConfig, deepspeed_json
from ds_vit.config.deepspeed_rules import check_secondary_partition
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.launching.process import Process
from ds_vit.parallel.layout import Layout
from ds_vit.parallel.placement import check_tp_inside_hosts
from ds_vit.training.plan.deepspeed import DeepSpeedPlan


@dataclass(frozen=True)
class ParallelPlan:
    """The degrees, and this rank's place in them.

    Attributes:
        process: this rank.
        layout: pipeline x data x tensor.
    """

    process: Process
    layout: Layout

    @property
    def stage(self) -> int:
        """Which pipeline stage this rank is in."""
        return self.layout.stage(self.process.rank)

    @property
    def has_images(self) -> bool:
        """Whether this rank's stage takes images: the first one."""
        return self.stage == 0

    @property
    def has_targets(self) -> bool:
        """Whether this rank's stage takes targets: the last one."""
        return self.stage == self.layout.pp - 1


def resolve_parallel(config: RunConfig, process: Process, told: DeepSpeedPlan) -> ParallelPlan:
    """The degrees, and what of the JSON goes with them.

    Raises:
        UserError: degrees that do not fit the ranks or the hosts, or that DeepSpeed cannot have with this JSON.
    """
    layout = Layout.of_world(process.world_size, config.pp, config.tp)
    check_tp_inside_hosts(layout, process, config.tp_across_hosts)
    deepspeed_json.check_pipeline(told.json, told.path, config.pp)
    check_secondary_partition(told.json, told.path, dp=layout.dp, tp=config.tp)
    if told.precision.name == "autocast-fp16" and not config.eval_only:
        _check_one_loss_scale(config, told)
    if config.check_replicas:
        _check_has_replicas(config, layout, told.zero_stage)
    return ParallelPlan(process, layout)


def _check_one_loss_scale(config: RunConfig, told: DeepSpeedPlan) -> None:
    """Refuse float16 autocast without ZeRO where ranks share a model: DeepSpeed gives each a loss scale of its own."""
    if told.zero_stage == 0 and config.pp * config.tp > 1:
        raise UserError(
            f"{told.path}: torch_autocast in float16 at ZeRO stage 0 keeps a loss scale of its own on every rank, "
            f'which --pp {config.pp} --tp {config.tp} cannot have; use stage 1, or "dtype": "bfloat16"'
        )


def _check_has_replicas(config: RunConfig, layout: Layout, stage: int) -> None:
    """Refuse --check-replicas where there is nothing to compare."""
    flag = f"--check-replicas {config.check_replicas}"
    if layout.dp * layout.tp == 1:
        raise UserError(f"{flag} has no effect with {layout}: no two ranks hold the same weights; drop it")
    if stage == 3:
        raise UserError(f"{flag} has no effect at ZeRO stage 3, where every weight exists once; use stage 0 to 2")
