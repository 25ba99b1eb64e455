#!/bin/sh
# Phase 2: one variant from the adapted checkpoint. The seed of the data differs from the adaptation's.
. "$(dirname "$0")/common.sh"
variant=${1:?names a variant, see README.md}
WEIGHT=${WEIGHT:-1} LR=${LR:-3e-5}
prefix="--prefix-range 0.5 0.9 --target-keep 0.25"
case $variant in
  control) options="--policy control" ;;
  router) options="--policy router" ;;
  rand) options="--policy random" ;;
  attn) options="--policy attention" ;;
  router-prefix) options="--policy router $prefix" ;;
  rand-prefix) options="--policy random $prefix" ;;
  *) echo "no variant $variant, see README.md" >&2; exit 2 ;;
esac
[ "$variant" = control ] || options="$options --mask-weight $WEIGHT"
name=$variant-w$WEIGHT-s$SEED
[ "$variant" = control ] && name=control-s$SEED
continue_pretraining "$name" "$OUT/adapt/export" $options --max-steps "$STEPS" --warmup-steps 10 \
  --peak-lr "$LR" --min-lr "$LR" --seed $((SEED + 1))
