"""ZeRO-3 on real ranks: the layers partitioned one by one start from, and train like, the unpartitioned model."""

from __future__ import annotations

import pytest
import torch
from vits import KINDS, small_spec, timm_state_dict

from ds_vit.models import ModelSpec, SequentialViT, create_model, initialise, take_apart

MICRO_BATCH = 2


def config(stage: int, dtype: str = "fp32") -> dict:
    """Nothing stays gathered: no parameter is small enough to persist, none is kept for reuse, none is prefetched."""
    return {
        "train_micro_batch_size_per_gpu": MICRO_BATCH,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 100_000,
            "stage3_param_persistence_threshold": 0,
            "stage3_max_live_parameters": 0,
            "stage3_max_reuse_distance": 0,
            "stage3_prefetch_bucket_size": 0,
        },
        **({"bf16": {"enabled": True}} if dtype == "bf16" else {}),
    }


def build(spec: ModelSpec, stage: int, dtype: torch.dtype = torch.float32, interval: int = 0):
    """The model as a run builds it, and how many whole parameters this rank held at most."""
    import deepspeed

    model = create_model(spec)
    layers = take_apart(model)
    whole = []

    def partition(layer):
        whole.append(sum(p.numel() for other in layers for p in other.parameters() if not p.is_meta))
        deepspeed.zero.Init(module=layer, config_dict_or_path=config(3, "bf16" if dtype == torch.bfloat16 else "fp32"))

    initialise(model, layers, seed=3, device="cpu", dtype=dtype, on_layer=partition if stage == 3 else None)
    return SequentialViT(layers, checkpoint_interval=interval), whole


def gathered_state(spec: ModelSpec, stage: int, dtype: torch.dtype):
    """timm's state dict of the fresh model, and the most parameters held whole at once."""
    import deepspeed

    model, whole = build(spec, stage, dtype)
    state = {}
    for name, tensor in timm_state_dict(model, keep_vars=True).items():
        if hasattr(tensor, "ds_id"):
            with deepspeed.zero.GatheredParameters([tensor]):
                state[name] = tensor.detach().clone()
        else:
            state[name] = tensor.detach().clone()
    held = sum(p.numel() for p in model.parameters())
    return state, max(whole, default=0), held


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_partitioned_values_are_the_whole_models(ranks, world_size, dtype):
    """A layer that is partitioned before it is filled, filled differently, or still whole when the next one is."""
    spec = small_spec(KINDS["learned rotary frequencies"], depth=4)
    expected, _, num_parameters = ranks.run(1, gathered_state, spec, 0, dtype)[0]
    for state, most_whole, held in ranks.run(world_size, gathered_state, spec, 3, dtype):
        assert state.keys() == expected.keys()
        for name, tensor in expected.items():
            assert state[name].dtype == dtype
            assert torch.equal(state[name], tensor), name
        assert held == 0, "nothing whole is left"
        largest = max(sum(p.numel() for p in layer.parameters()) for layer in take_apart(create_model(spec)))
        assert most_whole == largest < num_parameters / 2
