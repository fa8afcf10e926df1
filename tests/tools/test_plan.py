"""`ds-vit plan`: legal layouts ranked, illegal wishes answered with the nearest legal one, files that a run takes."""

from __future__ import annotations

import json
import math
import re
import shlex
from pathlib import Path

import pytest
import yaml
from project import ROOT
from vits import write_teacher

from ds_vit.cli import main
from ds_vit.config.parser import parse
from ds_vit.launching.process import Process
from ds_vit.models.large_sizes import SIZES
from ds_vit.models.zoo import ModelSpec, create_model
from ds_vit.planner import counting, hardware
from ds_vit.training.cost import Cost
from ds_vit.training.resolve import resolve
from ds_vit.training.run import World

BASE = ["plan", "--model", "vit_base_patch16_224", "--gpus", "16", "--gpu", "a100"]


def planned(capsys, *words, base=BASE):
    """What --json says."""
    capsys.readouterr()  # DeepSpeed says what accelerator it takes
    assert main([*base, *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def training_of(folder, *more, data="digits"):
    """The settings of the training that --write has written a script of."""
    line = next(line for line in (folder / "command.sh").read_text().splitlines() if line.startswith("RANK=0"))
    words = shlex.split(line.partition("train.py ")[2].partition(' "$@"')[0])
    words += ["--dataset", data, "--max-steps", "2", "--warmup-steps", "0", "--workers", "0", *map(str, more)]
    return parse(words)


def test_layouts_are_ranked_and_legal(capsys):
    # Catches: a rank that no GPU has, a batch that is not the one asked for, a ranking the wrong way round.
    found = planned(capsys, "--global-batch", 2048, "--price", 2)
    rates = [one["images_per_second"] for one in found["layouts"]]
    for one in found["layouts"]:  # enough workers for a replica, and not one too many
        a_replica = one["images_per_second"] / one["layout"]["dp"] / hardware.accelerator("h200").images_per_worker
        assert one["workers"] - 1 < a_replica <= one["workers"]
    assert rates == sorted(rates, reverse=True)
    for one in found["layouts"]:
        layout = one["layout"]
        assert math.prod(layout.values()) == 16
        assert one["micro_batch"] * one["accumulation"] * layout["dp"] == 2048
        assert 12 % layout["tp"] == 0
        assert layout["tp"] <= 8
        assert one["zero_stage"] == 1 or layout["pp"] == 1
        assert one["memory"]["together"] <= one["memory"]["room"]
        assert 0 < one["mfu"] < 1
        assert one["cost"] == pytest.approx(2 * 24 * 16 * one["days"])
        assert sum(v for k, v in one["seconds"].items() if k not in ("step", "hidden")) == pytest.approx(
            one["seconds"]["step"]
        )


def test_blocks_that_are_alike_are_counted_once(capsys, monkeypatch):
    # Catches: FLOPs that forget a block, and time that grows with blocks which are all alike.
    counted, count_each = [], counting.count_each

    def watched(layers, count, **named):
        counted.append(0)

        def count_one(layer, value):
            counted[-1] += 1
            return count(layer, value)

        return count_each(layers, count_one, **named)

    monkeypatch.setattr(counting, "count_each", watched)
    found = planned(capsys, "--model-kwargs", "depth=20")
    assert max(counted) <= 4  # the embedding, a block, the last one with its class token only, the head
    spec = ModelSpec("vit_base_patch16_224", num_classes=1000, model_kwargs={"depth": 20})
    assert found["training_flops_an_image"] == counting.count_flops(create_model(spec)).training


def test_the_notes_below_the_table(capsys):
    # Catches: a plan that gives figures and not what they depend on.
    assert main([*BASE[:3], "--gpus", "8", "--model", "vit_10b_patch14_224", "--gpu", "h100"]) == 0
    said = capsys.readouterr().out
    for part in ("memory of the best: ", "--workers ", "closest of those that do not fit: ", "too much"):
        assert part in said


def test_matrices_that_are_not_multiples_of_8_are_named(capsys):
    # Catches: a shard of 4,304 / 8 hidden features that is not named; aligned shards that are.
    model = ("--model", "vit_so400m_patch14_siglip_224", "--gpus", "8", "--gpu", "h100", "--pp", "1")
    assert main([*BASE[:3], *model, "--tp", "8"]) == 0
    assert "16-bit products: blocks.mlp.fc1 538 x 1152, blocks.mlp.fc2 1152 x 538" in capsys.readouterr().out
    assert main([*BASE[:3], *model, "--tp", "2"]) == 0
    assert "matrix sizes" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--tp", "5"), "--tp 5 .*--tp 4"),
        (("--pp", "7"), "--pp 7 .*--pp 8"),
        (("--gpu", "h20000"), "--gpu h20000 .*h200 "),
        (("--link", "ib40"), "the nearest is ib400 "),
        (("--gpus-per-node", "0"), "--gpus-per-node: must be at least 1, not 0"),
        (("--gpus", "24", "--tp", "3"), "--tp 3 .*host of 8"),
        (("--recipe", "launch/recipes/mae_digits.yaml", "--tp", "2"), "mae.*--tp 1 only"),
        (("--gpus", "20"), "no whole number of hosts of 8; the nearest is 16"),
        (("--global-batch", "1001", "--pp", "1", "--tp", "1"), "cannot be shared by 16 replicas; the nearest .* 1008"),
        (("--pp", "2", "--zero", "3"), "--pp 2 .*ZeRO-1.*ZeRO-3"),
        (("--deepspeed_config", "ds_configs/zero1_bf16.json", "--zero", "0"), "ds_configs/zero1_bf16.json.*stage 0"),
        (("--gpus", "8", "--model", "vit_120b_patch14_224"), "no layout fits on 8 x NVIDIA A100.*try --gpus 32,"),
        (("--model", "vit_21b_patch14_224"), "nearest are .*vit_22b_patch14_224"),
        (("--calibrate=mine.yaml",), "plan --calibrate was removed; docs/benchmarks/calibrate.py"),
    ],
)
def test_invalid_flags_name_the_nearest_valid(capsys, words, message):
    # Catches: a traceback, a flag that is ignored, an error without a way out.
    assert main([*BASE, *words]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_its_own_file_of_figures(capsys, tmp_path):
    # Catches: a path that is taken for a name; a figure that is missing and guessed.
    text = (hardware._DATA / "accelerators" / "a100.yaml").read_text()
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace("value: 312,", "value: 624,"))
    slow, fast = planned(capsys)["layouts"][0], planned(capsys, "--gpu", path)["layouts"][0]
    assert slow["images_per_second"] < fast["images_per_second"]
    path.write_text(text.replace("gpus_per_node: {value: 8,", "gpus_per_node: {value: 0,"))
    assert main([*BASE, "--gpu", str(path)]) == 2
    assert "gpus_per_node: Input should be greater than or equal to 1" in capsys.readouterr().err
    path.write_text("name: mine\n")
    assert main([*BASE, "--gpu", str(path)]) == 2
    assert "memory_bytes: Field required" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["accelerators", "links"])
def test_every_figure_has_its_source(kind):
    # Catches: a number from nowhere, and a file that does not load.
    load = hardware.accelerator if kind == "accelerators" else hardware.link
    for name in hardware.names(kind):
        load(name)
        table = yaml.safe_load((hardware._DATA / kind / f"{name}.yaml").read_text())
        assert all(key == "name" or figure["source"] for key, figure in table.items())


# GPUs (H200) on which a size has a plan.
FEASIBLE = {"vit_base_patch16_224": 1, "vit_giant_patch14_224": 1} | {
    name: 8 if int("".join(filter(str.isdigit, name.split("_")[1])) or 4) <= 25 else 64 for name in SIZES
}


@pytest.mark.sampled(8)
@pytest.mark.parametrize("name", FEASIBLE)
def test_every_size_has_a_plan(capsys, name):
    # Catches: a size that nothing could train.
    found = planned(capsys, "--model", name, "--gpus", FEASIBLE[name], "--gpu", "h200")
    assert found["layouts"]


def test_what_is_written_starts(capsys, tmp_path, monkeypatch):
    # Catches: a JSON or flags that our own dry run refuses, and a memory that it sees otherwise: one source of truth;
    # a command that starts in the clone's folder only, or in the folder of the plan.
    monkeypatch.chdir(tmp_path)
    folder = Path("plan")
    words = ("--global-batch", 64, "--pp", 2, "--img-size", 32, "--num-classes", 10, "--write", folder)
    [best, *_] = planned(capsys, "--gpus", 4, "--gpus-per-node", 4, *words)["layouts"]
    assert (folder / "hostfile").read_text() == "node1 slots=4\n"
    monkeypatch.chdir("/")
    folder = tmp_path / folder
    for line in (folder / "command.sh").read_text().splitlines()[-2:]:
        paths = [Path(word) for word in shlex.split(line) if "/" in word]
        assert len(paths) >= 3
        assert all(path.is_absolute() and path.is_file() for path in paths), paths
    plan = resolve(training_of(folder), World(Process("env", 0, 4, 0, 4), on_cpu=False))
    assert plan.batch.global_batch == 64
    assert list(plan.model.bounds) == best["bounds"]
    fullest = Cost(plan).fullest(plan.batch)
    assert fullest.together == pytest.approx(best["memory"]["together"], rel=1e-3)


RECIPES = [p for p in sorted((ROOT / "launch" / "recipes").glob("*.yaml")) if "\ntask: " not in p.read_text()]
JSONS = sorted((ROOT / "ds_configs").glob("*auto*.json"))


@pytest.mark.sampled(8)
@pytest.mark.parametrize("path", [*RECIPES, *JSONS], ids=lambda path: path.name)
def test_what_is_shipped_can_be_planned(capsys, path):
    # Catches: an "auto" that reaches the optimizer or the memory's arithmetic.
    words = ["--gpus", 2, "--tp", 1, "--pp", 1, "--zero", 1, "--global-batch", 2]
    if path.suffix == ".json":
        words += ["--model", "vit_tiny_patch16_224", "--model-kwargs", "depth=1"]
    flag = {".json": "--deepspeed_config", ".yaml": "--recipe"}[path.suffix]
    assert planned(capsys, *words, flag, path, base=["plan"])["layouts"]


def test_a_recipe_is_read_as_training_reads_it(capsys, tmp_path, monkeypatch):
    # Catches: dashes in keys, a shipped file named from another folder, degrees of the recipe that win over the plan's.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(
        "model: vit_tiny_patch16_224\nimg-size: 32\ndeepspeed-config: ds_configs/zero1_bf16_auto.json\n"
        "pp: 2\ntp: 3\ngrad-checkpointing: true\nnum-classes: 5\n"
        "compile: true\ntf32: true\ndata-dir: /there\nauto-batch: true\n"  # of the machine and the data
    )
    words = ("--gpus", 2, "--recipe", "mine.yaml", "--pp", 1, "--tp", 1, "--global-batch", 2, "--write", "plan")
    assert planned(capsys, *words, base=["plan"])["layouts"][0]["recomputing"] == ""
    config = training_of(tmp_path / "plan")
    assert (config.pp, config.tp, config.grad_checkpointing, config.img_size) == (1, 1, "", 32)


def test_days_are_those_of_the_data_set(capsys):
    """ImageNet's number of images for a recipe of another data set."""
    words = ["plan", "--gpus", "2", "--gpu", "a100", "--global-batch", "64", "--recipe", "launch/recipes/digits.yaml"]
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "1,281,167" not in said
    assert "MWh ┃" not in said
    assert "--images N says how many it has" in said
    [first, *_] = planned(capsys, "--images", 1442, base=words)["layouts"]
    assert first["days"] * 86400 == pytest.approx(40 * 1442 / first["images_per_second"])
    assert main([*words, "--images", "1442"]) == 0
    assert "40 epochs of 1,442 images" in capsys.readouterr().out


SMALL = (
    "model: vit_tiny_patch16_224\nimg_size: 16\nmodel_kwargs: {patch_size: 4, embed_dim: 64, depth: 2, num_heads: 2}\n"
)
PAIRS = "text_width: 24\ntext_depth: 1\ntext_heads: 2\ncontext_length: 16\nembed_dim: 16\n"
TASKS = {
    "clip": PAIRS,
    "siglip": PAIRS,
    "mae": "decoder_dim: 48\ndecoder_depth: 1\ndecoder_heads: 4\n",
    "dino": "local_crops_size: 8\nprototypes: 64\nhead_hidden_dim: 8\nhead_bottleneck_dim: 16\nlocal_crops_number: 2\n",
    "classification": "kd_model_name: local-dir:TEACHER\n",
}


@pytest.mark.sampled(4)
@pytest.mark.parametrize("task", TASKS)
def test_every_task_is_planned_by_the_memory_of_its_run(capsys, tmp_path, task):
    # Catches: towers, a teacher or the held inputs of a coupled step left out of a plan, and a plan that cannot start.
    write_teacher(tmp_path / "teacher", 1000, patch_size=4, embed_dim=96, depth=2, num_heads=2, img_size=16)
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"task: {task}\n{SMALL}{TASKS[task]}".replace("TEACHER", str(tmp_path / "teacher")))
    words = ("--recipe", recipe, "--gpus", 2, "--gpus-per-node", 2, "--global-batch", 16, "--write", tmp_path / "plan")
    [best, *others] = planned(capsys, *words, base=["plan"])["layouts"]
    assert {one["zero_stage"] for one in [best, *others]} == {1, 2, 3}
    classes = ("--num-classes", 1000) if task == "classification" else ()
    config = training_of(tmp_path / "plan", *classes, data="glyphs" if task in ("clip", "siglip") else "digits")
    run = resolve(config, World(Process("env", 0, 2, 0, 2), on_cpu=False))
    fullest = Cost(run).fullest(run.batch)
    assert fullest.together == pytest.approx(best["memory"]["together"], rel=1e-3)
    assert main([str(word) for word in ("plan", *words, "--pp", 2)]) == 2
    assert f"--task {task} is planned with --pp 1 --tp 1 only" in capsys.readouterr().err
