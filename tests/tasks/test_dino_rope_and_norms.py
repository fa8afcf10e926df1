"""DINOv3's random rotary coordinates, separate norms and a backbone that is held at first, against one plain process
(tests/support/plain_dino.py); their files and refusals."""

import functools
import math
from contextlib import nullcontext
from unittest import mock

import plain_dino
import pytest
import timm
import torch
from curves import assert_same_curve
from plain_dino import assert_same_run
from runs import resolved
from safetensors.torch import load_file
from timm.layers.pos_embed_sincos import RotaryEmbeddingDinoV3

from ds_vit.config.schema import RunConfig
from ds_vit.models.layers import MAIN_TOWER, take_apart_towers, tower_of
from ds_vit.planner.counting import kept_by_layers
from ds_vit.tasks.dino.rope import CoordinateDraws

DINOV3 = plain_dino.DINOV3
train = functools.partial(plain_dino.train_ours, variant=DINOV3)


@pytest.fixture(scope="module")
def plain(dino_folder):
    """The plain loop, by its centering."""
    return functools.cache(functools.partial(plain_dino.train, dino_folder, variant=DINOV3))


# Centering, layout, recomputation: each value at least once, and each way to recompute with a shared or a sharded step.
CASES = [
    ("sinkhorn", (2, 1, 3, 4), "full"),
    ("ema", (3, 1, 2, 4), "2"),
    ("ema", (1, 1, 0, 1), ""),
    ("sinkhorn", (3, 1, 1, 1), "selective"),
    ("ema", (1, 2, 3, 1), ""),
    ("sinkhorn", (1, 2, 0, 4), "full"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("centering", "layout", "recompute"), CASES)
def test_trains_as_one_plain_process(ranks, tmp_path, dino_folder, plain, centering, layout, recompute):
    words = ("--grad-checkpointing", recompute) if recompute else ()
    rows = train(ranks, dino_folder, tmp_path / "run", layout, "--centering", centering, *words)
    assert_same_run(plain(centering), rows, tmp_path / "run")


# ---- mistakes that the comparison sees -------------------------------------------------------------------------------


def drawn_per_rank():
    """Each rank draws coordinates by itself."""
    draw = CoordinateDraws.draw
    return mock.patch.object(
        CoordinateDraws, "draw", lambda own, seed, *more: draw(own, seed + torch.distributed.get_rank(), *more)
    )


def drawn_per_micro_batch():
    """Each pass of a step draws coordinates anew, and so does each micro-batch."""
    draw, passes = CoordinateDraws.draw, []

    def anew(own, seed, *more):
        passes.append(seed)
        return draw(own, seed + len(passes), *more)

    return mock.patch.object(CoordinateDraws, "draw", anew)


def local_norm_of_global_crops():
    """The norm of local crops is used for all."""
    from ds_vit.tasks.dino.towers import TokensHead

    forward = TokensHead.forward

    def of_local_crops(head, inputs):
        is_student = head.training and head.local_cls_norm is not None
        return head.local_cls_norm(inputs[0]) if is_student else forward(head, inputs)

    return mock.patch.object(TokensHead, "forward", of_local_crops)


def held_too_long():
    """A run that resumes counts its steps from 0 where it decides whether the backbone is held."""
    from ds_vit.tasks.task import Horizon

    return mock.patch.object(Horizon, "is_within", lambda own, step, epochs: step - 1 <= own.steps_in(epochs))


@pytest.mark.parametrize(
    ("planted", "layout"),
    [
        (drawn_per_rank, (2, 1, 1, 1)),
        (drawn_per_micro_batch, (1, 1, 1, 4)),
        (local_norm_of_global_crops, (1, 1, 1, 1)),
    ],
)
def test_a_mistake_is_seen(ranks, tmp_path, dino_folder, plain, planted, layout):
    rows = train(ranks, dino_folder, tmp_path / "run", layout, "--centering", "ema", "--max-steps", 2, within=planted)
    with pytest.raises(AssertionError, match="the curves part"):
        assert_same_curve(plain("ema").rows[:2], rows, rtol=plain_dino.RTOL)


@pytest.mark.slow
@pytest.mark.parametrize("planted", [nullcontext, held_too_long])
def test_the_backbone_learns_from_the_same_step_after_a_resume(ranks, tmp_path, dino_folder, plain, planted):
    words, steps = ("--centering", "ema"), DINOV3.held_steps + 3
    train(ranks, dino_folder, tmp_path / "run", (2, 1, 3, 1), *words, "--max-steps", DINOV3.held_steps - 1)
    more = ("--resume", "auto", "--max-steps", steps)
    rows = train(ranks, dino_folder, tmp_path / "run", (1, 2, 1, 4), *words, *more, within=planted)
    with nullcontext() if planted is nullcontext else pytest.raises(AssertionError, match="the curves part"):
        assert_same_curve(plain("ema").rows[:steps], rows, rtol=plain_dino.RTOL)


# ---- the draws -------------------------------------------------------------------------------------------------------


def test_tables_are_those_of_timm_with_the_same_draws():
    """Another order of shift and factors, axes that are swapped, factors that are not log-uniform."""
    seed, step, size, shift, jitter, rescale = RunConfig().seed, 7, 24, 0.3, 1.5, 2.0
    whole = _description(rope_shift_coords=0.2)
    embed = take_apart_towers(whole)[MAIN_TOWER][0]
    rope = RotaryEmbeddingDinoV3(12, 100.0, feat_shape=[6, 6], rotate_half=True)
    embed.drawn_rope = rope
    drawn = CoordinateDraws(shift, jitter, rescale).draw(seed, step, size, 2, torch.device("cpu"))
    tables = embed._tables(drawn, torch.float32)
    assert torch.equal(embed._tables(None, torch.float32)[1], rope.get_embed())
    variant = plain_dino.Variant(draws=(shift, jitter, rescale))
    expected = [plain_dino.draw(variant, step, size, block) for block in range(2)]
    augmented = RotaryEmbeddingDinoV3(
        12, 100.0, feat_shape=[6, 6], rotate_half=True, shift_coords=shift, jitter_coords=jitter, rescale_coords=rescale
    )
    for block, (by, times) in enumerate(expected):
        # timm draws shifts [2], logarithms of jitter [2], and one of rescale [1], in this order.
        both = math.prod(times) ** 0.5
        values = iter([torch.tensor(by), torch.tensor([t / both for t in times]).log(), torch.tensor([both]).log()])
        with mock.patch.object(torch.Tensor, "uniform_", lambda own, *bounds, values=values: own.copy_(next(values))):
            theirs = augmented.train().get_embed()
        torch.testing.assert_close(tables[block], theirs, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(tables[0], tables[1], atol=1e-2)


def test_draws_fill_their_range_and_differ_by_step_block_and_size():
    draws, cpu = CoordinateDraws(0.3, 1.5, 2.0), torch.device("cpu")
    shifts, factors = torch.cat([draws.draw(0, step, 16, 64, cpu) for step in range(1, 65)]).unbind(1)
    assert shifts.abs().max() <= 0.3
    assert shifts.std() == pytest.approx(0.3 / 3**0.5, rel=0.02)
    assert factors.log().abs().max() <= math.log(3.0)
    variance = (math.log(1.5) ** 2 + math.log(2.0) ** 2) / 3  # of two uniform draws
    assert factors.log().std() == pytest.approx(variance**0.5, rel=0.02)
    covariance = torch.cov(factors.log().T)[0, 1]  # rescale is common to the axes
    assert covariance == pytest.approx(math.log(2.0) ** 2 / 3, rel=0.1)
    one = draws.draw(0, 1, 16, 2, cpu)
    others = [draws.draw(1, 1, 16, 2, cpu), draws.draw(0, 2, 16, 2, cpu), draws.draw(0, 1, 8, 2, cpu), one.flip(0)]
    assert not any(torch.isclose(one, other).any() for other in others)
    assert torch.equal(one, draws.draw(0, torch.tensor(1.0, dtype=torch.float64), 16, 2, cpu)), "as a graph reads it"
    assert torch.equal(one, draws.draw(0, 1, 16, 3, cpu)[:2]), "the draws of a block do not depend on their number"


def test_tables_of_all_blocks_are_not_planned_for_each():
    """Memory of a batch that is counted for each image, or once more for each block."""
    plain, drawn = (
        sum(kept.bytes for kept in kept_by_layers(take_apart_towers(_description(**flags))[MAIN_TOWER]))
        for flags in ({}, {"rope_shift_coords": 0.2})
    )
    assert drawn == plain


# ---- files -----------------------------------------------------------------------------------------------------------


UNTIED = {"patch_norm": "untie_cls_and_patch_norms", "local_cls_norm": "untie_global_and_local_cls_norm"}
NORMS = {f"{norm}.{kind}" for norm in DINOV3.norms for kind in ("weight", "bias")}


def _description(name=DINOV3.model, untied=(), **flags):
    """A model with further norms (of `UNTIED`) or drawn coordinates."""
    from ds_vit.models.zoo import ModelSpec
    from ds_vit.tasks.dino.towers import create_self_distillation

    spec = ModelSpec(name, img_size=plain_dino.SIZE, model_kwargs=DINOV3.kwargs)
    flags |= {UNTIED[norm]: True for norm in untied}
    return create_self_distillation(spec, RunConfig(**flags))


def test_timm_has_the_features_of_the_run(ranks, tmp_path, dino_folder):
    # Catches: a class token with the patches' norm; files that timm does not read; norms that are lost.
    from ds_vit.tools.predict import embed

    output = tmp_path / "run"
    train(ranks, dino_folder, output, (1, 1, 1, 1), "--centering", "ema", "--max-steps", 4)
    model = timm.create_model(DINOV3.model, num_classes=0, img_size=plain_dino.SIZE, **DINOV3.kwargs).eval()
    model.load_state_dict(load_file(str(output / "teacher.safetensors")))  # strict
    images = sorted((dino_folder / "train" / "all").iterdir())[:3]
    assert embed(output, images)["features"] == pytest.approx(embed(output / "teacher.safetensors", images)["features"])
    for file in ("head", "teacher_head"):
        assert {name for name in load_file(str(output / f"{file}.safetensors")) if "norm" in name} == NORMS
    assert not NORMS & load_file(str(output / "model.safetensors")).keys()
    # A new run begins with the norms of a finished one, whichever of its files it starts from.
    norms = {
        name: tensor for name, tensor in load_file(str(output / "teacher_head.safetensors")).items() if name in NORMS
    }
    for start in (output, output / "teacher.safetensors", output / "checkpoints" / "step-00000004"):
        argv = plain_dino.words_of(dino_folder, 1, tmp_path / "next", "-b", 4, variant=DINOV3)
        initial = resolved([*argv, "--initial-checkpoint", str(start)]).model.towers["image"]
        head = take_apart_towers(_description(untied=DINOV3.norms))[MAIN_TOWER][-1].to_empty(device="cpu")
        initial.load(head)
        assert {name: head.state_dict()[name].tolist() for name in norms} == {n: norms[n].tolist() for n in norms}
        assert "projection head of" not in initial.summary


def test_norms_that_a_file_lacks_begin_as_its_norm(tmp_path, dino_folder):
    """Features of released weights that change before the first step."""
    from safetensors.torch import save_file

    state = load_file(str(dino_folder / f"{DINOV3.model}.safetensors"))
    file = tmp_path / "timm.safetensors"
    save_file({name: tensor for name, tensor in state.items() if name not in NORMS}, str(file))
    argv = plain_dino.words_of(dino_folder, 1, tmp_path / "run", "-b", 4, variant=DINOV3)
    argv += ["--initial-checkpoint", str(file)]
    checkpoint = resolved(argv).model.towers["image"]
    assert "patch_norm and local_cls_norm begin as norm" in checkpoint.summary
    assert not NORMS & {*checkpoint.newly_initialised}
    whole = _description(untied=DINOV3.norms)
    for tower, norms in ((MAIN_TOWER, DINOV3.norms), ("teacher", ("patch_norm",))):
        head = take_apart_towers(whole)[tower][-1].to_empty(device="cpu")
        head.prefix = "" if tower == MAIN_TOWER else "teacher."
        checkpoint.load(head)
        for norm in norms:
            assert torch.equal(head.get_submodule(norm).weight, state["norm.weight"])
    names = {name for name, _ in tower_of(whole, "teacher").named_parameters()}
    assert "local_cls_norm.weight" not in names, "the teacher sees no local crops"
