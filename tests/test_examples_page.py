"""docs/examples.md, followed in its order, with fewer steps, but for the parity tool."""

from __future__ import annotations

import json
import re

import pytest
from project import ROOT, give_a_clone, run_shell

from ds_vit.launching.this_host import free_port

PAGE = (ROOT / "docs" / "examples.md").read_text()
SHORTER = {
    "--epochs 10": "--epochs 1 --warmup-epochs 0",
    "--epochs 20": "--epochs 1 --warmup-epochs 0",
    "depth=6": "depth=2",
}


@pytest.mark.slow
def test_four_examples(tmp_path):
    # Catches: an example that lags behind the program.
    # Four ranks and several layouts are what tests/tools/test_parity_tool.py runs.
    lines = [line[4:] for line in PAGE.splitlines() if line.startswith("    ") and "launch/parity.py" not in line]
    script = "".join(f"{line}\n" for line in lines)
    for text, shorter in SHORTER.items():
        assert text in script
        script = script.replace(text, shorter)
    script = script.replace("deepspeed --", f"deepspeed --master_port {free_port()} --")
    said = run_shell(script, tmp_path, give_a_clone(tmp_path))
    summaries = {path.parent.name: json.loads(path.read_text()) for path in tmp_path.glob("runs/*/summary.json")}
    assert {summary["exit"] for summary in summaries.values()} == {"completed"}
    assert summaries["moved"]["steps"] == 40
    assert "1-is-a-" in said
    assert (
        "step 20: resumed in another process (pp 1 x dp 1 x tp 1)" in (tmp_path / "runs/moved/report.html").read_text()
    )
    assert re.search(r"k-NN top-1", said)
