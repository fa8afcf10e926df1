#!/usr/bin/env bash
# Make .venv, unless it is there, and install ds-vit into it (editable), unless it is up to date.
#
#     bash launch/setup.sh [EXTRA ...]        extras of pyproject.toml: export, jpeg, plot, mpi, hf, test, lint, docs
#
# Needs bash and Python 3.10 to 3.13, nothing else: no compiler, no MPI. Uses uv where it is installed.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv
extras=$(IFS=,; echo "$*")

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$*"; exit 1; }

# The first Python on PATH that the package supports; empty if there is none.
find_python() {
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11 python3.10 python; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 13))' 2>/dev/null; then
            command -v "$candidate"
            return
        fi
    done
}

make_venv() {
    local python
    python=$(find_python)
    [[ -n $python ]] || die "no Python 3.10 to 3.13 on PATH (python3 is $(python3 --version 2>&1 || true)); install one, or uv"
    say "making .venv with $python"
    rm -rf -- "$venv"
    trap 'rm -rf -- "$venv"' EXIT # nothing half-made stays
    if command -v uv >/dev/null; then
        uv venv --quiet --python "$python" "$venv"
    elif "$python" -c 'import ensurepip' 2>/dev/null; then
        "$python" -m venv "$venv"
    else
        die "$python cannot make a virtual environment with pip: ensurepip is missing. On Debian and Ubuntu:" \
            "apt-get install python3-venv. Without root: install uv, and run this again"
    fi
    trap - EXIT
}

install_packages() {
    local what="$root${extras:+[$extras]}"
    if command -v uv >/dev/null; then
        uv pip install --quiet --python "$venv/bin/python" --editable "$what"
        return
    fi
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$venv/bin/python" -m ensurepip >/dev/null 2>&1 ||
        die ".venv has no pip (was it made by uv?) and ensurepip is missing: remove .venv, and run this again"
    "$venv/bin/python" -m pip install --quiet --quiet --disable-pip-version-check --editable "$what"
}

# pip goes on without an extra that it does not know.
for extra in "$@"; do
    grep -qE "^$extra = \[" "$root/pyproject.toml" ||
        die "there is no extra '$extra'; there are export, jpeg, plot, mpi, hf, test, lint, docs"
done

"$venv/bin/python" -c '' 2>/dev/null || make_venv

# A stamp for the package and for each extra holds what was installed: this pyproject.toml, at this place.
wanted="$root"$'\n'"$(<"$root/pyproject.toml")"
stamps=("$venv/installed-ds-vit" "${@/#/$venv/installed-ds-vit-}")
current=true
for stamp in "${stamps[@]}"; do
    [[ -e $stamp && "$(<"$stamp")" == "$wanted" ]] || current=false
done
if ! $current; then
    say "installing ds-vit${extras:+[$extras]} and what it needs into .venv (torch is large: minutes the first time)"
    install_packages || die "the installation failed; the reason is above"
    for stamp in "${stamps[@]}"; do
        printf '%s\n' "$wanted" >"$stamp"
    done
fi
