"""Canaries: each bug or trap of DeepSpeed 0.19 that we work around, seen as it is.

When one of these fails after an upgrade, the workaround that its docstring names can go.
"""

import functools
import hashlib
import importlib.util
import inspect
import pkgutil
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from runs import pretend_fp16


def initialize(config, model=None, optimizer=None):
    """DeepSpeed's engine, by default around a linear layer under SGD."""
    import deepspeed

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4) if model is None else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1) if optimizer is None else optimizer
    config = {"train_micro_batch_size_per_gpu": 1, "zero_allow_untested_optimizer": True, **config}
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config)[0]


def zero3_on_a_rank():
    """The type of a model that zero.Init partitioned in fp32 under a bf16 file."""
    import deepspeed

    config = {"train_batch_size": 1, "bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    model = torch.nn.Linear(4, 4)
    deepspeed.zero.Init(module=model, config_dict_or_path=config)
    optimizer = torch.optim.AdamW(model.parameters())
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    return str(engine.module.weight.dtype)


def table_of_operators_on_a_rank():
    """What engine/start.py does with it; in a process of its own, since it is made once."""
    import deepspeed
    from deepspeed.comm.torch import build_shm_op
    from deepspeed.ops.op_builder.cpu.comm import ShareMemCommBuilder

    from ds_vit.engine.patches import without_compiled_collectives

    assert ShareMemCommBuilder.NAME == "deepspeed_shm_comm"
    with without_compiled_collectives():
        operator = build_shm_op()
    untouched = "__compatible_ops__" not in vars(deepspeed.ops)
    table = deepspeed.ops.__compatible_ops__
    with without_compiled_collectives():
        assert build_shm_op() is None
    return operator, untouched, len(table) > 1, deepspeed.ops.__compatible_ops__ is table


def norm_collectives_on_a_rank():
    """How often ZeRO-1 meets the other pipeline stages in one gradient norm, by parameter groups."""
    counts = {}
    for groups in (1, 2):
        layers = [torch.nn.Linear(4, 4, bias=False) for _ in range(groups)]
        optimizer = torch.optim.SGD([{"params": list(layer.parameters())} for layer in layers], lr=0.1)
        engine = initialize({"zero_optimization": {"stage": 1}}, torch.nn.Sequential(*layers), optimizer)
        calls = []
        engine.optimizer._model_parallel_all_reduce = lambda tensor, op, calls=calls: calls.append(op)
        engine.backward(engine(torch.ones(1, 4)).square().sum())
        calls.clear()
        engine.optimizer.scaled_global_norm()
        counts[groups] = len(calls)
    return counts


def muon_marks_on_a_rank():
    """Whether DeepSpeed marks a matrix for its own Muon when the optimizer is ours and the file names one."""
    engine = initialize({"optimizer": {"type": "Muon", "params": {"lr": 0.1}}})
    return getattr(engine.module.weight, "use_muon", None)


def adagrad_on_a_rank():
    """Parameter groups, and weight decays, that ZeRO leaves of a torch Adagrad with two groups."""
    model = torch.nn.Linear(4, 4)
    groups = [{"params": [model.weight], "weight_decay": 0.1}, {"params": [model.bias], "weight_decay": 0.0}]
    engine = initialize({"zero_optimization": {"stage": 1}}, model, torch.optim.Adagrad(groups))
    return [group["weight_decay"] for group in engine.optimizer.optimizer.param_groups]


def grids_on_a_rank():
    """Grids that DeepSpeed makes by itself for a pipeline of two stages."""
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe import module

    with mock.patch.object(module, "PipelineParallelGrid", wraps=module.PipelineParallelGrid) as made:
        PipelineModule([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)], num_stages=2)
    return made.call_count


def received_gradient_on_a_rank():
    """In how many buffers the gradients of two micro-batches are received."""
    from deepspeed.runtime.pipe import engine as pipe

    stage = SimpleNamespace(
        wall_clock_breakdown=lambda: False,
        is_pipe_partitioned=False,
        is_grad_partitioned=False,
        dynamic_shape=False,
        grad_layer=None,
        next_stage=1,
        pipe_buffers={"outputs": [(torch.ones(1, 3, 4),)]},
        _allocate_or_extend_buffers=lambda index, size, dtype: torch.zeros(size, dtype=dtype),
    )
    buffers = []
    with mock.patch.object(pipe.p2p, "recv", lambda buffer, stage: buffers.append(buffer.data_ptr())):
        pipe.PipelineEngine._exec_recv_grads(stage, 0)
        pipe.PipelineEngine._exec_recv_grads(stage, 0)
    return len(set(buffers))


SEEN = {
    # build_engine.py partitions the model in its type, because DeepSpeed would leave it in fp32 in silence.
    "ZeRO-3 does not cast a partitioned model": (1, zero3_on_a_rank, (), "torch.float32"),
    # The shared-memory collective is a JIT build. The table is still DeepSpeed's, made when it is first asked for.
    "no collective is compiled, no operator tried": (1, table_of_operators_on_a_rank, (), (None, True, True, True)),
    # engine/patches.py sums it over the stages once, of which one may have fewer groups than another.
    "the norm is a collective for each group": (1, norm_collectives_on_a_rank, (), {1: 1, 2: 2}),
    # engine/base.py takes the block away: ZeRO orthogonalizes marked gradients for a class with "muon" in its name.
    "a file that says Muon marks parameters": (1, muon_marks_on_a_rank, (), True),
    # optim/adagrad.py is no torch.optim.Adagrad: of that, ZeRO keeps one group without its decay.
    "ZeRO has its own Adagrad": (1, adagrad_on_a_rank, (), [0]),
    # engine/patches.py shared_grid gives it the run's grid.
    "a pipeline makes a grid of its own": (2, grids_on_a_rank, (), 1),
    # engine/pipeline.py copies what it received before autograd may keep a view of it.
    "gradients of micro-batches are received in one buffer": (1, received_gradient_on_a_rank, (), 1),
}


@pytest.mark.parametrize(("world", "function", "arguments", "value"), SEEN.values(), ids=SEEN)
def test_seen_on_ranks(ranks, world, function, arguments, value):
    assert ranks.run(world, function, *arguments) == [value] * world


def moved_in_fp16(window):
    """How far SGD moves the weights in the second step, where the loss scale grows every `window` steps."""
    fp16 = {"enabled": True, "initial_scale_power": 4, "loss_scale_window": window}
    zero = {"stage": 3, "reduce_bucket_size": 1000, "allgather_bucket_size": 1000}
    config = {"gradient_clipping": 0.0, "fp16": fp16, "zero_optimization": zero, "zero_force_ds_cpu_optimizer": False}
    with pretend_fp16():
        engine = initialize(config)
        masters = engine.optimizer.fp32_partitioned_groups_flat
        for _ in range(2):
            before = masters[0].detach().clone()
            engine.backward(engine(torch.ones(1, 4, dtype=torch.half)).float().sum())
            engine.step()
        return (masters[0] - before).norm().item()


def test_a_scale_that_grows_halves_the_step(ranks):
    """engine/patches.py lets the scale grow after the step (stage3.py and stage_1_and_2.py: `step`)."""
    [halved], [whole] = (ranks.run(1, moved_in_fp16, window) for window in (1, 1000))
    assert halved == pytest.approx(whole / 2, rel=1e-3)


# Checksums of the DeepSpeed methods that engine/flat_gradient.py and zero3.py replace or rely on, as they were read.
READ = {
    "engine.DeepSpeedEngine.allreduce_gradients": "463ddeb324ece8a3",
    "engine.DeepSpeedEngine.zero_grad": "3fae900220129021",
    "engine.DeepSpeedEngine._take_model_step": "c4c6e01aa1fc4e7d",
    "pipe.engine.PipelineEngine._exec_backward_pass": "ae2eeff56b84d1e4",
    "pipe.engine.PipelineEngine._exec_reduce_grads": "3620e2a941f01644",
    "pipe.engine.PipelineEngine.is_gradient_accumulation_boundary": "19002e7c997afc18",
    "zero.stage_1_and_2.DeepSpeedZeroOptimizer.backward_prologue": "2986906eb255fd62",
    "zero.stage_1_and_2.DeepSpeedZeroOptimizer.backward_epilogue": "be81179af51b42f3",
    "zero.stage_1_and_2.DeepSpeedZeroOptimizer.clear_backward_seen_flag": "34ffe6eb0b7435de",
    "zero.stage_1_and_2.DeepSpeedZeroOptimizer.step": "9520884fd916d178",
    "zero.stage_1_and_2.DeepSpeedZeroOptimizer.zero_grad": "f303979da7baa514",
    "zero.stage_1_and_2.DeepSpeedZeroOptimizer._link_all_hp_params": "e91c2f7e8f29ef11",
    "zero.stage3.DeepSpeedZeroOptimizer_Stage3.step": "c751b3209f83d3b9",
    "zero.stage3.DeepSpeedZeroOptimizer_Stage3._pre_step": "6a560fa097ab03bb",
    "zero.stage3.DeepSpeedZeroOptimizer_Stage3.zero_grad": "359a0a616c12d0c7",
    "zero.stage3.DeepSpeedZeroOptimizer_Stage3.independent_gradient_partition_epilogue": "f1575b87b3d6c083",
    "zero.stage3.DeepSpeedZeroOptimizer_Stage3._get_norm_groups": "6a068faa3149b1f4",
    "zero.stage3.DeepSpeedZeroOptimizer_Stage3._prepare_fp32_grad_for_sub_group": "6c19570c775487ef",
    "zero.stage3.DeepSpeedZeroOptimizer_Stage3._reassign_or_swap_out_partitioned_parameters": "af7b449bee8786ec",
    "zero.stage3.DeepSpeedZeroOptimizer_Stage3.has_overflow": "1008a8e067cd7462",
    "zero.parameter_offload.DeepSpeedZeRoOffload._remove_module_hooks": "c7edff9f0cac499b",
    "engine.DeepSpeedEngine._forward_prologue": "7f3289ffc96f30e2",
    "engine.DeepSpeedEngine._forward_epilogue": "2ffc78bd3da0c8c0",
}


def test_what_the_flat_gradient_reads_is_there():
    """A pipeline whose backward passes are not in this table any more."""
    from deepspeed.runtime.pipe.engine import PipelineEngine
    from deepspeed.runtime.pipe.schedule import BackwardPass

    assert PipelineEngine._INSTRUCTION_MAP[BackwardPass] is PipelineEngine._exec_backward_pass
    assert "self._INSTRUCTION_MAP[type(cmd)]" in inspect.getsource(PipelineEngine._exec_schedule)


@pytest.mark.parametrize("name", READ)
def test_a_replaced_method_is_still_what_was_read(name):
    """A version of DeepSpeed that mends or changes one: ours then lacks that. Read it, then take its checksum over."""
    function = pkgutil.resolve_name(f"deepspeed.runtime.{name}")
    # Its decorator for traces hides what it wraps.
    source = inspect.getsource(inspect.getclosurevars(function).nonlocals.get("func", function))
    assert hashlib.sha256(source.encode()).hexdigest()[:16] == READ[name]


def test_zero3s_linear_map_adds_the_bias_to_a_rounded_product():
    """patches.plain_linear_at_zero3: two roundings; in place, so that selective recomputation adds it twice."""
    from deepspeed.runtime.zero import linear

    from ds_vit.engine.patches import plain_linear_at_zero3
    from ds_vit.models.checkpointing import recompute_selectively

    # As shipped, whatever a run of this process has done to it; at the end the class that DeepSpeed's own code uses.
    spec = importlib.util.spec_from_file_location("linear_as_shipped", linear.__file__)
    shipped = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(shipped)
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(2, 3, 3, generator=generator) for _ in range(2))
    bias = torch.ones(3, dtype=torch.float32)

    def twice(module, function):
        """The input's gradient of a linear map, twice, and of a function that needs the first one's output."""
        given = x.clone().requires_grad_()
        first = functools.partial(module.zero3_linear_wrap, weight=weight[0], bias=bias)
        out = function(lambda given: first(first(given).square()), given)
        out.square().sum().backward()
        return given.grad

    def at_once(function, *tensors):
        return function(*tensors)

    assert not torch.allclose(twice(shipped, recompute_selectively), twice(shipped, at_once), rtol=1e-2)
    with plain_linear_at_zero3():
        assert torch.equal(twice(linear, recompute_selectively), twice(linear, at_once))

    x, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((4, 9, 64), (64, 64), (64,)))
    for autocast in (True, False):  # the same in 16-bit weights as under autocast
        given = (x, weight, bias) if autocast else [tensor.bfloat16() for tensor in (x, weight, bias)]
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            plain = torch.nn.functional.linear(*given)
            assert not torch.equal(shipped.zero3_linear_wrap(*given), plain)
            with plain_linear_at_zero3():
                assert torch.equal(linear.zero3_linear_wrap(*given), plain)


def test_zero3_clips_scaled_gradients_under_autocast_in_fp16():
    """ZeroUnits unscales them before their norm: DeepSpeed's own loss scale is 1, and torch's scaler comes last."""
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3

    master = torch.zeros(1)
    master.grad = torch.full((1,), 1024.0)  # a gradient of 1, below the limit
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = SimpleNamespace(loss_scale=1.0, clip_grad=2.0, fp32_partitioned_groups_flat=[master])
    optimizer.torch_autocast_gradscaler = scaler
    DeepSpeedZeroOptimizer_Stage3.unscale_and_clip_grads(optimizer, 0, torch.tensor(1024.0))
    assert master.grad.item() == pytest.approx(2.0)


def test_deepspeeds_muon_is_compiled_as_it_is_imported():
    """patches.import_muon_uncompiled: the ZeRO stages import it, whatever the optimizer is."""
    found = importlib.util.find_spec("deepspeed.runtime.zero.muon.original_muon")
    assert "\n@compiler.compile" in Path(found.origin).read_text()
