"""A tiny run under each of ZeRO's wrappers: its command line, and its engine on a rank."""

import json

import oracle
import per_parameter as timm_side
import torch
from project import ROOT

BF16 = {"bf16": {"enabled": True}}
WRAPPER = {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}


def words(folder, stage, changes, path):
    """The command line of a tiny run."""
    data = json.loads((ROOT / "ds_configs" / f"cpu_zero{stage}_fp32.json").read_text())
    data |= {**changes, "gradient_clipping": timm_side.CLIP}
    path.write_text(json.dumps(data))
    argv = ["--model", oracle.MODEL, *oracle.kwargs_words(timm_side.KWARGS), "--img-size", oracle.IMG_SIZE]
    argv += ["--data-dir", folder, "--initial-checkpoint", folder / "weights.safetensors", "--val-split", ""]
    return [*argv, "--deepspeed_config", path, "-b", 2, "--workers", 0, "--no-aug", "--max-steps", 1]


def start(argv):
    """An engine as a run builds it."""
    from ds_vit import config as flags
    from ds_vit.engine.start import init_distributed, quiet_deepspeed
    from ds_vit.launching.process import discover, rendezvous
    from ds_vit.parallel.groups import build_groups
    from ds_vit.training.build import build_engine
    from ds_vit.training.plan import prepare

    quiet_deepspeed(False)
    process = discover()
    config, explicit = flags.parse([str(word) for word in argv])
    plan = prepare(config, explicit, process, on_cpu=True)
    init_distributed(rendezvous(process))
    return build_engine(plan, torch.device("cpu"), build_groups(plan.parallel.layout))
