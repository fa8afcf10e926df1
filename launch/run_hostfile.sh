#!/usr/bin/env bash
# Train on the hosts of a hostfile, over ssh. Run it on any machine that reaches them all.
#
#     bash launch/run_hostfile.sh --hostfile hosts [--env-file launch/infiniband.env] [--include LIST | --exclude LIST]
#         [--restarts 3] launch/train.py --deepspeed_config FILE --output DIR …
#
# Clone, Python and data lie at the same paths on every host. launch/hostfile.example shows a hostfile. Rank 0's address is
# the first host's name (--master_addr for another), the port a free one there. Ctrl-C or SIGTERM: save and end (75).
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
# shellcheck source=launch/python.sh
. "$root/launch/python.sh"
exec "$python" "$root/launch/run.py" hostfile "$@"
