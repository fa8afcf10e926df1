"""`python -m ds_vit …` is `ds-vit …`; a signal that arrives during the imports ends it without a traceback."""

from __future__ import annotations

import signal
import sys

from ds_vit.fault_tolerance.signals import end_at_signals


def main() -> int:
    """Run `ds-vit` on this process's arguments."""
    before = end_at_signals("ds-vit")
    from ds_vit import cli

    if sys.argv[1:2] not in (["train"], ["eval"]):  # which import torch first, and then record signals
        for number, handler in before.items():
            signal.signal(number, handler)
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
