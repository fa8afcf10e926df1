"""The simulated device behaves as a GPU does, at its least convenient: late copies, races, memory, waits, graphs."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import simulated_device
from ds_vit.device import capture
from simulated_device import on_device

DEVICE = "sim"


# ---- Copies land late ----


@on_device
def test_a_copy_to_the_host_lands_when_its_event_is_synchronised():
    values, arrived = torch.ones(3, device=DEVICE), torch.empty(3, pin_memory=True)
    arrived.copy_(values, non_blocking=True)
    event = torch.accelerator.current_stream().record_event()
    values.mul_(5)  # behind the copy in the stream
    assert arrived.isnan().all(), "a read before the copy has landed must be seen"
    event.synchronize()
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
def test_threads_with_pythons_lock_and_with_the_devices_do_not_wait_for_each_other():
    """Catches: Python's lock taken within the device's, by the first or the last reference to a tensor of Python's."""
    copied = threading.Event()

    def free_memory() -> None:
        while not copied.is_set():
            memory = torch.ones(1, device=DEVICE).untyped_storage()
            time.sleep(0)
            del memory  # with Python's lock

    other = threading.Thread(target=free_memory, daemon=True)
    other.start()
    source, target = (torch.ones(2_000_000, device=DEVICE) for _ in range(2))
    for _ in range(20):
        target.copy_(source)
        target.copy_(torch.ones(2_000_000).pin_memory(), non_blocking=True)  # freed when the copy has landed
    copied.set()
    other.join()


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


# ---- Graphs: as CUDA's, they run nothing while they record, and repeat it on the addresses ----


def recorded(run):
    """(a graph of `run`, what `run` returned)."""
    with capture(torch.device(DEVICE), torch.sim.graph_pool_handle()) as graph:
        result = run()
    return graph, result


@on_device
def test_a_replay_is_one_launch():
    x = torch.zeros(3, device=DEVICE)
    graph, _ = recorded(lambda: (x + 1).exp().sum())
    simulated_device.reset()
    graph.replay()
    assert simulated_device.launches() == 1
    assert not simulated_device.host_synchronisations()


@on_device
def test_memory_that_is_freed_is_reused_by_the_next_capture_of_a_pool():
    pool, graphs = torch.sim.graph_pool_handle(), [torch.sim.CUDAGraph() for _ in range(3)]
    x = torch.ones(3, device=DEVICE)
    taken, made = torch.accelerator.memory_reserved(), []
    for number, graph in enumerate(graphs):
        with torch.sim.graph(graph, pool=pool):
            made.append(x + number)
        if number == 1:
            address = made.pop(0).data_ptr()  # the defect: nobody holds the first graph's output, and it is read later
    assert [tensor.data_ptr() == address for tensor in made] == [False, True]
    graphs[2].replay()
    assert made[1].tolist() == [3, 3, 3]
    graphs[0].replay()
    assert made[1].tolist() == [1, 1, 1]
    assert torch.accelerator.memory_reserved() == taken + 2 * 512


@on_device
def test_memory_outside_the_pool_that_is_freed_is_noticed():
    held = [torch.ones(3, device=DEVICE)]
    graph, _ = recorded(lambda: held[0] + 1)
    held.clear()
    with pytest.raises(RuntimeError, match="a graph reads a block of 12 bytes that has been freed"):
        graph.replay()


@on_device
def test_what_the_host_must_do_is_refused():
    x, pinned = torch.ones(3, device=DEVICE), torch.ones(3).pin_memory()
    runs = {
        "item": lambda: x.sum().item(),
        "nonzero": lambda: x.nonzero(),
        "upload": lambda: pinned.to(DEVICE, non_blocking=True),
        "download": lambda: pinned.copy_(x, non_blocking=True),
        "synchronize": torch.accelerator.synchronize,
    }
    for name, run in runs.items():
        with pytest.raises(RuntimeError, match="due to a previous error") as error:
            recorded(run)
        assert "operation not permitted when stream is capturing" in str(error.value.__context__)
        assert (x + 1).tolist() == [2, 2, 2], name  # nothing is left of it
    graph, out = recorded(lambda: x + 1)
    graph.replay()
    assert out.tolist() == [2, 2, 2]


@on_device
def test_a_stream_that_is_forked_must_join():
    x, side = torch.ones(3, device=DEVICE), torch.Stream(DEVICE)

    def forked(joins):
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            made = x + 1
        if joins:
            torch.accelerator.current_stream().wait_stream(side)
        return made

    with pytest.raises(RuntimeError, match="has not joined"):
        recorded(lambda: forked(False))
    graph, made = recorded(lambda: forked(True))
    graph.replay()
    assert made.tolist() == [2, 2, 2]
