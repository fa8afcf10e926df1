"""ds_vit from Python: the same run as the command line's.

from ds_vit.api import train
summary = train(deepspeed_config="ds_configs/cpu_zero1_fp32.json", dataset="digits", model="vit_tiny_patch16_224",
                img_size=16, model_kwargs={"patch_size": 4}, epochs=1)
"""

from __future__ import annotations

from typing import Any

from ds_vit import config as flags
from ds_vit import layout


def train(**settings: Any) -> dict[str, Any]:
    """Train as `launch/train.py` does, with its flags as keyword arguments (underscores for dashes).

    Every rank calls it; a process group that exists already is used and left alone.

    Returns:
        What summary.json holds, on every rank.

    Raises:
        ValueError: an unknown setting (the nearest is named), or anything that the command line would refuse.
    """
    from ds_vit.train import run

    config, explicit = flags.from_values(settings)
    return run(config, explicit, layout.discover())
