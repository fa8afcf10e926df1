"""Every kind of head, and the whole model: cut, classifier whole or class-parallel, they are what they are uncut."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from tp_models import (
    HEADS,
    KINDS,
    NUM_CLASSES,
    all_tokens,
    close,
    cut_copies,
    own_tokens,
    run,
    spec_of,
    tensor_parallel,
    whole_gradients,
    whole_layers,
)

from ds_vit.models import SequentialViT
from ds_vit.parallel.tensor import gather_logits
from ds_vit.tasks.losses import build_loss, class_parallel_loss

SAMPLES = 2
LABELS = torch.tensor([1, 9])
LOSS = {"soft_targets": False, "smoothing": 0.1, "bce": False}


def compare_head(kind: str, class_parallel: bool, sequence_parallel: bool) -> None:
    tp = tensor_parallel(sequence_parallel)
    *_, head = whole_layers(spec_of(*HEADS[kind]))
    (cut_head,) = cut_copies([head], tp, class_parallel)
    count = head.num_tokens.training
    tokens = torch.randn(SAMPLES, count, head.embed_dim, dtype=torch.float64)
    keys = torch.arange(SAMPLES)

    x = tokens.clone().requires_grad_()
    logits = run(head, (x, keys))
    build_loss(**LOSS)(logits, LABELS).backward()

    cut_x = own_tokens(tokens, tp, fill=3.0)
    cut_logits = run(cut_head, (cut_x, keys))
    if class_parallel:
        class_parallel_loss(tp=tp, num_classes=NUM_CLASSES, **LOSS)(cut_logits, LABELS).backward()
        cut_logits = gather_logits(cut_logits, NUM_CLASSES, tp)
    else:
        build_loss(**LOSS)(cut_logits, LABELS).backward()

    close(cut_logits.detach(), logits.detach(), "logits")
    # The loss is computed in float32, and so is the gradient that it hands back.
    close(all_tokens(cut_x.grad, count, tp), x.grad, "input gradient", 1e-6)
    gradients = whole_gradients(cut_head)
    for name, parameter in head.named_parameters():
        close(gradients[name], parameter.grad, name, 1e-6)


def compare_heads() -> None:
    for kind in HEADS:
        for class_parallel in (False, True):
            for sequence_parallel in (False, True):
                compare_head(kind, class_parallel, sequence_parallel)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_a_cut_head_is_the_head(ranks, size):
    """A pooled latent whose gradient is a rank's alone, classes out of order, a gradient counted once a rank."""
    ranks.run(size, compare_heads)


def compare_model(kind: str, interval: int, sequence_parallel: bool) -> None:
    """Images to loss, drop-path, dropout and patch dropout on: the gradients of every parameter and of the images."""
    random = {"drop_rate": 0.2, "pos_drop_rate": 0.2, "proj_drop_rate": 0.2, "patch_drop_rate": 0.3}
    name, kwargs = KINDS[kind]
    layers = whole_layers(spec_of(name, kwargs | random, drop_path=0.4))
    tp = tensor_parallel(sequence_parallel)
    cut = SequentialViT(cut_copies(layers, tp, class_parallel=True), checkpoint_interval=interval)
    whole = SequentialViT(layers)
    for model in (cut, whole):
        model.train()
    side = layers[0].patch_embed.img_size[0]
    images = torch.randn(SAMPLES, 3, side, side, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    keys = torch.tensor([5, 6])
    x, cut_x = (images.clone().requires_grad_() for _ in range(2))

    logits = whole(x, keys)
    F.cross_entropy(logits.float(), LABELS).backward()
    cut_logits = cut(cut_x, keys)
    loss = class_parallel_loss(tp=tp, num_classes=NUM_CLASSES, **LOSS | {"smoothing": 0.0})
    loss(cut_logits, LABELS).backward()

    close(gather_logits(cut_logits, NUM_CLASSES, tp), logits.detach(), "logits")
    close(cut_x.grad, x.grad, "gradient of the images", 1e-6)
    gradients = whole_gradients(cut)
    for name, parameter in whole.named_parameters():
        close(gradients[name], parameter.grad, name, 1e-6)

    with torch.no_grad():
        for model in (cut, whole):
            model.eval()
        close(gather_logits(cut(images), NUM_CLASSES, tp), whole(images), "logits in evaluation")


def compare_models() -> None:
    for kind in ("Attention and Mlp", "packed SwiGLU", "parallel scaling, bias", "learned rotary frequencies"):
        for sequence_parallel in (False, True):
            for interval in (0, 1):
                compare_model(kind, interval, sequence_parallel)


@pytest.mark.slow
def test_a_cut_model_with_everything_random(ranks):
    """Ranks that drop different elements, a mask of a part in place of a part of the mask, kept patches miscounted."""
    ranks.run(3, compare_models)
