"""--auto-batch: the largest micro-batch that fits, the same curve, and what is said and refused."""

from __future__ import annotations

import contextlib
import functools
import json
from unittest import mock

import pytest
import torch
import yaml
from project import ROOT
from runs import DIGITS, refusal, resolved, run_quietly

from ds_vit.config.units import parse_bytes
from ds_vit.fault_tolerance.errors import UserError
from ds_vit.planner.counting import saved_storages
from ds_vit.training.auto_batch import Memory, TrialStep, by_trying, choose_batch, legal
from ds_vit.training.cost import Cost

RUN = [
    *(*DIGITS, "--val-split", ""),
    *("--model-kwargs", "patch_size=4", "embed_dim=64", "depth=3", "num_heads=2", "--drop-path", "0.2"),
    *("--max-steps", "4", "--warmup-steps", "1", "--log-interval", "1", "--mixup", "0.8"),
    *("--deepspeed_config", str(ROOT / "ds_configs" / "cpu_zero1_fp32.json")),
]
AUTOCAST = ("--set", 'torch_autocast={"enabled": true, "dtype": "bfloat16"}')
# With ZeRO's bucket, as wide as these models, whatever the accumulation: else the whole batch at once would need less.
BATCH = ["--set", "train_batch_size=24", "zero_optimization.contiguous_gradients=false"]


def engine_of(world, *words, rank=0):
    return resolved([*RUN, *BATCH, *words], world, rank)


def memory_for(micro_batch, world, *words):
    """Bytes that this micro-batch needs on the fullest rank, as --memory takes them."""
    config = engine_of(world, "--auto-batch", *words)
    [batch] = [batch for batch in legal(config) if batch.micro_batch == micro_batch]
    return str(round(1.25 * Cost(config).fullest(batch).together))


def batch_in(folder):
    """(micro-batch, accumulation) that DeepSpeed got."""
    told = json.loads((folder / "deepspeed.json").read_text())
    return told["train_micro_batch_size_per_gpu"], told["gradient_accumulation_steps"]


def train(ranks, world, folder, *words, prepare_rank=None):
    """Train, and give what rank 0 said."""
    words = [*RUN, *BATCH, "--output", str(folder), *words]
    done = ranks.run(world, run_quietly, words, prepare_rank)
    assert [code for code, _, _ in done] == [0] * world, done
    return done[0][1]


def test_two_ranks_take_what_fits(ranks, tmp_path):
    # Catches: a global batch that follows the micro-batch, a division that is not legal, and a line that is not said.
    said = train(ranks, 2, tmp_path / "a", "--auto-batch", "--memory", memory_for(3, 2), "--checkpoint-interval", "0")
    assert batch_in(tmp_path / "a") == (3, 4)
    [line] = [line for line in said.splitlines() if line.startswith("--auto-batch: ")]
    assert line.startswith("--auto-batch: 24 = 2 ranks × 3 images × 4 micro-batches; ")
    assert " (estimated, with a quarter more for what is not counted) of " in line
    assert "; a micro-batch of 4 would need " in line
    assert "images: --auto-batch" in said


def test_a_pipeline_keeps_as_many_micro_batches_as_stages():
    # Catches: all memory filled, and half of the ranks waiting. What is free here is plenty.
    config = engine_of(2, "--auto-batch", "--pp", "2")
    run = choose_batch(config, on_cpu=True)
    said = run.data.notes[-1]
    assert (run.batch.micro_batch, run.batch.accumulation) == (12, 2)
    assert "a larger one would leave fewer micro-batches than the 2 pipeline stages" in said
    assert "free on this machine, among 2 ranks" in said


@pytest.mark.slow
def test_a_resumed_run_searches_again(ranks, tmp_path):
    # Catches: the first machine's micro-batch for good, and a resume that takes another one for another run.
    folder = tmp_path / "run"
    words = ["--auto-batch", "--memory", memory_for(4, 1), "--sched", "constant", "--checkpoint-interval", "2"]
    train(ranks, 1, folder, *words, "--max-steps", "2")
    assert batch_in(folder) == (4, 6)
    assert yaml.safe_load((folder / "config.yaml").read_text())["auto_batch"] is True
    again = ["--recipe", str(folder / "config.yaml"), "--output", str(folder), "--resume", "auto", "--max-steps", "4"]
    [(code, said, error)] = ranks.run(1, run_quietly, [*again, "--memory", memory_for(8, 1)])
    assert code == 0, error
    assert "--auto-batch: 24 = 1 rank × 8 images × 3 micro-batches" in said
    assert batch_in(folder) == (8, 3)
    assert "auto_batch" not in said, "no setting that has changed"
    # By hand has the last word over the recipe's flag, and --memory goes with it.
    again[again.index("auto")] = "none"
    [(code, _, error)] = ranks.run(1, run_quietly, [*again, "-b", "6", "--output", str(tmp_path / "b"), "--dry-run"])
    assert code == 0, error


@contextlib.contextmanager
def small_devices(broken_rank=None):
    """On a rank: its device has room for 12 - 4 * rank images, or breaks down before anything is tried."""
    from ds_vit.training import auto_batch

    def trial(config, device):
        rank = torch.distributed.get_rank()
        if rank == broken_rank:
            raise RuntimeError("an illegal memory access")

        def attempt(batch):
            if batch.micro_batch > 12 - 4 * rank:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return 1000 * batch.micro_batch

        return attempt

    agree = auto_batch.agree_on_batch
    with (
        mock.patch.object(auto_batch, "TrialStep", trial),
        mock.patch.object(auto_batch, "free_bytes", return_value=2**30),
        mock.patch.object(auto_batch, "agree_on_batch", lambda *args, on_cpu: agree(*args, on_cpu=False)),
    ):
        yield


def test_ranks_that_try_agree_on_the_smallest(ranks, tmp_path):
    # Catches: ranks that train on with micro-batches of their own, and hang.
    said = train(ranks, 2, tmp_path / "a", "--auto-batch", "--checkpoint-interval", "0", prepare_rank=small_devices)
    assert batch_in(tmp_path / "a") == (6, 2)
    assert "24 = 2 ranks × 6 images × 2 micro-batches; 6.0 kB (measured) of " in said
    assert "(free on the device); a micro-batch of 12 would need " in said


def test_a_device_that_breaks_down_ends_all_ranks(ranks, tmp_path):
    # Catches: ranks that wait for the answer of one that has none.
    words = [*RUN, *BATCH, "--output", str(tmp_path / "a"), "--auto-batch"]
    broken = functools.partial(small_devices, broken_rank=1)
    done = ranks.run(2, run_quietly, words, broken, timeout=120.0)
    for code, _, error in done:
        assert code == 2
        assert "--auto-batch could not try a micro-batch: rank 1: an illegal memory access; give one by -b" in error


def test_trying_stops_at_the_first_that_fails():
    # Catches: a search that goes on into what cannot be, and a --memory that a roomy device passes over.
    config, tried = engine_of(1, "--auto-batch"), []

    def attempt(batch, error=None, most=5):
        tried.append(batch.micro_batch)
        if batch.micro_batch > most:
            raise error or torch.OutOfMemoryError("CUDA out of memory")
        return 100 * batch.micro_batch

    plenty = Memory(10**9, "free on the device")
    found = by_trying(config, plenty, attempt)
    assert tried == [1, 2, 3, 4, 6]
    assert (found.micro_batch, found.needs, found.larger, found.how) == (4, 400, 6, "measured")
    [stage] = Cost(config).stages
    by_micro_batch = {batch.micro_batch: batch for batch in legal(config)}
    step = stage.of(by_micro_batch[6]).together - stage.of(by_micro_batch[4]).together
    assert found.larger_needs == 400 + step
    found = by_trying(config, Memory(250, "--memory 250"), attempt)
    assert (found.micro_batch, found.larger, found.larger_needs) == (2, 3, 300)
    found = by_trying(config, plenty, lambda batch: 7)
    assert (found.micro_batch, found.larger) == (24, None)
    assert by_trying(config, plenty, functools.partial(attempt, most=0)).micro_batch == 0
    cublas = RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    assert by_trying(config, plenty, functools.partial(attempt, error=cublas)).micro_batch == 4
    with pytest.raises(RuntimeError, match="illegal"):
        by_trying(config, plenty, functools.partial(attempt, error=RuntimeError("an illegal memory access")))


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("world", "rank", "words"),
    [
        (1, 0, ()),
        (2, 0, ("--pp", "2")),
        (2, 1, ("--pp", "2")),
        (2, 1, ("--tp", "2", "--sequence-parallel")),
        (1, 0, ("--set", "bf16.enabled=true")),
        (1, 0, ("--grad-checkpointing", "2")),
        (1, 0, ("--grad-checkpointing", "selective", *AUTOCAST)),
        (2, 1, ("--grad-checkpointing", "selective", "--tp", "2", "--sequence-parallel")),
    ],
)
def test_a_trial_keeps_what_the_estimate_says(monkeypatch, world, rank, words):
    # Catches: a stage that is tried with the whole model, slices taken for the whole, and a trial that fails at all.
    from deepspeed.accelerator import get_accelerator

    monkeypatch.setattr(type(get_accelerator()), "total_memory", lambda self, index=None: 0)
    config = engine_of(world, "--auto-batch", *words, rank=rank)
    trial = TrialStep(config, torch.device("cpu"))
    weights = [tensor for layer in trial.layers for tensor in (*layer.parameters(), *layer.buffers())]
    saved, _ = saved_storages(lambda: trial._forward(6), weights)
    kept = sum(storage.nbytes() for storage in saved.values())
    assert len({id(layer) for layer in trial.layers}) < len(trial.layers) or world == 2, "a block each"
    assert kept == pytest.approx(6 * trial.stage.waiting, rel=0.1)
    for batch in legal(config)[:3]:
        assert trial(batch) >= 0
    assert all(parameter.grad is None for layer in trial.layers for parameter in layer.parameters())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--set", "train_micro_batch_size_per_gpu=4"),
            'train_micro_batch_size_per_gpu to 4, which --auto-batch is to find; write "auto" there or say --set '
            "train_micro_batch_size_per_gpu=auto",
        ),
        (
            ("--memory", "1MB"),
            "not even a micro-batch of 1 fits: it needs 3.7 MB (estimated, with a quarter more for what is not "
            "counted), 2.5 MB of it for weights, gradients and the optimizer, and there are 1.0 MB per rank (--memory "
            "1MB); use a higher ZeRO stage, --grad-checkpointing",
        ),
    ],
)
def test_refused_in_one_line(capsys, tmp_path, words, message):
    # Catches: a setting that is passed over, and a run that starts and is killed by the system.
    assert message in refusal(capsys, [*RUN, *BATCH, "--auto-batch", *words, "--output", tmp_path / "run"])
    assert not (tmp_path / "run").exists()


def test_amounts_of_memory():
    # Catches: GiB taken for GB.
    assert [parse_bytes(text, "--memory") for text in ("8GiB", "500 MB", "1.5g", "1000000", "2Ki", "4B")] == [
        *(8 * 2**30, 500_000_000, 1_500_000_000, 1_000_000, 2048, 4)
    ]
    for text in ("4", "999999"):
        with pytest.raises(UserError, match=f"--memory {text} means {text} bytes; write {text}GB, {text}MB or {text}B"):
            parse_bytes(text, "--memory")
    for text in ("", "0", "8 apples", "-1GB", "GB"):
        with pytest.raises(UserError, match="write a number of bytes above 0"):
            parse_bytes(text, "--memory")
