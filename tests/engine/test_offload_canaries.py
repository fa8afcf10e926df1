"""Canaries: what DeepSpeed 0.19 does with the offload settings that config/deepspeed_keys.py rejects.

When one of these fails after an upgrade, the setting that its docstring names can be tried again. Nothing is compiled:
the operators that read and write files, or that step in another process, are replaced.
"""

import functools
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import torch


class FileHandle:
    """DeepSpeed's handle for asynchronous file input and output (its op `async_io`), synchronous and in Python."""

    def __init__(self, **settings):
        self.done = 0
        self.pinned = []

    def new_cpu_locked_tensor(self, numel, example):
        self.pinned.append(torch.zeros(int(numel), dtype=example.dtype))
        return self.pinned[-1]

    def is_pinned(self, tensor):
        return any(tensor.untyped_storage().data_ptr() == pinned.data_ptr() for pinned in self.pinned)

    def async_pwrite(self, tensor, path, offset):
        Path(path).write_bytes(tensor.numpy().tobytes())
        self.done += 1
        return 0

    def async_pread(self, tensor, path, offset):
        read = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=tensor.dtype)
        tensor[: len(read)].copy_(read[: len(tensor)])
        self.done += 1
        return 0

    def wait(self):
        done, self.done = self.done, 0
        return done


def files_in_python():
    """Have DeepSpeed use `FileHandle` instead of compiling its operator."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    return mock.patch.object(AsyncIOBuilder, "load", return_value=SimpleNamespace(aio_handle=FileHandle))


def config_of(**zero):
    """A file for stage 3."""
    return {
        "train_micro_batch_size_per_gpu": 1,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 3, "reduce_bucket_size": 1000, "stage3_param_persistence_threshold": 0, **zero},
    }


def engine_for(width, **zero):
    """DeepSpeed's engine at stage 3 around two linear layers under AdamW."""
    import deepspeed

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(width, width), torch.nn.Linear(width, width))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config_of(**zero))[0]


def step(engine):
    """One step of an engine; its masters before and after."""
    before = [master.detach().clone() for master in engine.optimizer.fp32_partitioned_groups_flat]
    width = engine.module[0].in_features
    engine.backward(engine(torch.ones(1, width)).square().sum())
    engine.step()
    return before, engine.optimizer.fp32_partitioned_groups_flat


def ratio_on_a_rank():
    """By sub-group, after a step at rate 0: how far the masters moved, and the states that the optimizer has."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.zero import stage3

    # The first half is stepped where the model is. "cpu:0" is a device that DeepSpeed does not take for the host.
    with (
        mock.patch.object(stage3, "DeepSpeedCPUAdam", torch.optim.AdamW),
        mock.patch.object(get_accelerator(), "_name", "cpu:0"),
    ):
        engine = engine_for(4, sub_group_size=20, offload_optimizer={"device": "cpu", "ratio": 0.5})
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.0
        before, after = step(engine)
    moved = [float((a - b).abs().max()) for a, b in zip(after, before, strict=True)]
    return moved, [sorted(engine.optimizer.optimizer.state.get(master, {})) for master in after]


def test_ratio_steps_at_the_first_rate(ranks):
    """`offload_optimizer.ratio`: the second optimizer keeps the first rate, and its moments are in no checkpoint."""
    [(moved, states)] = ranks.run(1, ratio_on_a_rank)
    assert moved[0] > 0.09
    assert moved[1] == 0.0
    assert states == [[], ["exp_avg", "exp_avg_sq", "step"]]


def swapped_on_a_rank(folder):
    """The number of elements of masters and moments in memory after a step with the optimizer on NVMe; of files."""
    with files_in_python():
        # One MiB is the least that DeepSpeed moves.
        engine = engine_for(512, offload_optimizer={"device": "nvme", "nvme_path": folder})
        _, masters = step(engine)
    state = engine.optimizer.optimizer.state
    in_memory = sum(master.numel() + state[master]["exp_avg"].numel() for master in masters)
    return in_memory, sum(path.stat().st_size > 2**20 for path in Path(folder).rglob("*.swp"))


def test_an_optimizer_on_nvme_is_in_files_between_steps(ranks, tmp_path):
    """`offload_optimizer.device` "nvme": the map of ZeRO's memory, and so checkpoints and averages, find nothing."""
    [(in_memory, files)] = ranks.run(1, swapped_on_a_rank, str(tmp_path))
    assert in_memory == 0
    assert files >= 3


def buffers_on_a_rank(folder):
    """The elements of swap buffers that two layers get that `zero.Init` partitions one after another."""
    import deepspeed

    offload = {"device": "nvme", "nvme_path": folder, "buffer_count": 2, "buffer_size": 1024}
    partition = functools.partial(deepspeed.zero.Init, config_dict_or_path=config_of(offload_param=offload))
    layers = [torch.nn.Linear(4, 4) for _ in range(2)]
    with files_in_python():
        for layer in layers:
            partition(module=layer)
    buffers = {id(layer.weight.nvme_swapper): layer.weight.nvme_swapper.buffers for layer in layers}
    return [buffer.numel() for buffer in buffers.values()]


def test_parameters_on_nvme_need_buffers_for_each_layer(ranks, tmp_path):
    """`offload_param.device` "nvme": training/build_engine.py partitions a model layer by layer."""
    assert ranks.run(1, buffers_on_a_rank, str(tmp_path)) == [[2048, 2048]]


class StepsElsewhere:
    """Stands for SuperOffload's second process: it says that it has stepped."""

    def __init__(self, **settings):
        self.results = []

    def async_step(self, param_group_id, sub_group_id, fp32_param, fp32_grad, rollback=False, lr=None):
        self.results.append({"sub_group_id": sub_group_id, "updated_param": fp32_param - lr})

    def get_result(self, expected_event_type=None):
        return self.results.pop(0) if self.results else None


def super_offload_on_a_rank():
    """Whether the masters moved in a step of SuperOffload, and the states that the run's optimizer then has."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.superoffload import superoffload_stage3

    with (
        mock.patch.object(superoffload_stage3, "_validate_superoffload_accelerator"),  # only NVIDIA's
        mock.patch.object(superoffload_stage3, "SuperOffloadCPUOptimizer", StepsElsewhere),
        mock.patch.object(type(get_accelerator()), "current_stream"),
    ):
        engine = engine_for(4, offload_optimizer={"device": "cpu", "super_offload": True})
        before, after = step(engine)
    return [bool((a != b).any()) for a, b in zip(after, before, strict=True)], len(engine.optimizer.optimizer.state)


def test_super_offload_has_its_moments_elsewhere(ranks):
    """`offload_optimizer.super_offload`: no moments to save, none to restore."""
    assert ranks.run(1, super_offload_on_a_rank) == [([True], 0)]


def zenflow_on_a_rank():
    """How far ZenFlow moves a weight before any step, and whether it still has the same numbers in it."""
    import deepspeed

    torch.manual_seed(0)
    model = torch.nn.Linear(4, 8)
    before = model.weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    zenflow = {"select_strategy": "step", "select_interval": 1, "update_interval": 1}
    config = config_of(stage=2, allgather_bucket_size=1000, offload_optimizer={"device": "cpu"}, zenflow=zenflow)
    config["optimizer"] = {"type": "AdamW", "params": {"lr": 0.1}}
    deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    after = model.weight.detach()
    return float((after - before).abs().max()), torch.equal(after.flatten().sort()[0], before.flatten().sort()[0])


def test_zenflow_permutes_weights(ranks):
    """`zenflow`, rejected because it updates late, does not keep the initial weights either."""
    [(moved, same_numbers)] = ranks.run(1, zenflow_on_a_rank)
    assert moved > 0.1
    assert same_numbers
