"""--grad-checkpointing in 16 bits, with every kind of block, and what is reported."""

from __future__ import annotations

import oracle
import pytest
import torch
from curves import assert_same_curve, train_in
from project import ROOT
from runs import KINDS

from ds_vit.config import parse
from ds_vit.config.parser import to_yaml
from ds_vit.launching.process import Process
from ds_vit.planner.counting import Flops
from ds_vit.training.resolve import resolve_run, resolved_flags
from ds_vit.training.start import start_rows

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


def train(ranks, world, stage, micro, accumulation, *words, base=DIGITS):
    """Three steps, whose rows are given."""
    config = ROOT / "ds_configs" / f"cpu_zero{stage}_fp32.json"
    argv = [*base, "--deepspeed_config", config, "-b", micro, "--grad-accum-steps", accumulation, *words]
    return train_in(ranks, world, argv)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("stage", "words"),
    [(3, BF16), (2, BF16), (3, AUTOCAST), (1, AUTOCAST)],
    ids=["bf16, ZeRO-3", "bf16, ZeRO-2", "autocast, ZeRO-3", "autocast, ZeRO-1"],
)
def test_in_16_bits_too(ranks, stage, words):
    # Catches: norms in fp32 or an autocast whose casts differ in the second run. To the last bit: nothing is rounded
    # otherwise.
    rows = [train(ranks, 2, stage, 4, 2, *words, *mode) for mode in ((), ("--grad-checkpointing", "selective"))]
    assert_same_curve(*rows, rtol=0)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_block(ranks, kind):
    # Catches: a block of timm's that writes into a product, or reads a parameter that ZeRO-3 has not gathered again.
    name, kwargs = KINDS[kind]
    small = {"patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 3} | kwargs
    base = [*RUN, "--model", name, *oracle.kwargs_words(small), "--drop-path", 0.1]
    plain = train(ranks, 1, 1, 16, 1, base=base)
    rows = train(ranks, 2, 3, 8, 1, "--grad-checkpointing", "selective", base=base)
    assert_same_curve(plain, rows, rtol=1e-5)


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
    argv = [*DIGITS, *config, "--grad-checkpointing", *words]
    process = Process("env", 0, 1, 0, 1)
    plan = resolve_run(*parse([*map(str, argv)]), process, on_cpu=True)
    layout = dict(start_rows(plan, Flops(1, 3), torch.device("cpu"), tmp_path))["layout"]
    assert layout.endswith(said) if said else "recomputed" not in layout
    assert resolved_flags(plan)["grad_checkpointing"] == written
    (tmp_path / "config.yaml").write_text(to_yaml(resolved_flags(plan)))
    recipe = ["--recipe", tmp_path / "config.yaml", *config]
    again = resolve_run(*parse([*map(str, recipe)]), process, on_cpu=True)
    assert again.deepspeed.checkpointing == plan.deepspeed.checkpointing
