"""Keyed drop-path, dropout and patch dropout: timm's rates and scaling, the same mask in every cut of a batch."""

from __future__ import annotations

from unittest import mock

import pytest
import timm
import torch
from timm.layers import DropPath
from torch import nn
from vits import KINDS, images, our_model, small_spec, timm_model

from ds_vit import randomness
from ds_vit.models.keyed_drop import (
    KeyedDrop,
    KeyedDropout,
    KeyedDropPath,
    KeyedPatchDropout,
    Together,
    hash_together,
    replace_drops,
    sample_keys,
)
from ds_vit.models.layers import take_apart
from ds_vit.models.zoo import create_model

MANY = 20_000
KEYS = torch.arange(MANY) * 7919 + 11


def run(drop: KeyedDrop, x: torch.Tensor, keys: torch.Tensor = KEYS):
    with sample_keys([drop], keys):
        return drop(x)


def keyed_by_name(module: nn.Module) -> dict[str, KeyedDrop]:
    return {drop.name: drop for drop in module.modules() if isinstance(drop, KeyedDrop)}


def test_drop_path_has_timms_expectation_and_scaling():
    """A rate that is the keep rate, or a missing division: the mean of many samples leaves 1."""
    out = run(KeyedDropPath("a", 0.3), torch.ones(MANY, 2, 3))
    assert ((out == 0) | (out == 1 / torch.tensor(0.7))).all()
    assert (out == out[:, :1, :1]).all(), "whole samples drop"
    # One standard error of the mean is sqrt(0.3 / 0.7 / 20000) = 0.0046.
    assert abs(float(out[:, 0, 0].mean()) - 1) < 4 * 0.0046
    unscaled = run(KeyedDropPath("a", 0.3, scale_by_keep=False), torch.ones(MANY, 1))
    assert torch.equal(unscaled, (out[:, 0, :1] > 0).float())


def test_dropout_has_torchs_expectation_and_scaling():
    """Elements of a sample that drop together, or a wrong scale."""
    out = run(KeyedDropout("a", 0.25), torch.ones(MANY // 10, 4, 5), KEYS[: MANY // 10])
    assert ((out == 0) | (out == 1 / torch.tensor(0.75))).all()
    assert abs(float(out.mean()) - 1) < 4 * (0.25 / 0.75 / out.numel()) ** 0.5
    # Two elements of one sample are independent: they drop together once in 16 times.
    together = ((out[:, 0, 0] == 0) & (out[:, 3, 4] == 0)).float().mean()
    assert abs(float(together) - 1 / 16) < 4 * (1 / 16 / len(out)) ** 0.5


def test_patch_dropout_keeps_as_many_as_timm_and_each_alike():
    """A patch that is never dropped, a prefix token that is, or another number of patches than timm's."""
    x = torch.arange(9.0).repeat(MANY, 1)[..., None]
    drop = KeyedPatchDropout("p", 0.5, num_prefix_tokens=1, ordered=True, with_indices=False)
    out = run(drop, x)[..., 0]
    expected_count = timm.layers.PatchDropout(0.5, num_prefix_tokens=1)(x).shape[1]
    assert out.shape == (MANY, expected_count)
    assert (out[:, 0] == 0).all()
    assert (out.diff(dim=1) > 0).all(), "ordered, none twice"
    kept = torch.bincount(out[:, 1:].long().flatten(), minlength=9)[1:] / MANY
    assert (kept - 0.5).abs().max() < 4 * (0.25 / MANY) ** 0.5


@pytest.mark.parametrize(
    "drop",
    [
        KeyedDropPath("blocks.0.drop_path1", 0.4),
        KeyedDropout("blocks.0.mlp.drop1", 0.4),
        KeyedPatchDropout("patch_drop", 0.4, 0, ordered=False, with_indices=False),
    ],
    ids=lambda drop: type(drop).__name__,
)
def test_a_mask_depends_on_key_and_name_alone(drop):
    """A mask that follows the position in the batch, the micro-batch or a generator."""
    x = torch.rand(64, 10, 4) + 1
    whole = run(drop, x, KEYS[:64])
    torch.manual_seed(1)
    pieces = torch.cat([run(drop, x[i : i + 16], KEYS[i : i + 16]) for i in range(0, 64, 16)])
    assert torch.equal(whole, pieces)
    order = torch.randperm(64)
    assert torch.equal(run(drop, x[order], KEYS[:64][order]), whole[order])
    assert not torch.equal(run(drop, x, KEYS[64:128]), whole), "other samples"
    drop.name, name = "another", drop.name
    assert not torch.equal(run(drop, x, KEYS[:64]), whole), "another place in the model"
    drop.name = name


def test_nothing_happens_in_eval():
    """Evaluation that drops."""
    x = torch.rand(8, 10, 4)
    for drop in (KeyedDropPath("a", 0.9), KeyedDropout("a", 0.9), KeyedPatchDropout("a", 0.9, 1, False, False)):
        assert torch.equal(run(drop.eval(), x, KEYS[:8]), x)
        assert torch.equal(drop.eval()(x), x), "without keys"


@pytest.mark.parametrize("kind", KINDS)
def test_timms_rates_and_places_are_kept(kind):
    """A block class whose drop-path is elsewhere or whose rate does not grow with the depth."""
    spec = small_spec(KINDS[kind], drop_path_rate=0.3, depth=3, proj_drop_rate=0.1, pos_drop_rate=0.2, drop_rate=0.4)
    model = create_model(spec)
    expected = {}
    for name, module in model.named_modules():
        if isinstance(module, DropPath):
            expected[name] = module.drop_prob
        elif isinstance(module, nn.Dropout) and module.p:
            expected[name] = module.p
    layers = take_apart(model)
    drops = [drop for layer in layers for drop in layer.keyed_drops]
    assert {drop.name: drop.rate for drop in drops} == expected
    assert len({drop.name for drop in drops}) == len(drops), "two modules that drop alike"
    assert expected["pos_drop"] == 0.2
    assert expected["head_drop"] == 0.4
    paths = [rate for name, rate in expected.items() if "drop_path" in name]
    assert sorted(set(paths)) == pytest.approx([0.15, 0.3])
    assert any("drop" in name and "path" not in name for name in expected if name.startswith("blocks."))
    random_modules = (DropPath, timm.layers.PatchDropout)
    assert not [m for layer in layers for m in layer.modules() if isinstance(m, random_modules)]
    assert not [m for layer in layers for m in layer.modules() if isinstance(m, nn.Dropout) and m.p]


def test_patch_dropout_gathers_the_rotary_table_alike():
    """Tokens that keep another patch's rotation, which no shape would show: timm with the same patches is the judge."""
    for kind in ("Eva with rotary tables", "learned rotary frequencies", "Eva with q and v biases", "class token"):
        spec = small_spec(KINDS[kind], patch_drop_rate=0.5)
        reference = timm_model(spec).train()
        model = our_model(spec, weights_of=reference).train()
        replace_drops(reference)
        keys = torch.arange(2)
        with torch.no_grad(), sample_keys(keyed_by_name(reference).values(), keys):
            expected = reference(images(spec))
            torch.testing.assert_close(model(images(spec), keys), expected, rtol=0, atol=1e-5)
            model.layers[0].patch_drop.name = "another"
            moved = model(images(spec), keys)
        assert (moved - expected).abs().max() > 1e-3, "patch dropout does nothing"


def test_training_without_keys_is_an_error_where_something_is_random():
    """A forgotten key that is read as a constant."""
    spec = small_spec("vit_tiny_patch16_224", drop_path_rate=0.5)
    model = our_model(spec)
    with pytest.raises(ValueError, match=r"blocks\.1\.drop_path1.*keys"):
        model(images(spec))
    assert model.eval()(images(spec)).shape == (2, 10)
    assert our_model(small_spec("vit_tiny_patch16_224"))(images(spec)).shape == (2, 10), "nothing is random"


def test_a_dropout_without_a_twin_is_refused():
    """A random module that stays in the model unkeyed."""
    model = nn.Sequential(nn.Dropout2d(0.1))
    with pytest.raises(ValueError, match="0: Dropout2d"):
        replace_drops(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_one_hash_for_all_gives_each_its_own_bits(dtype):
    """Rates or divisors that are rounded otherwise in a column, rows that are swapped, a mask of another type."""
    drops = [
        *(
            KeyedDropPath(f"blocks.{i}.drop_path1", rate)
            for i, rate in enumerate(torch.linspace(0.01, 0.9, 23).tolist())
        ),
        KeyedDropout("pos_drop", 0.3),
        KeyedDropPath("unscaled", 0.1, scale_by_keep=False),
        KeyedPatchDropout("patch_drop", 0.4, 0, ordered=True, with_indices=False),
    ]
    keys = KEYS[:300]
    x = torch.randn(300, 6, 2, dtype=dtype)
    expected = [run(drop, x, keys) for drop in drops]  # each hashes for itself
    with Together(drops, hash_together(drops, keys)).active():
        for drop, kept in zip(drops, expected, strict=True):
            assert torch.equal(drop(x), kept), drop.name
    assert all(drop.row is None for drop in drops)


@pytest.mark.parametrize("interval", [0, 1, 2])
def test_a_micro_batch_is_hashed_once_and_its_repetition_draws_the_same(interval):
    """Draws of the micro-batch that ran last, in the repetition of an earlier one: a pipeline runs several ahead."""
    spec = small_spec(KINDS["Eva with rotary tables"], drop_path_rate=0.5, patch_drop_rate=0.5, depth=4)
    model = our_model(spec, recompute_interval=interval)
    pixels, keys = images(spec, 6), torch.arange(6) + 100
    hashed = []
    mix = randomness.mix_tensor

    def noted(keys: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        hashed.append(keys.shape)
        return mix(keys, value)

    gradients = []
    for ahead in (False, True):
        model.zero_grad()
        losses = []
        with mock.patch.object(randomness, "mix_tensor", noted):
            for x, k in zip(pixels.split(3), keys.split(3), strict=True):
                losses.append(model(x, k).square().sum())
                if not ahead:
                    losses.pop().backward()
        for loss in losses:
            loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert torch.equal(*gradients)
    assert hashed.count((1, 3)) == 4, "one hash for all layers of each micro-batch"
    assert (3,) not in hashed, "a layer that hashes by itself"
