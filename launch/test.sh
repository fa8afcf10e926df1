#!/usr/bin/env bash
# Run the tests, in .venv, in three processes that take a file at a time (ranks wait for each other a third of it: two
# cores are busy then). Says when a file is done, and at the end which ten took longest; pytest's own summary comes last.
#
#     bash launch/test.sh [arguments of pytest]        for example: -m 'not slow', or -n 0 for one process
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
cd -- "$root"
bash launch/setup.sh test
exec .venv/bin/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@"
