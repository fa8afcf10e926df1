"""A part of docs/benchmarks/gpu_day.sh in its smallest form on the simulated device."""

import json
import sys
from pathlib import Path
from unittest import mock

from project import ROOT
from runs import run_quietly

import simulated_device


def rehearse(library: Path, part: str) -> dict:
    """On a rank: the result of a part, whose programs run in this process."""
    simulated_device.start(library)
    sys.path.insert(0, str(ROOT / "docs" / "benchmarks"))
    import gpu_part

    from ds_vit.cli import main

    def json_of(*words: object) -> dict:
        code, out, errors = run_quietly([str(word) for word in words], None, main)
        assert code == 0, errors
        return json.loads(out.splitlines()[-1])

    with mock.patch.object(gpu_part, "json_of", json_of):
        return gpu_part.PARTS[part](True)


def test_a_step_is_measured_on_the_device(ranks, device_library):
    # Catches: a measurement that asks the CPU, and one that only a real accelerator would refuse.
    [result] = ranks.run(1, rehearse, device_library, "step-base")
    [measured] = result["benches"]
    assert measured["device"] != "cpu"
    assert all(side["memory_bytes"] > 0 for side in (*measured["ours"].values(), *measured["peers"].values()))
