"""Models whose blocks learn their rotary frequencies together, in pipelines: they cross stages beside the tokens."""

import json

import oracle
import pytest
from curves import assert_same_curve, train_in
from project import ROOT
from safetensors.torch import load_file, save_file

RTOL = 1e-5
NAME = "vit_small_patch16_rope_mixed_ape_224"
KWARGS = oracle.KWARGS | {"num_heads": 2}
NUM_IMAGES, CHANGE = 32, 4

HEAD, EMBED = ("--pp-partition", "0,5,6"), ("--pp-partition", "0,1,6")  # the head, the embedding on its own stage
# name → ranks, ZeRO stage, what else the command line says
LAYOUTS = {
    "pp2": (2, 1, ("--pp", 2)),
    "pp2-head": (2, 1, ("--pp", 2, *HEAD)),
    "pp2-head-zero0": (2, 0, ("--pp", 2, *HEAD)),
    "pp2-embedding": (2, 1, ("--pp", 2, *EMBED)),
    "pp2-recomputing": (2, 1, ("--pp", 2, *HEAD, "--grad-checkpointing")),
    "pp3": (3, 1, ("--pp", 3, "--pp-partition", "0,1,5,6")),
    "pp2-dp2": (4, 1, ("--pp", 2, *HEAD)),
    "tp2-zero3": (2, 3, ("--tp", 2)),
    "tp2-pp2-head": (4, 1, ("--pp", 2, "--tp", 2, *HEAD)),
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
    oracle.cifar_folder(real_images / "cifar10" / "train.tar", folder, NUM_IMAGES, "train")
    path = folder / "weights.safetensors"
    oracle.write_weights(path, num_classes=10, name=NAME, **KWARGS)
    weights = {name: 6 * w if name.endswith("qkv.weight") else w for name, w in load_file(str(path)).items()}
    save_file(weights, str(path))
    return folder


@pytest.fixture(scope="module")
def plain(cifar):
    """The plain loop's curve, by what is frozen; SGD, which a constant factor in a gradient shows in."""
    made = {}

    def get(kind):
        if kind not in made:
            settings = {"name": NAME, "frozen": FROZEN[kind], "model_kwargs": KWARGS, "lr": oracle.SGD_LR}
            made[kind] = oracle.train_plainly(cifar, "sgd", **settings).rows
        return made[kind]

    return get


def command(folder, kind, layout, output, *words):
    """Ranks and command line of our run."""
    world, stage, cut = LAYOUTS[layout]
    data = json.loads((ROOT / "ds_configs" / f"cpu_zero{stage}_fp32.json").read_text())
    params = {"lr": oracle.SGD_LR, "momentum": 0.9, "weight_decay": oracle.WEIGHT_DECAY}
    data |= {"optimizer": {"type": "SGD", "params": params}, "gradient_clipping": oracle.CLIP}
    config = output.parent / f"{output.name}.json"
    config.write_text(json.dumps(data))
    dp = 2 if layout.endswith("dp2") else 1
    argv = ["--model", NAME, *oracle.kwargs_words(KWARGS), "--img-size", oracle.IMG_SIZE, "--workers", 0]
    argv += ["--no-aug", "--smoothing", 0, "--mean", 0.5, 0.5, 0.5, "--std", 0.5, 0.5, 0.5, "--val-split", ""]
    argv += ["--sched", "constant", "--warmup-epochs", 0, "--max-steps", oracle.STEPS, "--log-interval", 1]
    argv += ["--data-dir", folder, "--deepspeed_config", config, "--output", output]
    argv += ["-b", NUM_IMAGES // dp // 4, "--grad-accum-steps", 4, *cut, *words]
    if FROZEN[kind]:
        argv += ["--freeze", *FROZEN[kind]]
    return world, [str(word) for word in argv]


def test_the_frequencies_matter(plain):
    """Curves that are the same whether the frequencies learn or not would prove nothing."""
    for kind in ("frozen", "alone"):
        with pytest.raises(AssertionError, match="the curves part"):
            assert_same_curve(plain("trained"), plain(kind), rtol=100 * RTOL)


@pytest.mark.parametrize(("layout", "kind", "other"), CASES)
def test_equals_timm_and_resumes_in_another_layout(ranks, cifar, plain, layout, kind, other, tmp_path):
    """A gradient of the frequencies that a stage keeps, loses or doubles, or that another one waits for in vain."""
    start = ["--initial-checkpoint", cifar / "weights.safetensors", "--checkpoint-interval", CHANGE]
    start += ["--keep-checkpoints", 0]
    rows = train_in(ranks, *command(cifar, kind, layout, tmp_path / "run", *start))
    assert_same_curve(plain(kind), rows, rtol=RTOL)
    path = tmp_path / "run" / "checkpoints" / f"step-{CHANGE:08}"
    rows = train_in(ranks, *command(cifar, kind, other, tmp_path / "other", "--resume", path))
    assert_same_curve(plain(kind)[CHANGE:], rows, rtol=RTOL)
