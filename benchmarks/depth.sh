#!/usr/bin/env bash
# Depth with adaptive backbones: generated rooms, a dense model, then it and every method that keeps the grid tuned alike.
# One after the other; stopped and started again, it goes on. Usage:
#   depth.sh WEIGHTS RUNS [FRAMES] [EPOCHS] [TUNED_FRAMES]
# WEIGHTS is what scripts/convert_saliency.py wrote; FRAMES are rendered, the dense model is trained for EPOCHS of them,
# and each side is tuned for two epochs of TUNED_FRAMES of them, 0 for all.
set -euo pipefail
here=$(dirname "$0") weights=$1 runs=$2 frames=${3:-8000} epochs=${4:-3} tuned=${5:-0}
# Under bfloat16 the CPU's fused attention is slower backwards than plain products.
export TIMM_FUSED_ATTN=0
for part in "rooms $frames 0" "test 400 1" "calibration 200 2"; do
    read -r name count seed <<<"$part"
    tokensworth scenes --count "$count" --size 154,154 --seed "$seed" --out "$runs/$name"
done
if [ ! -f "$runs/encoder/model.safetensors" ]; then
    python "$here/depth_encoder.py" --weights "$weights" --size 154 --out "$runs/encoder"
fi
tune() { # NAME EPOCHS LR OPTIONS
    local name=$1 epochs=$2 lr=$3
    shift 3
    if [ ! -f "$runs/$name/train.json" ]; then
        tokensworth train --task depth --data "nyu:$runs/rooms" --crop 154,154 --epochs "$epochs" --lr "$lr" \
            --layer-decay 0.8 --batch-size 32 --warmup 0.2 --ema 0.98 --seed 0 --save-every 50 --out "$runs/$name" "$@"
    fi
}
side() { # NAME STARTING_MODEL METHOD OPTION=VALUE...
    local name=$1 start=$2 method=$3
    shift 3
    if [ ! -f "$runs/start/$name/depth.json" ]; then
        tokensworth adapt --model "$start" --method "$method" "${@/#/--set=}" --out "$runs/start/$name"
    fi
    tune "$name" 2 5e-4 --start "$runs/start/$name" --limit "$tuned"
    sides+=(--trained "$runs/$name")
}
tune plain "$epochs" 1e-3 --encoder "$runs/encoder" --widths 32,64,96,128 --validate "nyu:$runs/calibration"
if [ ! -f "$runs/fitted/fit.json" ]; then
    tokensworth adapt --model "$runs/plain" --method tosa --out "$runs/fitted"
    tokensworth fit --model "$runs/fitted" --data "nyu:$runs/rooms" --limit 600 --held-out 100 --epochs 3 --out "$runs/fitted"
fi
tune dense 2 5e-4 --start "$runs/plain" --limit "$tuned"
sides=(--trained "$runs/dense")
side tosa_0.8 "$runs/fitted" tosa keep=0.8
side per_head_0.8 "$runs/fitted" tosa keep=0.8 scope=per_head
side random_0.8 "$runs/plain" tosa keep=0.8 scorer=random
side tome "$runs/plain" tome r=5 unmerge=true
side svit "$runs/plain" svit keep=0.5
side tosa_0.6 "$runs/fitted" tosa keep=0.6
side per_head_0.6 "$runs/fitted" tosa keep=0.6 scope=per_head
side random_0.6 "$runs/plain" tosa keep=0.6 scorer=random
tokensworth compare --task depth --model "$runs/plain" --data "nyu:$runs/test" --calibration "nyu:$runs/calibration" \
    --method tosa --method "tome:r=5" "${sides[@]}" --batch-size 32 --max-drop 0.5 --seed 0 --out "$runs/compared"
