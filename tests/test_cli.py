"""`ds-vit` as somebody meets it who knows none of its commands."""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
from importlib.metadata import version

import pytest
from project import ROOT

from ds_vit import cli

COMMANDS = (
    "train",
    "eval",
    "predict",
    "embed",
    "export",
    "import",
    "bench",
    "bench step",
    "bench ladder",
    "hosts",
    "doctor",
)
COMMANDS += ("gradients", "plan")


def help_of(capsys, command=""):
    """What `ds-vit COMMAND --help` prints."""
    with pytest.raises(SystemExit) as end:
        cli.main([*command.split(), "--help"])
    assert end.value.code == 0
    return capsys.readouterr().out


def test_alone_it_prints_its_help(capsys):
    """Two lines of usage and an exit code of 2."""
    assert cli.main([]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out == help_of(capsys)
    listed = re.findall(r"^    (\w+) ", out, re.MULTILINE) + re.findall(r"^    (\w+)$", out, re.MULTILINE)
    assert set(listed) - {"COMMAND"} == {command.split()[0] for command in COMMANDS}, "COMMANDS above has them all"
    assert max(map(len, out.splitlines())) <= 80


def test_it_says_its_version(capsys):
    """A bug report without one."""
    with pytest.raises(SystemExit):
        cli.main(["--version"])
    assert capsys.readouterr().out == f"ds-vit {version('ds-vit')}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_shows_examples(capsys, command):
    """A flag in an example that is gone, an example of another command, none at all."""
    out = help_of(capsys, command)
    examples = [line.strip() for line in out.partition("\nexamples:\n")[2].splitlines() if line.strip()]
    assert examples
    assert any(line.startswith(f"ds-vit {command}") for line in examples)
    known = out.partition("\nexamples:\n")[0]
    if command.startswith("bench"):  # takes flags of training
        known += help_of(capsys, "bench step") + help_of(capsys, "train")
    own = [line.partition(" -m ds_vit.cli ")[2] or line for line in examples]  # behind a launcher
    flags = {word for line in own for word in shlex.split(line) if word.startswith("-")}
    assert not [flag for flag in flags if not re.search(rf"{re.escape(flag)}\b", known)]


def test_a_reader_that_has_had_enough(tmp_path):
    """A traceback below `ds-vit … | head`."""
    (tmp_path / "names").write_text("".join(f"node{number}\n" for number in range(5000)))
    command = [sys.executable, "-m", "ds_vit.cli", "hosts", "--from", "names", "--slots", "8"]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        command, cwd=tmp_path, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 128 + signal.SIGPIPE


def test_train_is_the_trainer(capsys):
    """A second door that leads elsewhere, or that speaks under another name."""
    assert cli.main(["train", "--deepspeed_config", "nowhere.json", "--dataset", "digits", "--model", "vit_tiny"]) == 2
    err = capsys.readouterr().err
    assert err.startswith("ds-vit train: error: ")
    assert cli.main(["train", "--epoch", "3"]) == 2
    assert "there is no flag --epoch; the nearest is --epochs" in capsys.readouterr().err
