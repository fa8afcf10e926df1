"""One run at a time writes into a folder."""

import errno
import json
import os
import signal
import subprocess
import sys

import pytest
from project import ROOT
from runs import DIGITS

from ds_vit.fault_tolerance.errors import UserError
from ds_vit.train import main
from ds_vit.training import output
from ds_vit.training.output import FolderLock


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    monkeypatch.setattr(output, "_GRACE_SECONDS", 0.3)


def test_a_second_run_is_refused_while_the_first_lives(tmp_path):
    # Catches: two writers; a lock that outlives its run; a message that does not say where the other run is.
    folder = tmp_path / "run"
    with FolderLock(str(folder)):
        with pytest.raises(
            UserError, match=rf"in use by another run \(process {os.getpid()} on host .*, since 20.*stop"
        ):
            FolderLock(str(folder)).__enter__()
        assert [path.name for path in folder.iterdir()] == [".lock"]
    assert not folder.exists(), "nothing was written"
    with FolderLock(str(folder)):
        (folder / "metrics.jsonl").touch()
    assert [path.name for path in folder.iterdir()] == ["metrics.jsonl"]


OWNER = """
import os, sys
from ds_vit.training.output import FolderLock

with FolderLock(sys.argv[1]):
    worker = os.fork()
    if not worker:
        os.read(os.pipe()[0], 1)  # an image that never comes
    print(worker, flush=True)
    os.read(os.pipe()[0], 1)
"""


@pytest.mark.slow
def test_a_killed_run_holds_nothing_though_its_worker_lives(tmp_path):
    # Catches: a lock that a loader worker has taken along, and a folder that stays locked for ever.
    run = subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    worker = int(run.stdout.readline())
    try:
        with pytest.raises(UserError, match=f"process {run.pid} on host"):
            FolderLock(str(tmp_path)).__enter__()
        run.kill()
        run.wait()
        os.kill(worker, 0)  # it lives
        with FolderLock(str(tmp_path)):
            pass
    finally:
        run.kill()
        os.kill(worker, signal.SIGKILL)
        run.stdout.close()


def test_a_run_that_ends_meanwhile_is_said(tmp_path, monkeypatch):
    # Catches: a start that resumes from what it read before the other run's last checkpoint.
    first = FolderLock(str(tmp_path)).__enter__()
    monkeypatch.setattr(output.time, "sleep", lambda seconds: first.release())
    with pytest.raises(UserError, match="until just now; start again"):
        FolderLock(str(tmp_path)).__enter__()
    assert not (tmp_path / ".lock").exists()


def test_a_lock_left_by_another_host_is_named(tmp_path, capsys):
    # Catches: a folder that a dead host locks for ever, and one that two hosts write to without a word.
    (tmp_path / ".lock").write_text(json.dumps({"pid": 7, "host": "far", "since": "2026-01-01 00:00:00"}))
    with FolderLock(str(tmp_path)):
        assert json.loads((tmp_path / ".lock").read_text())["pid"] == os.getpid()
    assert capsys.readouterr().err.count("process 7 on host far, since 2026-01-01 00:00:00") == 1


def test_a_file_system_without_locks_costs_a_warning(tmp_path, monkeypatch, capsys):
    # Catches: no training on Lustre as it is mounted by default.
    def refuse(file, operation):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(output.fcntl, "flock", refuse)
    with FolderLock(str(tmp_path)):
        pass
    assert "its file system has no locks" in capsys.readouterr().err


def test_a_run_takes_the_lock(tmp_path, capsys):
    # Catches: a lock that no run asks for. tests/fault_tolerance/test_kill.py resumes in the folders of killed runs.
    words = [*DIGITS, "--val-split", "", "--max-steps", "1", "-b", "4", "--output", str(tmp_path), "--deepspeed_config"]
    with FolderLock(str(tmp_path)):
        assert main([*words, str(ROOT / "ds_configs" / "cpu_zero1_fp32.json")]) == 2
    assert f"in use by another run (process {os.getpid()} on host" in capsys.readouterr().err
