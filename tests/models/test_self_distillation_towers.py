"""The towers of self-distillation: two image sizes in a step, masks, heads, and what a sample costs."""

import pytest
import timm
import torch
from runs import KINDS

from ds_vit.config.schema import RunConfig
from ds_vit.models.conversions import compute_class_token
from ds_vit.models.keyed_init import initialise
from ds_vit.models.layers import MAIN_TOWER, take_apart_towers, tower_of
from ds_vit.models.sequential import SequentialViT
from ds_vit.models.zoo import ModelSpec
from ds_vit.planner.counting import count_flops, kept_by_layers
from ds_vit.tasks.dino.towers import HEAD, TEACHER, create_self_distillation

HEAD_SIZES = {"prototypes": 12, "head_hidden_dim": 16, "head_bottleneck_dim": 8}
SMALL = {"patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2}
MODELS = {
    "ViT": ("vit_tiny_patch16_224", {}),
    "Eva, fixed RoPE": (KINDS["Eva, fixed RoPE"][0], {}),
    "Eva, learned RoPE": (KINDS["Eva, learned RoPE"][0], {}),
    "Eva, DINOv3's RoPE": ("vit_small_patch16_dinov3", {"global_pool": "token"}),
    "registers": ("vit_small_patch14_reg4_dinov2", {"global_pool": "token"}),
}


def made(name="ViT", drop_path_rate=0.3, flags=None, **settings):
    """The description, and its towers in training mode with random values that are not zero."""
    model, kwargs = MODELS[name]
    spec = ModelSpec(model, img_size=16, drop_path_rate=drop_path_rate, model_kwargs={**SMALL, **kwargs})
    whole = create_self_distillation(spec, RunConfig(**HEAD_SIZES, **(flags or {})))
    towers = {}
    for tower, layers in take_apart_towers(whole).items():
        initialise(tower_of(whole, tower), layers, seed=0, device="cpu")
        for layer in layers:
            compute_class_token(layer)
        towers[tower] = SequentialViT(layers, **settings).train()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in towers[MAIN_TOWER].parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return whole, towers


def step(tower):
    """Gradients of a pass over large masked images and one over small images, both before either backward pass."""
    generator = torch.Generator().manual_seed(1)
    large, small = (torch.randn(3, 3, size, size, generator=generator) for size in (16, 8))
    keys, masks = torch.arange(3), torch.rand(3, 16, generator=generator) < 0.4
    outputs = [tower(large, keys, masks), tower(small, keys + 7)]
    assert [len(tokens[0]) - len(outputs[1][0]) for tokens in outputs] == [12, 0]
    sum(tokens.sin().sum() for tokens in outputs).backward()
    return {name: parameter.grad.clone() for name, parameter in tower.named_parameters()}


@pytest.mark.parametrize("name", MODELS)
def test_blocks_are_recomputed_at_the_size_of_their_first_run(name):
    # Catches: rotary tables or token counts of the pass that came last.
    _, kept = made(name)
    _, recomputed = made(name, recompute_interval=1)
    expected, found = (step(towers[MAIN_TOWER]) for towers in (kept, recomputed))
    assert all(gradient.abs().sum() > 0 for gradient in expected.values())
    for parameter, gradient in expected.items():
        torch.testing.assert_close(found[parameter], gradient, rtol=0, atol=0, msg=parameter)


@pytest.mark.parametrize("name", MODELS)
def test_small_images_are_computed_as_by_timm(name):
    # Catches: positions that are not resampled, tables of the large size; a pass at one size that changes the next.
    _, towers = made(name)
    tower = towers[MAIN_TOWER].eval()
    model, kwargs = MODELS[name]
    theirs = timm.create_model(model, num_classes=0, img_size=16, dynamic_img_size=True, **SMALL, **kwargs).eval()
    state = {n.split(".", 2)[2]: tensor for n, tensor in tower.state_dict().items() if "mask_token" not in n}
    theirs.load_state_dict(state)
    for size in (16, 8, 16, 8):
        images = torch.randn(2, 3, size, size, generator=torch.Generator().manual_seed(size))
        torch.testing.assert_close(tower(images, torch.arange(2)), theirs(images), rtol=1e-5, atol=1e-5)


def test_a_head_gives_rows_of_length_1_and_the_lengths_of_its_prototypes():
    _, towers = made()
    rows, weight, lengths = towers[HEAD](torch.randn(5, 32))
    assert (rows.shape, weight.shape, lengths.shape) == ((5, 8), (12, 8), (12,))
    torch.testing.assert_close(rows.norm(dim=1), torch.ones(5))
    torch.testing.assert_close(weight.norm(dim=1), lengths)
    assert not lengths.requires_grad
    # ZeRO-3 takes a parameter's memory away after the forward pass.
    parameter = towers[HEAD].layers[0].last_layer.weight
    values, parameter.data = parameter.detach().clone(), torch.empty(0)
    assert torch.equal(weight, values)


@pytest.mark.parametrize("tower", [MAIN_TOWER, TEACHER])
def test_the_class_token_is_that_of_all_tokens(tower):
    # Catches: patches that are left out while they are read, a last block that computes them all the same.
    whole = made(drop_path_rate=0.0)[1][tower]
    without_patches = made(drop_path_rate=0.0, flags={"ibot_weight": 0.0})[1][tower]
    images, keys = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)), torch.arange(2)
    tokens, class_token = whole(images, keys), without_patches(images, keys)
    assert (tokens.shape[1], class_token.shape[1]) == (17, 1)
    torch.testing.assert_close(class_token, tokens[:, :1])


def test_the_cost_of_a_sample_counts_its_crops():
    two_crops = {"local_crops_number": 0, "mask_sample_probability": 0.0}
    crops = {"local_crops_number": 4, "local_crops_size": 8, "mask_ratio_min_max": (0.5, 0.5)}  # of half of the crops
    few, whole = (made(drop_path_rate=0.0, flags=flags)[0] for flags in (two_crops, crops))
    assert (few.images_per_sample, few.dino_head.images_per_sample) == ((2.0, 2.0), (2.0, 2.0))
    # Two large crops of 17 tokens and four small ones of 5 in the student, two in the teacher.
    assert whole.images_per_sample == (2 + 4 * 5 / 17, 2.0)
    of_heads = (2 + 4 + 2 * 16 * 0.25, 2 + 2 * 16 * 0.25)
    assert (whole.dino_head.images_per_sample[0], whole.teacher_head.images_per_sample[0]) == of_heads
    assert count_flops(whole).forward > count_flops(few).forward
    for name in (MAIN_TOWER, HEAD):
        of_image, kept = (
            sum(each.bytes for each in kept_by_layers(take_apart_towers(model)[name]))
            / tower_of(model, name).images_per_sample[0]
            for model in (few, whole)
        )
        assert kept == pytest.approx(of_image, rel=1e-3)


@pytest.mark.parametrize("name", ["vit_base_patch16_siglip_224", "vit_tiny_r_s16_p8_224"])
def test_a_backbone_without_class_token_or_with_a_convolutional_stem_is_refused(name):
    from ds_vit.fault_tolerance.errors import UserError

    with pytest.raises(UserError, match=r"reads the class token|images of several sizes"):
        create_self_distillation(ModelSpec(name), RunConfig())
