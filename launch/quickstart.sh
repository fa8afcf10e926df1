#!/usr/bin/env bash
# Train a small Vision Transformer on 1,797 real handwritten digits through DeepSpeed: all GPUs in bf16, else 2 CPU ranks.
# Then let it name three digits that it was not trained on.
#
#     bash launch/quickstart.sh [flags of launch/train.py]
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
cd -- "$root"
bash launch/setup.sh
python=$root/.venv/bin/python

num_ranks=$("$python" -c 'import torch; print(torch.cuda.device_count())')
if ((num_ranks > 0)); then
    # The recipe's global batch is 64: the most ranks that divide it (4 of 7 GPUs).
    while ((64 % num_ranks)); do num_ranks=$((num_ranks - 1)); done
    ranks=(--num_gpus "$num_ranks")
    config=ds_configs/zero1_bf16.json
else
    num_ranks=2
    ranks=(--num_accelerators "$num_ranks")
    config=ds_configs/cpu_zero1_fp32.json
    export DS_ACCELERATOR=cpu
fi
port=$("$python" -c 'from ds_vit.launching.this_host import free_port; print(free_port())')

printf -v output 'runs/%(%Y%m%d-%H%M%S)T-digits' -1
words=("$@")
for ((i = 0; i < $#; i++)); do
    case ${words[i]} in
    --output) output=${words[i + 1]:-} ;;
    --output=*) output=${words[i]#*=} ;;
    esac
done

show() {
    printf 'quickstart: %s' "${DS_ACCELERATOR:+DS_ACCELERATOR=$DS_ACCELERATOR }"
    printf '%q ' "$@"
    printf '\n'
}

command=(.venv/bin/deepspeed --quiet "${ranks[@]}" --master_port "$port" launch/train.py
    --deepspeed_config "$config" --recipe launch/recipes/digits.yaml --batch-size "$((64 / num_ranks))" --output "$output" "$@")
printf 'quickstart: in %s\n' "$root"
show "${command[@]}"
# Through the interpreter: the first line of a script cannot name one whose path has a space in it.
"$python" "${command[@]}"

# Another task (--task mae) has no classes, and evaluation alone writes no weights.
[[ -f $output/classes.json && -f $output/model.safetensors ]] || exit 0
command=(launch/held_out_digits.py "$output/held-out")
show .venv/bin/python "${command[@]}"
"$python" "${command[@]}"
command=(.venv/bin/ds-vit predict "$output" "$output"/held-out/*.png --top-k 3)
show "${command[@]}"
"$python" "${command[@]}"
printf 'quickstart: open the report in a browser: %s\n' "$output/report.html"
