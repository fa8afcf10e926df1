"""Models and degrees that cannot be sharded are rejected before any process group exists, with the numbers."""

from __future__ import annotations

import pytest
import torch
from timm.layers import SimpleNorm
from torch import nn

from ds_vit.models.zoo import ModelSpec, create_model
from ds_vit.parallel.tensor.shard import check_degree, legal_degrees


def model_of(name: str, **kwargs) -> nn.Module:
    return create_model(ModelSpec(name, model_kwargs={"depth": 2} | kwargs), for_training=False)


@pytest.mark.parametrize(
    ("name", "kwargs", "size", "message"),
    [
        (
            "vit_base_patch16_224",
            {},
            8,
            "num_heads 12 cannot be split over tp 8; tp may be 1, 2, 3, 4, 6 or 12",
        ),
        ("vit_tiny_patch16_224", {}, 2, "num_heads 3 cannot be split over tp 2; tp may be 1 or 3"),
        ("eva02_large_patch14_224", {}, 4, "hidden size 2730 cannot be split over tp 4; tp may be 1 or 2"),
        (
            "vit_pe_core_base_patch16_224",
            {},
            3,
            "attn_pool num_heads 8 cannot be split over tp 3; tp may be 1, 2 or 4",
        ),
        (
            "vit_base_patch16_sapiens2",
            {"num_heads": 12, "num_kv_heads": 4},
            3,
            "num_kv_heads 4 cannot be split over tp 3; tp may be 1, 2 or 4",
        ),
        ("vit_tiny_patch16_224", {"num_heads": 1}, 2, "num_heads 1 cannot be split over tp 2; tp must be 1"),
        ("vit_tiny_patch16_224", {}, 0, "tp 0 must be at least 1"),
    ],
)
def test_a_degree_that_does_not_divide(name, kwargs, size, message):
    """A cut that fails in a reshape on every rank, after minutes, instead of one line that names the way out."""
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the whole message is compared)
        check_degree(model_of(name, **kwargs), size)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("name", "degrees"),
    [
        ("vit_base_patch16_224", [1, 2, 3, 4, 6, 12]),
        ("vit_base_patch16_xp_224", [1, 2, 3, 4, 6, 12]),
        ("eva02_base_patch14_224", [1, 2, 4]),
        ("vit_giant_patch14_dinov2", [1, 2, 4, 8]),
    ],
)
def test_every_legal_degree_is_accepted(name, degrees):
    """A list of legal degrees with one that is refused, or without one that works."""
    model = model_of(name)
    assert legal_degrees(model) == degrees
    for size in range(1, 26):
        if size in degrees:
            check_degree(model, size)
        else:
            with pytest.raises(ValueError, match="cannot be split"):
                check_degree(model, size)


class Mixer(nn.Module):
    """A sub-layer that no plan knows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4, device="meta"))


def test_an_unknown_kind_is_refused_by_name():
    """A sub-layer that stays whole in silence, and with it most of the memory and work."""
    model = model_of("vit_base_patch16_224")
    model.blocks[1].mlp = Mixer()
    with pytest.raises(ValueError, match=r"Mixer in Block \(mlp.weight\) cannot be sharded over tp 2; tp must be 1"):
        check_degree(model, 2)
    assert legal_degrees(model) == [1]
    check_degree(model, 1)


def test_an_unknown_norm_over_features_is_refused_by_name():
    """A norm that takes the statistics of a rank's features for those of all."""
    model = model_of("beit3_base_patch16_224")
    model.blocks[0].mlp.norm = SimpleNorm(8)
    with pytest.raises(ValueError, match=r"SimpleNorm over the features of Mlp \(norm\) cannot be sharded over tp 2"):
        check_degree(model, 2)
