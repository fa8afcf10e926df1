"""Make the table of training steps by model and micro-batch: ours beside timm, compiled timm, DDP and FSDP2.

    .venv/bin/python docs/benchmarks/step_table.py
    .venv/bin/python docs/benchmarks/step_table.py --launch '.venv/bin/torchrun --nproc_per_node 8 -m' --peers ddp fsdp2
    .venv/bin/python docs/benchmarks/step_table.py --models vit_tiny_patch16_224 --batch-sizes 8 --peers timm \\
        --configs ds_configs/cpu_zero0_fp32.json

on one GPU in bf16, on eight, and on a CPU. Each model takes growing micro-batches. One of ours and a peer are measured
in a process of their own (`ds-vit bench step --json`), so that no other's memory stands in their way; a pair that does
not fit is left out from there on. The table has the best of ours and the best peer at each micro-batch, and at the best
micro-batch of each.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
MODELS = (
    *("vit_base_patch16_224", "vit_large_patch16_224", "vit_huge_patch14_224"),
    "vit_giant_patch14_224",
)
CONFIGS = [str(ROOT / "ds_configs" / f"{name}.json") for name in ("zero0_bf16", "zero1_bf16", "zero3_bf16")]
Rates = dict[tuple[str, int, str], dict]  # model, micro-batch, side → its fastest measurement


def bench(launch: str, model: str, batch_size: int, config: str, peer: str, words: list[str]) -> dict | str:
    """What `ds-vit bench step` measured, or the last line of why it did not."""
    command = [*shlex.split(launch), "ds_vit.cli", "bench", "step", "--json", "--model", model, "-b", str(batch_size)]
    command += ["--deepspeed_config", config, "--against", peer, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    reasons = [line for line in done.stderr.splitlines() if "out of memory" in line.lower()]
    return (reasons or done.stderr.splitlines() or ["no word"])[-1].strip()


def measure(arguments: argparse.Namespace, words: list[str], console: Console) -> tuple[Rates, list[dict]]:
    """The rates of all sides, and everything that was measured."""
    rates: Rates = {}
    results: list[dict] = []
    for model in arguments.models:
        out: set[tuple[str, str]] = set()  # pairs that did not fit
        pairs = [(config, peer) for config in arguments.configs for peer in arguments.peers]
        for batch_size in arguments.batch_sizes:
            for config, peer in track([pair for pair in pairs if pair not in out], f"{model}, {batch_size}"):
                found = bench(arguments.launch, model, batch_size, config, peer, words)
                if isinstance(found, str):
                    console.print(f"{model}, {batch_size}, {Path(config).stem} against {peer}: {found}", markup=False)
                    out.add((config, peer))
                    continue
                results.append(found)
                for name, side in {**found["ours"], **found["peers"]}.items():
                    key = model, batch_size, name
                    rates[key] = max(rates.get(key, side), side, key=lambda side: side["images_per_second"])
    return rates, results


def best(rates: Rates, model: str, names: set[str], batch_size: int | None = None) -> tuple[float, float | None, str]:
    """The largest rate of these sides, its MFU, and whose it is; of all micro-batches where none is named."""
    found = [
        (side["images_per_second"], side["mfu"], f"{name}, {batch}" if batch_size is None else name)
        for (of, batch, name), side in rates.items()
        if of == model and name in names and batch_size in (None, batch)
    ]
    return max(found, default=(0.0, None, "none fits"), key=lambda side: side[0])


def main() -> int:
    """Measure, write JSON lines where that is asked for, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=MODELS, help="timm names")
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=(16, 32, 64, 128, 256, 512))
    parser.add_argument("--configs", nargs="+", default=CONFIGS, help="DeepSpeed JSON files of one precision")
    parser.add_argument("--peers", nargs="+", default=("timm", "timm-compiled", "fsdp2"))
    parser.add_argument("--launch", default=f"{sys.executable} -m", help="what starts a Python module on all ranks")
    parser.add_argument("--output", metavar="FILE", help="write all that was measured, one JSON object per line")
    arguments, words = parser.parse_known_args()  # the others are those of ds-vit bench step
    console = Console()
    rates, results = measure(arguments, words, console)
    if not results:
        console.print("nothing could be measured; the lines above say why")
        return 1
    if arguments.output:
        Path(arguments.output).write_text("".join(f"{json.dumps(result)}\n" for result in results))
    first = results[0]
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    table = Table(title=f"{first['precision']}, {first['layout']}, {first['device']}; {versions}", title_justify="left")
    for column in ("model", "micro-batch", "ours, images/s", "MFU", "", "best peer, images/s", "MFU", "", "ratio"):
        table.add_column(column, justify="left" if column in ("model", "") else "right")
    ours = {name for result in results for name in result["ours"]}
    peers = {name for result in results for name in result["peers"]}
    for model in arguments.models:
        for batch_size in (*arguments.batch_sizes, None):
            sides = [best(rates, model, names, batch_size) for names in (ours, peers)]
            cells = [(f"{rate:.1f}", f"{mfu:.1%}" if mfu else "", name) for rate, mfu, name in sides]
            (own, *_), (other, *_) = sides
            if own or other:
                ratio = f"{own / other:.3f}" if own and other else ""
                table.add_row(model, "best" if batch_size is None else str(batch_size), *cells[0], *cells[1], ratio)
    console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
