"""The share of time in which a cluster makes progress: failures, checkpoints, restarts and stragglers, simulated.

Failures of each host come at random (exponential gaps); a failure costs the restart and the work since the last
checkpoint. The gaps are drawn evenly over their distribution (stratified), so that the same question has the same
answer and the best interval between checkpoints can be found to a per cent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

_DRAWS = 200_000


@dataclass(frozen=True)
class Reliability:
    """How a cluster fails, and what that costs.

    Attributes:
        host_hours: mean time between failures of one host. The default is that of Llama 3's pre-training (Dubey et al.
            2024, section 3.3.4): 419 unexpected interruptions in 54 days of 2,048 hosts.
        checkpoint_seconds: pause of training for a checkpoint.
        restart_seconds: from a failure to the next step.
        repair_hours: until a failed host is back or replaced.
        spread: standard deviation of a host's step time, as a share of it; a step waits for the slowest host.
        elastic: the others continue without a failed host; else all wait for it.
    """

    host_hours: float = 54 * 24 * 2048 / 419
    checkpoint_seconds: float = 15.0
    restart_seconds: float = 300.0
    repair_hours: float = 0.0
    spread: float = 0.01
    elastic: bool = True


@dataclass(frozen=True)
class Goodput:
    """The result.

    Attributes:
        hosts: how many.
        failure_hours: mean time between failures of all together.
        interval_seconds: of training between checkpoints, the best found.
        young_daly_seconds: the same by Daly's formula.
        share: of the progress of hosts that neither fail nor differ.
    """

    hosts: int
    failure_hours: float
    interval_seconds: float
    young_daly_seconds: float
    share: float


def young_daly(checkpoint_seconds: float, failure_seconds: float) -> float:
    """The best training time between checkpoints (Daly 2006, "A higher order estimate of the optimum checkpoint
    interval", equation 37; its first term without the cost is Young's of 1974).

    Args:
        checkpoint_seconds: cost of one.
        failure_seconds: mean time between failures.
    """
    if checkpoint_seconds >= 2 * failure_seconds:
        return failure_seconds
    ratio = checkpoint_seconds / (2 * failure_seconds)
    return math.sqrt(2 * checkpoint_seconds * failure_seconds) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - (
        checkpoint_seconds
    )


def simulate(hosts: int, how: Reliability) -> Goodput:
    """Find the best interval between checkpoints, and the share of time that then makes progress.

    Args:
        hosts: how many.
        how: costs and rates of failures.
    """
    failure_seconds = how.host_hours * 3600 / hosts
    gaps = failure_seconds * -np.log1p(-(np.arange(_DRAWS) + 0.5) / _DRAWS)
    guess = young_daly(how.checkpoint_seconds, failure_seconds)
    intervals = guess * np.exp(np.linspace(-0.7, 0.7, 57))
    shares = np.array([_progress(gaps, interval, how) for interval in intervals])
    # The maximum is flat: a parabola through the neighbourhood locates it better than any one draw.
    a, b, _ = np.polyfit(np.log(intervals / guess), shares, 2)
    best = guess * math.exp(-b / (2 * a)) if a < 0 else float(intervals[shares.argmax()])
    repair, repairs_a_second = how.repair_hours * 3600, 1 / failure_seconds
    # Hosts under repair: their share of the work is lost, or all of it.
    down = repair * repairs_a_second
    kept = max(0.0, 1 - down / hosts) if how.elastic else 1 / (1 + down)
    share = _progress(gaps, best, how) * kept / slowest(hosts, how.spread)
    return Goodput(hosts, failure_seconds / 3600, best, guess, share)


def slowest(hosts: int, spread: float) -> float:
    """The step time of the slowest of several hosts, over that of a mean one: the median of the largest of N draws."""
    return 1 + spread * max(0.0, NormalDist().inv_cdf(0.5 ** (1 / hosts)))


def _progress(gaps: np.ndarray, interval: float, how: Reliability) -> float:
    """Seconds of kept work for each second between failures."""
    left = np.maximum(0.0, gaps - how.restart_seconds)
    kept = np.floor(left / (interval + how.checkpoint_seconds)) * interval
    return float(kept.sum() / gaps.sum())
