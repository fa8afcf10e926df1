"""Exit codes of a run, and the word in summary.json.

| code | meaning | what to do |
|---|---|---|
| 0 | completed | |
| 1 | a bug: its traceback is shown | restart, and report it |
| 2 | invalid input: found before training, except for damaged images | read the message |
| 3 | diverged: loss or gradient not finite, or a spike | the message names the layer; older checkpoints are intact |
| 4 | `--check-replicas` found replicas with different weights | return to an earlier checkpoint |
| 65 | `ds-vit predict`, `embed`: done, except for unreadable images, which were named | check the files |
| 71 | a rank made no progress for `--stall-seconds`; all ranks printed their stacks | restart |
| 72 | a rank or a loader process was lost, failed or ran out of memory, and was named | restart |
| 74 | trained, but a checkpoint, weights or metrics rows could not be written | see the warnings; free space |
| 75 | interrupted by a signal, Ctrl-C or a time limit, and saved | restart with `--resume auto` |
| 130 | Ctrl-C before training, or twice: nothing was saved | |
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
    """Training has diverged; the message says where and since which step."""
