"""The cluster of namespaces itself: what the tests of launchers and of the doctor stand on."""

from __future__ import annotations

from pathlib import Path

from cluster import cluster
from project import wait_until


def test_hosts_are_hosts(tmp_path):
    # Catches: hosts that share a network or a name, so that "across hosts" proves nothing; processes left behind.
    with cluster(tmp_path / "c", 3) as hosts:
        for number in (1, 2, 3):
            said = hosts[0].check("ssh", f"node{number}", "hostname; hostname -I").split()
            assert said == [f"node{number}", f"10.77.0.{number}"]
        hosts[1].link("down")
        assert hosts[0].run(["ssh", "-o", "ConnectTimeout=1", "node2", "true"]).returncode == 255
        hosts[1].link("up")
        hosts[0].check("ssh", "node2", "true")
        hosts[2].stop_sshd()
        refused = hosts[0].run(["ssh", "node3", "true"])
        assert refused.returncode == 255
        assert "Connection refused" in refused.stderr
        sleeper = hosts[2].popen(["sleep", "600"])
        # Until then it is what starts it.
        wait_until(lambda: "sleep 600" in hosts[2].processes(), hosts[2].processes, 20)
        hosts[2].kill()
        assert sleeper.wait(20) != 0
        inits = [host.init for host in hosts]
    assert not any(Path(f"/proc/{init}").exists() for init in inits)
