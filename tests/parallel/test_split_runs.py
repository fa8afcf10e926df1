"""Whole runs in pipeline stages and tensor shards: who decodes, evaluation, bounds, drift, and what is refused."""

import oracle
import pytest
from curves import assert_same_curve, evals, train_in
from project import ROOT, write_config
from runs import count_decodes, drift, resolved

from ds_vit.fault_tolerance import exit_codes
from ds_vit.parallel.layout import Layout
from ds_vit.train import main

CONFIGS = ROOT / "ds_configs"
RTOL = 1e-5
TINY = {"patch_size": 8, "embed_dim": 24, "depth": 3, "num_heads": 6}
MODEL = [
    *("--model", oracle.MODEL, *oracle.kwargs_words(TINY), "--img-size", 16, "--workers", 0),
    *("--deepspeed_config", CONFIGS / "cpu_zero1_fp32.json"),
]
BASE = [*MODEL, "--log-interval", 1, "--warmup-steps", 1]


@pytest.fixture(scope="module")
def cifar(tmp_path_factory, real_images):
    """43 training and 103 validation images."""
    return oracle.cifar_splits(real_images, tmp_path_factory.mktemp("pipeline"), 43, 103)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("words", ["--pp 2", "--pp 2 --tp 2"])
def test_one_rank_of_a_replica_decodes(ranks, cifar, tmp_path, words):
    """An image decoded by a second rank of a replica, or a target read where nobody needs it."""
    layout = Layout.of_world(4, pp=2, tp=2 if "--tp" in words else 1)
    argv = [*BASE, "--data-dir", cifar, *words.split(), "-b", 4, "--max-steps", 3, "--output", tmp_path / "run"]
    argv += ["--mixup", 0.5, "--on-bad-image", "error"]  # a replaced image has another target: skipping decodes twice
    counts = ranks.run(4, count_decodes, [str(a) for a in argv])
    images = layout.dp * 3 * 4 + 103  # the replicas share the validation images
    for what, stage in (("images", 0), ("targets", 1)):
        reads = [counts[r][what] for r in range(4) if (layout.stage(r), layout.tp_rank(r)) == (stage, 0)]
        assert sum(reads) == sum(count[what] for count in counts) == images


def outputs_alive(argv):
    """On a rank: train; outputs of a chunk that are alive as each of them is handed over, and when all were."""
    import gc
    import weakref

    from ds_vit.engine.pipeline import PipeEngine

    plain, alive = PipeEngine.forward_batches, []

    def forward_batches(self, batches, num_batches, **kwargs):
        refs = []
        eval_batch = self.engine.eval_batch

        def watched(*args, **kwargs):
            outputs = eval_batch(*args, **kwargs)
            refs.extend(map(weakref.ref, outputs or ()))
            return outputs

        self.engine.eval_batch = watched
        for item in plain(self, batches, num_batches, **kwargs):
            yield item
            del item
            gc.collect()
            alive.append(sum(ref() is not None for ref in refs))
        self.engine.eval_batch = eval_batch
        gc.collect()
        alive.append(sum(ref() is not None for ref in refs))

    PipeEngine.forward_batches = forward_batches
    assert main(argv) == 0
    return alive


def test_outputs_are_let_go_of(ranks, cifar, tmp_path):
    """Outputs of 32 batches that stay on the device until they have been counted, or through training behind that."""
    argv = [*BASE, "--data-dir", cifar, "--max-steps", 2, "-b", 8, "--pp", 2, "-vb", 20, "--output", tmp_path / "run"]
    _, last = ranks.run(2, outputs_alive, [str(word) for word in argv])
    # 103 images; who counts an output holds it until the next one comes.
    assert last == [6, 5, 4, 3, 2, 1, 1]


def test_embedding_alone_on_a_stage(ranks):
    """With one image a micro-batch the gradient of position table and class token is a view of what was received."""
    argv = [*BASE, "--dataset", "digits", "--max-steps", 2, "--val-split", ""]
    reference = train_in(ranks, 1, [*argv, "-b", 8])
    staged = ["--pp", 2, "--pp-partition", f"0,1,{TINY['depth'] + 2}", "-b", 1, "--grad-accum-steps", 8]
    assert_same_curve(reference, train_in(ranks, 2, [*argv, *staged]), rtol=RTOL)


@pytest.mark.slow
def test_the_cut_of_the_fastest_step(ranks, tmp_path):
    """A flag that changes nothing, a cut that trains otherwise, or that the stages do not agree on."""
    # What is frozen has no backward pass, which the balanced cut does not know: it leaves stage 0 nothing to train.
    frozen = ["--freeze", "patch_embed", "pos_embed", "cls_token", "blocks.0"]
    argv = [*BASE, "--dataset", "digits", "--max-steps", 2, "--val-split", "", *frozen]
    staged = [*argv, "-b", 2, "--grad-accum-steps", 4, "--pp", 2]
    with pytest.raises(ValueError, match=r"stage 0 .*has nothing to train"):
        resolved(staged, 2)
    plan = resolved([*staged, "--pp-partition", "auto"], 2)
    assert plan.model.bounds == (0, 3, 5)
    assert any("--pp-partition auto: 0,3,5, a step" in note for note in plan.model.notes)
    reference = train_in(ranks, 1, [*argv, "-b", 8])
    assert_same_curve(reference, train_in(ranks, 2, [*staged, "--pp-partition", "auto"]), rtol=RTOL)


def test_monitor_in_a_pipeline(ranks, tmp_path):
    """Evaluating with a monitor on crashes DeepSpeed's rank 0, which has no output to log."""
    monitor = {"enabled": True, "output_path": str(tmp_path / "csv"), "job_name": "job"}
    path = write_config(tmp_path / "config.json", csv_monitor=monitor)
    argv = [*BASE, "--dataset", "digits", "--max-steps", 2, "--pp", 2, "-b", 8, "--deepspeed_config", path]
    rows = train_in(ranks, 2, argv)
    assert [row["images"] for row in evals(rows)] == [355]
    assert (tmp_path / "csv" / "job" / "eval_top1.csv").exists()


ILLEGAL = {
    "--pp 2 --deepspeed_config cpu_zero2_fp32.json": "ZeRO stage 2 does not work with --pp 2",
    "--pp 2 --deepspeed_config cpu_zero3_fp32.json": "use stage 1, or --pp 1",
    "--pp 6": "5 layers cannot be split into --pp 6 stages; --pp may be 1 to 5",
    "--pp 4": "6 ranks cannot be split into --pp 4",
    "--pp 2 --pp-partition 0,9": "--pp 2 needs 3 rising numbers from 0 to the model's 5 layers",
    "--pp 2 --pp-partition a,b": "'a,b' is not a list of whole numbers",
    "--pp 2 --linear-probe --pp-partition auto": "has nothing to train",
    "--pp 2 --linear-probe": "pipeline stage 0 (layers 0 to 1) has nothing to train",
    "--pp-partition 0,5": "--pp-partition has no effect without --pp",
    "--tp 5": "6 ranks cannot be split into --pp 1 x --tp 5",
    "--sequence-parallel": "--sequence-parallel has no effect without --tp",
    "--class-parallel on": "--class-parallel has no effect without --tp",
    "--check-replicas 1 --deepspeed_config cpu_zero3_fp32.json": "at ZeRO stage 3, where every weight exists once",
}


def as_first_rank_of(world, monkeypatch):
    """The environment that a launcher gives rank 0."""
    for name, value in (("RANK", 0), ("WORLD_SIZE", world), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", world)):
        monkeypatch.setenv(name, str(value))


@pytest.mark.parametrize("words", ILLEGAL)
def test_illegal_combinations(capsys, monkeypatch, tmp_path, words):
    """One message with the numbers and the nearest legal choice, before a process group exists."""
    as_first_rank_of(6, monkeypatch)
    asked = [str(CONFIGS / w) if w.endswith(".json") else w for w in words.split()]
    argv = [str(a) for a in [*BASE, "--dataset", "digits", "-b", 4, "--output", tmp_path / "run", *asked]]
    if words == "--pp 6":
        argv += ["--grad-accum-steps", "1"]
    assert main(argv) == 2
    line = capsys.readouterr().err.strip()
    assert ILLEGAL[words] in line
    assert "\n" not in line
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("key", ["wall_clock_breakdown", "flops_profiler"])
def test_timers_that_crash_a_pipeline_are_refused(capsys, monkeypatch, tmp_path, key):
    """DeepSpeed 0.19.8 dies with "bwd_microstep timer has already been started"."""
    as_first_rank_of(2, monkeypatch)
    setting = True if key == "wall_clock_breakdown" else {"enabled": True}
    path = write_config(tmp_path / "config.json", **{key: setting})
    argv = [*BASE, "--dataset", "digits", "-b", 4, "--pp", 2, "--deepspeed_config", path]
    assert main([str(a) for a in argv]) == 2
    assert f'"{key}" crashes DeepSpeed 0.19.8 with --pp 2' in capsys.readouterr().err


def test_the_bubble_is_reported():
    """Accumulation smaller than pp runs, with one line that gives the bubble."""
    plan = resolved([*BASE, "--dataset", "digits", "-b", 4, "--pp", 3], 3)
    assert any("1 micro-batches through 3 stages, bubble 67% of a step" in note for note in plan.notes)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("stage", "words", "copies"), [(0, [], "data"), (2, [], "data"), (1, ["--tp", 2], "tensor")])
def test_check_replicas_finds_one_bit(ranks, tmp_path, stage, words, copies):
    """A replica that differs in one unit in the last place must stop the run, by name, on every rank."""
    argv = [*BASE, "--deepspeed_config", CONFIGS / f"cpu_zero{stage}_fp32.json", "--dataset", "digits", "-b", 4, *words]
    argv += ["--max-steps", 4, "--check-replicas", 1, "--output", tmp_path / "run"]
    said = ranks.run(2, drift, [str(a) for a in argv], 1)
    assert [code for code, _ in said] == [exit_codes.DRIFTED] * 2
    assert "at step 2" in said[0][1]
    assert f"({copies}-parallel ranks)" in said[0][1]
    assert not (tmp_path / "run" / "model.safetensors").exists()
