"""Pieces of HTML and SVG in which every text is escaped, so that no class or file name can become markup."""

from __future__ import annotations

import html
from collections.abc import Iterable


class Html(str):
    """Text that is markup already. What is a plain `str` is not."""

    __slots__ = ()


def tag(name: str, *children: str, **attributes: object) -> Html:
    """An element.

    Args:
        name: of the element.
        children: `Html` goes in as it is, any other text escaped.
        attributes: by name, `class_` for class and dashes as underscores; None leaves one out.
    """
    words = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{html.escape(str(value))}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{words}>{join(children)}</{name}>")


def join(parts: Iterable[str]) -> Html:
    """Parts one after the other, those that are no `Html` escaped."""
    return Html("".join(part if isinstance(part, Html) else html.escape(part) for part in parts))
