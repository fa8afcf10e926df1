"""Models sharded over tensor-parallel ranks compute what they compute whole; the others are rejected before.

In float64, where the order of a sum moves the result by 1e-15, so that 1e-11 leaves no room for an error.
"""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from autoencoders import autoencoder, batch_of, layers_of
from timm.layers import SimpleNorm
from torch import nn
from tp_models import (
    HEADS,
    KINDS,
    NUM_CLASSES,
    SAMPLES,
    all_tokens,
    close,
    compare_block,
    own_tokens,
    run,
    run_block,
    sharded_copies,
    spec_of,
    tensor_parallel,
    whole_gradients,
    whole_layers,
)
from vits import small_spec

from ds_vit.config.schema import RunConfig
from ds_vit.models.checkpointing import CheckpointFunction, recompute_all, recompute_selectively
from ds_vit.models.sequential import SequentialViT
from ds_vit.models.zoo import ModelSpec, create_model, supported_names
from ds_vit.parallel.tensor.class_parallel import gather_logits
from ds_vit.parallel.tensor.collectives import TensorParallel
from ds_vit.parallel.tensor.plans import PLANS
from ds_vit.parallel.tensor.shard import check_degree, legal_degrees, shard_layer
from ds_vit.tasks.classification.losses import build_loss, class_parallel_loss
from ds_vit.tasks.mae.flags import MaskedAutoencoderSettings
from ds_vit.tasks.mae.task import MaskedPatchLoss
from ds_vit.tasks.mae.towers import create_autoencoder

# ---- blocks ----------------------------------------------------------------------------------------------------------


def compare_blocks(sequence_parallel: bool) -> None:
    """Every kind, activations kept, recomputed or some of them, in turn; a failure's traceback shows its `kind`."""
    modes = itertools.cycle((None, recompute_all, recompute_selectively))
    for kind, recompute in zip(KINDS, modes, strict=False):
        compare_block(kind, sequence_parallel, recompute)


@pytest.mark.slow
@pytest.mark.parametrize(("size", "sequence_parallel"), [(2, False), (3, True)])
def test_a_sharded_block_is_the_block(ranks, size, sequence_parallel):
    """A wrong slice, a doubled or lost bias, an unsummed gradient, a norm over a part, padding that leaks."""
    ranks.run(size, compare_blocks, sequence_parallel, timeout=400)


def compare_in_half_precision() -> None:
    """Types and rough values in bfloat16, by parameters, on shared tokens or by autocast, in turn."""
    for kind, (sequence_parallel, autocast) in zip(
        KINDS, itertools.cycle(((False, False), (True, False), (False, True))), strict=False
    ):
        tp = tensor_parallel(sequence_parallel)
        dtype = torch.float32 if autocast else torch.bfloat16
        embed, block, *_ = whole_layers(spec_of(*KINDS[kind]), dtype, gated="gated" in kind)
        own_embed, own_block = sharded_copies([embed, block], tp)
        count = block.num_tokens.count(training=True)
        tokens = torch.randn(SAMPLES, count, embed.embed_dim, generator=torch.Generator().manual_seed(1))
        outs = []
        for front, layer, x in (
            (embed, block, tokens.to(dtype).requires_grad_()),
            (own_embed, own_block, own_tokens(tokens.to(dtype), tp)),
        ):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                out = run_block(front, layer, x)
            out.float().square().sum().backward()
            outs.append(out)
            assert x.grad.dtype == dtype
            assert all(p.grad.dtype == p.dtype for p in layer.parameters())
        whole, own = outs
        assert own.dtype == whole.dtype, kind
        error = (all_tokens(own, count, tp) - whole).float().norm() / whole.float().norm()
        assert error < 0.02, f"{kind}: off by {error:.3f}"


@pytest.mark.slow
def test_types_in_half_precision(ranks):
    """A sum in another type, a bias or a norm that widens what follows."""
    ranks.run(2, compare_in_half_precision)


# ---- whole models ----------------------------------------------------------------------------------------------------

LABELS = torch.tensor([1, 9])
BLOCKS = ("packed SwiGLU", "parallel scaling, bias", "learned rotary frequencies")
MODELS = {**HEADS, **{kind: KINDS[kind] for kind in BLOCKS}}
LOSS = RunConfig(smoothing=0.1)


def compare_model(kind: str, interval: int, sequence_parallel: bool, class_parallel: bool) -> None:
    """Images to loss, drop-path, dropout and patch dropout on: the gradients of every parameter and of the images."""
    random = {"drop_rate": 0.2, "pos_drop_rate": 0.2, "proj_drop_rate": 0.2, "patch_drop_rate": 0.3}
    name, kwargs = MODELS[kind]
    layers = whole_layers(spec_of(name, kwargs | random, drop_path_rate=0.4))
    tp = tensor_parallel(sequence_parallel)
    own = SequentialViT(sharded_copies(layers, tp, class_parallel), recompute_interval=interval)
    whole = SequentialViT(layers)
    for model in (own, whole):
        model.train()
    side = layers[0].patch_embed.img_size[0]
    images = torch.randn(SAMPLES, 3, side, side, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    keys = torch.tensor([5, 6])
    x, own_x = (images.clone().requires_grad_() for _ in range(2))

    def all_classes(logits: torch.Tensor) -> torch.Tensor:
        return gather_logits(logits, NUM_CLASSES, tp) if class_parallel else logits.detach()

    loss = build_loss(LOSS)
    own_loss = class_parallel_loss(LOSS, tp, NUM_CLASSES) if class_parallel else loss
    logits, own_logits = whole(x, keys), own(own_x, keys)
    loss(logits, LABELS).backward()
    own_loss(own_logits, LABELS).backward()

    close(all_classes(own_logits), logits.detach(), "logits")
    # The loss is computed in float32, and so is the gradient that it hands back.
    close(own_x.grad, x.grad, "gradient of the images", 1e-6)
    gradients = whole_gradients(own)
    for name, parameter in whole.named_parameters():
        close(gradients[name], parameter.grad, name, 1e-6)

    with torch.no_grad():
        for model in (own, whole):
            model.eval()
        close(all_classes(own(images)), whole(images), "logits in evaluation")


def compare_models() -> None:
    for kind in MODELS:
        for sequence_parallel, class_parallel in itertools.product((False, True), repeat=2):
            compare_model(kind, int(class_parallel), sequence_parallel, class_parallel)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_a_sharded_model_is_the_model(ranks, size):
    """A pooled latent whose gradient is a rank's alone, classes out of order, a gradient counted once a rank; ranks
    that drop different elements, a mask of a part in place of a part of the mask, kept patches miscounted."""
    ranks.run(size, compare_models)


def signatures(model: nn.Module) -> set[tuple]:
    """What sharding reads of each planned module of a model: class, members, norms and biases."""
    pool = [model.attn_pool] if model.attn_pool is not None else []
    found = set()
    for module in (module for part in (*model.blocks, *pool) for module in part.modules() if type(module) in PLANS):
        members = [
            (name, type(member) if name in PLANS[type(module)].norms else None, getattr(member, "bias", 0) is None)
            for name, member in module.named_children()
            if not isinstance(member, (nn.Identity, nn.Dropout))
        ]
        vectors = [name for name, _ in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))]
        found.add((type(module), *members, *vectors))
    return found


@pytest.mark.slow
def test_every_timm_name_is_of_kinds_that_are_compared():
    """A module of a new timm model that no comparison above has, or one that cannot be sharded."""
    compared = set()
    for name, kwargs in (KINDS | HEADS).values():
        compared |= signatures(create_model(spec_of(name, kwargs), for_training=False))
    missing = {}
    for name in supported_names():
        model = create_model(small_spec(name), for_training=False)
        missing |= dict.fromkeys(signatures(model) - compared, name)
    assert not missing


def shard_over_one_rank() -> None:
    layers = whole_layers(spec_of(*KINDS["beit3"]))
    kinds = [type(module) for layer in layers for module in layer.modules()]
    alone = TensorParallel(0, 1, dist.group.WORLD, sequence_parallel=True)
    for layer in layers:
        shard_layer(layer, alone, class_parallel=True)
    assert kinds == [type(module) for layer in layers for module in layer.modules()]
    for parameter in SequentialViT(layers).parameters():
        assert parameter.tp_slice.dim is None
        assert not hasattr(parameter, "tensor_model_parallel")


def test_size_one_changes_nothing(ranks):
    """Collectives of one rank in every layer of a run without tensor parallelism."""
    ranks.run(1, shard_over_one_rank)


# ---- masked autoencoders ---------------------------------------------------------------------------------------------

# 4 kept of 16 patches, and 0, 1 or 5 tokens before them: 2 and 3 ranks share hardly any of these counts evenly.
AUTOENCODERS = {
    "class token": {"num_heads": 6},
    "registers and layer scale": {"num_heads": 6},
    "attention pool": {"num_heads": 6},
    "Eva with rotary tables": {"num_heads": 6, "mlp_ratio": 3.0},
    "learned rotary frequencies": {"num_heads": 6},
}


def compare_autoencoders(sequence_parallel: bool) -> None:
    """Every kind, activations kept and recomputed in turn; a failure's traceback shows its `kind`."""
    for (kind, kwargs), interval in zip(AUTOENCODERS.items(), itertools.cycle((0, 2)), strict=False):
        tp = tensor_parallel(sequence_parallel)
        model = autoencoder(kind, **kwargs)
        check_degree(model, tp.size)
        layers = layers_of(model, torch.float64)
        own = SequentialViT(sharded_copies(layers, tp), recompute_interval=interval)
        whole = SequentialViT(layers)
        pixels, keys = batch_of(model, torch.float64)
        loss, predictions = MaskedPatchLoss(model), []
        for one in (whole, own):
            predictions.append(one(pixels, keys))
            loss(predictions[-1], pixels, keys).backward()
        close(predictions[1].detach(), predictions[0].detach(), "prediction")
        for parameter in own.parameters():
            if not parameter.requires_grad:
                assert parameter.grad is None
                parameter.grad = torch.zeros_like(parameter)
        gradients = whole_gradients(own)
        for name, parameter in whole.named_parameters():
            if parameter.requires_grad:  # the loss is in fp32, and so is its gradient
                close(gradients[name], parameter.grad, f"{kind}: {name}", 1e-6)
        with torch.no_grad():
            close(own.eval()(pixels, keys), predictions[0].detach(), "prediction in evaluation")


@pytest.mark.slow
@pytest.mark.parametrize(("size", "sequence_parallel"), [(3, True), (2, False)])
def test_a_sharded_autoencoder_is_the_autoencoder(ranks, size, sequence_parallel):
    """A decoder left whole, a bridge whose gradients differ between ranks, tokens joined by the other half's count."""
    ranks.run(size, compare_autoencoders, sequence_parallel, timeout=400)


# ---- bytes moved -----------------------------------------------------------------------------------------------------


def bytes_sent(kind: str, sequence_parallel: bool, recompute: CheckpointFunction | None = None) -> int:
    """Bytes that a rank sends in a block's forward and backward, if every collective is a ring (as NCCL's)."""
    tp = tensor_parallel(sequence_parallel)
    layers = whole_layers(spec_of(*KINDS[kind]))
    (block,) = sharded_copies([layers[1]], tp)
    block.requires_grad_(False)  # the activations alone; sums of small replicated gradients come on top
    tokens = torch.randn(SAMPLES, block.num_tokens.count(training=True), layers[0].embed_dim, dtype=torch.float64)
    own = own_tokens(tokens, tp)
    sent = 0

    def counting(collective, ring):
        def call(output, *args, **kwargs):
            nonlocal sent
            sent += ring(output, *args)
            return collective(output, *args, **kwargs)

        return call

    others = tp.size - 1
    rings = {
        "all_reduce": lambda x: 2 * others * x.nbytes // tp.size,
        "all_gather_into_tensor": lambda out, own: others * own.nbytes,
        "reduce_scatter_tensor": lambda own, whole: others * own.nbytes,
    }
    with mock.patch.multiple(dist, **{name: counting(getattr(dist, name), ring) for name, ring in rings.items()}):
        out = run(block, (own, torch.arange(SAMPLES)), recompute)
        out.backward(torch.ones_like(out))
    return sent


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize(("kind", "regions"), [("Attention and Mlp", 2), ("parallel scaling, bias", 1)])
def test_bytes_moved(ranks, kind, regions, sequence_parallel):
    """A collective too many: each region costs one all-reduce (or gather and scatter) forward and one backward."""
    size = 2
    (name, kwargs) = KINDS[kind]
    tokens = whole_layers(spec_of(name, kwargs))[1].num_tokens.count(training=True)
    if sequence_parallel:
        tokens += -tokens % size
    activation = SAMPLES * tokens * 48 * 8
    # A ring all-reduce of n bytes sends 2 (t - 1) / t n; a gather or scatter (t - 1) / t n.
    expected = regions * 2 * 2 * (size - 1) * activation // size
    assert ranks.run(size, bytes_sent, kind, sequence_parallel) == [expected] * size
    # Recomputing sends the forward pass's again; torch may stop before the block's last sum, which nothing needs.
    again = expected // 2
    last = again // regions // (2 if sequence_parallel else 1)
    (found, *_) = ranks.run(size, bytes_sent, kind, sequence_parallel, recompute_all)
    assert found in (expected + again, expected + again - last)


# ---- what cannot be sharded ------------------------------------------------------------------------------------------


def model_of(name: str, **kwargs) -> nn.Module:
    return create_model(ModelSpec(name, model_kwargs={"depth": 2} | kwargs), for_training=False)


@pytest.mark.parametrize(
    ("name", "kwargs", "size", "message"),
    [
        ("vit_base_patch16_224", {}, 8, "num_heads 12 cannot be split over tp 8; tp may be 1, 2, 3, 4, 6 or 12"),
        ("vit_tiny_patch16_224", {}, 2, "num_heads 3 cannot be split over tp 2; tp may be 1 or 3"),
        ("eva02_large_patch14_224", {}, 4, "hidden size 2730 cannot be split over tp 4; tp may be 1 or 2"),
        ("vit_pe_core_base_patch16_224", {}, 3, "attn_pool num_heads 8 cannot be split over tp 3; tp may be 1, 2 or 4"),
        (
            "vit_base_patch16_sapiens2",
            {"num_heads": 12, "num_kv_heads": 4},
            3,
            "num_kv_heads 4 cannot be split over tp 3; tp may be 1, 2 or 4",
        ),
        ("vit_tiny_patch16_224", {"num_heads": 1}, 2, "num_heads 1 cannot be split over tp 2; tp must be 1"),
    ],
)
def test_a_degree_that_does_not_divide(name, kwargs, size, message):
    """A shard that fails in a reshape on every rank, after minutes, instead of one line that names the way out."""
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the whole message is compared)
        check_degree(model_of(name, **kwargs), size)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("name", "degrees"),
    [
        ("vit_base_patch16_xp_224", [1, 2, 3, 4, 6, 12]),
        ("eva02_base_patch14_224", [1, 2, 4]),
        ("vit_giant_patch14_dinov2", [1, 2, 4, 8]),
    ],
)
def test_every_legal_degree_is_accepted(name, degrees):
    """A list of legal degrees with one that is refused, or without one that works."""
    model = model_of(name)
    assert legal_degrees(model) == degrees
    for size in range(1, 26):
        if size in degrees:
            check_degree(model, size)
        else:
            with pytest.raises(ValueError, match="cannot be split"):
                check_degree(model, size)


def test_the_decoder_must_be_sharded_too():
    """A degree that fits the encoder alone."""
    spec = ModelSpec("vit_base_patch16_224", model_kwargs={"depth": 2})
    model = create_autoencoder(spec, MaskedAutoencoderSettings())
    assert legal_degrees(model) == [1, 2, 4]
    with pytest.raises(ValueError, match="decoder num_heads 16 cannot be split over tp 3; tp may be 1, 2 or 4"):
        check_degree(model, 3)


class Mixer(nn.Module):
    """A sub-layer that no plan knows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(4, 4, device="meta"))


def test_an_unknown_kind_is_refused_by_name():
    """A sub-layer that stays whole in silence, or a norm that takes the statistics of a rank's features for all."""
    model = model_of("vit_base_patch16_224")
    model.blocks[1].mlp = Mixer()
    with pytest.raises(ValueError, match=r"Mixer in Block \(mlp.weight\) cannot be sharded over tp 2; tp must be 1"):
        check_degree(model, 2)
    assert legal_degrees(model) == [1]
    check_degree(model, 1)
    model = model_of("beit3_base_patch16_224")
    model.blocks[0].mlp.norm = SimpleNorm(8)
    with pytest.raises(ValueError, match=r"SimpleNorm over the features of Mlp \(norm\) cannot be sharded over tp 2"):
        check_degree(model, 2)
