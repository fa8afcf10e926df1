"""launch/run_hostfile.sh on hosts with an sshd each: two ranks train, and words arrive as they are."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Host, cluster
from curves import assert_same_curve, read_rows
from launches import GLOBAL_BATCH, NASTY, alone, cifar_folder, explain, training
from project import ROOT

pytestmark = pytest.mark.slow

# What a rank on its host would see: arguments, folder and variables as they arrived.
SHOW = """
import json, os, socket, sys
place = {"rank": int(os.environ["RANK"]), "host": socket.gethostname(), "argv": sys.argv[1:], "cwd": os.getcwd()}
place |= {"environ": {name: value for name, value in os.environ.items() if name.startswith(("DS_TEST", "NCCL_"))}}
print("SHOW" + json.dumps(place), flush=True)
"""


@pytest.fixture(scope="module")
def hosts(tmp_path_factory) -> Iterator[list[Host]]:
    with cluster(tmp_path_factory.mktemp("ssh") / "c", 2) as hosts:
        (hosts[0].folder / "home" / ".deepspeed_env").write_text("GLOO_SOCKET_IFNAME=eth0\n")
        yield hosts


def hostfile(folder: Path, *lines: str) -> Path:
    path = folder / "hosts"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def command(path: Path, *options: str, script: Path = ROOT / "launch" / "train.py") -> list[str]:
    """launch/run_hostfile.sh with these options, up to the script."""
    return ["bash", str(ROOT / "launch" / "run_hostfile.sh"), "--hostfile", str(path), *options, str(script)]


def test_two_hosts_train_like_one_process(hosts, ranks, real_images, tmp_path):
    # Catches: ranks that do not meet, a stage that trains alone, an output folder's name cut by a shell.
    data, output = cifar_folder(tmp_path / "cifar", real_images), tmp_path / NASTY
    path = hostfile(tmp_path, "node1 slots=1", "node2 slots=1")
    layout = ["--pp", "2", "--grad-accum-steps", "2", "--batch-size", str(GLOBAL_BATCH // 2)]
    line = command(path, "--logs", str(tmp_path / "logs"))
    done = hosts[0].run([*line, *training(data), *layout, "--output", str(output)], cwd=tmp_path)
    assert done.returncode == 0, explain(done, output)
    layout = json.loads((output / "summary.json").read_text())["layout"]
    assert (layout["pp"], layout["dp"]) == (2, 1)
    assert_same_curve(alone(ranks, data), read_rows(output), rtol=1e-5)
    assert sorted(log.name for log in (tmp_path / "logs").iterdir()) == ["rank-0000.node1.log", "rank-0001.node2.log"]
    assert "INFO" not in done.stdout
    assert not (tmp_path / "pwned").exists()


def show(host: Host, folder: Path, path: Path, *options: str, arguments=(), environ=None) -> list[dict]:
    """What the ranks of a launch see, in the order of their ranks."""
    script = folder / 'it\'s; a "script" $(touch pwned).py'
    script.write_text(SHOW)
    line = [*command(path, "--logs", "logs", *options, script=script), *arguments]
    done = host.run(line, cwd=folder, environ=environ)
    assert done.returncode == 0, explain(done, folder / "logs")
    assert not list(Path("/").glob("pwned*"))
    assert not list(folder.rglob("pwned*"))
    logs = [log.read_text() for log in sorted((folder / "logs").glob("rank-*.log"))]
    return [json.loads(line[4:]) for log in logs for line in log.splitlines() if line.startswith("SHOW")]


def test_whatever_is_written_arrives_as_it_is(hosts, tmp_path):
    # Catches: a word, a folder or a variable that a shell between two hosts splits, expands or runs; a filter that is
    # not passed on; a master address on a host that takes no part.
    folder = tmp_path / NASTY
    folder.mkdir()
    words = [
        "two words",
        "it's",
        'a "b"',
        "$HOME",
        "$(touch pwned)",
        "`touch pwned`",
        "; touch pwned",
        "\\",
        "",
        "a\nb",
        "ü",
    ]
    value = """it's "$(touch pwned)" `touch pwned`; touch pwned \\ $HOME ü"""
    (folder / ".deepspeed_env").write_text(f"# a comment\n\nDS_TEST_HERE={value}\n")
    (folder / "more.env").write_text(f"NCCL_IB_HCA==mlx5_0:1,mlx5_1:1\nDS_TEST_FILE={value}\n")
    environ = {"DS_TEST_SHELL": value, "DS_TEST_FILE": "loses against the file"}
    places = show(
        hosts[0],
        folder,
        hostfile(folder, "node1 slots=2", "node2 slots=2"),
        *("--env-file", "more.env", "--include", "node2:0,1"),
        arguments=words,
        environ=environ,
    )
    assert [place["host"] for place in places] == ["node2", "node2"]
    for place in places:
        _local_rank, *arrived = place["argv"] if place["argv"][0].startswith("--local") else [None, *place["argv"]]
        assert arrived == words
        assert place["cwd"] == str(folder)
        assert place["environ"]["NCCL_IB_HCA"] == "=mlx5_0:1,mlx5_1:1"
        for name in ("HERE", "SHELL", "FILE"):
            assert place["environ"][f"DS_TEST_{name}"] == value
