"""`ds-vit`: train on one rank, and use and inspect runs.

ds-vit train --deepspeed_config F …  as launch/train.py, on one rank
ds-vit launch [-n RANKS] train …     train, eval or bench on all GPUs of this machine, or on N ranks
ds-vit eval RUN                      exact accuracy of a run's weights, a checkpoint or a file
ds-vit predict RUN IMAGE…|FOLDER     the classes of images, with names and probabilities
ds-vit embed RUN FOLDER --output F   the features of images, with their file names
ds-vit export RUN --to hf            weights for timm, Hugging Face or ONNX, checked against the run's
ds-vit import SOURCE --to FILE       another tool's weights under timm's names
ds-vit bench step --against timm     training steps compared with timm, DDP and FSDP2, interleaved
ds-vit bench data --data-dir DIR     images per second of the loader by stage, and what would make it faster
ds-vit plan --model M --gpus 64      which layouts of a model fit on GPUs, how fast each would be, and the files of one
ds-vit hosts --from slurm            a DeepSpeed hostfile from what the scheduler says
ds-vit doctor --hostfile hostfile    what would keep a run on these hosts from starting, and the remedy
ds-vit report RUN                    a page for the browser: curves, layers, classes, mistakes, layout
ds-vit compare RUN RUN               differences between runs, in settings and results
ds-vit shards FOLDER OUT             WebDataset shards of class folders or captions, for --dataset wds/OUT
ds-vit from-timm 'COMMAND'           a command of timm's train.py as one of ds-vit's, and its DeepSpeed JSON
ds-vit from-open-clip 'COMMAND'      the same of open_clip's trainer

to begin:
  ds-vit doctor                             is everything here that a run needs?
  ds-vit train --help                       the ten flags that matter first
  ds-vit train --deepspeed_config FILE --data-dir photos --output runs/first
  ds-vit report runs/first                  its page
  ds-vit predict runs/first cat.jpg         use it

examples of --help:
ds-vit launch train --deepspeed_config ds_configs/zero1_bf16.json --data-dir photos --output runs/first
ds-vit launch -n 2 --restarts 3 train --deepspeed_config FILE --data-dir photos --output runs/first
ds-vit launch -n 2 eval runs/first
ds-vit bench step --deepspeed_config ds_configs/zero1_bf16.json --model vit_base_patch16_224 --batch-size 64 --json
ds-vit bench step --deepspeed_config ds_configs/cpu_zero{0,1,3}_fp32.json --against timm ddp --drop-path 0.4
torchrun --nproc_per_node 2 -m ds_vit.cli bench step --deepspeed_config ds_configs/cpu_zero3_fp32.json --against fsdp2
ds-vit bench data --deepspeed_config ds_configs/zero1_bf16.json --data-dir photos --workers 8
ds-vit plan --model vit_22b_patch14_224 --gpus 256 --gpu h200
ds-vit plan --model vit_giant_patch14_224 --gpus 64 --gpu a100 --link ib200 --global-batch 4096 --write plans/g
ds-vit hosts --from slurm --output hostfile
ds-vit hosts --from names.txt --slots 8
ds-vit doctor --hostfile hostfile --data-dir photos --output runs/first
ds-vit report runs/first runs/second --output both.html
ds-vit compare runs/first runs/second
ds-vit shards imagenet imagenet-256 --resize 256 --quality 90 --workers 16
ds-vit from-timm 'python train.py photos --model vit_small_patch16_224 -b 128 --opt lamb --amp --lr 4e-3'
ds-vit from-open-clip 'python -m open_clip_train.main --train-data pairs.csv --model ViT-B-16 --precision amp_bf16'
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import Any

from ds_vit.config.flag import spelling
from ds_vit.config.parser import Parser, at_least, config_of_words, show_examples
from ds_vit.config.run_folder import RunFolder
from ds_vit.fault_tolerance import exit_codes
from ds_vit.fault_tolerance.errors import UserError, did_you_mean, written
from ds_vit.launching.process import Process
from ds_vit.launching.run import add_launch_arguments, launch
from ds_vit.tools.doctor.command import add_arguments as add_doctor_arguments
from ds_vit.tools.doctor.command import doctor
from ds_vit.training.program import guarded, without_collection


def build_parser() -> argparse.ArgumentParser:
    """The command line of `ds-vit`."""
    parser = Parser(
        prog="ds-vit",
        description="Train Vision Transformers, and use the results.",
        epilog="to begin:" + str(__doc__).partition("to begin:")[2].partition("\n\n")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"ds-vit {version('ds-vit')}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands (COMMAND --help: its flags)")
    for name, (_, text) in _WITH_FLAGS.items():
        commands.add_parser(name, help=text, add_help=False)
    launched = _add(commands, "launch", "train, eval or bench on several ranks of this machine", _launch)
    launched.allow_abbrev = False  # of a flag of training
    add_launch_arguments(launched)
    _add_bench(_add(commands, "bench", "ratios against a peer, measured in the same run"))
    _add_hosts(_add(commands, "hosts", "a DeepSpeed hostfile from a file or a scheduler's lists", _hosts))
    _add_plan(_add(commands, "plan", "which layouts of a model fit on GPUs, and how fast each would be", _plan))
    add_doctor_arguments(_add(commands, "doctor", "what would keep a run from starting or slow it down", doctor))
    _add_report(_add(commands, "report", "a run as an HTML page, or several side by side", _report))
    _add_compare(_add(commands, "compare", "differences between runs, in settings and results", _compare))
    _add_shards(_add(commands, "shards", "WebDataset shards of class folders or captions", _shards))
    for name, trainer in (("from-timm", "timm's train.py"), ("from-open-clip", "open_clip's trainer")):
        text = f"a command of {trainer} as one of ds-vit's, and its DeepSpeed JSON"
        command = _add(commands, name, text, _translate)
        command.add_argument(
            "words", metavar="COMMAND", nargs=argparse.REMAINDER, help="in quotation marks, or as it is"
        )
    return parser


def _add(
    among: argparse._SubParsersAction, name: str, text: str, run: Callable[[argparse.Namespace], int] | None = None
) -> argparse.ArgumentParser:
    """Add a command, with its examples at the end of its --help."""
    words = f" bench {name} " if among.dest == "kind" else f" {name} "
    examples = str(__doc__).partition("examples of --help:\n")[2].splitlines()
    epilog = show_examples("\n".join(line for line in examples if words in f"{line} "))
    layout = argparse.RawDescriptionHelpFormatter
    command = among.add_parser(name, help=text, description=text, epilog=epilog, formatter_class=layout)
    command.set_defaults(run=run, parser=command)
    return command


def _add_bench(bench: argparse.ArgumentParser) -> None:
    kinds = bench.add_subparsers(dest="kind", required=True)
    text = "one training step without data loading; other flags are those of launch/train.py"
    step = _add(kinds, "step", text, _bench)
    against = "timm, ddp, fsdp2 (default: timm or ddp); clip, siglip: open_clip; dino: lightly; NAME-compiled of each"
    step.add_argument("--against", nargs="+", metavar="PEER", help=against)
    add = step.add_argument
    add("--model", default="vit_tiny_patch16_224", help="timm name [%(default)s]")
    add("-b", "--batch-size", type=at_least(1), default=16, help="images of a rank's micro-batch [%(default)s]")
    add("--deepspeed_config", "--deepspeed-config", required=True, metavar="FILE", nargs="+")
    add("--turns", type=at_least(1), default=12, help="turns of each side; the fastest counts [%(default)s]")
    add("--steps", type=at_least(1), default=3, help="steps per turn [%(default)s]")
    text = "the loader on your own images, by stage; other flags are those of launch/train.py"
    data = _add(kinds, "data", text, _bench_data)
    data.add_argument("--images", type=at_least(1), default=256, help="how many to load [%(default)s]")
    for kind in (step, data):
        kind.allow_abbrev = False  # of a flag of training
        kind.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def _add_hosts(hosts: argparse.ArgumentParser) -> None:
    source = "where to read (default: the job's scheduler)"
    hosts.add_argument("--from", dest="source", metavar="FILE|slurm|pbs", help=source)
    hosts.add_argument("--slots", type=at_least(1), help="ranks per host, whatever the source says")
    hosts.add_argument("--output", metavar="FILE", help="write there (default: stdout)")


def _add_plan(plan: argparse.ArgumentParser) -> None:
    add = plan.add_argument
    add("--model", help="timm name, or one of the sizes up to vit_120b_patch14_224")
    add("--gpus", type=at_least(1), help="how many, on all hosts")
    add("--gpu", default="h200", metavar="NAME|FILE", help="what they are [%(default)s]")
    add("--gpus-per-node", type=at_least(1), help="of them in a host [the usual host's]")
    add("--link", default="ib400", metavar="NAME|FILE", help="between hosts, per GPU [%(default)s]")
    add("--global-batch", type=at_least(1), default=4096, help="images of a step [%(default)s]")
    add("--img-size", type=int, help="pixels [the model's]")
    add("--num-classes", type=int, help="[1000]")
    add("--model-kwargs", nargs="+", metavar="K=V", default=[], help="timm's, as in training")
    add("--deepspeed_config", "--deepspeed-config", metavar="FILE", help="types, optimizer, ZeRO stage")
    add("--recipe", metavar="FILE", help="model, image size, epochs, average from a recipe of training")
    add("--model-ema", action="store_true", default=None, help="the weights have an average")
    add("--images", type=at_least(1), help="of the data set [ImageNet-1k's without a --recipe]")
    add("--epochs", type=float, help="passes over it, for days and costs [300]")
    add("--price", type=float, help="of a GPU for an hour, for costs")
    add("--pp", type=int, help="only this pipeline degree")
    add("--tp", type=int, help="only this tensor-parallel degree")
    add("--zero", type=int, choices=range(4), help="only this ZeRO stage")
    add("--top", type=int, default=8, help="layouts to show [%(default)s]")
    add("--json", action="store_true", help="print one JSON object instead of tables")
    add("--write", metavar="DIR", help="write the best layout's JSON, host file and command there")


def _add_report(report: argparse.ArgumentParser) -> None:
    report.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="output folders; several are compared")
    report.add_argument(
        "--output",
        metavar="FILE",
        type=Path,
        help="the page (default: RUN/report.html, of several comparison.html in the current folder)",
    )


def _add_compare(compare: argparse.ArgumentParser) -> None:
    """The command line of `ds-vit compare`."""
    compare.add_argument("runs", nargs="+", metavar="RUN", type=Path, help="two output folders or more")
    compare.add_argument("--output", metavar="FILE", type=Path, help="draw the curves into this page too (.html)")


def _add_shards(shards: argparse.ArgumentParser) -> None:
    add = shards.add_argument
    add("folder", metavar="FOLDER", help="holds train/ and val/, or class folders")
    add("out", metavar="OUT", help="new folder for the shards")
    add("--per-shard", type=at_least(1), default=5000, metavar="N", help="images of a shard [%(default)s]")
    add("--resize", type=at_least(1), metavar="PIXELS", help="make the shorter side no longer than this")
    add("--quality", type=int, metavar="1…100", help="encode as JPEG [what is resized: 90]")
    add("-j", "--workers", type=at_least(1), metavar="N", help="processes [one per core]")
    add("--allow-empty-classes", action="store_true", help="allow class folders without images")
    add("--captions", action="store_true", help="pack the .txt file next to each image, in place of its class")


# Commands that take flags of launch/train.py and read their command line themselves, by the `main` of a module.
_WITH_FLAGS = {
    "train": ("ds_vit.train", "train on one rank (several: ds-vit launch train)"),
    "eval": ("ds_vit.tools.evaluate", "exact accuracy of a run's weights, a checkpoint or a file"),
    "predict": ("ds_vit.tools.predict", "the classes of images, with names and probabilities"),
    "embed": ("ds_vit.tools.predict", "the features of images, with their file names"),
    "export": ("ds_vit.weights.commands", "weights for timm, Hugging Face or ONNX, checked against the run's"),
    "import": ("ds_vit.weights.commands", "another tool's weights under timm's names"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `ds-vit`; 2 for input that cannot be, with one line that says why."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv:
        build_parser().print_help()
        return exit_codes.OK
    if argv[0] in ("train", "eval"):  # on several ranks too
        return _main_of(argv[0])(argv[1:], f"ds-vit {argv[0]}")
    single = Process("none", 0, 1, 0, 1)
    return guarded("ds-vit", lambda process: _run_into_pipe(argv), "nothing was written", single)


def _main_of(command: str) -> Callable[..., int]:
    with without_collection():
        return import_module(_WITH_FLAGS[command][0]).main


def _run_into_pipe(argv: Sequence[str]) -> int:
    """Run a command whose reader may have had enough (`| head`), which is no error."""
    try:
        code = _run(argv)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        poll = select.poll()
        poll.register(sys.stdout, select.POLLOUT)
        if not poll.poll(0)[0][1] & select.POLLERR:
            raise  # another pipe than stdout
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python tries once more when it ends
        return 128 + signal.SIGPIPE


_REMOVED = {
    "completion": "nothing replaces it",
    "gradients": "`ds-vit report RUN` shows gradients by power of two",
    "bench ladder": "docs/benchmarks/ladder.py measures it, in a clone",
    "bench step --output": "--json has the rates of all turns",
    "plan --output": "--json has memory, seconds and stages",
    "plan --calibrate": "docs/benchmarks/calibrate.py FILE.yaml measures it, in a clone",
    "plan --goodput": "docs/planning.md has the formula of the best interval between checkpoints",
}


def _run(argv: Sequence[str]) -> int:
    given = [word.partition("=")[0] for word in argv]
    for name, replacement in _REMOVED.items():
        command, _, flag = name.partition(" --")
        if given[: len(command.split())] == command.split() and (not flag or f"--{flag}" in given):
            raise UserError(f"ds-vit {name} was removed; {replacement}")
    if argv[0] in _WITH_FLAGS:
        return _main_of(argv[0])(argv)
    arguments, words = build_parser().parse_known_args(argv)
    own = arguments.parser._option_string_actions
    # By the run that it measures.
    taken = {spelling(name) for name in config_of_words(words).flags()} if argv[0] == "bench" else {}
    slips = [word for word in words if not taken or (word not in taken and did_you_mean(word, own, cutoff=0.8))]
    if slips:
        arguments.parser.error(f"unrecognized arguments: {' '.join(slips)}")
    vars(arguments).setdefault("words", words)
    return arguments.run(arguments)


def _launch(arguments: argparse.Namespace) -> int:
    # A signal that comes too early to be heard waits (Supervisor.run lets it through).
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1})
    try:
        return launch(arguments)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _bench(arguments: argparse.Namespace) -> int:
    with without_collection():
        from ds_vit.launching.process import discover
        from ds_vit.tools import bench

    words = ["--model", arguments.model, *arguments.words, "--batch-size", str(arguments.batch_size)]
    against, configs = arguments.against or (), arguments.deepspeed_config
    result = bench.bench_step(words, configs, against, turns=arguments.turns, steps=arguments.steps)
    if discover().rank == 0:
        _print_result(bench, result, arguments)
    return exit_codes.OK


def _print_result(tool: ModuleType, result: Any, arguments: argparse.Namespace) -> None:
    from ds_vit.monitoring.metrics import make_console, print_columns

    if arguments.json:
        print(json.dumps(asdict(result)))
    else:
        print_columns(make_console(), tool.title(result), tool.table(result))


def _bench_data(arguments: argparse.Namespace) -> int:
    from ds_vit.tools import bench_data

    result = bench_data.bench_data(arguments.words, arguments.images)
    _print_result(bench_data, result, arguments)
    return exit_codes.OK


def _hosts(arguments: argparse.Namespace) -> int:
    from ds_vit.launching.hosts import read_hosts, to_hostfile

    text = to_hostfile(read_hosts(arguments.source, os.environ, arguments.slots))
    if arguments.output is None:
        print(text, end="")
        return 0
    with written(f"--output {arguments.output}"):
        Path(arguments.output).write_text(text)
    return 0


def _plan(arguments: argparse.Namespace) -> int:
    with without_collection():
        from ds_vit.tools.plan import plan

    return plan(arguments)


def _report(arguments: argparse.Namespace) -> int:
    from ds_vit.monitoring.report.page import write_report
    from ds_vit.monitoring.report.record import read_records

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
    from ds_vit.monitoring.report.page import differences, outcomes, write_report
    from ds_vit.monitoring.report.record import read_records

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


def _shards(arguments: argparse.Namespace) -> int:
    from ds_vit.config.units import in_words
    from ds_vit.monitoring.metrics import make_console
    from ds_vit.monitoring.progress import Line
    from ds_vit.tools.shards import Packing, make_shards

    console = make_console()
    packing = Packing(arguments.per_shard, arguments.resize, arguments.quality)
    made = make_shards(
        arguments.folder,
        arguments.out,
        packing,
        workers=arguments.workers or len(os.sched_getaffinity(0)),
        line=Line(console),
        allow_empty=arguments.allow_empty_classes,
        captions=arguments.captions,
    )
    for split, packed in made:
        size, files = in_words(packed.shard_bytes), in_words(packed.file_bytes)
        print(f"{split}: {packed.images:,} images in {packed.shards:,} shards of together {size} (the files: {files})")
        if packed.undecodable:
            first = packed.undecodable[0]
            print(
                f"{split}: {len(packed.undecodable)} files are no images and went in as they are; the first is {first}"
            )
    print(f"train on them by --dataset wds/{arguments.out}")
    return exit_codes.OK


def _translate(arguments: argparse.Namespace) -> int:
    from ds_vit.config.timm_command import ORIGINS, translate

    translation = translate(arguments.words, ORIGINS[arguments.command])
    print(translation)
    return exit_codes.BAD_INPUT if translation.is_rejected else exit_codes.OK


if __name__ == "__main__":
    sys.exit(main())
