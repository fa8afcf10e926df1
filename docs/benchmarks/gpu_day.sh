#!/usr/bin/env bash
# Measure on one GPU what needs one, in parts of at most 9 minutes, the most valuable first. Starts again where it ended.
#
#     bash docs/benchmarks/gpu_day.sh [--rehearse] [PART ...]
#
# Parts: see below. Each writes OUT/PART.json when it is done, and OUT/PART.log meanwhile; a part whose JSON is there is
# skipped, one that fails or takes too long leaves none. The part `steps` keeps what it has measured in OUT/steps/, and
# measures the rest when it is started again. docs/benchmarks/gpu_tables.py makes tables of them.
# --rehearse runs each part in its smallest form on a CPU, which shows that it runs and says nothing about a GPU.
#
# From the environment: PYTHON (.venv/bin/python, else python3), OUT (docs/benchmarks/gpu; a rehearsal: a new temporary
# folder), LIMIT (seconds of a part, 540), BUDGET (seconds in all, 1500), DS_VIT_TEST_DATA (as for the tests), and WHEELS: a
# folder of wheels (`pip wheel -w wheels '.[test,jpeg]'`) to be installed into PYTHON's environment before. Nothing is
# taken from the network.
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/../.." && pwd -P)
parts=(steps nccl tests runs optimizers ranks decode ladder plan ladder-scaling amp layout)
python=${PYTHON-}
if [[ -z $python ]]; then
    python=$root/.venv/bin/python
    [[ -x $python ]] || python=python3
fi
limit=${LIMIT-540}
budget=${BUDGET-1500}
out=${OUT-$root/docs/benchmarks/gpu}
rehearse=()
if [[ ${1-} == --rehearse ]]; then
    shift
    rehearse=(--rehearse)
    out=${OUT-$(mktemp -d)}
    export DS_ACCELERATOR=cpu CUDA_VISIBLE_DEVICES='' OMP_NUM_THREADS=1
fi
for part in "$@"; do
    [[ " ${parts[*]} " == *" $part "* ]] || { echo "gpu_day: no part $part; there are: ${parts[*]}" >&2; exit 2; }
done
(($# == 0)) || parts=("$@")
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
mkdir -p -- "$out"

if [[ -n ${WHEELS-} ]]; then
    "$python" -m pip install --quiet --no-index --find-links "$WHEELS" "$WHEELS"/*.whl
fi

failed=()
for part in "${parts[@]}"; do
    if [[ -e $out/$part.json ]]; then
        echo "gpu_day: $part: skipped, $out/$part.json exists"
        continue
    fi
    left=$((budget - SECONDS))
    if ((left <= 0)); then
        echo "gpu_day: $part: not started, the $budget s are spent"
        failed+=("$part")
        continue
    fi
    begun=$SECONDS
    code=0
    timeout --kill-after=20 "$((left < limit ? left : limit))" "$python" "$root/docs/benchmarks/gpu_part.py" "$part" \
        --output "$out/$part.part" "${rehearse[@]}" >"$out/$part.log" 2>&1 || code=$?
    if ((code == 0)); then
        mv -- "$out/$part.part" "$out/$part.json"
        echo "gpu_day: $part: done in $((SECONDS - begun)) s"
    else
        rm -f -- "$out/$part.part"
        why="failed with code $code"
        ((code != 124 && code != 137)) || why="ended by its time limit"
        echo "gpu_day: $part: $why after $((SECONDS - begun)) s, see $out/$part.log" >&2
        failed+=("$part")
    fi
done
((${#failed[@]} == 0)) || { echo "gpu_day: without a result: ${failed[*]}; start again for these" >&2; exit 1; }
