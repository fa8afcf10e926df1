"""The scripts of docs/benchmarks run with what the quickstart installs, and say how they are called."""

import importlib
import json
import os
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import simulated_device
import torch
import torch.distributed as dist
from picture_folders import smooth_photo
from project import ROOT

from ds_vit.config import load_recipe
from ds_vit.config.parser import build_parser, read_words
from ds_vit.config.timm_command import translate
from ds_vit.config.timm_flags import split_words
from ds_vit.launching.process import Process
from ds_vit.tools.bench import resolve_engine
from ds_vit.tools.peers import check_comparable

FOLDER = ROOT / "docs" / "benchmarks"
# What only the extras install.
WITHOUT = ("pytest", "hypothesis", "transformers", "onnx", "onnxruntime", "matplotlib")
RUNNER = """
import contextlib, io, json, runpy, sys
sys.modules.update(dict.fromkeys({without}))
sys.path[0] = {folder!r}
del sys.argv[0]
"""
START = RUNNER + "runpy.run_path(sys.argv[0], run_name='__main__')"
# All in one process, which imports torch once.
HELP = (
    RUNNER
    + """
said = {{}}
for script in list(sys.argv):
    sys.argv, out = [script, "--help"], io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        runpy.run_path(script, run_name="__main__")
    said[script] = out.getvalue()
print(json.dumps(said))
"""
)


def run(script, *words, code=START):
    """A script in a process that has no test extras."""
    code = code.format(without=WITHOUT, folder=str(FOLDER))
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "DS_ACCELERATOR": "cpu"}
    words = [sys.executable, "-c", code, str(script), *map(str, words)]
    return subprocess.run(words, env=environ, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_help():
    # Catches: minutes of measuring for somebody who asked what it does, and a package that only tests need.
    scripts = sorted(FOLDER.glob("*.py"))
    asked = run(*scripts, code=HELP)
    assert asked.returncode == 0, asked.stderr
    said = json.loads(asked.stdout)
    for script in scripts:
        assert said[str(script)].startswith(f"usage: {script.name}")
        assert f"python docs/benchmarks/{script.name}" in said[str(script)]


@pytest.mark.slow
def test_a_script_measures():
    # Catches: a call into the package that has another name by now.
    done = run(FOLDER / "optimizer_step.py", "--rounds", "2", "--model", "test_vit")
    assert done.returncode == 0, done.stderr
    assert "| timm's Lamb |" in done.stdout


@pytest.mark.exhaustive
def test_planned_rates_are_those_of_the_page():
    # Catches: tables of docs/planning.md that are of an earlier planner.
    done = run(FOLDER / "planned_rates.py")
    assert done.returncode == 0, done.stderr
    page = (ROOT / "docs" / "planning.md").read_text().splitlines()
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ") and "---" not in line]
    assert len(rows) == 1 + 5 + 3
    for row in rows:
        [of_page] = {
            line for line in page if line.split("|")[:2] == row.split("|")[:2] and line.count("|") == row.count("|")
        }
        # torch's own counts of operations differ by up to 8 % between releases.
        assert figures_of(of_page) == pytest.approx(figures_of(row), rel=0.12), row


def figures_of(row):
    """The numbers of a table's row, without its first column."""
    return [float(word) for cell in row.split("|")[2:] for word in re.findall(r"[\d.]+", cell.replace(",", ""))]


@pytest.mark.exhaustive
def test_planned_times_are_held_against_measured_ones():
    # Catches: a layout that cannot be planned, or trained next to the others; ranks that cannot start without pytest.
    words = ["--model", "test_vit", "--depth", "2", "--img-size", "32", "--turns", "1"]
    done = run(FOLDER / "planned_time.py", *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ZeRO-") == 12
    assert "rank correlation" in done.stdout


@pytest.mark.exhaustive
def test_the_table_of_steps_is_made():
    # Catches: the one command for a GPU's table that fails there first; a side that does not fit and ends it all.
    words = ["--models", "vit_tiny_patch16_224", "--batch-sizes", "2", "4", "--peers", "timm", "megatron", "--img-size"]
    words += ["32", "--turns", "1", "--steps", "1", "--configs", str(ROOT / "ds_configs" / "cpu_zero1_fp32.json")]
    done = run(FOLDER / "step_table.py", *words)
    assert done.returncode == 0, done.stderr
    assert "vit_tiny_patch16_224, 2, cpu_zero1_fp32 against megatron: " in done.stdout
    rows = [line.split() for line in done.stdout.splitlines() if "│" in line]
    assert sum("best" in row for row in rows) == 1
    assert sum("4" in row for row in rows) >= 1


@pytest.mark.slow
def test_decoding_on_the_device_is_timed(tmp_path):
    # Catches: the one command for a GPU that fails there first.
    pytest.importorskip("torchcodec")
    for number in range(6):
        picture = tmp_path / "train" / "ab"[number % 2] / f"{number}.jpg"
        picture.parent.mkdir(parents=True, exist_ok=True)
        smooth_photo(seed=number).save(picture)
    words = ["--data-dir", str(tmp_path), "--device", "cpu", "--workers", "1", "--img-size", "16", "--batch", "3"]
    done = run(FOLDER / "decode_on_device.py", *words, "--images", "6", "--turns", "1", "--models", "test_vit")
    assert done.returncode == 0, done.stderr
    assert "| decoding on the device too | " in done.stdout
    assert "| decoding alone, 3 files at once | images/s |" in done.stdout
    assert "are 0.00 grey levels from Pillow's" in done.stdout
    assert re.search(r"\| decoding and augmentation on cpu, 3 files \| [\d,]+ \|", done.stdout)
    assert re.search(r"\| test_vit \| [\d,]+ \| the [a-z ]+ limits it \| the [a-z ]+ limits it \|", done.stdout)


@pytest.fixture
def ten_epochs(monkeypatch):
    """The script as a module."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("ten_epochs")


def commands_of(ten_epochs):
    """The words of both command lines that follow the program."""
    images, output, timm_train = Path("IMAGES"), Path("RUNS/0"), Path("train.py")
    both = [ten_epochs.command(program, images, output, 0, 10, timm_train) for program in ten_epochs.PROGRAMS]
    return both[0][both[0].index("train.py") + 1 :], both[1][1:]


def flags_of(words):
    """Name → words of a command's flags."""
    flags, stray = split_words(words, build_parser()._option_string_actions)
    assert not stray
    return {name: own for name, (_, own) in flags.items()}


def test_ten_epochs_of_both_programs_have_the_same_flags(ten_epochs):
    # Catches: a comparison of two recipes, and a translation of timm's command that is another run.
    timm, ours = commands_of(ten_epochs)
    of_timm, of_ours = flags_of(timm), flags_of(ours)
    named = {name for one in ten_epochs.DIFFERENCES for name in {**flags_of(one.timm), **flags_of(one.ds_vit)}}
    assert named == {"opt", "deepspeed_config", "set", "sched_on_updates", "mixup_mode", "model_kwargs"}
    named |= {"output", "experiment"}
    assert {k: v for k, v in of_timm.items() if k not in named} == {k: v for k, v in of_ours.items() if k not in named}
    assert set(of_timm["model_kwargs"]) - set(of_ours["model_kwargs"]) == {"img_size=32"}
    translated = translate(["train.py", *timm])
    assert [note.split(":")[1] for note in translated.notes] == [" --sched-on-updates", " --mixup-mode pair"]
    assert translated.json["optimizer"]["type"] == "Lamb"
    words = [word for word in translated.words[translated.words.index("--data-dir") :] if word != "img_size=32"]
    assert flags_of(words) == {k: v for k, v in of_ours.items() if k not in ("deepspeed_config", "set")}


def test_ten_epochs_have_the_flags_of_the_recipe(ten_epochs):
    # Catches: a recipe under DeiT III's name that is another one.
    recipe = load_recipe(ROOT / "launch" / "recipes" / "deit3_small.yaml")
    flags = read_words(build_parser(), commands_of(ten_epochs)[1])
    changed = {"deepspeed_config", "epochs", "warmup_epochs", "aug_repeats"}
    assert {k: flags.get(k) for k in recipe if k not in changed} == {
        k: v for k, v in recipe.items() if k not in changed
    }


STANDS_IN = """
import argparse, pathlib, torch
parser = argparse.ArgumentParser()
for flag in ("--output", "--experiment"):
    parser.add_argument(flag)
def train_one_epoch(device=torch.device("cuda")): return device
def validate(): return None
def main():
    args, _ = parser.parse_known_args()
    assert (args.device, train_one_epoch()) == ("cpu", torch.device("cpu"))
    folder = pathlib.Path(args.output, args.experiment)
    folder.mkdir()
    (folder / "summary.csv").write_text("epoch,eval_top1\\n0,10\\n1,30\\n")
"""


@pytest.mark.exhaustive
def test_ten_epochs_are_measured(tmp_path):
    # Catches: flags that a run rejects; figures of another epoch; a program whose failure is taken for a result.
    for split, number in (("train", 7), ("test", 2)):
        for picture in (f"{split}/{kind}/{one}.jpg" for kind in range(10) for one in range(number)):
            (tmp_path / picture).parent.mkdir(parents=True, exist_ok=True)
            smooth_photo(32, 32, len(picture)).save(tmp_path / picture)
    train = tmp_path / "train.py"
    train.write_text(STANDS_IN)
    words = ["--data-dir", tmp_path, "--folder", tmp_path / "runs", "--result", tmp_path / "x.json", "--epochs", "2"]
    done = run(FOLDER / "ten_epochs.py", "--timm-train", train, "--seeds", "2", *words)
    assert done.returncode == 0, done.stderr
    assert "| top-1, % | 30.0 ± 0.0 | " in done.stdout
    runs = json.loads((tmp_path / "x.json").read_text())["runs"]
    assert [(one["program"], one["seed"]) for one in runs] == [("timm", 0), ("ds_vit", 0), ("ds_vit", 1), ("timm", 1)]
    assert all(one["cpu_seconds"] > 0 and 5e7 < one["peak_bytes"] < 5e9 for one in runs)
    train.write_text("raise SystemExit(3)")
    (tmp_path / "runs" / "timm-1.json").unlink()
    failed = run(FOLDER / "ten_epochs.py", "--timm-train", train, "--seeds", "2", *words)
    assert "timm ended with code 3" in failed.stderr


def test_ten_epochs_of_the_page_are_those_recorded():
    # Catches: tables of docs/from_timm.md that are of other figures.
    written = run(FOLDER / "ten_epochs.py")
    assert written.returncode == 0, written.stderr
    page = (ROOT / "docs" / "from_timm.md").read_text()
    assert written.stdout.strip() in page, "python docs/benchmarks/ten_epochs.py --write"


def gpu_day(out, *parts, **environ):
    """docs/benchmarks/gpu_day.sh in its rehearsal."""
    words = ["bash", str(FOLDER / "gpu_day.sh"), "--rehearse", *parts]
    environ = {**os.environ, "PYTHON": sys.executable, "OUT": str(out), **environ}
    return subprocess.run(words, env=environ, capture_output=True, text=True, timeout=300)


@pytest.fixture
def stand_in(tmp_path):
    """A Python whose part writes half a result, and then ends as the file beside it says."""
    path = tmp_path / "python"
    path.write_text('#!/bin/sh\necho "{}" >"$4"\n. "$0.ends"\n')
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("ends", "why"), [("exit 3", "failed with code 3"), ("exec sleep 60", "ended by its time limit")]
)
def test_a_part_without_a_result_leaves_none_and_runs_again(tmp_path, stand_in, ends, why):
    # Catches: half a result taken for a whole one, a part that keeps the others from theirs, one measured twice.
    out, ending = tmp_path / "out", stand_in.with_suffix(".ends")
    ending.write_text(ends)
    first = gpu_day(out, "decode", "ladder", PYTHON=str(stand_in), LIMIT="1")
    assert first.returncode == 1
    assert why in first.stderr
    assert "without a result: decode ladder" in first.stderr
    assert not [path for path in out.iterdir() if path.suffix != ".log"]
    ending.write_text("exit 0")
    assert gpu_day(out, "decode", PYTHON=str(stand_in)).returncode == 0
    ending.write_text("exit 3")
    third = gpu_day(out, "decode", PYTHON=str(stand_in))
    assert third.returncode == 0, third.stderr
    assert "decode: skipped" in third.stdout


def test_the_time_in_all_is_kept(tmp_path, stand_in):
    # Catches: a script that takes a lent GPU for longer than was said.
    stand_in.with_suffix(".ends").write_text("exec sleep 60")
    begun = time.monotonic()
    done = gpu_day(tmp_path / "out", PYTHON=str(stand_in), BUDGET="2")
    assert time.monotonic() - begun < 30
    assert done.returncode == 1
    assert "plan: not started, the 2 s are spent" in done.stdout


def test_an_unknown_part_is_refused(tmp_path):
    # Catches: a misspelt part that ends a paid hour with nothing measured.
    done = gpu_day(tmp_path, "step")
    assert done.returncode == 2
    assert "no part step; there are: steps nccl tests runs" in done.stderr


# The parts that are left out start programs that other tests start.
@pytest.mark.slow
@pytest.mark.parametrize(
    "parts",
    [
        ("ranks", "steps"),
        pytest.param(("tests", "decode", "plan", "ladder-scaling", "amp", "layout"), marks=pytest.mark.exhaustive),
    ],
    ids=" ".join,
)
def test_parts_are_rehearsed(tmp_path, parts):
    # Catches: the one script for a GPU that fails there first; a rehearsal taken for a measurement.
    if "decode" in parts:
        pytest.importorskip("torchcodec")
    done = gpu_day(tmp_path, *parts)
    assert done.returncode == 0, done.stderr + "".join(path.read_text()[-2000:] for path in tmp_path.glob("*.log"))
    results = {part: json.loads((tmp_path / f"{part}.json").read_text()) for part in parts}
    assert all(result["rehearsal"] for result in results.values())
    if "tests" in parts:
        assert set(results["tests"]["cases"].values()) == {"skipped"}
        rows = "| test_vit, 2 images | cpu_zero1_fp32 | "
    else:
        assert [(row["layout"], row["verdict"]) for row in results["ranks"]["layouts"]] == [("pp2", "same")]
        rows = "| test_vit, 2 images, bf16 | zero1_bf16 | "
        assert {path.stem for path in (tmp_path / "steps").glob("*.json")} == {"base-zero1_bf16", "base-ddp-compiled"}
        parts = ("ranks", "steps-base")
    written = run(FOLDER / "gpu_tables.py", "--folder", tmp_path, "--write")
    assert f"no figures of a GPU: {', '.join(sorted(parts))}" in written.stdout
    assert "a rehearsal is not written" in written.stderr
    assert rows in written.stdout


@pytest.mark.parametrize("name", ["base", "large", "huge", "mae", "clip", "dino"])
def test_sides_that_are_compared_on_a_gpu_are_comparable(monkeypatch, name):
    # Catches: a comparison that `ds-vit bench step` rejects, a workload that is in no case, a case that is another's.
    monkeypatch.syspath_prepend(FOLDER)
    gpu_steps = importlib.import_module("gpu_steps")
    work = gpu_steps.WORKLOADS[name]
    own = [case for case in gpu_steps.cases().values() if case.workload == name]
    assert [case.side for case in own if case.is_peer] == list(work.peers)
    assert [case.side for case in own if not case.is_peer and "graph" not in case.side] == list(work.ours)
    words = [*own[0].words, *gpu_steps.TINY, *work.small]
    engine = resolve_engine(words, Process("none", 0, 1, 0, 1))
    assert engine.compile_mode
    if work.peers:
        check_comparable(engine, work.peers)


def test_measured_cases_are_kept_and_the_rest_is_measured(monkeypatch, tmp_path):
    # Catches: a case that is measured twice, one that ends the others, sides that are compared in the wrong direction.
    monkeypatch.syspath_prepend(FOLDER)
    gpu_steps, gpu_tables = map(importlib.import_module, ("gpu_steps", "gpu_tables"))
    waves = []

    def wave(names, folder, rehearse):
        waves.append(names)
        for name in names:
            if name != "base-zero3_bf16" or len(waves) > 2:
                case = gpu_steps.cases()[name]
                side = {"images": 8, "seconds": [0.1 if case.is_peer else 0.2], "host_seconds": [0.05]}
                side |= {"device_seconds": 0.04, "images_per_second": 40.0, "memory_bytes": None, "mfu": None}
                side |= {"workload": case.workload, "side": case.side, "is_peer": case.is_peer, "rehearsal": False}
                side |= {"model": "m", "precision": "bf16", "date": "", "device": "", "versions": {}}
                (folder / f"{name}.json").write_text(json.dumps(side))

    monkeypatch.setattr(gpu_steps, "run_wave", wave)
    names = ["base-zero1_bf16", "base-zero3_bf16", "base-ddp-compiled"]
    assert gpu_steps.run_all(tmp_path / "steps", True, names) == ["base-zero3_bf16"]
    tables = gpu_tables.tables(gpu_tables.read(tmp_path))
    assert "| m, 8 images, bf16 | zero1_bf16 | 40.0 |  |  | 200.0 / 50.0 / 40.0 | 0.500 (0.500 to 0.500) |" in tables
    assert gpu_steps.run_all(tmp_path / "steps", True, names) == []
    assert waves == [names[:2], names[2:], names[1:2]]


def test_a_wave_is_measured_one_after_another(monkeypatch, tmp_path):
    # Catches: a case that is timed while another one compiles, or runs.
    monkeypatch.syspath_prepend(FOLDER)
    gpu_steps = importlib.import_module("gpu_steps")
    busy, seen, ready = [], [], []

    def case(name, slow):
        time.sleep(slow)
        ready.append(name)
        with gpu_steps.turn(tmp_path, name):
            seen.append((len(ready), len(busy)))
            busy.append(name)
            time.sleep(0.2)
            busy.remove(name)

    threads = [threading.Thread(target=case, args=(f"case{n}", 0.3 * n)) for n in range(3)]
    for thread in threads:
        thread.start()
    while len([*tmp_path.glob("*.ready")]) < 3:
        time.sleep(0.05)
    assert not seen
    (tmp_path / "go").touch()
    for thread in threads:
        thread.join()
    assert seen == 3 * [(3, 0)]


def test_status_lists_the_tests_that_there_are():
    # Catches: a test for another device that the page does not know, one that it calls run and is not.
    counted = run(FOLDER / "status_table.py")
    assert counted.returncode == 0, counted.stderr
    page = (ROOT / "docs" / "status.md").read_text()
    hint = "the page is of other tests: python docs/benchmarks/status_table.py --write"
    assert counted.stdout.strip() in page, hint


def test_tables_of_results_are_made_of_their_files():
    # Catches: a figure that was edited in the page, a file that was measured again and is not shown.
    made = run(FOLDER / "results_page.py")
    assert made.returncode == 0, made.stderr
    hint = "the page has other figures than its files: python docs/benchmarks/results_page.py --write"
    assert made.stdout.rstrip() == (ROOT / "docs" / "results.md").read_text().rstrip(), hint


def test_both_layouts_of_a_block_compute_the_same(monkeypatch):
    # Catches: heads or tokens that change places, gradients that are not compared.
    monkeypatch.syspath_prepend(FOLDER)
    batch_second = importlib.import_module("batch_second")
    blocks = batch_second.pair(16, 2, 5, 3, torch.float32, "cpu")
    batch_second.check(blocks)
    with torch.no_grad():
        blocks["(N, B, C)"][0].attn.qkv.weight[0] += 1
    with pytest.raises(AssertionError):
        batch_second.check(blocks)


def test_precision_recall_and_f1_are_means_over_classes(monkeypatch, tmp_path):
    # Of three classes, one is never predicted.
    monkeypatch.syspath_prepend(FOLDER)
    amp = importlib.import_module("amp")
    pairs = ["0,0", "0,0", "0,1", "1,1", "2,0"]
    (tmp_path / "predictions.csv").write_text("\n".join(["class_number,predicted_number", *pairs]))
    found = amp.classified(tmp_path / "predictions.csv")
    assert found["precision"] == pytest.approx(100 * (2 / 3 + 1 / 2 + 0) / 3)
    assert found["recall"] == pytest.approx(100 * (2 / 3 + 1 + 0) / 3)
    assert found["f1"] == pytest.approx(100 * (2 / 3 + 2 / 3 + 0) / 3)


def exchange(library):
    """On a rank: a tensor of the device, from rank 0 to rank 1, without the device's own transfers."""
    simulated_device.start(library)
    from simulated_device.collectives import SimulatedBackend

    sys.path.insert(0, str(FOLDER))
    import one_gpu

    def refuse(self, *args):
        raise AssertionError("gloo would take the address of the device for one of the host's")

    SimulatedBackend.send = SimulatedBackend.recv = refuse
    one_gpu.send_by_way_of_the_host()
    tensor = torch.full((3,), dist.get_rank() + 1.0, device="sim")
    dist.send(tensor, 1) if dist.get_rank() == 0 else dist.recv(tensor, 0)
    return tensor.tolist()


def test_ranks_on_one_gpu_exchange_by_way_of_the_host(ranks, device_library):
    # Catches: a pipeline on one GPU that ends in "Bad address".
    assert ranks.run(2, exchange, device_library) == [[1.0] * 3, [1.0] * 3]


@pytest.mark.parametrize(
    ("version", "settings"),
    [
        ((2, 28, 9), {"NCCL_HOSTID": "rank1", "NCCL_SOCKET_IFNAME": "lo"}),
        ((2, 30, 0), {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}),
        ((3, 0), {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}),
    ],
)
def test_nccl_lets_ranks_share_a_gpu(monkeypatch, version, settings):
    # Catches: NCCL's "Duplicate GPU detected"; two ranks that name the same host.
    monkeypatch.syspath_prepend(FOLDER)
    one_gpu = importlib.import_module("one_gpu")
    found = one_gpu.nccl_settings("1", version)
    assert found.items() >= settings.items()
    assert ("NCCL_HOSTID" in found) == ("NCCL_HOSTID" in settings)
    assert found.get("NCCL_HOSTID") != one_gpu.nccl_settings("0", version).get("NCCL_HOSTID", "another")
