"""`ds-vit doctor` without a cluster: planted faults in facts and figures, each of which is found."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from project import ROOT

from ds_vit import cli
from ds_vit.launching.hosts import TIMED_OUT, Ended, Host, on_hosts, parse_hosts, ssh_command, to_hostfile
from ds_vit.launching.this_host import free_port
from ds_vit.tools.doctor import command
from ds_vit.tools.doctor.checks import HostAnswer, NetworkResult, PlannedRun, examine, slowest
from ds_vit.tools.doctor.command import Way, ask_all, explain
from ds_vit.tools.doctor.facts import WORD, Facts, Interface, Port, _ports, gather
from ds_vit.tools.doctor.network import bus_factor, host_pairs

RUN = PlannedRun(
    environ={"NCCL_SOCKET_IFNAME": "ib", "GLOO_SOCKET_IFNAME": "ib0", "NCCL_IB_HCA": "=mlx5_0:1,mlx5_1:1"},
    output="/shared/runs",
    port=29500,
)


VERSIONS = {
    "Python": "3.11",
    "torch": "1.0",
    "timm": "1.0",
    "torch's CUDA": "13.2",
    "NCCL": "2.29",
    "NVIDIA driver": "590",
}


def gpu_host(number: int, names: tuple[str, ...]) -> Facts:
    """A host of an InfiniBand cluster as it should be."""
    return Facts(
        host=f"n{number}",
        identity=f"id{number}",
        versions=VERSIONS,
        accelerators=("NVIDIA H100",) * 8,
        torch_accelerators=8,
        cores=64,
        code="aa",
        data="dd",
        output_free_bytes=2**40,
        interfaces=(
            Interface("lo", addresses=("127.0.0.1",)),
            Interface("eth0", addresses=(f"10.0.0.{number}",)),
            Interface("ib0", addresses=(f"10.1.0.{number}",)),
        ),
        ports=(Port("mlx5_0", gbits=400), Port("mlx5_1", gbits=400)),
        memlock_bytes=None,
        shm_bytes=2**38,
        resolves={name: (f"10.0.0.{name[1:]}",) for name in names},
    )


def healthy(num_hosts: int = 4) -> list[HostAnswer]:
    names = tuple(f"n{i + 1}" for i in range(num_hosts))
    return [HostAnswer(Host(name, 8), gpu_host(i + 1, names)) for i, name in enumerate(names)]


def test_a_healthy_cluster_has_no_finding():
    # Catches: a check that cries wolf.
    assert examine(healthy(), RUN) == []
    assert examine(healthy(1), RUN) == []
    bare = [replace(a, host=Host(a.host.name, 2)) for a in healthy(2)]
    cpu = {"accelerators": (), "torch_accelerators": None, "ports": (), "memlock_bytes": 8 << 20}
    assert examine([replace(a, facts=replace(a.facts, **cpu)) for a in bare], PlannedRun({})) == []


def second(**changes: object) -> Callable[[list[HostAnswer]], list[HostAnswer]]:
    """The second host says something else."""
    return lambda answers: [answers[0], replace(answers[1], facts=replace(answers[1].facts, **changes)), *answers[2:]]


def all_hosts(**changes: object) -> Callable[[list[HostAnswer]], list[HostAnswer]]:
    return lambda answers: [replace(answer, facts=replace(answer.facts, **changes)) for answer in answers]


def second_answer(**changes: object) -> Callable[[list[HostAnswer]], list[HostAnswer]]:
    return lambda answers: [answers[0], replace(answers[1], **changes), *answers[2:]]


def versions(**changes: str) -> dict[str, dict[str, str]]:
    return {"versions": VERSIONS | {name.replace("_", " "): value for name, value in changes.items()}}


def interfaces(**changes: object) -> tuple[Interface, ...]:
    *others, ib = gpu_host(2, ()).interfaces
    return (*others, replace(ib, **changes))


# name → (fault, check, severity, words, hosts)
# fmt: off
FAULTS: dict[str, tuple[Callable, str, str, str, tuple[str, ...]]] = {
    "no answer": (
        second_answer(facts=None, problem="ssh is refused", remedy="start sshd"),
        "ssh", "error", "ssh is refused", ("n2",)),
    "two names for one machine": (
        second(identity="id1"),
        "hosts", "error", "n1 and n2 are one machine", ("n1", "n2")),
    "another torch": (
        second(**versions(torch="2.0")),
        "versions", "error", "torch differs: 1.0 on n1, n3, n4; 2.0 on n2", ("n2",)),
    "no timm": (
        all_hosts(**versions(timm="missing")),
        "versions", "error", "timm is not installed", ("n1", "n2", "n3", "n4")),
    "another NCCL": (second(**versions(NCCL="2.20")), "versions", "error", "NCCL differs", ("n2",)),
    "another driver": (second(**versions(NVIDIA_driver="550")), "versions", "warning", "driver differs", ("n2",)),
    "other code": (second(code="bb"), "code", "error", "the code of ds_vit differs", ("n2",)),
    "too many slots": (second_answer(host=Host("n2", 9)), "slots", "error", "9 slots, but 8 accelerators", ("n2",)),
    "idle accelerators": (second_answer(host=Host("n2", 6)), "slots", "warning", "2 stay idle", ("n2",)),
    "torch sees no GPU": (
        second(torch_accelerators=0),
        "accelerators", "error", "torch (CUDA 13.2) can use none", ("n2",)),
    "another GPU": (
        second(accelerators=("NVIDIA A100",) * 8),
        "accelerators", "warning", "NVIDIA A100 on n2", ("n2",)),
    "no GPU on one": (
        second(accelerators=(), torch_accelerators=None, cores=8),
        "accelerators", "error", "none on n2", ("n2",)),
    "name unknown": (
        second(resolves={"n1": (), "n2": ("10.0.0.2",)}),
        "names", "error", "n1, the host of rank 0, has no address", ("n2",)),
    "name is loopback": (
        lambda a: [replace(a[0], facts=replace(a[0].facts, resolves={"n1": ("127.0.1.1",)})), *a[1:]],
        "names", "error", "n1 is 127.0.1.1 on itself", ("n1",)),
    "port taken": (
        lambda a: [replace(a[0], facts=replace(a[0].facts, port_problem="port 29500: Address already in use")), *a[1:]],
        "port", "error", "port 29500: Address already in use", ("n1",)),
    "no data": (
        second(data="", data_problem="--data-dir /d is not there"),
        "data", "error", "is not there", ("n2",)),
    "other data": (second(data="ee"), "data", "error", "the data differs", ("n2",)),
    "disk full": (second(output_free_bytes=2**20), "disk", "error", "0.00 GiB are free", ("n2",)),
    "output not writable": (
        second(output_problem="/shared cannot be written to: Permission denied"),
        "output", "error", "Permission", ("n2",)),
    "interface missing": (
        second(interfaces=interfaces(name="ib1")),
        "interface", "error", "GLOO_SOCKET_IFNAME=ib0, but there is no", ("n2",)),
    "interface down": (second(interfaces=interfaces(up=False)), "interface", "error", "ib0 is down", ("n2",)),
    "adapter missing": (
        second(ports=(Port("mlx5_0", gbits=400),)),
        "infiniband", "error", "no adapter mlx5_1:1 (there: mlx5_0:1 ACTIVE)", ("n2",)),
    "adapter down": (
        second(ports=(Port("mlx5_0", gbits=400), Port("mlx5_1", state="DOWN", gbits=400))),
        "infiniband", "error", "mlx5_1:1 is DOWN", ("n2",)),
    "locked memory": (second(memlock_bytes=8 << 20), "memlock", "error", "`ulimit -l` is 8192 KiB", ("n2",)),
    "small shm": (second(shm_bytes=64 << 20), "shm", "error", "/dev/shm has 64 MiB", ("n2",)),
}
# fmt: on


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(fault):
    # Catches: a fault that passes, is laid at another host's door, or has no remedy.
    plant, check, severity, words, hosts = FAULTS[fault]
    found = examine(plant(healthy()), RUN)
    matching = [f for f in found if f.check == check and words in f.what]
    assert matching, found
    assert matching[0].severity == severity
    assert matching[0].hosts == hosts
    assert matching[0].remedy
    # One fault, one kind of finding (a name that is missing from one interface list is so for gloo and NCCL).
    assert {f.check for f in found} <= {check, *({"interface"} if "interface" in fault else ())}, found


def test_every_check_of_the_page_is_planted():
    # Catches: a check that no fault shows to work, and one that docs/doctor.md does not name.
    page = (ROOT / "docs" / "doctor.md").read_text()
    rows = re.findall(r"^\| ([a-z, ]+) \| ?[^|]* ?\| ?[^|]* ?\|$", page, re.MULTILINE)
    documented = {name for row in rows for name in row.split(", ")} - {"check"}
    of_the_network = {"collectives", "latency", "bandwidth"}
    assert documented - of_the_network == {check for _, check, *_ in FAULTS.values()}


def test_the_majority_is_the_norm():
    # Catches: three good hosts blamed for the first one's fault; an error below a screen of warnings.
    answers = second(**versions(NVIDIA_driver="550"))(healthy())
    answers[0] = replace(answers[0], facts=replace(answers[0].facts, code="bb"))
    assert [(f.hosts, f.severity) for f in examine(answers, RUN)] == [(("n1",), "error"), (("n2",), "warning")]


# ---- what was measured -----------------------------------------------------------------------------------------------


def figures(**changes: dict) -> NetworkResult:
    """Four hosts' pairs; `n12={...}` changes the pair of n1 and n2."""
    pairs = []
    for a, b in host_pairs(4):
        pair = {"a": a, "b": b, "latency_seconds": 5e-6, "bytes_per_second": 45e9}
        pairs.append(pair | changes.get(f"n{a + 1}{b + 1}", {}))
    measured = {"pairs": pairs, "all_reduce": {}, "world_size": 32, "backend": "nccl"}
    return NetworkResult(("n1", "n2", "n3", "n4"), measured)


ALL_SLOW = {f"n{a + 1}{b + 1}": {"bytes_per_second": 2e9} for a, b in host_pairs(4)}


@pytest.mark.parametrize(
    ("measured", "finding", "words"),
    [
        (figures(), None, ""),
        (
            figures(n23={"bytes_per_second": 10e9}),
            ("bandwidth", "error", ("n2", "n3")),
            "80.00 Gbit/s between them, 3",
        ),
        (figures(n34={"latency_seconds": 0.05}), ("latency", "error", ("n3", "n4")), "takes 50.0 ms one way"),
        # NCCL on Ethernet while InfiniBand is there: every pair alike, so no pair stands out.
        (figures(**ALL_SLOW), ("bandwidth", "warning", ("n1", "n2")), "16.00 Gbit/s between them over adapters of 800"),
        (
            NetworkResult(("n1", "n2"), problem="timed out", culprits=("n2",)),
            ("collectives", "error", ("n2",)),
            "timed out",
        ),
    ],
)
def test_the_network(measured, finding, words):
    # Catches: a network blamed for nothing, one bad cable lost in an average, a failed measurement taken for health.
    found = examine(healthy(), RUN, measured)
    assert [(f.check, f.severity, f.hosts) for f in found[:1]] == [finding] * (finding is not None)
    assert all(words in f.what for f in found[:1])
    assert len(found) == (6 if finding and finding[1] == "warning" else finding is not None)


def test_pairs_and_factors():
    # Catches: a thousand hosts timed in all half million pairs; a bandwidth that counts a byte twice.
    assert len(host_pairs(4)) == 6
    assert len(host_pairs(1000)) == 1000
    assert bus_factor(4) == 1.5
    assert slowest(figures()) == "n1 - n2: 5 us, 360.00 Gbit/s"
    assert slowest(figures(n23={"bytes_per_second": 10e9})).startswith("n2 - n3")


# ---- this machine ----------------------------------------------------------------------------------------------------


def test_facts_travel():
    # Catches: a field that JSON turns into something else.
    facts = gpu_host(1, ("n1",))
    assert Facts.unpack(facts.pack()) == facts
    here = gather(names=("localhost",))
    assert Facts.unpack(here.pack()) == here
    assert here.host == socket.gethostname()
    assert here.versions["torch"] != "missing"
    odd = gather(data_dir="d\udce9")  # a name that is not UTF-8
    assert Facts.unpack(odd.pack()).data_problem == "--data-dir d\udce9 is not there"
    assert "127.0.0.1" in here.resolves["localhost"]
    assert any("127.0.0.1" in i.addresses for i in here.interfaces)


def test_ports_are_read_as_the_kernel_writes_them(tmp_path):
    # Catches: a state or a rate misread; expected as /sys/class/infiniband has them.
    folder = tmp_path / "mlx5_0" / "ports" / "1"
    folder.mkdir(parents=True)
    for name, text in {"state": "4: ACTIVE\n", "rate": "400 Gb/sec (4X NDR)\n"}.items():
        (folder / name).write_text(text)
    assert list(_ports(tmp_path)) == [Port("mlx5_0", 1, "ACTIVE", 400.0)]


def test_the_data_checksum_sees_a_change(tmp_path):
    # Catches: a checksum of nothing; a class folder that is missing on one host.
    for path, text in {"train/a/1.jpg": "x", "train/b/2.jpg": "y", "val/a/3.jpg": "z"}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)

    def digest() -> str:
        facts = gather(data_dir=str(tmp_path))
        assert facts.data_problem == ""
        return facts.data

    first = digest()
    assert digest() == first
    (tmp_path / "train/a/1.jpg").write_text("w")
    changed = digest()
    assert changed != first
    (tmp_path / "train/c").mkdir()
    assert digest() != changed
    assert "is not there" in gather(data_dir=str(tmp_path / "gone")).data_problem


def way(**changes: object) -> Way:
    return replace(Way(os.environ, {}, ROOT, 120.0), **changes)


def test_nothing_reaches_the_remote_shell_unquoted(tmp_path, monkeypatch):
    # Catches: a variable or a folder with quotes, blanks or `;` that the remote shell takes for a command.
    nasty = """a b'c"d;$(touch pwned) `touch pwned` & \\"""
    (tmp_path / nasty).mkdir()
    programs = []
    monkeypatch.setattr(command, "on_hosts", lambda those, *others: programs.extend(those) or [])
    way(sent={"NCCL_X": nasty}, cwd=tmp_path / nasty).run([(Host("node1", 1), "some.module", nasty)])
    [(host, words)] = programs
    *ssh, remote = ssh_command(host, words, {"PDSH_SSH_ARGS_APPEND": "-o 'A=b c'"}, 23)
    assert ssh[:3] == ["ssh", "-o", "A=b c"]
    assert ssh[-4:] == ["-p", "23", "--", "node1"]
    module = shlex.quote(sys.executable) + " -m some.module"
    shown = remote.replace(module, 'sh -c \'pwd; printf "%s\\n" "$NCCL_X" "$0"\'')
    done = subprocess.run(["sh", "-c", shown], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.splitlines() == [str(tmp_path / nasty), nasty, json.dumps(nasty)], done.stderr
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.parametrize(
    ("code", "errors", "says"),
    [
        (255, "ssh: connect to host n2 port 22: Connection refused", "ssh is refused"),
        (255, "root@n2: Permission denied (publickey,password).", "asks for a password"),
        (255, "ssh: Could not resolve hostname n2: Name or service not known", "the name is not known"),
        (255, "Host key verification failed.", "does not know the host's key"),
        (127, "env: '/env/bin/python': No such file or directory", "no /"),
        (1, "sh: 1: cd: can't cd to /work", "the working folder is not there"),
        (1, "/env/bin/python: No module named ds_vit", "cannot be imported"),
        (TIMED_OUT, "", "no answer in time"),
        (127, "cannot start ssh: No such file or directory", "this machine cannot start ssh"),
        (1, "KeyError: x", "the probe failed: KeyError: x"),
    ],
)
def test_why_a_host_does_not_answer(code, errors, says):
    # Catches: every failure reported as the same one.
    problem, remedy = explain("n2", code, errors.splitlines())
    assert says in problem
    assert remedy


def test_a_thousand_hosts_are_asked_in_little_memory(monkeypatch):
    # Catches: what grows with the square of the hosts: each resolving all, each answer carrying all.
    def run(self, modules):
        for host, _, asked in modules:
            assert asked["port"] == (29500 if host.name == "n1" else 0)
        facts = [gpu_host(int(host.name[1:]), asked["names"]) for host, _, asked in modules]
        return [Ended(0, ["Welcome!", WORD + one.pack()]) for one in facts]

    monkeypatch.setattr(Way, "run", run)
    hosts = parse_hosts(to_hostfile(tuple(Host(f"n{number}", 8) for number in range(1, 1025))))
    answers = ask_all(hosts, PlannedRun({}, port=29500), way())
    assert examine(answers, RUN) == []
    assert sum(len(answer.facts.resolves) for answer in answers) == 2 * 1024 - 1
    assert sum(len(answer.facts.pack()) for answer in answers) < 4 * 2**20  # 40 MiB where each has all


def test_programs_that_do_not_end_or_begin():
    # Catches: an inquiry without an end; a program that closed its output early given up before it has failed.
    commands = [
        ["sleep", "600"],
        ["sh", "-c", "exec >&-; sleep 0.5; echo 'KeyError: x' >&2; exit 1"],
        ["no-such-program"],
        ["echo", f"noise {WORD}answer"],
    ]
    ended = on_hosts([("", words) for words in commands], os.environ, 2.0)
    assert [one.code for one in ended] == [TIMED_OUT, 1, 127, 0]
    assert ended[1].lines == ["KeyError: x"]
    assert ended[2].lines == ["cannot start no-such-program: No such file or directory"]
    assert (ended[1].marked(WORD), ended[3].marked(WORD)) == ("", "answer")


def test_the_command(capsys, tmp_path, monkeypatch):
    # Catches: a wrong exit code; JSON that cannot be read; a port that is taken and not seen; a probe that does not
    # start, or leaves a file in the output folder.
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        data = os.path.join(tmp_path, "d\udce9")  # a name that is not UTF-8
        os.makedirs(f"{data}/train/\udce9")
        words = ["--no-collectives", "--master_port", port, "--data-dir", data, "--output", "new/run"]
        assert cli.main(["doctor", "--json", *words]) == 1
    result = json.loads(capsys.readouterr().out)
    checks = [finding["check"] for finding in result["findings"]]
    assert [check for check in checks if check != "disk"] == ["port"]  # the machine's own disk may be full
    assert not result["healthy"]
    [host] = result["hosts"].values()
    assert host["facts"]["output_free_bytes"] > 0
    assert [os.fspath(path) for path in tmp_path.iterdir()] == [data]
    assert cli.main(["doctor", "--no-collectives", "--data-dir", str(tmp_path / "gone"), "--master_port", port]) == 1
    assert "is not there" in " ".join(capsys.readouterr().out.split())
    assert cli.main(["doctor", "--hostfile", str(tmp_path / "gone")]) == 2
    (tmp_path / "hosts").write_text("a slots=two\n")
    assert cli.main(["doctor", "--hostfile", str(tmp_path / "hosts")]) == 2
    assert "line 1" in capsys.readouterr().err
    assert cli.main(["doctor", "--master_port", "99999"]) == 2


@pytest.mark.slow
def test_the_collectives_of_this_machine(capsys, tmp_path, monkeypatch):
    # Catches: ranks that do not meet, figures that are not there, a process left behind.
    for name in ("RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    before = threading.active_count()
    port = str(free_port())
    assert cli.main(["doctor", "--json", "--master_port", port, "--timeout", "200"]) == 0
    network = json.loads(capsys.readouterr().out)["network"]
    assert network["measured"]["all_reduce"]["bus_bytes_per_second"] > 0
    assert threading.active_count() <= before


def test_every_image_of_a_data_set_is_decoded(tmp_path, capsys):
    # Catches: a damaged file that passes, in a folder or a shard; HEIC and rotated files without a word.
    import io
    import tarfile

    from PIL import Image

    from ds_vit.cli import main

    def encoded(turned=False):
        image, exif, out = Image.new("RGB", (8, 8)), Image.Exif(), io.BytesIO()
        if turned:
            exif[0x0112] = 6
        image.save(out, "JPEG", exif=exif)
        return out.getvalue()

    (tmp_path / "cat").mkdir()
    for name, data in {"a.jpg": encoded(), "b.jpg": encoded()[:200], "c.jpg": encoded(turned=True)}.items():
        (tmp_path / "cat" / name).write_bytes(data)
    (tmp_path / "cat" / "d.heic").write_bytes(b"any")
    with tarfile.open(tmp_path / "shard.tar", "w") as archive:
        for name, data in {"0.jpg": encoded(), "1.jpg": b"nothing"}.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    assert main(["doctor", "--images", str(tmp_path)]) == 65
    said = capsys.readouterr().out
    assert "6 images in" in said
    for file in ("cat/b.jpg: ", "shard.tar: 1.jpg: ", "cat/c.jpg", "cat/d.heic"):
        assert file in said
    assert "mogrify -format jpg" in said
    assert "mogrify -auto-orient" in said
    assert "a.jpg" not in said
    for name in ("cat/b.jpg", "shard.tar"):
        (tmp_path / name).unlink()
    assert main(["doctor", "--images", str(tmp_path)]) == 0
