#!/usr/bin/env bash
# Trains every CIFAR-10 model whose figures are published: the cascade, its static references, and the reuses on and
# off. One after the other; stopped and started again, it goes on. Usage: train_cifar10.sh TRAIN RUNS [EPOCHS]
# TRAIN is CIFAR-10's training split as a Parquet file, or `cifar10`. About half an hour for the cascade on 2 cores.
set -euo pipefail
train=$1 runs=$2 epochs=${3:-14}
common=(tokensworth train --data "$train" --hold-out 5000 --stem conv --image-size 32 --grids 3,5,8 --dim 96 --depth 3
    --heads 3 --mlp-ratio 2 --context-hidden 48 --context-width 16 --optimizer muon --lr 1e-2 --batch-size 256 --seed 0
    --save-every 88)
"${common[@]}" --epochs "$epochs" --out "$runs/cascade"
for grid in 8 5 3; do
    "${common[@]}" --epochs "$epochs" --static "$grid" --out "$runs/static_$grid"
done
"${common[@]}" --epochs 8 --feature off --relation off --out "$runs/reuse_off"
"${common[@]}" --epochs 8 --relation off --out "$runs/reuse_feature"
"${common[@]}" --epochs 8 --feature off --out "$runs/reuse_relation"
"${common[@]}" --epochs 8 --out "$runs/reuse_both"
