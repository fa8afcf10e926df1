"""With all defaults on: what is saved, what Ctrl-C leaves, and what a person reads of it."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import shlex
import signal
import statistics
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
from curves import read_rows, train_in, train_rows
from interrupting import TINY, train_with
from project import ON_CPU, ROOT, wait_until
from runs import ONE_BLOCK, run_quietly
from safetensors import safe_open

from ds_vit.checkpoint.folder import checkpoints, marked, step_of
from ds_vit.fault_tolerance import exit_codes
from ds_vit.fault_tolerance.errors import UserError

EPOCH = 11  # steps, of digits' 1,442 images
STEPS = 3 * EPOCH
CONFIG = ("--deepspeed_config", ROOT / "ds_configs" / "cpu_zero1_fp32.json")
WORDS = [*TINY, *CONFIG, "--epochs", 3, "--checkpoint-interval", "epoch", "--keep-checkpoints", 0]
WORDS += ["--grad-stats-interval", 5]


def words(*argv: object) -> list[str]:
    return [str(word) for word in [*WORDS, *argv]]


def tensors(path: Path) -> tuple[dict[str, str], dict[str, bytes]]:
    """The header's words and the bytes of each tensor."""
    with safe_open(path, framework="np") as file:
        return file.metadata(), {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118


@pytest.mark.slow
def test_ctrl_c_and_the_command_that_it_ends_with(ranks, tmp_path):
    """A step that is not saved; a command that does not go on, or with another run; figures of an epoch that forget
    what came before the interruption; a best that is none, or that nobody is told of."""
    output = tmp_path / "run"
    argv = words("-b", 128, "--output", output)
    [(code, said, err)] = ranks.run(1, train_with, argv, str(output), 0, signal.SIGINT, {"step": 13, "delay": 0.0})
    assert code == exit_codes.INTERRUPTED, err
    assert "Ctrl-C: this step is finished and saved; again to end at once" in err
    step = int(marked(output / "checkpoints", "latest").removeprefix("step-"))
    assert EPOCH < step < STEPS
    saved = sorted({EPOCH, 2 * EPOCH, STEPS, step})
    names = [f"step-{s:08d}" for s in reversed(saved) if s <= step]
    assert [path.name for path in checkpoints(output / "checkpoints")] == names
    assert f"at {step} of {STEPS} by Ctrl-C; saved in" in said
    command = f"--recipe {output}/config.yaml --output {output} --resume auto".replace(" ", "")
    assert command in "".join(said.replace("│", "").split()).partition("ifitendsearly")[2], "a table folds long lines"
    sentence = said.splitlines()[-1]
    assert sentence.startswith(f"interrupted at {step} of {STEPS}; resume with: python ")
    command = shlex.split(sentence)
    [(code, said, err)] = ranks.run(1, run_quietly, command[command.index("--recipe") :])
    assert code == 0, err
    rows = read_rows(output)
    assert [row["step"] for row in rows if row["kind"] == "checkpoint"] == saved
    # Time and epoch in every row, and the mean loss of each epoch so far.
    assert {row["kind"] for row in rows} == {"train", "eval", "eval_ema", "gradients", "checkpoint"}
    assert [row["wall_seconds"] for row in rows] == sorted(row["wall_seconds"] for row in rows)
    assert all(row["epoch"] == (row["step"] - 1) // EPOCH for row in rows)
    trained = train_rows(rows)
    assert len(trained) == STEPS
    for row in trained:
        losses = [r["loss"] for r in trained if r["epoch"] == row["epoch"] and r["step"] <= row["step"]]
        assert row["epoch_loss"] == pytest.approx(statistics.fmean(losses), rel=1e-6)
    best = marked(output / "checkpoints", "best")
    header, values = tensors(output / "checkpoints" / best / "model.safetensors")
    header["step"] = str(step_of(best))
    assert tensors(output / "best.safetensors") == (header, values)
    told = " ".join(said.replace("│", " ").split())  # a table folds long lines
    assert "model.safetensors, best.safetensors, " in told
    assert f"best {best})" in told


TWO_EPOCHS = words("-b", 64, "--max-steps", 2 * EPOCH)


@pytest.fixture(scope="module")
def whole(ranks, tmp_path_factory):
    """The folder of two epochs that nothing interrupts."""
    output = tmp_path_factory.mktemp("whole") / "run"
    train_in(ranks, 2, [*TWO_EPOCHS, "--output", output])
    return output


@pytest.mark.slow
@pytest.mark.parametrize("is_evaluated", [False, True])
def test_an_epoch_is_saved_before_it_is_evaluated(ranks, tmp_path, whole, is_evaluated):
    """An epoch that is lost to an error of its evaluation; an evaluation that a resumed run leaves out, repeats though
    its figures are known, or forgets where it says which step was the best."""
    output = tmp_path / "run"
    if is_evaluated:
        train_in(ranks, 2, [*TWO_EPOCHS, "--max-steps", EPOCH, "--output", output])
    else:
        broken = functools.partial(
            mock.patch, "ds_vit.training.evaluation.Evaluation.run", side_effect=UserError("planted")
        )
        for code, _, err in ranks.run(2, run_quietly, [*TWO_EPOCHS, "--output", str(output)], broken):
            assert (code, "planted" in err) == (2, True)
    assert marked(output / "checkpoints", "latest") == f"step-{EPOCH:08d}"
    assert (output / "checkpoints" / f"step-{EPOCH:08d}" / "evaluation.json").exists() == is_evaluated
    train_in(ranks, 2, [*TWO_EPOCHS, "--output", output, "--resume", "auto"])

    def rows(folder):
        keys = ("kind", "step", "loss", "top1")
        return [tuple(row.get(key) for key in keys) for row in read_rows(folder) if row["kind"] != "checkpoint"]

    assert rows(output) == rows(whole)
    for name in ("best", f"step-{2 * EPOCH:08d}/evaluation.json"):
        one, two = ((folder / "checkpoints" / name).read_text() for folder in (output, whole))
        assert one == two


def test_without_checkpoints_the_table_says_what_that_costs(ranks, tmp_path):
    """A best of nothing, a checkpoint that nobody asked for, and a switch whose price nobody is told."""
    output = tmp_path / "run"
    argv = words("-b", 128, "--output", output, "--max-steps", 1, "--checkpoint-interval", 0)
    [(code, said, err)] = ranks.run(1, run_quietly, argv)
    assert code == 0, err
    assert "what kills it costs all" in said
    assert not (output / "checkpoints").exists()
    assert not (output / "best.safetensors").exists()


HANGING = """
import os, signal, sys, time
from ds_vit.fault_tolerance.signals import Signals
signal.signal(signal.SIGINT, signal.default_int_handler)
with Signals().installed() as signals:
    signals.ranks_have_met = True
    for pause in (0.1, 0.1, 1.2):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(pause)
    print("still there", signals.received, flush=True)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)
"""


def test_a_second_ctrl_c_ends_at_once():
    """A run that hangs and cannot be ended; one Ctrl-C that its launcher passes on, taken for two."""
    done = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=50)
    assert done.returncode == exit_codes.CTRL_C
    assert done.stdout.split() == ["still", "there", "2"]
    assert [line.split(":")[1] for line in done.stderr.splitlines()] == [" Ctrl-C", " Ctrl-C again"]


@pytest.mark.slow
def test_ctrl_c_under_deepspeeds_launcher(tmp_path):
    """Ranks that the terminal and the launcher both signal; a command to resume with that is not the launcher's."""
    output = tmp_path / "run"
    argv = [str(Path(sys.executable).with_name("deepspeed")), "--num_accelerators", "2"]
    argv += [str(ROOT / "launch" / "train.py"), *words("-b", 4, "--output", output)]
    file = tmp_path / "said"
    with file.open("w") as output_file:
        launcher = subprocess.Popen(
            argv,
            env=os.environ | ON_CPU,
            stdout=output_file,
            stderr=output_file,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # as a terminal starts it
        )
    try:
        wait_until(lambda: "\nstep 2/" in file.read_text(), file.read_text)
        os.killpg(launcher.pid, signal.SIGINT)  # as a terminal does
        assert launcher.wait(60) != 0
        wait_until(lambda: "\ninterrupted at" in file.read_text(), file.read_text)
    finally:
        if launcher.poll() is None:
            os.killpg(launcher.pid, signal.SIGKILL)
    step = int(marked(output / "checkpoints", "latest").removeprefix("step-"))
    (last,) = [line for line in file.read_text().splitlines() if line.startswith("interrupted at")]
    assert last.startswith(f"interrupted at {step} of {3 * 180}; resume with: deepspeed --num_accelerators 2 ")
    assert last.endswith(f"--recipe {output}/config.yaml --output {output} --resume auto")


def train_without_its_folder(argv, folder):
    """On a rank: the exit code of a run whose folder is removed after the second step, and what it printed."""
    import shutil

    from ds_vit.monitoring.metrics import Reporter
    from ds_vit.train import main

    write = Reporter._write

    def remove_then_write(reporter, row):
        write(reporter, row)
        if row["kind"] == "train" and row["step"] == 2:
            shutil.rmtree(folder)

    said = io.StringIO()
    with mock.patch.object(Reporter, "_write", remove_then_write), contextlib.redirect_stdout(said):
        return main(argv), said.getvalue()


@pytest.mark.slow
def test_a_folder_that_is_removed_in_mid_run(ranks, tmp_path):
    # Catches: code 0 and "completed" for a run whose metrics and configuration are gone.
    argv = [*ONE_BLOCK, *CONFIG, "--max-steps", 4, "--log-interval", 1, "--checkpoint-interval", 0]
    argv += ["--output", tmp_path / "run"]
    [(code, said)] = ranks.run(1, train_without_its_folder, [str(word) for word in argv], tmp_path / "run")
    assert code == 74
    assert "metrics.jsonl: the folder was removed while the run wrote to it" in said
