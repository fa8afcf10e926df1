"""A tiny run under each of ZeRO's wrappers: its command line, and its engine on a rank."""

import contextlib

import oracle
import torch
from project import write_config

BF16 = {"bf16": {"enabled": True}}
WRAPPER = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}


@contextlib.contextmanager
def whole_weights(engine):
    """Within it, the weights of an engine are whole, at ZeRO-3 too (a collective)."""
    units = engine.units
    if units is not None:
        units._begin_pass()
        for unit in units.units:
            units._gather(unit, None)
    yield
    if units is not None:
        units._release_all(kept=True)


def words(folder, stage, changes, path):
    """The command line of a tiny run."""
    write_config(path, stage, **{**changes, "gradient_clipping": oracle.CLIP})
    argv = ["--model", oracle.MODEL, *oracle.kwargs_words(oracle.DEEP_KWARGS), "--img-size", oracle.IMG_SIZE]
    argv += ["--data-dir", folder, "--initial-checkpoint", folder / "weights.safetensors", "--val-split", ""]
    return [*argv, "--deepspeed_config", path, "-b", 2, "--workers", 0, "--no-aug", "--max-steps", 1]


def start(argv):
    """An engine as a run builds it."""
    from ds_vit.config import parser as flags
    from ds_vit.engine.start import init_distributed, quiet_deepspeed
    from ds_vit.launching.process import discover, rendezvous
    from ds_vit.parallel.groups import build_groups
    from ds_vit.training.build_engine import build_engine
    from ds_vit.training.resolve import resolve
    from ds_vit.training.run import World

    quiet_deepspeed(False)
    process = discover()
    config = flags.parse([str(word) for word in argv])
    plan = resolve(config, World(process, on_cpu=True))
    init_distributed(rendezvous(process))
    return build_engine(plan, torch.device("cpu"), build_groups(plan.layout))
