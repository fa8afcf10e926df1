"""ZeRO-3 on real ranks: the layers partitioned one by one start from, and train like, the unpartitioned model."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from vits import KINDS, small_spec, timm_state_dict

from ds_vit.models.keyed_init import initialise
from ds_vit.models.layers import take_apart
from ds_vit.models.sequential import SequentialViT
from ds_vit.models.zoo import ModelSpec, create_model, num_parameters


def fresh(spec: ModelSpec, dtype: torch.dtype, on_layer=None) -> SequentialViT:
    """The model as a run builds it."""
    model = create_model(spec)
    layers = take_apart(model)
    initialise(model, layers, seed=3, device="cpu", dtype=dtype, on_layer=on_layer and partial(on_layer, layers))
    return SequentialViT(layers)


def partitioned_state(spec: ModelSpec, dtype: torch.dtype):
    """On a rank: timm's state dict of the fresh model, the parameters held whole at once, and those in the end."""
    import deepspeed

    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": dtype == torch.bfloat16}}
    # No parameter is small enough to stay whole.
    config |= {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    whole = []

    def partition(layers, layer):
        whole.append(sum(p.numel() for other in layers for p in other.parameters() if not p.is_meta))
        deepspeed.zero.Init(module=layer, config_dict_or_path=config)

    model = fresh(spec, dtype, partition)
    held, state = sum(p.numel() for p in model.parameters()), {}
    for name, tensor in timm_state_dict(model, keep_vars=True).items():
        with deepspeed.zero.GatheredParameters([tensor]):
            state[name] = tensor.detach().clone()
    return state, max(whole), held


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_partitioned_values_are_the_whole_models(ranks, world_size, dtype):
    """A layer that is partitioned before it is filled, filled differently, or still whole when the next one is."""
    spec = small_spec(KINDS["learned rotary frequencies"], depth=4)
    model = fresh(spec, dtype)
    expected = timm_state_dict(model)
    for state, most_whole, held in ranks.run(world_size, partitioned_state, spec, dtype):
        assert state.keys() == expected.keys()
        for name, tensor in expected.items():
            assert state[name].dtype == dtype
            assert torch.equal(state[name], tensor), name
        assert held == 0, "nothing whole is left"
        assert most_whole == max(map(num_parameters, model.layers)) < num_parameters(model) / 2
