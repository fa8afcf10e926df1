"""A plugin of pytest: a line for each file that is done, and the slowest files at the end, with xdist or without."""

from __future__ import annotations

import multiprocessing.forkserver
import os
import resource
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

NUM_SLOWEST = 10


def cpu_seconds() -> float:
    """CPU time of this process and of its children that have ended, the rank pool's among them."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    seconds = sum(usage.ru_utime + usage.ru_stime for usage in used)
    server = multiprocessing.forkserver._forkserver._forkserver_pid  # the ranks are its children, not ours
    try:
        fields = Path(f"/proc/{server}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return seconds
    return seconds + sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # utime, stime, cutime, cstime


class FileTimes:
    """Adds up the seconds of each file's tests where the reports come together: in pytest or in xdist's controller."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._started = time.monotonic()
        self._cpu = cpu_seconds()
        self._seconds: Counter[str] = Counter()
        self._cpu_seconds: Counter[str] = Counter()
        self._num_tests: Counter[str] = Counter()
        self._left: Counter[str] = Counter()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._expect([item.nodeid for item in session.items])

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self._expect(ids)

    def _expect(self, ids: Sequence[str]) -> None:
        self._num_tests = Counter(nodeid.partition("::")[0] for nodeid in ids)
        self._left = self._left or self._num_tests.copy()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[Any]:
        """Runs where the test does; the attribute travels with the report."""
        report = yield
        before, self._cpu = self._cpu, cpu_seconds()
        report.cpu_seconds = self._cpu - before
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        file = report.nodeid.partition("::")[0]
        self._seconds[file] += report.duration
        self._cpu_seconds[file] += getattr(report, "cpu_seconds", 0.0)
        if report.when != "teardown":
            return
        self._left[file] -= 1
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if self._left[file] == 0 and reporter is not None and self._config.get_verbosity() >= 0:
            done = sum(1 for left in self._left.values() if left == 0)
            minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
            reporter.ensure_newline()
            if reporter._tw.width_of_current_line:  # xdist's dots, which ensure_newline knows nothing of
                reporter.write("\n")
            reporter.write_line(f"{minutes:02}:{seconds:02}  {done} of {len(self._left)} files  {self._row(file)}")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Before pytest's own last line."""
        if len(self._seconds) < 2 or self._config.get_verbosity() < 0:
            return
        terminalreporter.section(f"slowest {NUM_SLOWEST} files")
        for file, _ in self._seconds.most_common(NUM_SLOWEST):
            terminalreporter.write_line(self._row(file))

    def _row(self, file: str) -> str:
        cpu = self._cpu_seconds[file]
        return f"{file}: {self._num_tests[file]} tests, {self._seconds[file]:.0f} s ({cpu:.0f} s of CPU)"
