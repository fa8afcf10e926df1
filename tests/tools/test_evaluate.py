"""`ds-vit eval` and launch/eval.py: the same counts in every layout, and the ones that plain timm gives."""

from __future__ import annotations

import json
import math
import shutil

import oracle
import pytest
import timm
import torch
import yaml
from curves import train_in
from project import ROOT
from runs import run_quietly
from safetensors.torch import load_file, save_file

from ds_vit import cli
from ds_vit.config.parser import parse
from ds_vit.launching.process import discover
from ds_vit.tasks.classification.task import Accuracy
from ds_vit.tools.evaluate import _other_data_in
from ds_vit.tools.evaluate import main as evaluate_main
from ds_vit.train import train
from ds_vit.weights.files import find_weights

CONFIGS = ROOT / "ds_configs"
IMAGES = 103  # not a multiple of any batch or rank count used here
KWARGS = {**oracle.KWARGS, "num_heads": 4}


def evaluate(ranks, world, tmp_path, *argv):
    """What `launch/eval.py` writes on `world` ranks."""
    output = tmp_path / "figures.json"
    words = [str(word) for word in (*argv, "--output", output)]
    assert ranks.run(world, evaluate_main, words) == [0] * world
    return json.loads(output.read_text())


def right(result):
    """The counts behind the percentages."""
    return round(result["top1"] * result["images"] / 100), round(result["top5"] * result["images"] / 100)


@pytest.fixture(scope="module")
def run_folder(ranks, real_images, tmp_path_factory):
    """A run of one step on CIFAR-10's images, whose weights are then replaced by ones that no layer leaves alone."""
    base = tmp_path_factory.mktemp("eval")
    data = oracle.cifar_splits(real_images, base / "data", 20, IMAGES)
    argv = ["--model", oracle.MODEL, *oracle.kwargs_words(KWARGS), "--img-size", oracle.IMG_SIZE, "--data-dir", data]
    argv += ["--deepspeed_config", CONFIGS / "cpu_zero2_fp32.json", "-b", 5, "--max-steps", 1, "--workers", 0]
    argv += ["--crop-pct", 1.0, "--mixup", 0.8, "--drop-path", 0.1, "--val-split", "val"]
    train_in(ranks, 2, [*argv, "--output", base / "run"])
    weights = base / "run" / "model.safetensors"
    oracle.write_weights(weights, num_classes=10, **KWARGS)
    state = load_file(weights)
    save_file({name: tensor * 0.5 for name, tensor in state.items()}, base / "run" / "ema.safetensors")
    return base / "run"


@pytest.fixture(scope="module")
def by_timm(run_folder):
    """Weights file → (right at 1, right at 5, mean loss) by timm and torchvision alone."""
    images, labels = oracle.images_and_labels(run_folder.parent / "data", "val")
    assert len(labels) == IMAGES

    def count(file):
        model = timm.create_model(oracle.MODEL, num_classes=10, img_size=oracle.IMG_SIZE, **KWARGS)
        model.load_state_dict(load_file(file))
        with torch.no_grad():
            logits = model.eval()(images)
        hits = logits.topk(5).indices == labels[:, None]
        loss = torch.nn.functional.cross_entropy(logits, labels).item()
        return int(hits[:, 0].sum()), int(hits.sum()), loss

    return count


# The run had ZeRO-2 on two ranks; evaluation reads its JSON and must not care.
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("world", "words"),
    [
        (3, "-vb 7"),
        (2, "--tp 2 --sequence-parallel"),
        (4, "--pp 2 --tp 2"),
        (2, f"--deepspeed_config {CONFIGS}/cpu_zero3_fp32.json"),  # trained partitioned, as it fits no other way
    ],
    ids=["dp", "tp", "pp and tp", "zero 3"],
)
def test_the_same_counts_in_every_layout(ranks, run_folder, by_timm, tmp_path, world, words):
    """A row that is lost, counted twice, or counted on the wrong rank."""
    result = evaluate(ranks, world, tmp_path, run_folder, "--val-split", "val", *words.split())
    top1, top5, loss = by_timm(run_folder / "model.safetensors")
    assert result["images"] == IMAGES
    assert right(result) == (top1, top5)
    assert result["loss"] == pytest.approx(loss, rel=1e-5)
    assert (result["layout"]["pp"] * result["layout"]["tp"] * result["layout"]["dp"], result["precision"]) == (
        world,
        "fp32",
    )


def test_the_loss_is_timms_whatever_the_training_loss_is(ranks, run_folder, by_timm, tmp_path):
    """Binary cross-entropy, a sum over classes, smoothing or a threshold in what `validate` of timm's train.py does."""
    run = tmp_path / "run"
    run.mkdir()
    shutil.copy(run_folder / "model.safetensors", run)
    config = yaml.safe_load((run_folder / "config.yaml").read_text())
    config |= {"bce_loss": True, "bce_sum": True, "bce_target_thresh": 0.2, "smoothing": 0.3, "mixup": 0.8}
    (run / "config.yaml").write_text(yaml.safe_dump(config))
    result = evaluate(
        ranks, 1, tmp_path, run, "--val-split", "val", "--deepspeed_config", CONFIGS / "cpu_zero1_fp32.json"
    )
    assert result["loss"] == pytest.approx(by_timm(run_folder / "model.safetensors")[2], rel=1e-5)


@pytest.mark.parametrize("bce", [False, True])
def test_the_loss_of_several_labels_is_a_mean_over_classes(bce):
    """Softmax, of which the labels of an image would be exclusive."""
    logits, targets = torch.tensor([[2.0, 2.0, -2.0]]), torch.tensor([[1.0, 1.0, 0.0]])
    metrics = Accuracy(torch.device("cpu"), bce=bce)
    metrics.update(logits, {"targets": targets, "valid": torch.tensor([True])})
    assert metrics.compute()["loss"] == pytest.approx(math.log1p(math.exp(-2.0)), rel=1e-6)


# The files that people train with; on a CPU fp16 is refused, as in training.
@pytest.mark.parametrize(
    ("base", "world", "words"),
    [
        ("zero2_bf16.json", 2, "--tp 2"),
        ("zero3_offload_bf16.json", 1, ""),
    ],
)
def test_shipped_files_evaluate(ranks, run_folder, by_timm, tmp_path, base, world, words):
    """A file whose optimizer, schedule or 16-bit wrapper stands in the way; 16 bits that are not."""
    argv = [run_folder, "--val-split", "val", "--deepspeed_config", CONFIGS / base, "-vb", 16]
    result = evaluate(ranks, world, tmp_path, *argv, *words.split())
    assert "bf16" in result["precision"]
    assert result["images"] == IMAGES
    loss = by_timm(run_folder / "model.safetensors")[2]
    assert result["loss"] == pytest.approx(loss, rel=5e-3)
    assert result["loss"] != pytest.approx(loss, rel=1e-7)


def test_averaged_weights_without_the_untrained_ones(ranks, run_folder, by_timm, tmp_path):
    """An average that lacks frozen parameters: they are read from the raw weights beside it."""
    folder = tmp_path / "step"
    folder.mkdir()
    raw = load_file(run_folder / "model.safetensors")
    ema = load_file(run_folder / "ema.safetensors")
    frozen = [name for name in raw if name.startswith("patch_embed.")]
    save_file(raw, folder / "model.safetensors")
    save_file({name: tensor for name, tensor in ema.items() if name not in frozen}, folder / "ema.safetensors")
    save_file({**ema, **{name: raw[name] for name in frozen}}, tmp_path / "both.safetensors")
    argv = [folder, "--weights", "ema", "--recipe", run_folder / "config.yaml", "--val-split", "val"]
    result = evaluate(ranks, 1, tmp_path, *argv)
    assert result["loss"] == pytest.approx(by_timm(tmp_path / "both.safetensors")[2], rel=1e-5)
    assert result["weights"] == "ema"


def test_a_bare_file_and_a_folder_without_training_images(ranks, run_folder, by_timm, tmp_path):
    """Weights that no run made, on a test set that has no training split."""
    shutil.copytree(run_folder.parent / "data" / "val", tmp_path / "data" / "test")
    shutil.copy(run_folder / "model.safetensors", tmp_path / "w.safetensors")
    argv = [tmp_path / "w.safetensors", "--deepspeed_config", CONFIGS / "cpu_zero1_fp32.json", "--model", oracle.MODEL]
    argv += [*oracle.kwargs_words(KWARGS), "--img-size", oracle.IMG_SIZE, "--data-dir", tmp_path / "data"]
    argv += ["--train-split", "", "--val-split", "test", "--crop-pct", 1.0, "--num-classes", 10, "-vb", 8]
    argv += ["--workers", 0]
    result = evaluate(ranks, 1, tmp_path, *argv)
    assert right(result) == by_timm(run_folder / "model.safetensors")[:2]


@pytest.mark.parametrize("split", ["test", "val"])
def test_a_test_set_without_training_images_or_without_a_class(ranks, run_folder, by_timm, tmp_path, split):
    """A refusal of other photographs of the same classes, or class numbers that are the test set's own."""
    data = tmp_path / "data"
    shutil.copytree(run_folder.parent / "data" / "val", data / split)
    (data / split / ".thumbnails").mkdir()
    result = evaluate(ranks, 1, tmp_path, run_folder, "--data-dir", data)
    assert (right(result), result["val_split"]) == (by_timm(run_folder / "model.safetensors")[:2], split)
    _, err = failed(ranks, [run_folder, "--data-dir", data, "--knn"])
    assert "has no train/" in err
    assert "compare features with those of the training images: name their --train-split" in err
    shutil.rmtree(data / split / "airplane")
    fewer = evaluate(ranks, 1, tmp_path, run_folder, "--data-dir", data)
    shutil.copytree(run_folder.parent / "data" / "train", data / "train")
    for words in (("--val-split", split), ("--val-split", split, "--train-split", "")):
        again = evaluate(ranks, 1, tmp_path, run_folder, "--data-dir", data, *words)
        assert {**again, "seconds": 0} == {**fewer, "seconds": 0}
    missed = len([*(run_folder.parent / "data" / "val" / "airplane").iterdir()])
    assert fewer["images"] == IMAGES - missed
    assert right(result)[0] - missed <= right(fewer)[0] <= right(result)[0]
    shutil.move(data / split / "bird", data / split / "zebra")
    _, err = failed(ranks, [run_folder, "--data-dir", data, "--val-split", split, "--train-split", ""])
    assert "zebra" in err or "9 classes" in err


def test_other_images_are_not_held_out_of(ranks, run_folder, tmp_path):
    """Figures of a tenth of train/ for somebody who gave other images with a val/, because the run had no val/."""
    run, data = shutil.copytree(run_folder, tmp_path / "run"), tmp_path / "data"
    recipe = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump({**recipe, "val_split": "validation", "val_fraction": 0.1}))
    shutil.copytree(run_folder.parent / "data", data)
    other = evaluate(ranks, 1, tmp_path, run, "--data-dir", data)
    assert (other["images"], other["val_split"], "val_fraction" in other) == (IMAGES, "val", False)
    own = evaluate(ranks, 1, tmp_path, run)
    assert (own["images"], own["val_fraction"]) == (10, 0.1)


def test_an_empty_split_is_said_to_be_the_runs(ranks, run_folder, tmp_path):
    """A refusal of --val-split '' to somebody who gave no such flag."""
    run = shutil.copytree(run_folder, tmp_path / "run")
    recipe = yaml.safe_load((run / "config.yaml").read_text())
    (run / "config.yaml").write_text(yaml.safe_dump({**recipe, "val_split": ""}))
    _, err = failed(ranks, [run, "--knn"])
    assert f"{run / 'config.yaml'} has val_split: '', its run was not evaluated; name a split, --val-split NAME" in err


def test_figures_of_other_data_are_not_replaced_in_silence(tmp_path):
    """A test set's figures that take the place of the validation split's, and nobody knows."""
    file, result = tmp_path / "eval.json", {"data": "pets", "val_split": "val"}
    assert _other_data_in(file, result) == ""
    file.write_text(json.dumps({**result, "top1": 80.0}))
    assert _other_data_in(file, result) == ""
    for other in ({"data": "wild"}, {"val_split": "test"}):
        assert _other_data_in(file, {**result, **other}) == ", in place of those of pets val: --output keeps both"


def rows_heard(argv):
    """On a rank: the rows that a program's listener receives from a run."""
    rows = []
    train(parse(argv), discover(), listeners={"eval": rows.append})
    return rows


def test_eval_only_is_the_same_evaluation(ranks, run_folder, tmp_path):
    """Two roads that part: a pretended optimizer in the files, images that are counted on one of them alone."""
    data = tmp_path / "data"
    shutil.copytree(run_folder.parent / "data" / "train", data / "train")
    shutil.copytree(run_folder.parent / "data" / "val", data / "val")
    bad = next(data.glob("val/*/*"))
    bad.write_bytes(b"not a picture")
    words = ["--data-dir", data, "--on-bad-image", "skip"]
    result = evaluate(ranks, 1, tmp_path, run_folder, *words)
    output = tmp_path / "out"
    words = ["--recipe", run_folder / "config.yaml", "--initial-checkpoint", run_folder / "model.safetensors", *words]
    argv = [str(word) for word in [*words, "--eval-only", "--output", output]]
    heard = ranks.run(2, rows_heard, argv)
    [row] = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert (row["kind"], row["step"]) == ("eval", 0)
    assert heard == [[row], []]
    assert (row["top1"], row["top5"], row["images"]) == (result["top1"], result["top5"], IMAGES - 1)
    assert row["loss"] == pytest.approx(result["loss"], rel=1e-6)
    assert len((output / "predictions.csv").read_text().splitlines()) == IMAGES
    summary = json.loads((output / "summary.json").read_text())
    assert (summary["last_top1"], summary["eval_images"]) == (row["top1"], IMAGES - 1)
    assert (summary["skipped_images"], result["skipped_images"]) == (1, 1)
    assert (summary["steps"], summary["exit"]) == (0, "completed")
    assert not {"optimizer", "scheduler"} & json.loads((output / "deepspeed.json").read_text()).keys()
    assert "lr" not in yaml.safe_load((output / "config.yaml").read_text())


def failed(ranks, argv):
    """Exit code 2 and the one line on stderr."""
    [(code, _, err)] = ranks.run(1, run_quietly, argv, main=evaluate_main)
    assert code == 2, err
    assert err.count("\n") == 1, err
    return code, err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--num-classes 11 --val-split val", "has no classifier of 11 classes"),
        ("--checkpoint best", "--checkpoint best: not found"),
        ("--checkpoint step-00000009", "not found; the checkpoints in"),
        ("--layer-decay 0.5", "there is no flag --layer-decay"),
        ("--output nowhere/at/all.json", "not a folder that can be written to"),
        ("--pp 2", "1 ranks cannot be split"),
        ("--val-split=", "nothing to evaluate"),
        ("--train-split x --val-split val", "has no x/ and no x.tar"),
    ],
)
def test_bad_input_is_one_line(ranks, run_folder, words, message):
    """A traceback, a random classifier's accuracy, or a flag that is passed over."""
    _, err = failed(ranks, [run_folder, *words.split()])
    assert message in err
    assert err.startswith("eval.py: error: ")


def test_which_weights_are_found(tmp_path):
    """The wrong one of a run's several weights."""
    run = tmp_path / "run"
    for place in (run, run / "checkpoints" / "step-00000004", run / "checkpoints" / "step-00000008"):
        place.mkdir(parents=True, exist_ok=True)
    (run / "config.yaml").write_text("model: x\n")
    (run / "checkpoints" / "latest").write_text("step-00000008\n")
    (run / "checkpoints" / "best").write_text("step-00000004")
    for folder, names in (
        ("checkpoints/step-00000004", ("model.safetensors", "ema.safetensors")),
        ("checkpoints/step-00000008", ("model.safetensors.index.json", "model-00001-of-00002.safetensors")),
    ):
        for name in names:
            (run / folder / name).touch()

    def found(*arguments):
        weights = find_weights(run, *arguments)
        assert weights.recipe == run / "config.yaml"
        return str(weights.path.relative_to(run / "checkpoints"))

    assert found() == found("best") == "step-00000004/model.safetensors", "those of an incomplete run"
    assert found("raw") == "step-00000008/model.safetensors.index.json"
    assert found("raw", "best") == "step-00000004/model.safetensors"
    assert found("ema", "best") == "step-00000004/ema.safetensors"
    assert found("raw", "step-00000004") == "step-00000004/model.safetensors"
    assert find_weights(run / "checkpoints" / "step-00000004").recipe == run / "config.yaml"
    assert found("last") == "step-00000008/model.safetensors.index.json"
    with pytest.raises(ValueError, match=r"no ema\.safetensors.*it has raw weights"):
        find_weights(run, "ema")
    with pytest.raises(ValueError, match="--weights last and --checkpoint best are both given; keep one"):
        find_weights(run, "last", "best")
    (run / "model.safetensors").touch()
    assert found() == found("best") == "step-00000004/model.safetensors", "the run has a best checkpoint"
    (run / "checkpoints" / "best").unlink()
    assert find_weights(run).path == run / "model.safetensors", "there are no best weights"
    with pytest.raises(ValueError, match=rf"no best\.safetensors \(or its index\.json\) in {run}; it has raw weights"):
        find_weights(run, "best")
    (run / "best.safetensors").touch()
    assert find_weights(run).path == find_weights(run, "best").path == run / "best.safetensors"
    assert find_weights(run, "last").path == find_weights(run, "raw").path == run / "model.safetensors"
    assert find_weights(run).folder == run
    for weights in ("ema", "best", "last"):
        with pytest.raises(ValueError, match=f"--weights {weights} has no effect on .*holds one set of weights"):
            find_weights(run / "model.safetensors", weights)
    with pytest.raises(ValueError, match="is not a run's folder"):
        find_weights(run / "model.safetensors", "raw", "latest")
    assert find_weights(run / "checkpoints" / "step-00000004" / "ema.safetensors").kind == "ema", "evaluated as such"
    with pytest.raises(ValueError, match="--weights bset: give best, last, ema or raw"):
        find_weights(run, "bset")
    with pytest.raises(ValueError, match="does not exist"):
        find_weights(tmp_path / "absent")
    (run / "checkpoints" / "latest").write_text("step-00000012")
    assert find_weights(run, "last").path == run / "model.safetensors", "which needs no checkpoint"
    (run / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="names step-00000012, which does not exist"):
        find_weights(run, "last")
    (run / "checkpoints" / "latest").unlink()
    assert found("last") == found("", "latest") == "step-00000008/model.safetensors.index.json", "the newest one"


def test_the_command_of_one_process(ranks, run_folder, by_timm):
    """`ds-vit eval` that does not reach the same code, and eval.json in the run's folder."""
    [(code, out, err)] = ranks.run(1, run_quietly, ["eval", run_folder, "--val-split", "val"], main=cli.main)
    assert code == 0, err
    result = json.loads((run_folder / "eval.json").read_text())
    assert right(result) == by_timm(run_folder / "model.safetensors")[:2]
    assert f"{result['top1']:.3f} %" in out
    assert "103" in out
