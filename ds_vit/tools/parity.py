"""Check that the layout does not change training: a few steps in each layout, compared with one reference.

python launch/parity.py -n 4 --deepspeed_config FILE [flags of train.py] [--layouts "pp2 tp2, tp2 --sequence-parallel"]
python launch/parity.py -n 16 --launcher 'deepspeed --hostfile hosts' --deepspeed_config FILE …

Each layout is a run of launch/train.py under torchrun, or under the launcher that is given. It uses all ranks (dp
follows from pp and tp), the reference's global batch (accumulation follows from dp) and the same initial values. Its
metrics.jsonl and final weights are compared with the reference's. The result is a table, a row a layout.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from ds_vit.config import parser as flags
from ds_vit.config.deepspeed_json import BATCH_KEYS, load_json, overlay
from ds_vit.config.flag import spelling
from ds_vit.config.parser import at_least
from ds_vit.config.run_folder import RunFolder
from ds_vit.config.schema import LAYOUT_FLAGS
from ds_vit.config.units import parse_set
from ds_vit.engine.start import quiet_deepspeed
from ds_vit.fault_tolerance import exit_codes
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.launching.launchers import RANK_PY
from ds_vit.launching.process import Process
from ds_vit.monitoring.metrics import make_console, print_columns, say
from ds_vit.monitoring.progress import Line
from ds_vit.training.program import guarded

if TYPE_CHECKING:
    import torch

    from ds_vit.training.run import Run

TRAIN = RANK_PY.with_name("train.py")

# The largest relative deviations of (loss, gradient norm, weights) that are rounding. In fp32 all are below 2e-6 where
# nothing is wrong. In bf16 the loss may be 0.3 % away; the norm and the weights, of which some start at zero and so
# are all gradient, get 5 and 3 times what was measured (6e-3, 7e-2). fp16 has 3 more bits: an eighth of bf16's.
TOLERANCES = {
    "fp32": (1e-5, 1e-5, 1e-5),
    "bf16": (3e-3, 3e-2, 2e-1),
    "fp16": (4e-4, 4e-3, 2.5e-2),
}

# SGD shows a constant factor in a gradient, which Adam hides, and does not scale rounding up to the learning rate in
# parameters whose gradient is zero in exact arithmetic. Clipping is far below the norm, so that a wrong norm shows.
PROBE: dict[str, Any] = {"optimizer": {"type": "SGD", "params": {"lr": 0.3, "momentum": 0.9, "weight_decay": 0.05}}}
PROBE |= {"gradient_clipping": 0.1}
_PROBE_REPLACES = frozenset({"lr", "weight_decay", "clip_grad", "epochs"})

# A tensor whose root mean square is below this share of the whole model's is compared with that share: one that
# starts at zero and has no gradient in exact arithmetic (a bias of the keys) holds only rounding.
_SMALL_TENSOR = 1e-3

_EVERY_RUN = {"val_split": "", "log_interval": 1, "checkpoint_interval": "0", "log_images": 0}
_OF_LAYOUT = (*LAYOUT_FLAGS[2:], "grad_checkpointing", "batch_size", "workers")
_NOT_TAKEN = frozenset(
    (
        *LAYOUT_FLAGS,
        *("eval_only", "check_replicas", "dry_run", "max_steps"),
        *("resume", "allow_batch_change", "allow_schedule_change", "auto_batch", "memory"),
    )
)
"""Flags that the parser refuses: a layout or --steps decides them, or they are only train.py's. A recipe's are idle."""
_WITHOUT_EFFECT = _NOT_TAKEN | {"set", "output", "keep_checkpoints", "rollback"}


@dataclass
class LayoutRun:
    """A layout, its run, and how far that is from the reference's.

    Attributes:
        name: as people write it: "pp2 tp2 --sequence-parallel", "zero3", "zero1 fp32".
        flags: flags of train.py, by their recipe names, that differ in this layout.
        stage: ZeRO stage, or None for the JSON's.
        fp32: whether the JSON's 16-bit type is switched off.
        folder: of its files: the flags and JSON of train.py, and its run.
        text: degrees, ZeRO stage, number format and batch, for people.
        precision: the number format.
        limits: what passes for loss, gradient norm and weights.
        problem: why there is nothing to compare: it is invalid here, or failed.
        failed: whether it failed or deviates.
        loss: largest relative deviation of a step's loss.
        norm: the same of the gradient norm before clipping.
        weight: the tensor that is farthest from the reference's after the last step, and how far.
    """

    name: str
    flags: Mapping[str, Any] = field(default_factory=dict)
    stage: int | None = None
    fp32: bool = False
    folder: Path = Path()
    text: str = ""
    precision: str = ""
    limits: tuple[float, float, float] = (0.0, 0.0, 0.0)
    problem: str = ""
    failed: bool = False
    loss: float = math.nan
    norm: float = math.nan
    weight: tuple[str, float] = ("", math.nan)

    @property
    def run(self) -> RunFolder:
        """What train.py writes."""
        return RunFolder(self.folder / "run")

    @property
    def verdict(self) -> str:
        """The last column."""
        if self.problem:
            return "failed" if self.failed else "not legal"
        return "DEVIATES" if self.failed else "same"


class RunFailed(UserError):
    """A run failed; the text is its error."""

    exit_code = exit_codes.BUG


# ---- the command line ------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> int:
    """Run `launch/parity.py` with these arguments.

    Returns:
        0 where every layout trains the same; 1 where one deviates by more than the tolerance, or fails; 2 for invalid
        input, where one line on stderr says what is wrong and what to do.
    """

    def body(process: Process) -> int:
        if process.world_size > 1:
            raise UserError(
                f"this is one of {process.world_size} ranks, and parity.py starts the ranks of each layout itself: "
                f"python launch/parity.py -n {process.world_size} … (on several hosts with --launcher)"
            )
        for number in (signal.SIGTERM, signal.SIGUSR1):  # an exit that ends the training too
            signal.signal(number, lambda number, frame: sys.exit(exit_codes.INTERRUPTED))
        options, values = parse(argv)
        # With a launcher there may be several hosts, which share the working folder.
        parent = "." if options.launcher else None
        with tempfile.TemporaryDirectory(prefix="ds_vit-parity-", dir=parent) as folder:
            return int(compare(options, values, Path(folder).absolute()))

    return guarded("parity.py", body, "nothing was compared")


def parse(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, dict[str, Any]]:
    """Read the command line.

    Returns:
        The tool's own arguments, with layouts for `layouts` (None for the default list) and `reference`; and the flags
        of train.py that were given, by their recipe names.

    Raises:
        UserError: as `config.parse`, or an invalid layout.
    """
    description = "Train a few steps in each layout, and compare loss, gradient norm and weights with one reference. "
    kind = flags.config_of_words(argv)
    only = kind.flags().keys() - _NOT_TAKEN
    parser = flags.build_parser("parity.py", description + "Takes the flags of train.py too.", only, config=kind)
    parser.usage = "parity.py -n RANKS --deepspeed_config FILE [--layouts LIST] [flags]"
    parser.add_argument(
        "-n", "--ranks", type=at_least(1), metavar="N", help="ranks of each run [one per accelerator; CPU: 2]"
    )
    parser.add_argument("--launcher", metavar="COMMAND", help="what starts train.py on these ranks [torchrun, here]")
    parser.add_argument("--layouts", metavar="LIST", help='"pp2 tp2, tp2 --sequence-parallel, pp2, zero3"')
    parser.add_argument("--reference", metavar="LAYOUT", help="what they are compared with [zero1 fp32; fp16: zero1]")
    parser.add_argument("--steps", type=at_least(1), default=5, help="optimizer steps in each [5]")
    parser.add_argument(
        "--rtol", type=at_least(0, float), help="largest relative deviation that passes [fp32: 1e-5; bf16: 3e-2]"
    )
    parser.add_argument("--own-optimizer", action="store_true", help="the JSON's optimizer instead of clipped SGD")
    words = flags.read_words(parser, argv)
    own = {"ranks", "launcher", "layouts", "reference", "steps", "rtol", "own_optimizer"}
    options = argparse.Namespace(**{name: words.pop(name, None) for name in sorted(own)})
    if options.launcher and not options.ranks:
        raise UserError("--launcher needs -n N: how many ranks it starts")
    config = flags.from_values(words)
    quiet_deepspeed(config.verbose)  # it prints while it is imported
    from ds_vit.config.deepspeed_keys import DeepSpeedJson

    path = str(config.deepspeed_config)
    options.json = DeepSpeedJson.of(overlay(load_json(path), parse_set(config.set), path), path)
    options.layouts = None if options.layouts is None else parse_layouts(options.layouts)
    options.reference = None if options.reference is None else parse_layout(options.reference)
    return options, {name: getattr(config, name) for name in sorted(config.model_fields_set)}


def parse_layout(text: str) -> LayoutRun:
    """Read one layout.

    Raises:
        UserError: a word that is none of ppN, tpN, zeroN, fp32 and the flags that a layout may have.
    """
    words = [(word, re.fullmatch(r"(pp|tp|zero|fp(?=32$))(\d+)", word)) for word in shlex.split(text)]
    degrees = {match[1]: int(match[2]) for _, match in words if match}
    parser = flags.build_parser("layout", only=_OF_LAYOUT)
    try:
        if not words:
            raise UserError("it has no words")
        own = flags.read_words(parser, [word for word, match in words if not match])
    except UserError as error:
        made_of = f"a layout is made of ppN, tpN, zeroN, fp32, {', '.join(map(spelling, _OF_LAYOUT))}"
        problems = (f"layout {text!r}: {problem}" for problem in error.problems)
        raise UserError(*problems, remedy=f"{made_of}; dp follows from the number of ranks") from None
    stage, fp32 = degrees.pop("zero", None), bool(degrees.pop("fp", 0))
    return LayoutRun(text, {**degrees, **own}, stage, fp32)


def parse_layouts(text: str) -> tuple[LayoutRun, ...]:
    """Read a list of layouts, commas between them; a comma before a digit is part of `--pp-partition 0,2,7`.

    Raises:
        UserError: as `parse_layout`, or a layout is given twice.
    """
    layouts = tuple(parse_layout(piece.strip()) for piece in re.split(r",(?!\s*\d)", text))
    texts = [layout.name for layout in layouts]
    if twice := [text for text in texts if texts.count(text) > 1]:
        raise UserError(f"layout {twice[0]!r} is given twice; drop one")
    return layouts


def default_layouts(world_size: int, *, stage: int) -> tuple[LayoutRun, ...]:
    """What is compared by default: ZeRO stages, then degrees of 2, 3, 4 and 8 that divide the world.

    Args:
        world_size: number of ranks.
        stage: the JSON's ZeRO stage; a pipeline gets stage 1 where that does not go with one.
    """
    degrees = [d for d in (2, 3, 4, 8) if world_size % d == 0]
    pipeline = "" if stage <= 1 else " zero1"
    texts = [*(f"zero{s}" for s in range(4)), "--grad-checkpointing"]
    texts += [f"tp{d}" for d in degrees]
    texts += [f"tp{d} --sequence-parallel" for d in degrees[:1]]
    texts += [f"pp{d}{pipeline}" for d in degrees]
    if world_size % 4 == 0:
        texts += [f"pp2 tp2{pipeline}", f"pp2 tp2{pipeline} --sequence-parallel"]
    return tuple(map(parse_layout, texts))


# ---- the runs --------------------------------------------------------------------------------------------------------


def compare(options: argparse.Namespace, values: Mapping[str, Any], folder: Path) -> bool:
    """Train the reference and each layout, and print the matrix.

    Args:
        options: as from `parse`.
        values: flags of train.py, by their recipe names.
        folder: for the runs.

    Returns:
        Whether a layout deviates or failed.

    Raises:
        UserError: the reference is invalid, or a layout that was asked for.
        RunFailed: the reference failed.
    """
    from deepspeed.accelerator import get_accelerator

    console = make_console()
    if options.ranks is None:
        options.ranks = 2 if get_accelerator().device_name() == "cpu" else get_accelerator().device_count()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(options.ranks)]
    launcher = shlex.split(options.launcher) if options.launcher else torchrun
    verbose = bool(values.get("verbose"))
    reference, layouts, run = resolve_layouts(options, values, folder)
    batch = run.batch.global_batch
    say(console, f"{run.model.spec.name}, {options.ranks} ranks, global batch {batch}, {options.steps} steps")
    without_effect = _WITHOUT_EFFECT - {"set"}
    if not options.own_optimizer:
        without_effect |= _PROBE_REPLACES
        probe = "SGD, learning rate 0.3, norm clipped to 0.1"
        say(console, f"{probe} (a probe; --own-optimizer keeps the JSON's optimizer)")
    if idle := values.keys() & without_effect:
        say(console, f"idle here: {', '.join(map(spelling, sorted(idle)))}")
    say(console, f"reference: {reference.name} ({reference.text})")
    legal = [layout for layout in layouts if not layout.problem]
    # Adam scales rounding in gradients that should be zero.
    compare_weights = not options.own_optimizer or str(options.json.given("optimizer.type")).lower() == "sgd"
    say(console, f"training the reference and {len(legal)} layouts, each in new processes that import torch first:")
    train(reference, f"training the reference, {reference.name}", launcher, options.steps, verbose=verbose)
    for number, layout in enumerate(legal, 1):
        started = time.perf_counter()
        what = f"training {layout.name}, layout {number} of {len(legal)}"
        try:
            train(layout, what, launcher, options.steps, verbose=verbose)
            measure_deviations(layout, reference.run, compare_weights=compare_weights)
        except RunFailed as error:
            layout.problem, layout.failed = str(error), True
        shutil.rmtree(layout.run.path, ignore_errors=True)
        say(console, f"{layout.name} ({layout.text}): {layout.verdict}, {time.perf_counter() - started:.0f} s")
    title = "largest relative deviation from the reference"
    print_columns(console, title, matrix(layouts, compare_weights=compare_weights))
    for precision, limits in {layout.precision: layout.limits for layout in legal}.items():
        say(console, f"tolerance in {precision}: {', '.join(f'{limit:.0e}' for limit in limits)}")
    for layout in layouts:
        if layout.problem:
            say(console, f"{layout.name}: {layout.problem}")
    return any(layout.failed for layout in layouts)


def resolve_layouts(
    options: argparse.Namespace, values: Mapping[str, Any], folder: Path
) -> tuple[LayoutRun, list[LayoutRun], Run]:
    """Check every layout and write its flags and JSON; nothing is started.

    Returns:
        The reference, the layouts, and the resolved reference.

    Raises:
        UserError: the reference is invalid, or a layout that was asked for.
    """
    as_in_json = resolve_layout(options, values, parse_layout("zero1"), None, folder / "json")
    # fp16 skips steps while it looks for its loss scale: only fp16 does the same.
    in_fp16 = as_in_json.engine.precision.name.endswith("fp16")
    reference, layouts = options.reference or parse_layout("zero1" if in_fp16 else "zero1 fp32"), []
    run = resolve_layout(options, values, reference, None, folder / "reference")
    stage = options.json.zero_stage
    for number, layout in enumerate(options.layouts or default_layouts(options.ranks, stage=stage)):
        try:
            json = resolve_layout(options, values, layout, run, folder / str(number)).engine.json
        except UserError as error:
            layout.problem, json = str(error), None
        # A default layout that is the reference's would be compared with itself.
        if options.layouts is not None or json != run.engine.json or layout.text != reference.text:
            layouts.append(layout)
    if options.layouts is not None and any(layout.problem for layout in layouts):
        raise UserError("; ".join(f"layout {layout.name!r}: {layout.problem}" for layout in layouts if layout.problem))
    return reference, layouts, run


def resolve_layout(
    options: argparse.Namespace,
    values: Mapping[str, Any],
    layout: LayoutRun,
    reference: Run | None,
    folder: Path,
) -> Run:
    """One layout: the user's flags and JSON with what this layout changes, written to files and checked.

    Args:
        options: as for `compare`.
        values: as for `compare`.
        layout: of this run; its folder, text, precision and limits are filled in.
        reference: whose global batch it gets; None for the reference itself.
        folder: of this layout.

    Raises:
        UserError: as training; or no accumulation gives the global batch with this micro-batch and dp.
    """
    from deepspeed.accelerator import get_accelerator

    from ds_vit.training.resolve import resolve
    from ds_vit.training.run import World

    changed: dict[str, Any] = {}
    left_out: list[str] = []
    own, dropped = {**_EVERY_RUN, "max_steps": options.steps}, _WITHOUT_EFFECT
    if not options.own_optimizer:
        own, dropped = own | {"sched": "constant", "warmup_steps": 0}, dropped | _PROBE_REPLACES
        changed |= PROBE
        left_out.append("scheduler")
    if layout.stage is not None:
        cannot = {0: ("offload_param", "offload_optimizer"), 1: ("offload_param",), 2: ("offload_param",)}
        changed["zero_optimization.stage"] = layout.stage
        left_out += [f"zero_optimization.{key}" for key in cannot.get(layout.stage, ())]
    if layout.fp32:
        left_out += ["bf16", "fp16", "torch_autocast"]
    kept = {name: value for name, value in values.items() if name not in dropped}
    recipe = flags.over_recipe(kept, {**own, **layout.flags})
    if reference is not None:
        batch = reference.batch
        recipe = {name: value for name, value in recipe.items() if name not in ("batch_size", "grad_accum_steps")}
        micro = layout.flags.get("batch_size", batch.micro_batch)
        changed |= dict(zip(BATCH_KEYS, (batch.global_batch, micro, "auto"), strict=True))
    layout.folder = folder
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "layout.json"
    file.write_text(json.dumps(options.json.replace(changed, left_out).dump()))
    recipe |= {"deepspeed_config": str(file), "output": str(layout.run.path)}
    (folder / "layout.yaml").write_text(flags.to_yaml(recipe), encoding="utf-8")
    try:
        rank = Process("env", 0, options.ranks, 0, options.ranks)
        world = World(rank, get_accelerator().device_name() == "cpu")
        run = resolve(flags.from_values(recipe), world)
    except UserError as error:
        text = str(error).replace(str(file), values["deepspeed_config"])
        raise UserError(text if reference is not None else f"reference {layout.name!r}: {text}") from None
    layout.precision = run.engine.precision.name
    # Without --rtol those of the coarser number format.
    precisions = [one.engine.precision.name.removeprefix("autocast-") for one in (run, reference) if one]
    layout.limits = (options.rtol,) * 3 if options.rtol is not None else max(TOLERANCES[name] for name in precisions)
    layout.text = f"{run.text}, {run.batch.micro_batch} x {run.batch.accumulation} per replica"
    return run


def train(layout: LayoutRun, what: str, launcher: Sequence[str], steps: int, *, verbose: bool) -> None:
    """Train a layout in new processes, and show how far it is on stderr: a moving line, or one plain line in a file.

    Args:
        layout: whose run it is.
        what: in a few words.
        launcher: starts `TRAIN` on all ranks.
        steps: how many there will be.
        verbose: pass the output on; otherwise only the end of a failure's is shown.

    Raises:
        RunFailed: the run failed.
    """
    console = Console(file=sys.stderr, markup=False, soft_wrap=True)
    if not console.is_terminal:
        say(console, f"parity.py: {what}")
    with tempfile.TemporaryFile() as output, Line(console).doing(what, steps) as counted:
        command = [*launcher, str(TRAIN), "--recipe", str(layout.folder / "layout.yaml")]
        child = subprocess.Popen(command, stdout=None if verbose else output, stderr=None if verbose else output)
        seen = 0
        try:
            while child.poll() is None:
                time.sleep(0.1)
                done = len(layout.run.rows("train")) if layout.run.metrics.exists() else 0
                seen += len(list(counted(range(done - seen))))
        finally:
            child.terminate()  # torchrun ends its ranks
            child.wait()
        output.seek(0)
        text = output.read().decode(errors="replace").rstrip()
    if child.returncode:
        errors = re.findall(r"^train\.py: error: .*", text, re.MULTILINE)
        raise RunFailed(errors[-1] if errors else f"exit code {child.returncode}\n{text[-4000:]}")


# ---- the comparison --------------------------------------------------------------------------------------------------


def measure_deviations(layout: LayoutRun, reference: RunFolder, *, compare_weights: bool) -> None:
    """Compare a layout's run with the reference's, within its limits for loss, gradient norm and weights."""
    layout.loss = deviation(curve(reference, "loss"), curve(layout.run, "loss"))
    layout.norm = deviation(curve(reference, "grad_norm"), curve(layout.run, "grad_norm"))
    layout.weight = worst_weight(weights(reference), weights(layout.run))
    values = (layout.loss, layout.norm, layout.weight[1] if compare_weights else 0.0)
    layout.failed = any(not value <= limit for value, limit in zip(values, layout.limits, strict=True))


def curve(run: RunFolder, key: str) -> list[float | None]:
    """A figure of every step ("loss" or "grad_norm"); None for the norm of a skipped step."""
    values = [row[key] for row in run.rows("train")]
    return [math.nan if value is None and key == "loss" else value for value in values]


def weights(run: RunFolder) -> Mapping[str, torch.Tensor]:
    """The final weights of all files of a run, without their averages."""
    from ds_vit.checkpoint.tensors import TensorFiles

    return TensorFiles(path for path in sorted(run.path.glob("*.safetensors")) if not path.name.startswith("ema"))


def deviation(reference: Iterable[float | None], values: Iterable[float | None]) -> float:
    """The largest |a - b| / |a| of two curves; infinite where one of a pair is missing or not finite."""

    def one(a: float | None, b: float | None) -> float:
        if a == b:  # a skipped step has no norm
            return 0.0
        if a is None or b is None or not (a and math.isfinite(a) and math.isfinite(b)):
            return math.inf
        return abs(a - b) / abs(a)

    return max(one(a, b) for a, b in zip(reference, values, strict=True))


def worst_weight(reference: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> tuple[str, float]:
    """The tensor that is farthest from the reference's: its name and |a - b| / |a|, by Euclidean norms.

    Raises:
        ValueError: the two have other names.
    """
    import torch

    if set(reference) != set(tensors):
        raise ValueError(f"these tensors are in one model only: {sorted(set(reference) ^ set(tensors))[:5]}")
    sizes = {name: tensor.numel() for name, tensor in reference.items() if tensor.is_floating_point()}
    norms = {name: float(torch.linalg.vector_norm(reference[name].double())) for name in sizes}
    floor = _SMALL_TENSOR * math.hypot(*norms.values()) / math.sqrt(sum(sizes.values()))
    relative = {}
    for name, size in sizes.items():
        distance = float(torch.linalg.vector_norm(reference[name].double() - tensors[name].double()))
        relative[name] = distance / max(norms[name], floor * math.sqrt(size)) if math.isfinite(distance) else math.inf
    worst = max(relative, key=lambda name: relative[name])
    return worst, relative[worst]


def matrix(layouts: Sequence[LayoutRun], *, compare_weights: bool) -> list[Sequence[str]]:
    """The results as lines of a table, the header first.

    Args:
        layouts: one per row.
        compare_weights: whether the weights count; their column says so where they do not.
    """
    of_weights = "weights" if compare_weights else "weights (not tested)"
    lines: list[Sequence[str]] = [("layout", "loss", "grad norm", of_weights, "worst tensor", "verdict")]
    for layout in layouts:
        found = (layout.loss, layout.norm, layout.weight[1])
        numbers = ["-" if layout.problem else f"{number:.1e}" for number in found]
        lines.append((layout.name, *numbers, layout.weight[0], layout.verdict))
    return lines
