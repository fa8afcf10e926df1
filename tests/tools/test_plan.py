"""`ds-vit plan`: legal layouts ranked, illegal wishes answered with the nearest legal one, files that a run takes."""

from __future__ import annotations

import argparse
import json
import math
import shlex

import pytest
import torch
import yaml
from project import ROOT

from ds_vit.cli import main
from ds_vit.config import parse
from ds_vit.launching.process import Process
from ds_vit.models import ModelSpec, activations, count_flops, create_model, flops
from ds_vit.models.large_sizes import SIZES
from ds_vit.planner import hardware, work
from ds_vit.tools import plan as plan_tool
from ds_vit.tools import plan_files
from ds_vit.training.memory import estimate
from ds_vit.training.plan import prepare

BASE = ["plan", "--model", "vit_base_patch16_224", "--gpus", "16", "--gpu", "a100"]


def planned(capsys, *words):
    """What --json says."""
    assert main([*BASE, *map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


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


def test_a_deep_model_is_looked_at_through_few_blocks(capsys, monkeypatch):
    # Catches: FLOPs that forget a block, and time that grows with blocks which are all alike.
    depths, looked_at = [], flops.look_at_each
    for module in (flops, activations, work):
        monkeypatch.setattr(
            module,
            "look_at_each",
            lambda model, layers, *a, **k: depths.append(len(layers)) or looked_at(model, layers, *a, **k),
        )
    found = planned(capsys, "--model-kwargs", "depth=20")
    assert max(depths) == 3 + 2
    spec = ModelSpec("vit_base_patch16_224", num_classes=1000, model_kwargs={"depth": 20})
    assert found["training_flops_an_image"] == count_flops(create_model(spec)).training


def test_the_table_says_why(capsys):
    # Catches: a plan that gives figures and no reason.
    assert main([*BASE[:3], "--gpus", "8", "--model", "vit_10b_patch14_224", "--gpu", "h100"]) == 0
    said = capsys.readouterr().out
    assert "next best: " in said
    assert "--workers " in said
    assert "too large by the least: " in said
    assert "too much" in said


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--tp", "5"), "--tp 5 cannot be had: .* the nearest is --tp 4"),
        (("--pp", "7"), "--pp 7 cannot be had: .* the nearest is --pp 8"),
        (("--gpu", "h20000"), "--gpu h20000: there is no such one; the nearest is h200 "),
        (("--link", "ib40"), "the nearest is ib400 "),
        (("--gpus-per-node", "0"), "--gpus-per-node 0: a host has at least 1"),
        (("--gpus-per-node", "-8", "--goodput"), "--gpus-per-node -8: a host has at least 1"),
        (("--gpus", "24", "--tp", "3"), "--tp 3 cannot be had: .* stay inside a host of 8"),
        (("--recipe", "launch/recipes/mae_digits.yaml"), "its task is mae, and plans are made for classification"),
        (("--gpus", "20"), "no whole number of hosts of 8; the nearest is 16"),
        (("--global-batch", "1001", "--pp", "1", "--tp", "1"), "cannot be shared by 16 replicas; the nearest .* 1008"),
        (("--pp", "2", "--zero", "3"), "--pp 2 goes with ZeRO-1, not with ZeRO-3"),
        (("--gpus", "8", "--model", "vit_120b_patch14_224"), "no layout fits on 8 x NVIDIA A100.*try --gpus 32,"),
        (("--model", "vit_21b_patch14_224"), "nearest: .*vit_22b_patch14_224"),
    ],
)
def test_illegal_wishes(capsys, words, message):
    # Catches: a traceback, a wish that is passed over, an answer without a way out.
    assert main([*BASE, *words]) == 2
    error = capsys.readouterr().err
    import re

    assert re.search(message, error), error


def test_its_own_file_of_figures(capsys, tmp_path):
    # Catches: a path that is taken for a name; a figure that is missing and guessed.
    text = (hardware._DATA / "accelerators" / "a100.yaml").read_text()
    path = tmp_path / "mine.yaml"
    path.write_text(text.replace("value: 312,", "value: 624,"))
    slow, fast = planned(capsys)["layouts"][0], planned(capsys, "--gpu", path)["layouts"][0]
    assert slow["images_per_second"] < fast["images_per_second"]
    path.write_text(text.replace("gpus_per_node: {value: 8,", "gpus_per_node: {value: 0,"))
    assert main([*BASE, "--gpu", str(path)]) == 2
    assert "gpus_per_node is 0; a host has at least 1" in capsys.readouterr().err
    path.write_text("name: mine\n")
    assert main([*BASE, "--gpu", str(path)]) == 2
    assert "does not say memory_bytes, " in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["accelerators", "links"])
def test_every_figure_has_its_source(kind):
    # Catches: a number from nowhere.
    load = hardware.accelerator if kind == "accelerators" else hardware.link
    for name in hardware.names(kind):
        figures = set(vars(load(name))) - {"name"}
        assert figures <= {key for key, source in hardware.sources(kind, name).items() if source}


# GPUs (H200) on which a size has a plan.
FEASIBLE = {"vit_base_patch16_224": 1, "vit_giant_patch14_224": 1} | {
    name: 8 if int("".join(filter(str.isdigit, name.split("_")[1])) or 4) <= 25 else 64 for name in SIZES
}


@pytest.mark.parametrize(
    "name",
    [
        n if n in ("vit_22b_patch14_224", "vit_120b_patch14_224") else pytest.param(n, marks=pytest.mark.slow)
        for n in FEASIBLE
    ],
)
def test_every_size_has_a_plan(capsys, name):
    # Catches: a size that nothing could train.
    found = planned(capsys, "--model", name, "--gpus", FEASIBLE[name], "--gpu", "h200")
    assert found["layouts"]


def test_what_is_written_starts(capsys, tmp_path):
    # Catches: a JSON or flags that our own dry run refuses, and a memory that it sees otherwise: one source of truth.
    folder = tmp_path / "plan"
    words = ("--global-batch", 64, "--pp", 2, "--img-size", 32, "--num-classes", 10, "--write", folder)
    [best, *_] = planned(capsys, "--gpus", 4, "--gpus-per-node", 4, *words)["layouts"]
    assert (folder / "hostfile").read_text() == "node1 slots=4\n"
    script = (folder / "command.sh").read_text()
    line = next(line for line in script.splitlines() if line.startswith("RANK=0"))
    given = shlex.split(line.partition("train.py ")[2].partition(' "$@"')[0])
    argv = [*given, "--dataset", "digits", "--max-steps", "2", "--warmup-steps", "0", "--workers", "0"]
    config, explicit = parse(argv)
    plan = prepare(config, explicit, Process("env", 0, 4, 0, 4), on_cpu=False)
    assert plan.data.batch.global_batch == 64
    assert list(plan.model.bounds) == best["bounds"]
    fullest = max(estimate(plan), key=lambda memory: memory.together)
    assert fullest.together == pytest.approx(best["memory"]["together"], rel=1e-3)


RECIPES = [p for p in sorted((ROOT / "launch" / "recipes").glob("*.yaml")) if "task: mae" not in p.read_text()]
JSONS = sorted((ROOT / "ds_configs").glob("*auto*.json"))


def arguments_of(*words):
    """Of `ds-vit plan`."""
    parser = argparse.ArgumentParser()
    plan_tool.add_arguments(parser)
    return parser.parse_args([str(word) for word in words])


@pytest.mark.parametrize("path", [*RECIPES, *JSONS], ids=lambda path: path.name)
def test_what_is_shipped_can_be_planned(path):
    # Catches: an "auto" that reaches the optimizer or the memory's arithmetic.
    words = ["--gpus", 2, "--tp", 1, "--pp", 1, "--zero", 1, "--global-batch", 2]
    if path.suffix == ".json":
        words += ["--model", "vit_tiny_patch16_224", "--model-kwargs", "depth=1", "--deepspeed_config", path]
    arguments = arguments_of(*words, *(["--recipe", path] if path.suffix == ".yaml" else []))
    plan_tool.with_recipe(arguments)
    assert plan_tool.Search(plan_tool.wishes_of(arguments)).run().fitting


def test_a_recipe_is_read_as_training_reads_it(tmp_path, monkeypatch):
    # Catches: dashes in keys, a shipped file named from another folder, degrees of the recipe that win over the plan's.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text(
        "model: vit_tiny_patch16_224\nimg-size: 32\ndeepspeed-config: ds_configs/zero1_bf16_auto.json\n"
        "pp: 2\ntp: 3\ngrad-checkpointing: true\n"
    )
    arguments = arguments_of("--gpus", 2, "--recipe", "mine.yaml", "--pp", 1, "--tp", 1, "--global-batch", 2)
    plan_tool.with_recipe(arguments)
    assert arguments.img_size == 32
    found = plan_tool.Search(plan_tool.wishes_of(arguments)).run()
    best = next(one for one in found.fitting if not one.recomputing)
    plan_files.write(found, best, tmp_path / "plan", arguments)
    config, _ = parse([*plan_files.training_words(best, tmp_path / "plan", arguments), "--dataset", "digits"])
    assert (config.pp, config.tp, config.grad_checkpointing) == (1, 1, "")


def test_calibrated_figures_can_be_planned_with(capsys, tmp_path):
    # Catches: a file that --gpu does not take, a rate of the wrong thing.
    from ds_vit.tools.calibrate import calibrate

    path = tmp_path / "mine.yaml"
    found = calibrate(path, torch.device("cpu"), widths=(32, 64), turns=1)
    assert 0 < found["memory_bytes_per_second"] < 1e12
    assert found["elementwise_efficiency"] > 0
    assert 1 < found["images_per_worker"] < 1e5
    assert max(found["matmul_efficiency"].values()) == 1.0
    told = yaml.safe_load(path.read_text())
    assert told["gpus_per_node"]["value"] == 1
    measured = {key for key, one in told.items() if key != "name" and one["source"].startswith("measured")}
    assert not measured & {"watts", "inside", "reserved_bytes", "hidden_share"}
    words = ["plan", "--model", "vit_tiny_patch16_224", "--gpus", "1", "--gpu", str(path), "--global-batch", "16"]
    capsys.readouterr()  # DeepSpeed says what accelerator it takes
    assert main([*words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["layouts"]


def calibrate_here(path):
    from ds_vit.tools.calibrate import calibrate

    return calibrate(path, torch.device("cpu"), widths=(64,), turns=1)


def test_ranks_calibrate_together_and_measure_what_joins_them(ranks, tmp_path, monkeypatch):
    # Catches: figures of one rank taken for all, a link file that is not found from another folder.
    path = tmp_path / "two.yaml"
    one, other = ranks.run(2, calibrate_here, path)
    assert one == other
    monkeypatch.chdir("/")
    found = hardware.accelerator(str(path))
    assert found.gpus_per_node == 2
    joined = hardware.link(found.inside)
    assert 1e6 < joined.bytes_per_second < 1e12
    assert 0 < joined.latency_seconds < 1


@pytest.mark.parametrize(
    ("path", "environ", "told"),
    [
        ("mine.json", {}, "ends in .yaml"),
        ("/proc/nowhere/mine.yaml", {}, "No such file"),
        (
            "mine.yaml",
            {"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"},
            "4 ranks, 2 of them",
        ),
    ],
)
def test_what_cannot_be_calibrated_is_said_before(capsys, tmp_path, monkeypatch, path, environ, told):
    # Catches: minutes of measuring whose figures nobody can use.
    monkeypatch.chdir(tmp_path)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert main(["plan", "--calibrate", path]) == 2
    assert told in capsys.readouterr().err


def test_the_line_through_the_times_of_messages():
    # Catches: a fit that the largest message decides alone.
    from ds_vit.tools.calibrate import _line

    slope, wait = _line([(size, 1e-4 + size * 2e-9) for size in (2**12, 2**18, 2**24)])
    assert (slope, wait) == pytest.approx((2e-9, 1e-4))


def test_pictures(capsys, tmp_path):
    # Catches: a picture that cannot be drawn.
    pytest.importorskip("matplotlib")
    path, other = tmp_path / "plan.png", tmp_path / "goodput.svg"
    assert main([*BASE, "--pp", "2", "--output", str(path)]) == 0
    assert main(["plan", "--gpus", "1024", "--goodput", "--output", str(other)]) == 0
    assert path.stat().st_size > 5000
    assert other.stat().st_size > 5000
    assert "Daly" in capsys.readouterr().out
