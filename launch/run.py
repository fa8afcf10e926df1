"""Start a run on one machine or many, watch it, show its first error last, start it again on demand.

    python launch/run.py {local,hostfile,mpi,slurm} [options] launch/train.py [flags of launch/train.py]

The scripts beside this file (local.sh, run_hostfile.sh, mpi.sh, slurm.sbatch, pbs.sh) call it; docs/clusters.md.
"""

import sys
from pathlib import Path

# This clone's package, installed or not, and not another clone's.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from ds_vit.launching.run import main

if __name__ == "__main__":
    sys.exit(main())
