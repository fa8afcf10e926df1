"""What a run's checkpoints are to others: timm, `ds-vit eval`, `ds-vit export`, and a disk that is slow."""

from __future__ import annotations

import json
import shutil
import signal
import time
from pathlib import Path

import pytest
import timm
import torch
from curves import read_rows, train_in, train_rows
from interrupting import TINY, train_with
from project import ROOT
from runs import resolved
from safetensors.torch import load_file

from ds_vit import cli
from ds_vit.checkpoint.folder import checkpoints, mark_best
from ds_vit.checkpoint.tensors import TensorFiles
from ds_vit.weights.export import export

KWARGS = {"patch_size": 4, "embed_dim": 32, "depth": 2, "num_heads": 2}
NEVER = {"step": 10**9, "delay": 0.0}


def words(stage: int, *argv: object) -> list[str]:
    config = ["--deepspeed_config", ROOT / "ds_configs" / f"cpu_zero{stage}_fp32.json", "-b", 8]
    return [str(word) for word in [*TINY, *config, *argv]]


@pytest.fixture(scope="module")
def run(ranks, tmp_path_factory):
    """A run on two ranks, with a checkpoint at step 20 and one, evaluated, at its end."""
    output = tmp_path_factory.mktemp("use") / "run"
    argv = words(
        1, "--no-aug", "--max-steps", 24, "--checkpoint-interval", 20, "--model-ema-decay", 0.9, "--output", output
    )
    return output, train_in(ranks, 2, argv)


def eval_on_rank(argv: list[str]) -> int:
    """On a rank: the exit code of launch/eval.py."""
    from ds_vit.tools.evaluate import main

    return main(argv)


@pytest.mark.parametrize("kind", ["raw", "ema"])
def test_a_checkpoint_is_evaluated_and_exported(ranks, run, tmp_path, kind):
    # Catches: an average that is evaluated or exported as the raw weights, or the other way round.
    output, rows = run
    name = checkpoints(output / "checkpoints")[0].name
    figures = tmp_path / "figures.json"
    argv = [output, "--checkpoint", name, "--weights", kind, "--output", figures]
    assert ranks.run(2, eval_on_rank, [str(word) for word in argv]) == [0, 0]
    result = json.loads(figures.read_text())
    evaluated = {row["kind"]: row for row in rows if row["kind"].startswith("eval")}
    right, wrong = (evaluated[k] for k in (("eval", "eval_ema") if kind == "raw" else ("eval_ema", "eval")))
    assert right["step"] == int(name.removeprefix("step-"))
    assert (result["top1"], result["top5"]) == (right["top1"], right["top5"])
    assert result["loss"] == pytest.approx(right["loss"], rel=1e-5)
    assert result["loss"] != pytest.approx(wrong["loss"], rel=1e-3)
    found = export(output, "timm", weights=kind, checkpoint=name, output=tmp_path / "timm")
    assert found.largest == 0.0
    model = timm.create_model(f"local-dir:{found.folder}", pretrained=True)
    file = output / "checkpoints" / name / ("ema.safetensors" if kind == "ema" else "model.safetensors")
    assert all(torch.equal(model.state_dict()[key], tensor) for key, tensor in load_file(str(file)).items())


def evaluate_on_rank(run: str) -> list[tuple[str, dict[str, object]]]:
    """On a rank: the first line and the figures by the API, of a run by default and of its last weights."""
    import contextlib
    import io

    from ds_vit.api import evaluate

    found = []
    for which in ({}, {"weights": "last"}):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            figures = dict(evaluate(run, **which))
        found.append((out.getvalue().splitlines()[0], figures))
    return found


def test_a_run_stands_for_its_best_weights(ranks, tmp_path, capsys):
    # Catches: the last weights in silence where better ones exist; figures of another step in the line that names them.
    output = tmp_path / "run"
    argv = words(1, "-b", 128, "--no-aug", "--epochs", 2, "--checkpoint-interval", "epoch", "--output", output)
    rows = train_in(ranks, 1, argv)
    mark_best(output / "checkpoints", "step-00000011")  # whichever is
    train_in(ranks, 1, [*argv, "--resume", "auto"])
    lines, figures = {}, {(row["kind"], row["step"]): row for row in rows if row["kind"].startswith("eval")}
    for weights, kind, step in (("best", "eval", 11), ("last", "eval", 22), ("ema", "eval_ema", 22)):
        name = {"last": "model"}.get(weights, weights)
        file = f"{output}/{name}.safetensors"
        lines[weights] = f"weights: {file}, step {step}, top1 {figures[kind, step]['top1']:.4g} %"
        if weights != "best":
            assert cli.main(["export", str(output), "--to", "timm", "--weights", weights]) == 0
            assert capsys.readouterr().out.splitlines()[0] == lines[weights]
            shutil.rmtree(output / "export-timm")
    assert cli.main(["export", str(output), "--to", "timm"]) == 0
    assert capsys.readouterr().out.splitlines()[0] == lines["best"]
    of_step = load_file(output / "checkpoints" / "step-00000011" / "model.safetensors")
    exported = load_file(output / "export-timm" / "model.safetensors")
    assert all(torch.equal(exported[name], tensor) for name, tensor in of_step.items())
    [found] = ranks.run(1, evaluate_on_rank, str(output))
    for (line, result), weights, step in zip(found, ("best", "last"), (11, 22), strict=True):
        assert line == lines[weights]
        assert result["loss"] == pytest.approx(figures["eval", step]["loss"], rel=1e-6)
    assert found[0][1]["loss"] != pytest.approx(found[1][1]["loss"], rel=1e-4)
    # Training starts from the same weights, and says so.
    best = lines["best"].removeprefix("weights: ")
    start = resolved([*argv, "--output", tmp_path / "next", "--initial-checkpoint", output])
    assert (
        start.model.towers["image"].fingerprint
        == resolved([*argv, "--output", tmp_path / "next", "--initial-checkpoint", output / "best.safetensors"])
        .model.towers["image"]
        .fingerprint
    )
    assert f"weights from {best}: " in "\n".join(start.notes)
    student = resolved([*argv, "--output", tmp_path / "next", "--kd-checkpoint", output])
    assert f"teacher from {best}, at " in "\n".join(student.notes)


def train_in_small_files(argv: list[str]) -> tuple[int, list[str], int]:
    """On a rank: train with files of at most 30 kB; the code, what this rank wrote, its largest round in bytes."""
    from ds_vit.checkpoint import gather, snapshot
    from ds_vit.train import main

    snapshot.WEIGHT_BYTES = snapshot.STATE_BYTES = 30_000
    written, rounds = [], []
    assemble = gather.assemble_flat

    class Writer(gather.TensorWriter):
        def __init__(self, path: Path, *rest: object) -> None:
            super().__init__(path, *rest)
            written.append(path.name)

    def counting(slices, tp_slice):
        rounds.append(sum(4 * part.numel() for part in slices))
        return assemble(slices, tp_slice)

    gather.TensorWriter, gather.assemble_flat = Writer, counting
    return main(argv), written, max(rounds)


def test_damaged_weights_are_not_used(run, tmp_path, capsys):
    # Catches: figures or files of weights that have lost a bit, in silence.
    copy = tmp_path / "run"
    shutil.copytree(run[0], copy)
    newest = checkpoints(copy / "checkpoints")[0]
    victim = newest / "ema.safetensors"
    data = bytearray(victim.read_bytes())
    data[-5] ^= 1
    victim.write_bytes(data)
    message = f"{newest.name}/{victim.name} does not have the checksum of the manifest"
    with pytest.raises(ValueError, match=message):
        export(copy, "timm", weights="ema", checkpoint="latest", output=str(tmp_path / "out"))
    assert eval_on_rank([str(copy), "--weights", "ema", "--checkpoint", "latest"]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_nobody_gathers_the_final_weights(ranks, tmp_path):
    # Catches: rank 0 holding or writing the whole model, where it may not fit.
    argv = words(1, "--tp", 2, "--pp", 2, "--max-steps", 2, "--output", tmp_path / "run", "--eval-interval", 0)
    results = ranks.run(4, train_in_small_files, argv)
    assert [code for code, _, _ in results] == [0] * 4
    assert all(written for _, written, _ in results), "a rank wrote nothing"
    index = json.loads((tmp_path / "run" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert sorted(file for _, written, _ in results for file in written if file.startswith("model")) == files
    assert len(files) >= 3
    tensors = TensorFiles(tmp_path / "run" / file for file in files)
    model = timm.create_model("vit_tiny_patch16_224", num_classes=10, img_size=16, **KWARGS)
    assert {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()} == {
        name: tuple(tensors[name].shape) for name in tensors
    }
    largest = max(4 * tensors[name].numel() for name in tensors)
    assert max(most for _, _, most in results) <= largest


def train_on_a_slow_disk(argv: list[str], output: str) -> tuple[int, str, str]:
    """On a rank: as `train_with`, and the first checkpoint takes until step 10 is logged."""
    from interrupting import last_step

    from ds_vit.checkpoint import gather

    plain = gather.TensorWriter.close

    def close(self):
        deadline = time.monotonic() + 60
        while last_step(Path(output)) < 10 and time.monotonic() < deadline:
            time.sleep(0.01)
        return plain(self)

    gather.TensorWriter.close = close
    return train_with(argv, output, 0, signal.SIGTERM, NEVER)


@pytest.mark.slow
def test_a_slow_disk_holds_nobody_up(ranks, tmp_path):
    # Catches: training that waits for a disk, saves that pile up in memory, and silence about both.
    output = tmp_path / "run"
    argv = words(1, "--max-steps", 14, "--checkpoint-interval", 3, "--keep-checkpoints", 0, "--output", output)
    results = ranks.run(2, train_on_a_slow_disk, argv, str(output))
    assert [code for code, _, _ in results] == [0, 0]
    said = results[0][1]
    assert "step 6: the checkpoint of step 3 is still being written; the next one waits for it" in said
    assert said.count("still being written") <= 2, "once a checkpoint is enough"
    saved = sorted(path.name for path in (output / "checkpoints").glob("step-*"))
    assert (saved[0], saved[-1]) == ("step-00000003", "step-00000014")
    assert "step-00000006" not in saved
    rows = read_rows(output)
    assert [row["step"] for row in train_rows(rows)] == list(range(1, 15))
    kinds = [(row["kind"], row["step"]) for row in rows]
    assert kinds.index(("train", 10)) < kinds.index(("checkpoint", 3)), "training stood still for the disk"
