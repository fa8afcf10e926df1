"""Start a run on one machine or many, watch it, show its first error last, start it again on demand.

    python launch/run.py {local,hostfile,mpi,slurm} [options] launch/train.py [flags of launch/train.py]

The scripts in this folder (local.sh, run_hostfile.sh, mpi.sh, slurm.sbatch, pbs.sh) call it; docs/clusters.md.
"""

import signal
import sys
from pathlib import Path

# A signal that comes too early to be heard waits (Supervisor.run lets it through).
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1})

# This clone's package, installed or not, and not another clone's.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

if __name__ == "__main__":
    from ds_vit.launching.run import main

    sys.exit(main())
