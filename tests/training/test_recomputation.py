"""--grad-checkpointing in 16 bits, and what is reported; tests/training/test_run.py has every kind of block."""

from __future__ import annotations

import oracle
import pytest
import torch
from curves import assert_same_curve, train_in
from project import ROOT
from runs import resolved

from ds_vit.config.parser import to_yaml
from ds_vit.planner.counting import Flops
from ds_vit.training.resolve.record import resolved_flags
from ds_vit.training.tables import start_rows

# Drop-path, and dropout in the blocks, before the head and of the positions.
DROPS = ("--drop", 0.1, "--drop-path", 0.3)
KWARGS = {**oracle.KWARGS, "depth": 5, "num_heads": 4, "proj_drop_rate": 0.1, "pos_drop_rate": 0.1}
RUN = [
    *("--dataset", "digits", "--img-size", 16, "--workers", 0, "--val-split", "", "--log-interval", 1),
    *("--max-steps", 3, "--warmup-steps", 1),
]
DIGITS = [*RUN, "--model", oracle.MODEL, *oracle.kwargs_words(KWARGS), *DROPS]
BF16 = ("--set", "bf16.enabled=true")
AUTOCAST = ("--set", 'torch_autocast={"enabled": true, "dtype": "bfloat16"}')


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "words"), [(3, BF16), (1, AUTOCAST)], ids=["bf16, ZeRO-3", "autocast, ZeRO-1"])
def test_in_16_bits_too(ranks, stage, words):
    # Catches: norms in fp32 or an autocast whose casts differ in the second run. To the last bit: nothing is rounded
    # otherwise.
    config = ROOT / "ds_configs" / f"cpu_zero{stage}_fp32.json"
    argv = [*DIGITS, "--deepspeed_config", config, "-b", 4, "--grad-accum-steps", 2, *words]
    rows = [train_in(ranks, 2, [*argv, *mode]) for mode in ((), ("--grad-checkpointing", "selective"))]
    assert_same_curve(*rows, rtol=0)


@pytest.mark.parametrize(
    ("words", "said", "written"),
    [
        ((), "each block recomputed", "full"),
        (("2",), "every 2 blocks recomputed", "2"),
        (("selective",), "each block recomputed except matrix products and attention", "selective"),
        (("selective", "--no-grad-checkpointing"), None, False),
    ],
)
def test_it_is_said_and_written_down(tmp_path, words, said, written):
    # Catches: a start that does not say which, and a config.yaml that runs otherwise.
    config = ["--deepspeed_config", ROOT / "ds_configs" / "cpu_zero1_fp32.json"]
    plan = resolved([*DIGITS, *config, "--grad-checkpointing", *words])
    layout = dict(start_rows(plan, Flops(1, 3), torch.device("cpu"), tmp_path))["layout"]
    assert layout.endswith(said) if said else "recomputed" not in layout
    assert resolved_flags(plan)["grad_checkpointing"] == written
    (tmp_path / "config.yaml").write_text(to_yaml(resolved_flags(plan)))
    again = resolved(["--recipe", tmp_path / "config.yaml", *config])
    assert again.engine.checkpointing == plan.engine.checkpointing
