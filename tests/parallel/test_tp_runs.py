"""Whole runs with tensor slices: who decodes, exact evaluation, saved weights, kinds, bytes moved, refusals."""

import json

import oracle
import pytest
import torch
from curves import assert_same_curve, evals, read_rows, train_in
from project import ROOT
from runs import KINDS, count_decodes, drift
from safetensors.torch import load_file

from ds_vit.fault_tolerance import exit_codes
from ds_vit.train import main

pytestmark = pytest.mark.slow

CONFIGS = ROOT / "ds_configs"
RTOL = 1e-5
TINY = {"patch_size": 8, "embed_dim": 24, "depth": 2, "num_heads": 6}
MODEL = [
    *("--model", oracle.MODEL, *oracle.kwargs_words(TINY), "--img-size", 16, "--workers", 0),
    *("--deepspeed_config", CONFIGS / "cpu_zero1_fp32.json"),
]
BASE = [*MODEL, "--log-interval", 1, "--warmup-steps", 1]


@pytest.fixture(scope="module")
def cifar(tmp_path_factory, real_images):
    """43 training and 103 validation images."""
    folder = tmp_path_factory.mktemp("tp")
    oracle.cifar_folder(real_images / "cifar10" / "train.tar", folder, 43, "train")
    oracle.cifar_folder(real_images / "cifar10" / "test.tar", folder, 103, "val")
    return folder


def test_one_rank_of_a_group_decodes(ranks, cifar, tmp_path):
    """An image decoded twice in a tensor-parallel group is work thrown away."""
    argv = [*BASE, "--data-dir", cifar, "--tp", 2, "--pp", 2, "-b", 4, "--max-steps", 3, "--mixup", 0.5]
    argv += ["--on-bad-image", "error"]  # a replaced image has another target: skipping decodes on the last stage too
    counts = ranks.run(4, count_decodes, [str(a) for a in [*argv, "--output", tmp_path / "run"]])
    # dp 1: 3 steps of 4 images, and all 103 validation images.
    assert [c["images"] for c in counts] == [3 * 4 + 103, 0, 0, 0]
    assert [c["targets"] for c in counts] == [0, 0, 3 * 4 + 103, 0]


@pytest.mark.parametrize(
    ("world", "words"),
    [
        (2, "--tp 2"),
        (4, "--tp 2 --class-parallel on"),
        (3, "--tp 3 --sequence-parallel"),
        (4, "--tp 2 --pp 2 --sequence-parallel --class-parallel on"),
    ],
)
def test_exact_evaluation_between_steps(ranks, cifar, world, words):
    """103 images, after every epoch: the same counts and accuracy in every cut, and training undisturbed."""
    argv = [*BASE, "--data-dir", cifar, "--epochs", 2, "-vb", 8]
    reference = train_in(ranks, 1, [*argv, "-b", 8])
    asked = words.split()
    cut = int(asked[1]) * (2 if "--pp" in asked else 1)
    dp = world // cut
    rows = train_in(ranks, world, [*argv, *asked, "-b", 4 // dp, "--grad-accum-steps", 2])
    assert_same_curve(reference, rows, rtol=RTOL)
    assert evals(rows) == evals(reference)


@pytest.mark.parametrize("words", ["--tp 2", "--tp 2 --sequence-parallel"])
@pytest.mark.parametrize("kind", KINDS)
def test_model_kinds(ranks, kind, words):
    """A kind whose cut is wrong somewhere between the loader and the clipped step, with recomputation and mixing on."""
    name, extra = KINDS[kind]
    heads = {**TINY, **extra, "num_heads": 2}
    argv = [*BASE, "--dataset", "digits", "--model", name, *oracle.kwargs_words(heads), "--drop-path", 0.1]
    argv += ["--mixup", 0.4, "--max-steps", 3, "--val-split", ""]
    reference = train_in(ranks, 1, [*argv, "-b", 8])
    asked = [*words.split(), "-b", 4, "--grad-accum-steps", 2, "--grad-checkpointing", "--check-replicas", 1]
    assert_same_curve(reference, train_in(ranks, 2, [*argv, *asked]), rtol=RTOL)


@pytest.mark.parametrize(
    ("world", "words"),
    [(2, "--tp 2"), (3, "--tp 3 --class-parallel on"), (4, "--tp 2 --pp 2"), (4, "--tp 2 --deepspeed_config zero3")],
)
def test_slices_are_saved_whole(ranks, tmp_path, world, words):
    """Slices put together in a wrong order: the file must hold the very weights of a run on one rank."""
    asked = [CONFIGS / "cpu_zero3_fp32.json" if w == "zero3" else w for w in words.split()]
    argv = [*BASE, "--dataset", "digits", "--max-steps", 2, "--val-split", "", "--lr", 0]
    train_in(ranks, 1, [*argv, "-b", 8, "--output", tmp_path / "one"])
    train_in(ranks, world, [*argv, "-b", 4, *asked, "--warmup-lr", 0, "--output", tmp_path / "cut"])
    one, cut = (load_file(str(tmp_path / run / "model.safetensors")) for run in ("one", "cut"))
    assert one.keys() == cut.keys()
    for name in one:  # the learning rate is zero from the second step on, and the first one's is 1e-5
        torch.testing.assert_close(cut[name], one[name], rtol=0, atol=3e-5)


def test_bf16_slices_stay_with_bf16_alone(ranks, tmp_path):
    """The deviation of bf16 slices from one bf16 rank is rounding: below 0.3 %."""
    data = json.loads((CONFIGS / "cpu_zero1_fp32.json").read_text()) | {"bf16": {"enabled": True}}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(data))
    argv = [*BASE, "--dataset", "digits", "--max-steps", 6, "--val-split", "", "--deepspeed_config", path, "-b", 8]
    alone = train_in(ranks, 1, argv)
    for words in ("--tp 2", "--tp 2 --sequence-parallel"):
        assert_same_curve(alone, train_in(ranks, 2, [*argv, *words.split()]), rtol=3e-3, keys=("loss",))


@pytest.mark.parametrize("words", ["--tp 2 --linear-probe", "--tp 2 --pp 2 --pp-partition 0,3,4"])
def test_a_rank_that_counts_nothing_in_the_norm(ranks, tmp_path, words):
    """BF16_Optimizer on a rank of a group that trains only what another one counts, the head alone."""
    blocks = {"bf16": {"enabled": True}, "communication_data_type": "fp32"}
    blocks["data_types"] = {"grad_accum_dtype": "fp32"}
    data = {**json.loads((CONFIGS / "cpu_zero1_fp32.json").read_text()), **blocks}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(data))
    argv = [*BASE, "--dataset", "digits", "--max-steps", 2, "--val-split", "", "--deepspeed_config", path, "-b", 8]
    alone = train_in(ranks, 1, [*argv, *(["--linear-probe"] if "probe" in words else [])])
    rows = train_in(ranks, 4 if "--pp" in words else 2, [*argv, *words.split()])
    assert_same_curve(alone, rows, rtol=3e-3, keys=("loss",))
    assert_same_curve(alone, rows, rtol=3e-2, keys=("grad_norm",))


def count_bytes(argv):
    """On a rank: train, and give the bytes handed to each kind of collective in the last step."""
    import torch.distributed as dist

    from ds_vit.engine import plain

    moved: dict[str, int] = {}
    originals = {}

    def counting(kind, original):
        def call(*args, **kwargs):
            position = 0 if kind == "all_reduce" else 1
            tensor = (
                args[position] if len(args) > position else None
            )  # DeepSpeed names its arguments, the layers do not
            if tensor is not None and tensor.is_floating_point():
                moved[kind] = moved.get(kind, 0) + tensor.numel() * tensor.element_size()
            return original(*args, **kwargs)

        return call

    step = plain.PlainEngine.train_step
    per_step = []

    def counted_step(self, inputs, *meanwhile):
        batch = next(inputs)  # the broadcast of the inputs is not the layers' traffic
        moved.clear()
        # The optimizer's own traffic is left out: count until the last backward pass has ended.
        take, self.engine.step = self.engine.step, lambda: (per_step.append(dict(moved)), take())[1]
        try:
            return step(self, iter([batch]), *meanwhile)
        finally:
            self.engine.step = take

    for kind in ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor"):
        originals[kind] = getattr(dist, kind)
        setattr(dist, kind, counting(kind, originals[kind]))
    plain.PlainEngine.train_step = counted_step
    try:
        assert main(argv) == 0
    finally:
        plain.PlainEngine.train_step = step
        for kind, original in originals.items():
            setattr(dist, kind, original)
    return per_step[-1]


@pytest.mark.parametrize("mode", ["", "full", "selective"])
def test_bytes_moved_by_tensor_slices(ranks, tmp_path, mode):
    """Megatron's count: two all-reduces of B x S x D a block forward, two backward; recomputation repeats forward."""
    batch, tokens, width, depth = 8, 5, TINY["embed_dim"], TINY["depth"]
    argv = [*BASE, "--dataset", "digits", "--tp", 2, "-b", batch, "--max-steps", 2, "--val-split", ""]
    argv += [
        "--deepspeed_config",
        CONFIGS / "cpu_zero0_fp32.json",
        *(["--grad-checkpointing", mode] if mode else []),
    ]
    moved = ranks.run(2, count_bytes, [str(a) for a in [*argv, "--output", tmp_path / "run"]])
    activation = batch * tokens * width * 4
    # The second of a recomputed block's two forward sums is its output, which nothing in the backward pass needs;
    # torch's checkpoint may stop before it.
    forward = 2 * depth * activation
    expected = {2 * forward, 3 * forward, 2 * forward + depth * activation} if mode else {2 * forward}
    for rank in moved:
        assert rank["all_reduce"] in expected
        assert set(rank) == {"all_reduce"}


ILLEGAL = {
    "--tp 4": "tp",
    "--tp 5": "6 ranks cannot be cut into --pp 1 x --tp 5",
    "--sequence-parallel": "--sequence-parallel has no effect without --tp",
    "--class-parallel on": "--class-parallel has no effect without --tp",
}


@pytest.mark.parametrize("words", ILLEGAL)
def test_illegal_cuts(capsys, monkeypatch, tmp_path, words):
    """One message with the numbers and the nearest legal choice, before a process group exists."""
    world = "4" if words == "--tp 4" else "6"
    for name, value in (("RANK", "0"), ("WORLD_SIZE", world), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", world)):
        monkeypatch.setenv(name, value)
    argv = [*BASE, "--dataset", "digits", "-b", 4, "--output", tmp_path / "run", *words.split()]
    assert main([str(a) for a in argv]) == 2
    line = capsys.readouterr().err.strip()
    assert ILLEGAL[words] in line
    assert "\n" not in line
    if words == "--tp 4":
        assert "6" in line  # heads
        assert "1, 2, 3" in line


def test_check_replicas_sees_tensor_parallel_copies(ranks, tmp_path):
    """What the ranks of a tensor-parallel group hold in common must stay equal to the last bit."""
    argv = [*BASE, "--dataset", "digits", "-b", 4, "--max-steps", 4, "--check-replicas", 1, "--tp", 2]
    said = ranks.run(2, drift, [str(a) for a in [*argv, "--output", tmp_path / "run"]], 1)
    assert [code for code, _ in said] == [exit_codes.DRIFTED] * 2
    assert "(tensor-parallel ranks)" in said[0][1]


def test_weights_of_a_cut_run_evaluate_alike(ranks, tmp_path):
    """The saved weights in another layout."""
    data = ["--dataset", "digits", "-b", 8]
    argv = [*BASE, *data, "--max-steps", 2]
    train_in(ranks, 4, [*argv, "--tp", 2, "--output", tmp_path / "run"])
    weights = ["--initial-checkpoint", tmp_path / "run" / "model.safetensors"]
    [again] = train_in(ranks, 3, [*MODEL, *data, *weights, "--eval-only", "--tp", 3])
    last = read_rows(tmp_path / "run")[-1]
    assert (again["top1"], again["images"]) == (last["top1"], last["images"])
    assert again["loss"] == pytest.approx(last["loss"], rel=RTOL)
