"""Every command and link of README and docs: flags and files exist, and what is cheap runs.

A training command is run with --dry-run, as rank 0 of its ranks. Above a block whose commands cannot run stands
`<!-- not run: the reason -->`. Scripts of docs/benchmarks say how they are called, and tables are those of their files.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import timm
import yaml
from pages import TINY, Command, commands, run_page, run_words, words_of, words_of_ours
from PIL import Image
from project import ROOT, give_a_clone, lightly_train
from safetensors.torch import save_file

from ds_vit import cli
from ds_vit.config.parser import build_parser

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(ROOT.glob("docs/**/*.md")),
    ROOT / "ds_configs/README.md",
]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
CHEAP = {"predict", "report", "compare", "plan", "shards", "from-timm", "from-open-clip"}
# Of programs that read their command line themselves.
OWN = {"--layouts", "--reference", "--steps", "--rtol", "--top-k", "--to", "--output"}
OWN |= {"--knn", "--linear-probe", "--ema", "--labels", "--texts"}
OWN |= {"--table", "--huber"}  # of docs/own_task.md


def cheap_run(words: list[str]) -> list[str] | None:
    """The words of `ds-vit` that try a command: those of a cheap program, or a training's dry run; else None."""
    words = words_of_ours(words)
    if words[:1] == ["train"]:
        return dry_run(words[1:])
    return words if words and words[0] in CHEAP else None


def dry_run(words: list[str]) -> list[str]:
    """A training's dry run, which an earlier run in its folder does not prevent."""
    return ["train", *words, "--dry-run", *([] if "--resume" in words else ["--output", "runs/new"])]


def all_flags(parser: argparse.ArgumentParser) -> set[str]:
    """The flags of a parser and of its commands."""
    below = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return {*parser._option_string_actions}.union(*(all_flags(one) for each in below for one in each.values()))


def flags_of(words: list[str]) -> tuple[set[str] | None, int]:
    """The flags of the program that a command starts, None for one that is not ours; and where its words begin."""
    training = set(build_parser()._option_string_actions) | OWN
    for at, word in enumerate(words):
        if word.endswith("ds-vit") or word == "ds_vit.cli":
            return all_flags(cli.build_parser()) | training, at
        if re.search(r"launch/(train|parity)\.py$", word):
            return training, at
    return None, 0


def wrong_in(text: str) -> list[str]:
    """The flags of a command that its program does not know, and the files that do not exist."""
    try:
        words = shlex.split(text.replace("$flags", ""))
    except ValueError:
        words = text.split()
    known, start = flags_of(words)
    flags = {word.split("=")[0].strip("[]") for word in words[start:] if word.strip("[").startswith("--")}
    files = [word for word in words if re.match(r"(launch|ds_configs|docs|tests)/[\w./-]+\.\w+$", word)]
    missing = [word for word in files if not (ROOT / word).exists() and "docs/images" not in word]
    return sorted(flags - known if known else []) + missing


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_flags_and_files_of_commands_exist(page):
    # Catches: a flag that has another name by now, a file that has moved.
    assert {one.text: wrong for one in commands(page.read_text()) if (wrong := wrong_in(one.text))} == {}


def test_the_rule_can_fail():
    # Catches: a pattern that finds no command, a mark that holds for the rest of the page.
    text = (
        "    ds-vit train --epocs 3 \\\n        --deepspeed_config ds_configs/nowhere.json  # so\n\n"
        "<!-- not run: why -->\n```bash\nds-vit report a\n\nds-vit report b\n```\nText.\n\n    ds-vit report c\n"
    )
    first, *others = commands(text)
    assert wrong_in(first.text) == ["--epocs", "ds_configs/nowhere.json"]
    assert [(one.text[-1], one.runs) for one in others] == [("a", False), ("b", False), ("c", True)]


@pytest.fixture(scope="module")
def place(ranks, tmp_path_factory) -> Path:
    """The folder that pages speak of: photos, their shards, finished runs, and what a clone has."""
    folder = tmp_path_factory.mktemp("place")
    for split, name, number in ((s, c, n) for s in ("train", "val") for c in ("cat", "dog") for n in range(70)):
        path = folder / "photos" / split / name / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.effect_noise((40, 32), 60 + number).convert("RGB").save(path)
    shutil.copy(folder / "photos/val/cat/0.jpg", folder / "cat.jpg")
    give_a_clone(folder)
    (folder / "docs" / "images").mkdir(parents=True)
    train = f"train {TINY} -b 32 --epochs 1 --max-steps 2 --grad-stats-interval 1 --no-aug --model-ema"
    for words in (f"{train} --output runs/first", "shards photos photos-shards -j 1"):
        [(code, said, wrong)] = ranks.run(1, run_words, str(folder), {}, words.split())
        assert code == 0, said + wrong
    for name in ("second", "one", "another", "digits", "moved", "photos"):
        shutil.copytree(folder / "runs/first", folder / "runs" / name)
    (folder / "runs" / "held-out").symlink_to("../photos")
    (folder / "data").symlink_to("photos")
    (folder / "images").symlink_to("photos/train")
    weights = tmp_path_factory.mktemp("weights") / "vit_tiny.safetensors"  # each test copies the folder, with links
    save_file(timm.create_model("vit_tiny_patch16_224").state_dict(), weights)
    (folder / weights.name).symlink_to(weights)
    released = timm.create_model("vit_small_patch16_dinov3")
    released_file = weights.with_name("dinov3_vits16.safetensors")
    save_file(dict(released.named_parameters()), released_file)
    (folder / released_file.name).symlink_to(released_file)
    return folder


BENCHMARKS = ROOT / "docs" / "benchmarks"  # which take minutes


def cheap_commands():
    for page, name in zip(PAGES, NAMES, strict=True):
        for command in [] if name.startswith("docs/benchmarks/") else commands(page.read_text()):
            environ, words = words_of(command) if command.runs else ({}, [])
            if words := cheap_run(words):
                slow = [pytest.mark.slow] if words[0] in ("train", "plan", "shards") else []
                yield pytest.param(environ, words, marks=slow, id=f"{name}: {command.text[:60]}")


@pytest.mark.parametrize(("environ", "words"), list(cheap_commands()))
def test_it_runs(environ, words, place, ranks, tmp_path):
    # Catches: a command of a page that ends in anything but success.
    folder = tmp_path / "place"
    shutil.copytree(place, folder, symlinks=True)
    if words[0] == "shards":
        shutil.rmtree(folder / "photos-shards")  # it packs anew
    [(code, said, wrong)] = ranks.run(1, run_words, str(folder), environ, words)
    assert code == 0, f"{words}\n{said}{wrong}"


def test_a_command_that_fails_is_seen(place, ranks):
    # Catches: an exit code that is dropped.
    environ, words = words_of(Command("ds-vit predict RUN nowhere.jpg"))
    [(code, _, wrong)] = ranks.run(1, run_words, str(place), environ, cheap_run(words))
    assert code == 2
    assert "nowhere.jpg" in wrong


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


def test_readme_links_every_page():
    # Catches: a page that only the site's menu has.
    linked = set(re.findall(r"\]\(docs/(\w+\.md)", (ROOT / "README.md").read_text()))
    assert {page.name for page in ROOT.glob("docs/*.md")} - linked == set()


COMING = [name for name in NAMES if name.startswith("docs/from_") and name != "docs/from_deepspeed.md"]


@pytest.mark.parametrize("name", COMING)
def test_flags_of_their_tables_exist(name):
    # Catches: a row that sends a reader to a flag that is not there. The last column has ours.
    rows = [line for line in (ROOT / name).read_text().splitlines() if line.startswith("| `")]
    said = {word for row in rows for word in re.findall(r"(?<![\w-])--[\w-]+", row.rstrip("| ").rpartition(" | ")[2])}
    others = {"--num_gpus", "--hostfile", "--sched-on-updates"}  # of the launcher, and timm's in a text on ours
    assert len(rows) > 12
    assert said - set(build_parser()._option_string_actions) - all_flags(cli.build_parser()) <= others


def arguments_of_lightly(path: str, name: str) -> set[str]:
    """The arguments of a function, or the fields of a class, of lightly-train, whose dependencies are not needed."""
    tree = ast.parse((lightly_train() / path).read_text())
    [found] = [node for node in tree.body if getattr(node, "name", "") == name]
    if isinstance(found, ast.FunctionDef):
        return {argument.arg for argument in found.args.kwonlyargs}
    fields = [node for node in found.body if isinstance(node, ast.AnnAssign)]
    return {node.target.id for node in fields if "ClassVar" not in ast.unparse(node.annotation)}


@pytest.mark.parametrize(
    ("path", "name"), [("_commands/train.py", "pretrain"), ("_methods/dinov2/dinov2.py", "DINOv2Args")]
)
def test_every_argument_of_lightly_has_a_row(path, name):
    # Catches: an argument that the tables forget.
    page = (ROOT / "docs/from_lightly.md").read_text()
    missing = {word for word in arguments_of_lightly(path, name) if not re.search(rf"`{word}\b", page)}
    assert missing <= {"resume"}, "deprecated there"


def test_every_setting_of_dinov2_has_a_row():
    # Catches: a setting that the table forgets. lightly-train carries the file.
    [file] = lightly_train().rglob("ssl_default_config.yaml")
    settings = yaml.safe_load(file.read_text())
    named = {f"{section}.{key}" for section in settings for key in settings[section]}
    page = (ROOT / "docs/from_dinov2.md").read_text()
    assert {name for name in named if not re.search(rf"`{name}\b", page)} == {
        *("MODEL.WEIGHTS", "compute_precision.grad_scaler", "compute_precision.teacher", "compute_precision.student"),
        *(f"ibot.head_{name}" for name in ("n_prototypes", "bottleneck_dim", "nlayers", "hidden_dim")),
    }


def anchors(page: Path) -> set[str]:
    """The names that a page's headings have in links."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.slow
def test_a_stopped_run_resumes_to_the_promised_loss(ranks, tmp_path):
    # Catches: README's interrupted run that ends in another line than the page has.
    page = (ROOT / "README.md").read_text()
    [block] = re.findall(r'    flags="[^\n]*--output runs/stopped"\n.*?\n\n', page, re.DOTALL)
    give_a_clone(tmp_path)
    *_, said = run_page(ranks, block, tmp_path)
    [loss] = re.findall(r"step 50/50  epoch 2  loss ([\d.]+)", said)
    [promised] = set(re.findall(r"step 50/50\s+epoch 2\s+loss\s+([\d.]+)", page))
    assert float(loss) == pytest.approx(float(promised), rel=1e-4)


def ask_for_help(scripts: list[str]) -> dict[str, str]:
    """On a rank, without packages that only an extra installs and modules of the tests: what each says to --help."""
    tests, said = str(ROOT / "tests"), {}
    sys.path[:] = [str(BENCHMARKS), *(path for path in sys.path if not path.startswith(tests))]
    extras = ("pytest", "hypothesis", "transformers", "onnx", "onnxruntime", "matplotlib")
    with mock.patch.dict(sys.modules, dict.fromkeys(extras)):
        for name, module in list(sys.modules.items()):
            if str(getattr(module, "__file__", "")).startswith(tests):
                del sys.modules[name]
        for script in scripts:
            sys.argv, out = [script, "--help"], io.StringIO()
            with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
                runpy.run_path(script, run_name="__main__")
            said[script] = out.getvalue()
    return said


@pytest.mark.slow
def test_every_benchmark_script_says_how_it_is_called(ranks):
    # Catches: minutes of measuring for somebody who asked what it does, an import that is gone, a package of the tests.
    scripts = sorted(BENCHMARKS.glob("*.py"))
    [said] = ranks.run(1, ask_for_help, [*map(str, scripts)])
    for script in scripts:
        assert said[str(script)].startswith(f"usage: {script.name}")
        assert f"python docs/benchmarks/{script.name}" in said[str(script)]


@pytest.mark.parametrize(
    ("script", "page"),
    [
        ("ten_epochs.py", "from_timm.md"),
        ("status_table.py", "status.md"),
        ("results_page.py", "results.md"),
        ("flag_tables.py", "configuration.md"),
    ],
)
def test_tables_are_those_of_their_files(script, page):
    # Catches: a figure that was edited in the page, files measured again, a test for a device that the page lacks.
    made = subprocess.run([sys.executable, BENCHMARKS / script], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    hint = f"the page has other figures: python docs/benchmarks/{script} --write"
    assert made.stdout.strip() in (ROOT / "docs" / page).read_text(), hint
