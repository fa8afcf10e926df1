"""Every timm name of the two classes is cut, small and at its legal degree, and computes the same logits."""

from __future__ import annotations

import pytest
import torch
from tp_models import cut_copies, tensor_parallel, whole_layers
from vits import what_it_computes

from ds_vit.models import ModelSpec, SequentialViT, create_model, supported_names
from ds_vit.parallel.tensor import check_cut, gather_logits, legal_degrees

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
        check_cut(create_model(spec, for_training=False), size)
        layers = whole_layers(spec, torch.float32)
        height, width = layers[0].patch_embed.img_size
        images = torch.randn(2, 3, height, width, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            for sequence_parallel in (False, True):
                tp = tensor_parallel(sequence_parallel)
                cut = SequentialViT(cut_copies(layers, tp, class_parallel=sequence_parallel))
                for training in (False, True):  # BatchNorm stems take the batch's statistics in training
                    whole = SequentialViT(layers).train(training)
                    cut.train(training)
                    expected, logits = whole(images, torch.arange(2)), cut(images, torch.arange(2))
                    if sequence_parallel:
                        logits = gather_logits(logits, NUM_CLASSES, tp)
                    assert expected.std() > 0.02, f"{name}: logits that say nothing"
                    scale = float(expected.abs().max())
                    torch.testing.assert_close(
                        logits, expected, rtol=0, atol=1e-5 * max(1.0, scale), msg=lambda m, name=name: f"{name}: {m}"
                    )


@pytest.fixture(scope="module")
def different() -> list[str]:
    """A name of each model that is another one when it is small: many differ in depth, width or weights alone."""
    by_model: dict[object, str] = {}
    for name in supported_names():
        by_model.setdefault(what_it_computes(create_model(small(name), for_training=False)), name)
    assert len(by_model) > 80
    return list(by_model.values())


@pytest.mark.slow
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_timm_name_is_cut(ranks, different, chunk):
    """A class of module that the table forgets, or that a name uses in a way of its own."""
    ranks.run(2, compare_logits, different[chunk::CHUNKS], 2, timeout=400)


@pytest.mark.exhaustive
@pytest.mark.parametrize("chunk", range(8))
def test_the_other_names_are_cut(ranks, different, chunk):
    """A difference between two names that `what_it_computes` does not see."""
    others = [name for name in supported_names() if name not in different]
    ranks.run(2, compare_logits, others[chunk::8], 2, timeout=400)
