"""Train a Vision Transformer with DeepSpeed.

    deepspeed launch/train.py --deepspeed_config ds_configs/zero1_bf16.json --model vit_base_patch16_224 --data-dir DIR

The same under torchrun, mpirun and plain python; docs/launching.md has a line for each.
"""

import sys
from pathlib import Path

# This clone's package, installed or not, and not another clone's.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if __name__ == "__main__":
    from ds_vit.fault_tolerance.signals import end_at_signals

    end_at_signals("train.py")
    from ds_vit.train import main

    sys.exit(main())
