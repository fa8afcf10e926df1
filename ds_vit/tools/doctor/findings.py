"""What is found about hosts, in words: a finding, and the hosts grouped by what they say."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from ds_vit.tools.doctor.facts import Facts
from ds_vit.tools.doctor.remote import Answer


@dataclass(frozen=True)
class Finding:
    """What is wrong.

    Attributes:
        check: one word for the kind of fault.
        severity: "error" or "warning".
        hosts: names as the hostfile has them.
        what: the fault, with its numbers.
        remedy: what to do, a command where there is one.
    """

    check: str
    severity: str
    hosts: tuple[str, ...]
    what: str
    remedy: str


@dataclass(frozen=True)
class Run:
    """What the run would use.

    Attributes:
        environ: the variables that go to every host.
        output: `--output`, "" for none.
        port: where rank 0 will listen.
    """

    environ: Mapping[str, str]
    output: str = ""
    port: int = 0


Found = Iterator[Finding]


def answered(answers: Sequence[Answer]) -> Iterator[tuple[Answer, Facts]]:
    """The hosts that have answered, and their facts."""
    for answer in answers:
        if answer.facts is not None:
            yield answer, answer.facts


@dataclass(frozen=True)
class Differing:
    """Values by host, where they are not all equal; `odd` are the hosts of the rarer values."""

    by_value: Mapping[str, Sequence[str]]
    odd: tuple[str, ...]

    def __str__(self) -> str:
        return "; ".join(f"{value or 'none'} on {in_words(hosts)}" for value, hosts in self.by_value.items())


def in_words(hosts: Sequence[str]) -> str:
    """The first hosts, and how many there are more."""
    return ", ".join(hosts[:6]) + (f" and {len(hosts) - 6} more" if len(hosts) > 6 else "")


def differences(
    answers: Sequence[Answer], value: Callable[[Facts], str], *, left_out: str | None = None
) -> Differing | None:
    """Group hosts by a value of their facts; None where all agree."""
    return grouped({answer.host.name: value(facts) for answer, facts in answered(answers)}, left_out)


def grouped(values: Mapping[str, str], left_out: str | None = None) -> Differing | None:
    """Group hosts by a value; None where all agree. With as many on each side the first host's value is the norm."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name, value in values.items():
        if value != left_out:
            groups[value].append(name)
    if len(groups) < 2:
        return None
    norm = max(groups, key=lambda value: len(groups[value]))  # of equals the first
    odd = tuple(name for value, names in groups.items() if value != norm for name in names)
    return Differing(dict(groups), odd)
