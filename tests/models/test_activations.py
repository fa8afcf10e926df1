"""An activation with a weight (timm's `act_layer=prelu`) is a parameter like the others, in every layout."""

from __future__ import annotations

import json
from pathlib import Path

import oracle
import pytest
from curves import assert_same_curve, train_in
from project import ROOT
from vits import our_model, small_spec

PRELU = {"patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 2, "act_layer": "prelu"}
RUN = [
    *("--model", oracle.MODEL, *oracle.kwargs_words(PRELU), "--img-size", 16, "--dataset", "digits", "--val-split", ""),
    *("--workers", 0, "--max-steps", 3, "--log-interval", 1, "--warmup-steps", 0, "--sched", "constant"),
]


def train(ranks, folder: Path, world: int, stage: int, *words):
    """Three steps of SGD, where a factor in a gradient shows."""
    data = json.loads((ROOT / "ds_configs" / f"cpu_zero{stage}_fp32.json").read_text())
    data["optimizer"] = {"type": "SGD", "params": {"lr": 0.5}}
    path = folder / f"zero{stage}.json"
    path.write_text(json.dumps(data))
    return train_in(ranks, world, [*RUN, "--deepspeed_config", path, *words])


def test_the_weight_starts_where_timms_does():
    """timm makes it without a device, so that it was there before its turn, on the CPU alone."""
    model = our_model(small_spec(oracle.MODEL, act_layer="prelu"))
    weights = [p for name, p in model.named_parameters() if name.endswith("mlp.act.weight")]
    assert [p.item() for p in weights] == [0.25, 0.25]


@pytest.mark.parametrize(
    ("world", "stage", "words"),
    [
        (2, 1, "--tp 2 -b 8"),
        pytest.param(2, 1, "--tp 2 --sequence-parallel -b 8", marks=pytest.mark.slow),
        pytest.param(2, 1, "--pp 2 -b 4 --grad-accum-steps 2", marks=pytest.mark.slow),
        pytest.param(2, 3, "-b 4", marks=pytest.mark.slow),
    ],
)
def test_layout_does_not_change_the_curve(ranks, tmp_path, world, stage, words):
    """A cost counted on two devices; a slice of the features that leaves a part of the weight's gradient behind."""
    reference = train(ranks, tmp_path, 1, 1, "-b", 8)
    assert_same_curve(reference, train(ranks, tmp_path, world, stage, *words.split()), rtol=1e-5)
