"""The last block computed for the class token alone: the numbers of all tokens, and the work of one."""

import pytest
import torch
from timm.layers import set_fused_attn
from torch.utils.flop_counter import FlopCounterMode
from vits import images, our_model, shake, small_spec

from ds_vit.models.conversions import ClassTokenBlock, compute_class_token

BATCH = 4
READS_ALL = {"average pooling": "vit_base_patch16_rpn_224", "attention pooling": "vit_base_patch16_siglip_224"}


def pair(name, interval=0, **kwargs):
    """A small model that computes all tokens, and one that computes the class token where that is read alone."""
    spec = small_spec(name, depth=2, **kwargs)
    models = [our_model(spec, recompute_interval=interval).train() for _ in range(2)]
    for model in models:
        shake(model)
    for layer in models[1].layers:
        compute_class_token(layer)
    return spec, *models


def outcome(model, pixels, keys):
    """Outputs and every gradient, by name; a parameter without one is None."""
    model.zero_grad()
    out = model(pixels, keys)
    out.float().square().sum().backward()
    return {"outputs": out.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def assert_same(ours, theirs, rtol=1e-5):
    """Each tensor within `rtol` of the other's largest element."""
    for name, expected in theirs.items():
        atol = rtol * float(expected.abs().max()) + 1e-9
        torch.testing.assert_close(ours[name], expected, rtol=0, atol=atol, msg=name)


def converted(model):
    return [isinstance(layer.block, ClassTokenBlock) for layer in model.layers[1:-1]]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("vit_tiny_patch16_224", {"drop_path_rate": 0.5}),
        ("vit_tiny_patch16_224", {"interval": 1, "drop_path_rate": 0.5}),
        ("vit_small_patch14_reg4_dinov2", {}),  # registers and layer scale
        ("vit_base_patch16_clip_224", {}),  # a norm before the blocks
        ("vit_tiny_patch16_224", {"qk_norm": True}),
    ],
    ids=str,
)
def test_the_class_token_alone_gives_what_all_tokens_give(name, settings):
    """A query that is another token, a residual of all, a drop-path row too many, a parameter without its gradient."""
    spec, every, alone = pair(name, **settings)
    assert converted(alone) == [False, True]
    pixels, keys = images(spec, BATCH), torch.arange(BATCH) + 17
    got, expected = outcome(alone, pixels, keys), outcome(every, pixels, keys)
    for found in (got, expected):  # softmax does not feel it: its gradient is rounding
        found.pop("layers.2.blocks.1.attn.k_norm.bias", None)
        found.pop("layers.1.blocks.0.attn.k_norm.bias", None)
    assert_same(got, expected)
    for model in (every, alone):
        model.eval()
    seen = [
        model.layers[-2]((torch.ones(1, 5, every.layers[-1].head.in_features), keys[:1]))[0] for model in (alone, every)
    ]
    assert seen[0].shape[1] == 5, "pictures of an evaluation show every token"
    assert torch.equal(*seen)


def test_attention_without_the_fused_kernel_gives_the_same(monkeypatch):
    """A scale left out, and TIMM_FUSED_ATTN=0 that the last block ignores."""
    set_fused_attn(False)
    try:
        spec, every, alone = pair("vit_tiny_patch16_224")
    finally:
        set_fused_attn(True)
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", None)
    pixels, keys = images(spec, BATCH), torch.arange(BATCH)
    assert_same(outcome(alone, pixels, keys), outcome(every, pixels, keys))


@pytest.mark.parametrize("name", READS_ALL.values(), ids=READS_ALL)
def test_what_all_tokens_are_read_of_is_left_alone(name):
    """A pooling over one token."""
    assert converted(pair(name)[-1]) == [False, False]


def test_dropout_draws_for_all_elements():
    assert converted(pair("vit_tiny_patch16_224", proj_drop_rate=0.1)[-1]) == [False, False]


def test_the_last_block_is_less_work():
    """A shortcut that computes all tokens all the same."""
    spec, every, alone = pair("vit_tiny_patch16_224")
    pixels, keys = images(spec, BATCH), torch.arange(BATCH)
    flops = []
    for model in (every, alone):
        with FlopCounterMode(display=False) as counter:
            outcome(model, pixels, keys)
        flops.append(counter.get_total_flops())
    assert flops[1] < 0.75 * flops[0], "two blocks, of which one computes little more than keys and values"
