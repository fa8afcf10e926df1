#!/usr/bin/env bash
# Make .venv, unless it is there, and install ds-vit into it (editable), unless it is up to date.
#
#     bash launch/setup.sh [EXTRA ...]        extras of pyproject.toml: export, jpeg, plot, mpi, hf, text, test, lint, docs
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

# Whether a Python has torch: of a module or a container, built for the machine. Not of a virtual environment, whose
# packages .venv would not see.
provides_torch() {
    local ask='import importlib.util as u, sys; print(sys.prefix == sys.base_prefix and u.find_spec("torch") is not None)'
    [[ $("$1" -c "$ask" 2>/dev/null) == True ]]
}

# Say so if the NVIDIA driver is too old for PyPI's torch: CUDA 13 needs 580, CUDA 12 needs 525.
check_driver() {
    local version major
    version=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null) || return 0
    version=${version%%$'\n'*}
    major=${version%%.*}
    [[ $major =~ ^[0-9]+$ ]] && ((major < 580)) || return 0
    [[ -z ${PIP_INDEX_URL-}${PIP_EXTRA_INDEX_URL-}${PIP_FIND_LINKS-}${UV_INDEX-}${UV_INDEX_URL-}${UV_EXTRA_INDEX_URL-} ]] || return 0
    if ((major < 525)); then
        say "warning: the NVIDIA driver $version is older than 525: torch cannot use these GPUs until it is updated"
    else
        say "warning: the NVIDIA driver $version is older than 580, which PyPI's torch (CUDA 13) needs. Stop here and use" \
            "PyTorch's index for cu126: PIP_EXTRA_INDEX_URL=ADDRESS bash launch/setup.sh (docs/install_cluster.md)"
    fi
}

make_venv() {
    local python
    python=$(find_python)
    [[ -n $python ]] || die "no Python 3.10 to 3.13 on PATH (python3 is $(python3 --version 2>&1 || true)); install one, or uv"
    say "making .venv with $python"
    rm -rf -- "$venv"
    trap 'rm -rf -- "$venv"' EXIT # nothing half-made stays
    if provides_torch "$python"; then
        say "keeping the torch that $python provides"
        "$python" -m venv --system-site-packages "$venv" || die "$python cannot make a virtual environment"
    elif command -v uv >/dev/null; then
        uv venv --quiet --python "$python" "$venv"
    elif "$python" -c 'import ensurepip' 2>/dev/null; then
        "$python" -m venv "$venv"
    else
        die "$python cannot make a virtual environment with pip: ensurepip is missing. On Debian and Ubuntu:" \
            "apt-get install python3-venv. Without root: install uv, and run this again"
    fi
    trap - EXIT
}

# What goes on while an installer says nothing: on a terminal one line that moves, elsewhere a line after 10 s, 30 s, ...
watch() {
    local log=$1 seconds=0 due=10 said
    # Not the script's own outputs: whoever reads them would wait for the last sleep.
    while sleep 1 >/dev/null 2>&1; do
        seconds=$((seconds + 1))
        said=$(grep -E '^ *(Collecting|Downloading|Using cached|Building|Preparing|Installing)' "$log" 2>/dev/null) || said=
        said=${said##*$'\n'}
        said=${said#"${said%%[! ]*}"}
        if [[ -t 2 ]]; then
            printf '\r\033[Ksetup: %d s  %.60s' "$seconds" "$said" >&2
        elif ((seconds >= due)); then
            [[ -n $said ]] || said="still installing"
            say "$seconds s: ${said:0:100}"
            due=$((3 * due))
        fi
    done
}

# An installer that says nothing or writes into the log, watched; its exit status.
watched() {
    local log=$1 watcher code=0
    shift
    : >"$log"
    watch "$log" &
    watcher=$!
    trap 'kill "$watcher" 2>/dev/null' EXIT
    "$@" || code=$?
    kill "$watcher" 2>/dev/null || true
    wait "$watcher" 2>/dev/null || true
    trap - EXIT
    [[ ! -t 2 ]] || printf '\r\033[K' >&2
    return "$code"
}

with_pip() {
    "$venv/bin/python" -m pip install --disable-pip-version-check --progress-bar off --editable "$1" >"$2" 2>&1
}

install_packages() {
    local what="$root${extras:+[$extras]}" log=$venv/installing.log
    # uv does not see the packages of the Python outside.
    if command -v uv >/dev/null && ! grep -q 'include-system-site-packages = true' "$venv/pyvenv.cfg" 2>/dev/null; then
        if [[ -t 2 ]]; then # it shows what it does
            uv pip install --python "$venv/bin/python" --editable "$what"
        else
            watched "$log" uv pip install --quiet --python "$venv/bin/python" --editable "$what"
        fi
        return
    fi
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$venv/bin/python" -m ensurepip >/dev/null 2>&1 ||
        die ".venv has no pip (was it made by uv?) and ensurepip is missing: remove .venv, and run this again"
    if ! watched "$log" with_pip "$what" "$log"; then
        grep -vE '^ *(Requirement already|Collecting|Obtaining|Downloading|Using cached)' "$log" >&2 || true
        return 1
    fi
}

# pip goes on without an extra that it does not know.
for extra in "$@"; do
    grep -qE "^$extra = \[" "$root/pyproject.toml" ||
        die "there is no extra '$extra'; there are export, jpeg, plot, mpi, hf, text, test, lint, docs"
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
    grep -q 'include-system-site-packages = true' "$venv/pyvenv.cfg" 2>/dev/null || check_driver
    say "installing ds-vit${extras:+[$extras]} and what it needs into .venv (torch is large: minutes the first time)"
    install_packages || die "the installation failed; the reason is above"
    for stamp in "${stamps[@]}"; do
        printf '%s\n' "$wanted" >"$stamp"
    done
fi
