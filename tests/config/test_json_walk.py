"""No key of DeepSpeed's JSON ends in a traceback, and none that is accepted moves the curve."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterator

import pytest
from curves import assert_same_curve
from json_walk import CASES, Case, Verdict, run_on_ranks, without_ranks

from ds_vit.config.deepspeed_keys import DeepSpeedJson, model_of

CHUNK = 16


def chunks(cases: Collection[Case]) -> list[list[Case]]:
    """Neighbours have the same file without the key: it is run once for all of them."""
    ordered = sorted(cases, key=lambda case: (json.dumps(case.reference, sort_keys=True), str(case.place)))
    return [ordered[first : first + CHUNK] for first in range(0, len(ordered), CHUNK)]


def sample() -> list[Case]:
    """Each key with each value in one of its places (a ZeRO stage or a pipeline), in turn in another one."""
    places: dict[tuple[str, str], list[Case]] = {}
    for case in CASES:
        places.setdefault((case.key, json.dumps([case.value, case.beside])), []).append(case)
    return [cases[number % len(cases)] for number, cases in enumerate(places.values())]


SAMPLE = sample()
OTHERS = [case for case in CASES if case not in SAMPLE]
# Values that say what holds anyhow: no line is owed.
AT_THEIR_DEFAULT = ("cpu_offload", "cpu_offload_param", "dtype", "grad_accum_dtype", "sequence_parallel_size")


def keys_of_deepspeed() -> Iterator[str]:
    """The dotted names of the keys that DeepSpeed knows, to a depth of two."""
    for block, hint in DeepSpeedJson.model_fields.items():
        yield block
        model = model_of(hint.annotation)
        for name, field in model.model_fields.items() if model else ():
            yield f"{block}.{field.alias or name}"


def tried(case: Case) -> Iterator[str]:
    """The keys that a case sets, with all blocks that they are in."""

    def walk(name: str, value: object) -> Iterator[str]:
        yield name
        for key, item in value.items() if isinstance(value, dict) else ():
            yield from walk(f"{name}.{key}", item)

    yield from walk(case.key, case.value)
    parts = case.key.split(".")
    yield from (".".join(parts[:count]) for count in range(1, len(parts)))


# Every file has these, with other values in other tests: the batch, the stage, the optimizer and the clipping.
ALWAYS_THERE = {
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("optimizer.type", "optimizer.params", "zero_optimization.stage"),
}


def test_every_key_has_a_case():
    """A key that an upgrade of DeepSpeed brings, and that nobody has looked at."""
    known = set(keys_of_deepspeed())
    assert known - set(itertools.chain.from_iterable(map(tried, SAMPLE))) - ALWAYS_THERE == set()
    assert {case.place for case in SAMPLE} == {case.place for case in CASES}


def verdicts(ranks, cases: list[Case], folder) -> dict[Case, tuple[Verdict, Verdict | None]]:
    """How each case ended, and (where both were run) how the file without the key did."""
    plain = folder / "plain"
    plain.mkdir()
    out: dict[Case, tuple[Verdict, Verdict | None]] = {}
    to_run = []
    for case in cases:
        known = without_ranks(case, plain)
        if known is None:
            to_run.append(case)
        else:
            out[case] = known, None
    references = {_file(case): (case.reference, case.place) for case in to_run}
    files = [*references.values(), *((case.data, case.place) for case in to_run)]
    (folder / "runs").mkdir()
    ran = run_on_ranks(ranks, files, folder / "runs")
    of_file = dict(zip(references, ran, strict=False))
    for case, verdict in zip(to_run, ran[len(references) :], strict=True):
        out[case] = verdict, of_file[_file(case)]
    return out


def _file(case: Case) -> tuple[str, str]:
    return json.dumps(case.reference, sort_keys=True), str(case.place)


def complaint(case: Case, verdict: Verdict, reference: Verdict | None) -> str | None:
    """What is wrong with how a case ended."""
    if verdict.kind == "traceback":
        return f"{case} ends in a traceback: {verdict.text[-600:]}"
    if verdict.kind == "same" and case.key.rpartition(".")[2] not in AT_THEIR_DEFAULT:
        return f"{case} does nothing, and nothing says so"
    if verdict.kind == "works":
        if reference is None or reference.kind != "works":
            return f"the file without {case} does not train: {reference and reference.text[-600:]}"
        try:
            assert_same_curve(reference.rows, verdict.rows, rtol=case.rtol, keys=case.columns)
        except AssertionError as error:
            return f"{case} moves the curve: {error}"
    return None


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases",
    [*chunks(SAMPLE), *(pytest.param(cases, marks=pytest.mark.exhaustive) for cases in chunks(OTHERS))],
    ids=lambda cases: f"{cases[0]}...",
)
def test_no_key_ends_in_a_traceback_or_moves_the_curve(ranks, tmp_path, cases):
    """Each key works, is refused before the ranks meet, or is named idle; what works trains as without it."""
    found = verdicts(ranks, cases, tmp_path)
    assert len(found) == len(cases)
    kinds = [verdict.kind for verdict, _ in found.values()]
    print({kind: kinds.count(kind) for kind in sorted(set(kinds))})
    wrong = [complaint(case, *ended) for case, ended in found.items()]
    assert not any(wrong), "\n\n".join(filter(None, wrong))


def test_the_walk_sees_what_is_wrong(ranks, tmp_path):
    """A traceback on the ranks, a curve that moves, a key that is passed over: the walk must say so, and go on."""
    [base] = [case for case in CASES if str(case).startswith("steps_per_print=1-0")]
    file = base.reference
    crash = {**file, "flops_profiler": {"enabled": True, "profile_step": "a step"}}
    other = {**file, "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}
    ended = run_on_ranks(ranks, [(file, 0), (crash, 0), (other, 0), (file, 0)], tmp_path)
    assert [verdict.kind for verdict in ended] == ["works", "traceback", "works", "works"]
    assert complaint(base, ended[3], ended[0]) is None
    assert "ends in a traceback" in complaint(base, ended[1], ended[0])
    assert "moves the curve" in complaint(base, ended[2], ended[0])
    assert "nothing says so" in complaint(base, Verdict("same", ""), None)
