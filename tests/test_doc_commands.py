"""Every command and link of README and docs: flags and files that exist, and which test runs it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from project import ROOT

from ds_vit import cli
from ds_vit.config import build_parser
from ds_vit.launching.ports import free_port

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    ROOT / "ds_configs/README.md",
]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
PROGRAM = re.compile(
    r"^(?:    )?((?:[A-Z_]+=\S+ )*(?:\.venv/bin/)?(?:deepspeed|torchrun|python|bash|ds-vit|mpirun|srun) .*)$",
    re.MULTILINE,
)

# Page → the test that runs its commands, or why none does.
HOW = {
    "README.md": "test_what_stops_goes_on below; launch/parity.py: tests/tools/test_parity_tool.py; the others: GPUs",
    "CONTRIBUTING.md": "set-up and test runs: what .ci/run does",
    "docs/checkpoints.md": "tests/training/test_resume.py, tests/launching/test_launch.py: the same moves, smaller",
    "docs/configuration.md": "tests/training/test_resume.py, tests/training/test_dry_run.py: the same on other runs",
    "docs/clusters.md": "needs-cluster: tests/launching/test_cluster_*.py on hosts made of network namespaces",
    "docs/data.md": "tests/data/test_shards.py, tests/tools/test_make_shards.py, test_bench_data.py: smaller",
    "docs/doctor.md": "tests/tools/test_doctor.py, tests/tools/test_cluster_doctor.py",
    "docs/examples.md": "tests/test_examples_page.py, shorter; tests/tools/test_parity_tool.py",
    "docs/finetune.md": "tests/test_finetune_page.py, to the letter",
    "docs/launching.md": "what .ci/run does; tests/launching/test_launching.py, tests/test_package.py",
    "docs/numerics.md": "tests/monitoring/test_gradient_picture.py; the other takes minutes",
    "docs/parallelism.md": "tests/tools/test_parity_tool.py",
    "docs/performance.md": "tests/tools/test_bench.py, test_benchmark_scripts.py; large models and GPUs",
    "docs/planning.md": "tests/tools/test_plan.py",
    "docs/quickstart.md": "tests/launching/test_launch_scripts.py",
    "docs/tasks.md": "tests/tasks/test_mae.py; launch/mae_digits.sh takes minutes",
    "docs/zero.md": "minutes of measuring: tests/training/test_promise.py trains in each stage",
    "docs/benchmarks/checkpoint_cost.md": "minutes of measuring: tests/tools/test_benchmark_scripts.py runs it short",
    "docs/benchmarks/cut_cpu.md": "minutes of measuring: tests/tools/test_benchmark_scripts.py asks for its help",
    "docs/benchmarks/loader.md": "minutes of measuring: tests/tools/test_benchmark_scripts.py asks for its help",
    "docs/benchmarks/optimizer_step.md": "minutes of measuring: tests/tools/test_benchmark_scripts.py runs it short",
    "docs/benchmarks/step_cpu.md": "minutes of measuring: tests/tools/test_bench.py",
    "docs/report.md": "tests/monitoring/test_report.py",
    "docs/troubleshooting.md": "tests/tools/test_doctor.py, tests/training/test_dry_run.py",
    "docs/from_deepspeed.md": "tests/training/test_dry_run.py",
    "docs/from_timm.md": "the same commands as docs/finetune.md",
}


def commands(page):
    """The commands of a page, each on one line, without what a # says behind them."""
    text = re.sub(r"\\\n\s*", " ", page.read_text())
    found = [re.split(r"\s+#\s", line)[0].strip() for line in PROGRAM.findall(text)]
    return [command for command in found if ": error: " not in command]


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
    assert {command: wrong for command in commands(page) if (wrong := wrong_in(command))} == {}


def test_the_rule_can_fail(tmp_path):
    # Catches: a pattern that finds no command.
    page = tmp_path / "page.md"
    page.write_text("    ds-vit train --epocs 3 \\\n        --deepspeed_config ds_configs/nowhere.json  # so\n")
    [command] = commands(page)
    assert wrong_in(command) == ["--epocs", "ds_configs/nowhere.json"]


def test_every_page_with_commands_says_how_they_are_run():
    # Catches: a new page whose commands nobody has tried; a row for one that is gone, a test that is.
    with_commands = {name for name, page in zip(NAMES, PAGES, strict=True) if commands(page)}
    assert with_commands - set(HOW) == set()
    assert set(HOW) - set(NAMES) == set()
    named = {found for how in HOW.values() for found in re.findall(r"tests/[\w/]+\.py", how)}
    assert [name for name in named if not (ROOT / name).is_file()] == []


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
