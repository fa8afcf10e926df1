"""Fixtures shared by all tests: the rank pool and the folder of real images."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from project import ROOT
from ranks import RankPool


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
