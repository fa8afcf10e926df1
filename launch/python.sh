# shellcheck shell=bash
# Sourced by the launchers beside this file: with `root` set to the clone, sets `python` to the interpreter of the run:
# DS_VIT_PYTHON, else the clone's .venv, else python3. It must be at the same path on every host.
python=${DS_VIT_PYTHON:-$root/.venv/bin/python}
if [[ ! -x $python ]]; then
    python=$(command -v python3) || { echo "no .venv in $root (bash launch/setup.sh makes it) and no python3" >&2; exit 2; }
fi
