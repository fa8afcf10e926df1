"""`ds-vit report` and `ds-vit compare`: a run, or several next to each other, as a page and as tables."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ds_vit.config.run_folder import RunFolder
from ds_vit.fault_tolerance import exit_codes
from ds_vit.fault_tolerance.errors import UserError


def add_report_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `ds-vit report`."""
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="output folders; several are compared")
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        help="the page (default: RUN/report.html, of several comparison.html in the current folder)",
    )
    parser.set_defaults(run=_report)


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line of `ds-vit compare`."""
    parser.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="two output folders or more")
    parser.add_argument("--output", metavar="FILE", type=Path, help="draw the curves into this page too (.html)")
    parser.set_defaults(run=_compare)


def _report(arguments: argparse.Namespace) -> int:
    from ds_vit.monitoring.report import read_records, write_report

    records = read_records(arguments.runs)
    default = RunFolder(arguments.runs[0]).report if len(records) == 1 else Path("comparison.html")
    path = arguments.output or default
    write_report(records, path)
    if len(records) > 1 and not arguments.output:
        # On stderr: the last line of stdout is only the path, for a script.
        told = f"{len(records)} runs side by side, in the current folder (--output FILE puts the page elsewhere):"
        print(told, file=sys.stderr, flush=True)
    print(path)
    return exit_codes.OK


def _compare(arguments: argparse.Namespace) -> int:
    if len(arguments.runs) < 2:
        raise UserError("ds-vit compare takes two runs or more; for one: ds-vit report RUN")
    from ds_vit.monitoring.metrics import make_console, print_columns, say
    from ds_vit.monitoring.report import read_records, write_report
    from ds_vit.monitoring.report.comparison import differences, outcomes

    records = read_records(arguments.runs)
    console, names = make_console(), [record.name for record in records]
    differing = differences(records)
    print_columns(console, "differences", [("setting", *names), *differing])
    print_columns(console, "results", [("metric", *names), *outcomes(records)])
    if batches := [values for name, *values in differing if name.startswith("JSON train_batch_size")]:
        say(
            console,
            f"  The global batches differ ({', '.join(batches[0])} images): a step is not the same step. --batch-size "
            "is a rank's; `--recipe RUN/config.yaml` keeps the global batch on any number of ranks.",
        )
    if arguments.output:
        write_report(records, arguments.output)
        print(arguments.output)
    return exit_codes.OK
