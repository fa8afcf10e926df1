"""Measure one part of docs/benchmarks/gpu_day.sh and write it as one JSON object.

    python docs/benchmarks/gpu_part.py ladder --output ladder.json [--rehearse]

A part is a program of this project with fixed arguments. `--rehearse` takes the smallest ones that run on a CPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import io
import itertools
import json
import os
import platform
import shlex
import subprocess
import sys
import tarfile
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import gpu_steps  # next to this file

FOLDER = Path(__file__).resolve().parent
ROOT = FOLDER.parents[1]
CONFIGS = ROOT / "ds_configs"
CLI = ("-m", "ds_vit.cli")
TINY = ("--model", "test_vit", "--img-size", "32")


def run(*words: object, codes: Sequence[int] = (0,), cwd: Path = ROOT) -> str:
    """What a Python program says on stdout; its stderr goes to the log."""
    command = [sys.executable, *map(str, words)]
    print("$", shlex.join(command), file=sys.stderr, flush=True)
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=cwd, env={**os.environ, "COLUMNS": "200"})
    print(done.stdout, file=sys.stderr, flush=True)
    if done.returncode not in codes:
        raise SystemExit(f"{words[0]} ended with code {done.returncode}")
    return done.stdout


def json_of(*words: object) -> Any:
    """The JSON object in the last line of `ds-vit`'s output."""
    return json.loads(run(*CLI, *words).splitlines()[-1])


# ---- the parts -------------------------------------------------------------------------------------------------------


def marked_tests(rehearse: bool, *, file: str = "", only: str = "") -> dict[str, Any]:
    """Tests marked `gpu`: case → passed, failed (also on setting up) or skipped.

    Args:
        rehearse: without a GPU all are skipped.
        file: of tests/training; without, those of all other files.
        only: pytest's `-k`.
    """
    marked = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if "mark.gpu" in path.read_text()]
    own = ("test_gpu.py", "test_gpu_ranks.py")
    files = [path for path in marked if (path.name == file if file else path.name not in own)]
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        words = ["-m", "pytest", "-v", "-m", "gpu", "-k", only, "-p", "no:cacheprovider", f"--junitxml={report}"]
        words += ["-n", str(min(8, os.cpu_count() or 1))]  # most of a test is the start of a process, far from the GPU
        run(*words, *files, codes=(0, 1))  # a test that fails is a result
        cases = {}
        for case in ElementTree.parse(report).iter("testcase"):
            outcome = {"error": "failed", "failure": "failed", "skipped": "skipped"}
            kinds = [outcome[child.tag] for child in case if child.tag in outcome]
            cases[f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"] = (kinds or ["passed"])[0]
    if not rehearse and "passed" not in cases.values():
        raise SystemExit("no test passed")
    return {"cases": cases}


def ranks(rehearse: bool) -> dict[str, Any]:
    """Two and four ranks on the one GPU, by launch/parity.py: the deviations of each layout from one reference."""
    words = ["--deepspeed_config", CONFIGS / "cpu_zero1_fp32.json", "--dataset", "digits", "--img-size", "32"]
    words += ["--model", "vit_tiny_patch16_224", "--model-kwargs", "patch_size=4", "depth=4", "num_heads=4"]
    words += ["embed_dim=32" if rehearse else "embed_dim=192", "--workers", "0", "-b", "8"]
    words += ["--steps", 1 if rehearse else 5]
    compared = [(2, "pp2")] if rehearse else [(2, "zero3, tp2, pp2"), (4, "zero3, tp2, pp2 tp2"), (4, "zero3 tp2")]
    found = []
    for count, layouts in compared:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(count)]
        launcher = shlex.join([*torchrun, str(FOLDER / "one_gpu.py")])
        more = ["-n", count, "--launcher", launcher, "--layouts", layouts]
        with tempfile.TemporaryDirectory() as folder:  # parity.py leaves its runs where it is started
            said = run(ROOT / "launch" / "parity.py", *words, *more, codes=(0, 1), cwd=Path(folder))
        rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in said.splitlines() if line[:1] == "│"]
        columns = ("layout", "loss", "grad_norm", "weights", "worst_tensor", "verdict")
        found += [{"ranks": count, **dict(zip(columns, row, strict=True))} for row in rows]
    if not found:
        raise SystemExit("parity.py printed no table")
    return {"layouts": found}


def decode(rehearse: bool) -> dict[str, Any]:
    """JPEG files decoded on the device: the tables of decode_on_device.py."""
    with tempfile.TemporaryDirectory() as folder:
        pictures = write_pictures(Path(folder), 6 if rehearse else 512)
        words = ["--data-dir", folder, "--workers", "8"]
        if rehearse:
            words = ["--data-dir", folder, "--workers", "1", "--device", "cpu", "--img-size", "16"]
            words += ["--batch", "3", "--images", "6", "--turns", "1", "--models", "test_vit"]
        said = run(FOLDER / "decode_on_device.py", *words)
    return {"pictures": pictures, "markdown": said.strip()}


def write_pictures(folder: Path, number: int) -> str:
    """JPEG files in two classes below train/: ImageNet's where the tests' data is there, else noise; says which."""
    archive = Path(os.environ.get("DS_VIT_TEST_DATA", ROOT.parent / "shared" / "data")) / "imagenet-sample/images.tar"
    if archive.is_file():
        with tarfile.open(archive) as tar:
            files = [tar.extractfile(member).read() for member in tar if member.isreg()]  # type: ignore[union-attr]
        what = "of ImageNet"
    else:
        from PIL import Image

        files, what = [], "noise"
        for width in (400, 500):
            memory = io.BytesIO()
            Image.effect_noise((width, 375), 60).convert("RGB").save(memory, "JPEG")
            files.append(memory.getvalue())
    for n in range(number):
        path = folder / "train" / "ab"[n % 2] / f"{n}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(files[n % len(files)])
    return what


def steps(rehearse: bool, *, folder: Path) -> dict[str, Any]:
    """The cases of gpu_steps.py, each in a file of `folder`.

    Raises:
        SystemExit: names those without a result; the others have theirs.
    """
    names = ["base-zero1_bf16", "base-ddp-compiled"] if rehearse else [*gpu_steps.cases()]
    if missing := gpu_steps.run_all(folder, rehearse, names):
        raise SystemExit(f"without a result: {', '.join(missing)}")
    return {"measured": names}


def bench(words: Sequence[object], names: Sequence[str], peers: Sequence[str]) -> dict[str, Any]:
    """One process of `ds-vit bench step --json`."""
    configs = [CONFIGS / f"{name}.json" for name in names]
    return json_of("bench", "step", "--json", *words, "--deepspeed_config", *configs, "--against", *peers)


def ladder(rehearse: bool, *, recipe: str = "") -> dict[str, Any]:
    """ladder.py; one rank leaves out the rungs between ranks."""
    words = ["--deepspeed_config", CONFIGS / "zero1_fp32.json", "--model", "vit_base_patch16_224", "-b", "64"]
    if rehearse:
        words = ["--deepspeed_config", CONFIGS / "cpu_zero1_fp32.json", *TINY, "-b", "2", "--steps", "1"]
    words += ["--recipe", recipe] if recipe else []
    said = run(FOLDER / "ladder.py", "--json", *words, "--turns", "1" if rehearse else "6")
    return {"bench": json.loads(said.splitlines()[-1])}


def recorded(rehearse: bool, *, script: str, words: Sequence[str] = (), small: Sequence[str] = ()) -> dict[str, Any]:
    """The table of a script of this folder that records its figures, as in docs/results.md."""
    from results_page import TABLES

    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "result.json"
        device = ["--device", "cpu", *small] if rehearse else ["--device", "cuda"]
        run(FOLDER / f"{script}.py", "--output", result, *(word.format(folder=folder) for word in words), *device)
        return {"markdown": TABLES[script](json.loads(result.read_text()))}


def plan(rehearse: bool) -> dict[str, Any]:
    """calibrate.py, and with its figures the planned memory and step next to measured ones."""
    from ds_vit.launching.process import Process
    from ds_vit.planner.hardware import accelerator
    from ds_vit.tools.bench import resolve_engine
    from ds_vit.training.cost import Cost

    # All sides of a process are in memory together, and of one precision (ZeRO-0 has autocast).
    together = (("cpu_zero1_fp32",),) if rehearse else (("zero0_bf16",), gpu_steps.BF16)
    models = [[*gpu_steps.WORKLOADS[name].words] for name in ("base", "large")]
    if rehearse:
        models = [[*TINY, "-b", "2"]]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "here.yaml"
        run(FOLDER / "calibrate.py", file)
        calibrated = accelerator(str(file))
    found = []
    turns = ["--turns", "1", "--steps", "1"] if rehearse else ["--turns", "6"]
    for words, names in itertools.product(models, together):
        measured = bench([*words, *turns], names, ["timm"])
        for name, side in measured["ours"].items():
            flags = [*words, "--deepspeed_config", str(CONFIGS / f"{name}.json")]
            config = resolve_engine(flags, Process("none", 0, 1, 0, 1))
            cost = Cost(config)
            found.append(
                {
                    "model": measured["model"],
                    "side": name,
                    "images": side["images"],
                    "planned_seconds": cost.step_time(calibrated).seconds,
                    "measured_seconds": min(side["seconds"]),
                    "planned_bytes": cost.fullest(config.batch).together,
                    "measured_bytes": side["memory_bytes"],
                }
            )
    return {"calibrated": dataclasses.asdict(calibrated), "steps": found}


PARTS: dict[str, Callable[..., dict[str, Any]]] = {
    "tests": marked_tests,
    "runs": partial(marked_tests, file="test_gpu.py", only="not optimizers"),
    "optimizers": partial(marked_tests, file="test_gpu.py", only="optimizers"),
    "nccl": partial(marked_tests, file="test_gpu_ranks.py"),
    "ranks": ranks,
    "decode": decode,
    "steps": steps,
    "ladder": ladder,
    "ladder-scaling": partial(ladder, recipe="scaling"),
    "amp": partial(
        recorded,
        script="amp",
        words=("--dataset", "digits", "--folder", "{folder}/runs"),
        small=("--epochs", "1", "--warmup-epochs", "0", "--max-steps", "1"),
    ),
    "layout": partial(recorded, script="batch_second", small=("--turns", "1")),
    "plan": plan,
}


# ---- the file --------------------------------------------------------------------------------------------------------


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--output", required=True, metavar="FILE")
    parser.add_argument("--rehearse", action="store_true", help="the smallest form, on a CPU")
    arguments = parser.parse_args()
    import torch

    if not arguments.rehearse and not torch.cuda.is_available():
        raise SystemExit(f"torch {torch.__version__} finds no GPU; --rehearse runs the smallest form on a CPU")
    device = "a CPU" if arguments.rehearse else torch.cuda.get_device_name()
    begun = time.monotonic()
    further = {"folder": Path(arguments.output).with_name("steps")} if arguments.part == "steps" else {}
    found = PARTS[arguments.part](arguments.rehearse, **further)
    header = {
        "part": arguments.part,
        "rehearsal": arguments.rehearse,
        "device": device,
        "date": datetime.date.today().isoformat(),
        "versions": {"python": platform.python_version(), **{k: version(k) for k in ("torch", "timm", "deepspeed")}},
        "seconds": round(time.monotonic() - begun, 1),
    }
    Path(arguments.output).write_text(json.dumps({**header, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
