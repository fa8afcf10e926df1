"""The program that the doctor starts on a host: python -m ds_vit.tools.doctor.probe, with the question on stdin.

In: a line of JSON (`Ask`). Out, each a line after a word that a login script cannot have printed: the facts; then, for
each further line that comes in, the time here and the marks in the output folder. At the end of the input it goes.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time

from ds_vit.tools.doctor.facts import Ask, gather, mark, marks

WORD = "DS-VIT-DOCTOR "


def main() -> int:
    """Answer until the input ends; the mark is removed whatever happens."""
    words = json.loads(sys.stdin.readline())
    ask = Ask(**{**words, "names": tuple(words["names"])})
    try:
        _answer(gather(ask).pack())
        for _ in sys.stdin:
            _answer(json.dumps({"seconds": time.time(), "marks": marks(ask)}))
    finally:
        own = mark(ask)
        if own is not None:
            with contextlib.suppress(OSError):
                own.unlink(missing_ok=True)
    return 0


def _answer(text: str) -> None:
    print(WORD + text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
