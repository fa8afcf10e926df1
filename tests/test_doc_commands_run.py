"""The commands of README and docs that tests/doc_commands.yaml calls quick or slow, run in their own words.

Launchers are left out: their ranks are those of the `ranks` fixture. What a page leaves open (`…`, FILE, RUN) is filled
in, and the words of a row that make it small stand last, where they count.
"""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from doc_commands import COMMANDS, Command
from PIL import Image
from project import ROOT
from runs import run_quietly

MODEL = "--model vit_tiny_patch16_224 --model-kwargs patch_size=4 embed_dim=32 depth=4 num_heads=2 --img-size 16"
TINY = f"--deepspeed_config ds_configs/cpu_zero1_fp32.json --dataset digits {MODEL} --epochs 1 --workers 0"
PAGES_OWN = {  # what stands in a page for something of the reader's
    **{
        "…": "",
        "FILE": "ds_configs/cpu_zero1_fp32.json",
        "RUN": "runs/first",
        "ANOTHER": "runs/like-it",
        "THIRD": "runs/third",
    },
}
SMALL = f"{MODEL} --max-steps 2 -b 4 --workers 0"


def as_run(command: Command) -> tuple[dict[str, str], int, list[str]]:
    """The environment, the number of ranks and the words of a command; bash itself reads them."""
    text = command.text + " " + command.small
    for mark, own in PAGES_OWN.items():
        text = re.sub(rf"(?<![\w/]){re.escape(mark)}(?![\w])", own, text) if mark.isupper() else text.replace(mark, own)
    script = "\n".join([*command.assignments, f"tiny='{TINY}' small='{SMALL}' && set -- {text}", 'printf "%s\\0" "$@"'])
    words = subprocess.run(["bash", "-e", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    words = words.stdout.split("\0")[:-1]
    environ = {}
    while re.match(r"[A-Z_]+=", words[0]):
        name, _, environ[name] = words.pop(0).partition("=")
    launcher, num_ranks = Path(words[0]).name, 1
    if launcher in ("deepspeed", "torchrun"):
        for flag in ("--num_accelerators", "--nproc_per_node"):
            if flag in words:
                num_ranks = int(words[words.index(flag) + 1])
        program = next(at for at, word in enumerate(words) if word.endswith(".py") or word == "ds_vit.cli")
        words = words[program:]
    words[0] = words[0].removeprefix(".venv/bin/")
    return environ, num_ranks, words[1:] if words[0] == "python" else words


def run_words(folder: str, environ: dict[str, str], words: list[str]) -> tuple[int, str, str]:
    """On a rank: a program with its words, in a folder; its exit code, what it said on stdout and on stderr."""
    from ds_vit import cli

    os.chdir(folder)
    if "WORLD_SIZE" in environ:  # a rank that nobody started: of its host nothing is said either
        del os.environ["LOCAL_WORLD_SIZE"]
    os.environ |= environ
    program, rest = words[0], words[1:]
    if program == "launch/train.py":
        return run_quietly(rest)
    if program in ("ds-vit", "ds_vit.cli"):
        return run_quietly(rest, main=cli.main)

    def script(words: list[str]) -> int:
        sys.argv = [program, *words]
        sys.path.insert(0, str(Path(program).parent))
        runpy.run_path(program, run_name="__main__")
        return 0

    return run_quietly(rest, main=script)


@pytest.fixture(scope="module")
def place(ranks, tmp_path_factory) -> Path:
    """The folder that pages speak of: photos, two finished runs, and what a clone has."""
    folder = tmp_path_factory.mktemp("place")
    for split, name, number in ((s, c, n) for s in ("train", "val") for c in ("cat", "dog") for n in range(4)):
        path = folder / "photos" / split / name / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((40, 32), 60 + number).convert("RGB").save(path)
    (folder / "cifar").symlink_to("photos")
    shutil.copy(folder / "photos/val/cat/0.jpg", folder / "cat.jpg")
    for name in ("launch", "ds_configs"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "docs" / "images").mkdir(parents=True)
    (folder / "docs" / "benchmarks").symlink_to(ROOT / "docs" / "benchmarks")
    words = f"--data-dir photos {SMALL} --epochs 2 --grad-stats-interval 1 --no-aug --output runs/first"
    words = ["launch/train.py", "--deepspeed_config", "ds_configs/cpu_zero1_fp32.json", *words.split()]
    [(code, said, wrong)] = ranks.run(1, run_words, str(folder), {}, words)
    assert code == 0, said + wrong
    for name in ("second", "one", "another"):
        shutil.copytree(folder / "runs/first", folder / "runs" / name)
    words = "ds-vit shards photos photos-shards -j 1"
    [(code, said, wrong)] = ranks.run(1, run_words, str(folder), {}, words.split())
    assert code == 0, said + wrong
    return folder


def cases():
    for command in COMMANDS:
        if command.how in ("quick", "slow"):
            marks = [pytest.mark.slow] if command.how == "slow" else []
            yield pytest.param(command, marks=marks, id=f"{command.page}: {command.words}")


@pytest.mark.parametrize("command", list(cases()))
def test_it_runs(command, place, ranks, tmp_path):
    # Catches: a command of a page that ends in anything but success.
    folder = tmp_path / "place"
    shutil.copytree(place, folder, symlinks=True)
    environ, num_ranks, words = as_run(command)
    for code, said, wrong in ranks.run(num_ranks, run_words, str(folder), environ, words):
        assert code == 0, f"{words}\n{said}{wrong}"


def test_a_command_that_fails_is_seen(place, ranks):
    # Catches: an exit code that is dropped.
    command = Command("README.md", "ds-vit predict RUN nowhere.jpg", (), "predict", "quick", "")
    environ, num_ranks, words = as_run(command)
    [(code, _, wrong)] = ranks.run(num_ranks, run_words, str(place), environ, words)
    assert code == 2
    assert "nowhere.jpg" in wrong
