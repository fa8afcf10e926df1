"""The step benchmark: what a step asks of the hardware, ours beside plain timm's, and limits that it must not pass."""

import contextlib
import io
import json

import pytest
import torch
from project import ROOT

from ds_vit.tools.counting import count_step


def test_operations_waits_and_bytes_are_counted():
    """A view that counts, a backward pass that does not, memory of an operation in place, a wait unseen."""
    x = torch.ones(8, 4, requires_grad=True)

    def step():
        y = (x.view(4, 8) * 2.0).sum()  # mul, sum
        y.backward()  # ones_like, mul; sum's backward is a view
        x.grad.add_(1.0)
        float(y.detach())
        bool(y > 0)  # gt
        x.grad.nonzero()
        x.grad = None

    counts = count_step(step)
    assert counts.waits == 3
    names = ("mul", "sum", "ones_like", "add_", "gt", "nonzero", "_local_scalar_dense")
    assert {name: counts.by_name[name] for name in names} == dict.fromkeys(names, 1) | {
        "mul": 2,
        "_local_scalar_dense": 2,
    }
    assert counts.operations == sum(counts.by_name.values())
    assert set(counts.by_name) - set(names) <= {"is_nonzero"}
    mul, total, ones, grad, greater, places = 32 * 4, 4, 4, 32 * 4, 1, 32 * 2 * 8
    assert counts.allocated_bytes == mul + total + ones + grad + greater + places


# On one rank, vit_tiny/16, batch 4, drop-path 0.1: operations over plain timm's, waits, bytes over plain timm's.
LIMITS = {
    "fp32 ZeRO-0": (0.95, 0, 1.10),
    "fp32 ZeRO-1": (1.42, 0, 1.16),
    "fp32 ZeRO-3": (1.80, 1, 1.16),
    "bf16 ZeRO-0": (0.98, 0, 1.12),
    "bf16 ZeRO-1": (1.48, 0, 1.08),
    "bf16 ZeRO-2": (1.22, 0, 1.16),
    "bf16 ZeRO-3": (1.64, 1, 1.16),
}
BF16 = {
    0: {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    1: {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}, "communication_data_type": "fp32"},
    2: {"bf16": {"enabled": True}, "communication_data_type": "fp32"},
    3: {"bf16": {"enabled": True}, "communication_data_type": "fp32"},
}


def said_by_bench(config):
    """On a rank: what the command prints as JSON."""
    from ds_vit.cli import main

    words = ["--model", "vit_tiny_patch16_224", "-b", "4", "--drop-path", "0.1", "--turns", "1", "--steps", "1"]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert main(["bench", "step", "--json", "--deepspeed_config", str(config), *words]) == 0
    return json.loads(out.getvalue().splitlines()[-1])


@pytest.mark.parametrize("case", LIMITS)
def test_a_step_stays_within_its_counts(ranks, tmp_path, case):
    """An operation for each parameter or layer, or a read by the host, that creeps back."""
    precision, stage = case.split()[0], int(case[-1])
    config = json.loads((ROOT / "ds_configs" / f"cpu_zero{stage}_fp32.json").read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | (BF16[stage] if precision == "bf16" else {})))
    [result] = ranks.run(1, said_by_bench, path)
    operations, waits, allocated = LIMITS[case]
    assert result["plain_counts"]["waits"] == 0
    assert result["ours_counts"]["waits"] <= waits
    assert result["operations_ratio"] <= operations
    assert result["allocated_ratio"] <= allocated
    assert result["operations_ratio"] == pytest.approx(
        result["ours_counts"]["operations"] / result["plain_counts"]["operations"]
    )
