"""The losses of self-distillation against lightly's and lightly-train's, over data-parallel and tensor-parallel ranks.

Theirs run in one process on the rows of all ranks; ours on each rank's rows and shard of the prototypes. Both are
given bottleneck rows and prototypes, so that gradients of both are compared.
"""

import contextlib
import functools
import importlib.util
from dataclasses import replace
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from peaks import LargestTensor, SavedBytes
from project import lightly_train

from ds_vit.tasks.dino import loss as losses

SAMPLES, NUM_LOCAL, WIDTH, PROTOTYPES = 24, 3, 24, 37
PATCHES = (4, 4)
STUDENT_TEMP = 0.1
TEACHER_TEMP = 0.04
ROWS_AT_ONCE = 20
"""So that each loss takes several parts, the last of them smaller."""
# (data-parallel ranks, tensor-parallel ranks)
LAYOUTS = [(1, 1), (2, 1), (2, 2)]
PARTS = ("dino, centered", "dino, sinkhorn", "ibot, centered", "ibot, sinkhorn", "koleo")


def drawn(*shape, number=0):
    """Normalised rows in float64."""
    generator = torch.Generator().manual_seed(number)
    return F.normalize(torch.randn(*shape, generator=generator, dtype=torch.float64), dim=-1)


def crop_masks(kind):
    """bool [crops, 4, 4]: a different number of masked patches in each crop, and none in some."""
    generator = torch.Generator().manual_seed(5)
    scores = torch.rand(2 * SAMPLES, *PATCHES, generator=generator)
    masks = scores < torch.linspace(0.1, 0.9, 2 * SAMPLES)[:, None, None]
    masks[::3] = False
    if kind == "one rank has none":
        masks[SAMPLES:] = False  # the second rank's of two, and the third's of three
    return masks


def global_batch(part, masks="uneven"):
    """All ranks' inputs of a loss; rows are ordered by sample."""
    lengths = torch.linspace(0.5, 2.0, PROTOTYPES).double()[:, None]
    batch = {name: lengths * drawn(PROTOTYPES, WIDTH, number=n) for n, name in enumerate(("prototypes", "theirs"), 1)}
    batch["center"] = 0.1 * drawn(1, PROTOTYPES, number=3)[0]
    if part.startswith("dino"):
        teacher = drawn(SAMPLES, 2, WIDTH, number=4)
        student = drawn(SAMPLES, 2 + NUM_LOCAL, WIDTH, number=5)
    elif part.startswith("ibot"):
        batch["masks"] = crop_masks(masks)
        patches = int(batch["masks"].sum())
        teacher, student = drawn(patches, WIDTH, number=4), drawn(patches, WIDTH, number=5)
    else:
        teacher, student = None, 3.0 * drawn(SAMPLES, WIDTH, number=4)
    return {**batch, "teacher": teacher, "student": student}


# ---- theirs ----------------------------------------------------------------------------------------------------------


def dinov2_losses():
    """lightly-train's file of DINOv2's losses, without the package, which imports all of its dependencies."""
    path = lightly_train() / "_methods" / "dinov2" / "dinov2_loss.py"
    spec = importlib.util.spec_from_file_location("lightly_train_dinov2_loss", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def their_loss(part, batch, student, prototypes):
    """The loss by lightly or lightly-train, and the centre that it leaves, if it has one."""
    if part == "koleo":
        return pytest.importorskip("lightly.loss").KoLeoLoss()(student), None
    logits = student @ F.normalize(prototypes, dim=-1).T
    targets = batch["teacher"] @ F.normalize(batch["theirs"], dim=-1).T
    sinkhorn = part.endswith("sinkhorn")
    module = dinov2_losses() if sinkhorn else pytest.importorskip("lightly.loss")
    if part.startswith("dino"):
        loss = module.DINOLoss(PROTOTYPES, student_temp=STUDENT_TEMP).to(logits.dtype)
        if not sinkhorn:
            loss.center = batch["center"].clone()[None, None]
            value = loss(list(targets.unbind(1)), list(logits.unbind(1)), teacher_temp=TEACHER_TEMP)
            return value, loss.center.flatten()
        # As dinov2/train/ssl_meta_arch.py puts the terms together.
        assigned = loss.sinkhorn_knopp_teacher(targets.transpose(0, 1).flatten(0, 1), TEACHER_TEMP).chunk(2)
        terms = 2 + 2 * NUM_LOCAL
        of_local = loss(logits[:, 2:].unbind(1), assigned)
        both = loss([logits[:, :2].transpose(0, 1).flatten(0, 1)], [torch.cat(assigned[::-1])])
        return of_local / terms + both * 2 / terms, None
    loss = module.IBOTPatchLoss(PROTOTYPES, student_temp=STUDENT_TEMP).to(logits.dtype)
    if not sinkhorn:
        loss.center.center = batch["center"].clone()[None]
        return loss(targets, logits, batch["masks"], teacher_temp=TEACHER_TEMP), loss.center.value.flatten()
    assigned = loss.sinkhorn_knopp_teacher(targets, TEACHER_TEMP, torch.tensor([len(targets)]))
    return loss.forward_masked(logits, assigned, batch["masks"].flatten(1)), None


@contextlib.contextmanager
def computing_in(dtype):
    """For float64: lightly makes its temperature and weights in the default type, lightly-train calls `float()`."""
    if dtype == "float64":
        torch.set_default_dtype(torch.float64)
    try:
        convert = torch.Tensor.double if dtype == "float64" else torch.Tensor.float
        with mock.patch.object(torch.Tensor, "float", convert):
            yield
    finally:
        torch.set_default_dtype(torch.float32)


@functools.cache
def expected(part, dtype="float64", masks="uneven"):
    """What theirs give on all rows: the loss, its gradients for student's rows and prototypes, the next centre."""
    batch = in_type(global_batch(part, masks), dtype)
    leaves = [batch[name].requires_grad_() for name in ("student", "prototypes")]
    with computing_in(dtype):
        value, center = their_loss(part, batch, *leaves)
    gradients = torch.autograd.grad(value, leaves, allow_unused=True)
    return {"loss": value.detach(), "rows": gradients[0], "prototypes": gradients[1], "center": center}


def prototypes_of(weight):
    """As the towers give them: in float32, or float64 of a float64 weight, with the lengths of the rows."""
    weight = weight if weight.dtype == torch.float64 else weight.float()
    return losses.Prototypes(weight, weight.detach().norm(dim=-1))


def in_type(batch, dtype):
    """Floating-point tensors in another type, as new tensors."""
    kind = getattr(torch, dtype)
    return {
        name: value.to(kind, copy=True) if value is not None and value.is_floating_point() else value
        for name, value in batch.items()
    }


# ---- ours ------------------------------------------------------------------------------------------------------------


def own_batch(batch, rank, dp):
    """The rows of one data-parallel rank."""
    if "masks" not in batch:
        return {
            name: value if name in ("prototypes", "theirs", "center") or value is None else value.chunk(dp)[rank]
            for name, value in batch.items()
        }
    counts = [int(masks.sum()) for masks in batch["masks"].chunk(dp)]
    rows = {name: batch[name].split(counts)[rank] for name in ("teacher", "student")}
    return {**batch, **rows, "masks": batch["masks"].chunk(dp)[rank]}


def our_share(part, batch, rank, dp, sum_over_ranks, gather, *, tp=None, micro_batches=1):
    """One rank's loss, its gradients and the next centre; `batch` is the rank's."""
    leaves = [batch[name].clone().requires_grad_() for name in ("student", "prototypes")]
    student, prototypes = leaves
    if part == "koleo":
        value = losses.koleo(student, gather, rank * len(student))
        return {"loss": value.detach(), "rows": torch.autograd.grad(value, student)[0]}
    teacher, theirs, center = batch["teacher"].flatten(0, -2), prototypes_of(batch["theirs"]), {}
    own = prototypes_of(prototypes)
    if part.endswith("centered"):
        assignment = losses.centered(teacher, theirs, TEACHER_TEMP, batch["center"], tp)
        center = {"center": losses.next_center(batch["center"], teacher, theirs, sum_over_ranks)}
    else:
        assignment = losses.sinkhorn(teacher, theirs, TEACHER_TEMP, sum_over_ranks, tp)
    if part.startswith("dino"):
        rows = student.chunk(micro_batches)
        of_rows = [losses.crop_weights(len(one), NUM_LOCAL) for one in rows]
    else:
        of_rows = [losses.patch_weights(one.flatten(1)) for one in batch["masks"].chunk(micro_batches)]
        rows = student[:, None].split([len(one) for one in of_rows])
    values, first = [], 0
    for one, of_one in zip(rows, of_rows, strict=True):
        count = len(one) * of_one.shape[-1]
        piece = replace(assignment, rows=teacher[first : first + count])
        values.append(losses.assignment_cross_entropy(one, own, STUDENT_TEMP, piece, of_one, tp))
        first += count
    assert first == len(assignment.rows)
    value = torch.stack(values).mean()
    gradients = torch.autograd.grad(value, leaves)
    return {"loss": value.detach(), "rows": gradients[0], "prototypes": gradients[1], **center}


def shares_on_rank(dp, tp, cases):
    """On a rank: the shares of several cases by name (part, dtype, masks, micro-batches)."""
    import torch.distributed as dist

    from ds_vit.config.schema import RunConfig
    from ds_vit.parallel.groups import build_groups, gather_rows
    from ds_vit.parallel.layout import Layout
    from ds_vit.parallel.tensor.class_parallel import own_classes

    losses.ROWS_AT_ONCE = ROWS_AT_ONCE
    groups = build_groups(Layout(pp=1, dp=dp, tp=tp))
    shards = groups.tensor_parallel(RunConfig(tp=tp))

    def sum_over_ranks(x):
        x = x.clone()
        dist.all_reduce(x, group=groups.dp)
        return x

    shares = {}
    for part, dtype, masks, micro_batches in cases:
        batch = own_batch(in_type(global_batch(part, masks), dtype), groups.dp_rank, dp)
        if shards is not None:
            first, count = own_classes(PROTOTYPES, shards)
            batch |= {name: batch[name][first : first + count] for name in ("prototypes", "theirs", "center")}
        gather = functools.partial(gather_rows, group=groups.dp)
        options = {"tp": shards, "micro_batches": micro_batches}
        share = our_share(part, batch, groups.dp_rank, dp, sum_over_ranks, gather, **options)
        shares[part, dtype, masks, micro_batches] = (groups.dp_rank, groups.tp_rank, share)
    return shares


def combined(shares, dp):
    """The loss and gradients of the global batch from [(data-parallel rank, tensor-parallel rank, share)]."""
    by_rank = {(dp_rank, tp_rank): share for dp_rank, tp_rank, share in shares}
    tp = len(by_rank) // dp
    for (dp_rank, tp_rank), share in by_rank.items():
        first = by_rank[dp_rank, 0]
        assert torch.equal(share["loss"], first["loss"]), f"tensor-parallel rank {tp_rank} has another loss"
        assert torch.equal(share["rows"], first["rows"]), f"tensor-parallel rank {tp_rank} has other gradients"
    replicas = [by_rank[rank, 0] for rank in range(dp)]
    whole = {"loss": torch.stack([share["loss"] for share in replicas]).mean()}
    whole["rows"] = torch.cat([share["rows"] for share in replicas]) / dp
    if "prototypes" in replicas[0]:
        of_shards = [sum(by_rank[rank, shard]["prototypes"] for rank in range(dp)) / dp for shard in range(tp)]
        whole["prototypes"] = torch.cat(of_shards)
    if "center" in replicas[0]:
        whole["center"] = torch.cat([by_rank[0, shard]["center"] for shard in range(tp)])
        for rank, shard in by_rank:
            assert torch.equal(by_rank[rank, shard]["center"], by_rank[0, shard]["center"]), "replicas' centres differ"
    return whole


def assert_equals_theirs(found, case):
    """Loss, gradients and centre of the global batch, each by its relative L2 error."""
    part, dtype, masks, _ = case
    wanted = {name: value for name, value in expected(part, dtype, masks).items() if value is not None}
    assert found.keys() == wanted.keys()
    errors = {name: (found[name] - wanted[name]).norm().item() / wanted[name].norm().item() for name in wanted}
    assert max(errors.values()) <= 1e-12, f"relative errors: {errors}"


CASES = [
    (part, "float64", masks, micro_batches)
    for part in PARTS
    for masks in (("uneven", "one rank has none") if part.startswith("ibot") else ("uneven",))
    for micro_batches in ((1,) if part == "koleo" else (1, 4))
]


@functools.cache
def all_shares(ranks, dp, tp):
    """Every case in a layout; one start of the ranks for all of them."""
    return ranks.run(dp * tp, shares_on_rank, dp, tp, CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: ", ".join(map(str, case)))
@pytest.mark.parametrize(("dp", "tp"), LAYOUTS)
def test_losses_and_gradients_equal_lightlys(ranks, dp, tp, case):
    # Catches: a weight or scale of another convention, sums over this rank's rows or prototypes only, a mean of the
    # ranks' means where they have different numbers of rows, a gradient that lacks the other ranks' share.
    assert_equals_theirs(combined([share[case] for share in all_shares(ranks, dp, tp)], dp), case)


# ---- memory and range ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("part", ["dino, centered", "dino, sinkhorn", "koleo"])
def test_memory_grows_linearly(part, monkeypatch):
    # Catches: a matrix of all rows by all prototypes or pairs, in the forward or backward pass, or saved between them.
    monkeypatch.setattr(losses, "ROWS_AT_ONCE", 32)
    saved = {}
    for factor in (1, 2):
        samples, prototypes = 64 * factor, 512 * factor
        shape = (prototypes,) if part == "koleo" else (samples, 4)
        rows = drawn(*shape, WIDTH).float().requires_grad_()
        of_student, of_teacher = (drawn(prototypes, WIDTH, number=n).float() for n in (1, 2))
        of_student.requires_grad_()
        with LargestTensor() as largest:
            teacher = rows.detach()[:, :2].flatten(0, 1)
            if part == "dino, centered":
                assignment = losses.centered(teacher, prototypes_of(of_teacher), TEACHER_TEMP, torch.zeros(prototypes))
            elif part == "dino, sinkhorn":
                assignment = losses.sinkhorn(teacher, prototypes_of(of_teacher), TEACHER_TEMP, torch.clone)
            with SavedBytes() as kept:
                if part == "koleo":
                    value = losses.koleo(rows, lambda x: x, 0)
                else:
                    weights, own = losses.crop_weights(samples, 2), prototypes_of(of_student)
                    value = losses.assignment_cross_entropy(rows, own, STUDENT_TEMP, assignment, weights)
            value.backward()
        assert largest.numbers <= 32 * prototypes
        saved[factor] = kept.total
    assert saved[2] <= 2 * saved[1] + 64


def opposite_halves():
    """Rows and prototypes whose logits reach ±1 / temperature: two ranks' rows point in opposite directions."""
    prototypes = torch.cat((drawn(1, WIDTH), -drawn(1, WIDTH), drawn(PROTOTYPES - 2, WIDTH, number=1)))
    rows = F.normalize(drawn(1, WIDTH) + 0.01 * drawn(SAMPLES, WIDTH, number=2), dim=-1)
    return torch.cat((rows, -rows[: SAMPLES // 2])), prototypes


def assigned(assignment):
    """The whole matrix q."""
    return assignment.logarithms(slice(0, len(assignment.rows))).exp()


def test_sinkhorn_in_float32_with_logits_at_their_bounds():
    # Catches: exponentials that overflow or vanish; a shift that some rank or prototype is far from.
    rows, prototypes = opposite_halves()
    logits = rows @ prototypes.T / TEACHER_TEMP
    assert logits.max() > 24.9
    assert logits.min() < -24.9
    wanted = logits.exp()
    for _ in range(3):
        wanted = wanted / wanted.sum(0)
        wanted = wanted / wanted.sum(1, keepdim=True)
    found = assigned(losses.sinkhorn(rows.float(), prototypes_of(prototypes.float()), TEACHER_TEMP, torch.clone))
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-8)
    torch.testing.assert_close(found.sum(1), torch.ones(len(rows)), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("kind", ["bfloat16", "autocast"])
@pytest.mark.parametrize("part", ["dino, centered", "dino, sinkhorn", "koleo"])
def test_losses_are_computed_in_float32(part, kind):
    # Catches: logits, exponentials or sums in 16 bits, of 16-bit rows or under autocast.
    batch, tolerance = in_type(global_batch(part), "float32"), 1e-6
    if kind == "bfloat16":
        batch, tolerance = in_type(batch, "bfloat16"), 3e-3  # that of the gradients, which have the type of the rows
    wanted = our_share(part, in_type(batch, "float32"), 0, 1, torch.clone, lambda x: x)
    with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
        found = our_share(part, batch, 0, 1, torch.clone, lambda x: x)
    assert found["loss"].dtype == torch.float32
    torch.testing.assert_close(found["loss"], wanted["loss"], rtol=1e-6, atol=0.0)
    for name in wanted.keys() & {"rows", "prototypes"}:
        assert found[name].dtype == batch["student"].dtype
        assert (found[name].float() - wanted[name]).norm() <= tolerance * wanted[name].norm()


# ---- edges -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 7])
def test_rows_that_fill_up_count_nothing(count):
    """Masked patches of a CUDA graph: those beyond the drawn ones would take a mass and move the centre."""
    rows, counted = drawn(10, WIDTH, number=1), torch.arange(10) < count
    prototypes, center = prototypes_of(drawn(PROTOTYPES, WIDTH, number=2)), drawn(PROTOTYPES, number=3)
    arguments = prototypes, TEACHER_TEMP, torch.clone
    own, filled = losses.sinkhorn(rows[:count], *arguments), losses.sinkhorn(rows, *arguments, counted=counted)
    torch.testing.assert_close(filled.of_prototypes, own.of_prototypes)
    assert count == 0 or not torch.allclose(losses.sinkhorn(rows, *arguments).of_prototypes, own.of_prototypes)
    moved = losses.next_center(center, rows[:count], prototypes, torch.clone)
    torch.testing.assert_close(losses.next_center(center, rows, prototypes, torch.clone, counted), moved)


def test_no_masked_patch_at_all():
    # Catches: NaN from a division by no rows, in the loss, its gradient or the centre.
    none, weight, center = torch.zeros(0, WIDTH), drawn(PROTOTYPES, WIDTH).float(), torch.ones(PROTOTYPES)
    prototypes = prototypes_of(weight.requires_grad_())
    assignments = [
        losses.sinkhorn(none, prototypes, TEACHER_TEMP, torch.clone),
        losses.centered(none, prototypes, TEACHER_TEMP, center),
    ]
    weights = losses.patch_weights(torch.zeros(4, 16, dtype=torch.bool))
    for assignment in assignments:
        loss = losses.assignment_cross_entropy(none[:, None], prototypes, STUDENT_TEMP, assignment, weights)
        assert loss.item() == 0.0
        assert torch.equal(torch.autograd.grad(loss, weight)[0], torch.zeros_like(weight))
        assert assignment.of_prototypes.isfinite().all()
    assert torch.equal(losses.next_center(center, none, prototypes, torch.clone), center)


@pytest.mark.parametrize("num_local", [0, 3])
def test_crop_weights_are_a_mean_over_pairs(num_local):
    # Catches: a global crop that is compared with itself, a number of pairs that is off.
    weights = losses.crop_weights(5, num_local)[0]
    assert weights[0, 0] == weights[1, 1] == 0.0
    assert torch.equal(weights[weights > 0] * 5 * (2 + 2 * num_local), torch.ones(2 + 2 * num_local).double())


def test_equal_rows_leave_koleo_finite():
    # Catches: the logarithm or the root of zero where two images are the same.
    rows = drawn(1, WIDTH).float().repeat(4, 1).requires_grad_()
    loss = losses.koleo(rows, lambda x: x, 0)
    assert loss.isfinite()
    assert torch.autograd.grad(loss, rows)[0].isfinite().all()


# ---- gauges ----------------------------------------------------------------------------------------------------------


def gauged(assignment):
    """The gauges of an assignment whose features do not matter."""
    gauges = losses.Gauges()
    gauges.add_features(torch.ones(2, WIDTH))
    gauges.add_assignment(assignment)
    return gauges.compute(lambda x: x)


def test_a_small_divergence_of_the_mean_assignment(monkeypatch):
    # Catches: log K minus an entropy, of masses whose sum is 1 up to the rounding of float32.
    monkeypatch.setattr(losses, "ROWS_AT_ONCE", 32)
    rows, prototypes = 3e-3 * drawn(80, WIDTH, number=1), drawn(PROTOTYPES, WIDTH, number=2)
    zeros = torch.zeros(PROTOTYPES)
    exact, found = (
        gauged(losses.centered(of_type(rows), prototypes_of(of_type(prototypes)), 0.1, of_type(zeros)))
        for of_type in (torch.Tensor.double, torch.Tensor.float)
    )
    assert 1e-7 < exact["teacher_kl"] < 1e-5
    torch.testing.assert_close(found["teacher_kl"], exact["teacher_kl"], rtol=5e-3, atol=0.0)
