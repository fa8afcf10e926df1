"""How a run ends, as its exit code and as the word in summary.json.

| code | meaning | what to do |
|---|---|---|
| 0 | completed | |
| 1 | a bug, or what nobody foresaw: its traceback is shown | start again, and report it |
| 2 | input that cannot be: found before training, but for an image that is damaged | read the one line |
| 3 | diverged: loss or gradient not finite, or a spike | the line says where it began; older checkpoints are intact |
| 4 | `--check-replicas` found ranks with other weights than their replicas | go back to what was saved before |
| 65 | `ds-vit predict`, `embed`: done, but for images that could not be read; each was named | look at the files |
| 71 | a rank made no progress for `--stall-seconds`: all have shown where they stood | start again |
| 72 | a rank, or a process that loads images, was lost or ended with an error: it has been named | start again |
| 74 | trained, and a checkpoint, the weights or rows of metrics.jsonl found no room | see the warnings; make room |
| 75 | interrupted by a signal, Ctrl-C or a time limit, and saved | start again with `--resume auto` |
| 130 | Ctrl-C while nothing was trained, or twice: nothing was saved | |
"""

from __future__ import annotations

OK = 0
BUG = 1  # Python's own, for an exception that nobody catches
BAD_INPUT = 2
DIVERGED = 3
DRIFTED = 4
UNREADABLE = 65  # EX_DATAERR of sysexits.h
STALLED = 71
LOST = 72
UNSAVED = 74  # EX_IOERR
INTERRUPTED = 75  # EX_TEMPFAIL: try again later
CTRL_C = 130

OF_WORD = {"completed": OK, "dry run": OK, "not all saved": UNSAVED, "interrupted": INTERRUPTED}
"""From "exit" in summary.json, or of a run that was not started, to the exit code."""


class Diverged(RuntimeError):
    """Training has run away; the message says where and since when."""
