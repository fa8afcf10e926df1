"""How a run ends, as its exit code and as the word in summary.json.

| code | meaning | what to do |
|---|---|---|
| 0 | completed | |
| 2 | input that cannot be: nothing was trained | read the one line |
| 3 | diverged: loss or gradient not finite, or a spike | the line says where it began; older checkpoints are intact |
| 71 | a rank made no progress for `--stall-seconds`: all have shown where they stood | start again |
| 72 | a rank was lost or ended with an error: it has been named, the others ended | start again |
| 74 | a checkpoint could not be written; what was told to be trained is trained | see the warnings; make room |
| 75 | interrupted by a signal or a time limit, and saved | start again with `--resume auto` |
| 130 | Ctrl-C | |
"""

from __future__ import annotations

OK = 0
BAD_INPUT = 2
DIVERGED = 3
STALLED = 71
LOST = 72
UNSAVED = 74  # EX_IOERR
INTERRUPTED = 75  # EX_TEMPFAIL of sysexits.h: try again later
CTRL_C = 130

OF_WORD = {"completed": OK, "not all saved": UNSAVED, "interrupted": INTERRUPTED}
"""From "exit" in summary.json to the exit code."""


class Diverged(RuntimeError):
    """Training has run away; the message says where and since when."""
