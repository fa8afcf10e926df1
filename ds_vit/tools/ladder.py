"""`ds-vit bench ladder`: published steps towards a fast ViT, added one after the other and measured as by bench.py.

ds-vit bench ladder --deepspeed_config ds_configs/cpu_zero0_fp32.json

The rungs are those of Meta AI's account of faster ViT training (PyCls, 2022: automatic mixed precision, sharding, an
average-pooled classifier, a larger batch, full 16-bit), and compiled blocks. Its multi-tensor optimizer is no rung: it
is always on here. Its 256 pixels are `--img-size 256` from the first rung on.

`--recipe scaling` has those of "Scaling Vision Model Training Platforms with PyTorch" (Aggarwal et al. 2022). With
`--memory`, the largest model of each rung is planned. `--recipe bridgetower` has those of Hugging Face's account of
BridgeTower on Gaudi2 (2023), whose steps read the run's own images and captions.
"""

from __future__ import annotations

import functools
import itertools
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ds_vit.config.units import in_words
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.launching.process import Process, discover
from ds_vit.models.zoo import num_parameters
from ds_vit.tools.bench import Bench, measure_sides, resolve_all
from ds_vit.training.cost import Cost


@dataclass(frozen=True)
class Rung:
    """A step of the ladder.

    Attributes:
        name: what it adds.
        words: flags of training that do it, in addition to those of the rungs before.
        larger_batch: how many times the images of a micro-batch.
        published: its gain over the one before, as published.
        between_ranks: it changes what the ranks exchange, and gains nothing on one rank.
    """

    name: str
    words: tuple[str, ...] = ()
    larger_batch: int = 1
    published: str = ""
    between_ranks: bool = False


_AUTOCAST = ("torch_autocast.enabled=true", "torch_autocast.dtype=bfloat16")
_BF16_WEIGHTS = ("torch_autocast.enabled=false", "bf16.enabled=true")
RUNGS = (
    Rung("fp32, ZeRO-0", ("--set", "zero_optimization.stage=0")),
    Rung("AMP O1: bf16 by autocast", ("--set", *_AUTOCAST)),
    Rung("ZeRO-1", ("--set", "zero_optimization.stage=1")),
    Rung("AMP O2: bf16 weights, fp32 masters", ("--set", *_BF16_WEIGHTS)),
    Rung("ZeRO-3, in FSDP's place", ("--set", "zero_optimization.stage=3"), between_ranks=True),
    Rung("average-pooled classifier", ("--model-kwargs", "class_token=false", "global_pool=avg")),
    Rung("twice the batch", larger_batch=2, published="1.51 in all at 224 px, 1.86 at 256 px"),
    Rung(
        "full 16-bit: masters and states in bf16",
        ("--set", "bf16.bf16_master_weights_and_grads=true", "bf16.bf16_optimizer_states=true"),
        published="2.18 in all at 256 px",
    ),
    Rung("compiled blocks", ("--compile",)),
)

# DeepSpeed has 16-bit weights from ZeRO-1 on. FSDP around the whole model gathers all weights, as ZeRO-2 keeps them.
SCALING_RUNGS = (
    Rung("DDP, AMP O1", ("--set", "zero_optimization.stage=0", *_AUTOCAST)),
    Rung("AMP O2 in bf16, LayerNorm in fp32 (ZeRO-1)", ("--set", "zero_optimization.stage=1", *_BF16_WEIGHTS)),
    Rung(
        "FSDP around the model (ZeRO-2)",
        ("--set", "zero_optimization.stage=2"),
        published="largest model 1.5 B to 4.5 B, over DDP",
        between_ranks=True,
    ),
    Rung("activation-checkpoint", ("--grad-checkpointing",)),
    Rung(
        "FSDP around each block (ZeRO-3)",
        ("--set", "zero_optimization.stage=3"),
        published="2.2 in all (ViT-H, 8 A100-40GB)",
        between_ranks=True,
    ),
)

# The last two are published in the other order.
BRIDGETOWER_RUNGS = (
    Rung("no loader process", ("--set", "zero_optimization.stage=0", "--workers", "0"), published="1"),
    Rung("a loader process", ("--workers", "1"), published="1.20 (Gaudi2), 1.41 (A100)"),
    Rung("decode, augment on the device", ("--augment-on", "device", "--decode", "fast"), published="1.14"),
    Rung(
        "unbucketed reduction",
        ("--set", "zero_optimization.reduce_bucket_size=1"),
        published="1.10; 1.51 in all",
        between_ranks=True,
    ),
)
LADDERS = {"": RUNGS, "scaling": SCALING_RUNGS, "bridgetower": BRIDGETOWER_RUNGS}
"""Ladders by `--recipe`."""
_FED = "bridgetower"
"""The ladder that reads data."""


def climb_ladder(
    words: Sequence[str],
    deepspeed_config: str,
    batch_size: int,
    *,
    recipe: str = "",
    memory: int = 0,
    turns: int = 12,
    steps: int = 3,
) -> Bench:
    """Time and count the steps of all rungs, which take turns (a collective).

    Args:
        words: flags of a training run for all rungs.
        deepspeed_config: the JSON file.
        batch_size: images of a rank's micro-batch on the first rungs.
        recipe: of `LADDERS`.
        memory: bytes of a rank, for which each rung's largest model is planned; 0 for none.
        turns: how often each rung is measured.
        steps: steps per turn.

    Raises:
        UserError: --model-kwargs, which a rung sets; or what training with these flags would raise.
    """
    process, rungs, fed = discover(), LADDERS[recipe], recipe == _FED
    if "--model-kwargs" in words and any("--model-kwargs" in rung.words for rung in rungs):
        raise UserError("bench ladder sets --model-kwargs on its way; choose another --model instead")
    flags = flags_of_rungs(words, deepspeed_config, batch_size, recipe, process.world_size)
    for left_out in [rung.name for rung in rungs if rung.name not in flags]:
        print(f"bench ladder: {left_out} is left out: one rank exchanges nothing; start several", file=sys.stderr)
    ours = {name: resolve_all(own, process, fed=fed) for name, own in flags.items()}
    names = list(ours)
    pairs = itertools.pairwise(names)
    compared = {name: {"the one before": before, "the first": names[0]} for before, name in pairs}
    feeds = {name: parts.inputs for name, parts in ours.items()} if fed else {}
    engines = {name: parts.engine for name, parts in ours.items()}
    planned = flags if memory and process.rank == 0 else {}
    return replace(
        measure_sides(words, engines, (), compared, process, turns, steps, feeds),
        published={rung.name: rung.published for rung in rungs if rung.published and rung.name in ours},
        largest={name: largest_model(own, process, memory)[1] for name, own in planned.items()},
    )


def flags_of_rungs(
    words: Sequence[str], deepspeed_config: str, batch_size: int, recipe: str, world_size: int
) -> dict[str, list[str]]:
    """Each rung's flags of training by its name, for so many ranks; see `climb_ladder`."""
    found, added = {}, [*words, "--deepspeed_config", deepspeed_config]
    if recipe == _FED:
        added = ["--task", recipe, "--val-split", "", *added]
    for rung in LADDERS[recipe]:
        if world_size > 1 or not rung.between_ranks:
            added += rung.words
            batch_size *= rung.larger_batch
            found[rung.name] = [*added, "-b", str(batch_size)]
    return found


def largest_model(words: Sequence[str], process: Process, memory: int) -> tuple[int, int]:
    """Blocks and parameters of the deepest model that is planned to fit.

    Args:
        words: flags of a training run, with the model that gets more or fewer blocks.
        process: of a rank; none is started.
        memory: bytes of a rank, without what the planner leaves out (planner/memory.py).

    Raises:
        UserError: not even one block fits.
    """

    def cost(depth: int) -> Cost:
        return Cost(resolve_all(words, process, depth=depth).engine)

    @functools.cache
    def needs(depth: int) -> int:
        planned = cost(depth)
        return planned.fullest(planned.config.batch).together

    before, depth = 4, 8
    for _ in range(3):  # nearly linear in the blocks
        a_block = (needs(depth) - needs(before)) / (depth - before)
        before, depth = depth, max(1, depth + math.floor((memory - needs(depth)) / a_block))
        if before == depth:
            break
    while needs(depth) > memory:
        depth -= 1
        if not depth:
            raise UserError(f"--memory {in_words(memory)}: not even one block fits with {shlex.join(words)}")
    while needs(depth + 1) <= memory:
        depth += 1
    return depth, num_parameters(cost(depth).config.model.whole)
