"""The rank pool itself: results, failures of every kind, and ranks that know nothing of earlier jobs."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time

import deepspeed
import psutil
import pytest
import torch
import torch.distributed as dist
from project import ROOT, wait_until
from ranks import MAX_WORLD_SIZE, RankFailure

GIVE_UP = 1000.0
"""Seconds a rank of these tests sleeps: longer than any of them may last."""


def rank_and_world() -> tuple[int, int, float]:
    """This rank, the world's size, and the sum over all ranks of rank + 1."""
    total = torch.tensor(float(dist.get_rank() + 1))
    deepspeed.comm.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total.item()


@pytest.mark.parametrize("world_size", [1, 4, 3])
def test_results_come_by_rank_for_any_world(ranks, world_size):
    # Catches: results in another order than the ranks', a world of another size, a group that was never joined.
    total = world_size * (world_size + 1) / 2
    assert ranks.run(world_size, rank_and_world) == [(rank, world_size, total) for rank in range(world_size)]


def echo(x, *, y):
    return x, y


def test_tensors_travel_by_value_both_ways(ranks):
    # Catches: a result that dies with the process that made it (shared memory).
    x = torch.arange(100_000.0)
    (back, y), *_ = ranks.run(2, echo, x, y={"a": x[:3]})
    assert torch.equal(back, x)
    assert torch.equal(y["a"], x[:3])


def fail_on(bad_rank: int) -> None:
    print(f"rank {dist.get_rank()} was here")
    answer = 42 + dist.get_rank()
    if dist.get_rank() == bad_rank:
        raise KeyError(f"no such thing as {answer}")
    dist.barrier()


def test_a_raising_rank_is_reported_first_with_its_traceback_and_output(ranks):
    # Catches: a report of the peers' broken connections alone, without the error that broke them.
    with pytest.raises(RankFailure) as failure:
        ranks.run(3, functools.partial(fail_on, 2))
    text = str(failure.value)
    assert failure.value.ranks[0] == 2
    assert sorted(failure.value.ranks) == [0, 1, 2]
    assert text.splitlines()[0] == "rank 2: KeyError: 'no such thing as 44' (3 of 3 ranks failed in test_ranks.fail_on)"
    assert "test_ranks.py" in text
    assert text.index("no such thing as 44") < text.index("---- rank 0")
    assert all(f"rank {rank} was here" in text for rank in range(3))


def die_on(bad_rank: int, how: signal.Signals | int) -> None:
    if dist.get_rank() == bad_rank:
        if isinstance(how, signal.Signals):
            os.kill(os.getpid(), how)
        os._exit(how)
    dist.barrier()


@pytest.mark.parametrize(("how", "words"), [(signal.SIGSEGV, "Segmentation fault"), (0, "exited 0 without returning")])
def test_a_dying_rank_is_a_failure(ranks, how, words):
    # Catches: a rank that vanishes and counts as done, or a job that waits for it until the timeout.
    with pytest.raises(RankFailure, match=words) as failure:
        ranks.run(2, die_on, 1, how)
    assert failure.value.ranks[0] == 1


def hang_on(bad_rank: int) -> None:
    if dist.get_rank() == bad_rank:
        the_place_where_it_hangs()


def the_place_where_it_hangs() -> None:
    time.sleep(GIVE_UP)


@pytest.mark.slow
def test_a_hanging_rank_is_killed_and_shows_where(ranks):
    # Catches: a test session that stands still, and one that ends without a word about the place.
    with pytest.raises(RankFailure, match="hung; killed after") as failure:
        ranks.run(2, hang_on, 1, timeout=3.0)
    assert sorted(failure.value.ranks) == [0, 1]  # rank 0 hangs in the barrier at the end
    assert "in the_place_where_it_hangs" in str(failure.value)
    assert ranks.run(2, rank_and_world) == [(0, 2, 3.0), (1, 2, 3.0)]


def fail_or_sleep() -> None:
    if dist.get_rank() == 0:
        raise RuntimeError("rank 0 gave up")
    time.sleep(GIVE_UP)


def test_a_rank_that_goes_on_after_another_failed_is_stopped(ranks, monkeypatch):
    # Catches: a failure that shows only when the timeout of another, busy rank has passed.
    monkeypatch.setattr("ranks.GRACE_SECONDS", 0.5)
    with pytest.raises(RankFailure, match="rank 0 gave up") as failure:
        ranks.run(2, fail_or_sleep, timeout=GIVE_UP)
    assert failure.value.ranks == [0, 1]
    assert "still waiting 0.5 s after the first failure" in str(failure.value)


def hang_and_tell(path: str) -> None:
    with open(path, "w") as file:
        file.write(f"{os.getpid()}\n")
    time.sleep(GIVE_UP)


FOLDERS = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "tests" / "support")])

KILLED = """
import sys
sys.path[:0] = sys.argv[1].split(':')
from ranks import RankPool
from test_ranks import hang_and_tell
if __name__ == "__main__":
    RankPool().run(1, hang_and_tell, sys.argv[2])
"""


@pytest.mark.slow
def test_no_rank_outlives_the_session(tmp_path):
    # Catches: ranks that go on computing, unseen, after pytest was killed.
    path = tmp_path / "pid"
    (tmp_path / "main.py").write_text(KILLED)
    session = subprocess.Popen([sys.executable, str(tmp_path / "main.py"), FOLDERS, str(path)])
    try:
        wait_until(lambda: path.exists() and path.read_text().endswith("\n"), "no rank")
    finally:
        session.kill()
        session.wait()
    wait_until(lambda: not psutil.pid_exists(int(path.read_text())), "the rank is still there")


def test_what_cannot_run_is_refused_before_it_starts(ranks):
    # Catches: a hang where a world has no rank, or a function that the ranks cannot find.
    for world_size in (0, MAX_WORLD_SIZE + 1):
        with pytest.raises(ValueError, match=f"world_size {world_size}: a job has 1 to {MAX_WORLD_SIZE} ranks"):
            ranks.run(world_size, rank_and_world)
    with pytest.raises(ValueError, match="top level of a module"):
        ranks.run(1, lambda: None)


def num_server_threads() -> int:
    return len(os.listdir(f"/proc/{os.getppid()}/task"))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_the_server_has_one_thread(ranks):
    # Catches: a library that starts a thread at import, after which forking is no longer safe.
    assert ranks.run(1, num_server_threads) == [1]


def leave_a_mess() -> None:
    """Change what a careless job would: DeepSpeed's globals, torch's defaults, the environment, the folder."""
    from deepspeed.runtime import torch_autocast
    from deepspeed.runtime.activation_checkpointing import checkpointing

    torch_autocast.TORCH_AUTOCAST_INITIALIZED = True
    checkpointing.PARTITION_ACTIVATIONS = True
    torch.set_default_dtype(torch.bfloat16)
    os.environ["DS_VIT_MESS"] = "1"
    os.chdir("/")
    torch.manual_seed(77)


def state() -> tuple:
    from deepspeed.runtime import torch_autocast
    from deepspeed.runtime.activation_checkpointing import checkpointing

    return (
        torch_autocast.TORCH_AUTOCAST_INITIALIZED,
        checkpointing.PARTITION_ACTIVATIONS,
        torch.get_default_dtype(),
        os.environ.get("DS_VIT_MESS"),
        os.getcwd(),
        torch.initial_seed(),
    )


def test_nothing_of_a_job_is_left_for_the_next(ranks):
    # Catches: ranks that live on, in which one test's settings change another's numbers.
    before = ranks.run(2, state)
    ranks.run(2, leave_a_mess)
    assert ranks.run(2, state) == before
    assert before[0][:4] == (False, False, torch.float32, None)
    assert before[0][-1] == 0  # the seed
