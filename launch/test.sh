#!/usr/bin/env bash
# Run the tests, in .venv.
#
#     bash launch/test.sh [arguments of pytest]        for example: -m 'not slow'
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
cd -- "$root"
bash launch/setup.sh test
exec .venv/bin/python -m pytest "$@"
