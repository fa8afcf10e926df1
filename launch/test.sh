#!/usr/bin/env bash
# Run the tests, in .venv, in three processes that take a file at a time (ranks wait for each other a third of it: two
# cores are busy then). Lists the ten slowest tests; pytest's own summary comes last.
#
#     bash launch/test.sh [--coverage] [arguments of pytest]    for example: -m 'not slow', or -n 0 for one process
#
# --coverage counts the lines that run, in ranks and in programs that tests start too (coverage.py), and lists the files
# with lines that do not run. Without further arguments, less than 90 % is an error. It takes half as long again on
# Python before 3.12.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
cd -- "$root"
bash launch/setup.sh test
# Programs that tests start read the bytecode of those before: nearly a second each.
export PYTHONDONTWRITEBYTECODE=
pytest=(-m pytest -n 3 --dist loadfile --no-loadscope-reorder --durations=10)
if [[ ${1-} != --coverage ]]; then
    exec .venv/bin/python "${pytest[@]}" "$@"
fi
shift
export COVERAGE_FILE=$root/.venv/coverage/data
if .venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 12))'; then
    export COVERAGE_CORE=sysmon
fi
coverage=(.venv/bin/python -m coverage)
mkdir -p "${COVERAGE_FILE%/*}"
"${coverage[@]}" erase
code=0
"${coverage[@]}" run "${pytest[@]}" "$@" || code=$?
"${coverage[@]}" combine --quiet
least=90
(($# == 0)) || least=0
"${coverage[@]}" report --fail-under="$least" || code=2
exit "$code"
