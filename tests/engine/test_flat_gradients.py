"""ZeRO-1 and ZeRO-2 step on the gradients where they were put, without lining them up once more."""

from unittest import mock

import pytest
import torch
from curves import train_main
from project import ROOT


def pieces_of_each_step(argv):
    """On a rank: for each partition and step, whether it was one piece of memory; what it holds is what DeepSpeed's
    own copy of its gradients would."""
    from ds_vit.engine import base

    own, found = base.copy_buckets_at_once, []

    def watched(optimizer):
        own(optimizer)
        flat_of = optimizer._get_preflattened_grad_partition

        def flat(group):
            got, gradients = flat_of(group), optimizer.averaged_gradients[group]
            if got is not None:
                assert torch.equal(got, optimizer.flatten(gradients)), "with the padding"
            found.append(got is not None or not optimizer.params_in_partition[group])
            return got

        optimizer._get_preflattened_grad_partition = flat

    with mock.patch.object(base, "copy_buckets_at_once", watched):
        assert train_main(argv) == 0
    return found


@pytest.mark.parametrize(
    ("world", "stage", "more"),
    [(1, 1, []), (3, 1, ["--grad-accum-steps", "2"]), pytest.param(3, 2, [], marks=pytest.mark.slow)],
)
def test_one_piece(ranks, tmp_path, world, stage, more):
    # Catches: a gradient beside its place; padding that is not zero; a partition that begins inside a parameter.
    argv = ["--dataset", "digits", "--model", "vit_tiny_patch16_224", "--img-size", "16", "--no-aug", "--workers", "0"]
    argv += ["--model-kwargs", "patch_size=8", "embed_dim=24", "depth=1", "num_heads=2", "--batch-size", "5", *more]
    argv += ["--deepspeed_config", ROOT / "ds_configs" / f"cpu_zero{stage}_fp32.json", "--max-steps", "2"]
    argv += ["--val-split", "", "--output", tmp_path / "run"]
    for found in ranks.run(world, pieces_of_each_step, [str(word) for word in argv]):
        assert len(found) >= 2 * 2, "decayed and not, two steps"
        assert all(found)
