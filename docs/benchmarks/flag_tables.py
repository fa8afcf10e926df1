"""The tables of docs/configuration.md: every flag, from the metadata that also makes `--help-all` and the errors.

python docs/benchmarks/flag_tables.py [--write]
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
from gpu_tables import FOLDER, print_or_write, table  # next to this file

from ds_vit.config.flag import SECTIONS, spelling
from ds_vit.config.parser import shown_default
from ds_vit.config.rules import conditions_of
from ds_vit.config.schema import KEY_OF_FLAG, RunConfig, tasks_of

PAGE = FOLDER.parent / "configuration.md"


def row(name: str) -> list[str]:
    """A flag, what it takes, its default, and what it means."""
    meta, kinds = RunConfig.flags()[name], RunConfig.kinds(name)
    spelled = ", ".join(f"`{word}`" for word in (spelling(name), *meta.short))
    takes = ", ".join(f"`{word}`" for word in kinds[0].words) or f"`{meta.metavar}`" * bool(meta.metavar)
    if bounds := RunConfig.range_of(name).removeprefix("must be "):
        takes = f"{takes or RunConfig.values_of(name).removesuffix(' or auto')}: {bounds.removeprefix('auto, or ')}"
    text = ", ".join(f"`{task}`" for task in tasks_of(name))
    text = f"{text}: {meta.text}" if text else meta.text
    if idle := dict.fromkeys(words for *_, words in conditions_of(meta)):
        text += f". No effect {'; '.join(idle)}"
    text += f". In the JSON: `{KEY_OF_FLAG[name]}`" if name in KEY_OF_FLAG else ""
    text = re.sub(r"--[a-z][\w-]*", r"`\g<0>`", text.replace("<", "&lt;"))
    default = f"`{shown_default(name)}`" * bool(shown_default(name))
    return [cell.replace("|", "\\|") for cell in (spelled, takes or RunConfig.values_of(name), default, text)]


def tables() -> str:
    """A table for each group of --help."""
    header = ("flag", "takes", "default", "meaning")
    flags = RunConfig.flags()
    rows = {section: [row(name) for name in flags if flags[name].section == section] for section in SECTIONS}
    return "\n\n".join(f"### {section.capitalize()}\n\n{table(header, of)}" for section, of in rows.items() if of)


if __name__ == "__main__":
    print_or_write(__doc__, PAGE, "flags", tables)
