"""Steps of many sides on one GPU: those of a wave are prepared at the same time, then measured one after another.

    python docs/benchmarks/gpu_steps.py --folder docs/benchmarks/gpu/steps [--rehearse] [CASE ...]

A case is ours or a peer of `ds-vit bench step`, in a process that first compiles and counts, then waits until the whole
wave is ready, and is timed while nothing else runs. Its result is FOLDER/CASE.json, its output FOLDER/CASE.log; a case
whose result is there is skipped, so that the same command continues. `--rehearse` takes tiny models on a CPU, whose
graphs are not made into code; it shows that a case runs and says nothing about a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import fcntl
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Workload:
    """A model and a task.

    Attributes:
        words: flags of the runs.
        ours: files of ds_configs.
        peers: names of `ds-vit bench step --against`.
        small: further flags of a rehearsal.
        graph: further flags with a CUDA graph.
        gigabytes: of a side while it is prepared, at its peak.
    """

    words: Sequence[str]
    ours: Sequence[str]
    peers: Sequence[str] = ()
    small: Sequence[str] = ()
    graph: Sequence[str] = ()
    gigabytes: int = 12


BF16 = ("zero1_bf16", "zero3_bf16")
TINY = ("--model", "test_vit", "--img-size", "32", "-b", "2")
TEXT = ("--text-width", "32", "--text-depth", "2", "--text-heads", "2", "--context-length", "16", "--embed-dim", "16")
HEAD = ("--local-crops-size", "16", "--prototypes", "64", "--head-hidden-dim", "32", "--head-bottleneck-dim", "16")
COMPILED = ("timm-compiled", "ddp-compiled", "fsdp2-compiled")
BLOCKS_COMPILED = ("timm-blocks-compiled", *COMPILED[1:])  # the whole of 24 blocks takes minutes to compile
# lightly's loop has only the loss over crops.
DINO = ("--task", "dino", "--ibot-weight", "0", "--koleo-weight", "0", "--local-crops-size", "96")
WORKLOADS = {
    "base": Workload(("--model", "vit_base_patch16_224", "-b", "128"), ("zero0_bf16", *BF16), COMPILED),
    "large": Workload(
        *(("--model", "vit_large_patch16_224", "-b", "64"), ("zero0_bf16", *BF16), BLOCKS_COMPILED), gigabytes=20
    ),
    "huge": Workload(
        *(("--model", "vit_huge_patch14_224", "-b", "32"), ("zero0_bf16", *BF16), BLOCKS_COMPILED[::2]), gigabytes=30
    ),
    "mae": Workload(
        *(("--model", "vit_base_patch16_224", "-b", "128", "--task", "mae"), BF16),
        small=("--decoder-dim", "32", "--decoder-depth", "2", "--decoder-heads", "2"),
    ),
    "clip": Workload(
        *(("--model", "vit_base_patch16_224", "-b", "128", "--task", "clip"), BF16),
        *(("open_clip", "open_clip-compiled"), TEXT),
        gigabytes=20,
    ),
    "dino": Workload(
        *(("--model", "vit_small_patch16_224", "-b", "64", *DINO), BF16),
        *(("lightly", "lightly-compiled"), HEAD),
        graph=("--koleo-weight", "0.1"),  # with lightly's loss alone a step is not replayed
    ),
}


@dataclass(frozen=True)
class Case:
    """A side: a workload's name, the side's own, and its flags; a peer has the model and batch of the ones of ours."""

    workload: str
    side: str
    words: Sequence[str]
    is_peer: bool = False

    @property
    def name(self) -> str:
        """Of its files."""
        return f"{self.workload}-{self.side}".replace(" ", "-")


def cases() -> dict[str, Case]:
    """All cases by name, the most valuable first; those of ZeRO 0 to 2 with a CUDA graph too."""
    found = []
    for name, work in WORKLOADS.items():
        for config in work.ours:
            words = [*work.words, "--compile", "--deepspeed_config", str(ROOT / "ds_configs" / f"{config}.json")]
            found.append(Case(name, config, words))
            if "zero3" not in config:
                found.append(Case(name, f"{config} graph", [*words, "--cuda-graph", "on", *work.graph]))
        words = [*work.words, "--deepspeed_config", str(ROOT / "ds_configs" / "zero1_bf16.json")]
        found += [Case(name, peer, words, is_peer=True) for peer in work.peers]
    return {case.name: case for case in found}


# ---- a case, in its process ------------------------------------------------------------------------------------------


@contextlib.contextmanager
def turn(meeting: Path | None, name: str) -> Iterator[None]:
    """For the block this process is the only one that runs; it begins when all of the wave are ready."""
    if meeting is None:
        yield
        return
    (meeting / f"{name}.ready").touch()
    while not (meeting / "go").exists():
        time.sleep(0.1)
    with (meeting / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def measure(case: Case, meeting: Path | None, rehearse: bool) -> dict[str, Any]:
    """What is recorded of a case; the first call in a process decides on its device."""
    import torch

    from ds_vit.launching.process import Process
    from ds_vit.models import compiled
    from ds_vit.tools import bench, peers
    from ds_vit.training.cost import Cost

    peers._WRAPPERS["timm-blocks"] = lambda model, half: model  # a peer of another name than "timm" compiles its blocks
    if rehearse:
        compiled.BACKEND = "aot_eager"
    words = [*case.words, *(TINY if rehearse else ()), *(WORKLOADS[case.workload].small if rehearse else ())]
    process = Process("none", 0, 1, 0, 1)
    config = bench.resolve_engine(words, process)
    with bench.ranks_met(process) as device, contextlib.ExitStack() as stack:
        stack.enter_context(compiled.compiler_settings())
        step = bench.make_peer(case.side, config, device) if case.is_peer else bench.make_ours(config, device, stack)
        prepared = bench.prepare(step, config, 0, device)
        if device.type == "cuda":
            torch.cuda.empty_cache()  # for those that are not ready yet
        with turn(meeting, case.name):
            turns, steps = (1, 1) if rehearse else (9, 3)
            [side] = bench.measure({case.name: prepared}, turns, steps, device).values()
        return {
            "workload": case.workload,
            "side": case.side,
            "is_peer": case.is_peer,
            "model": config.model.spec.name,
            "precision": config.engine.precision.name,
            "options": " ".join(words),
            "rehearsal": rehearse,
            "device": bench.device_name(device),
            "date": datetime.date.today().isoformat(),
            "versions": bench.versions(),
            "planned_bytes": None if case.is_peer else Cost(config).fullest(config.batch).together,
            **asdict(side),
        }


# ---- all of them -----------------------------------------------------------------------------------------------------


def waves(names: Sequence[str], rehearse: bool) -> Iterator[list[str]]:
    """The cases in groups that fit the device's memory together; of the smallest, two are a rehearsal's."""
    import torch

    room = 24.0 if rehearse else torch.cuda.get_device_properties(0).total_memory / 1e9
    known, wave, used = cases(), [], 0.0
    for name in names:
        own = WORKLOADS[known[name].workload].gigabytes
        if wave and used + own > room:
            yield wave
            wave, used = [], 0.0
        wave, used = [*wave, name], used + own
    if wave:
        yield wave


def run_wave(names: Sequence[str], folder: Path, rehearse: bool) -> None:
    """Prepare some cases together and measure each; one that fails leaves no result."""
    further = ["--rehearse"] if rehearse else []
    threads = {"TORCHINDUCTOR_COMPILE_THREADS": "2", "OMP_NUM_THREADS": "1" if rehearse else "2"}
    with tempfile.TemporaryDirectory() as meeting, contextlib.ExitStack() as stack:
        running = {}
        for name in names:
            words = [sys.executable, __file__, "--folder", str(folder), "--meeting", meeting, *further, name]
            log = stack.enter_context((folder / f"{name}.log").open("w"))
            environ = {**os.environ, **threads}
            running[name] = subprocess.Popen(words, stdout=log, stderr=subprocess.STDOUT, env=environ)
        while not all(Path(meeting, f"{name}.ready").exists() or p.poll() is not None for name, p in running.items()):
            time.sleep(0.2)
        Path(meeting, "go").touch()
        for name, process in running.items():
            print(f"{name}: code {process.wait()}", file=sys.stderr, flush=True)


def run_all(folder: Path, rehearse: bool, names: Sequence[str] = ()) -> list[str]:
    """Run the cases that have no result yet; returns those that still have none."""
    folder.mkdir(parents=True, exist_ok=True)

    def missing() -> list[str]:
        return [name for name in names or cases() if not (folder / f"{name}.json").exists()]

    for wave in waves(missing(), rehearse):
        run_wave(wave, folder, rehearse)
    return missing()


def main() -> None:
    """Run the cases, or one that belongs to a wave."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="CASE", help="all by default")
    parser.add_argument("--folder", type=Path, required=True, help="of the results")
    parser.add_argument("--rehearse", action="store_true", help="tiny models, on a CPU")
    parser.add_argument("--meeting", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    known = cases()
    if unknown := [name for name in arguments.names if name not in known]:
        raise SystemExit(f"there is no case {', '.join(unknown)}; there are {', '.join(known)}")
    if arguments.meeting is None:
        if missing := run_all(arguments.folder, arguments.rehearse, arguments.names):
            raise SystemExit(f"without a result: {', '.join(missing)}; start again for these")
        return
    [name] = arguments.names
    result = json.dumps(measure(known[name], arguments.meeting, arguments.rehearse), indent=1)
    (arguments.folder / f"{name}.json").write_text(result + "\n")


if __name__ == "__main__":
    main()
