"""`ds-vit completion bash`, sourced by a real bash in whose terminal somebody presses Tab."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import time

import pytest

from ds_vit import cli

TAB_TWICE = b"\t\t"


@pytest.fixture(scope="module")
def script(tmp_path_factory):
    """The folder with the script, and a run in it."""
    from contextlib import redirect_stdout

    folder = tmp_path_factory.mktemp("shell")
    with (folder / "ds-vit.bash").open("w") as file, redirect_stdout(file):
        assert cli.main(["completion", "bash"]) == 0
    (folder / "runs" / "first").mkdir(parents=True)
    (folder / "first.json").touch()
    return folder


def after_tab(folder, typed, wait_for):
    """What a terminal shows after typing and Tab, without its control sequences; until `wait_for` is in it."""
    ours, theirs = pty.openpty()
    environ = {"PATH": os.environ["PATH"], "PS1": "", "TERM": "dumb", "INPUTRC": "/dev/null"}
    command = ["bash", "--norc", "--noprofile", "-i"]
    with subprocess.Popen(command, cwd=folder, env=environ, stdin=theirs, stdout=theirs, stderr=theirs) as shell:
        os.write(ours, b"bind 'set page-completions off'; bind 'set bell-style none'; . ./ds-vit.bash; echo rea''dy\n")
        shown, sent, deadline = "", False, time.monotonic() + 20
        while time.monotonic() < deadline and not (sent and wait_for in shown):
            if select.select([ours], [], [], 0.1)[0]:
                shown += os.read(ours, 65536).decode()
            if not sent and "\nready" in shown:
                shown, sent = "", True
                os.write(ours, typed.encode() + TAB_TWICE)
        shell.kill()
    os.close(ours)
    os.close(theirs)
    return re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]|\r|\x07", "", shown)


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize(
    ("typed", "shown"),
    [
        ("ds-vit comp", "completion"),  # beside compare
        ("ds-vit train --deepspeed_c", "--deepspeed_config "),
        ("ds-vit train --model vit_tiny_patch16_2", "vit_tiny_patch16_224 "),
        ("ds-vit train --sched con", "constant "),
        ("ds-vit predict run", "runs/"),
        ("ds-vit export --t", "--to "),
        ("ds-vit train --deepspeed_config fir", "first.json"),
    ],
)
def test_tab(script, typed, shown):
    # Catches: a command that reads its own flags and completes none; a script that bash cannot read.
    assert shown in after_tab(script, typed, shown)


def test_other_shells(capsys):
    # Catches: a text of a flag that another shell's script cannot hold.
    assert cli.main(["completion", "zsh"]) == 0
    assert capsys.readouterr().out.startswith("#compdef ds-vit\n")
