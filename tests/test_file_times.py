"""The lines that a long run of the tests shows, and its end."""

from __future__ import annotations

import os
import re
import subprocess
import sys

import pytest
from project import ROOT

CONFTEST = """
import sys
sys.path.insert(0, {tests!r})
from file_times import FileTimes

def pytest_configure(config):
    config.pluginmanager.register(FileTimes(config))
"""
BUSY = """
import os, time

def test_busy():
    end = time.process_time() + 0.6
    while time.process_time() < end:
        pass

def test_child():
    if (child := os.fork()) == 0:
        test_busy()
        os._exit(0)
    os.waitpid(child, 0)
"""


@pytest.mark.parametrize("processes", ["0", "2"])
def test_slowest_files_come_before_pytests_own_line(tmp_path, processes):
    # Catches: a summary that xdist's processes keep to themselves, CPU time of children left out, a last line of ours.
    (tmp_path / "conftest.py").write_text(CONFTEST.format(tests=str(ROOT / "tests")))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_busy.py").write_text(BUSY)
    for number in range(11):
        (tmp_path / f"test_quick_{number:02}.py").write_text("def test_quick():\n    pass\n")
    command = [sys.executable, "-m", "pytest", "-n", processes, "--dist", "loadfile", "-p", "no:cacheprovider"]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, last = done.stdout.splitlines()
    assert re.fullmatch(r"=+ 13 passed in .*s.* =+", last)
    progress = [line for line in lines if re.match(r"\d\d:\d\d  \d+ of 12 files  test_\w+\.py: [12] tests", line)]
    assert len(progress) == 12
    assert "  12 of 12 files  " in progress[-1]
    (title,) = [i for i, line in enumerate(lines) if "slowest 10 files" in line]
    table = lines[title + 1 :]
    assert len(table) == 10
    busy = re.fullmatch(r"test_busy\.py: 2 tests, (\d+) s \((\d+) s of CPU\)", table[0])
    assert busy is not None
    assert int(busy[2]) >= 1
