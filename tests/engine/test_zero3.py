"""ZeRO-3 by layer (engine/zero3.py): what leaves a layer, what is gathered when, what it costs, what is refused."""

import contextlib
import itertools
import operator
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from ds_vit.engine import zero3
from ds_vit.engine.zero3 import ZeroUnits
from ds_vit.models.layers import Layer

STEPS, ROWS, WIDTH = 3, 6, 5
JSON = {"memory_efficient_linear": False, "contiguous_gradients": False}  # as build_engine.py and base.py set

# ---- Layers of every kind, against plain torch ----


class Block(Layer):
    """A residual branch; 7 rows divide by no number of ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 7), nn.Linear(7, WIDTH)

    def forward(self, inputs):
        (x,) = inputs
        return (x + self.down(torch.tanh(self.up(x))),)


class Idle(Block):
    """Changes nothing for every other sample, as where drop-path drops all rows."""

    calls = 0

    def forward(self, inputs):
        self.calls += 1
        return inputs if self.calls % 2 else super().forward(inputs)


class Aliasing(Block):
    """A view of its weight leaves it, and so does a single number."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.scale = nn.Parameter(torch.randn(WIDTH, WIDTH)), nn.Parameter(torch.tensor([0.5]))

    def forward(self, inputs):
        (x,) = super().forward(inputs)
        return x, self.table.view_as(self.table), self.scale.clone()


class Model(nn.Module):
    """The layers of a case, and what becomes of their outputs."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.kind = kind
        classes = {"aliases": [Block, Aliasing, Block], "idle": [Block, Idle, Block]}.get(kind, [Block] * 3)
        self.layers = nn.ModuleList([cls() for cls in classes])
        self.layers[1].requires_grad_(kind != "frozen")
        self.layers[0].requires_grad_(kind != "frozen first")

    def forward(self, x):
        if self.kind.startswith("unused on rank 1"):
            return self.leave_out(x)
        first, second, third = self.layers
        inputs = first((x,))
        if self.kind == "recomputed":
            return third((checkpoint(lambda x: second((x,))[0], *inputs, use_reentrant=False),))[0]
        if self.kind == "unused":
            second(inputs)
            return third(inputs)[0]
        out = second(inputs)
        if self.kind == "aliases":  # a second call comes between the weight and its use
            x, table, scale = out
            (again, *_) = second(third((x,)))
            return scale * (third((again,))[0] @ table.T)
        if self.kind == "twice":
            out = second(third(out))
        return third(out)[0]

    def leave_out(self, x):
        """On rank 1, whose rows are the second half in one process, one layer's output leads nowhere."""
        if not dist.is_initialized():
            return torch.cat([self.through(half, rank) for rank, half in enumerate(x.chunk(2))])
        return self.through(x, dist.get_rank())

    def through(self, x, rank):
        for number, layer in enumerate(self.layers):
            (out,) = layer((x,))
            x = x if rank == 1 and self.kind.endswith(str(number)) else out
        return x


KINDS = ["plain", "aliases", "idle", "frozen", "frozen first", "recomputed", "unused", "twice"]


def samples() -> torch.Tensor:
    return torch.randn(STEPS, ROWS, WIDTH, generator=torch.Generator().manual_seed(1))


def plain_losses(kind: str) -> list[float]:
    """By torch in one process."""
    model, losses = Model(kind), []
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for x in samples():
        loss = model(x).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@contextlib.contextmanager
def units_on_rank(kind: str, accumulation: int = 1, **blocks):
    """DeepSpeed's engine around a model of these layers, and the units that took it over."""
    import deepspeed

    settings = {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 1000, **JSON}
    settings |= blocks.pop("zero_optimization", {})
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": settings,
        **blocks,
    }
    model = Model(kind)
    for layer in model.layers:
        deepspeed.zero.Init(module=layer, config_dict_or_path=config)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    units = ZeroUnits(engine, trains=True)
    count_all(units)
    yield engine, units
    engine.destroy()
    units.close()


def count_all(units: ZeroUnits) -> None:
    """As `ZeroUnits.count` with a map in which every segment counts."""
    optimizer, shards = units.optimizer, []
    for params in optimizer.fp16_groups:
        offsets = [0, *itertools.accumulate(p.ds_tensor.ds_numel for p in params)]
        places = itertools.starmap(slice, itertools.pairwise(offsets))
        segments = [SimpleNamespace(name="", of=operator.itemgetter(place)) for place in places]
        shards.append(SimpleNamespace(segments=segments))
    units.count(SimpleNamespace(shards=shards, counts=lambda segment: True))


def losses_on_rank(kind: str, accumulation: int, blocks: dict) -> list[float]:
    """The losses over all ranks."""
    with units_on_rank(kind, accumulation, **blocks) as (engine, units):
        losses = steps_of(engine, accumulation)
        staying = [unit for unit in units.units if unit.elements and unit.whole and not unit.keeps]
        assert not staying, "something stays gathered"
    return losses


def losses_of_kinds(kinds: list[str], accumulation: int) -> list[list[float]]:
    """Of one engine after the other."""
    return [losses_on_rank(kind, accumulation, {}) for kind in kinds]


def steps_of(engine, accumulation: int = 1) -> list[float]:
    """Train; the losses over all ranks."""
    losses, world, rank = [], dist.get_world_size(), dist.get_rank()
    for x in samples():
        parts, total = x.chunk(world * accumulation), torch.zeros(())
        for micro in range(accumulation):
            loss = engine(parts[micro * world + rank]).square().mean()
            engine.backward(loss)
            total += loss.detach()
            engine.step()
        dist.all_reduce(total)
        losses.append(total.item() / world / accumulation)
    return losses


@pytest.mark.parametrize(("world", "accumulation"), [(1, 1), (1, 2), (2, 1), (3, 2)])
def test_layers_of_every_kind_train_as_in_plain_torch(ranks, world, accumulation):
    """Catches: a weight freed while a view of it is read, a gradient that is reduced early, twice or never."""
    # Which samples "idle" changes depends on the calls.
    kinds = [kind for kind in KINDS if kind != "idle" or accumulation == 1]
    for found in ranks.run(world, losses_of_kinds, kinds, accumulation):
        for kind, losses in zip(kinds, found, strict=True):
            assert losses == pytest.approx(plain_losses(kind), rel=1e-5), kind


@pytest.mark.parametrize(
    "blocks",
    [
        {"zero_optimization": {"offload_param": {"device": "cpu"}, "offload_optimizer": {"device": "cpu"}}},
        {"zero_optimization": {"sub_group_size": 20}},
        {"zero_optimization": {"reduce_scatter": False}, "prescale_gradients": True},
        {"zero_optimization": {"overlap_comm": False}},
        {"zero_optimization": {"stage3_param_persistence_threshold": 10**6}},
    ],
    ids=lambda blocks: next(iter(blocks["zero_optimization"])),
)
def test_settings_of_the_json_keep_the_losses(ranks, blocks):
    blocks = {**blocks, "zero_force_ds_cpu_optimizer": False}
    for losses in ranks.run(2, losses_on_rank, "plain", 1, blocks):
        assert losses == pytest.approx(plain_losses("plain"), rel=1e-5)


def released_on_rank(aliases: bool) -> tuple[bool, bool]:
    """Whether the layer whose weight has left is whole between the passes, and afterwards."""
    with units_on_rank("aliases") as (engine, units):
        with contextlib.nullcontext() if aliases else mock.patch.object(zero3.Unit, "aliases", return_value=False):
            units.module.layers[1]((torch.zeros(1, WIDTH),))
        unit = units.units[1]
        between = unit.whole
        engine.backward(engine(samples()[0]).square().mean())
        return between, unit.whole


def test_a_layer_whose_weight_has_left_stays_until_the_end_of_the_backward_pass(ranks):
    assert ranks.run(2, released_on_rank, True) == [(True, False)] * 2
    assert ranks.run(2, released_on_rank, False) == [(False, False)] * 2


@contextlib.contextmanager
def counted_gathers():
    """On a rank: how many units are gathered, how many of them ahead, and the most elements that were whole at once."""
    counts, gather = {"ahead": 0, "all": 0, "most": 0}, ZeroUnits._gather

    def counted(self, unit, following):
        if not unit.whole:
            counts["ahead"] += self._coming is unit
            counts["all"] += 1
        gather(self, unit, following)
        counts["most"] = max(counts["most"], self.live)

    with mock.patch.object(ZeroUnits, "_gather", counted):
        yield counts


def evaluated_on_rank() -> tuple[torch.Tensor, int]:
    """Outputs of an engine without an optimizer, and the most elements that were whole at once."""
    import deepspeed

    zero = {"stage": 3, "stage3_param_persistence_threshold": 0, **JSON}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": zero}
    model = Model("plain")
    for layer in model.layers:
        deepspeed.zero.Init(module=layer, config_dict_or_path=config)
    engine, *_ = deepspeed.initialize(model=model, config=config)
    units = ZeroUnits(engine, trains=False)
    with torch.no_grad(), counted_gathers() as counts:
        outputs = [engine(x) for x in samples()]
    most, whole = counts["most"], units.units[0].elements
    engine.destroy()
    units.close()
    return torch.stack(outputs), most // whole if whole else 0


@pytest.mark.parametrize("world", [1, 2])
def test_an_engine_that_only_evaluates_has_the_same_units(ranks, world):
    with torch.no_grad():
        expected = torch.stack([Model("plain")(x) for x in samples()])
    for outputs, most in ranks.run(world, evaluated_on_rank):
        assert torch.allclose(outputs, expected, rtol=1e-6)
        assert most == world - 1


# ---- What is gathered when ----


def gathered_on_rank(zero: dict) -> tuple[int, int, int, int]:
    """In the third step: (gathered ahead, gathered, most elements at once, those of a unit)."""
    with units_on_rank("plain", 2, zero_optimization=zero) as (engine, units), counted_gathers() as counts:
        for _ in range(3):
            counts.update(ahead=0, all=0)
            for _ in range(2):
                engine.backward(engine(samples()[0]).square().mean())
                engine.step()
        return counts["ahead"], counts["all"], counts["most"], units.units[0].elements


@pytest.mark.parametrize("layer", range(3))
@pytest.mark.parametrize("zero", [{}, {"overlap_comm": False}])
def test_a_layer_without_gradient_on_one_rank_only(ranks, layer, zero):
    """A collective that one rank leaves out: the other one would wait for ever, or receive another layer's sum."""
    kind = f"unused on rank 1: layer {layer}"
    found, _ = ranks.run(2, losses_on_rank, kind, 1, {"zero_optimization": zero}, timeout=60)
    assert found == pytest.approx(plain_losses(kind), rel=1e-5)


@pytest.mark.parametrize(
    ("zero", "ahead", "gathered", "units"),
    [
        ({}, 8, 12, 1),  # three units, two passes, two micro-batches; the first of a pass is not known before it
        ({"stage3_prefetch_bucket_size": 0}, 0, 12, 1),
        ({"stage3_max_live_parameters": 0}, 0, 12, 1),
        ({"overlap_comm": False}, 0, 12, 1),
        ({"stage3_param_persistence_threshold": 10**6}, 2, 3, 3),
        ({"stage3_param_persistence_threshold": 10**6, "stage3_model_persistence_threshold": 100}, 6, 9, 2),
    ],
)
def test_what_is_gathered_ahead_and_what_stays(ranks, zero, ahead, gathered, units):
    """Besides the unit in the landing buffer, one unit is whole at a time."""
    for found in ranks.run(2, gathered_on_rank, zero):
        assert found[:2] == (ahead, gathered)
        assert found[2] == units * found[3]


def interrupted_on_rank() -> list[float]:
    """The losses of steps, of which the first was tried before and broke off in its backward pass."""
    with units_on_rank("plain") as (engine, _):
        broken = engine(samples()[0]).square().mean()
        middle = engine.module.layers[0].up.weight
        handle = middle.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.backward(broken)
        handle.remove()
        return steps_of(engine)


def test_a_backward_pass_that_broke_off_leaves_no_gradient(ranks):
    for losses in ranks.run(2, interrupted_on_rank):
        assert losses == pytest.approx(plain_losses("plain"), rel=1e-5)


# ---- What is refused ----


def partitioned(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        parameter.ds_tensor = SimpleNamespace(ds_numel=1)
    return module


class Outer(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()


def shared() -> nn.Module:
    first, second = Block(), Block()
    second.up = first.up
    return nn.ModuleList([first, second])


@pytest.mark.parametrize(
    ("module", "said"),
    [
        (lambda: nn.ModuleList([Block(), nn.Linear(2, 2)]), "1.weight, 1.bias belongs to no Layer"),
        (shared, "1 shares a parameter with another Layer"),
        (lambda: nn.ModuleList([Outer()]), "0 contains another Layer"),
    ],
)
def test_models_that_have_no_units_are_refused(module, said):
    with pytest.raises(ValueError, match=said):
        list(zero3._units_of(partitioned(module()), None))


def refused_on_rank() -> list[str]:
    import deepspeed

    said = []
    with units_on_rank("plain") as (engine, units):
        weight = engine.module.layers[0].up.weight
        for attempt in (
            lambda: deepspeed.zero.GatheredParameters([weight]).__enter__(),
            lambda: engine.save_checkpoint("nowhere"),
            lambda: engine.save_16bit_model("nowhere"),
        ):
            with pytest.raises(RuntimeError) as caught:
                attempt()
            said.append(str(caught.value))
        forward = units.units[0].forward
    assert engine.module.layers[0].forward == forward
    assert vars(units) == {}, "closed, it holds no buffer, stream or process group"
    return said


def test_deepspeeds_own_gathering_is_refused(ranks):
    for said in ranks.run(2, refused_on_rank):
        assert all("gathers ZeRO-3's weights by layer" in text for text in said)


# ---- What it relies on ----


@pytest.mark.parametrize("recomputed", [False, True])
def test_autograd_ends_a_layer_before_it_begins_the_one_before(recomputed):
    """The one hook a unit relies on it: the ready node that was created last runs first, and gradients at once."""
    seen, layers = [], [Block() for _ in range(4)]
    for number, layer in enumerate(layers):
        for parameter in layer.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _, number=number: seen.append(number))
    x = torch.randn(2, WIDTH)
    kept = []
    for number, layer in enumerate(layers):
        run = lambda x, layer=layer: layer((x,))[0]  # noqa: E731
        x = checkpoint(run, x, use_reentrant=False) if recomputed and number else run(x)
        x.grad_fn.register_prehook(lambda _, number=number: seen.append(f"begin {number}"))
        kept.append(x.mean())  # a branch that ends elsewhere
    sum(kept).backward()
    expected = [step for number in (3, 2, 1, 0) for step in (f"begin {number}", *[number] * 4)]
    assert seen == expected


ATTRIBUTES = {
    "optimizer": """
        fp16_groups fp32_partitioned_groups_flat fp16_partitioned_groups_flat grad_partitions_flat_buffer grad_position
        get_param_id micro_step_id _epilogue_ran_this_backward offload_optimizer lp_param_buffer
        communication_data_type postscale_gradients _model_parallel_all_reduce loss_scale persistent_parameters
        parameter_offload _grad_acc_hooks _leaf_module_hooks check_overflow invalidate_secondary_tensor zero_grad
        _partition_all_parameters independent_gradient_partition_epilogue _pre_step _get_norm_groups
        _prepare_fp32_grad_for_sub_group _reassign_or_swap_out_partitioned_parameters param_groups_fp16_flat_cpu_memory
    """,
    "optimizer.parameter_offload": """
        forward_hooks backward_hooks _remove_module_hooks partition_all_parameters release_backward_leftovers
    """,
    "": """
        zero_overlap_comm zero_prefetch_bucket_size zero_max_live_parameters zero_param_persistence_threshold
        zero_model_persistence_threshold zero_optimization_partition_weights _forward_prologue _forward_epilogue
        save_checkpoint save_16bit_model
    """,
    "module.weight": "ds_tensor.ds_numel ds_numel ds_shape ds_id ds_status ds_process_group all_gather partition",
}


def missing_on_rank() -> list[str]:
    """What DeepSpeed's engine, as it makes it, lacks of what zero3.py reads or replaces."""
    import deepspeed

    model = nn.Linear(4, 4)
    zero = {"stage": 3, "reduce_bucket_size": 1000, **JSON}
    config = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True, "zero_optimization": zero}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    linear = nn.functional.linear
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    missing = [] if nn.functional.linear is linear else ["torch's linear map"]
    missing += [] if all(bucket.buffer is None for bucket in engine.optimizer.ipg_buckets.values()) else ["no buckets"]
    for path, names in ATTRIBUTES.items():
        for name in names.split():
            owner = engine
            for part in f"{path}.{name}".strip(".").split("."):
                if not hasattr(owner, part):
                    missing.append(f"{path}.{name}")
                    break
                owner = getattr(owner, part)
    return missing + ([] if hasattr(engine.optimizer, zero3.GRADIENT_VIEWS) else [zero3.GRADIENT_VIEWS])


def test_canary_of_deepspeeds_stage_3(ranks):
    """DeepSpeed renamed what zero3.py reads or replaces."""
    assert ranks.run(1, missing_on_rank) == [[]]
