"""Measure published steps towards a fast ViT, added one after the other, as `ds-vit bench step` measures.

    python docs/benchmarks/ladder.py --deepspeed_config ds_configs/cpu_zero0_fp32.json

The rungs are those of Meta AI's account of faster ViT training (PyCls, 2022: automatic mixed precision, sharding, an
average-pooled classifier, a larger batch, full 16-bit), and compiled blocks. Its multi-tensor optimizer is no rung: it
is always on here. Its 256 pixels are `--img-size 256` from the first rung on.

`--recipe scaling` has those of "Scaling Vision Model Training Platforms with PyTorch" (Aggarwal et al. 2022). With
`--memory`, the largest model of each rung is planned. `--recipe bridgetower` has those of Hugging Face's account of
BridgeTower on Gaudi2 (2023), whose steps read the run's own images and captions. Other flags are those of training.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import json
import math
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from deepspeed.accelerator import get_accelerator

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ds_vit.config.parser import parse
from ds_vit.config.units import in_words, parse_bytes
from ds_vit.engine.base import Engine
from ds_vit.engine.start import quiet_deepspeed
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.launching.process import Process, discover
from ds_vit.models.zoo import num_parameters
from ds_vit.monitoring.metrics import Throughput, make_console, print_columns
from ds_vit.tasks.metrics import Batch
from ds_vit.tools.bench import Bench, make_ours, measure_sides, resolve_engine, table, title
from ds_vit.training.cost import Cost
from ds_vit.training.inputs import InputPipeline
from ds_vit.training.resolve import resolve
from ds_vit.training.run import Run, World


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
"""By `--recipe`."""
FED = "bridgetower"
"""The ladder that reads data."""


class FedStep:
    """A step of ours on batches of the run's loader, which reads only while it is `running`.

    Args:
        run: whose engine is closed with the stack (a collective).
        device: of this rank.
        stack: see above.
    """

    def __init__(self, run: Run, device: torch.device, stack: contextlib.ExitStack) -> None:
        self._batches: Iterator[Batch] = iter(())

        def feed(engine: Engine) -> Iterator[Batch]:
            self._inputs = InputPipeline(run, engine, Throughput())
            return iter(lambda: next(self._batches), None)

        self._step = make_ours(run, device, stack, feed)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Start the loader, and take the steps on what its processes read while nothing was measured."""
        with contextlib.closing(self._inputs.training()) as self._batches:
            for _ in range(2 * self._inputs.data.workers.number + 1):
                self()
            yield

    def __call__(self) -> None:
        """One step."""
        self._step()


def climb(words: Sequence[str], rungs: dict[str, list[str]], recipe: str, turns: int, steps: int) -> Bench:
    """Time and count the steps of all rungs, which take turns (a collective).

    Args:
        words: flags of a training run for all rungs.
        rungs: each one's flags by its name.
        recipe: of `LADDERS`.
        turns: how often each rung is measured.
        steps: steps per turn.
    """
    process, make = discover(), make_ours
    if recipe == FED:
        quiet_deepspeed(False)
        world, make = World(process, get_accelerator().device_name() == "cpu"), FedStep
        runs = {name: resolve(parse(["--max-steps", "10000", *own]), world) for name, own in rungs.items()}
    else:
        runs = {name: resolve_engine(own, process) for name, own in rungs.items()}
    names = list(runs)
    compared = {name: {"the one before": before, "the first": names[0]} for before, name in itertools.pairwise(names)}
    return measure_sides(words, runs, (), compared, process, turns, steps, make)


def flags_of_rungs(
    words: Sequence[str], deepspeed_config: str, batch_size: int, recipe: str, world_size: int
) -> dict[str, list[str]]:
    """Each rung's flags of training by its name, for so many ranks; its largest batch included."""
    found, added = {}, [*words, "--deepspeed_config", deepspeed_config]
    if recipe == FED:
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

    at = words.index("--model-kwargs") if "--model-kwargs" in words else len(words)

    def cost(depth: int) -> Cost:
        return Cost(resolve_engine([*words[:at], "--model-kwargs", f"depth={depth}", *words[at + 1 :]], process))

    @functools.cache
    def needs(depth: int) -> int:
        planned = cost(depth)
        return planned.fullest(planned.run.batch).together

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
    return depth, num_parameters(cost(depth).run.model.whole)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deepspeed_config", required=True, metavar="FILE")
    parser.add_argument("--recipe", default="", choices=LADDERS, help="the rungs of that publication")
    parser.add_argument("--memory", default="", metavar="BYTES", help="of a rank, to plan the deepest model that fits")
    parser.add_argument("--model", default="vit_tiny_patch16_224", help="timm name [%(default)s]")
    parser.add_argument("-b", "--batch-size", type=int, default=16, help="images of a rank's micro-batch [%(default)s]")
    parser.add_argument("--turns", type=int, default=12, help="turns of each rung; the fastest counts [%(default)s]")
    parser.add_argument("--steps", type=int, default=3, help="steps per turn [%(default)s]")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    arguments, further = parser.parse_known_args()
    words, recipe, process = ["--model", arguments.model, *further], arguments.recipe, discover()
    if "--model-kwargs" in words and any("--model-kwargs" in rung.words for rung in LADDERS[recipe]):
        raise SystemExit("the ladder sets --model-kwargs on its way; choose another --model instead")
    rungs = flags_of_rungs(words, arguments.deepspeed_config, arguments.batch_size, recipe, process.world_size)
    result = climb(words, rungs, recipe, arguments.turns, arguments.steps)
    if process.rank:
        return
    published = {rung.name: rung.published for rung in LADDERS[recipe] if rung.published and rung.name in rungs}
    largest = {}
    if arguments.memory:
        memory = parse_bytes(arguments.memory, "--memory")
        largest = {name: largest_model(own, process, memory)[1] for name, own in rungs.items()}
    if arguments.json:
        print(json.dumps({**asdict(result), "published": published, "largest": largest}))
        return
    for rung in LADDERS[recipe]:
        if rung.name not in rungs:
            print(f"{rung.name} is left out: one rank exchanges nothing; start several")
    header, *lines = table(result)
    planned = {name: f"{parameters / 1e6:,.1f} M" for name, parameters in largest.items()}
    rows = [(*line, published.get(name, ""), planned.get(name, "")) for name, line in zip(rungs, lines, strict=True)]
    print_columns(make_console(), title(result), [(*header, "published", "largest model, planned"), *rows])


if __name__ == "__main__":
    main()
