"""Tables of a page."""

from __future__ import annotations

from collections.abc import Sequence

from ds_vit.monitoring.report.html import Html, tag

_LONG = 20  # letters, which a column must not break into a syllable a line


def table(title: str, header: Sequence[str], lines: Sequence[Sequence[str]], *, wide: bool = False) -> Html:
    """A table that scrolls within its card; columns of numbers stand to the right."""
    right = [
        bool(lines) and all(line[at][:1].isdigit() or line[at] == "-" for line in lines) for at in range(len(header))
    ]

    look = [
        "n" if right[at] else "long" if any(len(line[at]) > _LONG for line in lines) else None
        for at in range(len(header))
    ]

    def row(cell: str, words: Sequence[str]) -> Html:
        return tag("tr", *(tag(cell, word, class_=look[at]) for at, word in enumerate(words)))

    body = tag("table", tag("thead", row("th", header)), tag("tbody", *(row("td", line) for line in lines)))
    return tag("figure", tag("figcaption", title), tag("div", body, class_="scroll"), class_=f"card{' wide' * wide}")
