"""A teacher in every type and ZeRO stage: its weights are the fp32 average of the student's, cast; step by step.

The average is followed from checkpoint to checkpoint, which hold it and the student's masters in fp32.
"""

from typing import Any, NamedTuple

import pytest
import torch
from curves import train_main
from project import write_config
from runs import DIGITS, pretend_fp16
from zero_layouts import whole_weights

from ds_vit.checkpoint.folder import checkpoints, open_checkpoint

STEPS, REJECTED = 4, 3  # the third step's images are not finite
WORDS = [
    *DIGITS,
    *("--model-kwargs", "patch_size=4", "embed_dim=24", "depth=4", "num_heads=2", "--drop-path", 0.2),
    *("--epochs", 3, "--max-steps", STEPS, "--log-interval", 1, "--val-split", "", "--clip-grad", 0.05),
    *("--lr", 0.5, "--warmup-steps", 2, "--on-nonfinite", "skip"),
    *("--checkpoint-interval", 1, "--keep-checkpoints", 0),
]
TYPES = {
    "float32": {},
    "bfloat16": {"bf16": {"enabled": True}},
    "float16": {"fp16": {"enabled": True, "initial_scale_power": 4}},
}


def persisting(threshold):
    """ZeRO-3 that keeps full copies of parameters with so many elements."""
    return {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": threshold}}


class Case(NamedTuple):
    """Task, type, ZeRO stage, ranks, further flags, further blocks of the JSON."""

    task: str
    dtype: str
    stage: int
    world: int
    words: tuple[Any, ...] = ()
    blocks: dict[str, Any] = {}  # noqa: RUF012


CASES = {
    "ZeRO-3, all persist": Case("seam_tasks:WithTeacher", "float32", 3, 2, (), persisting(10**9)),
    "ZeRO-3, none persists": Case("seam_tasks:WithTeacher", "float32", 3, 2, (), persisting(0)),
    "bf16, ZeRO-3, all persist": Case("seam_tasks:WithTwoTeachers", "bfloat16", 3, 2, (), persisting(10**9)),
    "bf16, ZeRO-3, none persists": Case("seam_tasks:WithTeacher", "bfloat16", 3, 2, (), persisting(0)),
    "two, ZeRO-0": Case("seam_tasks:WithTwoTeachers", "float32", 0, 2),
    "bf16, ZeRO-1, tp 2": Case("seam_tasks:WithTeacher", "bfloat16", 1, 2, ("--tp", 2)),
    "two, bf16, ZeRO-2": Case("seam_tasks:WithTwoTeachers", "bfloat16", 2, 2),
    "fp16, ZeRO-1": Case("seam_tasks:WithTeacher", "float16", 1, 1),
    "two, fp16, ZeRO-2": Case("seam_tasks:WithTwoTeachers", "float16", 2, 2),
    "fp16, ZeRO-3, all persist": Case("seam_tasks:WithTeacher", "float16", 3, 2, (), persisting(10**9)),
    "two, ZeRO-1, tp 2": Case("seam_tasks:WithTwoTeachers", "float32", 1, 2, ("--tp", 2)),
}


def train_and_watch(argv):
    """On a rank: the teachers' own tensors after each step, whole; the tp ranks' slices as they are."""
    from accidents import spoil_batches

    from ds_vit.engine.plain import PlainEngine
    from ds_vit.models.sequential import timm_names

    seen, step_of_engine = [], PlainEngine.train_step

    def watched(engine, *args):
        result = step_of_engine(engine, *args)
        names = timm_names(engine.module)
        found = {names[own]: p for own, p in engine.module.named_parameters() if not p.requires_grad}
        with whole_weights(engine):
            seen.append({name: p.detach().clone() for name, p in found.items()})
        return result

    PlainEngine.train_step = watched
    spoil_batches({REJECTED - 1})
    with pretend_fp16():
        assert train_main([str(word) for word in argv]) == 0
    return seen


def check(ranks, tmp_path, case):
    """Train, and compare the teachers with the average, and the average with its definition."""
    sgd = {"type": "SGD", "params": {"lr": "auto", "weight_decay": "auto", "momentum": 0.9}}
    json = write_config(tmp_path / "ds.json", case.stage, optimizer=sgd, **{**TYPES[case.dtype], **case.blocks})
    argv = [*WORDS, "--task", case.task, "-b", 4, "--deepspeed_config", json, *case.words, "--output", tmp_path / "run"]
    of_ranks = ranks.run(case.world, train_and_watch, argv)
    before, horizon = None, None
    for step, path in enumerate(sorted(checkpoints(tmp_path / "run" / "checkpoints")), start=1):
        saved = open_checkpoint(path)
        assert saved.step == step
        students, average = dict(saved.tensors("model").items()), dict(saved.tensors("ema").items())
        average = {
            name: value for name, value in average.items() if not name.startswith(("teacher.", "mirror_teacher."))
        }
        horizon = horizon or int(saved.state["run"]["task_schedules"].split()[-2])
        momentum = 0.5 + 0.5 * step / horizon
        for name, value in average.items():
            assert value.dtype == torch.float32
            if before is not None and step == REJECTED:
                assert torch.equal(value, before[name]), f"{name} has moved in a step that was rejected"
            elif before is not None:
                expected = torch.lerp(before[name], students[name], 1.0 - momentum)
                torch.testing.assert_close(value, expected, rtol=1e-6, atol=1e-7)
        before = average
        for seen in of_ranks:
            teachers = seen[step - 1]
            assert len(teachers) == len(average)
            for name, value in teachers.items():
                whole = average[student_of(name)].to(getattr(torch, case.dtype))
                assert value.dtype == whole.dtype
                is_same = torch.equal(value, whole) if value.shape == whole.shape else is_slice(value, whole)
                assert is_same, f"step {step}: {name} is not the average"
    assert saved.step == STEPS


def student_of(name):
    """The student's parameter of a teacher's."""
    tower, rest = name.split(".", 1)
    return {"teacher": "", "mirror_teacher": "mirror."}[tower] + rest


def is_slice(part, whole):
    """Whether a tensor slice has only values of the whole."""
    return part.numel() < whole.numel() and set(part.flatten().tolist()) <= set(whole.flatten().tolist())


@pytest.mark.sampled(12)
@pytest.mark.parametrize("name", CASES)
def test_the_teacher_is_the_average(ranks, tmp_path, name):
    # Catches: an average in 16 bits, full copies that stay behind, a tower that is left out, a rejected step.
    check(ranks, tmp_path, CASES[name])
