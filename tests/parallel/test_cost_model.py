"""What a cut costs: arithmetic and bytes a step, counted exactly, against the cost model."""

import oracle
import pytest
import torch
from curves import train_main
from project import ROOT

CONFIGS = ROOT / "ds_configs"
BATCH, ACCUMULATION, TOKENS, WIDTH = 4, 3, 5, 24
# A head that reads all tokens; for one that reads the class token the last block computes less (test_conversions.py).
KWARGS = {"patch_size": 8, "embed_dim": WIDTH, "depth": 2, "num_heads": 2, "global_pool": "avg"}


def arguments(output, depth, *words):
    """A run of two steps on digits: 16 pixels in patches of 8, and a class token."""
    kwargs = oracle.kwargs_words({**KWARGS, "depth": depth})
    argv = ["--model", oracle.MODEL, *kwargs, "--img-size", 16, "--workers", 0, "--warmup-steps", 1, "--val-split", ""]
    argv += ["--deepspeed_config", CONFIGS / "cpu_zero1_fp32.json", "--dataset", "digits", "--max-steps", 2]
    argv += ["-b", BATCH, "--grad-accum-steps", ACCUMULATION, "--output", output, *words]
    return [str(a) for a in argv]


def flops_of_last_step(argv):
    """On a rank: train, and give the floating-point operations of the last step."""
    from torch.utils.flop_counter import FlopCounterMode

    from ds_vit.engine import pipeline, plain

    counted = []
    for kind in (plain.PlainEngine, pipeline.PipeEngine):
        step = kind.train_step

        def counting(self, *arguments, step=step):
            with FlopCounterMode(display=False) as counter:
                result = step(self, *arguments)
            counted.append(counter.get_total_flops())
            return result

        kind.train_step = counting
    assert train_main(argv) == 0
    return counted[-1]


@pytest.fixture(scope="module")
def work(ranks, tmp_path_factory):
    """FLOPs of a step on one rank: (with two blocks, of one block)."""
    folder = tmp_path_factory.mktemp("work")
    two, four = (ranks.run(1, flops_of_last_step, arguments(folder / str(d), d))[0] for d in (2, 4))
    return two, (four - two) / 2


def test_a_block_costs_what_the_model_says(work):
    """3 (2 S (4 D^2 + 8 D^2) + 4 S^2 D) a block and image, attention's own kernel aside where it is not counted."""
    products = 3 * 2 * TOKENS * 12 * WIDTH**2
    attention = 3 * 4 * TOKENS**2 * WIDTH
    per_image = work[1] / (BATCH * ACCUMULATION)
    # torch recomputes the scores in the backward of a fused attention: five products in place of four.
    assert products <= per_image <= products + 1.25 * attention


def test_stages_share_the_work_and_repeat_none(ranks, work, tmp_path):
    """A pipeline that computes anything twice, or on the wrong stage."""
    staged = ranks.run(2, flops_of_last_step, arguments(tmp_path / "run", 2, "--pp", 2))
    assert sum(staged) == work[0]
    assert min(staged) >= work[1]


def test_slices_halve_the_blocks(ranks, work, tmp_path):
    """Each of two slices does half of the blocks, and all of the embedding and the small head."""
    sliced = ranks.run(2, flops_of_last_step, arguments(tmp_path / "run", 2, "--tp", 2))
    assert sliced == [work[0] - 2 * work[1] / 2] * 2


def bytes_sent(argv):
    """On a rank of a pipeline: train, and give the bytes sent point to point in the last step, by type."""
    import torch.distributed as dist

    from ds_vit.engine import pipeline

    sent: dict[str, int] = {}
    send, step = dist.send, pipeline.PipeEngine.train_step

    def counting_send(tensor, *args, **kwargs):
        name = str(tensor.dtype)
        sent[name] = sent.get(name, 0) + tensor.numel() * tensor.element_size()
        return send(tensor, *args, **kwargs)

    def fresh_step(self, *arguments):
        sent.clear()
        return step(self, *arguments)

    dist.send = torch.distributed.send = counting_send
    pipeline.PipeEngine.train_step = fresh_step
    assert train_main(argv) == 0
    return dict(sent)


def test_bytes_that_cross_a_stage_boundary(ranks, tmp_path):
    """Forward: tokens and keys of each micro-batch. Backward: the tokens' gradient. Nothing else, no shapes again."""
    first, last = ranks.run(2, bytes_sent, arguments(tmp_path / "run", 2, "--pp", 2))
    tokens, keys = ACCUMULATION * BATCH * TOKENS * WIDTH * 4, ACCUMULATION * BATCH * 8
    assert first == {"torch.float32": tokens, "torch.int64": keys}
    assert last == {"torch.float32": tokens}
