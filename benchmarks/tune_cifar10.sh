#!/usr/bin/env bash
# An adaptive CIFAR-10 classifier from the pretrained ViT of `scripts/convert_saliency.py`: heads alone, then a fine-tune
# beside the static model fine-tuned alike. Stopped and started again, it goes on. Usage:
#   tune_cifar10.sh WEIGHTS TRAIN.parquet TEST.parquet RUNS
set -euo pipefail
here=$(dirname "$0") weights=$1 train=$2 test=$3 runs=$4
if [ ! -f "$runs/vit/model.safetensors" ]; then
    python "$here/depth_encoder.py" --weights "$weights" --size 518 --out "$runs/vit"
fi
tune() { # NAME OPTIONS
    local name=$1
    shift
    tokensworth tune --model "$runs/vit" --data "$train" --test "$test" --limit 10000 --held-out 2000 --seed 0 \
        --out "$runs/$name" "$@"
}
tune heads --grids 4,7,10,16
# The second run reads the first one's features.
mkdir -p "$runs/finetuned"
ln -sfn ../heads/passes "$runs/finetuned/passes"
tune finetuned --grids 4,7,10 --keep-grids --epochs 3 --fine-tune-static
