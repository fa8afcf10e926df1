"""Cut models under DeepSpeed, ZeRO 0 to 3: losses, gradient norms and weights are those of one plain process.

SGD and a clipping limit far below the norm: an optimizer that divides by the gradient's size would hide a constant
factor in it, and clipping shows a norm that counts something twice or not at all.
"""

from __future__ import annotations

import deepspeed
import pytest
import torch
import torch.distributed as dist
from deepspeed.runtime.pipe.topology import PipelineParallelGrid, PipeModelDataParallelTopology
from ranks import RankFailure
from tp_models import KINDS, NUM_CLASSES, spec_of, whole_layers

from ds_vit.models import Layer, SequentialViT
from ds_vit.parallel.tensor import TensorParallel, assemble, cut_layer
from ds_vit.tasks.losses import build_loss, class_parallel_loss

STEPS, ACCUMULATION, MICRO = 3, 2, 2
LOSS = {"soft_targets": False, "smoothing": 0.1, "bce": False}
LR, CLIP = 0.5, 0.1


def batches(layers: list[Layer], dp: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images [steps, accumulation, dp, micro, 3, side, side] and labels alike."""
    generator = torch.Generator().manual_seed(7)
    side = layers[0].patch_embed.img_size[0]
    shape = (STEPS, ACCUMULATION, dp, MICRO)
    labels = torch.randint(0, NUM_CLASSES, shape, generator=generator)
    return torch.randn(*shape, 3, side, side, generator=generator), labels


def keys_of(labels: torch.Tensor) -> torch.Tensor:
    """Distinct keys, by place."""
    return torch.arange(labels.numel()).view(labels.shape)


def train_whole(layers: list[Layer], dp: int) -> tuple[list[tuple[float, float]], dict[str, torch.Tensor]]:
    """(loss, norm) of each step and the weights in the end, in one process, each step's samples in one batch."""
    model = SequentialViT(layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    images, labels = batches(layers, dp)
    curve = []
    for step in range(STEPS):
        flat = [part[step].flatten(0, 2) for part in (images, keys_of(labels), labels)]
        loss = build_loss(**LOSS)(model(*flat[:2]), flat[2])
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        curve.append((loss.item(), norm.item()))
    return curve, {name: parameter.detach() for name, parameter in model.named_parameters()}


def values(parameter: torch.nn.Parameter) -> torch.Tensor:
    with deepspeed.zero.GatheredParameters([parameter], enabled=hasattr(parameter, "ds_id")):
        return parameter.detach().clone()


def train_cut(kind: str, stage: int, tp_size: int, sequence_parallel: bool, tags: bool = True) -> None:
    """Train over tp x dp ranks, and compare with `train_whole` on every rank."""
    dp = dist.get_world_size() // tp_size
    topology = PipeModelDataParallelTopology(num_pp=1, num_mp=tp_size, num_dp=dp)
    grid = PipelineParallelGrid(topology=topology)
    group = grid.get_slice_parallel_group()
    tp = TensorParallel(dist.get_rank(group), tp_size, group, sequence_parallel)
    config = {
        "train_micro_batch_size_per_gpu": MICRO,
        "gradient_accumulation_steps": ACCUMULATION,
        "gradient_clipping": CLIP,
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 100_000,
            "allgather_bucket_size": 100_000,
            "stage3_param_persistence_threshold": 100,
        },
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
    }
    name, kwargs = KINDS[kind]
    spec = spec_of(name, kwargs | {"proj_drop_rate": 0.1}, drop_path=0.2)
    expected, weights = train_whole(whole_layers(spec, torch.float32), dp)
    layers = whole_layers(spec, torch.float32)
    images, labels = batches(layers, dp)
    for layer in layers:
        cut_layer(layer, tp, class_parallel=True)
        if not tags:
            for parameter in layer.parameters():
                parameter.tensor_model_parallel = False
        if stage == 3:
            deepspeed.zero.Init(
                module=layer, config_dict_or_path=config, data_parallel_group=grid.get_data_parallel_group()
            )
    model = SequentialViT(layers, checkpoint_interval=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, mpu=grid)
    loss_of = class_parallel_loss(tp=tp, num_classes=NUM_CLASSES, **LOSS)
    mine = dist.get_rank(grid.get_data_parallel_group())
    for step, (expected_loss, expected_norm) in enumerate(expected):
        total = 0.0
        for micro in range(ACCUMULATION):
            own = [part[step, micro, mine] for part in (images, keys_of(labels), labels)]
            loss = loss_of(engine(*own[:2]), own[2])
            engine.backward(loss)
            engine.step()
            total += loss.item() / ACCUMULATION
        everyone = torch.tensor(total, dtype=torch.float64)
        dist.all_reduce(everyone, group=grid.get_data_parallel_group())
        assert everyone.item() / dp == pytest.approx(expected_loss, rel=1e-5), f"loss of step {step}"
        if stage > 0:
            assert float(engine.get_global_grad_norm()) == pytest.approx(expected_norm, rel=1e-5), f"norm of {step}"
        assert expected_norm > 10 * CLIP, "clipping that does nothing shows nothing"
    for local, parameter in model.named_parameters():
        slices = [torch.empty_like(values(parameter)) for _ in range(tp_size)]
        dist.all_gather(slices, values(parameter).contiguous(), group=group)
        if parameter.tp_slice.dim is None:
            assert torch.equal(slices[0], slices[1]), f"{local} differs between tensor-parallel ranks"
        whole, initial = assemble(slices, parameter.tp_slice), weights[local]
        error = float((whole - initial).norm() / initial.norm())
        assert error < 1e-5, f"{local} is off by {error:.1e}"


@pytest.mark.sampled(3)
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_cut_training_is_plain_training(ranks, stage, sequence_parallel):
    """A summed gradient that a ZeRO stage reduces before it is summed, a hook that a partitioned parameter loses."""
    ranks.run(4, train_cut, "differential, norms", stage, 2, sequence_parallel)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    "kind", ["parallel scaling, bias", "learned rotary frequencies", "Eva, q and v biases", "norms over features"]
)
def test_kinds_under_zero_3(ranks, kind):
    """A parameter that is used outside its owner's forward, where ZeRO-3 has freed it."""
    ranks.run(2, train_cut, kind, 3, 2, sequence_parallel=True)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_an_omitted_tag_is_caught(ranks, stage):
    """A norm that counts one rank's shards, whose clipping is wrong: what the tags are for."""
    with pytest.raises(RankFailure, match="norm of 0" if stage else "loss of step 1|is off by"):
        ranks.run(2, train_cut, "Attention and Mlp", stage, 2, sequence_parallel=False, tags=False)
