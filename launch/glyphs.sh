#!/usr/bin/env bash
# CLIP in minutes on two cores: an image and a text tower learn 5,230 characters and their Unicode names, then rank the
# 580 names that they have not seen for three of these characters. Two CPU ranks. It needs `bash launch/setup.sh text`.
#
#     bash launch/glyphs.sh [FOLDER [flag of training ...]]
set -euo pipefail

root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
cd -- "$root"
# shellcheck source=launch/python.sh
. "$root/launch/python.sh"
folder=${1:-runs/glyphs}
export DS_ACCELERATOR=cpu OMP_NUM_THREADS=1

"$python" launch/glyph_files.py "$folder"
bash launch/local.sh --num_ranks 2 --logs "$folder/logs" launch/train.py --deepspeed_config ds_configs/cpu_zero1_fp32.json \
    --recipe launch/recipes/glyphs.yaml --batch-size 64 --tokenizer "$folder/tokenizer.json" --output "$folder" "${@:2}"
"$python" -m ds_vit.cli predict "$folder" "$folder"/held-out/*.png --labels "$folder/held-out/names.txt" --top-k 5
printf 'glyphs: open the report in a browser: %s\n' "$folder/report.html"
