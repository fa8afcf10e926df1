"""ZeRO++'s secondary partition (zero_hpz_partition_size): a copy of the weights nearer by, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import oracle
import pytest
from curves import assert_same_curve, read_rows, train_main
from oracle import BLOCKS

from ds_vit.config.deepspeed_rules import check_secondary_partition

RTOL = 1e-5
GLOBAL_BATCH = 8
RUN = [
    *("--dataset", "digits", "--model", oracle.MODEL, "--img-size", oracle.IMG_SIZE, "--workers", 0),
    *("--log-interval", 1),
    *("--model-kwargs", "patch_size=8", "embed_dim=48", "depth=3", "num_heads=3", "--num-classes", 12),
    *("--sched", "constant", "--warmup-steps", 0, "--validation-batch-size", 45, "--drop-path", 0.2),
    *("--model-ema", "--model-ema-decay", 0.8),
]


def train(ranks, folder: Path, world: int, size: int | None, kind: str, output: Path, *words) -> list[dict]:
    """Train on `world` ranks at stage 3, with groups of `size` or (None) on one rank at stage 1; give the rows.

    Nothing persists (threshold 0) or the small vectors do (100), by turns: those are gathered another way.
    """
    zero = {"stage": 1, "reduce_bucket_size": 100_000}
    if size is not None:
        persists = 100 if size == 2 else 0
        zero |= {"stage": 3, "zero_hpz_partition_size": size, "stage3_param_persistence_threshold": persists}
    data = {"gradient_clipping": 0.1, "optimizer": BLOCKS[kind], "zero_optimization": zero}
    data |= {"train_micro_batch_size_per_gpu": GLOBAL_BATCH // world // 2, "gradient_accumulation_steps": 2}
    path = folder / f"{kind}-{world}-{size}.json"
    path.write_text(json.dumps(data))
    argv = [*RUN, "--deepspeed_config", path, "--output", output, *words]
    codes = ranks.run(world, train_main, [str(word) for word in argv], timeout=300.0)
    assert codes == [0] * world
    return read_rows(output)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Weights that are nobody's initial ones."""
    folder = tmp_path_factory.mktemp("secondary")
    kwargs = {"patch_size": 8, "embed_dim": 48, "depth": 3, "num_heads": 3}
    oracle.write_weights(folder / "weights.safetensors", num_classes=12, **kwargs)
    return folder


FROZEN = ("--freeze", "blocks.0", "blocks.1.attn.*")


@pytest.fixture(scope="module")
def reference(ranks, folder):
    """Six steps on one rank without ZeRO-3, by optimizer."""
    made: dict[str, list[dict]] = {}

    def get(kind: str) -> list[dict]:
        if kind not in made:
            words = ("--max-steps", 6, *FROZEN, "--initial-checkpoint", folder / "weights.safetensors")
            made[kind] = train(ranks, folder, 1, None, kind, folder / kind, *words)
        return made[kind]

    return get


def assert_same(a: list[dict], b: list[dict]) -> None:
    """The same curve, and the same evaluation of the average at its end."""
    assert_same_curve(a, b, rtol=RTOL)
    [one], [other] = ([row for row in rows if row["kind"] == "eval"][-1:] for rows in (a, b))
    assert other["loss"] == pytest.approx(one["loss"], rel=RTOL)


@pytest.mark.parametrize(("world", "size", "kind"), [(2, 2, "sgd"), (4, 2, "lamb")])
def test_secondary_partition_does_not_change_the_curve(ranks, folder, reference, tmp_path, world, size, kind):
    """One `zero.Init` a layer, and so the groups made twice; a copy that outlives a step, an average or a resume.

    Frozen weights come from a file: after a resume they are the checkpoint's, and a copy from the start is another.
    """
    words = [*FROZEN, "--initial-checkpoint", folder / "weights.safetensors"]
    train(ranks, folder, world, size, kind, tmp_path / "run", "--max-steps", 3, *words, "--checkpoint-interval", 3)
    rows = train(
        ranks, folder, world, size, kind, tmp_path / "run", "--max-steps", 6, *words, "--resume", tmp_path / "run"
    )
    assert_same(reference(kind), rows)


def test_groups_that_do_not_divide_the_ranks_are_refused():
    """DeepSpeed's assertion comes after the ranks have met; with slices it would copy another rank's."""
    data = {"zero_optimization": {"stage": 3, "zero_hpz_partition_size": 4}}
    with pytest.raises(ValueError, match="4 does not divide the 6 data-parallel ranks; it may be 2, 3, 6"):
        check_secondary_partition(data, "c.json", dp=6, tp=1)
    with pytest.raises(ValueError, match="does not work with --tp 2"):
        check_secondary_partition(data, "c.json", dp=4, tp=2)
    check_secondary_partition(data, "c.json", dp=2, tp=1)  # one group of two
    check_secondary_partition(data, "c.json", dp=8, tp=1)
