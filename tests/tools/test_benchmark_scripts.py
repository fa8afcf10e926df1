"""The scripts of docs/benchmarks run with what the quickstart installs, and say how they are called."""

import json
import os
import re
import subprocess
import sys

import pytest
from picture_folders import smooth_photo
from project import ROOT

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


@pytest.mark.slow
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


@pytest.mark.slow
def test_planned_times_are_held_against_measured_ones():
    # Catches: a layout that cannot be planned, or trained next to the others; ranks that cannot start without pytest.
    words = ["--model", "test_vit", "--depth", "2", "--img-size", "32", "--turns", "1"]
    done = run(FOLDER / "planned_time.py", *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("ZeRO-") == 12
    assert "rank correlation" in done.stdout


@pytest.mark.slow
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
    done = run(FOLDER / "decode_on_device.py", *words, "--images", "6", "--turns", "1")
    assert done.returncode == 0, done.stderr
    assert "| decoding on the device too | " in done.stdout
    assert "| decoding alone, 3 files at once | images/s |" in done.stdout
    assert "are 0.00 grey levels from Pillow's" in done.stdout
