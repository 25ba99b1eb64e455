#!/bin/sh
# Phase 1: plain continued pretraining until the model no longer adapts. ADAPT_STEPS steps of 4,096 tokens; the model
# after each third of them is validated and exported, for the curve of evaluate.sh.
. "$(dirname "$0")/common.sh"
steps=${ADAPT_STEPS:-48}
third=$((steps / 3))
CHECKPOINT_EVERY=$third VALIDATION_EVERY=$third
continue_pretraining adapt "$MODEL" --policy control --max-steps "$steps" --warmup-steps 20 --peak-lr 5e-5 \
  --min-lr 5e-6 --seed 0 --keep-checkpoints 4
for step in "$third" $((third * 2)); do
  there=$(printf '%s/adapt/checkpoints/step-%06d' "$OUT" "$step")  # a stopped run may have dropped it for a later one
  [ -e "$OUT/adapt-$step/export" ] || [ ! -e "$there" ] || kvcat export "$OUT/adapt" --step "$step" -o "$OUT/adapt-$step/export"
done
