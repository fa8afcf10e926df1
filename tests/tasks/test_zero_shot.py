"""Zero-shot classification against open_clip's, and retrieval with several captions, in every layout."""

import functools
import json
import re
import shutil
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from curves import read_rows, train_in, train_main
from micro_batches import fields_of, loader_of
from picture_folders import encoded
from PIL import Image
from project import write_config
from runs import refusal, resolved
from safetensors.torch import load_file, save_file
from shards import write_shard

from ds_vit import cli
from ds_vit.checkpoint.folder import mark_best
from ds_vit.config.run_folder import RunFolder
from ds_vit.data.field import finished
from ds_vit.data.rows import EvalRows
from ds_vit.data.sampler import Share, evaluation_keys
from ds_vit.data.sources.captions import CaptionKeys
from ds_vit.data.sources.datasets import open_source
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.models.keyed_init import initialise
from ds_vit.models.layers import tower_of
from ds_vit.models.sequential import SequentialViT
from ds_vit.monitoring.report.panels import curves
from ds_vit.monitoring.report.record import Record
from ds_vit.tasks.retrieval import DIRECTIONS, RANKS, Retrieval, pair_panels, places_of_partners
from ds_vit.tasks.zero_shot import ZeroShotAccuracy, class_words, open_zero_shot, read_templates
from ds_vit.tools.evaluate import main as evaluate_main
from ds_vit.tools.predict import embed
from ds_vit.weights.files import find_weights, weights_line

NUM_IMAGES, TEMPLATES = 41, ("a photo of the digit {}.", "{}", "the number {}, drawn by hand")
LAYOUTS = {
    "one rank": (1, ()),
    "3 ranks": (3, ()),
    "ZeRO-3": (2, ("--set", "zero_optimization.stage=3")),
    "tp 2": (2, ("--tp", "2")),
    "pp 2": (2, ("--pp", "2")),
    "pp 2 x tp 2": (4, ("--pp", "2", "--tp", "2")),
}


# ---- data, a run and its towers in one plain process -----------------------------------------------------------------


def write_pairs(folder):
    """Images with one to three captions each; the captions of an image share a word."""
    generator = np.random.default_rng(0)
    for split in ("train", "validation"):
        (folder / split).mkdir(parents=True)
        for number in range(NUM_IMAGES):
            pixels = generator.integers(0, 256, (16, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / split / f"{number:02}.png")
            texts = [f"{'abc'[n]} {number * 7919 % 997}" for n in range(1 + number % 3)]
            (folder / split / f"{number:02}.txt").write_text("\n".join(texts))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Pairs of images and captions, and a file of templates."""
    folder = tmp_path_factory.mktemp("zero-shot")
    write_pairs(folder / "pairs")
    (folder / "templates.txt").write_text("\n".join(TEMPLATES) + "\n")
    return folder


def command(folder, *words):
    """A run that keeps its initial weights, which are the same in every layout."""
    argv = [
        *("--task", "siglip", "--data-dir", folder / "pairs", "--model", "vit_tiny_patch16_224", "--img-size", 16),
        *("--model-kwargs", "patch_size=8", "embed_dim=24", "depth=2", "num_heads=2", "--workers", 0, "--no-aug"),
        *("--text-width", 24, "--text-depth", 2, "--text-heads", 2, "--context-length", 40, "--embed-dim", 16),
        *("--deepspeed_config", write_config(folder / "ds.json", 1), "--max-steps", 1, "--warmup-steps", 0, "-b", 6),
        *("--lr", 0, "-vb", 16, "--checkpoint-interval", 0, "--log-images", 0),
        *("--zeroshot", "digits", "--zeroshot-templates", folder / "templates.txt"),
    ]
    return [str(word) for word in [*argv, *words]]


class PlainTowers:
    """The initial towers of a run in this process, with the methods of an open_clip model."""

    def __init__(self, argv):
        run = resolved(argv)
        self.task, self.towers, whole = run.model.task, {}, run.model.whole
        for name, layers in self.task.towers(whole).items():
            initialise(tower_of(whole, name), layers, seed=run.config.seed, device="cpu")
            self.towers[name] = SequentialViT(layers).eval()

    def tokenize(self, texts):
        return torch.from_numpy(np.stack([self.task.tokenizer.encode(text) for text in texts]))

    @torch.no_grad()
    def encode_text(self, ids, normalize=False):
        features = self.towers["text"](ids, torch.zeros(len(ids), dtype=torch.int64))[:, : self.task.encoded_dim]
        return F.normalize(features, dim=1) if normalize else features

    @torch.no_grad()
    def encode_image(self, source):
        """Normalised features of all images, and their targets."""
        fields = fields_of(source, self.task.image)
        [batch] = loader_of(source, fields, EvalRows(len(source), Share(0, 1, len(source))))
        made = finished(fields, batch, device="cpu")
        return F.normalize(self.towers["image"](made["images"], batch.rows.keys), dim=1), made["targets"]


@pytest.fixture(scope="module")
def towers(folder):
    return PlainTowers(command(folder))


def train(argv, recorded):
    """On a rank: the exit code of a run; the classes and logits of each zero-shot batch go to a file of the rank."""
    from ds_vit.training import evaluation

    found = []

    class Recorded(evaluation.ZeroShotAccuracy):
        def update(self, outputs, batch):
            super().update(outputs, batch)
            logits = outputs.double() @ self.classes.T
            found.append((self.classes, logits[batch["valid"]], batch["keys"][batch["valid"]]))

    with mock.patch.object(evaluation, "ZeroShotAccuracy", Recorded):
        code = train_main(argv)
    torch.save(found, recorded.with_suffix(f".{torch.distributed.get_rank()}.pt"))
    return code


def evaluate(ranks, folder, output, layout, words=()):
    """The row of a run's evaluation in a layout; and what was recorded on each rank."""
    world, flags = LAYOUTS[layout]
    argv = command(folder, "--output", output, *flags, *words)
    assert ranks.run(world, train, argv, output) == [0] * world
    [row] = [row for row in read_rows(output) if row["kind"] == "eval"]
    return row, [torch.load(output.with_suffix(f".{rank}.pt")) for rank in range(world)]


@pytest.fixture(scope="module")
def evaluated(ranks, folder):
    """Of a layout, as `evaluate`."""
    return functools.cache(lambda layout: evaluate(ranks, folder, folder / layout.replace(" ", "-"), layout))


# ---- zero-shot classification ----------------------------------------------------------------------------------------


@pytest.mark.sampled(8)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_open_clips_classifier(evaluated, towers, layout):
    # Catches: a mean before the norm, templates of another class, prompts lost between ranks, a tower that got blanks.
    open_clip = pytest.importorskip("open_clip")
    row, recorded = evaluated(layout)
    source = open_source("digits", None, "validation")
    classes = open_clip.build_zero_shot_classifier(towers, towers.tokenize, source.class_names, TEMPLATES)
    features, targets = towers.encode_image(source)
    expected = features @ classes
    batches = [batch for of_rank in recorded for batch in of_rank]
    for found, _, _ in batches:
        torch.testing.assert_close(found.float(), classes.T, rtol=0, atol=1e-5)
    keys = torch.cat([keys for _, _, keys in batches])
    order = torch.from_numpy(evaluation_keys(np.arange(len(source)))).argsort()
    logits = torch.cat([logits for _, logits, _ in batches])[keys.argsort()].float()
    torch.testing.assert_close(logits, expected[order], rtol=0, atol=1e-5)
    for k in (1, 5):
        right = (expected.topk(k).indices == targets[:, None]).any(1).double().mean().item()
        assert row[f"zeroshot_top{k}"] == pytest.approx(100 * right, abs=1e-9)
    assert row["images"] == NUM_IMAGES


def test_without_a_validation_split(ranks, folder, evaluated, tmp_path):
    # Catches: a split with captions that zero-shot classification would need; a run without a best checkpoint.
    row, _ = evaluate(ranks, folder, tmp_path / "run", "3 ranks", words=("--val-split", ""))
    whole, _ = evaluated("one rank")
    assert row["images"] == 355
    assert not [name for name in row if "_r" in name]
    assert {row[name] == whole[name] for name in ("zeroshot_top1", "zeroshot_top5")} == {True}
    summary = json.loads(RunFolder(tmp_path / "run").summary.read_text())
    assert summary["best_zeroshot_top1"] == summary["last_zeroshot_top1"] == row["zeroshot_top1"]


def test_templates_and_names(tmp_path):
    assert read_templates("simple") == ("a photo of a {}.",)
    (tmp_path / "t.txt").write_text("{} {}\n\n it: {}\n")
    assert read_templates(str(tmp_path / "t.txt")) == ("{} {}", "it: {}")
    open_clip = pytest.importorskip("open_clip")
    assert read_templates("openai") == tuple(template("{}") for template in open_clip.OPENAI_IMAGENET_TEMPLATES)
    assert class_words(("n01440764", "n01443537")) == tuple(open_clip.IMAGENET_CLASSNAMES[:2])
    assert class_words(("great_white", "n01440764")) == ("great white", "n01440764")


def test_the_first_prompts_are_shown(folder):
    # Catches: nobody sees that classes are named by numbers.
    first = '"a photo of the digit 0.", "0", "the number 0, drawn by hand"'
    assert f"--zeroshot: the first of 30 prompts for 10 classes are {first}" in resolved(command(folder)).notes


def test_a_folder_of_class_folders(tmp_path):
    for split, name in (("val", "cat"), ("val", "dog"), ("test", "dog")):
        (tmp_path / split / name).mkdir(parents=True)
        Image.new("RGB", (4, 4)).save(tmp_path / split / name / "1.png")
    assert open_zero_shot(str(tmp_path), "none").prompts == ("cat", "dog")
    assert open_zero_shot(str(tmp_path / "test"), "none").prompts == ("dog",)


@pytest.mark.parametrize(
    ("form", "asked"), [("test/0.tar", "test"), ("test-0.tar", "test"), ("test-0.tar", "test-{0..0}.tar")]
)
def test_the_test_split_of_shards_with_names_in_a_file(tmp_path, form, asked):
    # Catches: a test split that cannot be named, prompts "a photo of a 1.", a class without images that is left out.
    image = encoded(0)
    write_shard(tmp_path / form, {"a.png": image, "a.cls": b"1", "b.png": image, "b.cls": b"0"})
    write_shard(tmp_path / "val" / "val-0.tar", {"a.png": image, "a.cls": b"0"})
    if asked.endswith(".tar"):  # the split that is named, though there is one for validation
        (tmp_path / "val-0.tar").symlink_to("val/val-0.tar")
    asked = f"wds/{tmp_path}/{asked}"
    assert open_zero_shot(asked, "none").prompts == ("0", "1")
    (tmp_path / "classnames.txt").write_text("tench\ngold fish\nshark\n")
    found = open_zero_shot(asked, "none")
    assert found.prompts == ("tench", "gold fish", "shark")
    assert [found.source.target(n) for n in range(2)] == [1, 0]
    (tmp_path / "classnames.txt").write_text("tench\n")
    with pytest.raises(UserError, match=r"classnames.txt names 1 classes, and the images have the class 1"):
        open_zero_shot(asked, "none")


def test_what_is_rejected(capsys, tmp_path, folder):
    (tmp_path / "t.txt").write_text("a {}\na photo\n")
    with mock.patch.dict("sys.modules", {"open_clip": None}), pytest.raises(UserError, match="pip install open_clip"):
        read_templates("openai")
    for words, message in (
        (("--zeroshot", "glyphs"), "--zeroshot glyphs needs one class an image, and these have captions only"),
        (("--zeroshot", "digit"), "the nearest is digits"),
        (("--zeroshot", "digits", "--zeroshot-templates", "simpel"), "no file; the nearest is simple"),
        (("--zeroshot", "digits", "--zeroshot-templates", tmp_path / "t.txt"), '"a photo" has none'),
        (("--zeroshot", "", "--zeroshot-templates", "none"), "has no effect without --zeroshot"),
        (("--task", "classification", "--zeroshot", "digits"), "of --task clip and siglip"),
    ):
        assert message in refusal(capsys, [*command(folder), "--output", tmp_path / "run", *words])


# ---- retrieval with several captions ---------------------------------------------------------------------------------


def recalls(images, texts, of_texts):
    """Recall both ways, image by image and caption by caption."""
    similarities, found = images.double() @ texts.double().T, {}
    to_text = [
        min(int((row > row[j]).sum()) for j in range(len(of_texts)) if of_texts[j] == i)
        for i, row in enumerate(similarities)
    ]
    to_image = [int((column > column[i]).sum()) for column, i in zip(similarities.T, of_texts, strict=True)]
    for direction, places in (("image_to_text", to_text), ("text_to_image", to_image)):
        found |= {f"{direction}_r{k}": 100 * sum(place < k for place in places) / len(places) for k in RANKS}
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_recall_equals_brute_force(folder, evaluated, towers, layout):
    # Catches: captions after the first left out, a gallery of one rank, captions at another image.
    row, _ = evaluated(layout)
    expected = brute_force(folder, towers)
    assert {name: value for name, value in row.items() if "_to_" in name} == pytest.approx(expected, abs=1e-9)
    assert row["images"] == NUM_IMAGES
    [trained] = [row for row in read_rows(folder / layout.replace(" ", "-")) if row["kind"] == "train"]
    assert (trained["logit_scale"], trained["logit_bias"]) == pytest.approx((10.0, -10.0), rel=1e-6)
    source = open_source("", str(folder / "pairs"), "validation", labels=CaptionKeys())
    firsts = towers.encode_text(towers.tokenize([source.captions(at)[0] for at in range(NUM_IMAGES)]), normalize=True)
    own = (towers.encode_image(source)[0] * firsts).sum(dim=1).mean().item()
    assert row["similarity"] == pytest.approx(own, abs=1e-6)


def brute_force(folder, towers, without=()):
    source = open_source("", str(folder / "pairs"), "validation", labels=CaptionKeys())
    kept = [image for image in range(len(source)) if image not in without]
    pairs = [(at, text) for at, image in enumerate(kept) for text in source.captions(image)]
    assert len(pairs) > 1.9 * len(kept)
    texts = towers.encode_text(towers.tokenize([text for _, text in pairs]), normalize=True)
    return recalls(towers.encode_image(source)[0][kept], texts, [at for at, _ in pairs])


@pytest.mark.parametrize("layout", ["3 ranks", "pp 2"])
def test_a_damaged_image_has_no_captions(ranks, folder, towers, tmp_path, layout):
    # Catches: captions of a skipped image in the gallery, or features of zeros that count as an image.
    shutil.copytree(folder / "pairs", tmp_path / "pairs")
    (tmp_path / "pairs" / "validation" / "05.png").write_bytes(b"no image")  # of three captions
    words = ("--data-dir", tmp_path / "pairs", "--on-bad-image", "skip")
    row, _ = evaluate(ranks, folder, tmp_path / "run", layout, words=[str(word) for word in words])
    expected = brute_force(folder, towers, without=(5,))
    assert {name: value for name, value in row.items() if "_to_" in name} == pytest.approx(expected, abs=1e-9)
    assert row["images"] == NUM_IMAGES - 1


def test_places_with_several_partners():
    # Catches: the best partner taken by its number, partners that count as nearer, ties, blocks.
    generator = torch.Generator().manual_seed(0)
    queries, gallery = (torch.randn(n, 4, generator=generator).double() for n in (20, 53))
    of_gallery = torch.cat((torch.arange(20), torch.randint(20, (33,), generator=generator)))
    gallery[30] = gallery[3]
    found = places_of_partners(queries, torch.arange(20), gallery, of_gallery, at_once=160)
    order = (queries @ gallery.T).sort(dim=1, descending=True, stable=True).indices
    assert torch.equal(found, (of_gallery[order] == torch.arange(20)[:, None]).int().argmax(dim=1))


@pytest.mark.parametrize("damaged", ["one image", "all"])
def test_nan_is_never_right(damaged):
    # Catches: NaN similarities, of which none is greater than another: each partner would be the nearest.
    number, width = 12, 4
    features = F.normalize(torch.randn(number, width, generator=torch.Generator().manual_seed(0)))
    pairs, valid = torch.cat((features, features), dim=1), torch.ones(number, dtype=torch.bool)
    keys = torch.from_numpy(evaluation_keys(np.arange(number)))
    batch = {"keys": keys, "valid": valid, "targets": torch.arange(number)}
    pairs[3 if damaged == "one image" else slice(None), :width] = torch.nan
    retrieval, zero_shot = Retrieval(torch.device("cpu"), width), ZeroShotAccuracy(features)
    retrieval.expect(number)
    retrieval.take_texts(torch.zeros(0, dtype=torch.int64), torch.zeros(0, width))
    retrieval.update(pairs, batch)
    zero_shot.update(pairs[:, :width], batch)
    expected = 100 * 11 / 12 if damaged == "one image" else 0.0
    found = retrieval.compute() | zero_shot.compute()
    names = ["zeroshot_top1", "zeroshot_top5", *(f"{direction}_r{k}" for direction in DIRECTIONS for k in RANKS)]
    assert [found[name] for name in names] == pytest.approx([expected] * len(names))
    if damaged == "one image":
        assert retrieval.counted[1][3] == number, "the damaged image has all captions before its own"


# ---- what people see -------------------------------------------------------------------------------------------------


def test_pairs_in_the_report(folder, evaluated, towers):
    # Catches: captions of other images, the worst in place of the best, a matrix the other way round.
    evaluated("3 ranks")
    record = Record.read(folder / "3-ranks")
    source = open_source("", str(folder / "pairs"), "validation", labels=CaptionKeys())
    images = towers.encode_image(source)[0]
    firsts = [source.captions(number)[0] for number in range(len(source))]
    similarities = images @ towers.encode_text(towers.tokenize(firsts), normalize=True).T
    saved = json.loads(record.folder.similarities.read_text())
    shown = [firsts.index(text) for text in saved["captions"]]
    assert (shown[0], shown[-1], len(shown)) == (0, NUM_IMAGES - 1, 12)
    found = torch.tensor(saved["similarities"])
    torch.testing.assert_close(found, similarities[shown][:, shown], rtol=0, atol=1e-5)
    own, captions = (
        similarities.diagonal(),
        json.loads(record.folder.pairs.with_suffix(".json").read_text())["captions"],
    )
    order = own.argsort().tolist()
    expected = [*order[::-1][:8], *order[:8]]
    assert [caption.split(": ")[1] for caption in captions] == [firsts[number] for number in expected]
    assert [float(caption.split(",")[0]) for caption in captions] == pytest.approx(own[expected].tolist(), abs=6e-4)
    [panel] = pair_panels(record.folder)
    assert panel["title"] == "Similarity of validation images and captions"
    titles = [panel["title"] for panel in curves([record])]
    assert {"Logit scale (1 / temperature)", "Logit bias"} <= {*titles}
    page = record.folder.report.read_text()
    assert "The most similar pairs" in page
    assert panel["title"] in page


# ---- the run's weights ----------------------------------------------------------------------------------------------


def test_evaluation_of_the_weights(ranks, folder, evaluated, tmp_path):
    # Catches: a text tower with other values than the run's.
    row, _ = evaluated("one rank")
    words = [folder / "one-rank", "--zeroshot", "digits", "--zeroshot-templates", folder / "templates.txt"]
    argv = [str(word) for word in [*words, "--output", tmp_path / "eval.json"]]
    assert ranks.run(1, evaluate_main, argv) == [0]
    found = json.loads((tmp_path / "eval.json").read_text())
    names = ("image_to_text_r10", "text_to_image_r10", "zeroshot_top1", "images")
    assert {name: found[name] for name in names} == {name: row[name] for name in names}


def test_predict_and_embed(folder, evaluated, towers, tmp_path, capsys):
    # Catches: features without the projection or of another length, logits without scale or bias, texts out of order.
    evaluated("one rank")
    run, images, texts = folder / "one-rank", folder / "pairs" / "validation", ("a cat", "the digit 7", "b 12")
    assert cli.main(["predict", str(run), str(images), "--labels", *texts, "--json", "--top-k", "3"]) == 0
    found = json.loads(capsys.readouterr().out)
    source = open_source("", str(folder / "pairs"), "validation", labels=CaptionKeys())
    of_images, of_texts = towers.encode_image(source)[0], towers.encode_text(towers.tokenize(texts), normalize=True)
    expected = (10 * of_images @ of_texts.T - 10).sigmoid()
    assert (found["by"], len(found["images"])) == ("sigmoid", NUM_IMAGES)
    for one, probabilities in zip(found["images"], expected.tolist(), strict=True):
        by_name = {each["name"]: each["probability"] for each in one["classes"]}
        assert by_name == pytest.approx(dict(zip(texts, probabilities, strict=True)), rel=1e-4)
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    words = ["embed", run, images, "--texts", tmp_path / "texts.txt", "--output", tmp_path / "f.npz"]
    assert cli.main([str(word) for word in words]) == 0
    assert "41 images, 3 texts" in capsys.readouterr().err
    arrays = np.load(tmp_path / "f.npz")
    np.testing.assert_allclose(arrays["features"], of_images, atol=1e-5)
    np.testing.assert_allclose(arrays["text_features"], of_texts, atol=1e-5)
    assert tuple(arrays["texts"]) == texts
    with pytest.raises(ValueError, match="--batch-size must be at least 1, not 0"):
        embed(run, texts=texts, batch_size=0)
    assert cli.main(["predict", str(run), str(images)]) == 2
    assert "give texts, --labels" in capsys.readouterr().err
    assert cli.main(["predict", str(run), str(images), "--labels", str(tmp_path / "texts.txt"), "--json"]) == 0
    assert {each["name"] for each in json.loads(capsys.readouterr().out)["images"][0]["classes"]} == {*texts}


@pytest.mark.slow
def test_the_best_weights_are_those_of_both_towers(ranks, folder, tmp_path):
    # Catches: the best image tower next to the text tower of the end.
    run, images = tmp_path / "run", folder / "pairs" / "validation"
    words = ("--lr", 0.01, "--max-steps", 4, "--checkpoint-interval", 2, "--keep-checkpoints", 0, "--output", run)
    train_in(ranks, 1, command(folder, *words))
    mark_best(run / "checkpoints", "step-00000002")  # whichever is
    train_in(ranks, 1, command(folder, *words, "--resume", "auto"))
    found = {key: embed(run, [images], texts=["a cat"], **which) for key, which in TOWERS_OF.items()}
    for one, other, same in (("", "checkpoint", True), ("last", "end", True), ("", "last", False)):
        for name in ("features", "text_features"):
            assert np.allclose(found[one][name], found[other][name], atol=1e-6) == same, (one, name)
    # A run from before best-text.safetensors: its best checkpoint, else its last weights, have both towers.
    (run / "best-text.safetensors").unlink()
    why = f" ({run / 'best.safetensors'} lacks best-text.safetensors, its text tower)"
    assert weights_line(run).startswith(f"weights: {run / 'checkpoints' / 'step-00000002' / 'model.safetensors'}{why}")
    again = embed(run, [images], texts=["a cat"])
    assert np.array_equal(again["features"], found["checkpoint"]["features"])
    assert np.array_equal(again["text_features"], found["checkpoint"]["text_features"])
    (run / "checkpoints" / "best").unlink()
    assert weights_line(run).startswith(f"weights: {run / 'model.safetensors'}{why}")
    with pytest.raises(ValueError, match=f"there is no best.safetensors .*{re.escape(why)}"):
        find_weights(run, "best")


TOWERS_OF = {
    "": {},
    "checkpoint": {"checkpoint": "step-00000002"},
    "last": {"weights": "last"},
    "end": {"checkpoint": "step-00000004"},
}


def test_another_tokenizer_than_the_runs_is_refused(folder, evaluated, tmp_path, capsys):
    # Catches: texts that are encoded by a tokenizer.json which has changed since training.
    evaluated("one rank")
    shutil.copytree(folder / "one-rank", tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    text = tmp_path / "run" / "text.safetensors"
    save_file(load_file(text), text, metadata={"tokenizer": "tokenizer.json 1234"})
    words = ["predict", tmp_path / "run", folder / "pairs" / "validation", "--labels", "a cat", "--json"]
    assert cli.main([str(word) for word in words]) == 2
    assert "was trained with --tokenizer tokenizer.json 1234, and bytes" in capsys.readouterr().err
