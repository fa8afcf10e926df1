"""The map of ZeRO's flat memory: every element of every parameter, where it is said to be, counted once."""

import pytest
import torch
from safetensors.torch import load_file
from zero_layouts import BF16, WRAPPER, start, whole_weights, words

# id: (world size, flags, ZeRO stage, changes of the JSON)
CASES = {
    "no ZeRO": (1, [], 0, {}),
    "no ZeRO dp2 tp2": (4, ["--tp", 2], 0, {}),
    "ZeRO-1 pp2 tp2 dp2": (8, ["--pp", 2, "--tp", 2], 1, {}),
    "ZeRO-1 bf16": (2, [], 1, BF16),
    "ZeRO-1 bf16 in fp32 pp2 tp2": (4, ["--pp", 2, "--tp", 2], 1, WRAPPER),
    "ZeRO-2": (3, [], 2, {}),
    "ZeRO-3 tp2 dp2": (4, ["--tp", 2], 3, {}),
    "ZeRO-3 bf16": (2, [], 3, BF16),
    "ZeRO-3 small groups": (3, [], 3, {"zero_optimization": {"stage": 3, "sub_group_size": 5000}}),
    "ZeRO-1 offloaded": (2, [], 1, {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}}),
    "ZeRO-3 offloaded": (2, [], 3, {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}),
    "classes cut": (2, ["--tp", 2, "--class-parallel", "on"], 1, {}),
    "frozen": (2, ["--freeze", "blocks.[0-2]", "--tp", 2], 1, {}),
    "frozen ZeRO-3": (3, ["--freeze", "blocks.[0-2]"], 3, {}),
}


def look(argv, weights, exact):
    """On a rank: whether each segment has the values it should, and what the segments are."""
    engine = start(argv)
    whole = load_file(weights)
    zero_map = engine.zero_map
    pieces = []
    for shard in [*zero_map.shards, *zero_map.frozen]:
        for segment in shard.segments:
            local = segment.tp_slice.take(whole[segment.name]) if segment.tp_slice.dim is not None else None
            local = whole[segment.name] if local is None else local
            expected = local.flatten()[segment.start : segment.start + segment.length]
            found = segment.of(shard.tensor).float()
            close = torch.equal(found, expected) if exact else torch.allclose(found, expected, rtol=1e-2)
            assert close, f"{segment}: {(found - expected).abs().max()}"
            name, description = segment.name, segment.tp_slice
            share = description.rank if description.dim is not None else 0
            pieces.append((name, share, segment.start, segment.length, local.numel(), zero_map.counts(segment)))
    # Then the way back: what is written into the flat tensors is what the model computes with.
    with torch.no_grad():
        for shard in zero_map.shards:
            for view in shard.views():
                view.add_(1.0)
    zero_map.refresh()
    from ds_vit.models.sequential import timm_names

    names = timm_names(engine.module)
    with whole_weights(engine):
        for local, p in engine.module.named_parameters():
            description = getattr(p, "tp_slice", None)
            expected = whole[names[local]] if description is None else description.take(whole[names[local]])
            padding = expected.numel() and description is not None and description.dim is not None
            moved = p.detach().float() - expected.view_as(p)
            moved = moved[expected.view_as(p) != 0] if padding else moved  # a cut class axis is padded with zeros
            target = float(p.requires_grad)
            assert (moved - target).abs().max() <= (1e-6 if exact else 2e-2), names[local]
    engine.close()
    return zero_map.names, pieces


def assert_counted_once(results, trained):
    """Every element of every trained parameter, in each of its slices, counts on one rank; `results` are `look`'s."""
    seen = {}
    for names, pieces in results:
        assert sorted(names) == sorted(trained), "every rank knows every name"
        for name, share, first, length, size, counts in pieces:
            if counts:
                seen.setdefault((name, share), []).append((first, length, size))
    for name in trained:
        shares = {key: sorted(pieces) for key, pieces in seen.items() if key[0] == name}
        assert shares, name
        for key, pieces in shares.items():
            end = 0
            for first, length, _ in pieces:
                assert first == end, f"{key}: {pieces}"
                end = first + length
            assert end == pieces[0][2], f"{key} ends at {end} of {pieces[0][2]}"


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", CASES)
def test_every_element_once(ranks, cifar32, case, tmp_path):
    """A wrong offset, a share that is counted twice or not at all, padding taken for weights, a stale model."""
    world, flags, stage, changes = CASES[case]
    argv = [*words(cifar32, stage, changes, tmp_path / "config.json"), *flags]
    exact = "bf16" not in changes
    results = ranks.run(world, look, argv, str(cifar32 / "weights.safetensors"), exact)
    whole = load_file(str(cifar32 / "weights.safetensors"))
    frozen = ("blocks.0", "blocks.1", "blocks.2") if "--freeze" in flags else ()
    trained = [name for name in whole if not name.startswith(frozen)]
    assert_counted_once(results, trained)


IN_FLAT_MEMORY = (
    *("update_lp_params", "optimizer", "_update_scale"),
    # engine/flat_gradient.py
    *("_grad_acc_hooks", "_epilogue_ran_this_backward", "torch_autocast_gradscaler", "compute_grad_norm", "loss_scale"),
)
ATTRIBUTES = {
    "ZeRO-1": (1, {}, ("bit16_groups", "bit16_groups_flat", "single_partition_of_fp32_groups", *IN_FLAT_MEMORY)),
    "ZeRO-3": (
        3,
        {},
        (
            *("fp16_groups", "fp32_partitioned_groups_flat", "grad_position", "get_param_id", "optimizer"),
            "sub_group_to_group_id",
            *("_partition_all_parameters", "_reassign_or_swap_out_partitioned_parameters"),
        ),
    ),
}


def missing_attributes(argv, attributes):
    """On a rank: what the wrapper does not have, and what its parameters do not have."""
    engine = start(argv)
    optimizer = engine.engine.optimizer
    missing = [name for name in attributes if not hasattr(optimizer, name)]
    parameter = next(engine.module.parameters())
    if engine.stage == 3:
        missing += [name for name in ("ds_tensor", "ds_numel", "ds_shape") if not hasattr(parameter, name)]
        missing += [] if hasattr(parameter.ds_tensor, "ds_numel") else ["ds_tensor.ds_numel"]
        missing += [] if hasattr(parameter, "ds_process_group") else ["ds_process_group"]
    engine.close()
    return missing


@pytest.mark.parametrize("wrapper", ATTRIBUTES)
def test_canary_of_zeros_internals(ranks, cifar32, wrapper, tmp_path):
    """DeepSpeed renamed what zero_map.py reads."""
    stage, changes, attributes = ATTRIBUTES[wrapper]
    argv = words(cifar32, stage, changes, tmp_path / "config.json")
    assert ranks.run(1, missing_attributes, argv, attributes) == [[]]
