"""Runs: resolved, refused, or whole on ranks and watched (output, decodes, drift); and the models they train."""

import contextlib
import io
from unittest import mock

DIGITS = ("--dataset", "digits", "--model", "vit_tiny_patch16_224", "--img-size", "16", "--workers", "0")

ONE_BLOCK = (*DIGITS, "--model-kwargs", "patch_size=8", "embed_dim=24", "depth=1", "num_heads=2")
"""A run whose steps take milliseconds."""

KINDS = {
    "registers, average pool": ("vit_small_patch14_reg4_dinov2", {"global_pool": "avg"}),
    "SigLIP map head": ("vit_base_patch16_siglip_224", {}),
    "SwiGLU, qk norm": ("aimv2_large_patch14_224", {}),
    "GluMlp": ("vit_giant_patch14_dinov2", {}),
    "parallel scaling block": ("vit_base_patch16_xp_224", {}),
    "layer scale": ("deit3_small_patch16_224", {}),
    "Eva, fixed RoPE": ("vit_small_patch16_rope_224", {}),
    "Eva, learned RoPE": ("vit_small_patch16_rope_mixed_224", {}),
}


def resolved(argv, world=1, rank=0, *, on_cpu=True):
    """What a run on so many ranks of one host resolves to, on one of them, in this process."""
    from ds_vit.config.parser import parse
    from ds_vit.launching.process import Process
    from ds_vit.training.resolve import resolve
    from ds_vit.training.run import World

    config = parse([str(word) for word in argv])
    return resolve(config, World(Process("env", rank, world, rank, world), on_cpu))


def refusal(capsys, argv):
    """The one line of a command line of training that is refused before any process group exists."""
    import torch.distributed as dist

    from ds_vit.train import main

    assert main([str(word) for word in argv]) == 2
    assert not dist.is_initialized()
    [line] = [line for line in capsys.readouterr().err.splitlines() if line.startswith("train.py: error")]
    return line


def unpredicted():
    """Runs without a prediction of their memory, a fifth of the time of a small one.

    Tests of the planner compare it with what runs take; the layout matrix predicts in every layout.
    """
    from ds_vit.training.cost import PeakMemory

    return mock.patch.object(PeakMemory, "start_rows", return_value=[])


def run_quietly(argv, prepare_rank=None, main=None):
    """On a rank: main (by default of training), and what it said on stdout and stderr."""
    if main is None:
        from ds_vit.train import main

        prepare_rank = prepare_rank or unpredicted
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), (prepare_rank or contextlib.nullcontext)():
        code = main([str(word) for word in argv])
    return code, out.getvalue(), err.getvalue()


@contextlib.contextmanager
def pretend_fp16():
    """Let a CPU take fp16, as an accelerator would."""
    import functools

    from deepspeed.accelerator import get_accelerator

    from ds_vit.config import deepspeed_rules

    precision = functools.partial(deepspeed_rules.precision)

    def on_gpu(data, path, *, on_cpu):
        return precision(data, path, on_cpu=False)

    with (
        mock.patch.object(type(get_accelerator()), "is_fp16_supported", return_value=True),
        mock.patch.object(deepspeed_rules, "precision", on_gpu),
    ):
        yield


def count_decodes(argv):
    """On a rank: train, and give (stage's images read, targets read); the report's own looks do not count."""
    from ds_vit.data.sources import folders
    from ds_vit.train import main

    counts = {"images": 0, "targets": 0}
    sources = [c for c in vars(folders).values() if isinstance(c, type) and issubclass(c, folders.Source)]
    originals = []
    for source in sources:
        for what, method in (("images", "encoded"), ("targets", "target")):
            if method not in vars(source) or source is folders.Source:
                continue
            original = getattr(source, method)
            originals.append((source, method, original))

            def counted(self, index, what=what, original=original):
                counts[what] += 1
                return original(self, index)

            setattr(source, method, counted)
    try:
        looks = ("ds_vit.tasks.classification.task.write_predictions", "ds_vit.monitoring.sheets.TrainingSheet.add")
        with mock.patch(looks[0]), mock.patch(looks[1]), unpredicted():
            assert main(argv) == 0
    finally:
        for source, method, original in originals:
            setattr(source, method, original)
    return counts


def drift(argv, rank_that_drifts):
    """On a rank: train, and move one weight of one rank by one unit in the last place after the second step."""
    import torch

    from ds_vit.engine import base
    from ds_vit.train import main

    original = base.Engine._result
    steps = 0

    def drifting(self, loss):
        nonlocal steps
        steps += 1
        if steps == 2 and torch.distributed.get_rank() == rank_that_drifts:
            weight = next(self.module.parameters()).data.view(-1)
            weight[0] = torch.nextafter(weight[0], torch.tensor(9.0))
        return original(self, loss)

    base.Engine._result = drifting
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), unpredicted():
            return main(argv), said.getvalue()
    finally:
        base.Engine._result = original
