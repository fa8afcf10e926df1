"""Several hosts on one Linux machine: each with its own network, host name, processes, /dev/shm and sshd.

with cluster(tmp_path / "cluster", num_hosts=2) as hosts:
    done = hosts[0].run(["ssh", "node2", "hostname"], timeout=60)
    hosts[1].link("down")

Real ssh, sockets and kernel faults, at the price of root and Debian's iproute2 and openssh-server; a test
on a machine without them is skipped with the reason. The hosts share the file system but for /run and /dev/shm.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from project import ROOT, wait_until

SUBNET = "10.77.0"
"""Host number i (from 1) is `nodeI` at `10.77.0.I`, on the interface `eth0` of a network that nothing else reaches."""

_TOOLS = {"ip": "iproute2", "unshare": "util-linux", "nsenter": "util-linux", "sshd": "openssh-server"}

# The first process of a host: it adopts and reaps whatever is orphaned there, and the host ends with it.
_INIT = """
import os, time
while True:
    try:
        os.wait()
    except ChildProcessError:
        time.sleep(0.05)
"""

_SSHD_CONFIG = """
HostKey {folder}/key
AuthorizedKeysFile {folder}/key.pub
StrictModes no
UsePAM no
PermitRootLogin yes
PasswordAuthentication no
PidFile none
MaxStartups 100
"""

_SSH_CONFIG = """
IdentityFile {folder}/key
IdentitiesOnly yes
BatchMode yes
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
ConnectTimeout 10
"""


def missing(tools: Mapping[str, str] = _TOOLS) -> str | None:
    """Why this machine cannot have such hosts, in a line; None where it can.

    Args:
        tools: program → the Debian package that has it.
    """
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    absent = {package for tool, package in tools.items() if _which(tool) is None}
    if absent:
        return f"not installed: apt-get install {' '.join(sorted(absent))}"
    done = subprocess.run(["unshare", "--net", "--uts", "--mount", "--pid", "--fork", "true"], capture_output=True)
    return f"unshare: {done.stderr.decode().strip()}" if done.returncode else None


@dataclass
class Host:
    """One host: commands run inside it with its network, name and process numbers."""

    name: str
    address: str
    folder: Path
    environ: dict[str, str]
    init: int
    sshd: subprocess.Popen | None = field(default=None, repr=False)

    def inside(self, command: Sequence[str | Path], cwd: str | Path | None = None) -> list[str]:
        """The command line that runs `command` in this host from outside of it, in `cwd` or the cluster's folder."""
        enter = ["nsenter", "--target", str(self.init), "--net", "--uts", "--mount", "--pid", "--"]
        return [*enter, "env", f"--chdir={cwd or self.folder}", *map(str, command)]  # nsenter itself goes to /

    def popen(
        self,
        command: Sequence[str | Path],
        *,
        environ: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
        **kwargs,
    ) -> subprocess.Popen:
        """Start `command` on this host; it ends with the host at the latest."""
        return subprocess.Popen(self.inside(command, cwd), env=self.environ | dict(environ or {}), **kwargs)

    def run(
        self,
        command: Sequence[str | Path],
        *,
        timeout: float = 300,
        environ: Mapping[str, str] | None = None,
        cwd: str | Path | None = None,
    ) -> subprocess.CompletedProcess:
        """Run `command` on this host to its end; what it printed is captured as text."""
        env = self.environ | dict(environ or {})
        return subprocess.run(self.inside(command, cwd), env=env, timeout=timeout, capture_output=True, text=True)

    def check(self, *command: str) -> str:
        """Run a short command that must succeed, and give what it printed."""
        done = self.run(command, timeout=60)
        assert done.returncode == 0, f"{self.name}: {' '.join(command)}: {done.stderr or done.stdout}"
        return done.stdout

    def link(self, state: str) -> None:
        """Pull the network cable ("down") or plug it in again ("up")."""
        self.check("ip", "link", "set", "eth0", state)

    def start_sshd(self) -> None:
        """Listen for ssh on port 22; returns once connections are taken."""
        log = self.folder / f"sshd-{self.name}.log"
        log.unlink(missing_ok=True)
        self.sshd = self.popen([_which("sshd"), "-D", "-f", self.folder / "sshd_config", "-E", log])
        wait_until(lambda: log.exists() and "listening" in log.read_text(), f"sshd of {self.name} does not listen")

    def stop_sshd(self) -> None:
        """Refuse further ssh connections; sessions that exist go on."""
        assert self.sshd is not None
        # The process started here is nsenter, which does not pass signals on to the sshd that it waits for.
        self.check("pkill", "-x", "-f", f"sshd: {_which('sshd')} -D .*")
        self.sshd.wait(20)
        self.sshd = None

    def processes(self) -> list[str]:
        """The command lines of the processes that run on this host, without those of this call and the sshd's."""
        lines = self.check("ps", "-e", "-o", "args=").splitlines()
        return [line for line in lines[1:] if not line.startswith(("ps -e", "sshd:", "[")) and "sshd -D" not in line]


@contextmanager
def cluster(folder: Path, num_hosts: int = 2) -> Iterator[list[Host]]:
    """Make `num_hosts` hosts that reach each other by name and by ssh without a password; skip where that cannot be.

    Args:
        folder: made here; in it keys, logs, `hosts` (every host's /etc/hosts, may be edited) and `home` (the user's).
    """
    reason = missing()
    if reason:
        pytest.skip(f"no cluster of namespaces: {reason}")
    environ = _prepare(folder, num_hosts)
    with ExitStack() as stack:
        hosts = []
        for number in range(1, num_hosts + 1):
            init = stack.enter_context(_namespaces())
            hosts.append(Host(f"node{number}", f"{SUBNET}.{number}", folder, environ, init))
        stack.enter_context(_switch(hosts))
        for host in hosts:
            _set_up(host)
            host.start_sshd()
        yield hosts


def _prepare(folder: Path, num_hosts: int) -> dict[str, str]:
    """Write keys and configs; give the environment of a login on any of the hosts."""
    for name in ("bin", "home"):
        (folder / name).mkdir(parents=True)
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key")], check=True)
    (folder / "sshd_config").write_text(_SSHD_CONFIG.format(folder=folder))
    (folder / "ssh_config").write_text(_SSH_CONFIG.format(folder=folder))
    names = [f"{SUBNET}.{number} node{number}" for number in range(1, num_hosts + 1)]
    (folder / "hosts").write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
    # ssh takes no config file from the environment, and root's own must not be touched: a wrapper, first on PATH.
    wrapper = folder / "bin" / "ssh"
    wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F "{folder}/ssh_config" "$@"\n')
    wrapper.chmod(0o755)
    bin_folder = Path(sys.executable).parent
    return {
        "PATH": f"{folder / 'bin'}:{bin_folder}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": str(folder / "home"),
        "LANG": "C.UTF-8",
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "DS_ACCELERATOR": "cpu",
    }


@contextmanager
def _namespaces() -> Iterator[int]:
    """A process in namespaces of its own, whose end is the end of all in them; also when this process is killed."""
    names = ["--net", "--uts", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child"]
    command = ["setpriv", "--pdeathsig", "KILL", "unshare", *names, sys.executable, "-S", "-c", _INIT]
    outer = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    init = None
    try:
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
        wait_until(lambda: children.read_text().split() != [], "unshare started no process")
        init = int(children.read_text().split()[0])
        # --mount-proc is the last thing that is done before the program starts.
        wait_until(
            lambda: Path(f"/proc/{init}/cmdline").read_bytes().startswith(sys.executable.encode()), "no first process"
        )
        yield init
    finally:
        with contextlib.suppress(ProcessLookupError):  # a test may have killed it
            os.kill(init or outer.pid, 9)  # unshare waits for its child, and ends
        outer.wait()


@contextmanager
def _switch(hosts: Sequence[Host]) -> Iterator[None]:
    """Join the hosts by veth pairs and a bridge, which lives in a namespace of its own."""
    with _namespaces() as middle:
        inside = ["nsenter", "--target", str(middle), "--net", "ip", "link"]
        subprocess.run([*inside, "add", "br0", "type", "bridge"], check=True)
        subprocess.run([*inside, "set", "br0", "up"], check=True)
        for number, host in enumerate(hosts):
            port = f"v{number}"
            pair = ["add", port, "type", "veth", "peer", "name", "eth0", "netns", str(host.init)]
            subprocess.run([*inside, *pair], check=True)
            subprocess.run([*inside, "set", port, "master", "br0", "up"], check=True)
        yield


def _set_up(host: Host) -> None:
    """Give the host its name, address, /etc/hosts, and a /run and /dev/shm that are not the machine's."""
    host.check("hostname", host.name)
    host.check("mount", "-t", "tmpfs", "none", "/run")
    host.check("mkdir", "/run/sshd")
    host.check("mount", "-t", "tmpfs", "none", "/dev/shm")
    host.check("mount", "--bind", str(host.folder / "hosts"), "/etc/hosts")
    host.check("ip", "link", "set", "lo", "up")
    host.check("ip", "address", "add", f"{host.address}/24", "dev", "eth0")
    host.link("up")


def _which(tool: str) -> str | None:
    return shutil.which(tool, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
