"""Train a few steps in each layout, and print how far each is from the reference.

    python launch/parity.py -n 4 --deepspeed_config FILE [flags of train.py] --layouts "pp2 tp2, tp2, zero3"

It starts the ranks itself, by torchrun; `--launcher` names another launcher. docs/parallelism.md reads its output.
"""

import sys
from pathlib import Path

# This clone's package, installed or not, and not another clone's.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ds_vit.tools.parity import main

if __name__ == "__main__":
    sys.exit(main())
