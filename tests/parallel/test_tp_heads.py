"""The whole model, with every kind of head: cut, classifier whole or class-parallel, it is what it is uncut."""

from __future__ import annotations

import itertools

import pytest
import torch
from tp_models import (
    HEADS,
    KINDS,
    NUM_CLASSES,
    close,
    sharded_copies,
    spec_of,
    tensor_parallel,
    whole_gradients,
    whole_layers,
)

from ds_vit.models.sequential import SequentialViT
from ds_vit.parallel.tensor.class_parallel import gather_logits
from ds_vit.tasks.losses import build_loss, class_parallel_loss

SAMPLES = 2
LABELS = torch.tensor([1, 9])
BLOCKS = ("packed SwiGLU", "parallel scaling, bias", "learned rotary frequencies")
MODELS = {**HEADS, **{kind: KINDS[kind] for kind in BLOCKS}}
LOSS = {"soft_targets": False, "smoothing": 0.1, "bce": False}


def compare_model(kind: str, interval: int, sequence_parallel: bool, class_parallel: bool) -> None:
    """Images to loss, drop-path, dropout and patch dropout on: the gradients of every parameter and of the images."""
    random = {"drop_rate": 0.2, "pos_drop_rate": 0.2, "proj_drop_rate": 0.2, "patch_drop_rate": 0.3}
    name, kwargs = MODELS[kind]
    layers = whole_layers(spec_of(name, kwargs | random, drop_path=0.4))
    tp = tensor_parallel(sequence_parallel)
    cut = SequentialViT(sharded_copies(layers, tp, class_parallel), checkpoint_interval=interval)
    whole = SequentialViT(layers)
    for model in (cut, whole):
        model.train()
    side = layers[0].patch_embed.img_size[0]
    images = torch.randn(SAMPLES, 3, side, side, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    keys = torch.tensor([5, 6])
    x, cut_x = (images.clone().requires_grad_() for _ in range(2))

    def all_classes(logits: torch.Tensor) -> torch.Tensor:
        return gather_logits(logits, NUM_CLASSES, tp) if class_parallel else logits.detach()

    loss = build_loss(**LOSS)
    cut_loss = class_parallel_loss(tp=tp, num_classes=NUM_CLASSES, **LOSS) if class_parallel else loss
    logits, cut_logits = whole(x, keys), cut(cut_x, keys)
    loss(logits, LABELS).backward()
    cut_loss(cut_logits, LABELS).backward()

    close(all_classes(cut_logits), logits.detach(), "logits")
    # The loss is computed in float32, and so is the gradient that it hands back.
    close(cut_x.grad, x.grad, "gradient of the images", 1e-6)
    gradients = whole_gradients(cut)
    for name, parameter in whole.named_parameters():
        close(gradients[name], parameter.grad, name, 1e-6)

    with torch.no_grad():
        for model in (cut, whole):
            model.eval()
        close(all_classes(cut(images)), whole(images), "logits in evaluation")


def compare_models() -> None:
    for kind in MODELS:
        for sequence_parallel, class_parallel in itertools.product((False, True), repeat=2):
            compare_model(kind, int(class_parallel), sequence_parallel, class_parallel)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_a_cut_model_is_the_model(ranks, size):
    """A pooled latent whose gradient is a rank's alone, classes out of order, a gradient counted once a rank; ranks
    that drop different elements, a mask of a part in place of a part of the mask, kept patches miscounted."""
    ranks.run(size, compare_models)
