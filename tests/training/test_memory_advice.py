"""Too little memory of the device or the host: one line with the numbers and the flags that this run has left."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
from unittest import mock

import pytest
import torch
from project import ROOT
from runs import ONE_BLOCK, resolved, run_quietly

from ds_vit.data import decode
from ds_vit.fault_tolerance.errors import OutOfMemory, is_out_of_memory, memory_errors
from ds_vit.training.auto_batch import Memory
from ds_vit.training.build import engine_config
from ds_vit.training.memory_advice import MemoryAdvice

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
        (1, 1, ("-b", 8), [AUTO, SMALLER.format(2), FULL]),
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
    rows = run.config.validation_batch_size or run.data.batch.micro_batch
    advice = MemoryAdvice(engine_config(run), Memory(2000, "free"), rows, run.config.auto_batch)
    assert advice.remedies == ", ".join(remedies)
    evaluation = dataclasses.replace(advice, config=dataclasses.replace(advice.config, optimizer=None), eval_rows=8)
    assert evaluation.remedies == "--validation-batch-size 4"


@contextlib.contextmanager
def full_memory():
    """On a rank: it has 1000 bytes, and the first loss does not fit."""
    from ds_vit.tasks.classification import Classification
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
    assert " per rank predicted, 500 B were free on this machine, among 2 ranks at the start; try --auto-batch" in line
    start = done[0][1]
    assert "│ warning" in start
    assert "500 B are free on this machine, among 2 ranks" in " ".join(start.replace("│", " ").split())
