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
from ds_vit.config.flag import spelling
from ds_vit.config.schema import RunConfig

_COMMANDS = """
    train launch eval predict embed export import hosts doctor report compare shards plan bench from-timm
    from-open-clip
"""
COMMANDS = [*_COMMANDS.split(), "bench step", "bench data"]


def help_of(capsys, command="", flag="--help"):
    """What `ds-vit COMMAND --help` prints."""
    with pytest.raises(SystemExit) as end:
        cli.main([*command.split(), flag])
    assert end.value.code == 0
    return capsys.readouterr().out


def test_alone_it_prints_its_help(capsys):
    """Two lines of usage and an exit code of 2."""
    assert cli.main([]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out == help_of(capsys)
    listed = re.findall(r"^    ([\w-]+) ", out, re.MULTILINE) + re.findall(r"^    ([\w-]+)$", out, re.MULTILINE)
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
    if command.startswith(("bench", "launch")):  # takes flags of training
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


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["launch/train.py", "--help"], 0),
        (["launch/train.py", "--help-all"], 0),
        (["launch/train.py", "--epochs", "0"], 2),
        (["-m", "ds_vit", "train", "--help"], 0),
        (["-m", "ds_vit", "train", "--dataset", "digits", "--lerning-rate", "1"], 2),
        (["-m", "ds_vit", "train", "--deepspeed_config", "x.json", "--dataset", "digits", "--pp", "0"], 2),
        (["-m", "ds_vit", "--help"], 0),
        (["-m", "ds_vit", "plan", "--help"], 0),
    ],
)
def test_help_and_wrong_flags_do_not_import_torch(words, code):
    """Catches: seconds of waiting for a list of flags, or for the message about a slip."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == code, done.stderr
    imported = set(re.findall(r"\| +([\w.]+)$", done.stderr, re.MULTILINE))
    assert "ds_vit.config.schema" in imported
    assert imported.isdisjoint({"torch", "deepspeed", "timm", "numpy"})


def test_help_begins_with_what_matters(capsys):
    """Three hundred lines for somebody who has come for the first time; a flag that stands nowhere."""
    short, whole = help_of(capsys, "train"), help_of(capsys, "train", "--help-all")
    first = short.partition("the ten that matter first:\n")[2].partition("\n\n")[0]
    assert len(re.findall(r"^  -", first, re.MULTILINE)) == 10
    assert len(short.splitlines()) < 96
    assert max(map(len, short.splitlines())) <= 120
    flags = {name for name in RunConfig.flags() if not re.search(rf"{re.escape(spelling(name))}(?![\w-])", short)}
    assert flags == set()
    assert {
        name for name in RunConfig.flags() if RunConfig.flags()[name].text[:20] not in " ".join(whole.split())
    } == set()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("trian", "the nearest is train"),
        ("gradients runs/a", "ds-vit gradients was removed; `ds-vit report RUN` shows"),
        ("report runs/a --otput 3", "there is no flag --otput; the nearest is --output"),
        ("bench step --deepspeed_config x --turns 0", "--turns: must be at least 1, not 0"),
        ("bench ladder --deepspeed_config x", "ds-vit bench ladder was removed; docs/benchmarks/ladder.py"),
        ("bench step --deepspeed_config x --output a.png", "ds-vit bench step --output was removed; --json"),
        ("eval runs/a --knm 3", "the nearest is --knn"),
        ("bench step --deepspeed_config x --epoch 3", "the nearest is --epochs"),
        (
            "train --deepspeed_config ds_configs/cpu_zero1_fp32.json --dataset digits -b 5000 --model vit_tny",
            "vit_tiny",
        ),
        (
            "train --deepspeed_config ds_configs/cpu_zero1_fp32.json --dataset digits -b 5000",
            "product may be 1442 at most",
        ),
    ],
)
def test_a_slip_of_the_pen_is_answered_with_what_was_meant(capsys, words, said):
    """A list of all there is, for the reader to search."""
    assert cli.main(words.split()) == 2
    assert said in capsys.readouterr().err
