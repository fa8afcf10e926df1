#!/usr/bin/env bash
# Train by mpirun of Open MPI, MPICH or Intel MPI, on this machine or on the hosts of a hostfile.
#
#     bash launch/mpi.sh -np 16 [--hostfile hosts] [--mpirun 'mpirun --mca btl_tcp_if_include ib0'] [--restarts 3]
#         launch/train.py --deepspeed_config FILE --output DIR …
#
# Clone, Python and data lie at the same paths on every host. The hostfile is DeepSpeed's (`name slots=N`) for all three.
# Ctrl-C or SIGTERM: the ranks save and end (code 75).
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
# shellcheck source=launch/python.sh
. "$root/launch/python.sh"
exec "$python" "$root/launch/run.py" mpi "$@"
