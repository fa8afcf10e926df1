"""What a checkpoint costs: the pause it adds to a step, beside torch.save of the same state; host memory of a rank.

    python docs/benchmarks/checkpoint_cost.py [--model vit_base_patch16_224] [--dp 1 2] [--rounds 8] [--folder FOLDER]

Real engines (AdamW, ZeRO-1, moving average, fp32) that have done a step, on CPU ranks. A round is one checkpoint, and
after it torch.save of the same tensors into the same folder: once the whole state on rank 0, as a plain DDP loop does
it, and once each rank's own share by itself, as DeepSpeed does it. The smallest time of each counts, so that a busy
machine spoils the comparison least. The pause is all the time that `CheckpointManager.boundary` takes, and the slowest
rank's; the first one comes a step after the memory for it was asked for, as in a run.

Memory is the growth of a rank's resident set, from before its first checkpoint to the peak while it is copied and
written (VmHWM, which is set back in between; Linux alone has that).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT)]


def resident_bytes(field: str) -> int:
    """VmRSS, or VmHWM: the largest since `forget_peak`."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    """Let VmHWM begin anew."""
    Path("/proc/self/clear_refs").write_text("5")


class Rows:
    """Stands where a run has its reporter: keeps what is said of checkpoints."""

    def __init__(self) -> None:
        self.rows: list[Any] = []

    def checkpoint(self, row: Any) -> None:
        """One checkpoint has come to its end."""
        self.rows.append(row)

    def say(self, text: str) -> None:
        """A line for people."""
        print(text)


def measure(model: str, folder: str, rounds: int) -> dict[str, float]:
    """On a rank: the figures of the table, in seconds and bytes."""
    import ctypes
    import gc
    import math
    import time

    import torch
    import torch.distributed as dist

    from ds_vit.checkpoint.gather import RankShare
    from ds_vit.config import parser as flags
    from ds_vit.config.run_folder import RunFolder
    from ds_vit.engine.start import device_of, quiet_deepspeed
    from ds_vit.fault_tolerance.signals import Signals
    from ds_vit.launching.process import discover
    from ds_vit.monitoring.metrics import Throughput
    from ds_vit.optim.ema import Ema
    from ds_vit.parallel.groups import build_groups
    from ds_vit.training.build_engine import build_engine
    from ds_vit.training.checkpoint_manager import CheckpointManager
    from ds_vit.training.inputs import InputPipeline
    from ds_vit.training.resolve import resolve
    from ds_vit.training.run import World

    quiet_deepspeed(False)
    argv = ["--model", model, "--dataset", "digits", "--no-aug", "--workers", "0", "-b", "1", "--warmup-steps", "0"]
    argv += ["--deepspeed_config", str(ROOT / "ds_configs" / "cpu_zero1_fp32.json"), "--max-steps", "2"]
    argv += ["--num-classes", "1000", "--model-ema", "--checkpoint-interval", "2", "--keep-checkpoints", "1"]
    config = flags.parse([*argv, "--output", folder])
    plan = resolve(config, World(discover(), on_cpu=True))
    engine = build_engine(plan, device_of(0), build_groups(plan.layout, saves=True))
    average, throughput = Ema(engine.zero_map, 0.999), Throughput()
    inputs = InputPipeline(plan, engine, throughput).training()
    for _ in range(2):
        begin = time.perf_counter()
        engine.train_step(inputs)
        between = time.perf_counter() - begin
    average.update()
    rows, nothing = Rows(), SimpleNamespace(state_dict=dict, conclude=lambda: None)
    shapes, parent = plan.model.saved_shapes, RunFolder(Path(folder)).checkpoints
    checkpoint_manager = CheckpointManager(plan, parent, engine, average, throughput, Signals(), rows)
    checkpoint_manager.trainer = nothing
    share = RankShare(engine.zero_map, average.tensors, shapes)

    def timed(action: Any) -> float:
        """Seconds of the slowest rank, all of which begin together."""
        dist.barrier()
        begin = time.perf_counter()
        action()
        seconds = torch.tensor(time.perf_counter() - begin)
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        return seconds.item()

    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier steps gave back would hide what a save takes
    before = resident_bytes("VmRSS")
    forget_peak()
    checkpoint_manager.boundary(1)
    time.sleep(between)
    first = timed(lambda: checkpoint_manager.boundary(2))
    checkpoint_manager.finish(2)
    peak = resident_bytes("VmHWM") - before

    own = {kind: [t for t in share.tensors(kind) if t is not None] for kind in share.kinds()}
    whole = {}
    if dist.get_rank() == 0:
        whole = {kind: {name: torch.rand(shape) for name, shape in shapes.items()} for kind in share.kinds()}
    part, file = Path(folder) / f"own-{dist.get_rank()}.pt", Path(folder) / "whole.pt"

    def save_whole() -> None:
        if dist.get_rank() == 0:
            torch.save(whole, file)

    times: dict[str, list[float]] = {"pause": [], "torch_whole": [], "torch_own": []}
    plain = [("torch_whole", save_whole, file), ("torch_own", lambda: torch.save(own, part), part)]
    for step in range(4, 2 * rounds + 4, 2):
        times["pause"].append(timed(lambda step=step: checkpoint_manager.boundary(step)))
        checkpoint_manager.finish(step)
        plain.reverse()
        for name, action, path in plain:
            times[name].append(timed(action))
            dist.barrier()
            path.unlink(missing_ok=True)
    assert not checkpoint_manager.num_failed
    engine.close()
    return {
        "first": first,
        **{name: min(values) for name, values in times.items()},
        "write": min(row["write_seconds"] for row in rows.rows),
        "bytes": rows.rows[-1]["bytes"],
        "share": 4 * sum(t.numel() for kind in share.kinds() for t in share.tensors(kind) if t is not None),
        "largest": 4 * max(math.prod(shape) for shape in shapes.values()),
        "peak": peak,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_base_patch16_224")
    parser.add_argument("--dp", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--folder", help="where to write; a temporary folder by default")
    arguments = parser.parse_args()
    import timm
    import torch
    from ranks import RankPool

    ranks = RankPool()
    print(f"{arguments.model}, AdamW, average, ZeRO-1, fp32, CPU, torch {torch.__version__}, timm {timm.__version__}\n")
    costs, memory = [], []
    for dp in arguments.dp:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            found = ranks.run(dp, measure, arguments.model, folder, arguments.rounds, timeout=3600.0)
        a = found[0]
        pause, whole, own = a["pause"], a["torch_whole"], a["torch_own"]
        costs.append(
            f"| {dp} | {a['bytes'] / 1e9:.2f} | {pause:.3f} | {a['first']:.3f} | {whole:.3f} | {pause / whole:.2f} "
            f"| {own:.3f} | {pause / own:.2f} | {a['write']:.1f} |"
        )
        for rank, f in enumerate(found):
            bound = f["share"] + f["largest"]
            memory.append(
                f"| {dp} | {rank} | {f['share'] / 2**20:.0f} | {f['largest'] / 2**20:.0f} | {f['peak'] / 2**20:.0f} "
                f"| {f['peak'] / bound:.3f} |"
            )
    print("| dp | GB | pause s | the first one s | torch.save, whole s | pause / that | torch.save, shares s ", end="")
    print("| pause / that | files written in s |\n" + "|---" * 9 + "|")
    print("\n".join(costs))
    print("\n| dp | rank | its share MiB | largest parameter MiB | peak growth MiB | growth / (share + parameter) |")
    print("|---" * 6 + "|")
    print("\n".join(memory))


if __name__ == "__main__":
    main()
