"""Training in 16 bits is as near to float64 as a plain loop in 16 bits: each task in each layout.

The plain loops are independent of this project (tests/support/plain_loops.py). A few combinations, in which each choice
occurs, always run; `pytest --exhaustive` runs the full product (402). docs/numerics.md has a table.
"""

import functools

import pytest
from pairwise import cover, pairs
from sixteen_bits import BATCH, MESHES, References, full_product, ratios, steps_of, train

LIMITS = {1: (1.2, 1.3, 1.5), 2: (1.3, 1.4, 1.6)}
"""By tp, whose partial sums travel in 16 bits: of gradients and weights; of losses, which scatter by 15 %; of the
gradient of a single tensor."""


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """The plain loops."""
    return References(tmp_path_factory.mktemp("models"))


@functools.cache  # asked for in each process of pytest
def selection():
    """Cheap combinations in which every choice occurs, and every pair of ZeRO stage and type."""
    of_tasks = {"clip": 2, "siglip": 2, "dino": 4, "bridgetower": 5}
    of_stages = {0: 4, 3: 2.5}

    def seconds(case):
        pp, dp, tp = MESHES[case["mesh"]]
        passes = steps_of(case) * (case["accumulation"] + 1) / 2 * of_stages.get(case["stage"], 1)
        return of_tasks.get(case["task"], 1) * pp * dp * tp * (0.6 + 0.04 * passes)

    def choices(case):
        return {*case.items(), *pairs({name: case[name] for name in ("stage", "kind")})}

    return cover(full_product(), seconds, choices)


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        cases = full_product() if metafunc.config.getoption("--exhaustive") else selection()
        metafunc.parametrize("case", cases, ids=name)


def name(case):
    """A test's id."""
    return f"{case['task']}, {case['mesh']}, ZeRO-{case['stage']}, x{case['accumulation']}, {case['kind']}"


@pytest.mark.sampled(9)
def test_as_near_to_float64_as_a_plain_loop(ranks, references, case):
    # Catches: masters that start from rounded values, sums of micro-batches in 16 bits, a value that is rounded twice,
    # arithmetic that a ZeRO stage or a shard does in its own way, a loss or a norm in 16 bits.
    reference = references.of(case)
    found = ratios(train(ranks, case, reference, references.folder), reference)
    *_, tp = MESHES[case["mesh"]]
    limit, of_losses, of_a_tensor = LIMITS[tp]
    assert max(found.gradient, found.weights) <= limit, found
    assert found.loss is None or found.loss <= of_losses, found
    assert found.tensor <= of_a_tensor, found


ONE_RANK = {"task": "classification", "mesh": "1 rank", "stage": 2, "accumulation": 1, "kind": "bf16"}
# What is broken: (what differs from `ONE_RANK`, flags, blocks of the JSON).
BREAKAGES = {
    "micro-batches summed in bf16": ({"accumulation": BATCH}, (), {"data_types": {"grad_accum_dtype": "bf16"}}),
    "norms in bf16": ({}, ("--norm-dtype", "model"), {}),
    "rounded initial values": ({}, (), {}),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("breakage", BREAKAGES)
def test_what_is_broken_is_seen(ranks, references, breakage):
    # Catches: limits that rounding of our own does not exceed.
    changes, words, blocks = BREAKAGES[breakage]
    reference = references.of(ONE_RANK | changes)
    given = reference
    if breakage == "rounded initial values":
        values = [{name: tensor.bfloat16().float() for name, tensor in of.items()} for of in reference.values]
        given = reference._replace(values=values)
    runs = train(ranks, ONE_RANK | changes, given, references.folder, *words, **blocks)
    found = ratios(runs, reference)
    assert max(found.gradient, found.weights) > LIMITS[1][0], found
