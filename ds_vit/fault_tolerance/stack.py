"""Where a rank is stuck: its innermost collective, and pending collectives in torch's flight recorder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def innermost(frame: Any) -> str:
    """`, in all_reduce, called by ds_vit/engine/base.py:253 (sum)`: a stack in one line; "" for no stack."""
    collective, caller = "", ""
    while frame is not None and not caller:
        path = Path(frame.f_code.co_filename)
        if path.name == "distributed_c10d.py" and not frame.f_code.co_name.startswith("_"):
            name = frame.f_code.co_name
            collective = collective if name == "wrapper" and collective else name
        if path.parent.name == "ds_vit" or "ds_vit" in path.parts[-3:-1]:
            caller = f"{'/'.join(path.parts[path.parts.index('ds_vit') :])}:{frame.f_lineno} ({frame.f_code.co_name})"
        frame = frame.f_back
    return (f", in {collective}" if collective else "") + (f", called by {caller}" if caller else "")


def pending_collectives(entries: list[Mapping[str, Any]], limit: int = 4) -> list[str]:
    """The unfinished collectives of a flight recorder's dump, oldest first, as lines for people."""
    pending = [e for e in entries if e.get("state") != "completed" and not e.get("retired")]
    return [
        f"{e.get('state')}: {e.get('profiling_name', 'collective')} number {e.get('collective_seq_id')} of group "
        f"{e.get('process_group')}, sizes {e.get('input_sizes')}"
        for e in pending[:limit]
    ]
