"""Keyed initialisation: the same values whatever is filled, and no generator touched; test_every_name.py: timm's."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from torch import nn
from vits import KINDS, small_spec, timm_state_dict

from ds_vit.models import keyed_init as module_under_test
from ds_vit.models.keyed_init import initialise
from ds_vit.models.layers import take_apart
from ds_vit.models.sequential import SequentialViT
from ds_vit.models.zoo import create_model


def initial(name: str, seed: int = 0, subset: slice = slice(None), **kwargs) -> dict[str, torch.Tensor]:
    spec = small_spec(name, **kwargs)
    model = create_model(spec, for_training=False)
    layers = take_apart(model)[subset]
    initialise(model, layers, seed=seed, device="cpu")
    return timm_state_dict(nn.ModuleList(layers))


def test_the_weight_of_an_activation_starts_where_timms_does():
    """timm makes it without a device: on the CPU, before its turn."""
    values = initial("vit_tiny_patch16_224", act_layer="prelu")
    assert [values[f"blocks.{i}.mlp.act.weight"].item() for i in (0, 1)] == [0.25, 0.25]


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kind", KINDS)
def test_a_stage_gets_what_the_whole_model_gives_it(kind):
    """A draw that depends on what else this rank holds, or on the order."""
    whole = initial(KINDS[kind], depth=3)
    for subset in (slice(0, 1), slice(1, 2), slice(2, 5), slice(4, 5)):
        for name, tensor in initial(KINDS[kind], depth=3, subset=subset).items():
            assert torch.equal(tensor, whole[name]), name


def test_a_draw_depends_on_seed_and_name():
    """Two parameters, or two seeds, with the same numbers."""
    values = initial("vit_tiny_patch16_224")
    first, second = (values[f"blocks.{i}.attn.qkv.weight"] for i in (0, 1))
    assert not torch.equal(first, second)
    other = initial("vit_tiny_patch16_224", seed=1)
    assert not torch.equal(first, other["blocks.0.attn.qkv.weight"])
    correlation = torch.corrcoef(torch.stack([first.flatten(), second.flatten()]))[0, 1]
    assert abs(float(correlation)) < 5 / math.sqrt(first.numel())


def test_a_parameter_drawn_in_parts_gets_no_part_twice():
    """An initialiser that treats q, k and v apart and gives them the same numbers."""
    parameter = nn.Parameter(torch.zeros(6, 4))
    with module_under_test._KeyedDraws(0, {parameter.untyped_storage().data_ptr(): "qkv.weight"}), torch.no_grad():
        for part in parameter.chunk(3):
            part.normal_()
        parameter.t()[1].uniform_()
    assert len(parameter.unique()) == parameter.numel()


def test_no_generator_is_read_or_moved():
    """A model that depends on what was drawn before it, or changes what is drawn after it."""
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)
        random.seed(seed)
        before = torch.get_rng_state(), np.random.get_state()[1].tobytes(), random.getstate()
        results.append(initial(KINDS["learned rotary frequencies"]))
        after = torch.get_rng_state(), np.random.get_state()[1].tobytes(), random.getstate()
        assert torch.equal(before[0], after[0])
        assert before[1:] == after[1:]
    assert all(torch.equal(results[0][name], results[1][name]) for name in results[0])


def test_values_do_not_depend_on_the_chunks(monkeypatch):
    """A large parameter whose chunks repeat or shift the numbers."""
    whole = initial("vit_tiny_patch16_224")
    monkeypatch.setattr(module_under_test, "_CPU_CHUNK", 1000)
    chunked = initial("vit_tiny_patch16_224")
    assert all(torch.equal(whole[name], chunked[name]) for name in whole)


def test_the_draws_are_uniform_and_normal():
    """A generator that is uneven or whose neighbours are related."""
    count, device = 1_000_000, torch.device("cpu")
    uniform = module_under_test._open_uniform(42, 0, count, device)
    assert uniform.min() > 0
    assert uniform.max() < 1
    histogram = torch.histc(uniform, bins=100, min=0, max=1)
    chi_squared = float(((histogram - count / 100) ** 2 / (count / 100)).sum())
    assert chi_squared < 150, "99 degrees of freedom: 150 is 3.6 standard deviations"
    for lag in (1, 2, 64):
        pair = torch.stack([uniform[:-lag], uniform[lag:]])
        assert abs(float(torch.corrcoef(pair)[0, 1])) < 5 / math.sqrt(count)
    normal = module_under_test._normal(42, 0, count, device, mean=1.0, std=2.0)
    assert abs(float(normal.mean()) - 1) < 5 * 2 / math.sqrt(count)
    assert abs(float(normal.std()) - 2) < 5 * 2 / math.sqrt(2 * count)
    assert abs(float((normal - 1).abs().lt(2).float().mean()) - 0.6827) < 0.003


class _Forgetful(nn.Module):
    """A block with a parameter that nothing initialises."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, device="meta"))


def test_a_parameter_without_an_initialiser_is_found():
    """Uninitialised memory that looks like weights: the next timm may add such a parameter."""
    model = create_model(small_spec("vit_tiny_patch16_224"))
    layers = take_apart(model)
    layers[1].block.extra = _Forgetful()
    with pytest.raises(AssertionError, match=r"blocks\.0\.extra\.weight"):
        initialise(model, layers, seed=0, device="cpu")


def test_an_unkeyed_random_operation_is_found():
    """An initialiser that would silently draw from the process's generator."""
    draws = module_under_test._KeyedDraws(0, {})
    with draws, pytest.raises(AssertionError, match="bernoulli_"):
        torch.empty(3).bernoulli_(0.5)
    with draws, pytest.raises(AssertionError, match="randn"):
        torch.randn(3)
    with draws, pytest.raises(AssertionError, match="no parameter"):
        torch.empty(3).uniform_()
    with draws:
        torch.empty(3, device="meta").bernoulli_(0.5)


def test_dtype_rounds_what_float32_drew():
    """Values drawn in bfloat16, whose inverse error function is another distribution."""
    model = create_model(small_spec("vit_tiny_patch16_224"))
    full, half = take_apart(model), take_apart(model)
    initialise(model, full, seed=0, device="cpu")
    initialise(model, half, seed=0, device="cpu", dtype=torch.bfloat16)
    for (name, a), (_, b) in zip(
        SequentialViT(full).named_parameters(), SequentialViT(half).named_parameters(), strict=True
    ):
        assert torch.equal(a.bfloat16(), b), name


def test_one_layer_at_a_time_has_memory():
    """A model that is whole on one rank before ZeRO-3 could partition it."""
    model = create_model(small_spec("vit_tiny_patch16_224", depth=4))
    layers = take_apart(model)
    alive = []

    def drop(layer):
        alive.append([index for index, other in enumerate(layers) if not next(other.parameters()).is_meta])
        layer.to("meta")

    initialise(model, layers, seed=0, device="cpu", on_layer=drop)
    assert alive == [[0], [1], [2], [3], [4], [5]]
    assert all(parameter.is_meta for parameter in model.parameters())
