#!/bin/sh
# Where the price of KV-CAT arises, on kvcat-base: the two losses with steps of their own, and with the distillation's
# gradient projected, beside the control and Router of runs/peers/compare.sh (run that first). About half an hour of one
# core. If it is stopped, the same command continues.
set -eu
cd "$(dirname "$0")/../.."
PEERS=${PEERS:-out/peers}
OUT=${OUT:-out/price}
SEEDS=${SEEDS:-1 2 3}
STEPS=${STEPS:-160}
WINDOWS=${WINDOWS:-24}

python() { command "${PYTHON:-python3}" "$@"; }
kvcat() { python -m kvcat "$@"; }

for seed in $SEEDS; do
  for trained in control router; do
    [ -e "$PEERS/$trained-s$seed/export" ] && continue
    echo "no $PEERS/$trained-s$seed/export: run runs/peers/compare.sh first; PEERS names its folder" >&2
    exit 2
  done
done

models=""
for seed in $SEEDS; do
  # Router as in runs/peers/compare.sh
  router="small --model kvcat-base --policy router --target-keep 0.25 --target-warmup-steps $((STEPS / 4)) \
    --router-lr-multiplier 33 --seq-len 512 --batch-size 4 --max-steps $STEPS --warmup-steps 10 --peak-lr 3e-4 \
    --min-lr 3e-5 --seed $seed --validation-sequences 8 --validation-every $STEPS"
  for variant in own-moments own-moments-w0.3 projected; do
    form=${variant%-w*}
    weight=1
    [ "$form" = "$variant" ] || weight=${variant##*-w}
    python runs/price/train.py "$form" $router --mask-weight "$weight" --output "$OUT/$variant-s$seed"
    models="$models $variant@$seed=$OUT/$variant-s$seed/export"
  done
  # the lighter weight, with one step for both losses
  kvcat train $router --mask-weight 0.3 --output "$OUT/router-w0.3-s$seed"
  models="$models router-w0.3@$seed=$OUT/router-w0.3-s$seed/export"
  for trained in control router; do
    models="$models $trained@$seed=$PEERS/$trained-s$seed/export"
  done
done
kvcat eval suffix $models --windows "$WINDOWS" --per-document 1 --prefix 384 --suffix 128 --keep 0.05 0.1 0.2 \
  --method attention-matching snapkv --supervision first-half --out "$OUT/suffix"
kvcat report "$OUT/suffix" -o "$OUT/report"
