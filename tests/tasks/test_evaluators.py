"""Judges of features: equal to scikit-learn on the same features, and of the right features in every layout."""

import json
import multiprocessing
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from curves import read_rows, train_in
from PIL import Image
from project import ROOT
from runs import resolved
from safetensors.torch import save_file
from sklearn.linear_model import LogisticRegression
from sklearn.neighbors import KNeighborsClassifier
from sklearn.preprocessing import StandardScaler
from vits import timm_state_dict

from ds_vit.config import parser as flags
from ds_vit.data.rows import EvalRows
from ds_vit.data.sampler import Share
from ds_vit.data.sources.datasets import open_source
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.models.keyed_init import initialise
from ds_vit.models.layers import take_apart
from ds_vit.models.sequential import SequentialViT
from ds_vit.tasks import evaluators
from ds_vit.tasks.evaluators import FeatureBank, LinearProbe, NearestNeighbours, chosen_evaluators
from ds_vit.tools.evaluate import main as evaluate_main

CLASSES, ROWS = 5, 7


def dealt(features, targets, rank, world):
    """A split as evaluation deals it: (features, batch) of each batch; padding repeats the first image."""
    rows = EvalRows(len(features), Share(rank, world, ROWS))
    for batch in map(rows.at, range(len(rows))):
        yield features[batch.indices], {"targets": targets[batch.indices], "valid": batch.valid}


def judge_on_rank(kind, train, validation, numbers_at_once, arguments):
    """On a rank: (predictions of its own validation images in their batches, figures over all ranks)."""
    from ds_vit.parallel.groups import build_groups
    from ds_vit.parallel.layout import Layout

    evaluators._NUMBERS_AT_ONCE = numbers_at_once
    world = torch.distributed.get_world_size()
    groups = build_groups(Layout.of_world(world, 1, 1))
    rank, device = groups.dp_rank, torch.device("cpu")
    bank = FeatureBank.collect(dealt(*train, rank, world), CLASSES, groups, device)
    metrics = kind(bank, groups, **arguments)
    predicted = []
    for features, batch in dealt(*validation, rank, world):
        predicted.append(metrics.predict(features)[batch["valid"]].tolist())
        metrics.update(features, batch)
    torch.distributed.all_reduce(metrics.sums)
    return predicted, metrics.compute()


def judged(ranks, world, kind, train, validation, numbers_at_once=1 << 10, **arguments):
    """(predictions in the order of the split, figures)."""
    found = ranks.run(world, judge_on_rank, kind, train, validation, numbers_at_once, arguments)
    assert all(figures == found[0][1] for _, figures in found)
    batches = [batch for of_ranks in zip(*(predicted for predicted, _ in found), strict=True) for batch in of_ranks]
    return [prediction for batch in batches for prediction in batch], found[0][1]


def clouds(seed, count, width=12):
    """Features of classes that overlap, none of them of length 1."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, width, generator=torch.Generator().manual_seed(0))
    targets = torch.randint(CLASSES, (count,), generator=generator)
    lengths = 0.5 + 3 * torch.rand(count, 1, generator=generator)
    return (centres[targets] + 1.5 * torch.randn(count, width, generator=generator)) * lengths, targets


TRAIN, VALIDATION = clouds(1, 130), clouds(2, 60)


@pytest.mark.parametrize(("world", "k"), [(1, 20), (3, 1), (3, 130)])
def test_neighbours_are_those_of_scikit_learn(ranks, world, k):
    """A block or a rank whose images are lost, lengths that count, a plain vote, another temperature."""
    reference = KNeighborsClassifier(k, metric="cosine", weights=lambda distance: np.exp((1 - distance) / 0.07))
    reference.fit(TRAIN[0].double().numpy(), TRAIN[1].numpy())
    expected = reference.predict(VALIDATION[0].double().numpy())
    predicted, figures = judged(ranks, world, NearestNeighbours, TRAIN, VALIDATION, k=k)
    assert predicted == expected.tolist()
    assert figures == {"knn_top1": pytest.approx(100 * np.mean(expected == VALIDATION[1].numpy())), "images": 60}
    assert 30 < figures["knn_top1"] < 95, "the classes are too far apart or too near for a mistake to show"


@pytest.mark.parametrize(("kind", "arguments"), [(NearestNeighbours, {"k": 3}), (LinearProbe, {})])
def test_ranks_without_a_training_image(ranks, kind, arguments):
    """A last batch that leaves ranks nothing to learn from: no candidates of theirs, and no error."""
    few = TRAIN[0][: ROWS - 1], TRAIN[1][: ROWS - 1]
    assert judged(ranks, 3, kind, few, VALIDATION, **arguments) == judged(ranks, 1, kind, few, VALIDATION, **arguments)


def test_ties(ranks):
    """Neighbours or classes that are chosen by the order in which ranks, blocks or a sort happen to give them."""
    east, north = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])
    train = torch.stack([north if place in (0, 30) else east * (1 + place % 3) for place in range(40)])
    targets = torch.full((40,), 4)
    targets[[1, 2, 3]] = torch.tensor([3, 1, 2])  # the first images in the east
    targets[[0, 30]] = torch.tensor([2, 0])  # those in the north
    validation = torch.stack([east, north]), torch.tensor([3, 0])
    few = {"numbers_at_once": 14}  # blocks of two images
    assert judged(ranks, 3, NearestNeighbours, (train, targets), validation, **few, k=1)[0] == [3, 2]
    assert judged(ranks, 3, NearestNeighbours, (train, targets), validation, **few, k=2)[0] == [1, 0]
    assert judged(ranks, 3, NearestNeighbours, (train, targets), validation, **few, k=3)[0] == [1, 0]


def test_the_linear_probe_is_scikit_learns(ranks):
    """A share that counts twice, statistics of one rank, a bias that is held small."""
    train = TRAIN[0] * torch.linspace(1, 50, 12) + 7.0, TRAIN[1]
    validation = VALIDATION[0] * torch.linspace(1, 50, 12) + 7.0, VALIDATION[1]
    scaler = StandardScaler().fit(train[0].double().numpy())
    reference = LogisticRegression(tol=1e-8, max_iter=1000).fit(scaler.transform(train[0].double().numpy()), train[1])
    expected = reference.predict(scaler.transform(validation[0].double().numpy()))
    predicted, figures = judged(ranks, 3, LinearProbe, train, validation)
    assert predicted == expected.tolist()
    assert figures["linear_top1"] == pytest.approx(100 * np.mean(expected == validation[1].numpy()))


def test_rounding_of_features_that_hardly_vary_decides_nothing(ranks):
    """An image that is right in one layout and wrong in another: the classes of a young model's features."""
    generator = torch.Generator().manual_seed(3)
    level = torch.randn(12, generator=generator)
    scale = torch.tensor([1.0, 1e-6]).repeat(6)  # of every second feature fp32 keeps one digit
    train, validation = (level + scale * features for features in (TRAIN[0], VALIDATION[0]))
    answers = []
    for _ in range(3):
        noise = [1 + 1e-7 * torch.randn(part.shape, generator=generator) for part in (train, validation)]
        found = judged(ranks, 1, LinearProbe, (train * noise[0], TRAIN[1]), (validation * noise[1], VALIDATION[1]))
        answers.append(found)
    assert answers[0] == answers[1] == answers[2]
    assert answers[0][1]["linear_top1"] > 50, "the other features decide"


# ---- features of a run, in its layout ------------------------------------------------------------------------------

NAME, KWARGS = "vit_tiny_patch16_224", {"patch_size": 4, "embed_dim": 24, "depth": 3, "num_heads": 6}
MODEL = ["--model", NAME, "--img-size", 16, "--model-kwargs", *(f"{k}={v}" for k, v in KWARGS.items()), "--workers", 0]
TASKS = {
    "classification": [],
    "mae": ["--task", "mae", "--decoder-dim", 24, "--decoder-depth", 2, "--decoder-heads", 6],
}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Stripes of three widths in class folders, 45 images to learn from and 25 to judge by, one of them damaged."""
    folder = tmp_path_factory.mktemp("stripes")
    generator = np.random.default_rng(0)
    for split, count in (("train", 15), ("validation", 9)):
        for name, width in (("a", 2), ("b", 3), ("c", 5)):
            place = folder / split / name
            place.mkdir(parents=True)
            for number in range(count):
                stripes = 90.0 * ((np.arange(20) + generator.integers(20)) // width % 2)
                pixels = stripes[None, :, None] + generator.normal(80.0, 40.0, (20, 20, 3))
                Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(place / f"{number}.png")
    (folder / "train" / "b" / "1.png").write_bytes(b"no image")
    return folder


def words_of(task, data, stage=1):
    words = [*TASKS[task], *MODEL, "--data-dir", data, "--on-bad-image", "skip", "-vb", 4]
    return [str(word) for word in [*words, "--deepspeed_config", ROOT / "ds_configs" / f"cpu_zero{stage}_fp32.json"]]


def by_timm(task, data):
    """(top-1 by neighbours, top-1 by the linear probe) of timm's model and scikit-learn."""
    plan = resolved([*words_of(task, data), "--eval-only"])
    layers = take_apart(plan.model.whole)
    initialise(plan.model.whole, layers, seed=plan.config.seed, device="cpu")
    weights = timm_state_dict(SequentialViT(layers))
    model = timm.create_model(NAME, num_classes=0, img_size=16, **KWARGS).eval()
    model.load_state_dict({name: weights[name] for name in model.state_dict()})
    transform = timm.data.create_transform(**{**timm.data.resolve_data_config(model=model), "input_size": (3, 16, 16)})

    @torch.no_grad()
    def features(split):
        source = open_source("", str(data), split)
        numbers = [n for n in range(len(source)) if (split, n) != ("train", 16)]
        tokens = model.forward_features(torch.stack([transform(source.image(n)) for n in numbers]))
        chosen = tokens[:, 1:].mean(1) if task == "mae" else tokens[:, 0]
        return chosen.double().numpy(), np.array([source.target(n) for n in numbers])

    (train, targets), (validation, right) = features("train"), features("validation")
    assert (len(train), len(validation)) == (44, 27)
    knn = KNeighborsClassifier(5, metric="cosine", weights=lambda distance: np.exp((1 - distance) / 0.07))
    scaler = StandardScaler().fit(train)
    probe = LogisticRegression(tol=1e-8, max_iter=1000).fit(scaler.transform(train), targets)
    return (
        100 * np.mean(knn.fit(train, targets).predict(validation) == right),
        100 * np.mean(probe.predict(scaler.transform(validation)) == right),
    )


# A task, ranks, ZeRO stage and further flags; one has the decoder on stages of its own.
LAYOUTS = [
    ("classification", 3, 3, []),
    ("classification", 4, 1, ["--tp", 2, "--pp", 2, "--sequence-parallel", "--class-parallel", "on"]),
    ("mae", 1, 1, []),
    ("mae", 3, 0, ["--pp", 3, "--pp-partition", "0,3,6,8"]),
    ("mae", 2, 1, ["--tp", 2, "--sequence-parallel"]),
]


@pytest.mark.parametrize(("task", "world", "stage", "words"), LAYOUTS, ids=str)
def test_features_of_every_layout(ranks, data, tmp_path, task, world, stage, words):
    """A mask that is left on, the classifier's outputs, features that a stage loses; an image twice."""
    words = [*words_of(task, data, stage), *words, "--eval-only", "--eval-knn", 5, "--eval-linear-probe"]
    [row] = train_in(ranks, world, [*words, "--output", tmp_path / "run"])
    assert (row["knn_top1"], row["linear_top1"]) == pytest.approx(by_timm(task, data))
    assert row["images"] == 27
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["last_knn_top1"] == summary["best_knn_top1"] == row["knn_top1"]


@pytest.mark.slow
def test_during_training(ranks, data, tmp_path):
    """Evaluators that training does not ask, that disturb it, or that a resumed run cannot do without; a damaged
    training image that is looked up among those of validation."""
    train = ["-b", 11, "--epochs", 2, "--warmup-epochs", 0, "--log-interval", 1, "--checkpoint-interval", 1]
    words = [*words_of("mae", data), "--max-bad-images", 1, *train, "--val-split", "validation", "--pp", "2"]
    rows = {}
    for name, more in (("without", []), ("with", ["--eval-knn", "--model-ema"])):
        rows[name] = train_in(ranks, 2, [*words, *more, "--output", tmp_path / name])
    losses = {name: [row["loss"] for row in rows[name] if row["kind"] == "train"] for name in rows}
    assert losses["with"] == losses["without"]
    for kind in ("eval", "eval_ema"):
        assert ["knn_top1" in row for row in rows["with"] if row["kind"] == kind] == [True, True]
    for name in rows:
        [skipped] = map(json.loads, (tmp_path / name / "skipped_images.jsonl").read_text().splitlines())
        assert (skipped["file"], skipped["split"]) == (str(data / "train" / "b" / "1.png"), "training")
    words[words.index("--epochs") + 1] = "3"
    words += ["--resume", "auto", "--allow-schedule-change", "--output", tmp_path / "without", "--eval-knn", 3]
    train_in(ranks, 2, words)
    assert read_rows(tmp_path / "without")[-1]["kind"] in ("eval", "checkpoint")
    summary = json.loads((tmp_path / "without" / "summary.json").read_text())
    assert summary["best_knn_top1"] == summary["last_knn_top1"] > 0


def counted_evaluations(settings):
    """On a rank: (loader processes, mappings of shared memory) after each evaluation of two runs, and after a third
    program's."""
    from ds_vit import api

    found = []

    def count(row=None):
        shared = [line for line in Path("/proc/self/maps").read_text().splitlines() if "/dev/shm/" in line]
        found.append((len(multiprocessing.active_children()), len(shared)))

    for epochs, output in ((5, "first"), (1, "second")):
        settings = {**settings, "epochs": epochs, "output": str(settings["output"].with_name(output))}
        settings["output"] = Path(api.train(**settings, on_evaluation=count).folder.path)
    count()
    api.evaluate(settings["output"])
    count()
    return found


@pytest.mark.slow
def test_evaluations_leave_nothing_behind(ranks, data, tmp_path):
    """A pass over a split whose loader process, or its shared memory, stays after it."""
    settings = {
        **{"deepspeed_config": str(ROOT / "ds_configs" / "cpu_zero1_fp32.json"), "data_dir": str(data)},
        **{"model": NAME, "model_kwargs": KWARGS, "img_size": 16, "max_bad_images": 1.0, "workers": 1},
        **{"batch_size": 22, "validation_batch_size": 8, "warmup_epochs": 0, "checkpoint_interval": "0"},
        **{"model_ema": True, "eval_knn": 5, "eval_linear_probe": True, "output": tmp_path / "none"},
    }
    [found] = ranks.run(1, counted_evaluations, settings)
    during, after = found[:12], found[12:]
    assert len(during) == 12
    assert {children for children, _ in during} == {1}, "the training loader's alone"
    # The training loader's own vary by a few; what stays after each evaluation adds up.
    assert max(shared for _, shared in during) < during[0][1] + len(during) // 2
    assert after == [(0, after[0][1])] * 2


def test_weights_that_lack_what_comes_after_the_features(ranks, data, tmp_path):
    """Features that cannot be judged without a classifier; a random classifier's figures beside them."""
    model = timm.create_model(NAME, num_classes=0, img_size=16, **KWARGS)
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    for task in TASKS:
        argv = [str(tmp_path / "w.safetensors"), *words_of(task, data)]
        assert ranks.run(1, evaluate_main, argv) == [2]
        assert ranks.run(1, evaluate_main, [*argv, "--knn", "--linear-probe"]) == [0]
        figures = json.loads((tmp_path / "eval.json").read_text())
        assert {"knn_top1", "linear_top1", "images"} <= figures.keys()
        assert not {"loss", "top1"} & figures.keys()


def test_what_cannot_be_judged():
    """A traceback in the middle of a run."""
    base = {"deepspeed_config": "x.json", "data_dir": "x"}
    one, several = open_source("digits", None, "validation"), open_source("digits", None, "validation")
    several.multi_label = True
    for source, settings, message in (
        (one, {"eval_knn": 356}, "--eval-knn 356 must be at most the 355 images"),
        (several, {"eval_knn": 1}, "--eval-knn 1 needs one class an image"),
        (several, {"eval_linear_probe": True}, "--eval-linear-probe needs one class an image"),
        (one, {"eval_knn": 1, "train_split": "", "eval_only": True}, "--train-split '' names none"),
    ):
        with pytest.raises(UserError, match=message):
            chosen_evaluators(flags.from_values({**base, **settings}), source)
