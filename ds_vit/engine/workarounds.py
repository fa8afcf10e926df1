"""Ways around DeepSpeed 0.19.8 that are not about ZeRO's flat memory.

Each has a canary in tests/engine/test_deepspeed_canaries.py, which says when it can go.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def one_grid(grid: Any) -> Iterator[None]:
    """Have `PipelineModule` find this PipelineParallelGrid: it would make another one, with every group once more."""
    from deepspeed.runtime.pipe import module

    own = module.PipelineParallelGrid
    module.PipelineParallelGrid = lambda *_, **__: grid
    try:
        yield
    finally:
        module.PipelineParallelGrid = own
