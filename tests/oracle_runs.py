"""Our trainer on the oracle's images and weights."""

import json
from pathlib import Path

import oracle
from curves import train_in
from project import ROOT

TRAIN = [
    *("--model", oracle.MODEL, *oracle.kwargs_words(), "--img-size", oracle.IMG_SIZE, "--no-aug", "--smoothing", 0),
    *("--lr", oracle.LR, "--sched", "constant", "--warmup-epochs", 0, "--max-steps", oracle.STEPS),
    *("--log-interval", 1, "--workers", 0, "--mean", 0.5, 0.5, 0.5, "--std", 0.5, 0.5, 0.5, "--val-split", ""),
]


def config_file(folder: Path, stage: int, **changes) -> str:
    """The shipped CPU file of a stage, with the oracle's clipping and weight decay."""
    data = json.loads((ROOT / "ds_configs" / f"cpu_zero{stage}_fp32.json").read_text())
    data["gradient_clipping"] = oracle.CLIP
    data["optimizer"]["params"]["weight_decay"] = oracle.WEIGHT_DECAY
    data.update(changes)
    path = folder / f"zero{stage}-{'-'.join(changes)}.json"
    path.write_text(json.dumps(data))
    return str(path)


def train(ranks, world, folder, stage, *words, micro, accumulation, **changes):
    """Our trainer on the oracle's images and weights."""
    argv = [*TRAIN, "--deepspeed_config", config_file(folder, stage, **changes), *words]
    argv += ["--initial-checkpoint", folder / "weights.safetensors", "-b", micro, "--grad-accum-steps", accumulation]
    return train_in(ranks, world, argv)
