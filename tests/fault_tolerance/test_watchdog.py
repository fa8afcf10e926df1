"""No silent hang: every way in which a rank can stop ends the run with the documented code, and with words."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import threading
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import RankFailure

from ds_vit.fault_tolerance import exit_codes, watchdog
from ds_vit.fault_tolerance.watchdog import Heartbeat, Heartbeats, Place, Watchdog, is_communication_error

# ---- which rank failed: without processes --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("world_size", "lost_seconds", "received", "line"),
    [
        (3, 30, [*(f"{now} runs runs {'runs' if now < 50 else 'left'}" for now in range(0, 100, 5)), "100 left left",
                 "500"], None),
        (3, 30, ["0 runs runs runs", *(f"{now} runs runs" for now in range(5, 31, 5))],
         "rank 2 (host host2) is lost: no sign of life for 30 s"),
        (2, 30, ["29 runs", "31 runs"], "rank 1 is lost"),
        (3, 60, ["0 runs raised runs", "5 runs - runs"], "rank 1 (host host1) ended with an error: ValueError: no"),
        (3, 60, ["0 runs raised runs", "5 raised - raised"], None),
        (3, 60, ["0 cut runs runs", "5 cut runs", "9 cut runs", "10 cut runs"],
         "rank 2 (host host2) is lost: no sign of life for 10 s"),
        (2, 60, ["0 runs cut", *(f"{now} cut cut" for now in range(5, 31, 5))],
         "ranks 0, 1 (hosts host0, host1) lost the connection to a peer, yet every rank lives: a fault of the network"),
    ],
    ids=["healthy", "silent", "never came", "error of one", "error of all", "killed", "a switch was reset"],
)  # fmt: skip
def test_which_rank_failed(world_size, lost_seconds, received, line):
    # Catches: a watchdog that ends good runs, also those whose ranks end one after the other; an old heartbeat taken
    # for a new one; the wrong rank named, or not its place; endless waiting for a rank that died while it started; the
    # same error on all ranks reported as a loss; a minute's wait for a rank whose connections have closed; a broken
    # network that no line names.
    heartbeats, results = Heartbeats(world_size, lost_seconds, now=0), []
    for words in received:
        now, *states = words.split()
        for rank, old in heartbeats.last.items():
            heartbeats.record(rank, old, int(now))
        for rank, state in enumerate(states):
            if state != "-":
                error = "" if state == "runs" else "ValueError: no"
                state = state.replace("cut", "runs")
                new = Heartbeat(int(now) * 10 + 1, state, f"host{rank}", Place(7, 2, "update"), error=error)
                heartbeats.record(rank, new, int(now))
        results.append(heartbeats.find_failure(int(now)))
    *before, last = results
    assert before == [None] * len(before)
    assert (last is None) == (line is None)
    if last is not None:
        assert last.code == exit_codes.LOST
        assert last.line.startswith(line)
        assert "no sign of life" not in line or "step 7, micro-batch 2, update" in last.line


def test_which_rank_is_furthest_back():
    # Catches: a stall blamed on those who wait.
    heartbeats = Heartbeats(3, lost_seconds=60, now=0)
    for rank, place in enumerate([Place(8, 0, "update"), Place(7, 1, "update"), Place(8, 0, "update")]):
        heartbeats.record(rank, Heartbeat(1, "runs", "h", place), 0)
    assert heartbeats.describe_slowest() == "; furthest back: rank 1 (host h) at step 7, micro-batch 1, update"
    for rank, phase in enumerate(["update", "update", "waiting for data"]):
        heartbeats.record(rank, Heartbeat(2, "runs", "h", Place(8, 0, phase)), 0)
    assert "rank 2 (host h) at step 8, waiting for data" in heartbeats.describe_slowest()


@pytest.mark.parametrize(
    ("error", "of_a_peer"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:20"), True),
        (RuntimeError("[../gloo/transport/unbound_buffer.cc:81] Timed out waiting 1800000ms"), True),
        (RuntimeError("wait timeout after 300000ms, keys: /default_pg/0//cuda//0"), True),
        (dist.DistBackendError("NCCL communicator was aborted"), True),
        (RuntimeError("shape '[2]' is invalid for input of size 3"), False),
        (RuntimeError("DataLoader timed out after 120 seconds"), False),
        (RuntimeError("CUDA error: the launch timed out and was terminated"), False),
        (ValueError("connection closed"), False),
    ],
    ids=str,
)
def test_which_errors_speak_of_a_peer(error, of_a_peer):
    # Catches: a bug of ours taken for a lost peer, and a lost peer for a bug.
    assert is_communication_error(error) == of_a_peer


# ---- one process ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_one_rank_that_stands_still(capfd):
    # Catches: beats that do not count, a stall that is not seen, stacks that are not shown.
    codes = []
    with Watchdog(2.0, end=codes.append) as watchdog:
        for step in range(8):
            watchdog.beat(step + 1, "update")
            time.sleep(0.4)
        assert not codes, "it moved"
        watchdog.beat(9, "a long step", patience=1000)
        time.sleep(3)
        assert not codes, "it has patience"
        watchdog.beat(9, "update", micro_batch=2)
        deadline = time.monotonic() + 60
        while not codes and time.monotonic() < deadline:
            time.sleep(0.1)
    assert codes == [exit_codes.STALLED]
    told = capfd.readouterr().err
    assert "has made no progress for 2 s at step 9, micro-batch 2, update" in told
    assert "test_one_rank_that_stands_still" in told, "the stack of the main thread"


def test_a_store_that_is_gone(capfd):
    # Catches: ranks that stay when rank 0, whose process holds the store, is gone.
    codes = []
    with Watchdog(2.0, rank=1, world_size=2, local_rank=0, store=dist.HashStore(), end=codes.append) as watchdog:
        gone = mock.Mock(side_effect=RuntimeError("Connection reset by peer"))
        watchdog._store = mock.Mock(set=gone, check=gone, get=gone, add=gone)
        for _ in range(600):
            watchdog.beat(3, "update")
            if watchdog._stopped.wait(0.1):
                break
    assert codes == [exit_codes.LOST]
    assert "rank 0 is lost: rank 1 (host" in capfd.readouterr().err


@pytest.fixture
def pair(monkeypatch):
    """Two ranks in two threads, each the first of its host; called with the work of each: their exit codes."""
    monkeypatch.setattr(watchdog, "_run_number", itertools.repeat(0))
    monkeypatch.setattr(watchdog, "_RAISED_SECONDS", 0.1)
    monkeypatch.setattr(watchdog, "_STORE_SECONDS", 0.3)
    store, codes = dist.HashStore(), {}

    def run(*works):
        def one(rank):
            def end(code):
                codes[rank] = code

            with (
                contextlib.suppress(Exception),
                Watchdog(2.0, rank=rank, world_size=2, local_rank=0, store=store, end=end) as watched,
            ):
                works[rank](watched)

        threads = [threading.Thread(target=one, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        return codes

    return run


def broken(watched):
    raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer")


def failing(watched):
    raise ValueError("a bad picture")


def waiting(watched):
    for _ in range(100):
        watched.beat(3, "update")
        watched._stopped.wait(0.1)


def test_a_broken_network_between_living_ranks(pair, capfd):
    # Catches: a traceback per rank and the code of a bug, after a switch was reset.
    assert pair(broken, broken) == dict.fromkeys(range(2), exit_codes.LOST)
    told = capfd.readouterr().err
    assert "yet every rank lives: a fault of the network between hosts (RuntimeError: [gloo" in told
    assert "`ds-vit doctor` tests it; the run ends with code 72" in told


def test_an_error_of_rank_0_is_named_on_the_other_hosts(pair, capfd):
    # Catches: a host whose log shows code 72 and no reason.
    assert pair(failing, waiting) == {1: exit_codes.LOST}
    told = capfd.readouterr().err
    assert told.count("train.py: error: rank 0 (host") == told.count("ended with an error: ValueError: a bad pict") == 1


@pytest.mark.slow
def test_no_rank_ends_before_all_have_read_the_decision(monkeypatch):
    # Catches: rank 0, whose process holds the store, gone before a rank whose thread is late has read of a stall.
    monkeypatch.setattr(watchdog, "_run_number", itertools.repeat(0))
    store, codes = dist.HashStore(), []
    with Watchdog(2.0, world_size=2, store=store, end=codes.append) as watched:
        store.set("ds_vit/watchdog/0/rank/1", Heartbeat(state="left").pack())
        thread = threading.Thread(target=watched._shut_down, args=(watchdog.Shutdown(exit_codes.STALLED, "stall"),))
        thread.start()
        thread.join(3.2)
        assert not codes, "rank 1 has not read it"
        dist.PrefixStore("ds_vit/watchdog/0", store).add("read", 1)
        thread.join(30)
    assert codes == [exit_codes.STALLED]


def test_off_means_off():
    # Catches: threads that run although nobody asked for them.
    with Watchdog(0.0, end=lambda code: pytest.fail("ended")) as watchdog:
        watchdog.beat(1, "x")
        assert list(watchdog.micro_batches(iter([1, 2]))) == [1, 2]
        assert not watchdog._threads


def test_micro_batches_are_counted():
    # Catches: a wait for data that looks like computing.
    watchdog = Watchdog(0.0)
    watchdog.beat(3, "update")
    places = []

    def batches():
        for _ in range(2):
            places.append(watchdog._place)
            yield 0

    for _ in watchdog.micro_batches(batches()):
        places.append(watchdog._place)
    assert places == [
        Place(3, 0, "waiting for data"),
        Place(3, 1, "update"),
        Place(3, 1, "waiting for data"),
        Place(3, 2, "update"),
    ]


# ---- real ranks ----------------------------------------------------------------------------------------------------


def work(steps: int, fault: str, culprit: int, stall_seconds: float) -> str:
    """All-reduce in a loop, as training does; at step 3 the culprit goes wrong."""
    rank = dist.get_rank()
    with Watchdog(stall_seconds, rank=rank, world_size=dist.get_world_size(), local_rank=rank) as watchdog:
        for step in range(1, steps + 1):
            watchdog.beat(step, "update")
            if step == 3 and rank == culprit:
                if fault == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if fault == "stop":
                    os.kill(os.getpid(), signal.SIGSTOP)
                if fault == "sleep":
                    time.sleep(600)
                if fault == "raise":
                    raise ValueError("a bad picture")
            if step == 3 and fault == "all raise":
                raise ValueError(f"diverged on {rank}")
            dist.all_reduce(torch.ones(4))
    return "done"


def fails(ranks, fault: str, culprit: int, world_size: int = 3) -> str:
    """What a failing job of `work` says."""
    with pytest.raises(RankFailure) as failure:
        ranks.run(world_size, work, 50, fault, culprit, 8.0, timeout=150)
    return str(failure.value)


def exits(told: str) -> dict[int, int]:
    """Rank → the code that it ended with by itself."""
    found = re.findall(r"---- rank (\d+), after .*\nexited (\d+) without returning", told)
    return {int(rank): int(code) for rank, code in found}


def test_the_first_rank_reads_the_last_heartbeats_at_once():
    # Catches: a rank 0 that reads them with the other heartbeats, up to two seconds after they were sent.
    watchdog = Watchdog(60, rank=0, world_size=2, store=dist.HashStore())
    watchdog._store.set("rank/1", Heartbeat(9, "left", "h", Place()).pack())
    watchdog._state = "left"
    with mock.patch.object(watchdog._stopped, "wait", side_effect=AssertionError("rank 0 waits")):
        watchdog._leave(60)
        watchdog._store.set("rank/1", Heartbeat(9, "runs", "h", Place()).pack())
        with pytest.raises(AssertionError, match="rank 0 waits"):
            watchdog._leave(60)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "culprit", "ended", "said", "said_once"),
    [
        ("sleep", 1, [0, 1, 2], [f"rank {rank} (host" for rank in range(3)] + ["step 3, update", "in work"],
         ["has made no progress for"]),
        ("kill", 1, [0, 2], ["rank 1: was killed by SIGKILL"], ["is lost: no sign", "train.py: error: rank 1 (host"]),
        ("stop", 2, [0, 1], [], ["is lost: no sign", "train.py: error: rank 2 (host"]),
        ("raise", 1, [0, 2], ["ValueError: a bad picture"], ["ended with an error: ValueError: a bad picture"]),
    ],
)  # fmt: skip
def test_a_fault_of_one_rank_ends_every_rank_and_is_named(ranks, monkeypatch, fault, culprit, ended, said, said_once):
    # Catches: the others waiting for one that sleeps, also where no socket closes (a stopped process, a host that is
    # gone); stacks that are not shown; a traceback of gloo in place of one line that names the rank that is gone or
    # failed.
    monkeypatch.setattr("ranks.GRACE_SECONDS", 3.0 if fault == "stop" else 60.0)
    told = fails(ranks, fault, culprit)
    code = exit_codes.STALLED if fault == "sleep" else exit_codes.LOST
    assert exits(told) == dict.fromkeys(ended, code), told
    assert all(text in told for text in said), told
    assert all(told.count(text) == 1 for text in said_once), told


def test_an_error_of_all_ranks_is_each_ones_own(ranks):
    # Catches: a diverged loss, which every rank sees, reported as a lost rank.
    told = fails(ranks, "all raise", 0)
    assert "without returning" not in told
    assert all(f"ValueError: diverged on {rank}" in told for rank in range(3))
