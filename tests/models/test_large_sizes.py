"""The sizes that timm lacks: as large as their names say, described in seconds, trained small in every layout."""

from __future__ import annotations

import time

import pytest
from curves import assert_same_curve, train_in
from project import ROOT

from ds_vit.models import ModelSpec, create_model, num_parameters
from ds_vit.models.large_sizes import SIZES
from ds_vit.parallel.tensor import legal_degrees

# Parameters that the name or its paper says, in billions; ViT-22B's 21.743 count no attention pool (12 D^2 here).
PUBLISHED = {"vit_e_patch14_224": 3.926, "vit_10b_patch14_224": 10.078, "vit_22b_patch14_224": 21.743 + 0.453}


@pytest.mark.parametrize("name", SIZES)
def test_a_size_is_what_its_name_says(name):
    # Catches: a width or a depth that was typed wrong; a description that takes the memory of the model.
    start = time.process_time()
    model = create_model(ModelSpec(name))
    assert time.process_time() - start < 5
    said = PUBLISHED.get(name) or float(name.removeprefix("vit_").partition("b_")[0])
    assert num_parameters(model) / 1e9 == pytest.approx(said, rel=0.02)
    assert {2, 4, 8} <= set(legal_degrees(model)), "one host's GPUs share a block"


def train(ranks, world, name, *words):
    """Three steps at depth 2, where SGD hides no factor in a gradient."""
    small = ("--model-kwargs", "depth=2", "embed_dim=48", "num_heads=4", "mlp_ratio=4", "patch_size=8")
    argv = ["--model", name, *small, "--img-size", 16, "--dataset", "digits", "--val-split", "", "--workers", 0]
    argv += ["--max-steps", 3, "--log-interval", 1, "--warmup-steps", 0, "--sched", "constant", "--lr", 0.1]
    argv += ["--deepspeed_config", ROOT / "ds_configs" / "cpu_zero1_fp32.json", "--set", "optimizer.type=SGD"]
    return train_in(ranks, world, [*argv, "optimizer.params={}", *words])


def test_layout_does_not_change_the_curve(ranks):
    # Catches: a size whose blocks or head cannot be cut, or are cut wrong.
    name = "vit_22b_patch14_224"
    reference = train(ranks, 1, name, "-b", 8)
    for words in (("--tp", 2, "-b", 8), ("--pp", 2, "-b", 4, "--grad-accum-steps", 2)):
        assert_same_curve(reference, train(ranks, 2, name, *words), rtol=1e-5)
