"""A case of docs/benchmarks/gpu_steps.py on the simulated device."""

import sys
from pathlib import Path

import pytest
from project import ROOT

import simulated_device
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.launching.process import Process


def rehearse(library: Path, workload: str, side: str, is_peer: bool) -> dict:
    """On a rank: the result of a case, eager."""
    simulated_device.start(library)
    sys.path.insert(0, str(ROOT / "docs" / "benchmarks"))
    import gpu_steps

    words = ["--deepspeed_config", str(ROOT / "ds_configs" / "zero1_bf16.json")]
    return gpu_steps.measure(gpu_steps.Case(workload, side, words, is_peer), None, True)


def resolve_all(library: Path) -> list[str]:
    """On a rank: the cases of ours whose flags training rejects, and why; eager."""
    simulated_device.start(library)
    sys.path.insert(0, str(ROOT / "docs" / "benchmarks"))
    import gpu_steps

    from ds_vit.tools.bench import resolve_engine

    wrong = []
    for case in gpu_steps.cases().values():
        try:
            resolve_engine([word for word in case.words if word != "--compile"], Process("none", 0, 1, 0, 1))
        except UserError as error:
            wrong.append(f"{case.name}: {error}")
    return wrong


@pytest.mark.slow
def test_no_case_is_rejected(ranks, device_library):
    # Catches: flags that training does not take together, which would show on the day itself.
    assert ranks.run(1, resolve_all, device_library) == [[]]


def test_a_step_is_measured_on_the_device(ranks, device_library):
    # Catches: a measurement that asks the CPU, and one that only a real accelerator would refuse.
    for side, is_peer in (("zero1_bf16", False), ("timm-blocks", True)):
        [measured] = ranks.run(1, rehearse, device_library, "base", side, is_peer)
        assert measured["device"] != "cpu"
        assert measured["memory_bytes"] > 0
        assert measured["calls"] is None
        assert 0 < min(measured["host_seconds"]) <= min(measured["seconds"])
