"""A real Slurm on two hosts of tests/support/cluster.py: a slurmctld on node1, a slurmd on each.

with slurm(tmp_path / "slurm") as cluster:
    job = cluster.sbatch("--nodes", "2", "script.sbatch", "word")
    assert cluster.wait(job) == "COMPLETED"
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from cluster import Host, cluster, missing
from project import wait_until

_TOOLS = {"slurmctld": "slurmctld", "slurmd": "slurmd", "sbatch": "slurm-client", "ip": "iproute2"}

# No munge: both daemons are this test's. A requeued job waits until its credential has expired, two minutes by default.
_CONF = """
ClusterName=test
SlurmctldHost=node1
SlurmUser=root
AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SchedulerParameters=sched_interval=1,bf_interval=1
MpiDefault=none
ReturnToService=2
KillWait=20
SlurmdParameters=config_overrides
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
StateSaveLocation={folder}/state
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdSpoolDir={folder}/slurmd-%n
NodeName=node[1-2] CPUs=4 RealMemory=1000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES State=UP OverTimeLimit=0
"""


@dataclass
class Slurm:
    """The cluster as a person on node1 sees it."""

    hosts: list[Host]
    folder: Path

    def run(self, *command: str, cwd: Path | None = None, timeout: float = 120) -> str:
        """Run a command of Slurm's that must succeed; gives what it printed."""
        done = self.hosts[0].run(command, timeout=timeout, cwd=cwd)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr or done.stdout}"
        return done.stdout

    def sbatch(self, *words: str, cwd: Path | None = None) -> str:
        """Submit a job; gives its number."""
        return self.run("sbatch", "--parsable", *words, cwd=cwd).strip()

    def job(self, number: str) -> dict[str, str]:
        """What `scontrol show job` says of it."""
        text = self.run("scontrol", "--oneliner", "show", "job", number)
        return dict(word.split("=", 1) for word in text.split() if "=" in word)

    def wait(self, number: str, seconds: float = 300) -> str:
        """Wait until the job has ended for good; gives its state."""
        going = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING")
        wait_until(lambda: self.job(number)["JobState"] not in going, self.logs, seconds)
        return self.job(number)["JobState"]

    def logs(self) -> str:
        """The ends of the daemons' logs."""
        return "\n".join(f"---- {path.name}\n{path.read_text()[-3000:]}" for path in self.folder.glob("slurm*.log"))


@contextmanager
def slurm(folder: Path) -> Iterator[Slurm]:
    """Start the daemons on two hosts, and wait until both nodes are idle; skip where that cannot be."""
    reason = missing(_TOOLS)
    if reason:
        pytest.skip(f"no Slurm: {reason}")
    with cluster(folder / "hosts", 2) as hosts:
        (folder / "state").mkdir()
        (folder / "slurm.conf").write_text(_CONF.format(folder=folder))
        for host in hosts:
            host.environ["SLURM_CONF"] = str(folder / "slurm.conf")
        here = Slurm(hosts, folder)
        output = (folder / "daemons.log").open("w")
        hosts[0].popen(["slurmctld", "-D"], stdout=output, stderr=output)
        for host in hosts:
            host.popen(["slurmd", "-D", "-N", host.name], stdout=output, stderr=output)
        sinfo = ["sinfo", "--noheader", "--format", "%D %T"]
        wait_until(lambda: hosts[0].run(sinfo, timeout=60).stdout.split() == ["2", "idle"], here.logs, 90)
        yield here
