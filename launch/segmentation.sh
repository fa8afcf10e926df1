#!/usr/bin/env bash
# Semantic segmentation in minutes on two cores: a small ViT learns where the digits of 1,000 scenes are and which, then
# predicts the masks of scenes that it has not seen. Two CPU ranks.
#
#     bash launch/segmentation.sh [FOLDER [flag of training ...]]
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
cd -- "$root"
# shellcheck source=launch/python.sh
. "$root/launch/python.sh"
folder=${1:-runs/segmentation}
export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1

bash launch/local.sh --num_ranks 2 --logs "$folder/logs" launch/train.py --deepspeed_config ds_configs/cpu_zero1_fp32.json \
    --recipe launch/recipes/scenes.yaml --batch-size 16 --output "$folder" "${@:2}"
"$python" launch/scene_files.py "$folder/scenes" 0 6
"$python" -m ds_vit.cli predict "$folder" "$folder/scenes/val/images" --output "$folder/predicted"
printf 'mIoU: '
sed -n 's/.*"last_miou": \([0-9.]*\).*/\1 %/p' "$folder/summary.json"
printf 'segmentation: scenes, masks and predictions: %s\n' "$folder/segmentation.png"
printf 'segmentation: open the report in a browser: %s\n' "$folder/report.html"
