#!/usr/bin/env bash
# DINO on a tenth of CIFAR-10, without labels: the k-NN accuracy of the teacher's features before and after training, and
# the same by a plain loop of lightly's on the same images (needs `bash launch/setup.sh test`). Two CPU ranks.
#
#     bash launch/dino_cifar.sh [DIR [FOLDER [SEED]]]
#
# DIR has the folders train and test, each with a folder of images per class; without it torchvision downloads CIFAR-10.
set -euo pipefail

dir=${1:+$(cd -- "$1" && pwd -P)}
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
cd -- "$root"
# shellcheck source=launch/python.sh
. "$root/launch/python.sh"
folder=${2:-runs/dino_cifar}
seed=${3:-42}
export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1

if [[ -n $dir ]]; then
    data=(--data-dir "$dir" --val-split test)
else
    data=(--dataset torch/cifar10 --dataset-download --data-dir "$folder/data" --val-split validation)
fi
batch_per_rank=32
train() {
    bash launch/local.sh --num_ranks 2 --logs "$folder/logs" launch/train.py \
        --deepspeed_config ds_configs/cpu_zero1_fp32.json --recipe launch/recipes/dino_cifar.yaml \
        --batch-size $batch_per_rank --seed "$seed" "${data[@]}" "$@"
}
train --eval-only --output "$folder/random"
train --output "$folder/trained"
for name in random trained; do
    printf 'k-NN top-1 of ds_vit, %s: ' "$name"
    sed -n 's/.*"last_knn_top1": \([0-9.]*\).*/\1 %/p' "$folder/$name/summary.json"
done
if "$python" -c 'import lightly' 2>/dev/null; then
    "$python" docs/benchmarks/dino_lightly.py "${data[@]:0:$((${#data[@]} - 2))}" --batch-size $((2 * batch_per_rank)) \
        --seed "$seed" | tee "$folder/lightly.json"
else
    echo "dino_cifar: no lightly here, so nothing to compare with; bash launch/setup.sh test installs it"
fi
