"""Our runs in 16 bits and the plain loops of plain_loops.py on the same weights and batches, and how far each is from
the plain loop in float64.

A tensor's ratio is its distance from float64 in our run over that in the plain loop in 16 bits, the median over the
seeds. A run's ratio is the geometric mean over its tensors, so that small tensors count as much as large ones.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import plain_loops
import torch
from bridge_towers import write_folder
from plain_loops import Run, Tensors
from project import write_config
from ranks import RankPool
from timm.models import save_for_hf

SEEDS, BATCH, CLIP, STEPS = 6, 32, 0.1, 5
# A small rate: what is compared is the rounding of each step, not how training amplifies it.
SGD = {"lr": 0.03, "momentum": 0.9}
SCALE_POWER = 10
KINDS = {
    "bf16": {"bf16": {"enabled": True}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": SCALE_POWER, "loss_scale_window": 1000}},
}
AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}
MESHES = {"1 rank": (1, 1, 1), "dp 2": (1, 2, 1), "pp 2": (2, 1, 1), "tp 2": (1, 1, 2), "tp 2 x dp 2": (1, 2, 2)}
"""Name → pp, dp, tp."""
FACTORS = {
    "task": [*plain_loops.TASKS],
    "mesh": [*MESHES],
    "stage": [0, 1, 2, 3],
    "accumulation": [1, 4, BATCH],
    "kind": [*KINDS],
}
Case = Mapping[str, Any]
"""Factor → choice."""


def is_legal(case: Case) -> bool:
    """Whether a combination can run; fp16 is for two tasks, one with a coupled loss."""
    pp, _, tp = MESHES[case["mesh"]]
    if case["kind"] == "fp16" and (case["stage"] == 0 or case["task"] not in ("classification", "clip")):
        return False
    if pp > 1:
        return case["stage"] == 1 and case["task"] in ("classification", "mae", "clip", "siglip")
    return tp == 1 or case["task"] != "bridgetower"


def full_product() -> list[Case]:
    """Every combination that can run."""
    cases = (dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values()))
    return [case for case in cases if is_legal(case)]


def accumulation_of(case: Case) -> int:
    """Micro-batches of a rank; the most that there can be have one sample."""
    return min(case["accumulation"], BATCH // MESHES[case["mesh"]][1])


def steps_of(case: Case) -> int:
    """One step with many micro-batches, which shows their sum."""
    return 1 if case["accumulation"] == BATCH else STEPS


# ---- weights and batches ---------------------------------------------------------------------------------------------


def write_models(folder: Path) -> Path:
    """The models that a run is given as folders: a BridgeTower and a teacher."""
    write_folder(folder / "bridgetower")
    kwargs = {"img_size": plain_loops.SIZE, **plain_loops.Distillation.TEACHER}
    save_for_hf(plain_loops.Distillation().teacher, folder / "teacher", safe_serialization=True, model_args=kwargs)
    return folder


def plain_task(task: str, folder: Path, seed: int) -> plain_loops.PlainTask:
    """A task with the initial values of a seed."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        plain = plain_loops.TASKS[task](*([folder / "bridgetower"] if task == "bridgetower" else []))
    plain.shake(seed)
    return plain


def batches_of(task: str, seed: int, steps: int) -> list[dict[str, torch.Tensor]]:
    """Random global batches, with the masks that follow from the keys of their samples."""
    from ds_vit import randomness
    from ds_vit.data.augment.crops import block_masks
    from ds_vit.tasks.mae.towers import masked_patches

    generator, size = torch.Generator().manual_seed(1000 + seed), plain_loops.SIZE
    grid, batches = size // plain_loops.VIT["patch_size"], []

    def images(count: int, size: int) -> torch.Tensor:
        return torch.randn(BATCH, count, 3, size, size, generator=generator)

    def whole_numbers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    for _ in range(steps):
        batch = {"keys": whole_numbers(0, 2**40, BATCH), "images": images(1, size).squeeze(1)}
        if task in ("classification", "distillation"):
            batch["targets"] = whole_numbers(0, plain_loops.CLASSES, BATCH)
        if task == "mae":
            batch |= {"pixels": batch["images"], "masks": masked_patches(batch["keys"], grid**2, 0.75)}
        if task in ("clip", "siglip", "bridgetower"):
            lengths = whole_numbers(3, plain_loops.CONTEXT + 1, BATCH, 1)
            places = torch.arange(plain_loops.CONTEXT)
            texts = whole_numbers(0, 256, BATCH, plain_loops.CONTEXT)
            texts = texts.masked_fill(places == lengths - 1, plain_loops.END)
            batch["texts"] = texts.masked_fill(places >= lengths, plain_loops.PAD)
        if task == "dino":
            of_samples = randomness.mix_tensor(batch["keys"], randomness.name_key("view"))
            of_views = randomness.mix_tensor(of_samples[:, None], torch.arange(2)).flatten().numpy()
            masks = torch.from_numpy(block_masks(of_views, (grid, grid), 0.5, plain_loops.MASK_RATIOS))
            batch |= {"images": images(2, size), "local_images": images(plain_loops.NUM_LOCAL, plain_loops.LOCAL)}
            batch["masks"] = masks.unflatten(0, (BATCH, 2))
        batches.append(batch)
    return batches


class Reference(NamedTuple):
    """What runs of a task are compared with; an element a seed.

    Attributes:
        values: initial ones.
        batches: of each seed, one a step.
        exact: in float64.
        plain: in 16 bits.
    """

    values: list[dict[str, torch.Tensor]]
    batches: list[list[dict[str, torch.Tensor]]]
    exact: list[Run]
    plain: list[Run]


class References:
    """The plain loops of each task, made when they are asked for.

    Args:
        folder: for the models that a run is given as folders.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = write_models(folder)
        self._in_float64 = functools.cache(self._exact)
        self._in_16_bits = functools.cache(self._plain)

    def of(self, case: Case) -> Reference:
        """What a case is compared with: the loop in 16 bits has as many micro-batches as a rank."""
        values, batches, exact = self._in_float64(case["task"], steps_of(case))
        plain = self._in_16_bits(case["task"], steps_of(case), case["kind"], accumulation_of(case))
        return Reference(values, batches, exact, plain)

    def _exact(self, task: str, steps: int) -> tuple[list[Any], list[Any], list[Run]]:
        models = [plain_task(task, self.folder, seed) for seed in range(SEEDS)]
        values = [{name: tensor.clone() for name, tensor in model.named_values().items()} for model in models]
        batches = [batches_of(task, seed, steps) for seed in range(SEEDS)]
        return values, batches, self._train(task, values, batches, torch.float64)

    def _plain(self, task: str, steps: int, kind: str, pieces: int) -> list[Run]:
        values, batches, _ = self._in_float64(task, steps)
        if kind == "bf16":
            return self._train(task, values, batches, torch.bfloat16, pieces=pieces)
        return self._train(task, values, batches, torch.float16, pieces=pieces, scale=2.0**SCALE_POWER)

    def _train(
        self, task: str, values: Sequence[Tensors], batches: Sequence[Any], dtype: torch.dtype, **how: Any
    ) -> list[Run]:
        runs = []
        for seed, given in enumerate(zip(values, batches, strict=True)):
            model = plain_task(task, self.folder, seed)
            runs.append(plain_loops.train(model, *given, dtype, optimizer=SGD, clip=CLIP, **how))
        return runs


# ---- our run ---------------------------------------------------------------------------------------------------------

MODEL = ["--model", plain_loops.NAME, "--img-size", plain_loops.SIZE, "--model-kwargs"]
MODEL += [f"{name}={value}" for name, value in plain_loops.VIT.items()]
DIGITS, CAPTIONS = ["--dataset", "digits"], ["--dataset", "glyphs", "--context-length", plain_loops.CONTEXT]
TOWERS = [*CAPTIONS, "--embed-dim", plain_loops.WIDTH, "--text-depth", plain_loops.TEXT_DEPTH]
TOWERS += ["--text-width", plain_loops.VIT["embed_dim"], "--text-heads", plain_loops.VIT["num_heads"]]
FLAGS: dict[str, list[Any]] = {
    "classification": [*MODEL, *DIGITS, "--smoothing", 0],
    "mae": ["--task", "mae", *MODEL, *DIGITS, *(f"--decoder-{k}={v}" for k, v in plain_loops.DECODER.items())],
    "clip": ["--task", "clip", *MODEL, *TOWERS],
    "siglip": ["--task", "siglip", *MODEL, *TOWERS],
    "dino": [
        *("--task", "dino", *MODEL, *DIGITS, "--local-crops-size", plain_loops.LOCAL),
        *("--local-crops-number", plain_loops.NUM_LOCAL, "--prototypes", plain_loops.HEAD["prototypes"]),
        *("--head-hidden-dim", plain_loops.HEAD["hidden"], "--head-bottleneck-dim", plain_loops.HEAD["bottleneck"]),
        *("--centering", "ema", "--teacher-temp", plain_loops.TEACHER_TEMPERATURE),
        *("--teacher-momentum", plain_loops.MOMENTUM, "--teacher-momentum-end", plain_loops.MOMENTUM),
        *("--warmup-teacher-temp-epochs", 0, "--freeze-last-layer-epochs", 0, "--patch-embed-lr-mult", 1.0),
        *("--mask-ratio-min-max", *plain_loops.MASK_RATIOS),
    ],
    "distillation": [*MODEL, *DIGITS, "--smoothing", 0, "--kd-temperature", plain_loops.TEMPERATURE],
    "bridgetower": ["--task", "bridgetower", "--pretrained", *CAPTIONS],
}


def command(case: Case, folder: Path, *words: Any, **blocks: Any) -> list[str]:
    """The command line of a run; its JSON, which is silent about types of sums, is written to the folder.

    Args:
        case: the task and how it is distributed.
        folder: of models.
        words: further flags.
        blocks: of the JSON, that differ.
    """
    pp, dp, tp = MESHES[case["mesh"]]
    precision = KINDS[case["kind"]] if case["stage"] else AUTOCAST
    blocks = {"optimizer": {"type": "SGD", "params": SGD}, "gradient_clipping": CLIP, **precision, **blocks}
    accumulation = accumulation_of(case)
    argv = [*FLAGS[case["task"]], "--deepspeed_config", write_config(folder / "ds.json", case["stage"], **blocks)]
    argv += ["--pp", pp, "--tp", tp, "-b", BATCH // dp // accumulation, "--grad-accum-steps", accumulation]
    argv += ["--workers", 0, "--val-split", "", "--sched", "constant", "--warmup-epochs", 0, "--epochs", 1]
    argv += ["--model", f"local-dir:{folder / 'bridgetower'}"] if case["task"] == "bridgetower" else []
    argv += ["--kd-model-name", f"local-dir:{folder / 'teacher'}"] if case["task"] == "distillation" else []
    return [str(word) for word in [*argv, "--max-steps", STEPS, *words]]


class Given:
    """Values of all parameters, where a run takes those of a file."""

    def __init__(self, values: Tensors) -> None:
        self.values = values

    def covers(self, layer: torch.nn.Module) -> bool:
        """All of them."""
        return True

    @torch.no_grad()
    def load(self, layer: Any) -> None:
        """Copy a layer's."""
        for name, parameter in layer.named_parameters():
            parameter.copy_(self.values[layer.prefix + name].view(parameter.shape))


def train_on_rank(
    argv: Sequence[str], values: Sequence[Tensors], batches: Sequence[Sequence[Tensors]]
) -> list[tuple[list[float], Any, Any]]:
    """On a rank: train from each seed's values on its batches.

    Returns:
        Of each seed the losses, and this rank's segments of the first step's change and of the weights in the end.
    """
    from runs import pretend_fp16

    from ds_vit.config import parser as flags
    from ds_vit.engine.start import quiet_deepspeed
    from ds_vit.launching.process import discover
    from ds_vit.models.layers import tower_names
    from ds_vit.parallel.groups import build_groups
    from ds_vit.training.build_engine import build_engine
    from ds_vit.training.resolve import resolve
    from ds_vit.training.run import World

    quiet_deepspeed(False)
    results = []
    with pretend_fp16():
        config = flags.parse([*argv])
        run = resolve(config, World(discover(), on_cpu=True))
        groups = build_groups(run.layout)
        for given, of_seed in zip(map(Given, values), batches, strict=True):
            model = dataclasses.replace(run.model, towers=dict.fromkeys(tower_names(run.model.whole), given))
            engine = build_engine(dataclasses.replace(run, model=model), torch.device("cpu"), groups)
            weights, losses = [_held_by(engine)], []
            for step, batch in enumerate(of_seed, start=1):
                task, horizon = run.model.task, run.schedule.horizon
                engine.begin_step(step, task.schedules(step, horizon), task.held_names(step, horizon))
                micro_batches = [_rows(batch, run.share.rows(n), engine.dtype) for n in range(run.batch.accumulation)]
                result = engine.train_step(iter(micro_batches))
                assert result.outcome().applied
                losses.append(float(engine.mean(result.loss)))
                weights += [_held_by(engine)] if step in (1, len(of_seed)) else []
            change = [(segment, after - before) for (segment, before), (_, after) in zip(*weights[:2], strict=True)]
            results.append((losses, change, [*weights[-1], *_averages(engine)]))
            engine.close()
    return results


def _held_by(engine: Any) -> list[tuple[Any, torch.Tensor]]:
    """This rank's segments of the weights that the optimizer has, and their values."""
    shards = engine.zero_map.shards
    return [
        (s, view.float().clone()) for shard in shards for s, view in zip(shard.segments, shard.views(), strict=True)
    ]


def _averages(engine: Any) -> list[tuple[Any, torch.Tensor]]:
    """The same of the teachers' weights, which are averages, by the teachers' names."""
    if engine.context.teachers is None:
        return []
    found = []
    for shard, average in zip(engine.zero_map.shards, engine.context.teachers.tensors, strict=True):
        for segment, view in zip(shard.segments, shard.views(average), strict=True):
            name = f"teacher.{segment.name}".replace("teacher.dino_head", "teacher_head")
            if segment.name != "mask_token":  # which only the student has
                found.append((dataclasses.replace(segment, name=name), view.clone()))
    return found


def _rows(batch: Tensors, rows: range, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """A micro-batch as the input path gives it."""
    own = {name: tensor[rows.start : rows.stop] for name, tensor in batch.items()}
    return own | {name: own[name].to(dtype) for name in ("images", "local_images") if name in own}


def _whole(parts: Iterable[tuple[Any, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Name → whole tensor, of all ranks' segments."""
    from ds_vit.parallel.tensor.slices import assemble_flat

    descriptions: dict[str, Any] = {}
    slices: dict[str, dict[int, torch.Tensor]] = {}
    for segment, values in parts:
        descriptions[segment.name] = tp_slice = segment.tp_slice
        of_name = slices.setdefault(segment.name, {})
        flat = of_name.setdefault(tp_slice.slice_rank, torch.zeros(math.prod(tp_slice.local_shape)))
        flat[segment.start : segment.start + segment.length] = values
    return {
        name: assemble_flat([by_rank[rank] for rank in sorted(by_rank)], descriptions[name])
        for name, by_rank in slices.items()
    }


def train(ranks: RankPool, case: Case, reference: Reference, folder: Path, *words: Any, **blocks: Any) -> list[Run]:
    """Our runs, one a seed; arguments as for `command`."""
    argv = command(case, folder, *words, **blocks)
    world = math.prod(MESHES[case["mesh"]])
    by_rank = ranks.run(world, train_on_rank, argv, reference.values, reference.batches, timeout=900.0)
    runs = []
    for of_seed in zip(*by_rank, strict=True):
        changes, weights = (itertools.chain(*(of_rank[part] for of_rank in of_seed)) for part in (1, 2))
        runs.append(Run(of_seed[-1][0], _whole(changes), _whole(weights)))
    return runs


# ---- ratios ----------------------------------------------------------------------------------------------------------


class Ratios(NamedTuple):
    """How much further from float64 our runs are than the plain loop.

    Attributes:
        gradient: of the first step.
        weights: at the end.
        loss: root mean square of the relative deviations over the steps, the median over the seeds; None for one step.
        tensor: largest ratio of a single tensor's gradient.
        name: of that tensor.
    """

    gradient: float
    weights: float
    loss: float | None
    tensor: float
    name: str


def ratios(runs: Sequence[Run], reference: Reference) -> Ratios:
    """Of our runs, one a seed."""
    gradients, weights = (_of_tensors(runs, reference, part) for part in ("first", "last"))
    several = {name: ratio for name, ratio in gradients.items() if runs[0].first[name].numel() > 1}
    name = max(several, key=several.__getitem__)
    loss = None
    if len(runs[0].losses) > 1:
        sides = zip(runs, reference.plain, reference.exact, strict=True)
        loss = statistics.median(
            _loss_deviation(ours, exact) / _loss_deviation(plain, exact) for ours, plain, exact in sides
        )
    mean = statistics.geometric_mean
    return Ratios(mean(gradients.values()), mean(weights.values()), loss, several[name], name)


def _of_tensors(runs: Sequence[Run], reference: Reference, part: str) -> dict[str, float]:
    """The ratio of each tensor that has a gradient."""
    sides = [getattr(run, part) for side in (runs, reference.plain, reference.exact) for run in side]
    ours, plain, exact = (sides[n * len(runs) : (n + 1) * len(runs)] for n in range(3))
    assert ours[0].keys() == exact[0].keys(), ours[0].keys() ^ exact[0].keys()
    found = {}
    for name in exact[0]:
        far = [_distance(a[name], b[name]) for a, b in zip(plain, exact, strict=True)]
        if any(far):
            own = (_distance(a[name], b[name]) for a, b in zip(ours, exact, strict=True))
            found[name] = statistics.median(a / b for a, b in zip(own, far, strict=True))
    return found


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(a.double().flatten() - b.double().flatten()))


def _loss_deviation(run: Run, exact: Run) -> float:
    pairs = zip(run.losses, exact.losses, strict=True)
    return math.sqrt(statistics.fmean((loss / true - 1) ** 2 for loss, true in pairs))
