"""`ds-vit bench ladder`: published steps towards a fast ViT, added one after the other and measured as by bench.py.

ds-vit bench ladder --deepspeed_config ds_configs/cpu_zero0_fp32.json

The rungs are those of Meta AI's account of faster ViT training (PyCls, 2022: automatic mixed precision,
sharding, an average-pooled classifier, a larger batch, full 16-bit), and compiled blocks. Its multi-tensor optimizer is
no rung: ours always are. Its 256 pixels are `--img-size 256` from the first rung on. `--recipe bridgetower` has those
of Hugging Face's account of BridgeTower on Gaudi2 (2023), whose steps read the run's own images and captions.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from ds_vit.fault_tolerance.errors import UserError
from ds_vit.launching.process import discover
from ds_vit.tools.bench import Bench, measure_sides, resolve_all


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


RUNGS = (
    Rung("fp32, ZeRO-0", ("--set", "zero_optimization.stage=0")),
    Rung("AMP O1: bf16 by autocast", ("--set", "torch_autocast.enabled=true", "torch_autocast.dtype=bfloat16")),
    Rung("ZeRO-1", ("--set", "zero_optimization.stage=1")),
    Rung("AMP O2: bf16 weights, fp32 masters", ("--set", "torch_autocast.enabled=false", "bf16.enabled=true")),
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
LADDERS = {"": RUNGS, "bridgetower": BRIDGETOWER_RUNGS}
"""Ladders by `--recipe`; all but the first read data."""


def climb_ladder(
    words: Sequence[str], deepspeed_config: str, batch_size: int, *, recipe: str = "", turns: int = 12, steps: int = 3
) -> Bench:
    """Time and count the steps of all rungs, which take turns (a collective).

    Args:
        words: flags of a training run for all rungs.
        deepspeed_config: the JSON file.
        batch_size: images of a rank's micro-batch on the first rungs.
        recipe: of `LADDERS`.
        turns: how often each rung is measured.
        steps: steps a turn.

    Raises:
        UserError: --model-kwargs, which a rung sets; or what training with these flags would raise.
    """
    if "--model-kwargs" in words and not recipe:
        raise UserError("bench ladder sets --model-kwargs on its way; choose another --model instead")
    process = discover()
    rungs, resolve = LADDERS[recipe], partial(resolve_all, fed=bool(recipe))
    ours, added = {}, [*words, "--deepspeed_config", deepspeed_config]
    if recipe:
        added = ["--task", recipe, "--val-split", "", *added]
    for rung in rungs:
        if rung.between_ranks and process.world_size == 1:
            print(f"bench ladder: {rung.name} is left out: one rank exchanges nothing; start several", file=sys.stderr)
            continue
        added += rung.words
        batch_size *= rung.larger_batch
        ours[rung.name] = resolve([*added, "-b", str(batch_size)], process)
    names = list(ours)
    pairs = itertools.pairwise(names)
    compared = {name: {"the one before": before, "the first": names[0]} for before, name in pairs}
    feeds = {name: parts.inputs for name, parts in ours.items()} if recipe else {}
    engines = {name: parts.engine for name, parts in ours.items()}
    result = measure_sides(words, engines, (), compared, process, turns, steps, feeds)
    return replace(
        result, published={rung.name: rung.published for rung in rungs if rung.published and rung.name in ours}
    )
