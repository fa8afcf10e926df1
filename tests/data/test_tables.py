"""The reader of tables: quotes, line ends and separators, and errors that name the line."""

from __future__ import annotations

from pathlib import Path

import pytest

from ds_vit.data.sources.folders import read_table
from ds_vit.fault_tolerance.errors import UserError, read_text, stripped_lines

UNCLOSED = "line 2: a quote is not closed"


def rows_of(folder: Path, data: bytes, separator: str = "") -> list[list[str]]:
    """The rows of a table without its header."""
    (folder / "t.csv").write_bytes(data)
    return [cells for _, cells in read_table(str(folder / "t.csv"), separator)][1:]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b'f\tt\na\t"Quoted" start\nb\tin "the" middle\nc\t5" pipe\nd\t"A" and "B"\n',
         [["a", '"Quoted" start'], ["b", 'in "the" middle'], ["c", '5" pipe'], ["d", '"A" and "B"']]),
        (b'f,t\na,"x, ""y"""\nb,""\nc,"A, B" c\nd, "B"\n',
         [["a", 'x, "y"'], ["b", ""], ["c", '"A, B" c'], ["d", ' "B"']]),
        (b'f,t\na,"two\r\nlines, ""x"""\nb,"2\n\n3"\n', [["a", 'two\nlines, "x"'], ["b", "2\n\n3"]]),
        (b"\xef\xbb\xbff,t\r\na,b\r\n\r\nc,d", [["a", "b"], ["c", "d"]]),
        (b"f\tt\ra\tb,c\rd\te\r", [["a", "b,c"], ["d", "e"]]),
        (b"f;t;\na;b,c;\n", [["a", "b,c", ""]]),
        ("f,t\na,x\x85y\u2028z\x0cw\n".encode(), [["a", "x\x85y\u2028z\x0cw"]]),
        (b"f,t\ncaf\xe9,x\n", [["caf\udce9", "x"]]),
        (b"f,t\na," + 200_000 * b"x", [["a", 200_000 * "x"]]),
        (b"f,t\n", []),
        (b"", []),
    ],
)  # fmt: skip
def test_cells(tmp_path, data, expected):
    """Would catch a caption that loses its quotes or its end, and a table of one column."""
    assert rows_of(tmp_path, data) == expected


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'f\tt\na\t"start only\nb\tc\n', UNCLOSED),
        (b'f\tt\na.jpg\t"start only\nb.jpg\tends "here"\n', UNCLOSED),
        (b'f\tt\na.jpg\t"start only\nb.jpg\tx\nc.jpg\tends"\nd.jpg\tx\n', UNCLOSED),
        (b't\tf\n"start only\ta.jpg\nends"\tb.jpg\n', UNCLOSED),
        (b'f,t\na,"x\nb,"y\n', UNCLOSED),
        (b"f,t\na,b,c\n", "line 2: 3 columns in place of the 2 of the header"),
        (b'f,t\n"a\n",b\n\na\n', "line 5: 1 columns in place of the 2"),
        (b"f,t\na,b\0\n", "line 2: a NUL byte"),
        ("f,t\na,b\n".encode("utf-16"), "line 1: a NUL byte; unpack a compressed table, and convert UTF-16"),
    ],
)
def test_errors_name_the_line(tmp_path, data, message):
    """Would catch rows that an unclosed quote swallows (coqui STT #2321, video2dataset #117)."""
    with pytest.raises(UserError, match=message):
        rows_of(tmp_path, data)


def test_lines_of_text_files(tmp_path):
    """Would catch class names that split at U+2028, a BOM in the first one, and an encoding without its place."""
    file = tmp_path / "labels.txt"
    file.write_bytes("\ufeffant\r\nbee\u2028x\x0c y\r \ncat\x85s\n".encode())
    assert stripped_lines(read_text(file, "")) == ("ant", "bee\u2028x\x0c y", "cat\x85s")
    file.write_bytes(b"ant\ncaf\xe9\n")
    with pytest.raises(UserError, match=r"--labels .*labels.txt, line 2: .*not UTF-8; if it is Latin-1, convert"):
        read_text(file, "--labels ")
