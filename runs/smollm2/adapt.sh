#!/bin/sh
# Phase 1: plain continued pretraining until the model no longer adapts. ADAPT_STEPS steps of 4,096 tokens; every third
# of them is exported (adapt-STEP), so that evaluate.sh can draw the curve.
. "$(dirname "$0")/common.sh"
steps=${ADAPT_STEPS:-48}
continue_pretraining adapt "$MODEL" --policy control --max-steps "$steps" --warmup-steps $((steps / 10)) \
  --peak-lr 5e-5 --min-lr 5e-6 --seed 0 --checkpoint-every $((steps / 3)) --keep-checkpoints 3
for step in $((steps / 3)) $((steps / 3 * 2)); do
  [ -e "$OUT/adapt-$step/export" ] || kvcat export "$OUT/adapt" --step $step -o "$OUT/adapt-$step/export"
done
