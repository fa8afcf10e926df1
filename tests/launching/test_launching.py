"""ds_vit/launching without a cluster: environment files, a rank's log and report, restarts, signals, first errors."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import signal
import socket
import subprocess
import sys
import termios
import threading
import warnings
from collections.abc import Sequence
from pathlib import Path

import pytest
from project import ROOT, heeds, wait_until

from ds_vit import cli
from ds_vit.launching import run
from ds_vit.launching import supervise as supervise_module
from ds_vit.launching.hosts import Host, collected, read_environment
from ds_vit.launching.launchers import Local, check_hosts, filtered, mpi_family
from ds_vit.launching.rank import MARK, MAX_CHARS, ErrorFinder, Job, PlainLines
from ds_vit.launching.supervise import Outcome, Supervisor, describe, exit_code, first_failure
from ds_vit.launching.this_host import free_port

# Environment files.


def test_the_files_in_launch_can_be_read(tmp_path):
    # Catches: an example that its own reader refuses; a choice of one site's that is made for all; a value that is cut
    # at its second equals sign.
    file = ROOT / "launch" / "infiniband.env"
    assert set(read_environment(file)) == {"DEEPSPEED_TIMEOUT"}
    commented = [line[1:] for line in file.read_text().splitlines() if line[:2] in ("#N", "#G")]
    (tmp_path / "roce").write_text("\n".join(line for line in commented if "ens1f0" not in line))  # RoCE's, instead
    variables = read_environment(tmp_path / "roce")
    assert variables["NCCL_IB_HCA"].startswith("=mlx5_0:1,")
    assert {"NCCL_IB_TIMEOUT", "NCCL_DEBUG", "NCCL_IB_GID_INDEX"} <= variables.keys()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("NAME", "line 1: 'NAME' is not of the form NAME=VALUE"),
        ("A=1\n2B=3", "line 2"),
        ("A=1\n\nA=2", "line 3: A is set twice"),
        ("a b=1", "NAME=VALUE"),
    ],
)
def test_a_line_that_is_no_variable(text, reason, tmp_path):
    # Catches: a slip of the pen that becomes a variable nobody reads.
    (tmp_path / "file").write_text(text)
    with pytest.raises(ValueError, match=reason):
        read_environment(tmp_path / "file")


def test_who_wins_among_the_places(tmp_path):
    # Catches: a variable of the shell that does not travel, a file that loses to it, DS_ENV_FILE sent to the ranks.
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / ".deepspeed_env").write_text("A=home\nB=home\n")
    (tmp_path / ".deepspeed_env").write_text("# here\n\nB=here\nC=here\n")
    (tmp_path / "f.env").write_text("C=file\n")
    environ = {"HOME": str(tmp_path / "home"), "A": "shell", "NCCL_DEBUG": "INFO", "PATH": "/bin", "HF_HOME": "/x"}
    variables = collected(environ, tmp_path, [tmp_path / "f.env"])
    assert variables == {"NCCL_DEBUG": "INFO", "HF_HOME": "/x", "A": "home", "B": "here", "C": "file"}


# Errors.

TRACEBACK = "Traceback (most recent call last):"


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        (
            f"step 1\n{TRACEBACK}\n  File x\n    y\nKeyError: 1\nlater\n\n{TRACEBACK}\n",
            [TRACEBACK, "  File x", "    y", "KeyError: 1"],
        ),
        (
            f"warning\n[rank3]: {TRACEBACK}\n[rank3]:   File x\n[rank3]: KeyError: 1\n[rank3]: more",
            [TRACEBACK, "  File x", "KeyError: 1"],
        ),
        (
            "step 1\ntrain.py: error (rank 1): the loss is not finite\nbye\n",
            ["train.py: error (rank 1): the loss is not finite"],
        ),
        (
            "step 1\ntrain.py: error: 2 things are wrong:\n  --lr\n  --opt\nbye\n  for now",
            ["train.py: error: 2 things are wrong:", "  --lr", "  --opt"],
        ),
        ("step 1\nlast words", ["step 1", "last words"]),
        ("", []),
    ],
)
def test_the_first_error_is_found(text, lines):
    # Catches: the last of twenty tracebacks instead of the first, torch's prefixes, text cut between two reads.
    for size in (1, 7, 1000):
        finder, plain = ErrorFinder(), PlainLines()
        for start in range(0, len(text) + size, size):
            finder.feed(plain(text[start : start + size].encode()))
        assert finder.lines == lines
        assert (finder.first_seen is not None) == (len(lines) not in (0, 2))


def test_a_long_error_is_cut():
    # Catches: a report that mixes with another's.
    finder = ErrorFinder()
    finder.feed(b"Traceback (most recent call last):\n" + b"  x" * 3000 + b"\n" + b"  y\n" * 500 + b"ValueError: z\n")
    assert finder.lines[-1] == "ValueError: z"
    assert sum(map(len, finder.lines)) <= MAX_CHARS


def report(rank: int, code: int, at: float, error: Sequence[str] = ("E",)) -> dict:
    return {"rank": rank, "host": f"n{rank}", "code": code, "at": at, "log": f"/l/{rank}", "error": list(error)}


@pytest.mark.parametrize(
    ("reports", "launcher", "lost", "first", "code"),
    [
        ([report(0, 1, 5), report(1, 1, 3), report(2, 143, 1)], 143, [], 1, 1),
        ([report(0, 143, 1), report(1, 137, 2, [])], 1, [], 0, 143),
        ([report(0, 75, 1, []), report(1, 143, 2)], 75, [], 1, 75),
        ([report(1, 137, 9, []), report(0, 72, 1)], 72, [], 1, 137),  # out of memory
        ([report(0, 72, 1), report(1, 137, 0, [])], 72, [], 0, 72),  # frozen
        ([report(0, 134, 2)], 0, [], 0, 134),
        ([], 0, [], None, 0),
        ([], -9, [], None, 137),
        ([], 0, ["n1"], None, 1),
        ([], 2, [], None, 2),
    ],
)
def test_one_code_and_one_culprit(reports, launcher, lost, first, code):
    # Catches: the rank that was ended because of another taken for the culprit; a crash that ends with code 0.
    outcome = Outcome(0, reports, lost)
    outcome.code = exit_code(launcher, outcome)
    assert outcome.code == code
    assert (first_failure(reports) or {"rank": None})["rank"] == first
    text = "\n".join(describe(outcome))
    assert bool(text) == (code != 0)
    if first is not None and code != 75:
        assert f"rank {first} on n{first} failed first" in text


def test_the_code_of_a_run_that_was_asked_to_stop():
    # Catches: a launcher that had no handler yet told as a crash; an error or a lost host hidden by the request.
    errors = [report(0, 1, 1), report(1, 138, 2)]
    rows = [([], 138, [], 75), (errors, 138, [], 1), ([], 138, ["n1"], 1), ([], 0, [], 0)]
    for reports, launcher, lost, code in rows:
        assert exit_code(launcher, Outcome(0, reports, lost, stopping=True)) == code


# The rank's own program and the supervisor, with a launcher that starts one rank.


def supervise(
    folder: Path, script: str, *arguments: str, restarts: int = 0, launcher: Local | None = None
) -> tuple[int, list[str]]:
    """Run a script of these lines as the one rank; gives the code and what was said."""
    (folder / "script.py").write_text(script)
    said: list[str] = []
    job = Job((str(folder / "script.py"), *arguments), str(folder), {}, "logs")
    launcher = launcher or Local(secrets.token_hex(8), os.environ, num_ranks=1)
    handlers = {s: signal.getsignal(s) for s in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    try:
        return Supervisor(launcher, job, restarts, 0.1, 2.0, say=said.append).run(), said
    finally:
        for signum, handler in handlers.items():
            signal.signal(signum, handler)


@pytest.mark.slow
def test_a_failed_run_is_started_again_and_goes_on(tmp_path, capfd):
    # Catches: a restart from the beginning, one too many, a log that the second start overwrites.
    script = """
import pathlib, sys
tries = pathlib.Path("tries"); count = len(tries.read_text()) if tries.exists() else 0
tries.write_text("x" * (count + 1)); print("try", count, *sys.argv[1:], flush=True)
if count < 2: raise RuntimeError(f"broken {count}")
"""
    code, said = supervise(tmp_path, script, "--output", "o", restarts=5)
    assert code == 0
    assert (tmp_path / "tries").read_text() == "xxx"
    out = capfd.readouterr().out
    assert "try 0 --output o\n" in out
    assert "try 2 --output o --resume auto\n" in out
    assert MARK not in out
    (log,) = (tmp_path / "logs").iterdir()
    assert log.name == f"rank-0000.{os.uname().nodename}.log"
    assert [line for line in log.read_text().splitlines() if line.startswith("try")][
        2
    ] == "try 2 --output o --resume auto"
    assert [line for line in said if "restarting" in line] == [
        "restarting in 0.1 s with --resume auto (restart 1 of 5)",
        "restarting in 0.2 s with --resume auto (restart 2 of 5)",
    ]
    assert any("RuntimeError: broken 0" in line for line in said)


DRAWS = """
import os, sys, time
from ds_vit.monitoring.metrics import make_console
from ds_vit.monitoring.progress import Line
console = make_console(); line = Line(console); line.train(9, 0)
for step in range(1, 4): line.step(step, loss=1.0, images=8); time.sleep(0.2)
console.print("a sentence", console.width); line.close()
"""


@pytest.mark.slow
def test_rank_0_draws_on_the_launchers_terminal(tmp_path):
    # Catches: plain step lines of 120 columns under `ds-vit launch`, which has pipes between the rank and the terminal;
    # a log with each frame of the bar.
    (tmp_path / "draws.py").write_text(DRAWS)
    environ = {"DS_ACCELERATOR": "cpu", "TERM": "xterm", "PYTHONPATH": str(ROOT)}
    environ = {**{key: value for key, value in os.environ.items() if key not in ("COLUMNS", "LINES")}, **environ}
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (40, 133))
    line = [sys.executable, str(ROOT / "launch" / "run.py"), "local", "draws.py"]
    with subprocess.Popen(line, cwd=tmp_path, env=environ, stdin=theirs, stdout=theirs) as done:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # the end of a terminal
            while chunk := os.read(ours, 65536):
                shown += chunk
    os.close(ours)
    assert done.returncode == 0
    assert shown.count(b"\x1b[2K") >= 3, "frames of the bar"
    assert b"3/9 loss 1.0000" in re.sub(rb"\x1b\[[?0-9;]*[A-Za-z]", b"", shown)
    assert shown.rindex(b"\x1b[?25h") > shown.rindex(b"\x1b[?25l"), "the cursor is back"
    [log] = tmp_path.glob("logs/*/rank-0000*")
    lines = [line for line in log.read_text().splitlines() if not line.startswith("==")]
    assert "a sentence 133" in lines
    assert "\x1b" not in log.read_text()
    assert sum(line.startswith("train") for line in lines) == 1, "the last frame"


def test_a_drawn_line_is_plain_in_a_log():
    plain = PlainLines()
    pieces = (b"\x1b[?25l\x1b[1mtrain\x1b[0m 1/9\r\x1b[2Ktr", b"ain 2/9\r\x1b[2", b"Ka sentence\ntrain 3/9", b"", b"")
    assert [plain(piece) for piece in pieces] == [b"", b"", b"a sentence\n", b"train 3/9\n", b""]


EARLY = """
import importlib.abc, os, signal, sys
class AtImport(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "ds_vit.config.parser":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, AtImport())
sys.argv = ["ds-vit", *sys.argv[1:]]
from ds_vit.__main__ import main
sys.exit(main())
"""


def test_ctrl_c_during_the_imports_is_one_line():
    # Catches: a traceback from wherever Python was, of the launcher and of each rank.
    done = subprocess.run([sys.executable, "-c", EARLY, "train"], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert done.returncode == 130
    assert done.stderr == "ds-vit: Ctrl-C while no training is under way: nothing to save\n"


def test_torchs_words_about_collectives_are_not_shown():
    # Catches: a FutureWarning of each rank about a name that DeepSpeed or we call.
    import torch.distributed as dist

    from ds_vit.engine.start import quiet_deepspeed

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        quiet_deepspeed(False)
        for name in ("all_gather_into_tensor", "reduce_scatter_tensor", "_all_gather_base", "all_reduce_coalesced"):
            warnings.warn(f"`torch.distributed.{name}` is deprecated. Please use", FutureWarning, stacklevel=1)
            with contextlib.suppress(Exception):
                getattr(dist, name)(None, None)
    assert [str(one.message) for one in said if one.category is FutureWarning] == []


@pytest.mark.slow
def test_verbose_shows_deepspeeds_log():
    # Catches: a flag that only leaves DeepSpeed's logger as it is, which since 0.19 shows warnings.
    code = (
        "from ds_vit.engine.start import quiet_deepspeed\nfrom deepspeed.utils import logger\n"
        "for verbose in (True, False):\n    quiet_deepspeed(verbose)\n    logger.info('verbose %s', verbose)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert re.findall("verbose (True|False)", done.stdout + done.stderr) == ["True"]


@pytest.mark.slow
@pytest.mark.parametrize(("code", "starts"), [(2, 1), (3, 1), (4, 1), (75, 2)])
def test_what_is_started_again(code, starts, tmp_path):
    # Catches: bad input, a diverged or a drifted run tried again and again; an interrupted one given up.
    script = f"open('tries', 'a').write('x')\nraise SystemExit({code})"
    ended, said = supervise(tmp_path, script, restarts=1)
    assert ended == code
    assert (tmp_path / "tries").read_text() == "x" * starts
    assert f"code {code}" in said[-1]


WAITS = """
import pathlib, signal, sys, time
def end(number, frame):
    pathlib.Path("signal").write_text(str(number)); sys.exit(75)
for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT): signal.signal(number, end)
pathlib.Path("ready").touch(); time.sleep(120)
"""


@pytest.mark.parametrize(
    ("signum", "arrives", "name"),
    [(signal.SIGTERM, signal.SIGUSR1, "SIGTERM"), (signal.SIGINT, signal.SIGINT, "Ctrl-C")],
)
def test_a_signal_reaches_the_rank_as_save_and_end(signum, arrives, name, tmp_path):
    # Catches: a scheduler's SIGTERM that kills the launcher and leaves the rank, or a restart after it; a Ctrl-C that
    # the rank reports as another signal.
    (tmp_path / "script.py").write_text(WAITS)
    code = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
from pathlib import Path
from ds_vit.launching.launchers import Local
from ds_vit.launching.rank import Job
from ds_vit.launching.supervise import Supervisor
job = Job(("script.py",), {str(tmp_path)!r}, {{}}, "logs")
print(Supervisor(Local("{secrets.token_hex(8)}", os.environ, num_ranks=1), job, 3).run())
"""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_until((tmp_path / "ready").exists, "no rank")
    process.send_signal(signum)
    out, error = process.communicate(timeout=60)
    assert out == "75\n", error
    assert (tmp_path / "signal").read_text() == str(int(arrives))
    assert f"run: {name}: asking the ranks to save and end" in error
    assert "interrupted and saved (code 75)" in error
    assert "restarting" not in error


def test_a_rank_that_has_only_begun_is_interrupted_too(tmp_path):
    # Catches: "save and end" that kills a rank's program before it listens, and is told as a crash by signal 10.
    (tmp_path / "script.py").write_text("import time; time.sleep(120)")
    job = Job((str(tmp_path / "script.py"),), str(tmp_path), {}, "logs")
    line = [sys.executable, str(ROOT / "launch" / "rank.py"), "--run=x", job.encode()]
    environ = {**os.environ, "RANK": "0", "WORLD_SIZE": "1"}
    rank = subprocess.Popen(line, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    wait_until(lambda: heeds(rank.pid, signal.SIGUSR1), "launch/rank.py leaves SIGUSR1 as it is", 60)
    rank.send_signal(signal.SIGUSR1)
    _, error = rank.communicate(timeout=60)
    assert rank.returncode == 75, error
    assert b'"code": 75' in error


def test_who_has_missed_the_signal_hears_it_again(tmp_path, monkeypatch):
    # Catches: a run that goes on because its ranks had not started when it was told to end.
    monkeypatch.setattr(supervise_module, "_ASK_AGAIN_SECONDS", 0.2)

    class Deaf(Local):
        tries = 0

        def send(self, pids: Sequence[int], signum: int) -> None:
            self.tries += 1
            if self.tries > 1:
                super().send(pids, signum)

    launcher = Deaf(secrets.token_hex(8), os.environ, num_ranks=1)

    def ask() -> None:
        wait_until((tmp_path / "ready").exists, "no rank")
        os.kill(os.getpid(), signal.SIGUSR1)

    thread = threading.Thread(target=ask)
    thread.start()
    code, said = supervise(tmp_path, WAITS, launcher=launcher)
    thread.join()
    assert code == 75, said
    assert launcher.tries >= 2
    assert len([line for line in said if "asking the ranks" in line]) == 1


def test_told_before_there_is_a_rank(tmp_path):
    # Catches: a launcher that is started only to be stopped, or that kills the run with a code of its own.
    code = f"""
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
os.kill(os.getpid(), signal.SIGUSR1)
sys.argv = ["run.py", "local", "--num_ranks", "1", "--logs", {str(tmp_path / "logs")!r}, {str(tmp_path / "s.py")!r}]
import runpy
runpy.run_path({str(ROOT / "launch" / "run.py")!r}, run_name="__main__")
"""
    (tmp_path / "s.py").write_text("open('ran', 'w')")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 75, done.stderr
    assert "resume with --resume auto" in done.stderr
    assert not (tmp_path / "ran").exists()


def test_a_killed_rank_is_reported(tmp_path, capfd):
    # Catches: DeepSpeed's code 0 for a rank that the kernel killed.
    code, said = supervise(tmp_path, "import os; print('here', flush=True); os.kill(os.getpid(), 9)")
    assert code == 137
    assert any("killed by SIGKILL (out of memory?" in line for line in said)


# The command line.


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["local", "--restarts", "2", "{train}"], "--restarts needs --output"),
        (["local", "--restarts", "-1", "{train}", "--output", "x"], "cannot be negative"),
        (["local", "no/such.py"], "no/such.py is not a file"),
        (["local", "--env-file", "no.env", "{train}"], "environment file no.env: No such file"),
        (["mpi", "-np", "2", "--mpirun", "no-mpirun", "{train}"], "no-mpirun is not on PATH"),
        (["slurm", "{train}"], "SLURM_JOB_ID is not set"),
        (["hostfile", "--hostfile", "hosts", "{train}"], "-oProxyCommand=x"),
        (["hostfile", "--hostfile", "hosts", "--master_addr", "a; touch called", "{train}"], "is not a host name"),
    ],
)
def test_bad_input_of_the_launcher(words, reason, tmp_path, monkeypatch, capsys):
    # Catches: a run that starts although it cannot go well, a host's name that ssh takes for an option.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    (tmp_path / "ssh").write_text("#!/bin/sh\ntouch called\n")
    (tmp_path / "ssh").chmod(0o755)
    Path("hosts").write_text("-oProxyCommand=x slots=1\n")
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    assert run.main([word.format(train=ROOT / "launch" / "train.py") for word in words]) == 2
    assert reason in capsys.readouterr().err
    assert not Path("called").exists()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("-n 0 train", "the number of ranks must be at least 1, not 0"),
        ("-n 2 --restarts 1 eval RUN --output x", "--restarts resumes a training from its checkpoint, and eval writes"),
        ("-n 2 --include localhost:0 train", "--include localhost:0 gives the number of ranks too"),
        ("-n 2 trian", "invalid choice: 'trian'"),
    ],
)
def test_bad_input_of_ds_vit_launch(words, reason, capsys):
    # Catches: ranks that start only to end with an error each; the launcher's own errors under another name.
    assert cli.main(["launch", *words.split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("ds-vit: error: ")
    assert reason in error


def test_ds_vit_launch_passes_everything_on(tmp_path, monkeypatch):
    # Catches: flags of the training that are taken for the launcher's, or the other way round.
    monkeypatch.chdir(tmp_path)
    jobs = []
    monkeypatch.setattr(Supervisor, "run", lambda self: jobs.append((self.launcher, self.job)) or 0)
    assert cli.main(["launch", "-n", "2", "train", "--restarts", "x", "-n", "3"]) == 0
    [(launcher, job)] = jobs
    assert job.command == ("-m", "ds_vit", "train", "--restarts", "x", "-n", "3")
    assert launcher.num_ranks == 2


@pytest.mark.parametrize(
    ("include", "exclude", "names"),
    [
        ("", "", ["a", "b", "c"]),
        ("c@b:1", "", ["b", "c"]),
        ("", "a", ["b", "c"]),
        ("", "a:0@b:0,1", ["a", "c"]),
    ],
)
def test_filters_like_deepspeed(include, exclude, names):
    # Catches: rank 0's address on a host that takes no part.
    from deepspeed.launcher.runner import parse_resource_filter

    hosts = [Host("a", 2), Host("b", 2), Host("c", 1)]
    pool = {host.name: list(range(host.slots)) for host in hosts}
    theirs = parse_resource_filter(pool, include, exclude)
    ours = filtered(hosts, include, exclude)
    assert list(ours) == names
    assert list(ours.items()) == list(theirs.items())


def test_filters_that_cannot_be():
    # Catches: a misspelt name that is passed over.
    hosts = [Host("a", 1)]
    for include, exclude in [("a", "a"), ("z", ""), ("", "a"), ("a:x", ""), ("a:1", "")]:
        with pytest.raises(ValueError, match=r"combined|hosts are a|no host is left|not of the form|slots 0 to 0"):
            filtered(hosts, include, exclude)


def probed(**changes: object) -> dict:
    """What a healthy host tells of itself, but for these."""
    return {"port": 1, "machine": "m", "versions": {"timm": "1.0", "the code of ds_vit": "c"}, "gpus": 0, **changes}


@pytest.mark.parametrize(
    ("second", "reason"),
    [
        ({"machine": "m1"}, "a and b are one machine: keep one"),
        ({"gpus": 1}, "b: 2 slots, but 1 GPUs: write slots=1"),
        ({"versions": {"timm": "0.9", "the code of ds_vit": "c"}}, r"timm is 1\.0 on a and 0\.9 on b"),
        ({"versions": {"timm": "1.0", "the code of ds_vit": "d"}}, "the code of ds_vit is c on a and d on b"),
    ],
)
def test_hosts_that_do_not_fit_together(second, reason):
    # Catches: a run on hosts of which one computes something else, or that share GPUs without knowing.
    hosts = {"a": [0, 1], "b": [0, 1]}
    check_hosts(hosts, {"a": probed(machine="m1"), "b": probed(machine="m2", gpus=2)})
    with pytest.raises(ValueError, match=reason):
        check_hosts(hosts, {"a": probed(machine="m1"), "b": probed(**{"machine": "m2", **second})})


def test_which_mpi():
    # Catches: Open MPI's flags given to Hydra.
    assert mpi_family("mpirun (Open MPI) 5.0.11") == "openmpi"
    assert mpi_family("HYDRA build details:\n    Version: 4.1.2") == "mpich"
    assert mpi_family("Intel(R) MPI Library for Linux* OS, Version 2021.11") == "intel"
    with pytest.raises(ValueError, match="neither Open MPI nor"):
        mpi_family("something else")


def test_ports():
    # Catches: ranks that wait for a stranger's server; a port of the kernel's own range, which whatever connects during
    # the ranks' imports may be given.
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        with pytest.raises(ValueError, match=f"port {taken.getsockname()[1]} on .*: Address already in use"):
            free_port(taken.getsockname()[1])
    ports = {free_port() for _ in range(8)}
    assert len(ports) > 1
    assert max(ports) < int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


def test_a_payload_needs_no_quotes():
    # Catches: a character that a shell could touch.
    job = Job(("a 'b'", '"; $(x)', "ü\n"), "/tmp/a b", {"A": "ü `x`"}, "logs", (0, 2))
    assert set(job.encode()) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_=")
    assert Job.decode(job.encode()) == job
    assert json.dumps(job.encode()) == f'"{job.encode()}"'
