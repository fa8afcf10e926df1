#!/usr/bin/env bash
# Run the tests, in .venv, in three processes that take a file at a time (ranks wait for each other a third of it: two
# cores are busy then). Says when a file is done, and at the end which ten took longest; pytest's own summary comes last.
#
#     bash launch/test.sh [--coverage] [arguments of pytest]    for example: -m 'not slow', or -n 0 for one process
#
# --coverage counts the lines that run, in ranks too, and reports those that do not. Of all tests it wants 90 %.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
cd -- "$root"
bash launch/setup.sh test
if [[ ${1-} == --coverage ]]; then
    shift
    export DS_VIT_LINE_COUNTS=$root/.venv/line_counts
    .venv/bin/python tests/line_counts.py "$DS_VIT_LINE_COUNTS"
fi
exec .venv/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@"
