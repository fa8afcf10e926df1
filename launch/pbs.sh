#!/usr/bin/env bash
# Train on a PBS cluster: the job's hosts over ssh. From the clone's folder (or with DS_VIT_ROOT naming it):
#
#     qsub -v ARGUMENTS='--restarts 3 launch/train.py --deepspeed_config FILE --output DIR …' launch/pbs.sh
#
# qsub passes no arguments to a script, so they come in one variable, split as a shell would (quotes keep blanks).
# SLOTS=N gives the ranks per host (default: how often PBS names it, which is right for mpiprocs=N).
#PBS -N ds-vit
#PBS -l select=2:ncpus=96:ngpus=8:mpiprocs=8
#PBS -l walltime=24:00:00
#PBS -j oe
#PBS -r y
set -euo pipefail

root=${DS_VIT_ROOT:-${PBS_O_WORKDIR:?not in a PBS job}}
cd -- "$root"
# shellcheck source=launch/python.sh
. "$root/launch/python.sh"
hostfile=$(mktemp)
trap 'rm -f -- "$hostfile"' EXIT
"$python" -m ds_vit.cli hosts --from pbs ${SLOTS:+--slots "$SLOTS"} --output "$hostfile"
mapfile -d '' -t words < <("$python" -c 'import shlex, sys; sys.stdout.writelines(w + "\0" for w in shlex.split(sys.argv[1]))' \
    "${ARGUMENTS:-}")
# In the background, so that the scheduler's SIGTERM reaches it at once and not after it has ended.
"$python" "$root/launch/run.py" hostfile --hostfile "$hostfile" "${words[@]}" "$@" &
trap 'kill -TERM $!' TERM INT USR1
code=0
while wait $! || code=$?; kill -0 $! 2>/dev/null; do code=0; done
exit "$code"
