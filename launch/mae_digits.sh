#!/usr/bin/env bash
# What pretraining without labels gives: masked autoencoding of 1,442 digits, then training on 10 % of their labels, from
# the pretrained encoder and from nothing. Two CPU ranks.
#
#     bash launch/mae_digits.sh [FOLDER]
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
cd -- "$root"
folder=${1:-runs/mae_digits}
export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1

train() {
    bash launch/local.sh --num_ranks 2 launch/train.py --deepspeed_config ds_configs/cpu_zero1_fp32.json "$@"
}
labels=(--recipe launch/recipes/digits.yaml --train-split 'train[:10%]' --batch-size 16 --epochs 100 --warmup-epochs 10
    --eval-interval 25)
train --recipe launch/recipes/mae_digits.yaml --batch-size 32 --output "$folder/pretrained"
train "${labels[@]}" --initial-checkpoint "$folder/pretrained/model.safetensors" --output "$folder/fine-tuned"
train "${labels[@]}" --output "$folder/from-nothing"
for name in fine-tuned from-nothing; do
    printf 'top-1 on 10 %% of the labels, %s: ' "$name"
    sed -n 's/.*"last_top1": \([0-9.]*\).*/\1 %/p' "$folder/$name/summary.json"
done
