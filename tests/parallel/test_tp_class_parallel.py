"""The classifier cut over classes: the same loss and gradient as on the logits of all classes, little moved."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tp_models import from_all_ranks, tensor_parallel

from ds_vit.parallel.tensor import gather_logits, pays
from ds_vit.tasks.losses import build_loss, class_parallel_loss

SAMPLES = 6
# Even, padded, and more ranks than classes: with 3 ranks 3/3/3, 4/4/2 and 1/1/0 classes.
CLASS_COUNTS = (9, 10, 2)

LOSSES = {
    "hard": {"soft_targets": False, "smoothing": 0.0, "bce": False},
    "smoothing": {"soft_targets": False, "smoothing": 0.1, "bce": False},
    "soft": {"soft_targets": True, "smoothing": 0.1, "bce": False},
    "bce": {"soft_targets": False, "smoothing": 0.0, "bce": True},
}


def targets_for(loss: str, num_classes: int, generator: torch.Generator) -> torch.Tensor:
    if LOSSES[loss]["soft_targets"]:  # not normalised: timm's loss uses the targets as they are
        return torch.rand(SAMPLES, num_classes, generator=generator)
    return torch.randint(0, num_classes, (SAMPLES,), generator=generator)


def compare_losses(loss: str, level: float) -> None:
    tp = tensor_parallel()
    for num_classes in CLASS_COUNTS:
        generator = torch.Generator().manual_seed(num_classes)
        logits = (3 * torch.randn(SAMPLES, num_classes, generator=generator) + level).requires_grad_()
        targets = targets_for(loss, num_classes, generator)
        expected = build_loss(**LOSSES[loss])(logits, targets)
        (256.0 * expected).backward()  # a loss scale must reach the gradient

        share = -(-num_classes // tp.size)
        padded = torch.full((SAMPLES, share * tp.size), 77.0)  # what padding holds must not matter
        padded[:, :num_classes] = logits.detach()
        own = padded[:, tp.rank * share : (tp.rank + 1) * share].clone().requires_grad_()
        before = own.detach().clone()
        actual = class_parallel_loss(tp=tp, num_classes=num_classes, **LOSSES[loss])(own, targets)
        (256.0 * actual).backward()

        assert torch.equal(own, before), "the logits were changed"
        assert actual.dtype == torch.float32
        assert actual.shape == ()
        assert len(set(from_all_ranks(actual.item()))) == 1, "the ranks' losses differ"
        torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
        gradient = torch.cat(from_all_ranks(own.grad), 1)
        atol = 1e-6 * float(logits.grad.abs().max())
        torch.testing.assert_close(gradient[:, :num_classes], logits.grad, rtol=1e-5, atol=atol)
        assert not gradient[:, num_classes:].any(), "padding has a gradient"
        assert torch.equal(gather_logits(own, num_classes, tp), logits)


@pytest.mark.parametrize(("loss", "level"), [("hard", 0.0), ("smoothing", 1000.0), ("soft", 1000.0), ("bce", 0.0)])
def test_the_loss_is_that_of_all_logits(ranks, loss, level):
    """Padding or an empty rank that counts; an exponential that overflows; a difference of large numbers taken late."""
    ranks.run(3, compare_losses, loss, level)


SWITCHES = {
    "multi_label": (False, True),
    "soft_targets": (False, True),
    "smoothing": (0.0, 0.2),
    "bce": (False, True),
    "bce_sum": (False, True),
    # Between what 0.2 of smoothing makes of a target once (0.1 of 0) and twice (0.18), and of 1 (0.9 and 0.82).
    "bce_target_thresh": (None, 0.15, 0.85),
}
PRODUCT = [dict(zip(SWITCHES, values, strict=True)) for values in itertools.product(*SWITCHES.values())]


def wrong_losses(num_classes: int) -> list[str]:
    """Which settings of the product have another loss or gradient than on the logits of all classes."""
    tp = tensor_parallel()
    share = -(-num_classes // tp.size)
    first = tp.rank * share
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(SAMPLES, num_classes, generator=generator)
    padded = torch.full((SAMPLES, share * tp.size), 77.0)
    padded[:, :num_classes] = logits
    numbers = torch.randint(0, num_classes, (SAMPLES,), generator=generator)
    multi_hot = torch.randint(0, 2, (SAMPLES, num_classes), generator=generator).float()
    soft = torch.rand(SAMPLES, num_classes, generator=generator)  # not normalised, and on all sides of the thresholds

    def attempt(build, x: torch.Tensor, settings: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor] | str:
        x = x.clone().requires_grad_()
        targets = soft if settings["soft_targets"] else multi_hot if settings["multi_label"] else numbers
        try:
            loss = build(**settings)(x, targets)
        except ValueError as error:
            return str(error)
        loss.backward()
        return loss.detach(), x.grad

    def cut(**settings: Any):
        return class_parallel_loss(tp=tp, num_classes=num_classes, **settings)

    wrong = []
    for settings in PRODUCT:
        expected = attempt(build_loss, logits, settings)
        actual = attempt(cut, padded[:, first : first + share], settings)
        if isinstance(expected, str) or isinstance(actual, str):
            same = isinstance(expected, str) and expected == actual
        else:
            whole = torch.zeros_like(padded)
            whole[:, :num_classes] = expected[1]
            atol = 1e-6 * float(whole.abs().max())
            same = torch.allclose(actual[0], expected[0], rtol=1e-6, atol=1e-6)
            same &= torch.allclose(actual[1], whole[:, first : first + share], rtol=1e-5, atol=atol)
        if not same:
            wrong.append(", ".join(f"{name} {value}" for name, value in settings.items()))
    return wrong


@pytest.mark.parametrize("size", [2, 3])
def test_every_combination_of_settings(ranks, size):
    """Targets that one form of the loss smooths or binarises and the other does not, or that one does twice."""
    assert ranks.run(size, wrong_losses, 10) == [[]] * size


def bytes_moved(loss: str, num_classes: int) -> int:
    """Bytes that the loss of this rank hands to collectives, forward and backward."""
    tp = tensor_parallel()
    moved = 0

    def counting(collective, argument):
        def call(*args, **kwargs):
            nonlocal moved
            moved += args[argument].nbytes
            return collective(*args, **kwargs)

        return call

    dist.all_reduce = counting(dist.all_reduce, 0)
    dist.all_gather_into_tensor = counting(dist.all_gather_into_tensor, 1)
    logits = torch.randn(SAMPLES, num_classes // tp.size, requires_grad=True)
    targets = torch.zeros(SAMPLES, dtype=torch.int64)
    class_parallel_loss(tp=tp, num_classes=num_classes, **LOSSES[loss])(logits, targets).backward()
    return moved


def test_what_is_moved_does_not_grow_with_the_classes(ranks):
    """A loss that gathers the logits after all."""
    four_numbers = 4 * 4 * SAMPLES
    assert ranks.run(2, bytes_moved, "smoothing", 20) == [four_numbers] * 2
    assert ranks.run(2, bytes_moved, "smoothing", 2000) == [four_numbers] * 2
    assert ranks.run(2, bytes_moved, "bce", 2000) == [4] * 2


def nan_loss() -> tuple[float, bool]:
    tp = tensor_parallel()
    logits = torch.full((2, 5), torch.inf if tp.rank == 1 else 0.0, requires_grad=True)
    loss = class_parallel_loss(tp=tp, num_classes=10, **LOSSES["hard"])(logits, torch.tensor([0, 1]))
    loss.backward()
    return loss.item(), bool(logits.grad.isnan().any())


def test_an_overflow_on_one_rank_is_seen_by_all(ranks):
    """A rank that takes a step which the others skip."""
    for loss, has_nan in ranks.run(2, nan_loss):
        assert loss != loss
        assert has_nan


def test_when_it_pays():
    """A rule that cuts ImageNet-1k's classifier, or leaves ImageNet-21k's whole."""
    assert not pays(1000, 8)
    assert pays(21841, 2)
    assert not pays(10**6, 1)


def test_what_build_loss_refuses_is_refused():
    """Multi-hot targets under softmax."""
    with pytest.raises(ValueError, match="--bce-loss"):
        class_parallel_loss(tp=None, num_classes=3, soft_targets=False, smoothing=0, bce=False, multi_label=True)
