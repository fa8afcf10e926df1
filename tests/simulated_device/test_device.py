"""The simulated device behaves as a GPU does, at its least convenient: each property, with a planted defect."""

from __future__ import annotations

import io

import pytest
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator

import simulated_device
from simulated_device import on_device

DEVICE = "sim"


# ---- Copies land late ----


@on_device
def test_a_copy_to_the_host_lands_when_its_event_is_synchronised():
    values, arrived = torch.ones(3, device=DEVICE), torch.empty(3, pin_memory=True)
    arrived.copy_(values, non_blocking=True)
    event = torch.accelerator.current_stream().record_event()
    assert arrived.isnan().all(), "a read before the copy has landed must be seen"
    event.synchronize()
    assert arrived.tolist() == [1, 1, 1]


@on_device
def test_a_copy_to_the_host_holds_the_values_of_its_place_in_the_stream():
    values, arrived = torch.ones(3, device=DEVICE), torch.empty(3, pin_memory=True)
    arrived.copy_(values, non_blocking=True)
    values.mul_(5)
    torch.accelerator.synchronize()
    assert arrived.tolist() == [1, 1, 1]


@on_device
def test_a_copy_to_the_device_reads_its_pinned_source_late():
    source = torch.ones(3).pin_memory()
    target = source.to(DEVICE, non_blocking=True)
    source.fill_(7)  # the defect: the buffer is filled anew before the copy has run
    assert (target + 0).tolist() == [7, 7, 7]
    source.fill_(9)
    assert target.tolist() == [7, 7, 7]


@on_device
def test_a_buffer_that_a_stream_fills_can_be_read_by_the_same_stream():
    through = torch.empty(3, pin_memory=True)
    through.copy_(torch.ones(3, device=DEVICE), non_blocking=True)
    assert through.to(DEVICE, non_blocking=True).add(1).tolist() == [2, 2, 2]


@on_device
def test_an_event_is_not_ready_at_the_first_queries():
    arrived = torch.empty(3, pin_memory=True)
    arrived.copy_(torch.ones(3, device=DEVICE), non_blocking=True)
    event = torch.accelerator.current_stream().record_event()
    assert [event.query() for _ in range(4)] == [False, False, True, True]
    assert arrived.tolist() == [1, 1, 1]
    simulated_device.set_query_delay(0)
    torch.ones(3, device=DEVICE)
    stream = torch.accelerator.current_stream()
    assert stream.query()
    assert stream.record_event().query()


@on_device
def test_waiting_for_a_stream_that_waits_for_the_copy_is_enough():
    arrived, copying = torch.empty(3, pin_memory=True), torch.Stream(DEVICE)
    values = torch.ones(3, device=DEVICE)
    copying.wait_stream(torch.accelerator.current_stream())
    with copying:
        arrived.copy_(values, non_blocking=True)
    torch.accelerator.current_stream().synchronize()
    assert arrived.isnan().all(), "another stream's synchronisation says nothing about this one"
    torch.accelerator.current_stream().wait_stream(copying)
    torch.accelerator.current_stream().synchronize()
    assert arrived.tolist() == [1, 1, 1]


@on_device
def test_only_pinned_memory_is_copied_without_a_wait():
    values, arrived = torch.ones(3, device=DEVICE), torch.empty(3)
    simulated_device.reset()
    arrived.copy_(values, non_blocking=True)
    assert arrived.tolist() == [1, 1, 1]
    torch.ones(3).to(DEVICE, non_blocking=True)
    assert simulated_device.host_synchronisations() == {"copy to the host": 1, "copy from the host": 1}
    assert not torch.ones(3).is_pinned()
    pinned = torch.ones(3).pin_memory()
    assert pinned[1:].is_pinned()
    assert not pinned.clone().is_pinned()


@on_device
def test_a_tensor_sent_to_the_host_without_blocking_is_not_there_yet():
    early = torch.ones(3, device=DEVICE).to("cpu", non_blocking=True)  # torch pins the result
    assert early.is_pinned()
    assert early.isnan().all()
    torch.accelerator.synchronize()
    assert early.tolist() == [1, 1, 1]


# ---- Streams race ----


@on_device
def test_a_read_without_waiting_for_the_stream_that_writes_raises():
    side = torch.Stream(DEVICE)
    with side:
        values = torch.ones(3, device=DEVICE) * 2
    with pytest.raises(RuntimeError, match=r"race: aten::add\S* on stream 0 .* reads a block .* writes"):
        values + 1
    torch.accelerator.current_stream().wait_stream(side)
    assert (values + 1).tolist() == [3, 3, 3]


@on_device
def test_a_write_while_another_stream_reads_raises():
    values, side = torch.ones(3, device=DEVICE), torch.Stream(DEVICE)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        doubled = values * 2
    with pytest.raises(RuntimeError, match=r"race: .* writes a block .* reads"):
        values.zero_()
    torch.accelerator.synchronize()
    values.zero_()
    assert doubled.tolist() == [2, 2, 2]


@on_device
def test_parts_of_a_block_are_apart():
    whole, side = torch.zeros(8, device=DEVICE), torch.Stream(DEVICE)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        whole[:4].add_(1)
    whole[4:].add_(2)
    with pytest.raises(RuntimeError, match=r"race: .* writes a block of 32 bytes"):
        whole[3:5].zero_()
    with pytest.raises(RuntimeError, match=r"race: .* reads a block of 32 bytes"):
        whole.sum()
    torch.accelerator.current_stream().wait_stream(side)
    assert whole.mul_(2).tolist() == [2] * 4 + [4] * 4


@on_device
def test_a_block_freed_while_another_stream_needs_it_raises():
    side = torch.Stream(DEVICE)
    for recorded in (True, False):
        values = torch.ones(3, device=DEVICE)
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            doubled = values * 2
        if recorded:
            values.record_stream(side)
        del values
        if recorded:
            torch.ones(3, device=DEVICE)
        else:
            with pytest.raises(RuntimeError, match="still needs it; call record_stream"):
                torch.ones(3, device=DEVICE)
        side.synchronize()
        assert doubled.tolist() == [2, 2, 2]


@on_device
def test_race_checks_can_be_switched_off():
    simulated_device.check_races(False)
    with torch.Stream(DEVICE):
        values = torch.ones(3, device=DEVICE)
    assert (values + 1).tolist() == [2, 2, 2]


@on_device
def test_autograd_runs_backward_on_the_streams_of_forward():
    weight, side = torch.nn.Parameter(torch.ones(3, device=DEVICE)), torch.Stream(DEVICE)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        loss = (weight * 2).sum()
    torch.accelerator.current_stream().wait_stream(side)
    loss.backward()
    assert weight.grad.tolist() == [2, 2, 2]


# ---- Memory ----


@on_device
def test_memory_is_counted_and_limited():
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    values = torch.zeros(1000, 1000, device=DEVICE)
    assert torch.accelerator.memory_allocated() - before == 4_000_256  # whole 512 bytes, as CUDA allocates
    del values
    assert torch.accelerator.memory_allocated() == before
    assert torch.accelerator.max_memory_allocated() - before == 4_000_256
    simulated_device.set_memory_limit(1_000_000)
    assert torch.accelerator.get_memory_info() == (1_000_000 - before, 1_000_000)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 4000000 bytes; of its 1000000 bytes"):
        torch.zeros(1000, 1000, device=DEVICE)
    assert torch.zeros(100, device=DEVICE).sum().item() == 0, "it goes on after that"
    halves = torch.zeros(100_000, device=DEVICE, dtype=torch.float16)
    with pytest.raises(torch.OutOfMemoryError):
        halves.double()


@on_device
def test_new_memory_holds_no_numbers():
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        assert torch.empty(100, device=DEVICE, dtype=dtype).isnan().all()


# ---- Devices do not mix ----


@on_device
def test_host_tensors_do_not_mix_with_the_device():
    values = torch.ones(3, device=DEVICE)
    for defect in (
        lambda: values + torch.ones(3),
        lambda: torch.cat([values, torch.ones(3)]),
        lambda: torch.nn.functional.linear(values, torch.ones(2, 3)),
        lambda: values + torch.ones(3, device="sim:1"),
        lambda: torch.where(torch.ones(3, dtype=torch.bool), values, values),
    ):
        with pytest.raises(RuntimeError, match=r"on the same device.*, but found at least two devices"):
            defect()
    assert (values * torch.tensor(2.0)).tolist() == [2, 2, 2], "a number may come from the host"
    assert values.to("sim:1").device == torch.device("sim:1")


# ---- Host synchronisations ----


@on_device
def test_host_synchronisations_are_counted_by_name():
    values = torch.ones(3, device=DEVICE)
    simulated_device.reset()
    values.add_(1).mul_(2)
    values.sum().sqrt()
    values[values > 1] = 0  # one value is filled in
    torch.repeat_interleave(
        values, torch.ones(3, dtype=torch.int64).pin_memory().to(DEVICE, non_blocking=True), output_size=3
    )
    assert simulated_device.host_synchronisations() == {}
    values.sum().item()
    values.nonzero()
    values[values > 1]
    torch.equal(values, values)
    torch.tensor([1.0], device=DEVICE)
    values[torch.tensor([0, 1])]
    torch.accelerator.synchronize()
    torch.accelerator.current_stream().synchronize()
    counted = simulated_device.host_synchronisations()
    assert counted == {
        **{"item": 1, "nonzero": 2, "equal": 1, "copy from the host": 2},
        **{"synchronize": 1, "Stream.synchronize": 1},
    }, counted


@on_device
def test_a_hidden_item_raises_where_none_is_allowed():
    loss = torch.ones((), device=DEVICE)
    with simulated_device.no_host_synchronisations():
        loss = loss * 2
        for defect in (lambda: float(loss), lambda: bool(loss > 1), lambda: loss.cpu(), lambda: f"{loss:.3f}"):
            with pytest.raises(RuntimeError, match="a host synchronisation where none is allowed"):
                defect()
    assert loss.item() == 2


# ---- What torch offers for every accelerator ----


@on_device
def test_torch_accelerator():
    assert torch.accelerator.current_accelerator() == torch.device(DEVICE)
    assert torch.accelerator.device_count() == 8
    with torch.accelerator.device_index(1):
        assert torch.ones(1, device=DEVICE).device == torch.device("sim:1")
        assert torch.accelerator.current_device_index() == 1
    begin, end = torch.Event(DEVICE, enable_timing=True), torch.Event(DEVICE, enable_timing=True)
    begin.record()
    end.record()
    torch.accelerator.synchronize()
    assert begin.elapsed_time(end) >= 0
    stream = torch.Stream(DEVICE)
    with stream:
        assert torch.accelerator.current_stream() == stream
    assert torch.accelerator.current_stream() == torch.sim.default_stream()


@on_device
def test_modules_keep_their_parameters_and_files_their_tensors():

    model = torch.nn.Linear(3, 3)
    weight, expected = model.weight, model.weight.detach().clone()
    model.to(DEVICE)
    assert model.weight is weight
    assert weight.device.type == DEVICE
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    assert torch.equal(torch.load(file, map_location="cpu")["weight"], expected)
    file.seek(0)
    assert torch.load(file)["weight"].device.type == DEVICE


@on_device
def test_random_numbers_are_the_devices_own():
    torch.manual_seed(1)
    state = torch.sim.get_rng_state()
    first = torch.rand(3, device=DEVICE).tolist()
    on_host = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), on_host), "a draw on the device takes none from the host's generator"
    torch.sim.set_rng_state(state)
    assert torch.rand(3, device=DEVICE).tolist() == first
    generator = torch.Generator(DEVICE).manual_seed(1)
    assert torch.rand(3, device=DEVICE, generator=generator).tolist() == first


@on_device
def test_autocast_and_16_bits():
    matrix = torch.ones(2, 2, device=DEVICE)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast(DEVICE, dtype):
            assert (matrix @ matrix).dtype == dtype
            assert torch.nn.functional.layer_norm(matrix, (2,)).dtype == torch.float32
        assert (matrix.to(dtype) @ matrix.to(dtype)).float().tolist() == [[2, 2], [2, 2]]
    assert torch.tensor([70000.0], device=DEVICE).half().isinf().item()


@on_device
def test_a_loader_pins_its_batches():
    loader = torch.utils.data.DataLoader(torch.arange(8.0), batch_size=4, pin_memory=True)
    batches = [batch.to(DEVICE, non_blocking=True) for batch in loader if batch.is_pinned()]
    assert torch.cat(batches).tolist() == list(range(8))


@on_device
def test_deepspeeds_accelerator():
    accelerator = get_accelerator()
    assert accelerator.device_name() == DEVICE
    assert accelerator.current_device_name() == "sim:0"
    assert accelerator.is_fp16_supported()
    assert accelerator.is_pinned(accelerator.pin_memory(torch.ones(3)))
    assert accelerator.available_memory() <= accelerator.total_memory() == 16 * 2**30
    with accelerator.stream(accelerator.Stream()) as stream:
        assert accelerator.current_stream() == stream


# ---- Collectives ----


def collectives(library) -> dict:
    simulated_device.start(library)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.accelerator.current_accelerator()
    mine = torch.full((4,), rank + 1.0, device=device)
    results = {}
    summed = mine.clone()
    work = dist.all_reduce(summed, async_op=True)
    try:
        summed + 1  # the defect
    except RuntimeError as error:
        results["race"] = str(error)
    work.wait()
    results["all_reduce"] = summed.tolist()
    future = dist.all_reduce(summed, async_op=True).get_future()
    try:
        summed + 1
    except RuntimeError as error:
        results["race before the future"] = str(error)
    results["future"] = future.wait()[0].tolist()
    gathered = torch.empty(4 * world_size, device=device)
    dist.all_gather_into_tensor(gathered, mine)
    results["all_gather"] = gathered.tolist()
    part = torch.empty(4 // world_size, device=device)
    dist.reduce_scatter_tensor(part, mine)
    results["reduce_scatter"] = part.tolist()
    exchanged = torch.empty(4, device=device)
    dist.all_to_all_single(exchanged, mine)
    results["all_to_all"] = exchanged.tolist()
    parts = [torch.empty(4, device=device) for _ in range(world_size)]
    dist.all_gather(parts, mine)
    results["all_gather list"] = torch.stack(parts).tolist()
    sent = mine.clone()
    dist.broadcast(sent, 1)
    results["broadcast"] = sent.tolist()
    if rank == 0:
        dist.send(mine, 1)
    else:
        dist.recv(sent, 0)
    results["sent"] = sent.tolist()
    pair = dist.new_group([0, 1])
    half = torch.ones(2, device=device, dtype=torch.bfloat16)
    dist.all_reduce(half, group=pair)
    results["group"] = half.float().tolist()
    on_host = torch.ones(2)
    dist.all_reduce(on_host)
    results["on the host"] = on_host.tolist()
    objects = [None] * world_size
    dist.all_gather_object(objects, rank)
    results["objects"] = objects
    dist.barrier()
    return results


def test_collectives_run_on_the_device(ranks, device_library):
    first, second = ranks.run(2, collectives, device_library)
    for results in (first, second):
        assert "race: " in results["race"]
        assert results["all_reduce"] == [3] * 4
        assert "race: " in results["race before the future"]
        assert results["future"] == [6] * 4
        assert results["all_gather"] == [1] * 4 + [2] * 4
        assert results["reduce_scatter"] == [3, 3]
        assert results["all_to_all"] == [1, 1, 2, 2]
        assert results["all_gather list"] == [[1] * 4, [2] * 4]
        assert results["broadcast"] == [2] * 4
        assert results["group"] == results["on the host"] == [2, 2]
        assert results["objects"] == [0, 1]
    assert second["sent"] == [1] * 4
