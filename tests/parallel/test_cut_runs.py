"""Pipeline stages: where they are cut, who decodes what, exact evaluation, every model kind, and what is refused."""

import itertools
import json
import random

import oracle
import pytest
import torch
from curves import assert_same_curve, evals, read_rows, train_in
from project import ROOT
from runs import KINDS, count_decodes, drift

from ds_vit.config.parser import parse
from ds_vit.fault_tolerance import exit_codes
from ds_vit.launching.process import Process
from ds_vit.models import ModelSpec, create_model
from ds_vit.parallel.layout import Layout
from ds_vit.planner import counting
from ds_vit.planner.counting import count_flops, layer_costs
from ds_vit.planner.pipeline import balance, check_bounds
from ds_vit.train import main
from ds_vit.training.resolve import resolve_run

CONFIGS = ROOT / "ds_configs"
RTOL = 1e-5
TINY = {"patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 3}
MODEL = [
    *("--model", oracle.MODEL, *oracle.kwargs_words(TINY), "--img-size", 16, "--workers", 0),
    *("--deepspeed_config", CONFIGS / "cpu_zero1_fp32.json"),
]
BASE = [*MODEL, "--log-interval", 1, "--warmup-steps", 1]


def brute_force(flops, memory, stages):
    """The best (busiest stage's work, largest peak) over all cuts."""
    layers = len(flops)
    scores = []
    for inner in itertools.combinations(range(1, layers), stages - 1):
        cut = [0, *inner, layers]
        parts = list(itertools.pairwise(cut))
        work = max(sum(flops[a:b]) for a, b in parts)
        peak = max(sum(memory[a:b]) * (stages - i) for i, (a, b) in enumerate(parts))
        scores.append((work, peak))
    return min(scores)


@pytest.mark.parametrize("seed", range(20))
def test_stages_are_balanced(seed):
    """A cut that is not the best one: the slowest stage sets the pace of a pipeline."""
    draw = random.Random(seed)
    layers, stages = draw.randint(2, 9), draw.randint(1, 4)
    stages = min(stages, layers)
    flops = [draw.randint(0, 5) for _ in range(layers)]
    memory = [draw.randint(0, 5) for _ in range(layers)]
    bounds = balance(flops, memory, stages)
    parts = list(itertools.pairwise(bounds))
    assert (bounds[0], bounds[-1], len(parts)) == (0, layers, stages)
    assert all(a < b for a, b in parts)
    work = max(sum(flops[a:b]) for a, b in parts)
    peak = max(sum(memory[a:b]) * (stages - i) for i, (a, b) in enumerate(parts))
    best = brute_force(flops, memory, stages)
    assert work == best[0]
    assert peak >= best[1]


def test_equal_blocks_are_cut_evenly_and_early_stages_get_fewer():
    """12 equal blocks over 5 stages: no stage has more than 3, and the first, which keeps most, is not the fullest."""
    bounds = balance([0, *[1] * 12, 0], [0, *[1] * 12, 0], 5)
    sizes = [b - a for a, b in itertools.pairwise(bounds)]
    assert max(sizes) <= 4
    assert bounds[1] - 1 <= 3


def test_layer_costs_add_up():
    """Costs that miss a layer would unbalance the stages."""
    model = create_model(ModelSpec("vit_base_patch16_siglip_224"))
    costs = layer_costs(model)
    assert sum(cost.flops for cost in costs) == count_flops(model).forward
    assert len(costs) == len(model.blocks) + 2
    # sbd(20 + 4r) bytes in fp32 with r = 4 and no fused layers below, within a factor: attention's tables aside.
    tokens, width = 196, 768
    assert 0.5 < costs[1].activation_bytes / (2 * tokens * width * 34) < 2.0


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "vit_small_patch16_rope_mixed_224"])
def test_blocks_that_are_alike_are_counted_once(name, monkeypatch):
    """A block that costs something else and is taken for its neighbour; and blocks that are all counted."""
    model = create_model(ModelSpec(name, num_classes=10, drop_path=0.1))
    count, counted = counting._count_forward, []
    monkeypatch.setattr(counting, "_count_forward", lambda layer, value: counted.append(layer) or count(layer, value))
    layer_costs(model)
    assert len(counted) == 3
    wide = model.blocks[5].mlp
    wide.fc1 = torch.nn.Linear(wide.fc1.in_features, 7, device="meta")
    wide.fc2 = torch.nn.Linear(7, wide.fc2.out_features, device="meta")
    once, numbers = layer_costs(model), itertools.count()
    monkeypatch.setattr(counting, "cost_key", lambda block: next(numbers))
    each = layer_costs(model)
    assert [cost.flops for cost in once] == [cost.flops for cost in each]
    # A first block without drop-path lacks its mask of four bytes an image.
    assert [c.activation_bytes for c in once] == pytest.approx([c.activation_bytes for c in each], abs=8)
    assert once[6].flops != once[5].flops == once[7].flops


def test_check_bounds():
    """Explicit bounds that lose a layer."""
    assert check_bounds([0, 2, 5], 5, 2) == [0, 2, 5]
    for bad in ([0, 5], [0, 2, 4], [1, 2, 5], [0, 3, 3, 5], [0, 4, 2, 5]):
        with pytest.raises(ValueError, match="rising numbers"):
            check_bounds(bad, 5, 2)


@pytest.fixture(scope="module")
def cifar(tmp_path_factory, real_images):
    """43 training and 103 validation images."""
    folder = tmp_path_factory.mktemp("pipeline")
    oracle.cifar_folder(real_images / "cifar10" / "train.tar", folder, 43, "train")
    oracle.cifar_folder(real_images / "cifar10" / "test.tar", folder, 103, "val")
    return folder


def test_only_the_first_stage_decodes(ranks, cifar, tmp_path):
    """An image decoded behind the first stage is work thrown away; a target read on it too."""
    argv = [*BASE, "--data-dir", cifar, "--pp", 2, "-b", 4, "--max-steps", 3, "--output", tmp_path / "run"]
    argv += ["--mixup", 0.5, "--on-bad-image", "error"]  # a replaced image has another target: skipping decodes twice
    counts = ranks.run(4, count_decodes, [str(a) for a in argv])
    first = [count for rank, count in enumerate(counts) if Layout(pp=2, dp=2).stage(rank) == 0]
    last = [count for rank, count in enumerate(counts) if Layout(pp=2, dp=2).stage(rank) == 1]
    # dp 2: 3 steps of 4 images a rank, and half of the 103 validation images.
    assert [count["targets"] for count in first] + [count["images"] for count in last] == [0, 0, 0, 0]
    assert sum(count["images"] for count in first) == 3 * 8 + 103
    assert sum(count["targets"] for count in last) == 3 * 8 + 103


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("world", "pp", "val_batch"), [(2, 2, 8), (4, 2, 8), (3, 3, 50), (4, 4, 1), (2, 2, 103)])
def test_exact_evaluation_between_steps(ranks, cifar, world, pp, val_batch):
    """103 images, any batch and layout, after every epoch: the same counts and accuracy, and training undisturbed."""
    argv = [*BASE, "--data-dir", cifar, "--epochs", 2, "-vb", val_batch]
    reference = train_in(ranks, 1, [*argv, "-b", 8])
    assert [row["images"] for row in evals(reference)] == [103, 103]
    dp = world // pp
    rows = train_in(ranks, world, [*argv, "--pp", pp, "-b", 4 // dp, "--grad-accum-steps", 2])
    assert_same_curve(reference, rows, rtol=RTOL)
    assert evals(rows) == evals(reference)


def outputs_alive(argv):
    """On a rank: train; outputs of a chunk that are alive as each of them is handed over, and when all were."""
    import gc
    import weakref

    from ds_vit.engine.pipeline import PipeEngine

    plain, alive = PipeEngine.forward_batches, []

    def forward_batches(self, batches, num_batches, **kwargs):
        refs = []
        eval_batch = self.engine.eval_batch

        def watched(*args, **kwargs):
            outputs = eval_batch(*args, **kwargs)
            refs.extend(map(weakref.ref, outputs or ()))
            return outputs

        self.engine.eval_batch = watched
        for item in plain(self, batches, num_batches, **kwargs):
            yield item
            del item
            gc.collect()
            alive.append(sum(ref() is not None for ref in refs))
        self.engine.eval_batch = eval_batch
        gc.collect()
        alive.append(sum(ref() is not None for ref in refs))

    PipeEngine.forward_batches = forward_batches
    assert main(argv) == 0
    return alive


def test_outputs_are_let_go_of(ranks, cifar, tmp_path):
    """Outputs of 32 batches that stay on the device until they have been counted, or through training behind that."""
    argv = [*BASE, "--data-dir", cifar, "--max-steps", 2, "-b", 8, "--pp", 2, "-vb", 20, "--output", tmp_path / "run"]
    _, last = ranks.run(2, outputs_alive, [str(word) for word in argv])
    # 103 images; who counts an output holds it until the next one comes.
    assert last == [6, 5, 4, 3, 2, 1, 1]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
def test_model_kinds(ranks, kind):
    """What crosses a stage boundary beside the tokens: keys, learned rotary frequencies with their gradient."""
    name, extra = KINDS[kind]
    kwargs = {**TINY, **extra}
    argv = [*BASE, "--dataset", "digits", "--model", name, *oracle.kwargs_words(kwargs), "--drop-path", 0.1]
    argv += ["--max-steps", 3, "--val-split", ""]
    reference = train_in(ranks, 1, [*argv, "-b", 8])
    rows = train_in(ranks, 2, [*argv, "--pp", 2, "-b", 2, "--grad-accum-steps", 4, "--grad-checkpointing"])
    assert_same_curve(reference, rows, rtol=RTOL)


@pytest.mark.parametrize("micro", [1, 2])
def test_embedding_alone_on_a_stage(ranks, micro):
    """With one image a micro-batch the gradient of position table and class token is a view of what was received."""
    argv = [*BASE, "--dataset", "digits", "--max-steps", 2, "--val-split", ""]
    reference = train_in(ranks, 1, [*argv, "-b", 8])
    staged = ["--pp", 2, "--pp-partition", f"0,1,{TINY['depth'] + 2}", "-b", micro, "--grad-accum-steps", 8 // micro]
    assert_same_curve(reference, train_in(ranks, 2, [*argv, *staged]), rtol=RTOL)


def test_the_cut_of_the_fastest_step(ranks, tmp_path):
    """A flag that changes nothing, a cut that trains otherwise, or that the stages do not agree on."""
    # What is frozen has no backward pass, which the balanced cut does not know: it leaves stage 0 nothing to train.
    frozen = ["--freeze", "patch_embed", "pos_embed", "cls_token", "blocks.0"]
    argv = [*BASE, "--dataset", "digits", "--max-steps", 2, "--val-split", "", *frozen]
    staged = [*argv, "-b", 2, "--grad-accum-steps", 4, "--pp", 2]
    with pytest.raises(ValueError, match=r"stage 0 .*has nothing to train"):
        prepared(staged, 2)
    plan = prepared([*staged, "--pp-partition", "auto"], 2)
    assert plan.model.bounds == (0, 3, 5)
    assert any("--pp-partition auto: 0,3,5, a step" in note for note in plan.model.notes)
    reference = train_in(ranks, 1, [*argv, "-b", 8])
    assert_same_curve(reference, train_in(ranks, 2, [*staged, "--pp-partition", "auto"]), rtol=RTOL)


def prepared(argv, world):
    """The plan of the first rank of so many."""
    config, explicit = parse([str(word) for word in argv])
    return resolve_run(config, explicit, Process("env", 0, world, 0, world), on_cpu=True)


@pytest.mark.parametrize("precision", ["bf16", "autocast"])
def test_bf16_pipeline_stays_with_bf16_alone(ranks, tmp_path, precision):
    """The deviation of a 16-bit pipeline from one 16-bit rank is rounding: below 0.2 %."""
    blocks = {
        "bf16": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
        "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    }
    data = json.loads((CONFIGS / "cpu_zero1_fp32.json").read_text()) | blocks[precision]
    path = tmp_path / "config.json"
    path.write_text(json.dumps(data))
    argv = [*BASE, "--dataset", "digits", "--max-steps", 6, "--val-split", "", "--deepspeed_config", path]
    alone = train_in(ranks, 1, [*argv, "-b", 8, "--grad-accum-steps", 2])
    staged = train_in(ranks, 2, [*argv, "--pp", 2, "-b", 8, "--grad-accum-steps", 2])
    assert_same_curve(alone, staged, rtol=2e-3, keys=("loss",))


def test_monitor_in_a_pipeline(ranks, tmp_path):
    """Evaluating with a monitor on crashes DeepSpeed's rank 0, which has no output to log."""
    monitor = {"enabled": True, "output_path": str(tmp_path / "csv"), "job_name": "job"}
    data = json.loads((CONFIGS / "cpu_zero1_fp32.json").read_text()) | {"csv_monitor": monitor}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(data))
    argv = [*BASE, "--dataset", "digits", "--max-steps", 2, "--pp", 2, "-b", 8, "--deepspeed_config", path]
    rows = train_in(ranks, 2, argv)
    assert [row["images"] for row in evals(rows)] == [355]
    assert (tmp_path / "csv" / "job" / "eval_top1.csv").exists()


def test_weights_of_all_stages_are_saved(ranks, tmp_path):
    """A stage's weights missing from model.safetensors; another layout must evaluate them to the same accuracy."""
    data = ["--dataset", "digits", "-b", 8]
    argv = [*BASE, *data, "--max-steps", 2]
    train_in(ranks, 4, [*argv, "--pp", 2, "--output", tmp_path / "run"])
    weights = ["--initial-checkpoint", tmp_path / "run" / "model.safetensors"]
    [again] = train_in(ranks, 1, [*MODEL, *data, *weights, "--eval-only"])
    last = read_rows(tmp_path / "run")[-1]
    assert (again["top1"], again["images"]) == (last["top1"], last["images"])
    assert again["loss"] == pytest.approx(last["loss"], rel=RTOL)


ILLEGAL = {
    "--pp 2 --deepspeed_config cpu_zero2_fp32.json": "ZeRO stage 2 does not work with --pp 2",
    "--pp 2 --deepspeed_config cpu_zero3_fp32.json": "use stage 1, or --pp 1",
    "--pp 6": "5 layers cannot be split into --pp 6 stages; --pp may be 1 to 5",
    "--pp 4": "6 ranks cannot be cut into --pp 4",
    "--pp 2 --pp-partition 0,9": "--pp 2 needs 3 rising numbers from 0 to the model's 5 layers",
    "--pp 2 --pp-partition a,b": "'a,b' is not a list of whole numbers",
    "--pp 2 --linear-probe --pp-partition auto": "has nothing to train",
    "--pp 2 --linear-probe": "pipeline stage 0 (layers 0 to 1) has nothing to train",
    "--pp-partition 0,5": "--pp-partition has no effect without --pp",
    "--check-replicas 1 --deepspeed_config cpu_zero3_fp32.json": "at ZeRO stage 3, where every weight exists once",
}


@pytest.mark.parametrize("words", ILLEGAL)
def test_illegal_combinations(capsys, monkeypatch, tmp_path, words):
    """One message with the numbers and the nearest legal choice, before a process group exists."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "6"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "6")):
        monkeypatch.setenv(name, value)
    asked = [str(CONFIGS / w) if w.endswith(".json") else w for w in words.split()]
    argv = [str(a) for a in [*BASE, "--dataset", "digits", "-b", 4, "--output", tmp_path / "run", *asked]]
    if words == "--pp 6":
        argv += ["--grad-accum-steps", "1"]
    assert main(argv) == 2
    line = capsys.readouterr().err.strip()
    assert ILLEGAL[words] in line
    assert "\n" not in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("key", ["wall_clock_breakdown", "flops_profiler"])
def test_timers_that_crash_a_pipeline_are_refused(capsys, monkeypatch, tmp_path, key):
    """DeepSpeed 0.19.8 dies with "bwd_microstep timer has already been started"."""
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    value = True if key == "wall_clock_breakdown" else {"enabled": True}
    data = json.loads((CONFIGS / "cpu_zero1_fp32.json").read_text()) | {key: value}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(data))
    argv = [*BASE, "--dataset", "digits", "-b", 4, "--pp", 2, "--deepspeed_config", path]
    assert main([str(a) for a in argv]) == 2
    assert f'"{key}" crashes DeepSpeed 0.19.8 with --pp 2' in capsys.readouterr().err


def test_bubble_is_said(ranks, tmp_path):
    """Accumulation smaller than pp runs, with one line that gives the bubble."""
    from runs import run_quietly

    argv = [*BASE, "--dataset", "digits", "-b", 4, "--pp", 3, "--max-steps", 2, "--val-split", ""]
    said = ranks.run(3, run_quietly, [str(a) for a in [*argv, "--output", tmp_path / "run"]])
    assert [code for code, _, _ in said] == [0, 0, 0]
    assert "pipeline: 1 micro-batches through 3 stages, bubble 67% of a step" in said[0][1]


@pytest.mark.parametrize("stage", [0, 2])
def test_check_replicas_finds_one_bit(ranks, tmp_path, stage):
    """A replica that differs in one unit in the last place must stop the run, by name, on every rank."""
    config = CONFIGS / f"cpu_zero{stage}_fp32.json"
    argv = [
        *BASE,
        "--dataset",
        "digits",
        "-b",
        4,
        "--max-steps",
        4,
        "--check-replicas",
        1,
        "--deepspeed_config",
        config,
    ]
    said = ranks.run(2, drift, [str(a) for a in [*argv, "--output", tmp_path / "run"]], 1)
    assert [code for code, _ in said] == [exit_codes.DRIFTED] * 2
    assert "at step 2" in said[0][1]
    assert "(data-parallel ranks)" in said[0][1]
    assert not (tmp_path / "run" / "model.safetensors").exists()
