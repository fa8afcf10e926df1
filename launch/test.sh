#!/usr/bin/env bash
# Run the tests, in .venv, in three processes that take a file at a time (ranks wait for each other a third of it: two
# cores are busy then). Says when a file is done, and at the end which ten took longest; pytest's own summary comes last.
#
#     bash launch/test.sh [--coverage] [arguments of pytest]    for example: -m 'not slow', or -n 0 for one process
#
# --coverage counts lines, of ranks too, and ends with a report; without further arguments it fails below 90 %.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
cd -- "$root"
options=(-n 3 --dist loadfile --no-loadscope-reorder)
if [[ ${1-} != --coverage ]]; then
    bash launch/setup.sh test
    exec .venv/bin/python -m pytest "${options[@]}" "$@"
fi
shift
bash launch/setup.sh test coverage
floor=$((${#} == 0 ? 90 : 0))
code=0
.venv/bin/coverage erase
.venv/bin/coverage run -m pytest "${options[@]}" "$@" || code=$?
.venv/bin/coverage combine --quiet
.venv/bin/coverage report --fail-under=$floor || code=$((code ? code : $?))
exit "$code"
