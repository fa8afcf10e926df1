#!/usr/bin/env bash
# Train on this machine: a log per rank, the first error last, restarts on demand.
#
#     bash launch/local.sh [--num_ranks N] [--restarts 3] launch/train.py --deepspeed_config FILE --output DIR …
#
# `bash launch/local.sh --help` lists the options. Ctrl-C or SIGTERM: the ranks save and end (code 75).
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
# shellcheck source=launch/python.sh
. "$root/launch/python.sh"
exec "$python" "$root/launch/run.py" local "$@"
