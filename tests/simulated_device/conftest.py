"""The compiled simulated device, built once."""

from __future__ import annotations

from pathlib import Path

import pytest
import simulated_device


@pytest.fixture(scope="session")
def device_library() -> Path:
    """The library of the simulated device; without a compiler the test is skipped."""
    reason = simulated_device.missing_compiler()
    if reason:
        pytest.skip(reason)
    return simulated_device.library()
