"""Self-distillation from the weights of DINOv2 and DINOv3: each name of timm, each form of a published file."""

import functools

import published_dino as published
import pytest
import timm
import torch
from curves import assert_same_curve, train_in
from project import write_config
from published_dino import KWARGS, SIDE, kind_of
from runs import resolved
from safetensors.torch import save_file

from ds_vit.fault_tolerance.errors import UserError
from ds_vit.models.keyed_init import initialise
from ds_vit.models.layers import MAIN_TOWER, tower_of
from ds_vit.models.sequential import SequentialViT
from ds_vit.tasks.dino.towers import HEAD, TEACHER, TEACHER_HEAD

NAMES = [name for name in timm.list_models("*dinov[23]*") if name.startswith("vit_")]
SIZES = (24, 32, 16)
"""Prototypes, hidden and bottleneck width."""
WORDS = [
    *("--task", "dino", "--dataset", "digits", "--img-size", SIDE, "--workers", 0, "--val-split", ""),
    *("--model-kwargs", *(f"{name}={value}" for name, value in KWARGS.items())),
    *("--local-crops-size", 8, "--local-crops-number", 2, "--prototypes", SIZES[0], "--log-images", 0),
    *("--head-hidden-dim", SIZES[1], "--head-bottleneck-dim", SIZES[2]),
]


def test_timm_has_these_names():
    assert len(NAMES) == 20


def write(folder, contents, name="published.pth"):
    path = folder / name
    torch.save(contents, path)
    return path


def words_of(folder, name, file, *words):
    config = write_config(folder / "ds.json", 0, optimizer={"type": "SGD", "params": {"lr": 0.1}})
    argv = [*WORDS, "--model", name, "--initial-checkpoint", file, "--deepspeed_config", config]
    return [str(word) for word in (*argv, "--output", folder / "run", *words)]


def start(argv):
    """A run's notes in one line, and its towers with their initial values."""
    run = resolved(argv)
    whole, towers = run.model.whole, {}
    for name, layers in run.model.task.towers(whole).items():
        tower, weights = tower_of(whole, name), run.model.towers.get(name)
        initialise(tower, layers, seed=run.config.seed, device="cpu", checkpoint=weights)
        towers[name] = SequentialViT(layers).train()
    return " | ".join(run.notes), towers


def state_of(tower):
    """The tensors by their names in the tower."""
    return {name.split(".", 2)[2]: tensor for name, tensor in tower.state_dict().items()}


def assert_same_tokens(kind, state, towers):
    """Student and teacher against the float64 forward, all tokens, and the student's of masked patches."""
    generator = torch.Generator().manual_seed(2)
    images = torch.randn(2, 3, SIDE, SIDE, generator=generator)
    masks = torch.rand(2, published.GRID**2, generator=generator) < 0.4
    keys = torch.arange(2)
    for name, hidden in ((MAIN_TOWER, None), (TEACHER, None), (MAIN_TOWER, masks)):
        expected = published.tokens(kind, state, images, hidden)
        found = towers[name](images, keys) if hidden is None else towers[name](images, keys, hidden)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5, msg=f"{name}, {hidden is not None}")
        evaluated = towers[name].eval()(images, keys)
        towers[name].train()
        torch.testing.assert_close(
            evaluated.double(), published.tokens(kind, state, images)[:, 0], rtol=1e-5, atol=1e-5
        )


# ---- the backbone ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*NAMES, "vit_small_patch16_dinov3_qkvb without registers"])
def test_features_are_those_of_the_published_module(tmp_path, name):
    # Catches: positions of the class token added to registers, a rotary table of other coordinates, features that pool
    # patches, a key's bias, a mask token that is dropped, a teacher of random values, a DINOv3 without registers that
    # timm takes for a file of masked image modelling.
    name, without, _ = name.partition(" without")
    kind = kind_of(name)._replace(registers=0) if without else kind_of(name)
    state = published.backbone(kind)
    argv = words_of(tmp_path, name, write(tmp_path, state))
    if without:
        argv.insert(argv.index("--model-kwargs") + 1, "num_reg_tokens=0")
    notes, towers = start(argv)
    assert_same_tokens(kind, state, towers)
    assert "mask_token" not in notes
    assert "storage_tokens" not in notes
    assert ("--task dino adds global_pool=token to --model-kwargs" in notes) == (kind.generation == 3)
    assert f"{HEAD} is newly initialised: " in notes


PLACES = {
    "vit_giant_patch14_reg4_dinov2": {
        "mask_token": "mask_token",
        "register_tokens": "reg_token",
        "patch_embed.proj.weight": "patch_embed.proj.weight",
        "blocks.1.norm1.weight": "blocks.1.norm1.weight",
        "blocks.1.attn.qkv.bias": "blocks.1.attn.qkv.bias",
        "blocks.1.attn.proj.weight": "blocks.1.attn.proj.weight",
        "blocks.1.ls1.gamma": "blocks.1.ls1.gamma",
        "blocks.1.ls2.gamma": "blocks.1.ls2.gamma",
        "blocks.1.mlp.w12.weight": "blocks.1.mlp.fc1.weight",
        "blocks.1.mlp.w3.bias": "blocks.1.mlp.fc2.bias",
        "norm.weight": "norm.weight",
    },
    "vit_small_plus_patch16_dinov3_qkvb": {
        "mask_token": "mask_token",
        "cls_token": "cls_token",
        "storage_tokens": "reg_token",
        "blocks.1.norm2.bias": "blocks.1.norm2.bias",
        "blocks.1.attn.qkv.weight": "blocks.1.attn.qkv.weight",
        "blocks.1.ls1.gamma": "blocks.1.gamma_1",
        "blocks.1.ls2.gamma": "blocks.1.gamma_2",
        "blocks.1.mlp.w1.weight": "blocks.1.mlp.fc1_g.weight",
        "blocks.1.mlp.w2.weight": "blocks.1.mlp.fc1_x.weight",
        "blocks.1.mlp.w3.bias": "blocks.1.mlp.fc2.bias",
        "norm.bias": "norm.bias",
    },
}
"""Names there → names here, where the values stay the same."""


@pytest.mark.parametrize("name", PLACES)
def test_each_name_has_its_place(tmp_path, name):
    state = published.backbone(kind_of(name))
    _, towers = start(words_of(tmp_path, name, write(tmp_path, state)))
    student, teacher = state_of(towers[MAIN_TOWER]), state_of(towers[TEACHER])
    for there, here in PLACES[name].items():
        assert torch.equal(student[here].flatten(), state[there].flatten()), (there, here)
        assert here == "mask_token" or torch.equal(teacher[here], student[here]), here
    if name.endswith("dinov3_qkvb"):
        bias = state["blocks.1.attn.qkv.bias"].chunk(3)
        assert torch.equal(student["blocks.1.attn.q_bias"], bias[0])
        assert torch.equal(student["blocks.1.attn.v_bias"], bias[2])
    else:  # the class token carries its position, and patches have theirs
        assert torch.equal(student["cls_token"], state["cls_token"] + state["pos_embed"][:, :1])
        assert torch.equal(student["pos_embed"], state["pos_embed"][:, 1:])


UNTIED = {
    ("cls_norm", "local_cls_norm"): ("--untie-cls-and-patch-norms", "--untie-global-and-local-cls-norm"),
    ("local_cls_norm",): ("--untie-global-and-local-cls-norm",),
    ("cls_norm",): ("--untie-cls-and-patch-norms",),
}


@pytest.mark.parametrize("norms", UNTIED)
def test_separate_norms_have_their_flags(tmp_path, norms):
    # Catches: the norm of patches under the features of images, norms of a file that are passed over.
    name = "vit_7b_patch16_dinov3"
    kind = kind_of(name)
    state = published.backbone(kind, untied=norms)
    argv = words_of(tmp_path, name, write(tmp_path, state))
    notes, towers = start([*argv, *UNTIED[norms]])
    assert_same_tokens(kind, state, towers)
    student = state_of(towers[MAIN_TOWER])
    for theirs, ours in {"local_cls_norm": "local_cls_norm", "cls_norm": "norm"}.items():
        assert theirs not in norms or torch.equal(student[f"{ours}.weight"], state[f"{theirs}.weight"])
    assert "not loaded" not in notes
    notes, towers = start(argv)
    for flag in UNTIED[norms]:
        assert f"({flag}) of 2 tensors, which is not loaded" in notes
    if "cls_norm" in norms:  # features of images are the published ones all the same
        del state["norm.weight"], state["norm.bias"]
        state |= {f"norm.{part}": state[f"cls_norm.{part}"] for part in ("weight", "bias")}
    assert_same_tokens(kind, state, towers)


def test_a_file_without_a_mask_token_leaves_it_its_initial_value(tmp_path):
    name = "vit_small_patch16_dinov3"
    state = published.backbone(kind_of(name))
    file = write(tmp_path, {name: tensor for name, tensor in state.items() if name != "mask_token"})
    notes, towers = start(words_of(tmp_path, name, file))
    assert "newly initialised: mask_token" in notes
    assert not state_of(towers[MAIN_TOWER])["mask_token"].any()


def test_a_classifier_starts_from_a_published_backbone_too(tmp_path):
    # Catches: a mask token that is put aside, so that timm does not see that the file is DINOv2's.
    name = "vit_small_patch14_reg4_dinov2"
    argv = words_of(tmp_path, name, write(tmp_path, published.backbone(kind_of(name))))
    argv = [*argv[argv.index("--dataset") : argv.index("--local-crops-size")], *argv[argv.index("--model") :]]
    assert "has a mask token of 1 tensor, which is not loaded" in " ".join(resolved(argv).notes)


def test_biases_that_the_model_lacks_are_refused(tmp_path):
    # Catches: features of a model without the biases that its file has.
    kind = kind_of("vit_small_patch16_dinov3_qkvb")
    file = write(tmp_path, published.backbone(kind))
    with pytest.raises(UserError, match="vit_small_patch16_dinov3_qkvb"):
        resolved(words_of(tmp_path, "vit_small_patch16_dinov3", file))


# ---- files of training, and heads ------------------------------------------------------------------------------------

FORMS = {
    "teacher": "teacher.backbone.",
    "model": "teacher.backbone.",
    "model, EMA": "model_ema.backbone.",
    "safetensors": "module.backbone.",
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ["vit_small_patch14_dinov2", "vit_small_patch16_dinov3_qkvb"])
def test_files_of_training(tmp_path, name, form):
    # Catches: the student of a file, a head that is passed over or that the teacher lacks, the head of patches.
    kind = kind_of(name)
    state = published.backbone(kind)
    if form == "safetensors":
        file = tmp_path / "published.safetensors"
        save_file(published.below("module.backbone.", state), str(file))
    else:
        contents = published.training_file(kind, SIZES, form)
        if kind.generation == 2:
            contents = {key: published.in_chunks(value) if key in form else value for key, value in contents.items()}
        file = write(tmp_path, contents)
    notes, towers = start(words_of(tmp_path, name, file))
    assert f'names begin with "{FORMS[form]}" in the file, which is cut off' in notes
    assert_same_tokens(kind, state, towers)
    if form == "safetensors":
        assert f"{HEAD} is newly initialised: " in notes
        return
    assert_same_heads(published.head(kind.generation, *SIZES), towers)
    assert "its prototypes have lengths of" in notes
    assert "ignored: ibot_head.last_layer.weight" in notes
    assert "its ibot_head is not used: one head serves class tokens and patches" in notes


def assert_same_heads(state, towers):
    """Both heads against the published module's, in float64, up to the lengths of its prototypes."""
    rows = torch.randn(5, published.WIDTH, generator=torch.Generator().manual_seed(3))
    expected = published.cosines(state, rows)
    for name in (HEAD, TEACHER_HEAD):
        features, weight, lengths = towers[name](rows)
        found = features @ (weight / lengths[:, None]).T
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5, msg=name)


def parametrized(state):
    """torch's newer names of a weight-normalised layer."""
    of_norm = {"weight_g": "parametrizations.weight.original0", "weight_v": "parametrizations.weight.original1"}
    return {functools.reduce(lambda n, pair: n.replace(*pair), of_norm.items(), name): t for name, t in state.items()}


HEAD_FILES = {
    "ours": lambda: published.below("dino_head.", published.head(3, *SIZES)),
    "bare": lambda: published.head(2, *SIZES),
    "parametrized": lambda: parametrized(published.head(2, *SIZES)),
    "of training": lambda: {
        "teacher": published.below("dino_head.", published.head(2, *SIZES))
        | published.below("ibot_head.", published.head(2, *SIZES, seed=5))
    },
}


@pytest.mark.parametrize("form", HEAD_FILES)
def test_a_head_from_its_own_file(tmp_path, form):
    name = "vit_small_patch14_dinov2"
    backbone = write(tmp_path, published.backbone(kind_of(name)))
    contents = HEAD_FILES[form]()
    head = write(tmp_path, contents, "head.pth")
    notes, towers = start(words_of(tmp_path, name, backbone, "--initial-head", head))
    assert f"{HEAD} from {head}: 7 of 7 tensors taken" in notes
    lengths = contents.get("last_layer.weight_g")
    if lengths is not None:
        assert f"its prototypes have lengths of {lengths.min():.3g} to {lengths.max():.3g}, which count as 1" in notes
    assert_same_heads(published.head(3 if form == "ours" else 2, *SIZES), towers)


def test_a_head_loaded_into_one_of_the_two_is_seen(tmp_path, monkeypatch):
    from ds_vit.weights.initial_checkpoint import InitialCheckpoint

    name = "vit_small_patch14_dinov2"
    argv = words_of(tmp_path, name, write(tmp_path, published.training_file(kind_of(name), SIZES, "teacher")))
    whole = InitialCheckpoint.towers
    for missing in (HEAD, TEACHER_HEAD):
        monkeypatch.setattr(InitialCheckpoint, "towers", property(lambda self, m=missing: whole.fget(self) - {m}))
        with pytest.raises(AssertionError, match=missing):
            assert_same_heads(published.head(2, *SIZES), start(argv)[1])


UNFIT = {
    "sizes": (
        lambda: published.head(2, 40, 32, 16),
        r"does not fit the projection head: its head has --prototypes 40, and the model 24; give --prototypes 40",
    ),
    "layers": (
        lambda: published.head(2, *SIZES) | {"mlp.6.weight": torch.zeros(16, 16)},
        r"its head has other layers \(mlp.6.weight\)",
    ),
    "none": (lambda: published.backbone(kind_of("vit_small_patch14_dinov2")), "it has no dino_head"),
}


@pytest.mark.parametrize("kind", UNFIT)
def test_a_head_that_does_not_fit(tmp_path, kind):
    # Catches: prototypes of random values where a head was asked for.
    make, message = UNFIT[kind]
    name = "vit_small_patch14_dinov2"
    backbone = published.backbone(kind_of(name))
    head = write(tmp_path, make(), "head.pth")
    with pytest.raises(UserError, match=f"--initial-head: .*{message}"):
        resolved(words_of(tmp_path, name, write(tmp_path, backbone), "--initial-head", head))
    both = published.below("backbone.", backbone)
    both |= published.below("dino_head." if kind != "none" else "", make() if kind != "none" else {})
    notes, _ = start(words_of(tmp_path, name, write(tmp_path, both)))
    assert f"{HEAD} is newly initialised: " in notes
    assert message.replace("\\", "") in notes


# ---- runs ------------------------------------------------------------------------------------------------------------

KINDS = {kind_of(name): name for name in reversed(NAMES)}
"""A name of each model that differs from the others at this width and depth."""
STEPS = 3


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS.values())
def test_each_model_trains_alike_in_any_layout(ranks, tmp_path, name):
    # Catches: a head or a backbone that a sharded model does not load, rotary tables that tensor parallelism breaks.
    file = write(tmp_path, published.training_file(kind_of(name), SIZES, "teacher"))
    sgd = {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}, "gradient_clipping": 0.02}
    configs = {stage: write_config(tmp_path / f"{stage}.json", stage, **sgd) for stage in (0, 1, 3)}
    words = ["--epochs", 1, "--warmup-epochs", 0, "--freeze-last-layer-epochs", 0, "--log-interval", 1]
    words += ["--checkpoint-interval", 1]

    def argv(stage, *more):
        return words_of(tmp_path, name, file, *words, "--deepspeed_config", configs[stage], *more)

    output = tmp_path / "other"
    expected = train_in(ranks, 2, argv(1, "-b", 4, "--tp", 2, "--max-steps", STEPS, "--output", tmp_path / "tp"))
    train_in(ranks, 2, argv(3, "-b", 2, "--max-steps", 1, "--output", output))
    resumed = ["--recipe", output / "config.yaml", "--resume", "auto", "--deepspeed_config", configs[0]]
    found = train_in(ranks, 1, [*resumed, "-b", 4, "--max-steps", STEPS, "--output", output])
    assert_same_curve(expected, found, rtol=1e-5)
    assert "global_pool" in (output / "config.yaml").read_text() or kind_of(name).generation == 2
