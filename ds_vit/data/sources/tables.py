"""Reads tables in text files: the captions of images (`csv/…`) and the labels of multi-label data (labels.csv).

A cell is quoted as in RFC 4180 if it begins and ends with a quote: it may hold separators, line ends and doubled
quotes. Any other quote belongs to the text: `"Quoted" start` has its quotes. A quote that begins a cell and is not
closed is an error, where other readers take the next rows into the cell. Lines end with \\n, \\r\\n or \\r.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache

from ds_vit.data.sources.captions import NOT_UTF_8
from ds_vit.data.sources.source import is_image
from ds_vit.fault_tolerance.errors import LATIN_1, UserError

_SEPARATORS = ("\t", ",", ";", "|")


def read_table(path: str, separator: str = "") -> Iterator[tuple[str, list[str]]]:
    """The rows of a table, the header first: where each begins, for messages, and its cells.

    Bytes that are not UTF-8 become surrogates, because names of files may have them.

    Args:
        path: of the table.
        separator: of the columns; "" for the first of tab, comma, semicolon and bar that the header has.

    Raises:
        UserError: a quote that is not closed, or a row of another number of columns than the header.
    """
    num_columns = 0
    with open(path, encoding="utf-8-sig", errors="surrogateescape") as file:
        lines = enumerate(file, 1)
        for number, line in lines:
            where, row = f"{path}, line {number}", line.removesuffix("\n")
            if "\0" in row:
                raise UserError(f"{where}: a NUL byte; unpack a compressed table, and convert UTF-16 by iconv to UTF-8")
            if not row:
                continue
            separator = separator or next((one for one in _SEPARATORS if one in row), ",")
            cells = _cells(row, separator) if '"' in row else row.split(separator)
            if cells is None:  # up to the line that closes the quote: one with an odd number of them
                rest = [row]
                for _, following in lines:
                    rest.append(following.removesuffix("\n"))
                    if following.count('"') % 2:
                        break
                cells = _cells("\n".join(rest), separator)
                if cells is None or any(_holds_rows(cell, separator) for cell in cells):
                    raise UserError(f"{where}: a quote is not closed; close it at the end of the cell, or remove it")
            num_columns = num_columns or len(cells)
            if len(cells) != num_columns:
                raise UserError(f"{where}: {len(cells)} columns in place of the {num_columns} of the header")
            yield where, cells


@cache
def _cell(separator: str) -> re.Pattern[str]:
    """One cell and what ends it: the text in its quotes, else its text as it stands, and the separator or nothing."""
    split = re.escape(separator)
    quoted, closed = r'"([^"]*(?:""[^"]*)*)"', r'"[^"\n]*(?:""[^"\n]*)*"'
    other = rf'(?:{closed}[^{split}\n]|[^"{split}\n])[^{split}\n]*|'
    return re.compile(rf"(?:{quoted}(?={split}|\Z)|({other}))({split}|\Z)")


def _cells(row: str, separator: str) -> list[str] | None:
    """The cells of a row with quotes; None if a quote is not closed in it."""
    cells, at = [], 0
    while found := _cell(separator).match(row, at):
        cells.append(found[2] if found[1] is None else found[1].replace('""', '"'))
        at = found.end()
        if not found[3]:
            return cells
    return None


def _holds_rows(cell: str, separator: str) -> bool:
    """Whether a cell of several lines has a line of columns with the name of an image: rows that a quote took in."""
    return "\n" in cell and any(
        separator in line and any(map(is_image, line.split(separator))) for line in cell.split("\n")
    )


def require_utf8(text: str, where: str) -> str:
    """A text of a table as it is.

    Raises:
        UserError: it has bytes that are not UTF-8.
    """
    if found := NOT_UTF_8.search(text):
        raise UserError(f"{where}, column {found.start() + 1} of its text: not UTF-8; {LATIN_1}")
    return text
