"""The sizes that timm lacks: as large as their names say, described in seconds, shared by the GPUs of a host."""

from __future__ import annotations

import time

import pytest

from ds_vit.models.large_sizes import SIZES
from ds_vit.models.zoo import ModelSpec, create_model, num_parameters
from ds_vit.parallel.tensor.shard import legal_degrees

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
