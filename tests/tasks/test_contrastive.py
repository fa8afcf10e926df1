"""The contrastive losses against open_clip's, and the tasks `clip` and `siglip` against a plain loop.

tests/parallel/test_layouts.py has their layouts.
"""

import functools
import itertools
import json
import math
import re
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from curves import assert_same_curve, largest_deviation, read_rows, train_in, train_main
from micro_batches import tensors_of
from peaks import LargestTensor, SavedBytes
from picture_folders import encoded, made
from project import ROOT, write_config
from runs import refusal, resolved
from safetensors.torch import load_file, save_file

from ds_vit.config.timm_flags import timm_answer
from ds_vit.device import matmul_precision
from ds_vit.models.param_groups import frozen_names
from ds_vit.models.zoo import ModelSpec
from ds_vit.tasks.clip.loss import CLIP_LOSS, ROWS_AT_ONCE, SIGLIP_LOSS
from ds_vit.tasks.clip.task import Clip, SigLip
from ds_vit.tasks.clip.tower import TextSettings, create_contrastive_model
from ds_vit.tasks.clip.weights import CLIP_NAMES
from ds_vit.tasks.registry import refused_flags
from ds_vit.training.resolve.record import identity_of

LOSSES = {
    "clip": (CLIP_LOSS, (math.log(1 / 0.07),)),
    "siglip": (SIGLIP_LOSS, (math.log(10.0), -10.0)),
}


def pairs(number, width=32, dtype=torch.float64):
    """Normalised features of images and of texts that resemble them."""
    generator = torch.Generator().manual_seed(number)
    images, noise = torch.randn(2, number, width, generator=generator, dtype=torch.float64)
    return [F.normalize(rows).to(dtype).requires_grad_() for rows in (images, images + noise)]


def gradients_of(loss, features, logits):
    """A loss, and its gradients with respect to features, scale and bias."""
    return [loss.detach(), *torch.autograd.grad(loss, [*features, logits])]


def theirs(task, features, logits):
    """open_clip's loss, in one process."""
    open_clip_loss = pytest.importorskip("open_clip.loss")
    if task == "clip":
        return open_clip_loss.ClipLoss()(*features, logits[0].exp())
    return open_clip_loss.SigLipLoss()(*features, logits[0].exp(), logits[1])


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)], ids=str)
@pytest.mark.parametrize("task", LOSSES)
def test_loss_and_gradients_equal_open_clips(task, dtype, tolerance, monkeypatch):
    # Catches: a factor, a sign, a chunk left out or counted twice, a gradient of scale or bias of one chunk only.
    monkeypatch.setattr("ds_vit.tasks.clip.loss.ROWS_AT_ONCE", 24)  # the last chunk is smaller
    loss, initial = LOSSES[task]
    features, logits = pairs(64, dtype=dtype), torch.tensor(initial, dtype=dtype, requires_grad=True)
    expected = gradients_of(theirs(task, features, logits), features, logits)
    found = gradients_of(loss(features, logits, lambda rows: rows, 0), features, logits)
    for ours, other in zip(found, expected, strict=True):
        assert torch.linalg.norm(ours - other) <= tolerance * torch.linalg.norm(other)


@pytest.mark.parametrize("task", LOSSES)
def test_tf32_does_not_reach_the_loss(task):
    # Catches: logits of up to 100 with mantissas of 10 bits.
    (loss, initial), met = LOSSES[task], set()

    def noted(*args):
        met.add(torch.get_float32_matmul_precision())
        return loss.terms(*args)

    features, logits = pairs(8, dtype=torch.float32), torch.tensor(initial, requires_grad=True)
    with matmul_precision("high"):
        loss._replace(terms=noted)(features, logits, lambda rows: rows, 0).backward()
        assert torch.get_float32_matmul_precision() == "high"
    assert met == {"highest"}


@pytest.mark.parametrize("task", LOSSES)
def test_the_mean_over_ranks_is_the_loss_of_all_pairs(task):
    # Catches: labels without the rank's offset, a share that is divided by another number than the others.
    loss, initial = LOSSES[task]
    features, logits = pairs(48), torch.tensor(initial, dtype=torch.float64, requires_grad=True)
    expected = gradients_of(loss(features, logits, lambda rows: rows, 0), features, logits)
    shares = []
    for first in (0, 16, 32):
        own = [rows[first : first + 16] for rows in features]
        whole = {id(part): rows for part, rows in zip(own, features, strict=True)}
        shares.append(loss(own, logits, lambda part, whole=whole: whole[id(part)], first))
    found = gradients_of(sum(shares) / 3, features, logits)
    for ours, other in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, other, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("dp", [1, 2])
@pytest.mark.parametrize("task", LOSSES)
def test_memory_grows_linearly(task, dp):
    # Catches: a matrix of all pairs, in the forward or the backward pass, or saved between them.
    loss, initial = LOSSES[task]
    saved = {}
    for number in (512, 1024):
        features, logits = pairs(number, dtype=torch.float32), torch.tensor(initial, requires_grad=True)
        own = [rows[: number // dp] for rows in features]
        whole = {id(part): rows for part, rows in zip(own, features, strict=True)}
        with LargestTensor() as largest:
            with SavedBytes() as kept:
                value = loss(own, logits, lambda part, whole=whole: whole[id(part)], 0)
            value.backward()
        assert largest.numbers <= max(ROWS_AT_ONCE * number, number * 32)
        assert largest.numbers < number**2
        saved[number] = kept.total
    assert saved[1024] <= 2 * saved[512] + 64


# ---- runs -------------------------------------------------------------------------------------------------

GLOBAL_BATCH, STEPS, RTOL = 48, 8, 1e-5
WORDS = [
    *("--dataset", "glyphs", "--model", "vit_tiny_patch16_224", "--img-size", 16, "--workers", 0, "--val-split", ""),
    *("--model-kwargs", "patch_size=8", "embed_dim=24", "depth=2", "num_heads=2", "--drop-path", 0.2),
    *("--text-width", 24, "--text-depth", 2, "--text-heads", 2, "--context-length", 24, "--embed-dim", 16),
    *("--epochs", 1, "--max-steps", STEPS, "--log-interval", 1, "--warmup-steps", 2, "--checkpoint-interval", 0),
]
ADAMW = {"type": "AdamW", "params": {"lr": 0.001, "eps": 1e-6, "weight_decay": 0.05}}
# A larger rate for SigLIP, whose loss sums over all pairs, would amplify rounding.
SGD = {
    task: {"optimizer": {"type": "SGD", "params": {"lr": lr}}, "clip": 0.0}
    for task, lr in (("clip", 3e-4), ("siglip", 3e-5))
}


def command(folder, task, world, stage, accumulation, *words, optimizer=ADAMW, clip=0.5, blocks=None):
    """The command line of a run."""
    given = dict(itertools.pairwise(words))
    dp = world // given.get("--pp", 1) // given.get("--tp", 1)
    blocks = {"optimizer": optimizer, "gradient_clipping": clip, **(blocks or {})}
    argv = [*WORDS, "--task", task, "--deepspeed_config", write_config(folder.with_suffix(".json"), stage, **blocks)]
    argv += ["-b", GLOBAL_BATCH // dp // accumulation, "--grad-accum-steps", accumulation, "--output", folder]
    return [str(word) for word in [*argv, *words]]


def train(ranks, folder, task, world, *layout, **settings):
    """The rows of a run."""
    return train_in(ranks, world, command(folder, task, world, *layout, **settings))


@pytest.mark.slow
def test_learned_frequencies_end_with_the_image_tower(ranks, tmp_path):
    # Catches: frequencies that cross to a stage that begins with the head, which has no gradient for them.
    model = ("--model", "vit_small_patch16_rope_mixed_224")
    one = train(ranks, tmp_path / "one", "clip", 1, 0, 1, *model)
    for bounds in ("0,3,8", "0,2,8"):
        rows = train(ranks, tmp_path / bounds, "clip", 2, 1, 4, "--pp", 2, "--pp-partition", bounds, *model)
        assert_same_curve(one, rows, rtol=RTOL)


@pytest.mark.slow
@pytest.mark.parametrize(("task", "layout"), [("clip", (2, 3, 4)), ("siglip", (2, 2, 4))], ids=["clip", "siglip"])
def test_bf16_reads_scale_and_bias_in_fp32(ranks, tmp_path, task, layout):
    # Catches: a scale rounded to bf16, and features compared in bf16. By SGD at a small rate: AdamW amplifies rounding.
    settings = {"blocks": {"bf16": {"enabled": True}, "communication_data_type": "fp32"}, **SGD["siglip"]}

    def rows(name, *layout):
        return train(ranks, tmp_path / name, task, *layout, **settings)

    one, pieces, ranks2 = rows("one", 1, 1, 1), rows("pieces", 1, 1, 4), rows("dp", *layout)
    for key, most in (("loss", 1e-2), ("grad_norm", 5e-2)):
        allowed = largest_deviation(one, pieces, key)
        assert 0 < allowed < most
        assert largest_deviation(one, ranks2, key) <= 4 * allowed
    # The same layout, and equal losses if the optimizer's values were not read: they start from the rounded ones.
    argv = command(tmp_path / "rounded", task, *layout, **settings)
    assert ranks.run(layout[0], train_with_rounded_logits, argv) == [0] * layout[0]
    assert largest_deviation(ranks2, read_rows(tmp_path / "rounded"), "loss") > 2e-4


def train_with_rounded_logits(argv):
    """On a rank: the exit code of a run that reads scale and bias as the towers compute with them."""
    from ds_vit.tasks.clip.task import Contrastive

    with mock.patch.object(Contrastive, "_logits_in_fp32", lambda self, context, logits: logits.float()):
        return train_main(argv)


# ---- one plain process -----------------------------------------------------------------------------------------------


def layers_above(name):
    """The layers of an image tower of two blocks above a parameter, its projection among them."""
    if name.startswith(("text.", "head.")):
        return 0
    return {"blocks.0": 2, "blocks.1": 1, "norm": 1}.get(".".join(name.split(".")[: 1 + name.startswith("blocks")]), 3)


def train_plainly(argv, *, lr, clip, bound):
    """Losses and norms of torch's AdamW, open_clip's loss and the towers, without DeepSpeed."""
    from ds_vit.models.keyed_init import initialise
    from ds_vit.models.layers import tower_of
    from ds_vit.models.param_groups import no_weight_decay_names
    from ds_vit.models.sequential import SequentialViT, timm_names

    run = resolved(argv)
    task, whole = run.model.task, run.model.whole
    towers = {}
    for name, layers in task.towers(whole).items():
        initialise(tower_of(whole, name), layers, seed=run.config.seed, device="cpu")
        towers[name] = SequentialViT(layers).train()
    undecayed, parameters = no_weight_decay_names(whole), {}
    for tower in towers.values():
        names = timm_names(tower)
        parameters |= {names[local]: parameter for local, parameter in tower.named_parameters()}
    for name in run.model.frozen:
        parameters[name].requires_grad_(False)
    factor = run.config.layer_decay or 1.0
    groups = [
        {"params": [p], "weight_decay": 0.0 if name in undecayed else 0.05, "lr": lr * factor ** layers_above(name)}
        for name, p in parameters.items()
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, eps=1e-6)
    rows = []
    for step, batch in enumerate(tensors_of(run, STEPS), start=1):
        images = towers["image"](batch["images"], batch["keys"])
        texts = towers["text"](batch["texts"], batch["keys"])[:, : images.shape[1]]
        logits = [parameters[name][0] for name in ("text.logit_scale", "text.logit_bias") if name in parameters]
        features = (F.normalize(images), F.normalize(texts))
        loss = theirs("clip" if len(logits) == 1 else "siglip", features, logits)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters.values(), clip)
        optimizer.step()
        if bound:
            parameters["text.logit_scale"].data.clamp_(0.0, math.log(100.0))
        rows.append({"kind": "train", "step": step, "loss": loss.item(), "grad_norm": norm.item()})
    return rows, {name: parameter.detach() for name, parameter in parameters.items()}


LAYER_DECAY = ("--layer-decay", 0.5)
SCALE_ONLY = ("*blocks*", "*embed*", "*head*", "*norm*")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Of a task, a learning rate and further flags: what `train_plainly` gives."""
    folder = tmp_path_factory.mktemp("plain")

    @functools.cache
    def get(task, lr, flags):
        optimizer = {**ADAMW, "params": {**ADAMW["params"], "lr": lr}}
        argv = command(folder / f"{task}-{lr}", task, 1, 0, 1, *flags, optimizer=optimizer)
        return train_plainly(argv, lr=lr, clip=0.5, bound=task == "clip")

    return get


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    ("task", "lr", "layout"),
    [
        *(("clip", 0.001, (2, 2, 4)), ("siglip", 0.001, (2, 2, 4))),
        *(("clip", 0.001, layout) for layout in ((2, 2, 4, *LAYER_DECAY), (2, 1, 4, *LAYER_DECAY, "--pp", 2))),
        *(("clip", 0.6, layout) for layout in ((2, 2, 4), (2, 0, 4), (2, 1, 1), (2, 3, 4), (2, 1, 4, "--pp", 2))),
    ],
    ids=str,
)
def test_equals_a_plain_loop(ranks, tmp_path, plain, task, lr, layout):
    # Catches: decay of the scale, a scale that is not clamped, or only in the master or only in the model's copy, or in
    # some engines only; a loss of its own making; a clamp that SigLIP's scale has not; layer decay of the text tower.
    flags = ("--sched", "constant", "--warmup-steps", 0, *(LAYER_DECAY if LAYER_DECAY[0] in layout else ()))
    if lr > 0.1:  # only the scale moves so far, and from the first step on; a first stage trains the class token too
        flags += ("--freeze", *SCALE_ONLY, *(() if "--pp" in layout else ("cls_token",)))
    expected, weights = plain(task, lr, flags)
    optimizer = {**ADAMW, "params": {**ADAMW["params"], "lr": lr}}
    rows = train_in(ranks, 2, command(tmp_path / "run", task, *layout, *flags, optimizer=optimizer))
    assert_same_curve(expected, rows, rtol=RTOL)
    saved = load_file(tmp_path / "run" / "text.safetensors")
    torch.testing.assert_close(saved["text.logit_scale"], weights["text.logit_scale"], rtol=1e-5, atol=1e-5)
    if lr > 0.1:
        assert saved["text.logit_scale"].item() in (0.0, pytest.approx(math.log(100.0))), "no bound was met"


def train_started_at(argv, log_scale):
    """On a rank: the exit code of a run whose scale starts there."""
    with mock.patch.object(Clip, "initial_logits", (log_scale,)):
        return train_main(argv)


NEAR_THE_BOUND = (2, 1, 1), (2, 2, 4), (2, 3, 4), (2, 1, 4, "--pp", 2)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(("layout", "scale"), [*zip(NEAR_THE_BOUND, (120.0, 99.5, 99.5, 120.0), strict=True)], ids=str)
def test_a_scale_near_its_bound_is_clamped_after_its_update(ranks, tmp_path, layout, scale):
    # Catches: a clamp at the step of another parameter group, before the update of the scale.
    adamw = {**ADAMW, "params": {**ADAMW["params"], "lr": 0.01}}
    flags = ("--sched", "constant", "--warmup-steps", 0, "--max-steps", 3)
    found = []
    for name, of_run in (("one", (1, 0, 1)), ("run", layout)):  # the first equals the plain loop, see above
        argv = command(tmp_path / name, "clip", *of_run, *flags, optimizer=adamw)
        assert ranks.run(of_run[0], train_started_at, argv, math.log(scale)) == [0] * of_run[0]
        found.append(load_file(tmp_path / name / "text.safetensors")["text.logit_scale"].item())
    assert_same_curve(*[read_rows(tmp_path / name) for name in ("one", "run")], rtol=1e-4)
    assert found[1] == pytest.approx(found[0], abs=1e-5)


# ---- damaged pairs ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    """60 pairs for training, 20 for evaluation; in each split one image and two captions are damaged."""
    folder = tmp_path_factory.mktemp("damaged")
    for split, count in (("train", 60), ("validation", 20)):
        for number in range(count):
            path = made(folder / split / f"{number:02}.png")
            path.write_bytes(b"no image" if number == 3 else encoded(number))
            texts = {5: b" \n", 7: b"\xff\xfe"}
            path.with_suffix(".txt").write_bytes(texts.get(number, f"number {number}\nanother {number}".encode()))
    return folder


@pytest.mark.slow
def test_damaged_pairs_are_replaced_alike(ranks, tmp_path, damaged):
    # Catches: a pair that one layout keeps and another replaces, a caption with another image, damage that is counted
    # once a rank or stage or not at all, pairs of the validation split that count as found or lost.
    words = ("--data-dir", damaged, "--dataset", "", "--on-bad-image", "skip", "--max-bad-images", 1, "-vb", 7)
    words += ("--epochs", 3, "--max-steps", 3, "--val-split", "validation", "--warmup-steps", 0)
    layouts = {"one": (1, 0, 1), "dp": (3, 2, 4), "pp": (2, 1, 4, "--pp", 2)}
    # SGD: without a warm-up, Adam's first update would turn the rounding of small gradients into whole steps.
    runs = {n: train(ranks, tmp_path / n, "clip", *layout, *words, **SGD["clip"]) for n, layout in layouts.items()}
    for name in ("dp", "pp"):
        assert_same_curve(runs["one"], runs[name], rtol=RTOL)
    counted = ("skipped_images", "images", "text_to_image_r1", "image_to_text_r10")
    one, dp, pp = ([[row[key] for key in counted] for row in rows if row["kind"] == "eval"] for rows in runs.values())
    assert one == dp == pp
    assert [row[:2] for row in one] == [[3, 17]] * 3
    listed = [(tmp_path / name / "skipped_images.jsonl").read_text() for name in layouts]
    files = [sorted(json.loads(line)["file"] for line in text.splitlines()) for text in listed]
    assert files == files[:1] * len(files)
    assert {Path(file).stem for file in files[0]} == {"03", "05", "07"}


# ---- locked towers ---------------------------------------------------------------------------------------------------


def frozen_in_open_clip(module, prefix):
    """The names here of the parameters of a tower of open_clip that are frozen."""
    state = {"visual.class_embedding": torch.ones(1)}  # shows whose file it is
    state |= {f"{prefix}{name}": torch.full_like(p, float(p.requires_grad)) for name, p in module.named_parameters()}
    return {name for name, trained in CLIP_NAMES.translate(state).items() if not trained.any()}


def locked_by_open_clip(own, unlocked):
    """The names here of what open_clip freezes of an image tower of 12 blocks: of timm's, or of its own ViT."""
    if own:
        tower = pytest.importorskip("open_clip.transformer").VisionTransformer(16, 8, 24, 12, 2, 4.0, output_dim=16)
    else:
        timm_model = pytest.importorskip("open_clip.timm_model")
        tower = timm_model.TimmModel("vit_tiny_patch16_224", 16, image_size=16, pool="", proj="linear")
    tower.lock(unlocked_groups=unlocked)
    return frozen_in_open_clip(tower, "visual.")


@pytest.mark.parametrize("own", [False, True], ids=["timm", "open_clip's own"])
@pytest.mark.parametrize("unlocked", [0, 1, 2])
def test_lock_image_freezes_what_open_clip_does(tmp_path, own, unlocked):
    # Catches: groups counted from the other end, a projection or a text tower among them.
    expected = locked_by_open_clip(own, unlocked + own)  # whose own ViT counts the projection
    assert not own or locked_by_open_clip(own, 0) == {*locked_by_open_clip(own, 1), "head.weight"}
    flags = ["--lock-image", *(["--lock-image-unlocked-groups", unlocked] if unlocked else [])]
    model = ["--model", "vit_base_patch16_clip_224"] if own else []
    argv = command(tmp_path / "run", "clip", 1, 1, 1, *flags, "--model-kwargs", "depth=12", "--lock-text", *model)
    run = resolved(argv)
    assert {name for name in run.model.frozen if not name.startswith("text.")} == expected
    trained = {name for name, _ in run.model.whole.named_parameters()} - run.model.frozen
    assert {name for name in trained if name.startswith("text.")} == {"text.logit_scale"}
    assert "head.weight" in trained


@pytest.mark.parametrize("unlocked", [1, 2, 3, 12, 13])
def test_the_hint_freezes_what_open_clip_does(unlocked):
    # Catches: a text projection that is not counted as a layer, a pattern that matches too few or too many blocks.
    transformer = pytest.importorskip("open_clip.transformer")
    tower = transformer.TextTransformer(9, 20, 16, 2, 12, output_dim=12)
    tower.lock(unlocked)
    settings = TextSettings(vocab_size=20, context_length=9, end_id=19, width=16, heads=2, embed_dim=12)
    spec = ModelSpec("vit_tiny_patch16_224", img_size=16, model_kwargs={"depth": 1})
    [flag, *patterns] = timm_answer("lock_text_unlocked_layers", [str(unlocked)]).words
    assert flag == "--freeze"
    frozen = frozen_names(create_contrastive_model(spec, settings, (1.0,)), [word.strip("'") for word in patterns])
    assert frozen == frozen_in_open_clip(tower, "text.")


def test_locked_random_values_are_named(tmp_path):
    # Catches: a fixed tower that nobody trained, of which no line speaks.
    run = resolved(command(tmp_path / "run", "clip", 1, 1, 1, "--lock-image", "--lock-text"))
    image, text = (note for note in run.notes if "at random values" in note)
    assert image.startswith("--lock-image freezes 30 parameters at random values (blocks.0.attn.proj.bias, ")
    assert text.startswith("--lock-text freezes 29 parameters")
    image_tower = {name: torch.zeros(p.shape) for name, p in run.model.whole.named_parameters() if "text." not in name}
    save_file(image_tower, tmp_path / "model.safetensors")
    weights = ("--initial-checkpoint", tmp_path / "model.safetensors")
    run = resolved(command(tmp_path / "run", "clip", 1, 1, 1, "--lock-image", "--lock-text", *weights))
    [note] = [note for note in run.notes if "at random values" in note]
    assert note.startswith("--lock-text")


def test_sizes_are_compared_as_they_are(tmp_path):
    # Catches: a run that cannot be resumed with a default spelled out, or can with another text tower.
    small = command(tmp_path / "run", "clip", 1, 1, 1)
    del small[small.index("--context-length") : small.index("--context-length") + 2]
    identity = identity_of(resolved(small))
    spelled = ("--text-model", "clip_base", "--text-pool", "end", "--context-length", 256)
    assert identity_of(resolved([*small, *spelled])) == identity
    assert identity_of(resolved([*small, "--text-pool", "last"])) != identity


@pytest.mark.slow
def test_an_image_tower_with_nothing_to_train(ranks, tmp_path):
    # Catches: a tower, a rank's shard or a stage without a parameter of the optimizer. So is LiT with SigLIP's towers.
    def run(name, *layout):
        argv = command(tmp_path / name, "siglip", *layout, "--lock-image")
        at = argv.index("--embed-dim")  # without it there is no projection of images
        return [*argv[:at], *argv[at + 2 :]]

    one = train_in(ranks, 1, run("one", 1, 0, 1))
    assert_same_curve(one, train_in(ranks, 2, run("dp", 2, 3, 4)), rtol=RTOL)
    assert_same_curve(one, train_in(ranks, 2, run("pp", 2, 1, 4, "--pp", 2, "--pp-partition", "0,5,8")), rtol=RTOL)
    for_image = run("image", 2, 1, 4, "--pp", 2, "--pp-partition", "0,4,8")
    with pytest.raises(ValueError, match=r"pipeline stage 0 \(layers 0 to 3\) has nothing to train"):
        resolved(for_image, world=2)


# ---- what is rejected ------------------------------------------------------------------------------------------------

REJECTED = {
    "--lock-image --lock-image-unlocked-groups 9": "the image tower has 3 groups",
    "--lock-image-unlocked-groups 1": "--lock-image",
    "--text-model clip_bose": "the nearest is clip_base",
    "--text-heads 5": "--text-width 24 must be a multiple of --text-heads 5; the nearest is 25",
    "--dataset digits": "caption",
}


def test_the_page_lists_every_rejected_flag():
    # Catches: a flag that the task rejects and docs/contrastive.md does not name, or the reverse.
    section = (
        (ROOT / "docs" / "contrastive.md").read_text().partition("## What is rejected")[2].partition("\nFlags of")[0]
    )
    named = {word.replace("-", "_") for word in re.findall(r"`--([a-z-]+)`", section)}
    assert named == {*refused_flags(Clip)} == {*refused_flags(SigLip)}


@pytest.mark.parametrize("flags", REJECTED)
def test_flags_without_effect_are_rejected(capsys, tmp_path, flags):
    argv = command(tmp_path / "run", "clip", 1, 1, 1, *flags.split())
    if "digits" in flags:
        argv = [word for word in argv if word not in ("--val-split", "")]
    assert REJECTED[flags] in refusal(capsys, argv)
