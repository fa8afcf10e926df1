"""Tables of Markdown from the JSON files of docs/benchmarks/gpu_day.sh.

    python docs/benchmarks/gpu_tables.py [--folder docs/benchmarks/gpu] [--write]

`--write` puts them into docs/performance.md, between its two comments. A rehearsal's figures are of no GPU: they are
printed under a warning, and never written.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
PAGE = FOLDER.parent / "performance.md"
SHOWN = ("base", "large", "huge", "mae", "clip", "dino")
"""Workloads of gpu_steps.py, in the table's order."""
NAMES = {"mae": "MAE, ", "clip": "CLIP, ", "dino": "DINO, "}


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table of Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def between(page: str, name: str, text: str) -> str:
    """A page with another text between `<!-- name -->` and `<!-- end of name -->`."""
    before, found, rest = page.partition(f"<!-- {name} -->\n")
    _, end, after = rest.partition(f"<!-- end of {name} -->")
    if not (found and end):
        raise SystemExit(f"the page has no comments <!-- {name} --> and <!-- end of {name} -->")
    return f"{before}{found}\n{text}\n\n{end}{after}"


def print_or_write(about: str | None, page: Path, name: str, text: Callable[[], str]) -> None:
    """The command line of a script that makes one text of a page: print it, or with --write put it there.

    Args:
        about: the script's docstring.
        page: in docs/.
        name: as for `between`.
        text: makes it.
    """
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help=f"into docs/{page.name}, between its two comments")
    if parser.parse_args().write:
        page.write_text(between(page.read_text(), name, text()))
    else:
        print(text())


def read(folder: Path) -> dict[str, dict[str, Any]]:
    """The results by part; the cases of gpu_steps.py are one part, also while others have no result yet."""
    parts = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    parts.pop("steps", None)
    measured = [json.loads(path.read_text()) for path in sorted((folder / "steps").glob("*.json"))]
    if measured:
        parts["steps"] = {**measured[0], "sides": measured}
    return parts


# ---- a table a kind of part ------------------------------------------------------------------------------------------


def of_tests(parts: Sequence[dict[str, Any]]) -> str:
    """How many tests passed, which did not, and why."""
    rows, lines = [], []
    for part in parts:
        outcomes = Counter(part["cases"].values())
        counts = [outcomes[kind] for kind in ("passed", "failed", "skipped", "not run")]
        rows.append([part["part"], part["date"], *counts, part["seconds"]])
        lines += [f"- `{case}`: {what}" for case, what in part["cases"].items() if what in ("failed", "not run")]
        lines += [f"- {note}" for note in part.get("notes", ())]
    header = ("tests", "date", "passed", "failed", "skipped", "not run", "seconds")
    return "\n".join([table(header, rows), "", *lines]).rstrip()


def of_ranks(part: dict[str, Any]) -> str:
    """The layouts' deviations from the reference."""
    columns = ("ranks", "layout", "loss", "grad_norm", "weights", "verdict")
    return table(columns, [[row[column] for column in columns] for row in part["layouts"]])


def of_steps(part: dict[str, Any]) -> str:
    """All sides, those of a model together: the peers, then ours by ZeRO stage, each with its ratio to a peer."""
    sides = sorted(part["sides"], key=lambda side: (SHOWN.index(side["workload"]), not side["is_peer"], side["side"]))
    rows = []
    for side in sides:
        speed, mfu, memory = figures_of(side)
        wall = f"{1e3 * min(side['seconds']):.1f} ({1e3 * statistics.median(side['seconds']):.1f})"
        times = [f"{1e3 * seconds:.1f}" for seconds in (min(side["host_seconds"]), side["device_seconds"])]
        planned = f"{side['planned_bytes'] / 1e9:.1f}" if side.get("planned_bytes") else ""
        model = f"{side['model']}, {NAMES.get(side['workload'], '')}{side['images']}"
        rows.append([model, side["side"], speed, wall, *times, mfu, memory, planned, of_peer(side, sides)])
    header = ("model, images", "side", "images/s", "wall (median), ms", "host, ms", "device, ms", "MFU", "GB")
    return table((*header, "planned GB", "of the compiled peer"), rows)


def of_peer(side: dict[str, Any], sides: Sequence[dict[str, Any]]) -> str:
    """The ratio to the peer: FSDP2's to ZeRO-3 where it is there, else that of the loop without sharding."""
    own = [peer for peer in sides if peer["workload"] == side["workload"] and peer["is_peer"]]
    own = [peer for peer in own if peer["side"].endswith("-compiled") and not peer["side"].startswith("ddp")]
    if side["is_peer"] or not own:
        return ""
    sharded = [peer for peer in own if peer["side"].startswith("fsdp2")]
    whole = [peer for peer in own if peer not in sharded]
    [peer] = (sharded or whole if "zero3" in side["side"] else whole)[:1]
    return f"{min(peer['seconds']) / min(side['seconds']):.2f} of {peer['side'].removesuffix('-compiled')}"


def figures_of(side: dict[str, Any]) -> list[str]:
    """Images per second, MFU and gigabytes; "" for what is not known."""
    memory, mfu = side["memory_bytes"], side["mfu"]
    return [
        f"{side['images_per_second']:,.1f}",
        f"{mfu:.1%}" if mfu else "",
        f"{memory / 1e9:.1f}" if memory else "",
    ]


def of_ratio(ratio: dict[str, float] | None) -> str:
    """A ratio with its range over the turns."""
    return f"{ratio['images_per_second']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f})" if ratio else ""


def of_ladder(part: dict[str, Any]) -> str:
    """The rungs, each over the one before and over the first."""
    bench = part["bench"]
    rows = [
        [
            name,
            *figures_of(side),
            *(of_ratio(bench["ratios"].get(name, {}).get(k)) for k in ("the one before", "the first")),
        ]
        for name, side in bench["ours"].items()
    ]
    return table((bench["model"], "images/s", "MFU", "GB at the peak", "of the one before", "of the first"), rows)


def of_plan(part: dict[str, Any]) -> str:
    """Planned and measured steps and memory."""
    rows = []
    for one in part["steps"]:
        seconds, memory = ([one[f"{kind}_{what}"] for kind in ("planned", "measured")] for what in ("seconds", "bytes"))
        row = [f"{one['model']}, {one['images']} images", one["side"], f"{seconds[0]:.4f}", f"{seconds[1]:.4f}"]
        row += [f"{seconds[0] / seconds[1]:.2f}", f"{memory[0] / 1e9:.2f}"]
        row += [f"{memory[1] / 1e9:.2f}", f"{memory[0] / memory[1]:.2f}"] if memory[1] else ["", ""]
        rows.append(row)
    columns = ("model", "side", "planned s", "measured s", "planned / measured", "planned GB", "measured GB")
    return table((*columns, "planned / measured"), rows)


def tables(parts: dict[str, dict[str, Any]]) -> str:
    """All tables, each under what it shows."""
    kinds = {kind: [parts[name] for name in parts if name.partition("-")[0] == kind] for kind in KINDS}
    blocks = []
    for kind, found in kinds.items():
        of_kind, what = KINDS[kind]
        blocks += [f"{what}, {date_of(part)}:\n\n{of_kind(part)}" for part in found]
    if found := [part for part in parts.values() if "cases" in part]:
        blocks.insert(0, f"Tests marked `gpu`:\n\n{of_tests(found)}")
    return "\n\n".join(blocks)


def date_of(part: dict[str, Any]) -> str:
    """When, on what, with which versions."""
    versions = ", ".join(f"{name} {version}" for name, version in part["versions"].items())
    return f"{part['date']}, {part['device']}, {versions}"


KINDS = {
    "ranks": (of_ranks, "Ranks that share one GPU, deviations from one reference"),
    "decode": (lambda part: part["markdown"], "JPEG files decoded on the device"),
    "steps": (of_steps, "A training step, each side in its own process, fastest turn"),
    "ladder": (of_ladder, "The ladder"),
    "amp": (lambda part: part["markdown"], "A run in each number format, on the digits"),
    "layout": (lambda part: part["markdown"], "A block with tokens first, next to timm's"),
    "plan": (of_plan, "Planned with the figures of calibrate.py, and measured"),
}


def main() -> None:
    """Print the tables, and write them where that is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=FOLDER / "gpu", help="of the JSON files [%(default)s]")
    parser.add_argument("--write", action="store_true", help="into docs/performance.md")
    arguments = parser.parse_args()
    parts = read(arguments.folder)
    if not parts:
        raise SystemExit(f"{arguments.folder} has no result; docs/benchmarks/gpu_day.sh makes them")
    rehearsed = [name for name, part in parts.items() if part["rehearsal"]]
    if rehearsed:
        print(f"Rehearsed on a CPU, no figures of a GPU: {', '.join(rehearsed)}\n")
    print(tables(parts))
    if arguments.write and rehearsed:
        raise SystemExit("a rehearsal is not written into docs/performance.md")
    if arguments.write:
        PAGE.write_text(between(PAGE.read_text(), "gpu tables", tables(parts)))


if __name__ == "__main__":
    main()
