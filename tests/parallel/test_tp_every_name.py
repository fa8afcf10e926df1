"""Each kind of block and head among timm's names is sharded, small, and computes the same logits."""

from __future__ import annotations

import functools

import pytest
import torch
from tp_models import sharded_copies, tensor_parallel, whole_layers
from vits import different_names, what_it_computes

from ds_vit.models.sequential import SequentialViT
from ds_vit.models.zoo import ModelSpec, create_model
from ds_vit.parallel.tensor.class_parallel import gather_logits
from ds_vit.parallel.tensor.shard import check_degree, legal_degrees

NUM_CLASSES = 10
CHUNKS = 4


def small(name: str) -> ModelSpec:
    """Depth 2, four patches a side, and where the stem allows it a width that 2 ranks can share."""
    arguments = {"depth": 2}
    if not name.startswith(("vitamin", "vit_base_mci")):  # their stems fix the width
        arguments |= {"embed_dim": 96, "num_heads": 6}
    if "sapiens2" in name:  # grouped queries
        arguments |= {"num_kv_heads": 2, "rope_rescale_coords": 1.0}
    model = create_model(ModelSpec(name, model_kwargs=arguments), for_training=False)
    if 2 not in legal_degrees(model):  # a hidden size that is odd at this width
        arguments |= {"mlp_ratio": 4.0}
    patch_embed = model.patch_embed
    size = 64 if hasattr(patch_embed, "backbone") else 4 * patch_embed.patch_size[0]
    return ModelSpec(name, NUM_CLASSES, img_size=size, model_kwargs=arguments)


def compare_logits(names: list[str], size: int) -> None:
    for name in names:
        spec = small(name)
        check_degree(create_model(spec, for_training=False), size)
        layers = whole_layers(spec, torch.float32)
        height, width = layers[0].patch_embed.img_size
        images = torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(1))
        tp = tensor_parallel(sequence_parallel=True)
        cut = SequentialViT(sharded_copies(layers, tp, class_parallel=True))
        for training in (False, True):  # BatchNorm stems take the batch's statistics in training
            whole = SequentialViT(layers).train(training)
            with torch.no_grad():
                expected = whole(images, torch.arange(2))
                logits = gather_logits(cut.train(training)(images, torch.arange(2)), NUM_CLASSES, tp)
            assert expected.std() > 0.02, f"{name}: logits that say nothing"
            atol = 1e-5 * max(1.0, float(expected.abs().max()))
            torch.testing.assert_close(logits, expected, rtol=0, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


@functools.cache
def different_cuts() -> list[str]:
    """A name of each kind of blocks and head: stems, image sizes and depths are not sharded."""
    by_parts: dict[object, str] = {}
    for name in different_names():
        model = create_model(small(name), for_training=False)
        pool = model.attn_pool and what_it_computes(model.attn_pool)
        by_parts.setdefault((type(model), model.global_pool, what_it_computes(model.blocks), pool), name)
    assert len(by_parts) > 50
    return list(by_parts.values())


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_timm_name_is_cut(ranks, chunk):
    """A class of module that the table forgets, or that a name uses in a way of its own."""
    ranks.run(2, compare_logits, different_cuts()[chunk::CHUNKS], 2, timeout=400)
