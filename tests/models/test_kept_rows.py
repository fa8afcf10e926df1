"""Branches run on the rows that drop-path keeps: the numbers of all rows, and the work of the kept ones."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from vits import KINDS, images, our_model, shake, small_image_size, small_spec

from ds_vit.fault_tolerance.errors import UserError
from ds_vit.models import kept_rows
from ds_vit.models.kept_rows import KeptDropPath, check_kept, compute_kept, count_kept, find_rows, pays
from ds_vit.models.keyed_drop import Together, hash_together
from ds_vit.models.zoo import create_model
from ds_vit.planner.counting import saved_bytes
from ds_vit.tools.counting import count_step

BATCH = 6
BLOCKS = {
    **KINDS,
    "differential, parallel": "vit_dpwee_patch16_reg1_gap_256",
    "ViTamin": "vitamin_small_224",
}
CASES = [
    *((kind, rate, {}) for kind in BLOCKS for rate in (0.5,)),
    *(
        (kind, rate, {})
        for kind in ("class token", "parallel scaling", "two parallel branches")
        for rate in (0.1, 0.99)
    ),
    ("Eva with rotary tables", 0.99, {"patch_drop_rate": 0.5}),
    ("learned rotary frequencies", 0.5, {"patch_drop_rate": 0.5}),
    ("class token", 0.5, {"patch_drop_rate": 0.5}),
]


def pair(spec, interval=0):
    """The same model computing all rows, and kept ones alone."""
    models = [our_model(spec, checkpoint_interval=interval).train() for _ in range(2)]
    for model in models:
        shake(model)
    for layer in models[1].layers:
        compute_kept(layer, lambda rate: rate > 0)
    return models


def spec_of(kind, rate, **kwargs):
    """A small model that draws everywhere; each block drops at the full rate but the first."""
    drops = {} if BLOCKS[kind].startswith("vitamin") else {"proj_drop_rate": 0.2, "pos_drop_rate": 0.1}
    side = 64 if BLOCKS[kind].startswith("vitamin") else small_image_size(BLOCKS[kind])
    return small_spec(BLOCKS[kind], drop_path=rate, depth=3, img_size=side, **drops, **kwargs)


def outcome(model, pixels, keys):
    """Outputs and every gradient, by name; a parameter without one is None."""
    model.zero_grad()
    out = model(pixels, keys)
    out.float().square().sum().backward()
    return {"outputs": out.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def assert_same(ours, theirs, rtol=1e-5):
    """Each tensor within `rtol` of the other's largest element."""
    for name, expected in theirs.items():
        got = ours[name]
        assert (got is None) == (expected is None), name
        if expected is not None:
            torch.testing.assert_close(got, expected, rtol=0, atol=rtol * float(expected.abs().max()) + 1e-9, msg=name)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("kind", "rate", "kwargs"), CASES, ids=lambda value: str(value))
def test_kept_rows_give_what_all_rows_give(kind, rate, kwargs):
    """A row of another sample, a scale that is lost, a branch that reads the stream past its first module."""
    spec = spec_of(kind, rate, **kwargs)
    every, kept = pair(spec)
    assert sum(isinstance(module, KeptDropPath) for module in kept.modules()) > 1
    pixels, keys = images(spec, BATCH), torch.arange(BATCH) + 17
    assert_same(outcome(kept, pixels, keys), outcome(every, pixels, keys))
    for model in (every, kept):
        model.eval()
    with torch.no_grad():
        assert torch.equal(kept(pixels, keys), every(pixels, keys)), "evaluation drops nothing"


def drops_of(model):
    """All that draw in a model, in the order in which they are hashed."""
    return [drop for layer in model.layers for drop in layer.keyed_drops()]


def kept_of_each(model, keys):
    """How many rows each drop-path keeps, by its name."""
    drops = drops_of(model)
    masks = Together(drops, hash_together(drops, keys)).masks
    return {drop.name: int((mask > 0).sum()) for drop, mask in zip(drops, masks, strict=True)}


def test_the_cases_have_branches_that_keep_none_some_and_all():
    """A proof above that never met an empty branch."""
    spec = small_spec("vit_tiny_patch16_224", drop_path=0.99, depth=3, img_size=32)
    found = kept_of_each(pair(spec)[1], torch.arange(BATCH) + 17)
    assert 0 in found.values()
    assert 0 < found["blocks.1.drop_path1"] < BATCH
    light = small_spec("vit_tiny_patch16_224", drop_path=0.1, depth=3, img_size=32)
    assert BATCH in kept_of_each(pair(light)[1], torch.arange(BATCH) + 17).values()


@pytest.mark.parametrize("interval", [0, 1, 2])
def test_a_repeated_block_computes_the_rows_it_had(interval):
    """Rows of the micro-batch that ran last, in the repetition of an earlier one: a pipeline runs several ahead."""
    spec = spec_of("class token", 0.5)
    every, kept = pair(spec, interval)
    pixels, keys = images(spec, BATCH), torch.arange(BATCH) + 17
    found = []
    for model in (every, kept):
        model.zero_grad()
        losses = [model(x, k).square().sum() for x, k in zip(pixels.split(3), keys.split(3), strict=True)]
        for loss in losses:
            loss.backward()
        found.append({name: p.grad for name, p in model.named_parameters()})
    assert_same(found[1], found[0])


@pytest.mark.parametrize("wrong", ["another sample's rows", "no scaling", "a dropout's own rows"])
def test_what_is_broken_on_purpose_shows(monkeypatch, wrong):
    """The comparison can fail."""
    spec = spec_of("class token", 0.5)
    every, kept = pair(spec)
    if wrong == "another sample's rows":
        moved = lambda *args: {path: (rows + 1) % BATCH for path, rows in find_rows(*args).items()}  # noqa: E731
        monkeypatch.setattr("ds_vit.models.sequential.find_rows", moved)
    elif wrong == "no scaling":
        for drop in drops_of(kept):
            if isinstance(drop, KeptDropPath):
                monkeypatch.setattr(drop, "divisor", 1.0)
    else:
        for drop in drops_of(kept):
            if not isinstance(drop, KeptDropPath):
                monkeypatch.setattr(drop, "own_row", lambda drop=drop, own=drop.own_row: drop.row[: len(own())])
    pixels, keys = images(spec, BATCH), torch.arange(BATCH) + 17
    expected = outcome(every, pixels, keys)
    with pytest.raises((AssertionError, RuntimeError)):
        assert_same(outcome(kept, pixels, keys), expected)


@pytest.mark.parametrize("kind", ["class token", "parallel scaling"])
def test_flops_are_those_of_the_kept_rows(kind):
    """A branch that computes more rows than it keeps, or another's: counted exactly, forward and backward."""
    spec = small_spec(BLOCKS[kind], drop_path=0.5, depth=3, img_size=small_image_size(BLOCKS[kind]))
    every, kept = pair(spec)
    pixels, keys = images(spec, BATCH), torch.arange(BATCH) + 17

    def flops(model, rows=BATCH):
        with FlopCounterMode(display=False) as counter:
            model(pixels[:rows], keys[:rows]).square().sum().backward()
        return counter.get_total_flops()

    found = kept_of_each(kept, keys)
    left_out = {drop.name: BATCH - max(1, found[drop.name]) for drop in drops_of(kept)}
    row = (flops(every) - flops(our_model(small_spec(BLOCKS[kind], depth=2, img_size=spec.img_size)))) / BATCH
    if kind == "parallel scaling":
        expected = row * sum(left_out.values())
    else:
        mlp = flops_of(kept.layers[1].block.mlp, kept.layers[1].num_tokens.training)
        expected = sum(n * (mlp if name.endswith("drop_path2") else row - mlp) for name, n in left_out.items())
    assert expected > 0
    assert flops(every) - flops(kept) == expected


def flops_of(mlp, tokens):
    """FLOPs of a sample in an MLP, forward and backward."""
    x = torch.randn(1, tokens, mlp.fc1.in_features, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        mlp(x).sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("kind", ["class token", "residual post-norm", "parallel scaling", "two parallel branches"])
def test_no_more_is_kept_for_the_backward_pass(kind):
    """An estimate of memory that is no upper bound any more: it counts all rows."""
    every, kept = pair(spec := spec_of(kind, 0.3))
    pixels, keys = images(spec, BATCH), torch.arange(BATCH) + 17
    taken = [saved_bytes(lambda model=model: model(pixels, keys), model.parameters())[0] for model in (every, kept)]
    places = 8 * BATCH * len(drops_of(kept))
    assert taken[1] <= taken[0] + places


def test_the_host_does_not_wait():
    """A mask that is asked for its places: on a GPU a wait in each layer."""
    spec = spec_of("Eva with rotary tables", 0.5, patch_drop_rate=0.5)
    pixels, keys = images(spec, BATCH), torch.arange(BATCH) + 17
    for model in pair(spec, interval=1):
        assert count_step(lambda model=model: model(pixels, keys).sum().backward()).waits == 0


def test_rows_follow_from_the_keys_on_the_host():
    """On a device the host's keys must say which rows: the device's bits are not read where they are given."""
    spec = small_spec("vit_tiny_patch16_224", drop_path=0.5, depth=3, img_size=32)
    drops = drops_of(pair(spec)[1])
    keys = torch.arange(BATCH) + 17
    on_cpu = find_rows(drops, hash_together(drops, keys), None)
    assert len(on_cpu) == len(drops)
    on_meta = torch.empty(len(drops), BATCH, dtype=torch.int64, device="meta")
    found, to = {}, torch.Tensor.to

    def copied(tensor, *args, **kwargs):
        if args[:1] == (on_meta.device,):
            found["rows"] = tensor
        return to(tensor, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "to", copied)
        patch.setattr(torch.Tensor, "pin_memory", lambda tensor: pytest.fail("page-locked memory is CUDA's"))
        find_rows(drops, on_meta, keys)
    assert torch.equal(found["rows"], torch.cat([*on_cpu.values()]))


def test_auto_takes_what_pays():
    """A rule that computes few samples apart, or on a GPU, where nobody has measured it."""
    assert not pays(0.1, 4, "cpu")
    assert pays(0.4, 16, "cpu")
    assert not pays(0.01, 1024, "cpu")
    assert not pays(0.4, 1024, "cuda")
    model = create_model(small_spec("vit_tiny_patch16_224", drop_path=0.4, depth=5))
    # Rates 0, 0.1, 0.2, 0.3 and 0.4; 0.58 rows must drop.
    assert count_kept(model, "auto", 4, "cpu") == (6, 8)
    assert count_kept(model, "kept", 8, "cuda") == (8, 8)
    assert count_kept(model, "all", 8, "cpu") == (0, 8)


def test_a_kind_of_block_that_is_not_known_computes_all_rows(monkeypatch):
    """A new kind of timm's whose branch begins elsewhere: left as it is, and refused where it is asked for."""
    model = create_model(small_spec("vit_tiny_patch16_224", drop_path=0.4, depth=3))
    check_kept(model)
    monkeypatch.delitem(kept_rows._BRANCHES, kept_rows.Block)
    assert count_kept(model, "auto", 64, "cpu") == (0, 4)
    assert not any(isinstance(module, KeptDropPath) for module in pair(spec_of("class token", 0.5))[1].modules())
    with pytest.raises(UserError, match="where a branch of Block begins is not known"):
        check_kept(model)
