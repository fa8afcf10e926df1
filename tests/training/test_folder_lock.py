"""One run at a time writes into a folder."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest
from project import ROOT
from runs import DIGITS

from ds_vit.fault_tolerance.errors import UserError
from ds_vit.fault_tolerance.exit_codes import LOST
from ds_vit.train import main
from ds_vit.training import output
from ds_vit.training.output import FolderLock


@pytest.fixture(autouse=True)
def _fast(monkeypatch):
    for name, seconds in {"_BEAT": 0.05, "_DEAD": 1.0, "_GRACE": 0.3, "_SETTLE": 0.05}.items():
        monkeypatch.setattr(output, f"{name}_SECONDS", seconds)


def change(folder, **owner):
    """Change what the lock of a folder says of its owner."""
    path = folder / ".lock"
    path.write_text(json.dumps({**json.loads(path.read_text()), **owner}))


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


@pytest.mark.parametrize("owner", ["killed", "number of another process"])
def test_a_dead_owner_on_this_machine_holds_nothing(tmp_path, owner):
    child = subprocess.Popen([sys.executable, "-c", ""])
    with FolderLock(str(tmp_path), end=lambda code: None):
        if owner == "killed":
            child.wait()
            change(tmp_path, pid=child.pid)
        else:
            change(tmp_path, started="1")
        begun = time.monotonic()
        with FolderLock(str(tmp_path)):
            assert time.monotonic() - begun < 0.3, "without waiting for a heartbeat"
    child.wait()


def test_an_owner_on_another_host_lives_while_its_lock_changes(tmp_path):
    # Catches: a comparison of two hosts' clocks; a lock of a host that has gone, held for ever.
    path = tmp_path / ".lock"
    with FolderLock(str(tmp_path), end=lambda code: None):
        change(tmp_path, id="other", host="far", machine="another")
        text = path.read_text()
    stop = threading.Event()

    def beat():
        year_2001, count = 1_000_000_000, 0
        while not stop.wait(0.05):
            count += 1
            os.utime(path, (year_2001 + count, year_2001 + count))

    path.write_text(text)
    beats = threading.Thread(target=beat)
    beats.start()
    with pytest.raises(UserError, match="on host far"):
        FolderLock(str(tmp_path)).__enter__()
    stop.set()
    beats.join()
    begun = time.monotonic()
    with FolderLock(str(tmp_path)):
        assert time.monotonic() - begun >= 1.0


def test_a_run_whose_lock_was_taken_ends(tmp_path, capfd):
    # Catches: two writers after one of them stood still for longer than a lock lasts.
    codes = []
    ended = threading.Event()
    with FolderLock(str(tmp_path), end=lambda code: (codes.append(code), ended.set())):
        change(tmp_path, id="other", host="far")
        assert ended.wait(5)
    assert codes == [LOST]
    assert "on host far" in capfd.readouterr().err
    assert (tmp_path / ".lock").exists(), "the other run's"


def test_a_run_takes_the_lock(tmp_path, capsys):
    # Catches: a lock that no run asks for. tests/fault_tolerance/test_kill.py resumes in the folders of killed runs.
    words = [*DIGITS, "--val-split", "", "--max-steps", "1", "-b", "4", "--output", str(tmp_path), "--deepspeed_config"]
    with FolderLock(str(tmp_path)):
        assert main([*words, str(ROOT / "ds_configs" / "cpu_zero1_fp32.json")]) == 2
    assert f"in use by another run (process {os.getpid()} on host" in capsys.readouterr().err
