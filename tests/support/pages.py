"""The commands of a page: found, read as bash reads them, and run on warm ranks."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

from project import ROOT
from ranks import RankPool
from runs import run_quietly

from ds_vit import cli

PROGRAM = re.compile(
    r"(?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?(?:deepspeed|torchrun|python|bash|ds-vit|mpirun|srun|tensorboard) .*"
)
ASSIGNMENT = re.compile(r'\w+="[^"]*"$')
TINY = (
    "--deepspeed_config ds_configs/cpu_zero1_fp32.json --dataset digits --model vit_tiny_patch16_224 "
    "--model-kwargs patch_size=4 embed_dim=32 depth=2 num_heads=2 --img-size 16 --epochs 2 --workers 0"
)
READERS_OWN = {"FILE": "ds_configs/cpu_zero1_fp32.json", "RUN": "runs/first", "ANOTHER": "runs/new", "THIRD": "runs/3"}


class Command(NamedTuple):
    """One command of a page, on one line and without comment; the shell's variables above it; whether it may run."""

    text: str
    assignments: tuple[str, ...] = ()
    runs: bool = True


def commands(page: str) -> list[Command]:
    """The commands of a page's text: lines of an indented or a fenced block."""
    found, assignments, fenced, runs, inside = [], [], False, True, False
    for line in re.sub(r"\\\n\s*", " ", page).splitlines():
        if line.startswith("```"):
            fenced = not fenced
        elif fenced or line.startswith("    "):
            inside = True
            text = re.split(r"\s+#\s|\s{6,}", line.strip())[0].strip()
            if ASSIGNMENT.match(text):
                assignments.append(text)
            elif PROGRAM.fullmatch(text) and ": error: " not in text:
                found.append(Command(text, tuple(assignments), runs))
        elif line.lstrip().startswith("<!-- not run: "):
            runs, inside = False, False
        elif line.strip() and inside:  # text behind a block
            runs, inside = True, False
    return found


def words_of(command: Command) -> tuple[dict[str, str], list[str]]:
    """The environment and the words of a command, as bash reads them, with the reader's own filled in."""
    text = command.text.replace("…", TINY)
    for mark, own in READERS_OWN.items():
        text = re.sub(rf"(?<![\w/]){mark}\b", own, text)
    script = "\n".join([*command.assignments, f"set -- {re.split(' [>&|]', text)[0]}", 'printf "%s\\0" "$@"'])
    done = subprocess.run(["bash", "-e", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True)
    words, environ = done.stdout.split("\0")[:-1], {}
    while re.match(r"[A-Z_]+=", words[0]):
        name, _, environ[name] = words.pop(0).partition("=")
    for flag in ("--num_accelerators", "--nproc_per_node", "-n"):
        if flag in words and Path(words[0]).name in ("deepspeed", "torchrun", "ds-vit"):
            environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": words[words.index(flag) + 1]}
    return environ, words


def words_of_ours(words: list[str]) -> list[str]:
    """The words that `ds-vit` gets for a command, also for a training under a launcher; none for another program."""
    for at, word in enumerate(words):
        rest = words[at + 1 :]
        if word == "launch/train.py":
            return ["train", *rest]
        if word.endswith("ds-vit") or word == "ds_vit.cli":
            return rest[rest.index("train") :] if rest[0] == "launch" and "train" in rest[:4] else rest
    return []


def run_words(folder: str, environ: dict[str, str], words: list[str]) -> tuple[int, str, str]:
    """On a rank: `ds-vit` with these words, in a folder; its exit code, what it said on stdout and on stderr."""
    os.chdir(folder)
    if "WORLD_SIZE" in environ:  # a rank that nobody started: of its host nothing is known either
        del os.environ["LOCAL_WORLD_SIZE"]
    os.environ |= environ
    return run_quietly(words, main=cli.main)


def run_page(ranks: RankPool, page: str, folder: Path) -> list[str]:
    """What each command of ours says in a folder, on as many ranks as its launcher would start; each must succeed."""
    said = []
    for command in commands(page):
        environ, words = words_of(command)
        if words := words_of_ours(words):
            (code, out, wrong), *_ = ranks.run(int(environ.get("WORLD_SIZE", 1)), run_words, str(folder), {}, words)
            assert code == 0, f"{command.text}\n{out}{wrong}"
            said.append(out)
    return said
