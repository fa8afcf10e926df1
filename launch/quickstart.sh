#!/usr/bin/env bash
# Train a small Vision Transformer on 1,797 real handwritten digits through DeepSpeed: all GPUs in bf16, else 2 CPU ranks.
#
#     bash launch/quickstart.sh [flags of launch/train.py]
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
cd -- "$root"
bash launch/setup.sh
python=$root/.venv/bin/python

num_ranks=$("$python" -c 'import torch; print(torch.cuda.device_count())')
if ((num_ranks > 0)); then
    ranks=(--num_gpus "$num_ranks")
    config=ds_configs/zero1_bf16.json
else
    num_ranks=2
    ranks=(--num_accelerators "$num_ranks")
    config=ds_configs/cpu_zero1_fp32.json
    export DS_ACCELERATOR=cpu
fi
port=$("$python" -c 'import socket; s = socket.socket(); s.bind(("", 0)); print(s.getsockname()[1])')

command=(.venv/bin/deepspeed --quiet "${ranks[@]}" --master_port "$port" launch/train.py
    --deepspeed_config "$config" --recipe launch/recipes/digits.yaml --batch-size "$((64 / num_ranks))" "$@")
printf 'quickstart: in %s\nquickstart: %s' "$root" "${DS_ACCELERATOR:+DS_ACCELERATOR=$DS_ACCELERATOR }"
printf '%q ' "${command[@]}"
printf '\n'
# Through the interpreter: the first line of a script cannot name one whose path has a space in it.
exec "$python" "${command[@]}"
