"""Small real collectives over all hosts, and what their figures say about the network."""

from __future__ import annotations

import json
import statistics
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ds_vit.tools.doctor.findings import Finding, Run
from ds_vit.tools.doctor.interfaces import link_of
from ds_vit.tools.doctor.probe import WORD
from ds_vit.tools.doctor.remote import Answer, Way

MAX_LATENCY_SECONDS = 0.005
"""Between two hosts of one cluster: TCP takes 20 to 200 microseconds, InfiniBand 2 to 10."""

_SLOW_SHARE = 0.5  # of the median pair's bandwidth
_LINK_SHARE = 0.25  # of the link's rate: gloo and one TCP connection reach that, NCCL much more
_LOST_SHARE = 0.004  # of TCP's segments; without any loss busy hosts send one in a thousand again
_FEW_SEGMENTS = 4  # sent again prove nothing
_MAX_RANKS_ON_CPU = 2  # a host: more measure its cores


@dataclass(frozen=True)
class Figures:
    """What the ranks measured; see `measure.measure`. `problem` where they could not."""

    hosts: tuple[str, ...]
    measured: Mapping[str, Any] | None = None
    problem: str = ""
    culprits: tuple[str, ...] = ()


def run_collectives(answers: Sequence[Answer], way: Way, address: str, port: int, seconds: float) -> Figures:
    """Start ranks on every host, and wait for their figures.

    Args:
        answers: of the hosts that are reachable.
        way: how programs are started there.
        address, port: where rank 0 will listen.
        seconds: all of it takes no longer.
    """
    hosts = tuple(answer.host.name for answer in answers)
    counts = [_ranks_on(answer) for answer in answers]
    world, leaders = sum(counts), [sum(counts[:i]) for i in range(len(counts))]
    if world == 1:
        return Figures(hosts)
    deadline = time.monotonic() + seconds
    ranks: list[_Rank] = []
    try:
        for answer, count, leader in zip(answers, counts, leaders, strict=True):
            for local_rank in range(count):
                words: dict[str, object] = {
                    "--rank": leader + local_rank,
                    "--world-size": world,
                    "--local-rank": local_rank,
                }
                words |= {"--port": port, "--address": address, "--leaders": ",".join(map(str, leaders))}
                words |= {"--seconds": seconds / 2}
                arguments = [str(word) for pair in words.items() for word in pair]
                command = way.command(answer.host.name, "ds_vit.tools.doctor.measure", arguments=arguments)
                ranks.append(_Rank(answer.host.name, command, way))
        while time.monotonic() < deadline:
            if ranks[0].figures is not None:
                return Figures(hosts, measured=ranks[0].figures)
            failed = [rank for rank in ranks if rank.process.poll() not in (None, 0)]
            if failed:
                time.sleep(1.0)  # what the first says last
                return Figures(hosts, problem=failed[0].last_line(), culprits=(failed[0].host,))
            time.sleep(0.1)
        problem = f"the ranks did not meet and finish within {seconds:.0f} s"
        return Figures(hosts, problem=problem, culprits=hosts)
    finally:
        for rank in ranks:
            rank.end()


def judge(figures: Figures, answers: Sequence[Answer], run: Run) -> Iterator[Finding]:
    """What the figures say: no meeting, lost packets, slow pairs, less than the link should give."""
    remedy = "the interface: GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME in .deepspeed_env; a firewall between the hosts"
    if figures.problem:
        yield Finding("collectives", "error", figures.culprits, f"ranks cannot talk: {figures.problem}", remedy)
    if figures.measured is None:
        return
    for host, tcp in zip(figures.hosts, figures.measured["tcp"], strict=False):  # none where it was not measured
        if tcp["again"] > max(_FEW_SEGMENTS, _LOST_SHARE * tcp["sent"]):
            share = 100 * tcp["again"] / tcp["sent"]
            what = f"{share:.1f} % of its TCP segments were lost on the way and sent again ({tcp['again']})"
            remedy = "ip -s link show DEV and ethtool -S DEV there: cable, duplex, switch port; tc qdisc show"
            yield Finding("loss", "error", (host,), what, remedy)
    pairs = figures.measured["pairs"]
    if not pairs:
        return
    usual = statistics.median(pair["bytes_per_second"] for pair in pairs)
    by_name = {answer.host.name: answer for answer in answers}
    for pair in pairs:
        names = (figures.hosts[pair["a"]], figures.hosts[pair["b"]])
        latency, rate = pair["latency_seconds"], pair["bytes_per_second"]
        link = min(link_of(by_name[name], run)[1] for name in names)
        if latency > MAX_LATENCY_SECONDS:
            what = f"a small message takes {latency * 1e3:.1f} ms one way (a cluster's network: well below 1 ms)"
            remedy = f"ping {names[1]} from {names[0]}: cable, switch, a route through another building, tc qdisc"
            yield Finding("latency", "error", names, what, remedy)
        elif len(pairs) > 2 and rate < _SLOW_SHARE * usual:
            what = f"{gbits(rate)} between them, {gbits(usual)} between the others"
            yield Finding("bandwidth", "error", names, what, "ethtool or ibstat on both: a port at a lower rate")
        elif link and rate * 8e-9 < _LINK_SHARE * link:
            what = f"{gbits(rate)} between them over a link of {link:g} Gbit/s"
            yield Finding("bandwidth", "warning", names, what, "iperf3 between them: errors, another interface taken")


def slowest(figures: Figures) -> str:
    """The slowest pair of hosts, in words; "" for fewer than two hosts."""
    pairs = figures.measured["pairs"] if figures.measured else []
    if not pairs:
        return ""
    worst = min(pairs, key=lambda pair: pair["bytes_per_second"])
    a, b = figures.hosts[worst["a"]], figures.hosts[worst["b"]]
    return f"{a} - {b}: {worst['latency_seconds'] * 1e6:.0f} us, {gbits(worst['bytes_per_second'])}"


def gbits(bytes_per_second: float) -> str:
    """Bytes a second in a network's unit."""
    return f"{bytes_per_second * 8e-9:.2f} Gbit/s"


def _ranks_on(answer: Answer) -> int:
    assert answer.facts is not None
    have = len(answer.facts.accelerators)
    return min(answer.host.slots, have) if have else min(answer.host.slots, _MAX_RANKS_ON_CPU)


class _Rank:
    """A rank's process, here or behind an ssh."""

    def __init__(self, host: str, command: Sequence[str], way: Way) -> None:
        self.host = host
        self.figures: Mapping[str, Any] | None = None
        self._said: list[str] = []
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, text=True, errors="replace", cwd=way.cwd
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if WORD in line:
                self.figures = json.loads(line.split(WORD, 1)[1])
            elif line.strip():
                self._said = [*self._said[-99:], line.strip()]

    def last_line(self) -> str:
        """The error that it ended with: the last line that looks like one."""
        errors = [line for line in self._said if "rror" in line and not line.startswith(("[W", "File"))]
        return (errors or self._said or [f"exit code {self.process.poll()}"])[-1][:300]

    def end(self) -> None:
        """Close its stdin, upon which it goes (on the other side of an ssh too); kill what does not."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(5)
