"""Fixtures shared by all tests: the rank pool, the folder of real images and the simulated device."""

from __future__ import annotations

import gc
import os
from collections import Counter
from pathlib import Path

# One thread a process, set before torch is imported: ranks and test processes share the cores, and OpenMP threads that
# wait for each other busily make everything several times slower.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis
import pytest
from project import ROOT
from ranks import RankPool

# Nothing that is made while tests are collected is garbage, and to look for some takes a quarter of that time.
gc.disable()

# No timed assertions: a loaded machine is slow, not wrong.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


def pytest_collection_finish() -> None:
    """Look for garbage again, among what tests make; rarely, which saves a tenth of the tests' time."""
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()


@pytest.fixture(scope="session")
def ranks() -> RankPool:
    """Real gloo ranks on this machine: `ranks.run(world_size, fn, *args)` gives one result a rank."""
    return RankPool()


@pytest.fixture(scope="session")
def real_images() -> Path:
    """The folder of real images: `DS_VIT_TEST_DATA`, else `../shared/data` seen from the project's root."""
    path = Path(os.environ.get("DS_VIT_TEST_DATA", ROOT.parent / "shared" / "data"))
    if not path.is_dir():
        pytest.skip(f"no real images: {path} does not exist (set DS_VIT_TEST_DATA)")
    return path


@pytest.fixture(scope="session")
def cifar32(tmp_path_factory: pytest.TempPathFactory, real_images: Path) -> Path:
    """A folder of 32 CIFAR-10 images and random weights of the oracle's deeper model."""
    import oracle

    return oracle.cifar_with_weights(real_images, tmp_path_factory.mktemp("cifar32"), **oracle.DEEP_KWARGS)


@pytest.fixture(scope="session")
def dino_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The images and weights of the plain loop of DINO."""
    import plain_dino

    return plain_dino.write_images(tmp_path_factory.mktemp("dino"))


@pytest.fixture(scope="session")
def evil(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run whose names would like to be markup, in a folder that would like to be a command."""
    from run_folders import write_run

    return write_run(tmp_path_factory.mktemp("runs") / "a b'$(touch x)<i>")


@pytest.fixture(scope="session")
def device_library() -> Path:
    """The compiled library of the simulated device (tests/simulated_device); skips without a compiler."""
    import simulated_device

    if reason := simulated_device.missing_compiler():
        pytest.skip(reason)
    return simulated_device.library()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--exhaustive", action="store_true", help="run the full products too (hours)")
    layouts = parser.getgroup("layouts", "tests/parallel/test_layouts.py, with --exhaustive")
    layouts.addoption("--layout-seed", type=int, default=0, metavar="N", help="draw other combinations")
    layouts.addoption("--layout-count", type=int, default=300, metavar="N", help="how many")


# The files that take longest. Begun first, they do not keep one process busy when the others have nothing left to do.
_LONGEST = (
    *("launch", "layouts", "cluster_slurm", "self_distillation", "contrastive", "doc_commands"),
    *("cluster_faults", "deepspeed_verdicts", "planned_memory", "compile", "memory", "parity_tool", "bench"),
    *("sixteen_bits", "outside_tasks", "scenes", "resume", "precision", "kill", "tensor_parallel", "cluster_doctor"),
    *("every_name", "every_optimizer", "auto_batch", "run"),
)


@pytest.hookimpl(tryfirst=True)  # before `-m` looks at the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the longest files; leave the full products out unless they are asked for."""
    for name, beyond in (("sampled", pytest.mark.slow), ("one_in", pytest.mark.exhaustive)):
        seen: Counter[object] = Counter()
        for item in items:
            if every := item.get_closest_marker(name):
                if seen[item.function] % every.args[0]:
                    item.add_marker(beyond)
                seen[item.function] += 1
    places = {f"test_{name}": place for place, name in enumerate(_LONGEST)}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))
    if config.getoption("--exhaustive"):
        return
    left_out = [item for item in items if item.get_closest_marker("exhaustive")]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not item.get_closest_marker("exhaustive")]
