"""launch/setup.sh and its callers, with stand-ins for python, uv and pytest: what they run, when, and what they say."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from project import ROOT

TOOLS = ("bash", "sh", "env", "dirname", "rm", "mkdir", "chmod", "cat", "ln", "touch", "grep")

# Makes an environment as uv would, and writes down what it was asked to install.
UV = """#!/bin/sh
echo "uv $*" >>"$LOG"
if [ "$1" = venv ]; then for last; do :; done; mkdir -p "$last/bin"; ln -s "$PYTHON" "$last/bin/python"; fi
[ "$1" != pip ] || exit "${PIP_EXIT:-0}"
"""


class Clone:
    """A clone of the launch scripts in a folder whose name has a space, and a PATH of its own."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "my clone"
        self.bin = folder / "bin"
        self.log = folder / "log"
        shutil.copytree(ROOT / "launch", self.root / "launch")
        shutil.copytree(ROOT / ".ci", self.root / ".ci")
        shutil.copy(ROOT / "pyproject.toml", self.root)
        self.bin.mkdir()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))

    def tool(self, name: str, script: str) -> None:
        """Put a script on the clone's PATH."""
        (self.bin / name).write_text(script)
        (self.bin / name).chmod(0o755)

    def run(self, *command: str, **environ: str) -> subprocess.CompletedProcess:
        """Run bash in the folder above the clone; nothing of this process's environment is there."""
        env = {"PATH": str(self.bin), "LOG": str(self.log), "PYTHON": sys.executable, **environ}
        return subprocess.run(
            ["bash", *command], cwd=self.root.parent, env=env, capture_output=True, text=True, timeout=60
        )

    def setup(self, *extras: str, **environ: str) -> subprocess.CompletedProcess:
        return self.run("my clone/launch/setup.sh", *extras, **environ)

    def calls(self) -> list[str]:
        """What uv was asked since the last call of this."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return lines


@pytest.fixture
def clone(tmp_path) -> Clone:
    return Clone(tmp_path)


@pytest.fixture
def uv_clone(clone) -> Clone:
    (clone.bin / "python3").symlink_to(sys.executable)
    clone.tool("uv", UV)
    return clone


def test_setup_installs_once_and_again_when_something_changed(uv_clone):
    # Catches: a second run that installs again, a path cut at its space, chatter when there is nothing to do; a new
    # dependency, or extras asked for later, that are not installed; a clone that never works again after the system's
    # python was replaced; a stamp after pip failed.
    clone = uv_clone
    failed = clone.setup(PIP_EXIT="1")
    assert failed.returncode == 1
    assert "the installation failed; the reason is above" in failed.stderr
    venv = f"{clone.root}/.venv"
    install = f"uv pip install --quiet --python {venv}/bin/python --editable {clone.root}"
    assert clone.calls() == [f"uv venv --quiet --python {clone.bin}/python3 {venv}", install]
    first = clone.setup()
    assert (first.returncode, clone.calls()) == (0, [install])
    assert [line.split()[1] for line in first.stderr.splitlines()] == ["installing"]
    again = clone.setup()
    assert (again.returncode, again.stdout, again.stderr, clone.calls()) == (0, "", "", [])
    clone.setup("test", "lint")
    assert [line.split("my clone")[-1] for line in clone.calls()] == ["[test,lint]"]
    for extras in ([], ["test"], ["lint"]):
        clone.setup(*extras)
    assert clone.calls() == []
    with (clone.root / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    clone.setup("test")
    assert [line.split("my clone")[-1] for line in clone.calls()] == ["[test]"]
    (clone.root / ".venv" / "bin" / "python").unlink()
    assert clone.setup().returncode == 0
    assert [line.split()[1] for line in clone.calls()] == ["venv", "pip"]


def test_an_extra_that_does_not_exist_is_refused(uv_clone):
    # Catches: pip's way, which warns and installs without it; and a list of extras that is not pyproject.toml's.
    done = uv_clone.setup("exports")
    assert (done.returncode, uv_clone.calls()) == (1, [])
    listed = done.stderr.strip().partition("there is no extra 'exports'; there are ")[2].split(", ")
    extras = (ROOT / "pyproject.toml").read_text().partition("[project.optional-dependencies]")[2].partition("\n[")[0]
    assert sorted(listed) == sorted(re.findall(r"^(\w+) = ", extras, re.MULTILINE))


# A python whose pip says what it collects, takes its time, and fails where it is told to.
SLOW_PIP = """#!/bin/sh
case "$*" in
*"pip install"*)
    echo "Collecting torch"
    echo "  Downloading torch-9.9.9.whl (999.0 MB)"
    touch "$WORKS"
    while [ -e "$WORKS" ]; do :; done
    [ -z "$PIP_FAILS" ] || echo "ERROR: No space left on device" >&2
    exit ${PIP_FAILS:-0} ;;
esac
"""


def slow_pip(clone: Clone, due: int) -> None:
    """A clone without uv whose .venv has that python, and whose seconds pass at once; `due` of them, then pip ends."""
    (clone.root / ".venv" / "bin").mkdir(parents=True)
    python = clone.root / ".venv" / "bin" / "python"
    python.write_text(SLOW_PIP)
    python.chmod(0o755)
    count = f'read -r at <"$LOG"; at=$((at + 1)); echo "$at" >"$LOG"; [ "$at" -lt {due} ] || rm -f "$WORKS"'
    began = 'while [ ! -e "$WORKS" ] && [ ! -e "$WORKS.seen" ]; do :; done; touch "$WORKS.seen"'
    clone.tool("sleep", f"#!/bin/sh\n{began}\n{count}\n")
    clone.log.write_text("0\n")


def test_setup_says_what_it_waits_for_and_shows_pips_own_reason(clone, tmp_path):
    # Catches: minutes of silence while pip gets torch, a line a second in a log; "the reason is above" with nothing
    # above it, or below a hundred lines of what went well.
    slow_pip(clone, 40)
    done = clone.setup(WORKS=str(tmp_path / "works"), PIP_FAILS="1")
    assert done.returncode == 1
    _, *told = done.stderr.splitlines()
    assert told == [
        *(f"setup: {at} s: Downloading torch-9.9.9.whl (999.0 MB)" for at in (10, 30)),
        "ERROR: No space left on device",
        "setup: the installation failed; the reason is above",
    ]


OLD = '[ "$1" != --version ] || echo Python 3.9.2\n[ "$1" = --version ]'
NO_ENSUREPIP = 'case "$2" in *ensurepip*) exit 1 ;; esac\nexec "$PYTHON" "$@"'


@pytest.mark.parametrize(
    ("python", "said"),
    [
        (OLD, "no Python 3.10 to 3.13 on PATH (python3 is Python 3.9.2); install one, or uv"),
        (NO_ENSUREPIP, "apt-get install python3-venv"),
    ],
)
def test_setup_without_a_python_that_will_do(clone, python, said):
    # Catches: a Python 3.9 that fails deep inside pip; Debian's python3 without python3-venv, which leaves half an
    # environment behind.
    clone.tool("python3", f"#!/bin/sh\n{python}\n")
    done = clone.setup()
    assert done.returncode == 1
    assert said in done.stderr
    assert not (clone.root / ".venv").exists()


def fake_venv(clone: Clone, python: str) -> None:
    """A finished .venv whose python is a script."""
    venv = clone.root / ".venv"
    (venv / "bin").mkdir(parents=True)
    (venv / "bin" / "python").write_text(python)
    (venv / "bin" / "python").chmod(0o755)
    for stamp in ("installed-ds-vit", "installed-ds-vit-test", "installed-ds-vit-lint"):
        (venv / stamp).write_text(f"{clone.root}\n{(clone.root / 'pyproject.toml').read_text()}")


# Answers the three questions of quickstart.sh, and shows what it would start; a run leaves the files in $LEAVES.
FAKE_PYTHON = r"""#!/bin/sh
case "$*" in
*device_count*) echo "$NUM_GPUS" ;;
*free_port*) echo 12345 ;;
"-c ") ;;
*) echo "${DS_ACCELERATOR:-auto}: $*" ;;
esac
case "$*" in
*launch/train.py*) for file in $LEAVES; do mkdir -p "$FOLDER" && touch "$FOLDER/$file"; done ;;
launch/held_out_digits.py*) mkdir "$2" && touch "$2/1.png" "$2/2.png" ;;
esac
"""


def test_quickstart_picks_the_machine_and_shows_its_command(clone):
    # Catches: a GPU left idle, flags that get lost, a printed command that is not what runs. The real quickstart
    # (test_launch.py) shows it without a GPU.
    fake_venv(clone, FAKE_PYTHON)
    done = clone.run("my clone/launch/quickstart.sh", "--epochs", "3", NUM_GPUS="8")
    assert done.returncode == 0, done.stderr
    place, shown, ran = done.stdout.splitlines()
    (output,) = re.findall(r"--output (runs/\d{8}-\d{6}-digits) ", shown)
    command = (
        ".venv/bin/deepspeed --quiet --num_gpus 8 --master_port 12345 launch/train.py"
        " --deepspeed_config ds_configs/zero1_bf16.json --recipe launch/recipes/digits.yaml --batch-size 8"
        f" --output {output} --epochs 3"
    )
    assert place == f"quickstart: in {clone.root}"
    assert shown == f"quickstart: {command} "
    assert ran == f"auto: {command}"


def test_quickstart_predicts_where_there_are_classes(clone):
    # Catches: a folder of one's own that is not found, a failure after training another task.
    fake_venv(clone, FAKE_PYTHON)
    line = ["my clone/launch/quickstart.sh", "--output=a/run"]
    for files, predicts in (("classes.json model.safetensors", True), ("model.safetensors", False)):
        done = clone.run(*line, FOLDER="a/run", NUM_GPUS="0", LEAVES=files)
        assert done.returncode == 0, done.stderr
        assert ("ds-vit predict a/run a/run/held-out/1.png a/run/held-out/2.png" in done.stdout) == predicts
        shutil.rmtree(clone.root / "a")


def test_test_sh_passes_its_arguments_on(clone):
    # Catches: `-m 'not slow'` torn into words.
    fake_venv(clone, '#!/bin/sh\n[ "$1" = -m ] || exit 0\nshift\nfor word; do echo "<$word>"; done\n')
    done = clone.run("my clone/launch/test.sh", "-m", "not slow")
    words = [word.strip("<>") for word in done.stdout.splitlines()]
    assert words[0] == "pytest"
    assert words[-2:] == ["-m", "not slow"]


WORDS = ("--restarts", "2", "launch/train.py", "--output", "a 'b' $HOME; touch pwned")
SHOW_WORDS = '#!/bin/sh\nfor word; do echo "<$word>"; done\nexit 75\n'


@pytest.mark.parametrize(
    ("script", "kind"),
    [("local.sh", "local"), ("run_hostfile.sh", "hostfile"), ("mpi.sh", "mpi"), ("slurm.sbatch", "slurm")],
)
def test_a_launcher_passes_everything_on(clone, script, kind):
    # Catches: words torn at blanks or expanded, a clone in a path with a blank, an exit code that gets lost.
    fake_venv(clone, SHOW_WORDS)
    environ = {"SLURM_SUBMIT_DIR": str(clone.root)} if kind == "slurm" else {}
    done = clone.run(f"my clone/launch/{script}", *WORDS, **environ)
    assert done.returncode == 75, done.stderr
    assert done.stdout.splitlines() == [f"<{word}>" for word in (f"{clone.root}/launch/run.py", kind, *WORDS)]
    assert not list(clone.root.parent.rglob("pwned"))


def test_a_launcher_takes_another_python(clone):
    # Catches: DS_VIT_PYTHON without effect; a clone without .venv that fails with "No such file".
    clone.tool("mine", '#!/bin/sh\necho "mine $2"\n')
    clone.tool("python3", '#!/bin/sh\necho "system $2"\n')
    assert clone.run("my clone/launch/local.sh", DS_VIT_PYTHON=str(clone.bin / "mine")).stdout == "mine local\n"
    assert clone.run("my clone/launch/local.sh").stdout == "system local\n"
    (clone.bin / "python3").unlink()
    done = clone.run("my clone/launch/local.sh")
    assert done.returncode == 2
    assert "bash launch/setup.sh makes it" in done.stderr


def test_slurm_and_pbs_outside_of_a_clone_or_a_job_say_so(clone):
    # Catches: an error that names Slurm's spool folder, or an unset variable; a --help that only a job may read.
    fake_venv(clone, '#!/bin/sh\necho "$2 $3"\n')
    assert clone.run("my clone/launch/slurm.sbatch", "--help").stdout == "slurm --help\n"
    done = clone.run("my clone/launch/slurm.sbatch", SLURM_SUBMIT_DIR=str(clone.bin))
    assert done.returncode == 2
    assert f"no clone in {clone.bin}: call sbatch there, or set DS_VIT_ROOT" in done.stderr
    done = clone.run("my clone/launch/pbs.sh")
    assert done.returncode != 0
    assert "not in a PBS job" in done.stderr


@pytest.mark.parametrize(
    ("pytest_exit", "ruff_exit", "mypy_exit", "code"),
    [(0, 0, 0, 0), (1, 0, 0, 1), (5, 0, 0, 1), (0, 1, 0, 1), (0, 0, 1, 1)],
)
def test_ci_run_fails_when_anything_does(clone, pytest_exit, ruff_exit, mypy_exit, code):
    # Catches: a CI that is green although lint, types or a test failed, or none was run; a stop where apt cannot work.
    fake_venv(clone, f'#!/bin/sh\n[ "$2" != pytest ] || {{ echo "= 3 passed ="; exit {pytest_exit}; }}\n')
    for name, exit_code in (("ruff", ruff_exit), ("mypy", mypy_exit)):
        tool = clone.root / ".venv" / "bin" / name
        tool.write_text(f"#!/bin/sh\nexit {exit_code}\n")
        tool.chmod(0o755)
    done = clone.run("my clone/.ci/run")
    assert done.returncode == code
    if ruff_exit == mypy_exit == 0:
        assert done.stdout.splitlines()[-1] == "= 3 passed ="
    assert ("pytest found no test to run" in done.stderr) == (pytest_exit == 5)
    assert "could not install" in done.stderr


def test_train_py_runs_this_clone(tmp_path):
    # Catches: launch/train.py that uses another clone's package, or none, when this one is not installed.
    package = tmp_path / "ds_vit"
    (package / "fault_tolerance").mkdir(parents=True)
    for folder in (package, package / "fault_tolerance"):
        (folder / "__init__.py").touch()
    (package / "fault_tolerance" / "signals.py").write_text("def end_at_signals(program):\n    pass\n")
    (package / "train.py").write_text("def main():\n    print('this clone')\n    return 7\n")
    (tmp_path / "launch").mkdir()
    shutil.copy(ROOT / "launch" / "train.py", tmp_path / "launch")
    command = [sys.executable, str(tmp_path / "launch" / "train.py")]
    done = subprocess.run(command, cwd=os.path.sep, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (7, "this clone\n")


@pytest.mark.parametrize(
    ("driver", "said"),
    [("580.65.06", None), ("535.183.01", "older than 580.*PyTorch's index for cu126"), ("470.1", "older than 525")],
)
def test_a_driver_that_is_too_old_for_torch(uv_clone, driver, said):
    # Catches: gigabytes of a torch that finds no GPU, without a word; a warning although another index is given.
    uv_clone.tool("nvidia-smi", f"#!/bin/sh\necho {driver}\necho {driver}\n")
    done = uv_clone.setup()
    assert done.returncode == 0
    assert bool(re.search(said or "warning", done.stderr.replace("\n", " "))) == (said is not None)
    shutil.rmtree(uv_clone.root / ".venv")
    assert "warning" not in uv_clone.setup(PIP_EXTRA_INDEX_URL="x").stderr


@pytest.mark.slow
def test_a_torch_outside_is_kept(clone):
    # Catches: a second torch next to the one that a module or container has built for the machine.
    clone.tool(
        "python3",
        f"""#!/bin/sh
case "$*" in
*find_spec*) echo True ;;
"-m venv"*) echo "python $*" >>"$LOG"; for last; do :; done; mkdir -p "$last/bin"; ln -s "$PYTHON" "$last/bin/python"
    echo "include-system-site-packages = true" >"$last/pyvenv.cfg" ;;
*) exec {sys.executable} "$@" ;;
esac
""",
    )
    clone.tool("uv", UV)
    done = clone.setup(PYTHONPATH="")
    assert f"keeping the torch that {clone.bin}/python3 provides" in done.stderr
    assert clone.calls() == [f"python -m venv --system-site-packages {clone.root}/.venv"], "and uv was not asked"


@pytest.mark.parametrize("name", ["Dockerfile", "apptainer.def"])
def test_container_files(name):
    # Catches: a file that is copied and does not exist, an instruction of no such name, another pair of contents.
    lines = (ROOT / "launch" / name).read_text().replace("\\\n", " ").splitlines()
    lines = [line for line in lines if line.strip() and not line.startswith("#")]
    if name == "Dockerfile":
        assert {line.split()[0] for line in lines} == {"FROM", "ARG", "RUN", "COPY", "WORKDIR", "CMD"}
        copied = [word for line in lines if line.startswith("COPY") for word in line.split()[1:-1]]
    else:
        assert [line for line in lines if line.startswith("%")] == ["%files", "%post", "%runscript"]
        files = lines[lines.index("%files") + 1 : lines.index("%post")]
        copied = [line.split()[0] for line in files]
        assert all(line.split()[1] == f"/opt/ds_vit/{line.split()[0]}" for line in files)
    assert {"pyproject.toml", "setup.py", "ds_vit", "ds_configs", "launch"} <= set(copied)
    assert all((ROOT / word).exists() for word in copied)
    assert sum("/opt/ds_vit[jpeg]" in line for line in lines) == 1
