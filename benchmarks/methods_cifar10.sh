#!/usr/bin/env bash
# Fine-tunes the packaged 12-layer CIFAR-10 ViT with every token method at three settings, and dense, all alike, and
# compares them with every method training-free, the packaged cascade and the static models.
# One after the other; stopped and started again, it goes on. Usage:
#   methods_cifar10.sh TRAIN TEST RUNS [EPOCHS] [IMAGES]
# TRAIN and TEST are CIFAR-10's splits as Parquet files; IMAGES of the training part are used, 0 for all.
set -euo pipefail
train=$1 test=$2 runs=$3 epochs=${4:-1} images=${5:-6144}
packaged=$(python -c "from tokensworth.data.packaged import packaged_folder; print(packaged_folder())")
vit=$packaged/vit
fitted() { # METHOD [FIT_OPTIONS]: adapted once and fitted, for the methods that learn something without labels
    local method=$1
    shift
    if [ ! -f "$runs/fitted/$method/fit.json" ]; then
        tokensworth adapt --model "$vit" --method "$method" --out "$runs/fitted/$method"
        tokensworth fit --model "$runs/fitted/$method" --data "$train" --batch-size 64 --out "$runs/fitted/$method" "$@"
    fi
}
one() { # METHOD OPTION VALUE [MODEL]: adapts and tunes
    local name="$1_$3"
    if [ ! -f "$runs/start/$name/config.json" ]; then
        tokensworth adapt --model "${4:-$vit}" --method "$1" --set "$2=$3" --out "$runs/start/$name"
    fi
    tune "$name" "$runs/start/$name"
}
tune() { # NAME STARTING_MODEL
    if [ ! -f "$runs/$1/train.json" ]; then
        tokensworth train --data "$train" --hold-out 5000 --limit "$images" --epochs "$epochs" --batch-size 128 \
            --lr 5e-4 --warmup 0.1 --start "$2" --teacher "$vit" --seed 0 --out "$runs/$1"
    fi
}
fitted tosa --held-out 500 --limit 1500 --epochs 4
fitted star --held-out 5000 --limit 1500
tune dense "$vit"
for place in 0 1 2; do
    r=(2 4 5) keep=(0.9 0.7 0.5) mild=(0.95 0.925 0.9) gates=(0.7 0.5 0.3) thin=(0.8 0.5 0.3)
    one tome r "${r[place]}"
    one tosa keep "${thin[place]}" "$runs/fitted/tosa"
    one svit keep "${gates[place]}"
    one dynamicvit keep "${keep[place]}"
    one evit keep "${keep[place]}"
    one topk keep "${keep[place]}"
    one vtc_lfc keep "${keep[place]}"
    one star keep "${keep[place]}" "$runs/fitted/star"
    one random keep "${keep[place]}"
    one pitome keep "${mild[place]}"
done
trained=("$packaged" "$packaged"/static_{3,5,8} "$runs/dense" "$runs"/*_[0-9]*)
tokensworth compare --model "$vit" --data "$test" --calibration "$train" --held-out 5000 --method all \
    --method "vtc_lfc:keep=0.9;channels=0.75" "${trained[@]/#/--trained=}" --max-drop 0.5 --seed 0 --out "$runs/compared"
