"""A task from outside the package on the command line and in a program: its flag, its record in a run, and errors."""

import hashlib
import json
import os
import re
import shutil
from typing import ClassVar
from unittest import mock

import pytest
import torch
import yaml
from curves import read_rows
from runs import DIGITS, run_quietly
from vits import small_spec, timm_model

from ds_vit import cli
from ds_vit.checkpoint.tensors import save_weights
from ds_vit.config.flag import FREE, Scope, Settings, flag
from ds_vit.config.outside import pass_class
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.models.zoo import create_model
from ds_vit.tasks.classification.task import Classification
from ds_vit.tasks.exports import Format
from ds_vit.weights.export import formats
from ds_vit.weights.initial_checkpoint import InitialCheckpoint

SOURCE = """
from ds_vit.config.flag import Settings, flag
from ds_vit.tasks.classification.task import Classification
from ds_vit.tasks.metrics import Figure


class PullSettings(Settings, section="loss"):
    pull: float = flag(0.5, "weight of the squares of the logits")


class Pulled(Classification):
    settings = (*Classification.settings, PullSettings)

    def loss(self, tp):
        of_labels, pull = super().loss(tp), self.config.pull
        return lambda logits, batch: of_labels(logits, batch) + pull * logits.float().square().mean()


class Lost(Classification):
    figures = (Figure("lost", "a figure that nothing computes"),)
"""
BROKEN = {
    "missing.py": "import nothing_there\n",
    "typo.py": "def loss(:\n",
    "late.py": "x = 1\nraise RuntimeError('no table\\nat all')\n",
    "wrong.py": """
from ds_vit.config.flag import Settings, flag
from ds_vit.tasks.classification.task import Classification
from ds_vit.tasks.task import Task

class Taken(Classification):
    settings = (type("S", (Settings,), {"__annotations__": {"lr": float}, "lr": flag(0.1, "x")}),)

class Keyed(Classification):
    settings = (type("S", (Settings,), {"__annotations__": {"own": float}, "own": flag(0.1, "x", key="lr")}),)

class Sectioned(Classification):
    settings = (type("S", (Settings,), {"__annotations__": {"own": float}, "own": flag(0.1, "x", section="los")}),)

class Single(Classification):
    settings = Settings

class Half(Task):
    pass
""",
}
MODEL = ("--model-kwargs", "patch_size=8", "embed_dim=24", "depth=1", "num_heads=2")
WORDS = (
    *(*DIGITS, *MODEL, "--train-split", "train[:10%]", "-b", 8, "--epochs", 1, "--stall-seconds", 0),
    *("--checkpoint-interval", 2, "--log-interval", 1, "--deepspeed_config", "ds_configs/cpu_zero1_fp32.json"),
)
PULLED = (*WORDS, "--task", "pulled:Pulled", "--pull", 3)


def command(folder, *words):
    """On a rank: `ds-vit` started in a folder; its exit code, stdout and stderr."""

    def main(argv):
        try:
            return cli.main(argv)
        except SystemExit as end:  # of --help
            return end.code

    os.chdir(folder)
    return run_quietly(words, main=main)


def commands(folder, lines):
    """On a rank: several commands, one after the other."""
    return [command(folder, *words) for words in lines]


def last_line(err):
    """The error among the lines of stderr."""
    [line] = [line for line in err.splitlines() if " error: " in line]
    return line.partition(" error: ")[2]


@pytest.fixture(scope="module")
def folder(ranks, tmp_path_factory):
    """The folder of the task's module and of its run, on 2 ranks, interrupted after 4 of 8 steps."""
    folder = tmp_path_factory.mktemp("outside")
    for name, text in {"pulled.py": SOURCE, **BROKEN}.items():
        (folder / name).write_text(text)
    shutil.copy("docs/images/curves.svg", folder / "none.svg")
    done = ranks.run(2, command, folder, "train", *PULLED, "--max-steps", 4, "--output", "run")
    assert [code for code, *_ in done] == [0, 0], done
    return folder


def test_its_flag_is_in_the_help_and_decides_the_loss(ranks, folder):
    # Catches: a list of flags that is made before the task is known; a flag that does not reach the task.
    lines = [
        ("train", "--help-all", "--task", "pulled:Pulled"),
        ("train", "--task=pulled:Pulled", "-h"),
        ("train", *PULLED[:-2], "--pul", 3),
        ("train", *PULLED[:-1], "heavy"),
        ("train", *PULLED, "--text-width", 8),
        ("train", *WORDS, "--pull", 3),
        ("train", *PULLED, "--kd-model-name", "vit_tiny_patch16_224"),
        ("train", *WORDS, "--task", "pulled:Lost", "--max-steps", 1, "--output", "lost"),
        ("train", *PULLED[:-1], 0, "--max-steps", 1, "--output", "without"),
    ]
    [(*whole, short, slip, typed, other, unknown, taught, lost, light)] = ranks.run(1, commands, folder, lines)
    assert "--pull PULL" in whole[0][1]
    assert "weight of the squares of the logits [0.5]" in " ".join(whole[0][1].split())
    assert re.search(r"loss +--.*--pull", " ".join(short[1].split()))
    assert last_line(slip[2]) == "there is no flag --pul; the nearest is --pull"
    assert last_line(typed[2]) == "--pull takes a number, not 'heavy'"
    assert (
        last_line(other[2]) == "--text-width has no effect with --task pulled:Pulled; it is of --task clip and siglip"
    )
    assert last_line(unknown[2]).startswith("there is no flag --pull")
    assert last_line(taught[2]).endswith("takes no teacher: derive it from ds_vit.tasks.distillation.task.Distillation")
    assert last_line(lost[2]) == "--task pulled:Lost: its metrics compute top1, top5, loss, images, and not 'lost'"
    assert light[0] == 0
    losses = [read_rows(folder / run)[0]["loss"] for run in ("run", "without")]
    assert losses[0] > losses[1] + 1e-3


def test_a_run_records_the_class_and_works_where_it_is_found(ranks, folder):
    # Catches: a tool that knows only the flags or the tasks of the package; a resume that forgets the task's flags.
    config = yaml.safe_load((folder / "run" / "config.yaml").read_text())
    found = hashlib.sha256((folder / "pulled.py").read_bytes()).hexdigest()
    assert (config["task"], config["pull"]) == ("pulled:Pulled", 3.0)
    assert config["task_source"] == f"{folder / 'pulled.py'} sha256:{found}"
    shutil.copytree(folder / "run", folder / "again")
    lines = [
        ("train", *PULLED[:-1], 4, "--output", "again", "--resume", "auto"),
        ("train", "--recipe", "again/config.yaml", "--max-steps", 8, "--output", "again", "--resume", "auto"),
        ("eval", "run", "--pull", 1),
        ("predict", "run", "none.svg"),
        ("export", "run", "--to", "timm", "--output", "exported"),
        ("plan", "--recipe", "run/config.yaml", "--gpus", 2, "--gpu", "h100", "--tp", 2),
        ("report", "run"),
        ("bench", "step", *PULLED, "--turns", 1, "--steps", 1, "--json"),
        ("train", "--recipe", "run/config.yaml", "--task", "classification", "--output", "other"),
    ]
    [(other, resumed, *tools, elsewhere)] = ranks.run(1, commands, folder, lines)
    assert "--pull is 3.0 there and 4.0 here" in last_line(other[2])
    assert resumed[0] == 0, resumed
    assert [row["step"] for row in read_rows(folder / "again") if row["kind"] == "train"] == [*range(1, 9)]
    assert [code for code, *_ in tools] == [0, 65, 0, 0, 0, 0], tools  # no image among the files
    assert "has changed" not in "".join(out + err for _, out, err in (resumed, *tools))
    assert json.loads(tools[-1][1].splitlines()[-1])["peers"] == {}
    assert last_line(elsewhere[2]) == 'run/config.yaml: "pull" is a flag of --task pulled:Pulled only; drop it'


def test_evaluation_takes_the_run_s_value_of_a_flag_that_may_change():
    # Catches: a metric that is computed with a flag's default.
    kind = type("S", (Settings,), {"__annotations__": {"own": float}, "own": flag(0.1, "x", FREE)})
    assert [kind.names_with(scope) for scope in (Scope.FREE, Scope.RECORDED, Scope.WEIGHTS)] == [("own",), ("own",), ()]


@pytest.mark.slow
def test_another_source_is_one_line(ranks, folder, tmp_path):
    # Catches: a run that continues with another loss unnoticed; a line for each place that has the hash.
    for name in ("run", "pulled.py"):
        (shutil.copytree if (folder / name).is_dir() else shutil.copy)(folder / name, tmp_path / name)
    (tmp_path / "pulled.py").write_text(SOURCE + "# changed\n")
    lines = [
        ("eval", "run"),
        ("export", "run", "--to", "timm", "--output", "exported"),
        ("train", "--recipe", "run/config.yaml", "--max-steps", 5, "--output", "run", "--resume", "auto"),
        ("train", *PULLED, "--max-steps", 6, "--output", "run", "--resume", "auto"),
    ]
    [done] = ranks.run(1, commands, tmp_path, lines)
    for code, out, err in done[:-1]:
        assert code == 0, err
        assert (out + err).count("WARNING: --task pulled:Pulled") == 1, out + err
    assert "has changed" not in done[-1][1], "the run before has recorded the new one"


def test_where_the_module_is_missing_it_is_named(ranks, folder, tmp_path):
    # Catches: a traceback, or a run that is read as one of classification.
    run = folder / "run"
    lines = [
        ("train", "--recipe", run / "config.yaml", "--output", run, "--resume", "auto"),
        ("eval", run),
        ("predict", run, "none.svg"),
        ("export", run, "--to", "timm"),
        ("plan", "--recipe", run / "config.yaml", "--gpus", 2, "--gpu", "h100"),
        ("report", run, "--output", tmp_path / "report.html"),
    ]
    [(*tools, report)] = ranks.run(1, commands, tmp_path, lines)
    line = f"--task pulled:Pulled: there is no module pulled in {tmp_path} and on Python's path (the run recorded "
    line += f"{folder}/pulled.py); start from its folder"
    for code, _, err in tools:
        assert code == 2
        assert last_line(err).startswith(line)
    assert report[0] == 0
    assert "there is no module pulled" in (tmp_path / "report.html").read_text()


ERRORS = {
    "puled:Pulled": "there is no module puled in",
    "pulled.py:Pulled": "write pulled:CLASS",
    "pulled:Puled": "there is no such class in FOLDER/pulled.py; the nearest is Pulled",
    "pulled:PullSettings": "PullSettings is no subclass of ds_vit.tasks.task.Task; the nearest is Pulled",
    "pulled:": "there is no such class in FOLDER/pulled.py; its tasks are Pulled",
    ":Pulled": "it has to name a module and its class, as in PACKAGE.MODULE:CLASS",
    ".pulled:Pulled": "it has to name a module and its class",
    "json:dumps": "dumps is no subclass of ds_vit.tasks.task.Task, which has no task",
    "missing:X": "importing missing fails at FOLDER/missing.py, line 1: ModuleNotFoundError: No module named 'nothing",
    "typo:X": "importing typo fails at FOLDER/typo.py, line 1: SyntaxError",
    "late:X": "importing late fails at FOLDER/late.py, line 2: RuntimeError: no table",
    "wrong:Taken": "lr is a flag or a method of every run's settings; rename it",
    "wrong:Keyed": "the flag own cannot have a key of the DeepSpeed JSON; drop it",
    "wrong:Sectioned": "its settings are invalid: ValueError: section 'los' of a flag is none of run, task, model",
    "wrong:Single": "its settings are invalid: TypeError",
    "wrong:Half": "the class does not define fields, metrics, step",
}


def test_what_cannot_be_a_task_is_one_line(ranks, folder):
    # Catches: the traceback of somebody's module; a class that fails in the middle of a start.
    lines = [("train", *WORDS, "--task", word) for word in ERRORS]
    [done] = ranks.run(1, commands, folder, lines)
    for (word, said), (code, _, err) in zip(ERRORS.items(), done, strict=True):
        assert code == 2, word
        assert last_line(err).startswith(f"--task {word}: "), err
        assert said.replace("FOLDER", str(folder)) in last_line(err)


class WeightSettings(Settings):
    """A flag."""

    own_weight: float = flag(1.0, "weight of the loss")


class InProgram(Classification):
    """A class of a program."""

    __module__ = "__main__"
    settings = (*Classification.settings, WeightSettings)

    def loss(self, tp):
        """As `ChainTask.loss`."""
        of_labels = super().loss(tp)
        return lambda logits, batch: self.config.own_weight * of_labels(logits, batch)


def train_in_program(folder, max_steps):
    """On a rank: train with a class that cannot be imported by its name; its folder's files, and a prediction."""
    from ds_vit.api import train

    os.chdir(folder)
    settings = {
        **{"dataset": "digits", "model": "vit_tiny_patch16_224", "img_size": 16, "workers": 0, "batch_size": 16},
        **{"model_kwargs": list(MODEL[1:]), "train_split": "train[:10%]", "epochs": 1, "stall_seconds": 0},
    }
    result = train(
        task=InProgram,
        deepspeed_config="ds_configs/cpu_zero1_fp32.json",
        output="program",
        resume="auto",
        max_steps=max_steps,
        own_weight=2.0,
        quiet=True,
        **settings,
    )
    return result["exit"], result["steps"]


@pytest.mark.slow
def test_a_class_of_a_program(ranks, tmp_path):
    # Catches: a class of a notebook that has to be importable; a run of it that the command line does not understand.
    assert ranks.run(1, train_in_program, tmp_path, 3) == [("completed", 3)]
    assert ranks.run(1, train_in_program, tmp_path, 5) == [("completed", 5)]
    config = yaml.safe_load((tmp_path / "program" / "config.yaml").read_text())
    assert (config["task"], config["own_weight"]) == ("__main__:InProgram", 2.0)
    lines = [("predict", "program", "x.png"), ("train", "--recipe", "program/config.yaml", "--resume", "program")]
    [done] = ranks.run(1, commands, tmp_path, lines)
    for code, _, err in done:
        assert code == 2
        assert re.match(r"--task __main__:InProgram: the class is defined in .*, and only that program", last_line(err))


class WithPart(Classification):
    """A task whose model has a part with a file and a tool of its own."""

    parts: ClassVar = {"own.": "part of its own"}
    tower_files: ClassVar = {"own": "part of its own"}
    export_formats: ClassVar = {"mine": Format("timm", (), None, None)}


def test_its_weights_are_known_where_the_class_is(tmp_path):
    # Catches: files, parts or tools of the package's tasks only.
    spec = small_spec("vit_tiny_patch16_224", img_size=64)
    model = create_model(spec)
    save_weights(tmp_path, timm_model(spec).state_dict())
    save_weights(tmp_path, {"own.x": torch.zeros(1)}, name="own")
    with mock.patch.dict("ds_vit.config.outside.loaded", {"m:WithPart": WithPart}):
        assert InitialCheckpoint(tmp_path / "model.safetensors", model).left_out.keys() == {"own.x"}
        assert "mine" in formats()
    assert InitialCheckpoint(tmp_path / "model.safetensors", model).left_out == {}


def test_only_a_task_can_be_passed():
    # Catches: an instance or another class, found after the start.
    with mock.patch("ds_vit.config.outside._passed", {}), pytest.raises(UserError, match="no subclass of"):
        pass_class(WeightSettings)
