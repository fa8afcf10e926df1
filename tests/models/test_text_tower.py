"""The text tower: its layers, what a token sees, which token is the caption's, and its first values."""

import dataclasses

import pytest
import torch

from ds_vit.fault_tolerance.errors import UserError
from ds_vit.models.keyed_init import initialise
from ds_vit.models.layers import chain_towers, take_apart_towers, tower_of
from ds_vit.models.param_groups import no_weight_decay_names
from ds_vit.models.sequential import SequentialViT, timm_names
from ds_vit.models.zoo import ModelSpec, num_parameters
from ds_vit.parallel.tensor.shard import check_degree, legal_degrees
from ds_vit.planner.counting import count_flops, layer_flops
from ds_vit.tasks.clip.tower import TEXT_MODELS, TextSettings, create_contrastive_model, text_settings

SPEC = ModelSpec("vit_tiny_patch16_224", img_size=16, model_kwargs={"patch_size": 8, "embed_dim": 24, "depth": 2})
SMALL = TextSettings(vocab_size=20, context_length=6, end_id=19, width=16, depth=2, heads=2, embed_dim=12)
KEYS = torch.arange(3)


def described(logits=(2.0,), **changes):
    """A small model of two towers, on the meta device."""
    return create_contrastive_model(SPEC, dataclasses.replace(SMALL, **changes), logits)


def towers(model):
    """Its towers with their first values, in evaluation."""
    made = {}
    for name, layers in take_apart_towers(model).items():
        initialise(tower_of(model, name), layers, seed=1, device="cpu")
        made[name] = SequentialViT(layers).eval()
    return made


def features(model, ids):
    """The text tower's outputs [B, E + 1 or 2]."""
    return towers(model)["text"](ids, KEYS)


IDS = torch.tensor([[17, 1, 2, 19, 18, 18], [17, 3, 19, 19, 4, 5], [17, 4, 5, 6, 7, 19]])


def test_causal_features_ignore_what_follows_the_first_end():
    # Catches: no mask, pooling at the last or the largest token, the place of another sample.
    model, changed = described(), IDS.clone()
    changed[0, 4:] = 3
    changed[1, 3:] = 7
    assert torch.equal(features(model, IDS), features(model, changed))
    changed[2, 1] = 9
    assert not torch.equal(features(model, IDS)[2], features(model, changed)[2])


@pytest.mark.parametrize("pool", ["last", "map"])
def test_bidirectional_features_see_all_tokens(pool):
    # Catches: a mask where there should be none, pooling that reads one token's neighbourhood only.
    model = described((2.0, -10.0), causal=False, pool=pool)
    for place in range(IDS.shape[1]):
        changed = IDS.clone()
        changed[:, place] = (changed[:, place] + 1) % 16
        moved = (features(model, IDS) - features(model, changed))[:, :12].abs().amax(1)
        assert (moved > 1e-6).all()


def test_scale_and_bias_are_the_last_columns():
    assert torch.equal(features(described((2.0, -10.0)), IDS)[:, 12:], torch.tensor([[2.0, -10.0]]).expand(3, 2))
    undecayed = no_weight_decay_names(described((2.0, -10.0)))
    assert {"text.logit_scale", "text.logit_bias", "text.pos_embed", "pos_embed"} <= undecayed
    assert not {"text.token_embed.weight", "text.head.weight", "head.weight"} & undecayed


def test_towers_hold_each_parameter_once_and_chain_to_the_same_outputs():
    # Catches: a name without its prefix, a parameter of two layers, ids or places lost in the chain.
    model = described()
    by_tower = towers(model)
    names = [name for tower in by_tower.values() for name in timm_names(tower).values()]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    assert "head.bias" not in names
    images = torch.randn(3, 3, 16, 16)
    apart = by_tower["image"](images, KEYS), by_tower["text"](IDS, KEYS)
    together = (images, KEYS, IDS)
    for layer in chain_towers([list(tower.layers) for tower in by_tower.values()]):
        together = layer(together)
    assert all(torch.equal(a, b) for a, b in zip(apart, together, strict=True))


def test_first_values_are_clips():
    # Catches: timm's values for a linear map that CLIP scales by width and depth.
    model = described(width=64, heads=4, vocab_size=400)
    weights = {
        name: p
        for tower in towers(model).values()
        for name, p in zip(timm_names(tower).values(), tower.parameters(), strict=True)
    }
    deviations = {
        "text.token_embed.weight": 0.02,
        "text.pos_embed": 0.01,
        "text.blocks.1.attn.qkv.weight": 64**-0.5,
        "text.blocks.1.attn.proj.weight": (2 * 2 * 64) ** -0.5,
        "text.blocks.1.mlp.fc1.weight": (2 * 64) ** -0.5,
        "text.blocks.1.mlp.fc2.weight": (2 * 2 * 64) ** -0.5,
        "text.head.weight": 64**-0.5,
        "head.weight": 24**-0.5,
    }
    for name, deviation in deviations.items():
        assert weights[name].std().item() == pytest.approx(deviation, rel=0.15), name


def test_siglips_image_tower_has_no_projection():
    model = described((2.0, -10.0), embed_dim=None)
    assert not [name for name, _ in model.named_parameters() if name.startswith("head.")]
    assert model.common_dim == model.text.head.out_features == 24


def test_planner_counts_the_text_tower():
    # Catches: images as the input of a text tower, or its blocks left out.
    model = described(width=64, heads=4)
    costs = layer_flops(take_apart_towers(model)["text"])
    assert [cost > 0 for cost in costs] == [False, True, True, True]
    blocks = 6 * 2 * 12 * 64 * 64 + 2 * 2 * 6 * 6 * 64  # of one block: products of 6 tokens, and attention
    assert costs[1] == pytest.approx(blocks, rel=0.01)
    images = sum(layer_flops(take_apart_towers(model)["image"]))
    assert count_flops(model).forward == images + sum(costs)


def test_degrees_are_those_of_both_towers():
    assert legal_degrees(tower_of(described(width=24, heads=6), "text")) == [1, 2, 3, 6]
    with pytest.raises(UserError, match="num_heads 2 cannot be split over tp 3"):
        check_degree(tower_of(described(), "text"), 3)


def test_sizes_are_open_clips():
    # open_clip's ViT-B-16, ViT-L-14 and ViT-B-16-SigLIP: parameters of their text towers, and the logit scale.
    counts = {"clip_base": 63_428_096, "clip_large": 123_650_304, "siglip_base": 110_271_744}
    for name, count in counts.items():
        settings = text_settings(name)
        settings = dataclasses.replace(settings, embed_dim=settings.embed_dim or 768)
        assert num_parameters(create_contrastive_model(SPEC, settings, (0.0,)).text) == count + 1
    assert TEXT_MODELS["siglip_so400m"].width * TEXT_MODELS["siglip_so400m"].mlp_ratio // 1 == 4304
