"""The picture of token norms: timm's own numbers, the same in each layout that has it, and a line in those without."""

from __future__ import annotations

import numpy as np
import oracle
import pytest
import timm
import torch
from curves import train_in
from PIL import Image
from project import ROOT

from ds_vit.models import SequentialViT, take_apart
from ds_vit.training import token_maps

RUN = [*("--model", oracle.MODEL, *oracle.kwargs_words(), "--img-size", 16, "--dataset", "digits", "--workers", 0)]
RUN += ["--max-steps", 1, "--warmup-steps", 0, "-b", 16, "--model-kwargs", "patch_size=4", "embed_dim=32", "depth=2"]
RUN += ["num_heads=2", "--deepspeed_config", ROOT / "ds_configs" / "cpu_zero1_fp32.json"]


@pytest.mark.parametrize("name", ["vit_small_patch14_reg4_dinov2", "vit_small_patch16_rope_224"])
def test_norms_are_those_of_timm(name):
    # Catches: a register that is taken for a patch, tokens behind the last norm, another batch than the first.
    kwargs = {"patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 4}
    theirs = timm.create_model(name, num_classes=3, img_size=32, **kwargs).eval()
    model = SequentialViT(take_apart(theirs)).eval()
    images = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), token_maps.watched(model) as seen:
        model(images)
        model(torch.zeros_like(images))
    expected = theirs.forward_intermediates(images, indices=1, norm=False, intermediates_only=True)[0].norm(dim=1)
    torch.testing.assert_close(token_maps.norms_of(seen, model), expected.detach())


def test_every_layout_draws_the_same_or_says_why_not(ranks, tmp_path):
    # Catches: slices of tokens taken for tokens; a run that ends because its picture cannot be drawn.
    pictures = {}
    for name, world, words in (("one", 1, []), ("tp", 2, ["--tp", 2]), ("pp", 2, ["--pp", 2])):
        train_in(ranks, world, [*RUN, *words, "--output", tmp_path / name])
        path = tmp_path / name / "token-norms.png"
        pictures[name] = np.asarray(Image.open(path)).astype(int) if path.exists() else None
        shown = "how long the last block leaves" in (tmp_path / name / "report.html").read_text()
        assert shown == path.exists()
        assert ("without --pp" in (tmp_path / name / "report.html").read_text()) != path.exists()
    assert pictures["pp"] is None
    assert pictures["one"].shape == (2 * 116 - 4, 8 * 116 - 4, 3)
    assert pictures["one"].std() > 20
    assert np.abs(pictures["one"] - pictures["tp"]).max() <= 1
