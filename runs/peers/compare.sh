#!/bin/sh
# KV-CAT (Router), DMS, SP-KV and plain training (the control) on the same tokens, three seeds each: what each keeps of
# the dense loss, and whose caches compress better afterwards. Offline, on kvcat-base: about an hour of one core.
# If it is stopped, the same command continues.
set -eu
cd "$(dirname "$0")/../.."
MODEL=${MODEL:-kvcat-base}
OUT=${OUT:-out/peers}
SEEDS=${SEEDS:-1 2 3}
STEPS=${STEPS:-160}
WINDOWS=${WINDOWS:-24}
mkdir -p "$OUT"

python() { command "${PYTHON:-python3}" "$@"; }
kvcat() { python -m kvcat "$@"; }

models="base=$MODEL"
for seed in $SEEDS; do
  for method in control router; do
    # the routers hide slots everywhere, as in the paper, and reach the share that DMS reaches
    kvcat train small --model "$MODEL" --output "$OUT/$method-s$seed" --policy $method --target-keep 0.25 \
      --target-warmup-steps $((STEPS / 4)) --mask-weight "${MASK_WEIGHT:-1}" --router-lr-multiplier 33 --seq-len 512 --batch-size 4 \
      --max-steps "$STEPS" --warmup-steps 10 --peak-lr 3e-4 --min-lr 3e-5 --seed "$seed" \
      --validation-sequences 8 --validation-every "$STEPS"
    models="$models $method@$seed=$OUT/$method-s$seed/export"
  done
  for method in dms sp-kv; do
    python runs/peers/train.py $method --model "$MODEL" --output "$OUT/$method-s$seed" --max-steps "$STEPS" --seed "$seed"
    models="$models $method@$seed=$OUT/$method-s$seed/export"
  done
done
kvcat eval suffix $models --windows "$WINDOWS" --per-document 1 --prefix 384 --suffix 128 --keep 0.05 0.1 0.2 \
  --method attention-matching snapkv --supervision first-half --out "$OUT/suffix"
kvcat report "$OUT/suffix" -o "$OUT/report"
