#!/usr/bin/env bash
# Trains the 12-layer CIFAR-10 ViT, fits ToSA's selectors to it, and fine-tunes it dense and with ToSA, three seeds each.
# One after the other; stopped and started again, it goes on. Usage: train_tosa_cifar10.sh TRAIN RUNS [EPOCHS] [TUNING]
# TRAIN is CIFAR-10's training split as a Parquet file, or `cifar10`. About an hour and a half on 2 cores.
set -euo pipefail
train=$1 runs=$2 epochs=${3:-12} tuning=${4:-2}
common=(tokensworth train --data "$train" --hold-out 5000 --optimizer muon --batch-size 256 --save-every 44)
"${common[@]}" --stem conv --image-size 32 --grids 4,8 --static 8 --dim 96 --depth 12 --heads 3 --mlp-ratio 2 \
    --lr 1e-2 --seed 0 --epochs "$epochs" --out "$runs/vit"
if [ ! -f "$runs/vit_fitted/fit.json" ]; then
    tokensworth adapt --model "$runs/vit" --set layers=2,4,6,8,10 --set keep=0.8 --out "$runs/vit_tosa"
    tokensworth fit --model "$runs/vit_tosa" --data "$train" --held-out 1000 --limit 4000 --batch-size 64 \
        --out "$runs/vit_fitted"
fi
for seed in 0 1 2; do
    "${common[@]}" --start "$runs/vit" --lr 2e-3 --seed $seed --epochs "$tuning" --out "$runs/vit_dense_$seed"
    "${common[@]}" --start "$runs/vit_fitted" --lr 2e-3 --seed $seed --epochs "$tuning" --out "$runs/vit_tosa_$seed"
done
