"""Models whose blocks learn their rotary frequencies together, in pipelines: they cross stages beside the tokens."""

import functools

import oracle
import pytest
from curves import assert_same_curve, train_in
from safetensors.torch import load_file, save_file

RTOL = 1e-5
NAME = "vit_small_patch16_rope_mixed_ape_224"
KWARGS = oracle.KWARGS | {"num_heads": 2}
CHANGE = 4

HEAD, EMBED = ("--pp-partition", "0,5,6"), ("--pp-partition", "0,1,6")  # the head, the embedding on its own stage
# name → pp, dp, tp, ZeRO stage; what else the command line says
LAYOUTS = {
    "pp2": ((2, 1, 1, 1), ()),
    "pp2-head": ((2, 1, 1, 1), HEAD),
    "pp2-head-zero0": ((2, 1, 1, 0), HEAD),
    "pp2-embedding": ((2, 1, 1, 1), EMBED),
    "pp2-recomputing": ((2, 1, 1, 1), (*HEAD, "--grad-checkpointing")),
    "pp3": ((3, 1, 1, 1), ("--pp-partition", "0,1,5,6")),
    "pp2-dp2": ((2, 2, 1, 1), HEAD),
    "tp2-zero3": ((1, 1, 2, 3), ()),
    "tp2-pp2-head": ((2, 1, 2, 1), HEAD),
}
# All trained; the frequencies frozen; the frequencies all that is trained of the embedding.
FROZEN = {"trained": (), "frozen": ("rope",), "alone": ("patch_embed", "cls_token", "pos_embed")}
# A layout, what is frozen, and the layout that the run is resumed in.
CASES = [
    ("pp2", "frozen", "tp2-zero3"),
    ("pp2-head", "trained", "pp2-recomputing"),
    ("pp2-embedding", "alone", "pp2-head-zero0"),
    pytest.param("tp2-pp2-head", "trained", "pp3", marks=pytest.mark.slow),
    pytest.param("pp3", "alone", "pp2-dp2", marks=pytest.mark.slow),
    pytest.param("tp2-zero3", "trained", "pp2-head-zero0", marks=pytest.mark.slow),
    pytest.param("pp2-dp2", "frozen", "tp2-pp2-head", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def cifar(tmp_path_factory, real_images):
    """32 CIFAR-10 images and random initial weights, whose attention is so sharp that the frequencies matter."""
    folder = tmp_path_factory.mktemp("rope")
    oracle.cifar_folder(real_images / "cifar10" / "train.tar", folder, oracle.NUM_IMAGES, "train")
    path = folder / "weights.safetensors"
    oracle.write_weights(path, num_classes=10, name=NAME, **KWARGS)
    weights = {name: 6 * w if name.endswith("qkv.weight") else w for name, w in load_file(str(path)).items()}
    save_file(weights, str(path))
    return folder


@pytest.fixture(scope="module")
def plain(cifar):
    """The plain loop's curve, by what is frozen; SGD, which a constant factor in a gradient shows in."""
    settings = {"name": NAME, "model_kwargs": KWARGS, "lr": oracle.SGD_LR}
    return functools.cache(lambda kind: oracle.train_plainly(cifar, "sgd", frozen=FROZEN[kind], **settings).rows)


def train(ranks, folder, kind, layout, output, *words):
    """Our run: its rows."""
    (pp, dp, tp, stage), cut = LAYOUTS[layout]
    pieces = ["-b", oracle.NUM_IMAGES // dp // 4, "--grad-accum-steps", 4]
    frozen = ["--freeze", *FROZEN[kind]] if FROZEN[kind] else []
    words = ["--model", NAME, *pieces, *cut, *frozen, *words]
    sgd = {"params": {"lr": oracle.SGD_LR}, "model_kwargs": KWARGS}
    return train_in(ranks, pp * dp * tp, oracle.command(folder, "sgd", (pp, dp, tp, stage), output, *words, **sgd))


def test_the_frequencies_matter(plain):
    """Curves that are the same whether the frequencies learn or not would prove nothing."""
    for kind in ("frozen", "alone"):
        with pytest.raises(AssertionError, match="the curves part"):
            assert_same_curve(plain("trained"), plain(kind), rtol=100 * RTOL)


@pytest.mark.parametrize(("layout", "kind", "other"), CASES)
def test_equals_timm_and_resumes_in_another_layout(ranks, cifar, plain, layout, kind, other, tmp_path):
    """A gradient of the frequencies that a stage keeps, loses or doubles, or that another one waits for in vain."""
    saving = ["--checkpoint-interval", CHANGE, "--keep-checkpoints", 0]
    rows = train(ranks, cifar, kind, layout, tmp_path / "run", *saving)
    assert_same_curve(plain(kind), rows, rtol=RTOL)
    path = tmp_path / "run" / "checkpoints" / f"step-{CHANGE:08}"
    rows = train(ranks, cifar, kind, other, tmp_path / "other", "--resume", path)
    assert_same_curve(plain(kind)[CHANGE:], rows, rtol=RTOL)
