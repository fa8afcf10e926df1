"""The moving line: what stands on a terminal while a run goes on, and that it waits for nothing."""

from __future__ import annotations

import io
import itertools
import re

import pytest
from curves import train_in, train_rows
from rich.console import Console
from runs import ONE_BLOCK
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from ds_vit.config.run_folder import RunFolder
from ds_vit.monitoring import progress
from ds_vit.monitoring.metrics import Reporter, make_console, print_columns, print_table, say
from ds_vit.monitoring.progress import Line


def terminal(width=80, *, is_terminal=True):
    """A console and what it was given."""
    console = Console(file=io.StringIO(), width=width, force_terminal=is_terminal, legacy_windows=False)
    return console, console.file


def lines(file):
    """What was drawn, a line each, without colours."""
    return [
        line for line in re.split(r"[\r\n]+", re.sub(r"\x1b\[[?0-9;]*[A-Za-z]", "", file.getvalue())) if line.strip()
    ]


@pytest.fixture
def ticking(monkeypatch):
    """A clock that says half a second more each time it is read."""
    clock = itertools.count()
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(clock) / 2)


def test_the_line_says_all_and_fits(ticking):
    """A line of 80 columns wraps when Ctrl-C writes ^C into it, and then stands there twice."""
    console, file = terminal()
    line = Line(console)
    line.train(300_000, 123_450)
    for step in range(123_451, 123_461):
        line.step(step, loss=float(step % 2), images=4096)
    line.step(123_460, quality="top-1 76.54 %")
    line.close()
    last = lines(file)[-1]
    assert re.search(r"^train .* 123460/300000 loss 0.5000  8192 img/s  top-1 76.54 %  24h31m left", last), last
    assert max(map(len, lines(file))) <= 77


def test_left_and_speed_are_those_of_the_last_steps(ticking):
    """An evaluation that slows the figures down; a first step that warms up and counts."""
    console, file = terminal(width=120)
    line = Line(console)
    line.train(100, 0)
    for step in range(1, 11):
        line.step(step, images=8)
        with line.doing("evaluation", 3) as counted:
            assert list(counted(range(3))) == [0, 1, 2]
            progress.time.perf_counter()  # it takes its time
    line.close()
    assert "10/100" in lines(file)[-1]
    assert "16 img/s  0m45s left" in lines(file)[-1]


def test_what_is_over_leaves_nothing():
    """A spinner of the start, or an evaluation's line, that stays on the screen for ever."""
    console, file = terminal()
    line = Line(console)
    with line.doing("reading the checkpoint"):
        pass
    assert any("reading the checkpoint" in drawn for drawn in lines(file))
    assert "\x1b[2K" in file.getvalue().rpartition("0 s")[2], "it is erased"
    assert "\n" not in file.getvalue(), "and no empty line is left"
    line.train(2, 0)
    with line.doing("evaluation", 2):
        pass
    line.step(2)
    line.close()
    assert "evaluation" not in lines(file)[-1]


def test_a_file_gets_no_line():
    """Control characters in a log."""
    console, file = terminal(is_terminal=False)
    line = Line(console)
    line.train(2, 0)
    with line.doing("evaluation", 2) as counted:
        assert list(counted("ab")) == ["a", "b"]
    line.step(1, loss=1.0, images=1)
    line.close()
    assert file.getvalue() == ""
    assert not line.moves


def test_tensorboard_gets_every_step_of_a_short_run(ranks, tmp_path):
    """600 steps were 13 points; the rows of metrics.jsonl stay what --log-interval says."""
    words = [*ONE_BLOCK, "--val-split", "", "--max-steps", 5, "--log-interval", 3, "-b", 4]
    words += ["--deepspeed_config", "ds_configs/cpu_zero1_fp32.json"]
    rows = train_in(ranks, 1, [*words, "--output", tmp_path])
    assert [row["step"] for row in train_rows(rows)] == [1, 3, 5]
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    points = {event.step: event.value for event in events.Scalars("train/loss")}
    assert sorted(points) == [1, 2, 3, 4, 5]
    assert points[3] == pytest.approx(train_rows(rows)[1]["loss"])
    assert [event.step for event in events.Scalars("time/images_per_second")] == [1, 3, 5]


def test_a_loader_that_is_too_slow_is_told_once(tmp_path):
    """A warning about the loader's own start, none about a model that waits, or one at every row."""
    said = io.StringIO()
    console = Console(file=said, width=300)
    reporter = Reporter(RunFolder(tmp_path), total_steps=9, console=console, stamp=lambda _: {"epoch": 0})
    reporter.start()
    row = dict.fromkeys(("epoch_loss", "grad_norm", "loss_scale", "tflops_per_accelerator", "mfu"))
    row |= {"loss": 1.0, "lr": 0.1, "images_per_second": 60.0, "images_seen": 0}
    told = []
    for step, waiting in enumerate((0.9, 0.1, 0.4, 0.6), 1):
        reporter.train({**row, "step": step, "data_wait_fraction": waiting})
        told.append(said.getvalue().count("slower than the model"))
    reporter.close()
    assert told == [0, 0, 1, 1]
    assert (
        "at 60 images/s 40% of the time is spent waiting for it, and the model could take about 100;" in said.getvalue()
    )


@pytest.mark.parametrize("is_terminal", [False, True])
def test_names_in_brackets_are_printed(capsys, monkeypatch, is_terminal):
    """A folder that rich takes for a style, and leaves out of a table or a line."""
    monkeypatch.setenv("TTY_COMPATIBLE", str(int(is_terminal)))
    console = make_console()
    print_table(console, "a [bold] title", [("output", "runs/[red]/[1]")])
    print_columns(console, "columns", [("model", "[b]"), ("a[/b]", "1")])
    say(console, "[green]")
    out = capsys.readouterr().out
    assert all(text in out for text in ("a [bold] title", "runs/[red]/[1]", "[b]", "a[/b]", "[green]")), out
