"""Too little memory of the device or the host: one line with the numbers and the flags that this run has left."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
from unittest import mock

import psutil
import pytest
import torch
from project import ROOT
from runs import ONE_BLOCK, resolved, run_quietly

from ds_vit import cli
from ds_vit.data import decode
from ds_vit.fault_tolerance.errors import OutOfMemory, is_out_of_memory, memory_errors
from ds_vit.launching.process import Process
from ds_vit.training import auto_batch
from ds_vit.training.auto_batch import Memory, MemoryAdvice

HOST = "[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried to allocate 400 bytes."
RUN = [*ONE_BLOCK, "--max-steps", 1]
AUTO, SMALLER = "--auto-batch in place of -b", "-b 4 --grad-accum-steps {} (the same global batch)"
FULL, STAGE = "--grad-checkpointing", "--set zero_optimization.stage={}"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has"), " (allocating 2.00 GiB)"),
        (RuntimeError(HOST), " (allocating 400 bytes)"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), ""),
        (MemoryError("Caught MemoryError in DataLoader worker process 0."), " in a loader process"),
        (OSError(errno.ENOMEM, "Cannot allocate memory"), ""),  # of fork
    ],
)
def test_every_library_says_it_in_its_way(error, said):
    with pytest.raises(OutOfMemory) as caught, memory_errors(lambda of_loader: f"fewer workers: {of_loader}"):
        raise error
    assert str(caught.value) == f"out of memory{said}: fewer workers: {'loader' in said}"
    assert caught.value.exit_code == 72


def test_another_error_stays():
    assert not any(map(is_out_of_memory, (ValueError("out of memory"), RuntimeError("illegal"), OSError("full"))))
    with pytest.raises(RuntimeError, match="illegal"), memory_errors(str):
        raise RuntimeError("an illegal memory access")


def test_an_image_is_not_damaged_where_memory_is_short(monkeypatch):
    # Catches: images that are replaced, or a run that ends with "damaged", because the host is full.
    monkeypatch.setattr(decode.Image, "open", mock.Mock(side_effect=MemoryError))
    with pytest.raises(MemoryError):
        decode.decode(b"", "a.jpg")


@pytest.mark.parametrize(
    ("stage", "world", "words", "remedies"),
    [
        (1, 2, ("-b", 8), [AUTO, SMALLER.format(2), FULL, STAGE.format(2)]),
        (3, 2, ("-b", 8), [AUTO, SMALLER.format(2), FULL]),
        (1, 2, ("-b", 1), [FULL, STAGE.format(2)]),
        (1, 2, ("-b", 8, "--grad-checkpointing"), [AUTO, SMALLER.format(2), STAGE.format(2)]),
        (1, 2, ("-b", 1, "--grad-checkpointing", "selective"), [f"{FULL} full", STAGE.format(2)]),
        (1, 2, ("--auto-batch", "--set", "train_batch_size=2"), [FULL, STAGE.format(2)]),
        (1, 2, ("-b", 8, "--pp", 2, "--grad-accum-steps", 2), [AUTO, SMALLER.format(4), FULL]),
        (3, 1, ("-b", 1, "--grad-checkpointing"), ["more ranks or hosts, or a smaller --model"]),
        (1, 1, ("-b", 1, "--grad-checkpointing", "--validation-batch-size", 64), ["--validation-batch-size 32"]),
        (1, 2, ("-b", 8, "--task", "mae", "--decoder-depth", 1), [AUTO, SMALLER.format(2), FULL, STAGE.format(2)]),
    ],
)  # fmt: skip
def test_only_what_the_run_has_left_is_advised(stage, world, words, remedies):
    json = ROOT / "ds_configs" / f"cpu_zero{stage}_fp32.json"
    run = resolved([*RUN, "--deepspeed_config", json, *words], world)
    assert MemoryAdvice(run, Memory(2000, "free")).remedies == ", ".join(remedies)
    rows = run.config.model_copy(update={"validation_batch_size": 8})
    evaluation = dataclasses.replace(run, optimizer=None, config=rows)
    assert MemoryAdvice(evaluation, Memory(2000, "free")).remedies == "--validation-batch-size 4"


@pytest.mark.parametrize(
    ("command", "step"),
    [
        ("train --deepspeed_config x --dataset digits", "ds_vit.train.train"),
        ("eval runs/a", "ds_vit.tools.evaluate.evaluate_weights"),
        ("shards a b", "ds_vit.tools.shards.make_shards"),
    ],
)
def test_every_command_ends_with_one_line(command, step, capsys):
    """The traceback of a library, or code 1."""
    with mock.patch(step, side_effect=RuntimeError(HOST)):
        assert cli.main(command.split()) == 72
    name = f"ds-vit {command.split()[0]}" if command.startswith(("train", "eval")) else "ds-vit"
    said = "out of memory (allocating 400 bytes): end other programs on this machine, or use one with more memory"
    assert capsys.readouterr().err == f"{name}: error: {said}\n"


@pytest.mark.parametrize(
    ("listed", "files", "free"),
    [
        ("0::/", {"memory.max": "900", "memory.stat": "file 800\nanon 300"}, 600),
        ("0::/", {"memory.max": "max", "memory.stat": "anon 300"}, 5000),
        ("0::/job/step", {"job/memory.max": "700", "job/memory.stat": "anon 100", "job/step/memory.max": "max"}, 600),
        (
            "9:cpu:/\n4:memory:/docker/1",
            {"memory/memory.limit_in_bytes": "90", "memory/memory.stat": "total_rss 10"},
            80,
        ),
        ("0::/", {"memory.max": "100", "memory.stat": "anon 300"}, 0),
        ("", {}, 5000),
    ],
)
def test_a_container_or_job_has_less(tmp_path, monkeypatch, listed, files, free):
    """The machine's memory in a container; the page cache counted as used; the limit of a parent or of version 1."""
    monkeypatch.setattr(auto_batch.psutil, "virtual_memory", mock.Mock(return_value=mock.Mock(available=5000)))
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "list").write_text(listed)
    assert auto_batch._free_memory(tmp_path / "list", tmp_path) == free


def test_the_limit_of_a_process_is_not_shared(monkeypatch):
    """`ulimit -v` that is not seen, or divided by the ranks of the host."""
    limits = {"getrlimit": mock.Mock(return_value=(psutil.Process().memory_info().vms + 10**9, 0))}
    monkeypatch.setattr(auto_batch, "_free_memory", lambda: 10**10)
    process = Process("env", 0, 2, 0, 2)
    with mock.patch.multiple(auto_batch.resource, **limits):
        found = auto_batch.memory_of_rank("", process, on_cpu=True)
    assert found.bytes == pytest.approx(10**9, rel=0.2)
    assert "ulimit -v" in found.whose
    assert auto_batch.memory_of_rank("", process, on_cpu=True) == Memory(
        5 * 10**9, "free on this machine, among 2 ranks"
    )


@contextlib.contextmanager
def full_memory():
    """On a rank: it has 1000 bytes, and the first loss does not fit."""
    from ds_vit.tasks.classification.task import Classification
    from ds_vit.training import auto_batch

    no_room = mock.Mock(side_effect=RuntimeError(HOST))
    with (
        mock.patch.object(auto_batch, "_free_memory", return_value=1000),
        mock.patch.object(Classification, "loss", return_value=no_room),
        mock.patch("time.sleep"),  # of the ranks that say nothing, until the launcher ends them
    ):
        yield


def test_one_rank_says_it_for_all(ranks, tmp_path):
    # Catches: a traceback of each rank, and N times the same line; a start without a warning.
    json = str(ROOT / "ds_configs" / "cpu_zero1_fp32.json")
    words = [*RUN, "--deepspeed_config", json, "-b", 8, "--val-split", "", "--output", tmp_path / "a"]
    done = ranks.run(2, run_quietly, [str(word) for word in words], full_memory)
    assert [code for code, _, _ in done] == [72, 72], done
    errors = "".join(error for _, _, error in done)
    assert "Traceback" not in errors
    [line] = [line for line in errors.splitlines() if "out of memory" in line and "ended with an error" not in line]
    assert " predicted, 500 bytes were free on this machine, among 2 ranks at the start; try --auto-batch" in line
    start = done[0][1]
    assert "│ warning" in start
    assert "500 bytes are free on this machine, among 2 ranks" in " ".join(start.replace("│", " ").split())
