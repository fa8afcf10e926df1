"""`launch/run.py`: the command line of the launchers.

python launch/run.py hostfile --hostfile hosts launch/train.py --deepspeed_config FILE …
"""

from __future__ import annotations

import argparse
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path

from ds_vit.fault_tolerance.errors import UserError
from ds_vit.fault_tolerance.exit_codes import BAD_INPUT, INTERRUPTED
from ds_vit.launching.hosts import Host, collected
from ds_vit.launching.launchers import Hostfile, Launcher, Local, Mpi, Slurm
from ds_vit.launching.rank import DRAWS, Job
from ds_vit.launching.supervise import Supervisor


def build_parser() -> argparse.ArgumentParser:
    """The command line of `launch/run.py`."""
    parser = argparse.ArgumentParser(prog="run.py", description=__doc__.splitlines()[0], allow_abbrev=False)
    kinds = parser.add_subparsers(dest="kind", required=True)

    def kind(name: str, launcher: type[Launcher], text: str) -> argparse.ArgumentParser:
        added = kinds.add_parser(name, help=text, allow_abbrev=False)
        add_common_arguments(added, launcher)
        return added

    _add_ranks(kind("local", Local, "this machine"), "--num_ranks")
    hostfile = kind("hostfile", Hostfile, "the hosts of a hostfile, over ssh")
    hostfile.add_argument("--hostfile", "-H", type=Path, required=True, help="lines of `name slots=N`")
    for filters in ("--include", "--exclude"):
        hostfile.add_argument(filters, default="", metavar="LIST", help="DeepSpeed's: name@name:0,2")
    hostfile.add_argument("--ssh_port", type=int, metavar="P", help="port of every sshd")
    mpi = kind("mpi", Mpi, "mpirun of Open MPI, MPICH or Intel MPI")
    mpi.add_argument("-np", "-n", dest="num_ranks", type=int, required=True, metavar="N", help="ranks over all hosts")
    mpi.add_argument("--hostfile", type=Path, help="lines of `name slots=N` [this machine, or the scheduler's]")
    for program, each in (("mpirun", mpi), ("srun", kind("slurm", Slurm, "srun, inside a job"))):
        text = "with its own options, in one word"
        each.add_argument(f"--{program}", default=program, type=shlex.split, metavar="COMMAND", help=text)
    for several in (hostfile, mpi):
        several.add_argument("--master_addr", dest="address", metavar="A", help="rank 0's address [its host's name]")
    for each in kinds.choices.values():
        each.add_argument("script", help="launch/train.py")
        each.add_argument("arguments", nargs=argparse.REMAINDER, help="its flags")
    return parser


def add_common_arguments(parser: argparse.ArgumentParser, launcher: type[Launcher]) -> None:
    """The options of every launcher; those that are its own have the names of its fields."""
    parser.set_defaults(launcher=launcher)
    add = parser.add_argument
    add("--restarts", type=int, default=0, metavar="N", help="restarts of a failed run [0]")
    add("--backoff", type=float, default=10, metavar="SECONDS", help="before the first restart; doubles [10]")
    add("--grace", type=float, default=30, metavar="SECONDS", help="for the other ranks once one has failed [30]")
    add("--env-file", action="append", default=[], metavar="FILE", help="NAME=VALUE lines for every host")
    add("--logs", metavar="DIR", help="a log per rank [logs/<time>]")
    add("--master_port", dest="port", type=int, metavar="P", help="where the ranks meet [a free one]")


def add_launch_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `ds-vit launch`: those of `run.py local`, with a command of `ds-vit` instead of a script."""
    add_common_arguments(parser, Local)
    _add_ranks(parser, "-n", "--ranks")
    parser.add_argument("program", choices=("train", "eval", "bench"), help="what each rank runs")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its flags")


def _add_ranks(parser: argparse.ArgumentParser, *names: str) -> None:
    """How many ranks this machine gets, or on which of its GPUs."""
    parser.add_argument(*names, dest="num_ranks", type=int, metavar="N", help="ranks [a rank per GPU]")
    parser.add_argument("--include", default="", metavar="LIST", help="GPUs, as DeepSpeed takes them: localhost:0,2")


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] = os.environ) -> int:
    """Run `launch/run.py`.

    Returns:
        0; 2 for invalid input or unusable hosts, with one line that says why; 75 if the run was interrupted and saved;
        else the code of the first rank that failed.
    """
    arguments = build_parser().parse_args(argv)
    try:
        return launch(arguments, environ)
    except UserError as error:
        print(f"run.py: error: {error}", file=sys.stderr)
        return BAD_INPUT


def launch(arguments: argparse.Namespace, environ: Mapping[str, str] = os.environ) -> int:
    """Start the run that a command line asks for, and watch it to its end; gives the exit code, as `main`.

    Raises:
        UserError: as `build`, or unusable hosts.
    """
    supervisor = build(arguments, environ)
    code = supervisor.run()
    if code == INTERRUPTED and isinstance(supervisor.launcher, Slurm):
        requeue(supervisor, environ)
    return code


def build(arguments: argparse.Namespace, environ: Mapping[str, str]) -> Supervisor:
    """The run that a command line asks for.

    Raises:
        UserError: flags that contradict each other, or files that cannot be read.
    """
    cwd = Path.cwd()
    if arguments.restarts and getattr(arguments, "program", "train") != "train":
        raise UserError(f"--restarts resumes a training from its checkpoint, and {arguments.program} writes none")
    if arguments.restarts and not any(a == "--output" or a.startswith("--output=") for a in arguments.arguments):
        raise UserError("--restarts needs --output DIR among the training's flags, to resume from")
    if min(arguments.restarts, arguments.backoff, arguments.grace) < 0:
        raise UserError("--restarts, --backoff and --grace cannot be negative")
    options = {field.name for field in fields(arguments.launcher)} - {"run", "environ"}
    own = {name: value for name, value in vars(arguments).items() if name in options and value is not None}
    if "address" in own:
        Host(own["address"], 1)  # raises where it is no host's name
    if own.get("num_ranks", 1) < 1:
        raise UserError(f"the number of ranks must be at least 1, not {own['num_ranks']}")
    if arguments.launcher is Local and arguments.include and "num_ranks" in own:
        raise UserError(f"--include {arguments.include} gives the number of ranks too, one per GPU: leave it out")
    job = Job(
        command=(*_program(arguments), *arguments.arguments),
        cwd=str(cwd),
        environ=collected(environ, cwd, arguments.env_file) | (_terminal() if arguments.launcher is Local else {}),
        logs=arguments.logs or f"logs/{time.strftime('%Y%m%d-%H%M%S')}",
    )
    launcher = arguments.launcher(run=secrets.token_hex(8), environ=dict(environ), **own)
    before = int(environ.get("SLURM_RESTART_COUNT", "0")) if isinstance(launcher, Slurm) else 0
    limits = (arguments.restarts, arguments.backoff, arguments.grace)
    supervisor = Supervisor(launcher, job, *limits, before, ends_when_interrupted=isinstance(launcher, Slurm))
    supervisor.say(f"a log per rank: {Path(cwd, job.logs)}")
    return supervisor


def _terminal() -> dict[str, str]:
    """Variables of rich by which rank 0 draws through pipes on the terminal of this process; none without one."""
    if not sys.stdout.isatty():
        return {}
    size = shutil.get_terminal_size()
    return {DRAWS: "1", "COLUMNS": str(size.columns), "LINES": str(size.lines)}


def _program(arguments: argparse.Namespace) -> tuple[str, ...]:
    """What each rank's Python runs: a script, or a command of `ds-vit`, which needs no clone."""
    if "program" in arguments:
        return ("-m", "ds_vit", arguments.program)
    script = Path(arguments.script)
    if not script.is_file():
        raise UserError(f"{script} is not a file; the training script comes after the options, e.g. launch/train.py")
    return (str(script.absolute()),)


def requeue(supervisor: Supervisor, environ: Mapping[str, str]) -> None:
    """Put an interrupted job of sbatch back into Slurm's queue while it has restarts left.

    Slurm ends this process in doing so, and starts the script again with SLURM_RESTART_COUNT one higher. A job that was
    cancelled (SIGTERM) is not requeued; a pre-empted one gets the same signal, and Slurm requeues it.
    """
    used, job = int(environ.get("SLURM_RESTART_COUNT", "0")), environ["SLURM_JOB_ID"]
    if used >= supervisor.restarts or {signal.SIGINT, signal.SIGTERM} & set(supervisor.asked):
        return
    supervisor.say(f"back into the queue: scontrol requeue {job} (restart {used + 1} of {supervisor.restarts})")
    subprocess.run(["scontrol", "requeue", job], env=dict(environ), check=False)
