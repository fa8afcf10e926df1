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


def test_a_loopback_name_and_an_interface_that_is_not_there(hosts, tmp_path, paths):
    # Catches: Debian's 127.0.1.1, with which ranks wait for each other until the timeout; a .deepspeed_env of another
    # cluster that is not read.
    (tmp_path / ".deepspeed_env").write_text("GLOO_SOCKET_IFNAME=ib0\n")
    bad = tmp_path / "bad-hosts"
    bad.write_text("127.0.0.1 localhost\n127.0.1.1 node1\n10.77.0.2 node2\n")
    hosts[0].check("mount", "--bind", str(bad), "/etc/hosts")
    try:
        told = ask(hosts[1], tmp_path, paths, "--no-collectives")
    finally:
        hosts[0].check("umount", "/etc/hosts")
    assert kinds(told) == [("names", ("node1",)), ("interface", ("node1", "node2"))]
    assert "eth0" in told["findings"][1]["remedy"]


def test_a_host_that_differs(hosts, tmp_path, paths):
    # Catches: a clone that was not pulled, environments that drift apart, data and disks that one host lacks.
    import timm

    data, output = paths
    (info,) = Path(timm.__file__).parent.parent.glob("timm-*.dist-info")
    module, other = ROOT / "ds_vit" / "randomness.py", tmp_path / "other"
    shutil.copytree(data, other / "data")
    (other / "data" / "train" / "a" / "1.jpg").write_text("y")
    (other / "randomness.py").write_text(module.read_text() + "# an old version\n")
    (other / "METADATA").write_text((info / "METADATA").read_text().replace("Version: 1.", "Version: 0.", 1))
    with ExitStack() as stack:
        for words in (
            ("--bind", other / "randomness.py", module),
            ("--bind", other / "METADATA", info / "METADATA"),
            ("--bind", other / "data", data),
            ("-t", "tmpfs", "-o", "size=64k", "none", output),
            ("-t", "tmpfs", "-o", "size=64m", "none", "/dev/shm"),
        ):
            hosts[1].check("mount", *map(str, words))
            stack.callback(hosts[1].check, "umount", str(words[-1]))
        told = ask(hosts[0], tmp_path, paths, "--no-collectives")
    assert {check for check, _ in kinds(told)} == {"code", "versions", "data", "disk", "shm"}
    assert {hosts for check, hosts in kinds(told) if check in ("disk", "shm")} == {("node2",)}
    assert any("timm differs: 1." in finding["what"] for finding in told["findings"])


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
