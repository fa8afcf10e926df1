"""--drop-path-compute: sharded blocks of other kinds than the layout matrix has; keys on the host; the start table."""

from __future__ import annotations

import oracle
import pytest
from curves import assert_same_curve, train_in
from project import ROOT
from runs import DIGITS, KINDS

from ds_vit.train import main

CONFIGS = ROOT / "ds_configs"
RTOL = 1e-5
TINY = {"patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 2, "proj_drop_rate": 0.1}
BASE = [*DIGITS, "--val-split", "", "--mixup", 0.4, "--max-steps", 4, "--log-interval", 1, "--warmup-steps", 1]
# With one or two samples in a micro-batch many a branch keeps none.
BASE += ["--lr", 2e-3, "--drop-path", 0.6]


def argv_of(name, kwargs, stage, *words):
    model = ["--model", name, *oracle.kwargs_words(kwargs)]
    return [*BASE, *model, "--deepspeed_config", CONFIGS / f"cpu_zero{stage}_fp32.json", *words]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("parallel scaling block", "--tp 2 --sequence-parallel"),
        ("Eva, fixed RoPE", "--tp 2 --sequence-parallel"),
        ("Eva, learned RoPE", "--tp 2"),
    ],
)
def test_cut_blocks_of_other_kinds(ranks, kind, words):
    """A cut block whose forward is another than timm's, rotary tables of each sample."""
    name, extra = KINDS[kind]
    patches = {"patch_drop_rate": 0.25, "patch_size": 4} if "RoPE" in kind else {}
    kwargs = {**TINY, **extra, **patches}
    all_rows = train_in(ranks, 1, argv_of(name, kwargs, 1, "-b", 8, "--drop-path-compute", "all"))
    kept = argv_of(name, kwargs, 1, *words.split(), "-b", 4, "--grad-accum-steps", 2, "--drop-path-compute", "kept")
    assert_same_curve(all_rows, train_in(ranks, 2, kept), rtol=RTOL)


def host_keys_seen(argv):
    """On a rank: train, and say of each micro-batch whether the host's keys were those of the device."""
    from unittest import mock

    import torch

    from ds_vit.models.sequential import SequentialViT

    seen = []
    forward = SequentialViT.forward

    def noting(self, images, keys):
        if self.training:
            seen.append(torch.equal(self.keys_on_host, keys))
        return forward(self, images, keys)

    with mock.patch.object(SequentialViT, "forward", noting):
        assert main(argv) == 0
    return seen


@pytest.mark.parametrize("words", ["", "--tp 2"])
def test_the_host_knows_the_keys_of_each_micro_batch(ranks, tmp_path, words):
    """Keys of another step or rank: on a GPU the rows of other samples. None, and the host would wait."""
    argv = argv_of(
        oracle.MODEL, TINY, 1, *words.split(), "-b", 2, "--grad-accum-steps", 2, "--output", tmp_path / "run"
    )
    assert ranks.run(2, host_keys_seen, [str(word) for word in argv]) == [[True] * 8] * 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("-b 8", "up to 0.6, 4 of 4 branches computed only for the samples that they keep (auto)"),
        ("-b 1 --mixup 0", "up to 0.6, 2 of 4 branches computed only for the samples that they keep (auto)"),
        ("-b 8 --drop-path-compute all", "up to 0.6, all samples (all)"),
        ("-b 8 --drop-path 0", None),
    ],
)
def test_the_start_table_says_what_was_decided(capsys, words, said):
    """A choice that is made in silence."""
    assert main([str(word) for word in argv_of(oracle.MODEL, TINY, 1, *words.split(), "--dry-run")]) == 0
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert (said in shown) if said else ("drop-path" not in shown)
