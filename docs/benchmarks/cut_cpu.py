"""Compute time per step of each rank when a model is cut in two, against the cost model's share of the arithmetic.

    python docs/benchmarks/cut_cpu.py

CPU time of the thread that computes, the fastest of its steps, so that communication, waiting and other programs do
not count; one thread per rank.
"""

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "support"), str(ROOT)]

KWARGS = {"patch_size": 8, "embed_dim": 192, "depth": 6, "num_heads": 4}
ARGV = ["--model", "vit_tiny_patch16_224", "--model-kwargs", *(f"{k}={v}" for k, v in KWARGS.items())]
ARGV += ["--img-size", "96", "--dataset", "digits", "--workers", "0", "--max-steps", "6", "--warmup-steps", "1"]
ARGV += ["--val-split", "", "--no-aug", "--deepspeed_config", str(ROOT / "ds_configs" / "cpu_zero1_fp32.json")]
ARGV += ["-b", "4", "--grad-accum-steps", "4"]


def seconds_a_step(argv: list[str]) -> float:
    """On a rank: train, and give the CPU seconds of the fastest step after the first."""
    import tempfile
    import time

    from ds_vit.engine import pipeline, plain
    from ds_vit.train import main

    seconds = []
    for kind in (plain.PlainEngine, pipeline.PipeEngine):
        step = kind.train_step

        def timed(self, inputs, step=step):  # noqa: ANN001, ANN202
            start = time.thread_time()
            result = step(self, inputs)
            seconds.append(time.thread_time() - start)
            return result

        kind.train_step = timed
    with tempfile.TemporaryDirectory() as folder:
        assert main([*argv, "--output", f"{folder}/run"]) == 0
    return min(seconds[1:])


def main() -> None:
    """Print the table."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    from ranks import RankPool

    from ds_vit.models.layers import take_apart
    from ds_vit.models.zoo import ModelSpec, create_model
    from ds_vit.planner.counting import layer_flops

    model = create_model(ModelSpec("vit_tiny_patch16_224", num_classes=10, img_size=96, model_kwargs=KWARGS))
    flops = layer_flops(take_apart(model))
    total, blocks = sum(flops), sum(flops[1:-1])
    half = len(flops) // 2
    predicted = {
        "--tp 2": [(total - blocks / 2) / total] * 2,
        "--pp 2": [sum(flops[:half]) / total, sum(flops[half:]) / total],
    }
    ranks = RankPool()
    [alone] = ranks.run(1, seconds_a_step, ARGV)
    print(f"one rank: {alone:.3f} s of CPU time per step\n")
    print("| cut | rank | share of the arithmetic | share of the time | time / arithmetic |")
    print("|---|---|---|---|---|")
    for cut, shares in predicted.items():
        for rank, seconds in enumerate(ranks.run(2, seconds_a_step, [*ARGV, *cut.split()])):
            share = seconds / alone
            print(f"| `{cut}` | {rank} | {shares[rank]:.3f} | {share:.3f} | {share / shares[rank]:.2f} |")


if __name__ == "__main__":
    main()
