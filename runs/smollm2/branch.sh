#!/bin/sh
# Phase 2: one variant from the adapted checkpoint, or from START. The seed of the data differs from the adaptation's.
. "$(dirname "$0")/common.sh"
variant=${1:?names a variant, see README.md}
WEIGHT=${WEIGHT:-1} LR=${LR:-3e-5}
routers="--policy router --router-lr-multiplier 33"  # 1e-3: at 3e-4 they hide nothing for a long time
split="--prefix-range ${SPLIT:-0.5 0.9}"
prefix="$split --target-keep 0.25"
attended="--policy attention --num-groups ${LAYERS:-30} $split --target-keep 0.1"  # each layer its own
case $variant in
  control) options="--policy control" ;;
  router) options="$routers" ;;
  rand) options="--policy random" ;;
  attn) options="--policy attention" ;;
  router-prefix) options="$routers $prefix" ;;
  rand-prefix) options="--policy random $prefix" ;;
  rand-prefix-frozen) options="--policy random $prefix --teacher frozen" ;;
  rand-reader) options="--policy random $prefix --detach-prefix" ;;
  attn-prefix) options="$attended" ;;
  attn-reader) options="$attended --detach-prefix" ;;
  *) echo "no variant $variant, see README.md" >&2; exit 2 ;;
esac
name=$variant
[ "$variant" = control ] || { options="$options --mask-weight $WEIGHT"; name=$name-w$WEIGHT; }
[ -z "${FORM:-}" ] || name=$name-$FORM
[ "$LR" = 3e-5 ] || name=$name-lr$LR
continue_pretraining "$name-s$SEED" "${START:-$OUT/adapt/export}" $options --max-steps "$STEPS" --warmup-steps 10 \
  --peak-lr "$LR" --min-lr "$LR" --seed $((SEED + 1))
