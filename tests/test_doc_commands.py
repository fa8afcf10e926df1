"""Every command and link of README and docs: flags and files that exist, a row of tests/doc_commands.yaml."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from doc_commands import COMMANDS, PAGES, ROWS, commands, with_rows
from project import ROOT

from ds_vit import cli
from ds_vit.config import build_parser
from ds_vit.launching.ports import free_port

NAMES = [str(page.relative_to(ROOT)) for page in PAGES]


def flags_of_training():
    """Every spelling that launch/train.py knows."""
    return set(build_parser()._option_string_actions)


def known_flags(words):
    """The flags of the program that a command starts; None for one that is not ours."""
    for at, word in enumerate(words):
        if word.endswith("ds-vit") or word == "ds_vit.cli":
            return set(cli.build_parser().known_flags()) | flags_of_training() | OWN, at
        if re.search(r"launch/(train|parity)\.py$", word):
            return flags_of_training() | OWN, at
    return None, 0


# Of programs that read their command line themselves.
OWN = {
    "--layouts",
    "--reference",
    "--steps",
    "--rtol",
    "--top-k",
    "--to",
    "--output",
    "--knn",
    "--linear-probe",
    "--ema",
}


def wrong_in(command):
    """The flags of a command that its program does not know, and the files that are not there."""
    try:
        words = shlex.split(command.replace("$flags", ""))
    except ValueError:
        words = command.split()
    known, start = known_flags(words)
    flags = {word.split("=")[0].strip("[]") for word in words[start:] if word.strip("[").startswith("--")}
    files = [word for word in words if re.match(r"(launch|ds_configs|docs|tests)/[\w./-]+\.\w+$", word)]
    return sorted(flags - known if known else []) + [word for word in files if not (ROOT / word).exists()]


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_flags_and_files_of_commands_exist(page):
    # Catches: a flag that has another name by now, a file that has moved.
    assert {one.text: wrong for one in commands(page) if (wrong := wrong_in(one.text))} == {}


def test_the_rule_can_fail(tmp_path):
    # Catches: a pattern that finds no command.
    page = tmp_path / "page.md"
    page.write_text("    ds-vit train --epocs 3 \\\n        --deepspeed_config ds_configs/nowhere.json  # so\n")
    [command] = commands(page)
    assert wrong_in(command.text) == ["--epocs", "ds_configs/nowhere.json"]


def test_every_command_has_its_row(tmp_path):
    # Catches: a command that nobody has tried; a row of a page or a test that is gone.
    assert set(ROWS) - {command.page for command in COMMANDS} == set()
    named = {found for command in COMMANDS for found in re.findall(r"tests/[\w/]+\.py", command.small)}
    assert [name for name in named if not (ROOT / name).is_file()] == []
    page = tmp_path / "page.md"
    page.write_text("    ds-vit doctor\n\n```bash\nds-vit report runs/first\n```\n")
    for rows in ([], [{"doctor": {"quick": ""}}], [{"doctor": {"quick": ""}}, {"compare": {"quick": ""}}]):
        with pytest.raises(ValueError, match=r"zip\(\)|is the row of: ds-vit report"):
            list(with_rows(commands(page), rows))


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_somewhere(page):
    # Catches: a page that was renamed, a heading that was reworded.
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, heading = link.partition("#")
        there = (page.parent / path) if path else page
        if not there.exists() or (heading and heading not in anchors(there)):
            wrong.append(link)
    assert wrong == []


def anchors(page: Path) -> set[str]:
    """The names that a page's headings have in links."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.slow
def test_what_stops_goes_on(tmp_path):
    # Catches: README's "stop anywhere, go on anywhere" that ends in another line than it says.
    page = (ROOT / "README.md").read_text()
    block = re.search(r'(    flags="[^\n]*--output runs/stopped"\n.*?)\n\n', page, re.DOTALL)[1]
    script = re.sub(
        r"\bdeepspeed --quiet", f"{Path(sys.executable).parent}/deepspeed --quiet --master_port {free_port()}", block
    )
    for name in ("launch", "ds_configs"):
        (tmp_path / name).symlink_to(ROOT / name)
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(["bash", "-e", "-c", script], cwd=tmp_path, env=environ, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [loss] = re.findall(r"step 50/50  epoch 2  loss ([\d.]+)", done.stdout)
    [promised] = set(re.findall(r"step 50/50\s+epoch 2\s+loss\s+([\d.]+)", page))
    assert float(loss) == pytest.approx(float(promised), rel=1e-4)
