"""Exact top-1 and top-5 of a run's weights, a checkpoint or a file, in any layout.

    deepspeed launch/eval.py runs/first
    torchrun --nproc-per-node 4 launch/eval.py runs/first --tp 2 --weights ema

`ds-vit eval` is the same for one process.
"""

import sys
from pathlib import Path

# This clone's package, installed or not, and not another clone's.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if __name__ == "__main__":
    from ds_vit.fault_tolerance.signals import end_at_signals

    end_at_signals("eval.py")
    from ds_vit.tools.evaluate import main

    sys.exit(main())
