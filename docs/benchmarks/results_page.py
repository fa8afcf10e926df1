"""The tables of docs/results.md, from the JSON files in this folder.

    python docs/benchmarks/results_page.py [--write]

Each file says by which command, when, on what and with which versions it was made.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from gpu_tables import FOLDER, between, of_ratio, table  # in this folder

PAGE = FOLDER.parent / "results.md"
MAX_ROWS = 20  # of evaluations
Record = Mapping[str, Any]


def conditions(record: Record) -> str:
    """How, when and on what a file was made."""
    versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
    return f"`{record['command']}`, {record['date']}; {record['machine']}; {versions}"


def described(values: list[float], digits: int = 1) -> str:
    """Mean ± standard deviation."""
    return f"{statistics.mean(values):.{digits}f} ± {statistics.stdev(values):.{digits}f}"


def of_ladder(record: Record) -> str:
    """The rungs of each bench of a file, with the published gains."""
    parts = []
    for bench in record["benches"]:
        rows = [
            [
                f"{'+ ' if name in bench['ratios'] else ''}{name}",
                f"{side['images_per_second']:.1f}",
                *(of_ratio(bench["ratios"].get(name, {}).get(label)) for label in ("the one before", "the first")),
                bench["published"].get(name, ""),
            ]
            for name, side in bench["ours"].items()
        ]
        model = bench["options"].removeprefix("--model ")
        title = f"{model}, {bench['layout']}, {bench['global_batch']} images on the first rung:"
        parts += [title, "", table(("rung", "images/s", "of the one before", "of the first", "published"), rows), ""]
    return "\n".join([*parts, conditions(record)])


def of_largest(record: Record) -> str:
    """The largest model of each rung: planned for GPUs, planned and measured for a small memory."""
    planned, checked = record["planned"], record["checked"]
    rows = []
    for name, (blocks, parameters) in planned["largest"].items():
        small = checked["blocks"][name]
        rows.append([name, f"{parameters / 1e9:.1f} B", blocks, small["planned"], small["measured"]])
    gpus = f"{planned['gpus']} GPUs of {planned['memory_bytes'] / 1e9:.0f} GB"
    ranks = f"{checked['ranks']} ranks of {checked['memory_bytes'] / 1e6:.0f} MB"
    header = ("rung", f"{gpus}, parameters, planned", "blocks", f"{ranks}, blocks, planned", "measured")
    model = f"{planned['model']} with more blocks, {planned['images']} images per GPU; on the ranks a ViT of width 256."
    return "\n".join([table(header, rows), "", model, conditions(record)])


def of_amp(record: Record) -> str:
    """Each number format: time, accuracy, lost gradients."""
    rows = []
    for name, run in record["runs"].items():
        time = "" if run["seconds"] is None else f"{run['seconds']:.0f}"
        quality = [f"{run[key]:.1f}" for key in ("top1", "precision", "recall", "f1")]
        shares = [f"{100 * run[key]:.2f}" for key in ("zeros", "below_2^-24", "below_2^-14")]
        scales = " → ".join(f"{scale:.0f}" for scale in run["loss_scales"]) if "fp16" in name else ""
        rows.append([name, time, *quality, *shares, scales])
    header = ("format", "seconds", "top-1, %", "precision, %", "recall, %", "F1, %")
    header += ("gradients: zero, %", "below 2^-24, %", "below 2^-14, %", "loss scale")
    return "\n".join([table(header, rows), "", conditions(record)])


def of_layouts(record: Record) -> str:
    """A block with tokens first over one with images first."""
    rows = []
    for block in record["blocks"]:
        milliseconds = (f"{1e3 * min(times):.2f}" for times in block["seconds"].values())
        rows.append([*(block[key] for key in ("block", "images", "dtype")), *milliseconds, f"{block['ratio']:.3f}"])
    header = ("block", "images", "type", "(B, N, C), ms", "(N, B, C), ms", "images/s of (N, B, C) over (B, N, C)")
    return "\n".join([table(header, rows), "", conditions(record)])


def of_steps(record: Record) -> str:
    """A step of ours over its peer's, of the fastest turns."""
    rows = [
        [bench["task"], bench["layout"], bench["global_batch"], name, peer, of_ratio(ratio)]
        for bench in record["benches"]
        for name, ratios in bench["ratios"].items()
        for peer, ratio in ratios.items()
    ]
    return "\n".join(
        [table(("task", "layout", "batch", "ours", "peer", "images/s, of the peer"), rows), "", conditions(record)]
    )


def of_glyphs(record: Record) -> str:
    """Retrieval by seed."""
    columns = ("seed", "r1", "image_to_text_r5", "text_to_image_r5", "cpu_seconds")
    header = ("seed", "R@1, mean of both ways", "image to text R@5", "text to image R@5", "processor seconds")
    rows = [[run[column] for column in columns] for run in record["runs"]]
    rows.append(["mean ± deviation", described([run["r1"] for run in record["runs"]]), "", "", ""])
    chance = f"Chance is {record['chance_r1']:.2f} % of a gallery of {record['gallery']}."
    return "\n".join([table(header, rows), "", chance, conditions(record)])


def of_dino(record: Record) -> str:
    """k-NN top-1 before and after training, by seed."""
    ours = {"ds_vit": "ds_vit", "second": "ds_vit, second rounding", "first": "ds_vit, first rounding"}
    peers = {**ours, "lightly": "lightly, one process"}
    runs = record["runs"]
    gains = {peer: [run[peer]["trained"] - run[peer]["random"] for run in runs] for peer in peers}
    rows = [
        [run["seed"], label, *(f"{run[peer][key]:.2f}" for key in ("random", "trained")), f"{gains[peer][place]:.2f}"]
        for place, run in enumerate(runs)
        for peer, label in peers.items()
    ]
    rows += [["mean ± deviation", label, "", "", described(gains[peer], 2)] for peer, label in peers.items()]
    theirs = statistics.mean(gains["lightly"])
    ratio, second, first = (f"{statistics.mean(gains[peer]) / theirs:.2f}" for peer in ours)
    wall, cpu = (", ".join(f"{run[key] / 60:.1f}" for run in runs) for key in ("wall_seconds", "cpu_seconds"))
    end = f"ds_vit's mean gain is {ratio} of lightly's, {second} with the second rounding and {first} with the first."
    end += f" The commands took {wall} minutes, and {cpu} of processor time."
    header = ("seed", "", "random weights", "trained", "gain")
    return "\n".join([table(header, rows), "", end, conditions(record)])


def of_distillation(record: Record) -> str:
    """Top-1 of the students."""
    names = {"alone": "without the teacher", "distilled": "with the teacher", "gain": "gain by seed"}
    rows = [[label, described(record[name]["values"])] for name, label in names.items()]
    return "\n".join([table(("student", "top-1, mean ± deviation of five seeds"), rows), "", conditions(record)])


def of_vit_lite(record: Record) -> str:
    """Segments of a run, its evaluations, and the control."""
    epoch, published = record["steps_an_epoch"], record["published"]
    segments, evaluations, control = record["segments"], record["evaluations"], record["control"]
    steps: dict[str, list[int]] = {}
    for one in segments:
        steps.setdefault(one["layout"], []).append(one["last_step"] + 1 - one["first_step"])
    rows = [[layout, len(counts), f"{sum(counts):,}"] for layout, counts in steps.items()]
    done, deviation = segments[-1]["last_step"], control["deviation"]
    changes = sum(a["layout"] != b["layout"] for a, b in itertools.pairwise(segments))
    interval = -(-len(evaluations) // MAX_ROWS)
    chosen = evaluations[::-1][::interval][::-1]
    accuracies = [[f"{one['step'] / epoch:.0f}", f"{one['top1']:.2f}", f"{one['loss']:.3f}"] for one in chosen]
    so_far = (
        f"{done / epoch:.2f} of {published['epochs']} epochs, {done:,} steps; layout changes: {changes}. "
        f"Published after all epochs: about {published['top1']} % ({published['source']})."
    )
    checked = (
        f"Control: {control['steps']} steps in {len(control['segments'])} layouts, one after the other, against the "
        f"same steps on one rank, at the full learning rate from the first step. The loss falls from "
        f"{control['first_loss']:.3f} to {control['last_loss']:.3f}. Largest relative deviation: loss "
        f"{deviation['loss']:.1e}, gradient norm {deviation['grad_norm']:.1e}."
    )
    parts = [table(("layout", "segments", "steps"), rows), "", so_far, ""]
    if accuracies:
        parts += [table(("epoch", "top-1 on the 10,000 test images, %", "loss"), accuracies), ""]
    return "\n".join([*parts, checked, "", conditions(record)])


TABLES: dict[str, Callable[[Record], str]] = {
    "faster_vit_ladder": of_ladder,
    "batch_second": of_layouts,
    "scaling_ladder": of_ladder,
    "largest_model": of_largest,
    "bridgetower_ladder": of_ladder,
    "amp": of_amp,
    "steps": of_steps,
    "glyphs": of_glyphs,
    "dino_cifar": of_dino,
    "distilling_digits": of_distillation,
    "vit_lite": of_vit_lite,
}
"""By the stem of the JSON file."""


def written(page: str) -> str:
    """The page with the tables of today's files."""
    for name, make in TABLES.items():
        page = between(page, name, make(json.loads((FOLDER / f"{name}.json").read_text())))
    return page


def main() -> None:
    """Print or write the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="into docs/results.md")
    page = written(PAGE.read_text())
    if parser.parse_args().write:
        PAGE.write_text(page)
    else:
        print(page)


if __name__ == "__main__":
    main()
