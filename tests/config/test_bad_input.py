"""Bad input: one clear line, exit code 2, no process group, nothing half-written."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from picture_folders import CPU, TINY, make_folder
from safetensors.torch import load_file, save_file

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


def json_file(tmp_path, **changes):
    """The CPU file with changes."""
    data = {**json.loads(Path(CPU).read_text()), **changes}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(data))
    return str(path)


def test_fast_decoding_where_there_is_nothing_to_decode_fast(capsys, tmp_path, folder, monkeypatch):
    """A flag that is passed over, and a missing library that is found in a worker."""
    pytest.importorskip("simplejpeg")
    assert "these images have none" in refused(capsys, tmp_path, "--dataset", "digits", "--decode", "fast")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    line = refused(capsys, tmp_path, "--data-dir", folder, "--decode", "fast")
    assert "pip install simplejpeg" in line
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "torchcodec.decoders", None)
    line = refused(capsys, tmp_path, "--data-dir", folder, "--decode", "fast", "--augment-on", "device")
    assert "needs torchcodec 0.16 or later, which cannot be imported" in line


def test_unknown_model(capsys, tmp_path, folder):
    """The nearest name is the help."""
    line = refused(capsys, tmp_path, "--data-dir", folder, "--model", "vit_tinny_patch16_224")
    assert "vit_tinny_patch16_224" in line
    assert "vit_tiny_patch16_224" in line


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("resnet50", "resnet50"),
        ("deit_tiny_distilled_patch16_224", "Distilled"),
        ("beit_base_patch16_224", "'beit' family"),
    ],
)
def test_model_of_another_class(capsys, tmp_path, folder, name, word):
    """A model that is not cut here must be refused by its class."""
    argv = ["--data-dir", folder, "--model", name]
    assert word in refused(capsys, tmp_path, *argv)


def test_data_folder_missing_or_without_classes(capsys, tmp_path, folder):
    """A typing mistake in a path, and a folder of loose files."""
    assert "nowhere" in refused(capsys, tmp_path, "--data-dir", tmp_path / "nowhere")
    (tmp_path / "empty" / "train").mkdir(parents=True)
    line = refused(capsys, tmp_path, "--data-dir", tmp_path / "empty")
    assert "class" in line
    assert "train" in line
    shutil.rmtree(folder / "val")
    assert "val" in refused(capsys, tmp_path, "--data-dir", folder)


def test_validation_with_other_classes(capsys, tmp_path, folder):
    """Labels would mean something else in evaluation."""
    (folder / "val" / "dog").rename(folder / "val" / "wolf")
    line = refused(capsys, tmp_path, "--data-dir", folder)
    assert "dog" in line
    assert "wolf" in line


def test_unknown_dataset(capsys, tmp_path):
    """The nearest data set is named."""
    assert "digits" in refused(capsys, tmp_path, "--dataset", "digit")
    assert "torch/cifar10" in refused(capsys, tmp_path, "--dataset", "torch/cifar11", "--data-dir", tmp_path)


def test_malformed_json(capsys, tmp_path, folder):
    """File, line and column."""
    path = tmp_path / "broken.json"
    path.write_text('{\n  "zero_optimization": {"stage": 1,}\n')
    line = refused(capsys, tmp_path, "--data-dir", folder, config=str(path))
    assert f"{path}, line 2" in line
    assert "column" in line
    assert "absent.json" in refused(capsys, tmp_path, "--data-dir", folder, config=str(tmp_path / "absent.json"))


def test_batch_arithmetic(capsys, tmp_path, folder):
    """The three numbers and two ways out."""
    config = json_file(tmp_path, train_batch_size=10, gradient_accumulation_steps=1)
    line = refused(capsys, tmp_path, "--data-dir", folder, config=config)
    assert "train_batch_size 10 is not micro-batch 4 x accumulation 1 x data-parallel 1 = 4" in line
    assert "set train_batch_size to 4, or choose" in line


def test_data_smaller_than_a_batch(capsys, tmp_path, folder):
    """No step would ever be taken."""
    line = refused(capsys, tmp_path, "--data-dir", folder, "--batch-size", 7)
    assert "7" in line
    assert "6" in line


def test_fp16_on_a_cpu(capsys, tmp_path, folder):
    """DeepSpeed would say so from inside initialize, after the process group."""
    config = json_file(tmp_path, fp16={"enabled": True})
    assert "fp16 needs a GPU" in refused(capsys, tmp_path, "--data-dir", folder, config=config)


def test_stage_that_does_not_exist(capsys, tmp_path, folder):
    """ZeRO has stages 0 to 3."""
    config = json_file(tmp_path, zero_optimization={"stage": 5})
    assert "stage 5 does not exist" in refused(capsys, tmp_path, "--data-dir", folder, config=config)


def test_value_that_deepspeed_would_refuse(capsys, tmp_path, folder):
    """DeepSpeed's own check comes after the process group, as a page of pydantic."""
    config = json_file(tmp_path, zero_optimization={"stage": 1, "reduce_bucket_size": -1})
    line = refused(capsys, tmp_path, "--data-dir", folder, config=config)
    assert "zero_optimization.reduce_bucket_size" in line


def test_layer_decay_with_an_optimizer_whose_update_is_not_proportional(capsys, tmp_path, folder):
    """Shorter steps would be another method."""
    config = tmp_path / "rprop.json"
    config.write_text(json.dumps({"optimizer": {"type": "Rprop"}, "gradient_clipping": 1.0}))
    line = refused(capsys, tmp_path, "--data-dir", folder, "--layer-decay", 0.7, config=str(config))
    assert "--layer-decay does not work with Rprop" in line


def test_settings_that_an_optimizer_would_not_take(capsys, tmp_path, folder):
    """A decay that nothing applies; a decay by the square of the rate, which a factor on the update does not give."""
    config = json_file(tmp_path, optimizer={"type": "Rprop"}, gradient_clipping=1.0)
    line = refused(capsys, tmp_path, "--data-dir", folder, "--lr", 1e-3, "--weight-decay", 0.05, config=config)
    assert "--weight-decay 0.05 has no effect: Rprop has no weight decay" in line
    lion = {"type": "Lion", "params": {"lr": 1e-3, "corrected_weight_decay": True}}
    config = json_file(tmp_path, optimizer=lion, gradient_clipping=1.0)
    line = refused(capsys, tmp_path, "--data-dir", folder, "--layer-decay", 0.7, config=config)
    assert "--layer-decay does not work with corrected_weight_decay of Lion" in line


def test_num_classes_smaller_than_the_datas(capsys, tmp_path, folder):
    """A label outside the head would crash the loss."""
    line = refused(capsys, tmp_path, "--data-dir", folder, "--num-classes", 1)
    assert "--num-classes 1 is smaller than the 2 classes of the data" in line


def test_odd_batch_with_mixup(capsys, tmp_path, folder):
    """Mixing takes pairs."""
    line = refused(capsys, tmp_path, "--data-dir", folder, "--mixup", 0.8, "--batch-size", 3)
    assert "odd" in line
    assert "3" in line


def test_two_schedulers(capsys, tmp_path, folder):
    """The JSON's scheduler and --sched would fight."""
    block = {"type": "WarmupLR", "params": {"warmup_num_steps": 2}}
    config = json_file(tmp_path, scheduler=block)
    line = refused(capsys, tmp_path, "--data-dir", folder, "--sched", "linear", config=config)
    assert "--sched" in line
    assert "WarmupLR" in line


def test_attention_dropout_and_batch_norm(capsys, tmp_path, folder):
    """Randomness that cannot be keyed, and statistics that follow the micro-batch."""
    argv = ["--data-dir", folder, "--model-kwargs", "attn_drop_rate=0.1", "patch_size=8", "depth=1"]
    assert "attn_drop" in refused(capsys, tmp_path, *argv)


def test_checkpoint_that_does_not_fit(capsys, tmp_path, folder):
    """The first five names and shapes."""
    path = tmp_path / "weights.safetensors"
    save_file({f"blocks.{i}.mlp.fc9.weight": torch.zeros(2, i + 1) for i in range(7)}, str(path))
    line = refused(capsys, tmp_path, "--data-dir", folder, "--initial-checkpoint", path)
    assert str(path) in line
    assert "blocks.0" in line or "cls_token" in line
    assert "missing.pth" in refused(
        capsys, tmp_path, "--data-dir", folder, "--initial-checkpoint", tmp_path / "missing.pth"
    )


def test_output_of_another_run(capsys, tmp_path, folder):
    """A second run must not write into the first one's folder."""
    argv = [*TINY, "--deepspeed_config", CPU, "--data-dir", str(folder), "--output", str(tmp_path / "run")]
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text("")
    assert main(argv) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]


def run_main(argv):
    """What a rank runs: main's exit code and what it said."""
    import contextlib
    import io

    from ds_vit.train import main

    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        code = main(argv)
    return code, said.getvalue()


@pytest.mark.parametrize("workers", [0, 2])
def test_image_that_cannot_be_decoded(ranks, tmp_path, folder, workers):
    """The default is an error that names the file, from a worker too; no weights are left behind."""
    (folder / "train" / "cat" / "1.png").write_bytes(b"not a picture")
    output = tmp_path / "out"
    argv = [*TINY, "--workers", str(workers), "--deepspeed_config", CPU, "--data-dir", str(folder)]
    [(code, said)] = ranks.run(1, run_main, [*argv, "--max-steps", "3", "--output", str(output)])
    assert code == 2
    assert str(Path("cat") / "1.png") in said
    assert len([line for line in said.splitlines() if line.startswith("train.py: error")]) == 1
    assert not (output / "model.safetensors").exists()
    assert not (output / "summary.json").exists()


def test_bad_image_skipped_and_counted(ranks, tmp_path, folder):
    """--on-bad-image skip replaces it, the same in every layout, and the summary counts it."""
    from curves import assert_same_curve, read_rows

    (folder / "train" / "cat" / "1.png").write_bytes(b"not a picture")
    argv = [
        *TINY,
        "--deepspeed_config",
        CPU,
        "--data-dir",
        str(folder),
        "--on-bad-image",
        "skip",
        "--log-interval",
        "1",
    ]
    runs = []
    for world, micro in ((1, 6), (2, 3)):
        output = tmp_path / f"out{world}"
        argv_here = [*argv, "-b", str(micro), "--output", str(output), "--max-steps", "3"]
        assert ranks.run(world, run_main, argv_here)[0][0] == 0
        assert json.loads((output / "summary.json").read_text())["skipped_images"] == 3
        runs.append(read_rows(output))
    assert_same_curve(*runs, rtol=1e-5)


def meet_at_a_taken_port(argv, with_relauncher):
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
        if with_relauncher:
            from ds_vit.launching.process import discover
            from ds_vit.tools.parity.relaunch import Relauncher

            with pytest.raises(ValueError, match=f"port {port}"):
                Relauncher(discover())
        return port, *run_main(argv)


def test_a_port_that_is_taken(ranks, tmp_path, folder):
    """A second run on one machine, at the launcher's default port: torch's page of C++ frames."""
    argv = [*TINY, "--deepspeed_config", CPU, "--data-dir", str(folder), "-b", "2", "--output", str(tmp_path / "out")]
    [(port, code, said)] = ranks.run(1, meet_at_a_taken_port, argv, True)
    assert code == 2
    [line] = [line for line in said.splitlines() if line.startswith("train.py: error")]
    assert f"port {port}, at which the ranks were to meet, is taken" in line
    assert f"--master_port {port + 1}" in line
    assert "Traceback" not in said
    assert not (tmp_path / "out").exists()


def test_a_bug_shows_its_traceback(capsys, monkeypatch):
    """A ValueError that is not one of ours must not be dressed up as bad input."""
    import ds_vit.train

    monkeypatch.setattr(ds_vit.train.flags, "parse", lambda argv: int("not a number"))
    assert main([]) == 1
    assert "Traceback" in capsys.readouterr().err


def test_a_bug_inside_the_package_shows_its_traceback(capsys, monkeypatch, tmp_path, folder):
    """`zip(strict=True)` and `int()` raise in our own frames: no mistake of the user's, and worth another start."""
    recipe = tmp_path / "r.yaml"
    recipe.write_text("epochs: 1\n")
    monkeypatch.setattr("ds_vit.config.parser.EITHER", ((),))  # of which a pair is unpacked
    argv = [*TINY, "--deepspeed_config", CPU, "--data-dir", str(folder), "--recipe", str(recipe)]
    assert main(argv) == exit_codes.BUG
    said = capsys.readouterr().err
    assert "Traceback" in said
    assert "ValueError" in said
    assert "train.py: error" not in said


def test_a_bug_in_a_loaders_worker_is_none_of_the_image(ranks, tmp_path, folder):
    """A ValueError of our own code in a worker, which travelled as if a file were damaged."""
    output = tmp_path / "out"
    argv = [*TINY, "--workers", "2", "--deepspeed_config", CPU, "--data-dir", str(folder), "--output", str(output)]
    [(code, said)] = ranks.run(1, with_a_broken_sampler, argv)
    assert code == exit_codes.BUG
    assert "planted" in said
    assert "train.py: error" not in said


def with_a_broken_sampler(argv):
    """On a rank: main, with batches that raise what code raises, not people."""
    from ds_vit.data import batches

    def broken(self, number):
        raise ValueError("planted")

    batches.TrainBatches.load = broken
    return run_main(argv)


def test_every_command_shows_a_bug(capsys, monkeypatch):
    """`ds-vit` passed every ValueError off as bad input."""
    from ds_vit import cli

    monkeypatch.setattr("ds_vit.launching.hosts.read_hosts", lambda *_: int("not a number"))
    assert cli.main(["hosts"]) == exit_codes.BUG
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.undo()
    assert cli.main(["hosts", "--from", "/nowhere/at/all"]) == exit_codes.BAD_INPUT
    assert capsys.readouterr().err.startswith("ds-vit: error: ")


def test_final_weights_are_timms(ranks, tmp_path, folder):
    """timm must load model.safetensors as it is, strictly."""
    import timm

    output = tmp_path / "out"
    argv = [*TINY, "--deepspeed_config", CPU, "--data-dir", str(folder), "--output", str(output)]
    assert ranks.run(1, run_main, argv) == [(0, "")]
    model = timm.create_model(
        "vit_tiny_patch16_224", num_classes=2, img_size=16, patch_size=8, embed_dim=24, depth=1, num_heads=2
    )
    model.load_state_dict(load_file(str(output / "model.safetensors")), strict=True)
