"""docs/api.md, run to the letter: two trainings, a prediction, an evaluation and an export in one process."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from project import ROOT

BLOCKS = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / "api.md").read_text(), re.MULTILINE | re.DOTALL)
REPORT = """
import contextlib, io, json
from pathlib import Path
shown = io.StringIO()
with contextlib.redirect_stdout(shown):
    calm = {"quiet": True, "eval_metric": "loss", "log_interval": 1, "on_step": lambda row: print(row["step"])}
    quiet = train(dataset="digits", output="runs/quiet", **calm, **settings)
print("REPORT", json.dumps({
    "first": dict(result),
    "quiet": [shown.getvalue(), quiet.completed, quiet["best_loss"] == quiet["last_loss"], quiet.weights.is_file()],
    "second": dict(second),
    "completed": [result.completed, second.completed],
    "rows": [row["loss"] for row in second.folder.rows("train")],
    "losses": losses,
    "evaluations": evaluations,
    "told": [str(path) for path in checkpoints],
    "checkpoints": [str(path) for path in second.checkpoints],
    "files": [str(path) for path in (result.weights, second.weights, figures.written_to) if Path(path).is_file()],
    "predicted": predictions["images"][0]["classes"][0]["name"],
    "evaluated": dict(figures),
    "within": exported.within,
}))
from ds_vit.fault_tolerance.errors import UserError
for wrong in (
    {"train_data": Stripes(96), "dataset": "digits"},
    {"train_data": [1, 2]},
    {"train_data": Stripes(96), "epocs": 1},
    {"train_data": 3},
    {"dataset": "python"},
):
    try:
        train(**settings, **wrong)
    except UserError as error:
        print("REFUSED", error)
"""


@pytest.mark.slow
def test_the_page_runs_in_one_process(tmp_path):
    # Catches: a page that lags behind the program; a second call that finds what the first one left in the process.
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    words = [sys.executable, "-c", "\n".join([*BLOCKS, REPORT])]
    done = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(next(line[7:] for line in done.stdout.splitlines() if line.startswith("REPORT ")))
    assert report["completed"] == [True, True]
    assert report["quiet"] == ["1\n2\n3\n", True, True, True]
    assert report["first"] == json.loads((tmp_path / "runs" / "first" / "summary.json").read_text())
    assert report["second"]["class_names"] == ["upright", "level"]
    assert len(report["losses"]) == 3
    assert report["losses"] == report["rows"]
    assert report["evaluations"] == [report["second"]["last_top1"]] == [report["evaluated"]["top1"]]
    assert report["told"] == report["checkpoints"] != []
    assert report["files"] == [
        "runs/first/model.safetensors",
        "runs/stripes/model.safetensors",
        "runs/stripes/eval.json",
    ]
    assert report["predicted"] in ("upright", "level")
    assert report["within"] is True
    refused = [line for line in done.stdout.splitlines() if line.startswith("REFUSED ")]
    assert [re.search(r"both given|class number|epochs|no data|Python program", line)[0] for line in refused] == [
        "both given",
        "class number",
        "epochs",
        "no data",
        "Python program",
    ]
