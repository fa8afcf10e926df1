"""Time an optimizer's step alone at ViT-S size on one rank: LAMB or Muon on flat tensors, fused AdamW, and timm's own.

    python docs/benchmarks/optimizer_step.py [--optimizer Lamb] [--rounds 15] [--model vit_small_patch16_224]

The steps are interleaved and the smallest time of each counts, so that a busy machine spoils the comparison least.
Prints a table, and each ratio to fused AdamW and to timm's of the same run.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import timm
import torch
from timm.optim import Lamb, muon, param_groups_weight_decay

from ds_vit.config import parser as flags
from ds_vit.engine.base import Engine
from ds_vit.engine.start import device_of, init_distributed, quiet_deepspeed
from ds_vit.launching.process import discover, rendezvous
from ds_vit.parallel.groups import build_groups
from ds_vit.training.build_engine import build_engine
from ds_vit.training.resolve import resolve
from ds_vit.training.run import World

DECAY = 0.05


def start(model: str, optimizer: str, on_cpu: bool) -> Engine:
    """ZeRO-1 on one rank, as a run builds it."""
    data = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": 0.0,
        "optimizer": {"type": optimizer, "params": {"lr": 1e-3, "weight_decay": DECAY}},
        "zero_optimization": {"stage": 1, "reduce_bucket_size": 1_000_000, "allgather_bucket_size": 1_000_000},
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(data))
        words = ["--model", model, "--dataset", "digits", "--deepspeed_config", str(path), "--max-steps", "1"]
        config = flags.parse(words)
        process = discover()
        run = resolve(config, World(process, on_cpu))
    init_distributed(rendezvous(process))
    return build_engine(run, device_of(0), build_groups(run.layout))


def timed(step: Callable[[], None]) -> float:
    """Seconds of one step, the device waited for."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    begin = time.perf_counter()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--optimizer", choices=["Lamb", "Muon"], default="Lamb")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--model", default="vit_small_patch16_224")
    arguments = parser.parse_args()
    quiet_deepspeed(False)
    from deepspeed.accelerator import get_accelerator

    engine = start(arguments.model, arguments.optimizer, get_accelerator().device_name() == "cpu")
    device = engine.device
    ours = engine.zero_map.base
    flats = []
    for group, shard in zip(ours.param_groups, engine.zero_map.shards, strict=True):
        shard.parameter.grad = torch.randn_like(shard.tensor) * 1e-3
        flat = shard.tensor.clone().requires_grad_(True)
        flat.grad = shard.parameter.grad.clone()
        flats.append({"params": [flat], "weight_decay": group["weight_decay"]})
    adamw = torch.optim.AdamW(flats, lr=1e-3, fused=True)
    whole = timm.create_model(arguments.model, num_classes=10).to(device)
    for parameter in whole.parameters():
        parameter.grad = torch.randn_like(parameter) * 1e-3
    groups = param_groups_weight_decay(whole, DECAY)
    # Muon here iterates in fp32, timm's in bf16 unless told otherwise.
    muon.zeropower_via_newtonschulz = partial(muon.zeropower_via_newtonschulz, dtype=torch.float32)
    timms = Lamb(groups, lr=1e-3, max_grad_norm=None) if arguments.optimizer == "Lamb" else muon.Muon(groups, lr=1e-3)
    theirs = f"timm's {arguments.optimizer}"
    steps = {"fused AdamW, flat": adamw.step, f"{arguments.optimizer}, flat": ours.step, theirs: timms.step}
    times: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(arguments.rounds):
        for name, step in steps.items():
            times[name].append(timed(step))
    least = {name: min(values[1:]) for name, values in times.items()}
    elements = sum(shard.tensor.numel() for shard in engine.zero_map.shards)
    print(f"{arguments.model}, {elements:,} elements, {device}, torch {torch.__version__}, timm {timm.__version__}, ")
    print(f"{torch.get_num_threads()} threads, smallest of {arguments.rounds - 1}\n")
    print("| optimizer | ms per step | to fused AdamW | to timm's |\n|---|---|---|---|")
    for name, seconds in least.items():
        ratios = seconds / least["fused AdamW, flat"], seconds / least[theirs]
        print(f"| {name} | {seconds * 1000:.1f} | {ratios[0]:.2f} | {ratios[1]:.2f} |")
    engine.close()


if __name__ == "__main__":
    main()
