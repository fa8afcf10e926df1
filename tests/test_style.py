"""What a reviewer should not have to say: lint, shell syntax, stray paths, and where a file says its job."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from project import ROOT, project_files

SCRIPTS = [*sorted(ROOT.glob("launch/**/*.sh")), *sorted(ROOT.glob("launch/**/*.sbatch"))]
SCRIPTS += [ROOT / ".ci" / "run", *sorted(ROOT.glob("docs/**/*.sh"))]
TEXT = {".py", ".sh", ".md", ".json", ".yaml", ".toml", ".sbatch", ".pbs", ""}

# A folder that exists on somebody's machine only. (The pieces are apart so that this file passes its own test.)
MACHINE_PATH = re.compile(r"(?<![\w.$}/-])/(?:" + "|".join(["work", "root", r"home/\w+", r"Users/\w+"]) + r")/")


def test_no_path_of_somebodys_machine():
    # Catches: code, docs or configs that work on the machine they were written on.
    files = [path for path in project_files() if path.suffix in TEXT]
    if not files:
        pytest.skip("not a git clone")
    found = [
        f"{path.relative_to(ROOT)}:{number}"
        for path in files
        for number, line in enumerate(path.read_text(errors="replace").splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert not found


def test_the_path_rule_can_fail():
    # Catches: a pattern that matches nothing, or a URL's middle.
    assert MACHINE_PATH.search("cd " + "/home/" + "ada/x")
    assert MACHINE_PATH.search('"' + "/wo" + 'rk/x"')
    assert not MACHINE_PATH.search("https://example.org/wo" + "rk/x")
    assert not MACHINE_PATH.search("$HOME/wo" + "rk/x")


@pytest.mark.parametrize("command", [["check"], ["format", "--check"]], ids=["check", "format"])
def test_ruff(command):
    # Catches: what ruff knows.
    ruff = shutil.which("ruff", path=str(Path(sys.executable).parent)) or shutil.which("ruff")
    if ruff is None:
        pytest.skip("ruff is not installed: pip install 'ds-vit[lint]'")
    done = subprocess.run([ruff, *command, "."], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shell_script(script):
    # Catches: a script that bash cannot parse, and what shellcheck knows (unquoted paths with spaces above all).
    subprocess.run(["bash", "-n", str(script)], check=True)
    if shutil.which("shellcheck") is None:
        pytest.skip("bash -n passed; shellcheck is not installed")
    command = ["shellcheck", "--external-sources", "--source-path", str(ROOT), str(script)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_modules_say_their_job():
    # Catches: a file without a first line that says what it is for, and the drawer where such files end.
    python = [path for folder in ("ds_vit", "launch", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]
    silent = [str(path.relative_to(ROOT)) for path in python if not ast.get_docstring(ast.parse(path.read_text()))]
    assert not silent, f"no docstring: {silent}"
    assert "utils.py" not in {path.name for path in python}


RATE = re.compile(
    r"\b(images|captions|labels|samples|rows|tokens|bytes|bits|numbers|FLOPs|[GM]B|Gb/s|m?s|seconds|milliseconds|steps"
    r"|ranks|tasks|workers|processes|layers|memory|once|twice)\s+an? (second|image|sample|channel|pixel|token|element"
    r"|GPU|rank|replica|host|node|core|step|epoch|turn|batch|call|line)\b"
    r"(?! (has|holds|uses|is|computes|loads|needs|time)\b)"
)


def test_rates_have_per():
    # Catches: "images a second a GPU", which reads as one GPU at some time.
    assert RATE.search("1,200 images a second")
    assert not RATE.search("images per second, and the samples a step uses")
    files = [path for path in project_files() if path.suffix in (".py", ".md", ".yaml", ".sh")]
    texts = {path.relative_to(ROOT): path.read_text() for path in files if "tests" not in path.parts}
    texts.pop(Path("CHANGELOG.md"), None)
    found = [f"{name}: {match[0]}" for name, text in texts.items() for match in RATE.finditer(text)]
    assert not found


# Sentences that readers did not understand.
UNCLEAR = (
    *("going back, with gradients by then", "activations go while gradients come", "too large by the least"),
    *("at their least dimension", "The furthest above are", "that are not possible (", "fill no global batch"),
    *("has a twin that turns it off", "weights belong to their tokens", "can be taken apart into an embedding"),
)


def test_unclear_sentences_stay_away():
    # Catches: a sentence of this list in the package, a page or a message.
    texts = [
        path.read_text() for path in project_files() if path.suffix in (".py", ".md") and "tests" not in path.parts
    ]
    assert texts
    assert [said for said in UNCLEAR if any(said in re.sub(r"\s+", " ", text) for text in texts)] == []


def test_no_two_test_modules_of_one_name():
    # Catches: a second file of a name, which pytest finds on collecting all and not on running either alone.
    modules = Counter(path.name for path in (ROOT / "tests").rglob("*.py"))
    assert not [name for name, count in modules.items() if count > 1]
