"""The classifier cut over classes: the same loss and gradient as on the logits of all classes, little moved."""

from __future__ import annotations

import itertools
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from tp_models import from_all_ranks, tensor_parallel

from ds_vit.parallel.tensor.class_parallel import gather_logits, log_softmax, own_classes, pays
from ds_vit.tasks.classification.losses import build_loss, class_parallel_loss
from ds_vit.tasks.distillation.task import hard_loss, soft_loss

SAMPLES = 6
SMOOTHED = {"active": False, "smoothing": 0.1, "bce_loss": False, "bce_sum": False, "bce_target_thresh": None}
SWITCHES = {
    "multi_label": (False, True),
    "active": (False, True),
    "smoothing": (0.0, 0.2),
    "bce_loss": (False, True),
    "bce_sum": (False, True),
    # Between what 0.2 of smoothing makes of a target once (0.1 of 0) and twice (0.18), and of 1 (0.9 and 0.82).
    "bce_target_thresh": (None, 0.15, 0.85),
}
PRODUCT = [dict(zip(SWITCHES, values, strict=True)) for values in itertools.product(*SWITCHES.values())]
PRODUCT = [settings for settings in PRODUCT if settings["bce_loss"] or not settings["multi_label"]]  # as Classification


def loss_and_gradient(build, logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both; a loss scale of 256 must reach the gradient, and the logits stay."""
    x = logits.clone().requires_grad_()
    loss = build()(x, targets)
    (256.0 * loss).backward()
    assert torch.equal(x, logits), "the logits were changed"
    return loss.detach(), x.grad


def compare_losses(num_classes: int, level: float) -> None:
    """Every combination of settings, on this rank's classes and on all; `level` is added to the logits."""
    tp = tensor_parallel()
    share = -(-num_classes // tp.size)
    own = slice(tp.rank * share, (tp.rank + 1) * share)
    generator = torch.Generator().manual_seed(num_classes)
    logits = 3 * torch.randn(SAMPLES, num_classes, generator=generator) + level
    padded = torch.full((SAMPLES, share * tp.size), 77.0)  # what padding holds must not matter
    padded[:, :num_classes] = logits
    numbers = torch.randint(0, num_classes, (SAMPLES,), generator=generator)
    multi_hot = torch.randint(0, 2, (SAMPLES, num_classes), generator=generator).float()
    soft = torch.rand(SAMPLES, num_classes, generator=generator)  # not normalised, and on all sides of the thresholds
    for settings in PRODUCT if not level else [one for one in PRODUCT if not one["bce_loss"]]:
        targets = soft if settings["active"] else multi_hot if settings["multi_label"] else numbers
        sharded = partial(class_parallel_loss, SimpleNamespace(**settings), tp, num_classes)
        expected = loss_and_gradient(partial(build_loss, SimpleNamespace(**settings)), logits, targets)
        found = loss_and_gradient(sharded, padded[:, own], targets)
        assert len(set(from_all_ranks(found[0].item()))) == 1, f"the ranks' losses differ: {settings}"
        whole = torch.zeros_like(padded)
        whole[:, :num_classes] = expected[1]
        assert (found[0].dtype, found[0].shape) == (torch.float32, ())
        close = partial(torch.testing.assert_close, msg=lambda message, of=settings: f"{of}: {message}")
        close(found[0], expected[0], rtol=1e-6, atol=1e-6)
        close(found[1], whole[:, own], rtol=1e-5, atol=1e-6 * float(whole.abs().max()))
    assert torch.equal(gather_logits(padded[:, own], num_classes, tp), logits)


# Even, padded, and more ranks than classes: with 3 ranks 3/3/3, 4/4/2 and 1/1/0 classes.
@pytest.mark.parametrize(
    ("size", "num_classes", "level"), [(2, 10, 0), (3, 9, 0), (3, 10, 0), (3, 2, 0), (3, 10, 1000)]
)
def test_the_loss_is_that_of_all_logits(ranks, size, num_classes, level):
    """A maximum, a sum or a target that misses a rank's classes or is smoothed twice; padding or an empty rank that
    counts; an exponential that overflows; a difference of large numbers taken late."""
    ranks.run(size, compare_losses, num_classes, level)


def bytes_moved(bce: bool, num_classes: int) -> int:
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
    class_parallel_loss(SimpleNamespace(**SMOOTHED | {"bce_loss": bce}), tp, num_classes)(logits, targets).backward()
    return moved


def test_what_is_moved_does_not_grow_with_the_classes(ranks):
    """A loss that gathers the logits after all."""
    four_numbers = 4 * 4 * SAMPLES
    assert ranks.run(2, bytes_moved, False, 20) == [four_numbers] * 2
    assert ranks.run(2, bytes_moved, False, 2000) == [four_numbers] * 2
    assert ranks.run(2, bytes_moved, True, 2000) == [4] * 2


def nan_loss() -> tuple[float, bool]:
    tp = tensor_parallel()
    logits = torch.full((2, 5), torch.inf if tp.rank == 1 else 0.0, requires_grad=True)
    loss = class_parallel_loss(SimpleNamespace(**SMOOTHED | {"smoothing": 0.0}), tp, 10)(logits, torch.tensor([0, 1]))
    loss.backward()
    return loss.item(), bool(logits.grad.isnan().any())


def test_an_overflow_on_one_rank_is_seen_by_all(ranks):
    """A rank that takes a step which the others skip."""
    for loss, has_nan in ranks.run(2, nan_loss):
        assert loss != loss
        assert has_nan


# ---- small losses ----------------------------------------------------------------------------------------------------

TEMPERATURE = 3.0


def plain_soft_loss(student, teacher):
    """As in timm's `LogitDistillationTask`, on the logits of all classes."""
    own, wanted = (F.log_softmax(logits / TEMPERATURE, dim=1) for logits in (student, teacher))
    return F.kl_div(own, wanted, reduction="batchmean", log_target=True) * TEMPERATURE**2


def with_gradient(loss, student, teacher):
    """Loss and gradient in float64, of a loss in the inputs' type."""
    leaf = student.clone().requires_grad_()
    value = loss(leaf, teacher)
    assert value.dtype == student.dtype
    return value.double().detach(), torch.autograd.grad(value, leaf)[0].double()


def compare_small_losses(num_classes: int) -> None:
    """Soft losses of 1e-1 to 1e-6 on this rank's classes and in one process, against float64."""
    tp = tensor_parallel()
    first, count = own_classes(num_classes, tp)
    own, generator = slice(first, first + count), torch.Generator().manual_seed(num_classes)
    teacher = 8 * torch.randn(32, num_classes, generator=generator) + 20
    apart = torch.randn(32, num_classes, generator=generator)
    rounding = torch.finfo(torch.float32).eps
    for level in range(1, 7):
        student = teacher + 10 ** ((1 - level) / 2) * apart
        value, gradient = with_gradient(plain_soft_loss, student.double(), teacher.double())
        assert 0.1 < value * 10**level < 10, f"a loss of {value:.1e} instead of 1e-{level}"
        plain = with_gradient(plain_soft_loss, student, teacher)
        sharded = with_gradient(partial(soft_loss, temperature=TEMPERATURE, tp=tp), student[:, own], teacher[:, own])
        assert len(set(from_all_ranks(sharded[0].item()))) == 1
        whole = with_gradient(partial(soft_loss, temperature=TEMPERATURE), student, teacher)
        for name, found, columns in (("sharded", sharded, own), ("whole", whole, slice(None))):
            for what, one, theirs, exact in zip(("loss", "gradient"), found, plain, (value, gradient), strict=True):
                if what == "gradient":
                    theirs, exact = theirs[:, columns], exact[:, columns]
                error, allowed = (one - exact).norm(), (theirs - exact).norm() + rounding * exact.norm()
                assert error <= allowed, f"{what} {name} at 1e-{level}: {error:.1e} off, the plain loop {allowed:.1e}"


@pytest.mark.parametrize(("size", "num_classes"), [(2, 10), (2, 2001), (3, 2)])
def test_a_small_soft_loss_is_as_exact_as_the_plain_loops(ranks, size, num_classes):
    """Cross-entropy minus entropy, which cancel; logarithms of probabilities that are rounded before they differ."""
    ranks.run(size, compare_small_losses, num_classes)


def compare_sure_rows() -> None:
    """The logarithm of a probability near 1, of large logits, and a hard loss of it."""
    tp = tensor_parallel()
    logits = 25 + torch.randn(64, 10, generator=torch.Generator().manual_seed(0))
    logits[torch.arange(64), torch.arange(64) % 10] += torch.linspace(8, 14, 64)
    first, count = own_classes(10, tp)
    own = slice(first, first + count)
    exact, found = logits.double().log_softmax(1)[:, own], log_softmax(logits[:, own], tp)
    rounding = 2 * torch.finfo(torch.float32).eps  # of the sum of exponentials, which is above 1
    assert (found - exact)[exact > -0.1].abs().max() <= rounding
    wanted = -logits.double().log_softmax(1).amax(1).mean()
    assert abs(hard_loss(logits[:, own], logits, tp).double() - wanted) <= rounding


def test_a_sure_class_is_as_exact_as_in_one_process(ranks):
    """Logits less the logarithm of a sum, both rounded at their size: 1e-6 off, where the entropy itself is 1e-4."""
    ranks.run(2, compare_sure_rows)


def test_when_it_pays():
    """A rule that cuts ImageNet-1k's classifier, or leaves ImageNet-21k's whole."""
    assert not pays(1000, 8)
    assert pays(21841, 2)
    assert not pays(10**6, 1)
