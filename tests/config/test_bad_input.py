"""Bad input: one clear line, exit code 2, no process group, nothing half-written."""

import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from curves import read_rows, train_rows
from picture_folders import CPU, TINY, make_folder
from runs import run_quietly
from safetensors.torch import load_file

from ds_vit.checkpoint.folder import marked
from ds_vit.fault_tolerance import exit_codes
from ds_vit.train import main


@pytest.fixture
def folder(tmp_path):
    """An ImageFolder with two classes, 6 images for training and 4 for evaluation."""
    return make_folder(tmp_path / "data")


def refused(capsys, tmp_path, *words, config=CPU):
    """Run main, which must refuse; gives the one line."""
    output = tmp_path / "out"
    argv = [*TINY, "--deepspeed_config", config, "--output", str(output), *map(str, words)]
    assert main(argv) == 2
    assert not dist.is_initialized()
    assert not output.exists()
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("train.py: error")]
    assert len(lines) == 1
    return lines[0]


def test_fast_decoding_without_its_libraries_or_jpegs(capsys, tmp_path, folder, monkeypatch):
    """A flag without effect, and a missing library that a worker would find."""
    pytest.importorskip("simplejpeg")
    assert "these images have none" in refused(capsys, tmp_path, "--dataset", "digits", "--decode", "fast")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    line = refused(capsys, tmp_path, "--data-dir", folder, "--decode", "fast")
    assert "pip install simplejpeg" in line
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", None)
    line = refused(capsys, tmp_path, "--data-dir", folder, "--decode", "fast", "--augment-on", "device")
    assert "cannot import torchcodec" in line


def test_image_that_cannot_be_decoded(ranks, tmp_path, folder):
    """--on-bad-image error names the file of an evaluation, from a worker too; no weights are left behind. The same
    command in the same folder is not refused afterwards, and the rows of the first try do not stay among the second
    one's. timm loads the weights as they are."""
    import timm

    sound = (folder / "val" / "cat" / "1.png").read_bytes()
    (folder / "val" / "cat" / "1.png").write_bytes(b"not a picture")
    output = tmp_path / "out"
    argv = [*TINY, "--workers", "2", "--deepspeed_config", CPU, "--data-dir", str(folder)]
    argv += ["--max-steps", "3", "-b", "6", "--output", str(output), "--checkpoint-interval", "0"]
    argv += ["--on-bad-image", "error"]
    [(code, _, said)] = ranks.run(1, run_quietly, argv)
    assert code == 2
    assert str(Path("cat") / "1.png") in said
    assert len([line for line in said.splitlines() if line.startswith("train.py: error")]) == 1
    assert not (output / "model.safetensors").exists()
    assert not (output / "summary.json").exists()
    (output / "metrics.jsonl").write_text('{"kind": "train", "step": 99}\n')
    (folder / "val" / "cat" / "1.png").write_bytes(sound)
    [(code, _, said)] = ranks.run(1, run_quietly, argv)
    assert code == 0, said
    assert all(row["step"] <= 3 for row in read_rows(output))
    assert (output / "unsaved-1" / "metrics.jsonl").exists()
    model = timm.create_model(
        "vit_tiny_patch16_224", num_classes=2, img_size=16, patch_size=8, embed_dim=24, depth=1, num_heads=2
    )
    model.load_state_dict(load_file(str(output / "model.safetensors")), strict=True)


@pytest.mark.slow
def test_too_many_bad_images_end_the_run_saved(ranks, tmp_path, folder):
    """A count that depends on the layout or on what was saved when; a run that ends again once the file is repaired;
    a limit that nobody can raise."""
    sound = (folder / "train" / "cat" / "1.png").read_bytes()
    (folder / "train" / "cat" / "1.png").write_bytes(b"not a picture")
    argv = [*TINY, "--deepspeed_config", CPU, "--data-dir", str(folder), "--seed", "1", "--log-interval", "1"]
    argv += ["--max-steps", "6", "--sched", "constant"]
    limit = ["--max-bad-images", "0"]
    lines = []
    error = ["--on-bad-image", "error"]
    layouts = ((1, ["-b", "2", *limit]), (2, ["-b", "1", *error]), (2, ["-b", "2", "--pp", "2", *limit]))
    for world, layout in layouts:
        output = tmp_path / f"run{len(lines)}"
        results = ranks.run(world, run_quietly, [*argv, *layout, "--output", str(output)])
        assert [code for code, *_ in results] == [2] * world
        [line] = [line for *_, said in results for line in said.splitlines() if "error" in line]
        lines.append(line.replace(str(output), "RUN"))
        step = max(row["step"] for row in train_rows(read_rows(output)))
        assert marked(output / "checkpoints", "latest") == f"step-{step:08d}"
    assert len(set(lines)) == 1
    assert "1 of the 6 images of epoch 0 (0.17) are damaged (" in lines[0]
    assert "train/cat/1.png: " in lines[0]
    assert "), and none is allowed;" in lines[0]
    argv += ["-b", "2"]
    [(code, _, said)] = ranks.run(
        1, run_quietly, [*argv, "--output", str(tmp_path / "allowed")]
    )  # one is always allowed
    assert code == 0, said
    (folder / "train" / "cat" / "1.png").write_bytes(sound)
    [(code, _, said)] = ranks.run(
        1, run_quietly, [*argv, *limit, "--output", str(tmp_path / "run0"), "--resume", "auto"]
    )
    assert code == 0, said


def meet_at_a_taken_port(argv):
    """On a rank that stands alone: main, at a port that somebody else listens on."""
    import os
    import socket

    import deepspeed

    dist.destroy_process_group()
    deepspeed.comm.comm.cdb = None
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        os.environ |= {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
        os.environ |= {"MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": "2"}
        code, _, said = run_quietly(argv)
        return port, code, said


def test_a_port_that_is_taken(ranks, tmp_path, folder):
    """A second run on one machine, at the launcher's default port: torch's page of C++ frames."""
    argv = [*TINY, "--deepspeed_config", CPU, "--data-dir", str(folder), "-b", "2", "--output", str(tmp_path / "out")]
    [(port, code, said)] = ranks.run(1, meet_at_a_taken_port, argv)
    assert code == 2
    [line] = [line for line in said.splitlines() if line.startswith("train.py: error")]
    assert f"port {port} of the rendezvous is in use" in line
    assert f"--master_port {port + 1}" in line
    assert "Traceback" not in said
    assert not (tmp_path / "out").exists()


def test_a_bug_in_a_loaders_worker_is_none_of_the_image(ranks, tmp_path, folder):
    """A ValueError of our own code in a worker, which travelled as if a file were damaged."""
    output = tmp_path / "out"
    argv = [*TINY, "--workers", "2", "--deepspeed_config", CPU, "--data-dir", str(folder), "--output", str(output)]
    [(code, _, said)] = ranks.run(1, with_a_broken_sampler, argv)
    assert code == exit_codes.BUG
    assert "planted" in said
    assert "train.py: error" not in said


def with_a_broken_sampler(argv):
    """On a rank: main, with batches that raise what code raises, not people."""
    from ds_vit.data.reader import Reader

    def broken(self, rows):
        raise ValueError("planted")

    Reader.read = broken
    return run_quietly(argv)


def test_every_command_shows_a_bug(capsys, monkeypatch):
    """`ds-vit` passed every ValueError off as bad input."""
    from ds_vit import cli

    monkeypatch.setattr("ds_vit.launching.hosts.read_hosts", lambda *_: int("not a number"))
    assert cli.main(["hosts"]) == exit_codes.BUG
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.undo()
    assert cli.main(["hosts", "--from", "/nowhere/at/all"]) == exit_codes.BAD_INPUT
    assert capsys.readouterr().err.startswith("ds-vit: error: ")
