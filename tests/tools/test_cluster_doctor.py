"""`ds-vit doctor` on hosts with an sshd each: a healthy cluster, and faults planted for real."""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cluster import Host, cluster
from project import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def hosts(tmp_path_factory) -> Iterator[list[Host]]:
    with cluster(tmp_path_factory.mktemp("doctor") / "c", 2) as hosts:
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
    told = ask(hosts[0], tmp_path, paths)
    assert told["findings"] == []
    assert told["code"] == 0
    assert told["hosts"]["node2"]["facts"]["host"] == "node2"
    network = told["network"]
    assert network["measured"]["world_size"] == 4
    assert network["slowest"].startswith("node1 - node2")
    assert network["measured"]["all_reduce"]["bus_bytes_per_second"] > 0
    assert list(paths[1].iterdir()) == []
    deadline = time.monotonic() + 60
    while any("ds_vit.tools.doctor" in line for host in hosts for line in host.processes()):
        assert time.monotonic() < deadline, [host.processes() for host in hosts]
        time.sleep(0.2)


def test_sshd_refused_on_the_second_host(hosts, tmp_path, paths):
    # Catches: a check of the first host alone, which is what DeepSpeed does.
    hosts[1].stop_sshd()
    try:
        told = ask(hosts[0], tmp_path, paths, "--no-collectives")
    finally:
        hosts[1].start_sshd()
    assert kinds(told) == [("ssh", ("node2",))]
    assert "refused" in told["findings"][0]["what"]
    assert told["code"] == 1


def test_a_host_that_is_down(hosts, tmp_path, paths):
    # Catches: an inquiry that waits for TCP's own patience, two minutes.
    hosts[1].link("down")
    try:
        told = ask(hosts[0], tmp_path, paths, "--no-collectives")
    finally:
        hosts[1].link("up")
    assert kinds(told) == [("ssh", ("node2",))]


def test_two_names_for_one_machine(hosts, tmp_path, paths):
    # Catches: a host that is given out twice.
    file = hosts[0].folder / "hosts"
    before = file.read_text()
    with file.open("a") as names:
        names.write("10.77.0.2 other\n")
    try:
        told = ask(hosts[0], tmp_path, paths, lines="node1 slots=2\nnode2 slots=2\nother slots=2\n")
    finally:
        file.write_text(before)
    assert kinds(told) == [("hosts", ("node2", "other"))]
    assert told["network"] is None, "their ranks would share one machine"


def test_too_many_slots(hosts, tmp_path, paths):
    # Catches: a slip of the pen that starts 64 ranks on a small host.
    told = ask(hosts[0], tmp_path, paths, "--no-collectives", lines="node1 slots=2\nnode2 slots=4096\n")
    assert kinds(told) == [("slots", ("node2",))]


def test_a_used_port(hosts, tmp_path, paths):
    # Catches: a run that was left behind and still listens.
    listen = "import socket; s = socket.socket(); s.bind(('', 29555)); s.listen(); print(flush=True); input()"
    with hosts[0].popen([sys.executable, "-c", listen], stdin=-1, stdout=-1) as listening:
        listening.stdout.readline()
        told = ask(hosts[0], tmp_path, paths, "--no-collectives", "--master_port", "29555")
        listening.stdin.close()
    assert kinds(told) == [("port", ("node1",))]


def test_a_name_that_is_the_loopback(hosts, tmp_path, paths):
    # Catches: Debian's 127.0.1.1, with which ranks wait for each other until the timeout.
    bad = tmp_path / "bad-hosts"
    bad.write_text("127.0.0.1 localhost\n127.0.1.1 node1\n10.77.0.2 node2\n")
    hosts[0].check("mount", "--bind", str(bad), "/etc/hosts")
    try:
        told = ask(hosts[1], tmp_path, paths, "--no-collectives")
    finally:
        hosts[0].check("umount", "/etc/hosts")
    assert kinds(told) == [("names", ("node1",))]


def mounted(host: Host, source: str, target: Path, *words: str) -> Callable[[], Any]:
    """Mount something on one host alone; the result undoes it."""
    host.check("mount", *words, source, str(target))
    return lambda: host.check("umount", str(target))


def test_other_code(hosts, tmp_path, paths):
    # Catches: a host whose clone was not pulled.
    other = tmp_path / "randomness.py"
    other.write_text((ROOT / "ds_vit" / "randomness.py").read_text() + "# an old version\n")
    undo = mounted(hosts[1], str(other), ROOT / "ds_vit" / "randomness.py", "--bind")
    try:
        told = ask(hosts[0], tmp_path, paths, "--no-collectives")
    finally:
        undo()
    assert [check for check, _ in kinds(told)] == ["code"]


def test_another_version_of_a_package(hosts, tmp_path, paths):
    # Catches: environments that have drifted apart.
    import timm

    (info,) = Path(timm.__file__).parent.parent.glob("timm-*.dist-info")
    other = tmp_path / "METADATA"
    other.write_text((info / "METADATA").read_text().replace("Version: 1.", "Version: 0.", 1))
    undo = mounted(hosts[1], str(other), info / "METADATA", "--bind")
    try:
        told = ask(hosts[0], tmp_path, paths, "--no-collectives")
    finally:
        undo()
    assert [check for check, _ in kinds(told)] == ["versions"]
    assert "timm differs: 1." in told["findings"][0]["what"]


@pytest.mark.parametrize("fault", ["missing", "different", "disk full", "not shared", "shm"])
def test_disks(fault, hosts, tmp_path, paths):
    # Catches: data or a folder that one host lacks, which a run finds out after minutes, or never.
    data, output = paths
    empty, other = tmp_path / "empty", tmp_path / "other"
    empty.mkdir()
    shutil.copytree(data, other)
    (other / "train" / "a" / "1.jpg").write_text("y")
    undo, expected = {
        "missing": lambda: (mounted(hosts[1], str(empty), data, "--bind"), ("data", ("node2",))),
        "different": lambda: (mounted(hosts[1], str(other), data, "--bind"), ("data", ("node2",))),
        "disk full": lambda: (mounted(hosts[1], "none", output, "-t", "tmpfs", "-o", "size=64k"), ("disk", ("node2",))),
        "not shared": lambda: (mounted(hosts[1], str(empty), output, "--bind"), ("output", ("node1", "node2"))),
        "shm": lambda: (
            mounted(hosts[1], "none", Path("/dev/shm"), "-t", "tmpfs", "-o", "size=64m"),
            ("shm", ("node2",)),
        ),
    }[fault]()
    try:
        told = ask(hosts[0], tmp_path, paths, "--no-collectives")
    finally:
        undo()
    # A disk of a host's own is not the others' either.
    assert [kind for kind in kinds(told) if not (fault == "disk full" and kind[0] == "output")] == [expected]


def test_an_interface_that_is_not_there(hosts, tmp_path, paths):
    # Catches: a variable copied from another cluster; it comes from .deepspeed_env, as a run's would.
    (tmp_path / ".deepspeed_env").write_text("GLOO_SOCKET_IFNAME=ib0\n")
    told = ask(hosts[0], tmp_path, paths, "--no-collectives")
    assert kinds(told) == [("interface", ("node1",)), ("interface", ("node2",))]
    assert "eth0" in told["findings"][0]["remedy"]
    (tmp_path / ".deepspeed_env").write_text("GLOO_SOCKET_IFNAME=eth0\n")
    assert ask(hosts[0], tmp_path, paths, "--no-collectives")["findings"] == []


def test_no_password_no_entry(hosts, tmp_path, paths):
    # Catches: a prompt for a password that nobody sees.
    config = hosts[0].folder / "ssh_config"
    before = config.read_text()
    config.write_text(before.replace("IdentityFile", "# IdentityFile"))
    try:
        told = ask(hosts[0], tmp_path, paths, "--no-collectives")
    finally:
        config.write_text(before)
    assert kinds(told) == [("ssh", ("node1",)), ("ssh", ("node2",))]
    assert "ssh-copy-id" in told["findings"][0]["remedy"]


def test_a_delay_on_the_way(tmp_path):
    # Catches: a network that works, and makes every step a hundred times slower.
    paths = tmp_path / "data", tmp_path / "runs"
    (paths[0] / "train").mkdir(parents=True)
    paths[1].mkdir()
    with cluster(tmp_path / "c", 2, delay_seconds=0.05) as hosts:
        told = ask(hosts[0], tmp_path, paths, lines="node1 slots=1\nnode2 slots=1\n", timeout=250)
    assert kinds(told) == [("latency", ("node1", "node2"))], told
    assert told["network"]["measured"]["pairs"][0]["latency_seconds"] > 0.05


def test_lost_packets(tmp_path):
    # Catches: a bad cable, which TCP hides.
    paths = tmp_path / "data", tmp_path / "runs"
    (paths[0] / "train").mkdir(parents=True)
    paths[1].mkdir()
    with cluster(tmp_path / "c", 2, loss=0.01) as hosts:
        told = ask(hosts[0], tmp_path, paths, lines="node1 slots=1\nnode2 slots=1\n", timeout=250)
    # The loss, or a busy machine, may slow the pair down too.
    found = [kind for kind in kinds(told) if kind[0] != "bandwidth"]
    assert found == [("loss", ("node1",)), ("loss", ("node2",))], told
    assert told["code"] == 1
