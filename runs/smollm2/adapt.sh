#!/bin/sh
# Phase 1: plain continued pretraining until the model no longer adapts. ADAPT_STEPS steps of 4,096 tokens.
. "$(dirname "$0")/common.sh"
continue_pretraining adapt "$MODEL" --policy control --max-steps "${ADAPT_STEPS:-480}" --warmup-steps 20 \
  --peak-lr 5e-5 --min-lr 5e-6 --seed 0
