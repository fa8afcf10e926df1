"""`ds-vit hosts`: every way in which a cluster says who takes part."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_vit import cli
from ds_vit.launching.hosts import (
    Host,
    expand_counts,
    first_host,
    from_slurm,
    parse_hosts,
    read_hosts,
    to_hostfile,
)

NAMES = st.from_regex(r"[a-z][a-z0-9.-]{0,20}", fullmatch=True)


@given(st.dictionaries(NAMES, st.integers(1, 64), min_size=1, max_size=20))
def test_a_hostfile_reads_back_as_deepspeed_reads_it(slots):
    # Catches: a writer and a reader that disagree, order lost; a hostfile that DeepSpeed takes for something else.
    from deepspeed.launcher.runner import _parse_hostfile as theirs

    hosts = tuple(Host(name, n) for name, n in slots.items())
    text = "# comment\n\n" + to_hostfile(hosts)
    assert parse_hosts(text) == hosts
    assert list(theirs(text.splitlines()).items()) == list(slots.items())


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a slots=2\nb slot=2\n", r"hosts, line 2: 'b slot=2' is not of the form"),
        ("a slots=2\n\n# b\na slots=1\n", r"line 4: host a is already on line 1"),
        ("a slots=0\n", r"line 1: host a has 0 slots"),
        ("-oProxyCommand=x slots=1\n", r"line 1: '-oProxyCommand=x' is not a host name"),
        ("a;reboot slots=1\n", r"line 1: 'a;reboot' is not a host name"),
        ("# nothing\n", r"names no host"),
        ("a\nb 2\n", r"line 2: 'b 2' is not one host name"),
    ],
)
def test_a_bad_hostfile_says_which_line(text, says):
    # Catches: an error without its line; a name that ssh would take for an option or a shell for a command.
    with pytest.raises(ValueError, match=says):
        parse_hosts(text, "hosts")


@pytest.mark.parametrize(
    ("text", "name"),
    [("n1", "n1"), ("n[1-3,7]", "n1"), ("n[098-101]-ib,login", "n098-ib"), ("r[1-2]n[3-4]", "r1n3"), ("a,b[3],c", "a")],
)
def test_the_first_of_a_node_list(text, name):
    # Catches: lost zeros, lost suffixes, brackets cut at the comma inside them.
    assert first_host(text) == name


@pytest.fixture
def scontrol(tmp_path, monkeypatch):
    """A `scontrol` that knows n[1-2] and n[1-3], and the environment to call it in."""
    script = 'case "$3" in "n[1-2]") echo n1 n2 ;; "n[1-3]") echo n1 n2 n3 ;; *) echo "bad $3" >&2; exit 1 ;; esac'
    (tmp_path / "scontrol").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return {"PATH": os.environ["PATH"]}


def test_slurm(scontrol):
    # Catches: counts given to the wrong node, GPUs forgotten where one task starts them all.
    job = {**scontrol, "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "4(x2),3"}
    assert from_slurm(job) == (Host("n1", 4), Host("n2", 4), Host("n3", 3))
    assert from_slurm({**job, "SLURM_TASKS_PER_NODE": "2"}) == (Host("n1", 2), Host("n2", 2), Host("n3", 2))
    gpus = {**job, "SLURM_TASKS_PER_NODE": "1(x3)", "SLURM_GPUS_PER_NODE": "h100:8"}
    assert from_slurm(gpus) == (Host("n1", 8), Host("n2", 8), Host("n3", 8))
    with pytest.raises(ValueError, match="3 hosts, and SLURM_TASKS_PER_NODE has 2 counts"):
        from_slurm({**job, "SLURM_TASKS_PER_NODE": "4,3"})
    with pytest.raises(ValueError, match="not inside a Slurm job"):
        from_slurm({})
    for lost in ({"SLURM_JOB_NODELIST": "n["}, {"PATH": "/nowhere"}):
        with pytest.raises(ValueError, match="write a hostfile and give --from FILE"):
            from_slurm({**job, **lost})
    assert expand_counts("4(x2),3") == [4, 4, 3]


def test_the_source_is_found(tmp_path):
    # Catches: a file of names read as a bad hostfile, a host that occurs once a slot taken for several hosts, --slots
    # without effect, a guess outside any job.
    path = tmp_path / "hosts"
    path.write_text("a slots=2\nb slots=1\n")
    assert read_hosts(str(path), {}) == (Host("a", 2), Host("b", 1))
    path.write_text("a\nb:2\na\n")
    assert read_hosts(str(path), {}) == (Host("a", 2), Host("b", 2))
    assert read_hosts(str(path), {}, slots=4) == (Host("a", 4), Host("b", 4))
    assert read_hosts(None, {"PBS_NODEFILE": str(path)}) == (Host("a", 2), Host("b", 2))
    with pytest.raises(ValueError, match=r"PBS_NODEFILE=.*gone: No such file"):
        read_hosts("pbs", {"PBS_NODEFILE": str(tmp_path / "gone")})
    with pytest.raises(ValueError, match="lsf was removed; write a hostfile"):
        read_hosts("lsf", {})
    with pytest.raises(ValueError, match="give --from FILE"):
        read_hosts(None, {})


@pytest.mark.usefixtures("scontrol")
def test_the_command(tmp_path, monkeypatch, capsys):
    # Catches: a command that writes nothing, or half a file; a wrong exit code.
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setenv("SLURM_TASKS_PER_NODE", "4(x2)")
    monkeypatch.delenv("SLURM_GPUS_PER_NODE", raising=False)
    assert cli.main(["hosts"]) == 0
    assert capsys.readouterr().out == "n1 slots=4\nn2 slots=4\n"
    output = tmp_path / "hostfile"
    assert cli.main(["hosts", "--from", "slurm", "--slots", "8", "--output", str(output)]) == 0
    assert output.read_text() == "n1 slots=8\nn2 slots=8\n"
    assert cli.main(["hosts", "--from", str(tmp_path / "gone")]) == 2
    assert "gone: No such file" in capsys.readouterr().err
    assert cli.main(["hosts", "--slots", "0"]) == 2
    assert cli.main(["hosts", "--output", str(tmp_path / "no" / "folder")]) == 2
