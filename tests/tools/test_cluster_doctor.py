"""`ds-vit doctor` on hosts with an sshd each: a healthy cluster, and faults planted for real."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from cluster import Host, cluster
from project import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def hosts(tmp_path_factory) -> Iterator[list[Host]]:
    with cluster(tmp_path_factory.mktemp("doctor") / "c", 3) as hosts:
        yield hosts


@pytest.fixture
def paths(tmp_path) -> tuple[Path, Path]:
    """(data, output) that both hosts see."""
    data, output = tmp_path / "the data", tmp_path / "runs"
    (data / "train" / "a").mkdir(parents=True)
    (data / "train" / "a" / "1.jpg").write_text("x")
    output.mkdir()
    return data, output


def ask(host: Host, folder: Path, paths: tuple[Path, Path], *words: str, lines: str = "", timeout: float = 120) -> dict:
    """Run the doctor on a host over a hostfile; its JSON, with the exit code in it."""
    hostfile = folder / "hostfile"
    hostfile.write_text(lines or "node1 slots=2\nnode2 slots=2\n")
    data, output = paths
    command = [sys.executable, "-m", "ds_vit.cli", "doctor", "--json", "--hostfile", hostfile, "--data-dir", data]
    command += ["--output", output, "--timeout", str(timeout), *words]
    done = host.run(command, cwd=folder, timeout=2 * timeout + 120)
    assert done.stdout.startswith("{"), done.stdout + done.stderr
    return {**json.loads(done.stdout), "code": done.returncode}


def kinds(told: dict) -> list[tuple[str, tuple[str, ...]]]:
    """(check, hosts) of every finding."""
    return [(finding["check"], tuple(finding["hosts"])) for finding in told["findings"]]


def test_a_healthy_cluster(hosts, tmp_path, paths):
    # Catches: a fault seen where there is none; figures that are not there; a mark or a process left behind.
    with ExitStack() as stack:
        for host in hosts[:2]:  # room for checkpoints, however full the machine's disk is
            host.check("mount", "-t", "tmpfs", "-o", "size=4g", "none", str(paths[1]))
            stack.callback(host.check, "umount", str(paths[1]))
        told = ask(hosts[0], tmp_path, paths)
        assert [host.check("ls", "-A", str(paths[1])) for host in hosts[:2]] == ["", ""]
    assert told["findings"] == []
    assert told["code"] == 0
    assert told["hosts"]["node2"]["facts"]["host"] == "node2"
    network = told["network"]
    assert network["measured"]["world_size"] == 4
    assert network["slowest"].startswith("node1 - node2")
    assert network["measured"]["all_reduce"]["bus_bytes_per_second"] > 0
    deadline = time.monotonic() + 60
    while any("ds_vit.tools.doctor" in line for host in hosts for line in host.processes()):
        assert time.monotonic() < deadline, [host.processes() for host in hosts]
        time.sleep(0.2)


def test_hosts_that_do_not_answer(hosts, tmp_path, paths):
    # Catches: a check of the first host alone, which is what DeepSpeed does; a prompt for a password that nobody sees;
    # an inquiry that waits for TCP's own patience, two minutes.
    config = hosts[0].folder / "ssh_config"
    before = config.read_text()
    config.write_text(f"Host node1\n PubkeyAuthentication no\nHost *\n{before}")
    hosts[1].stop_sshd()
    hosts[2].link("down")
    lines = "".join(f"node{number} slots=2\n" for number in (1, 2, 3))
    try:
        told = ask(hosts[0], tmp_path, paths, "--no-collectives", lines=lines, timeout=8)
    finally:
        config.write_text(before)
        hosts[1].start_sshd()
        hosts[2].link("up")
    assert kinds(told) == [("ssh", (f"node{number}",)) for number in (1, 2, 3)]
    assert "asks for a password" in told["findings"][0]["what"]
    assert "refused" in told["findings"][1]["what"]
    assert told["code"] == 1


def test_planted_faults(hosts, tmp_path, paths):
    # Catches: a clone that was not pulled, environments that drift apart, data and disks that one host lacks; a host
    # that is given out twice; Debian's 127.0.1.1, with which ranks wait for each other until the timeout; another
    # cluster's .deepspeed_env that is not read.
    import timm

    data, output = paths
    (info,) = Path(timm.__file__).parent.parent.glob("timm-*.dist-info")
    module, other = ROOT / "ds_vit" / "randomness.py", tmp_path / "other"
    shutil.copytree(data, other / "data")
    (other / "data" / "train" / "a" / "1.jpg").write_text("y")
    (other / "randomness.py").write_text(module.read_text() + "# an old version\n")
    (other / "METADATA").write_text((info / "METADATA").read_text().replace("Version: 1.", "Version: 0.", 1))
    (other / "hosts").write_text("127.0.0.1 localhost\n127.0.1.1 node1\n10.77.0.2 node2\n10.77.0.2 same\n")
    (tmp_path / ".deepspeed_env").write_text("GLOO_SOCKET_IFNAME=ib0\n")
    with ExitStack() as stack:
        for host, *words in (
            (hosts[0], "--bind", other / "hosts", "/etc/hosts"),
            (hosts[1], "--bind", other / "randomness.py", module),
            (hosts[1], "--bind", other / "METADATA", info / "METADATA"),
            (hosts[1], "--bind", other / "data", data),
            (hosts[1], "-t", "tmpfs", "-o", "size=64k", "none", output),
            (hosts[1], "-t", "tmpfs", "-o", "size=64m", "none", "/dev/shm"),
        ):
            host.check("mount", *map(str, words))
            stack.callback(host.check, "umount", str(words[-1]))
        told = ask(hosts[0], tmp_path, paths, lines="node1 slots=2\nnode2 slots=2\nsame slots=2\n")
    found = dict(kinds(told))
    assert found.keys() == {"code", "versions", "data", "disk", "shm", "hosts", "names", "interface"}
    assert found["hosts"] == found["disk"] == found["shm"] == ("node2", "same")
    assert found["names"] == ("node1",)
    assert found["interface"] == ("node1", "node2", "same")
    assert any("timm differs: 1." in finding["what"] for finding in told["findings"])
    assert any("eth0" in finding["remedy"] for finding in told["findings"])
    assert told["network"] is None, "two hosts' ranks would share one machine"
