#!/bin/sh
# Everything on one GPU, resumable: tests marked gpu, the step ratio, the solver, then 20 million tokens of
# adaptation and of each branch. Folders of weights and text are arguments by variable, see README.md.
# PART=check|adapt|branches|evaluate does one part; without it all run in order.
DEVICE=cuda BATCH=${BATCH:-32} MICRO=${MICRO:-16} STEPS=${STEPS:-610} ADAPT_STEPS=${ADAPT_STEPS:-610}
EVAL_BATCH=${EVAL_BATCH:-16} WINDOWS=${WINDOWS:-128}
export DEVICE BATCH MICRO STEPS ADAPT_STEPS EVAL_BATCH WINDOWS
. "$(dirname "$0")/common.sh"
part() { [ -z "${PART:-}" ] || [ "$PART" = "$1" ]; }
if part check; then
  python -m pytest -q -m gpu tests 2>&1 | tee "$OUT/gpu-tests.txt" || true
  python benchmarks/training.py --device cuda 2>&1 | tee "$OUT/gpu-training.txt" || true
  python benchmarks/attention_matching.py --device cuda 2>&1 | tee "$OUT/gpu-attention-matching.txt" || true
fi
part adapt && [ ! -e "$OUT/adapt/export/config.json" ] && sh runs/smollm2/adapt.sh
branches="control router rand rand-prefix"
if part branches; then for branch in $branches; do sh runs/smollm2/branch.sh "$branch"; done; fi
if part evaluate; then sh runs/smollm2/evaluate.sh control-s0 router-w1-s0 rand-w1-s0 rand-prefix-w1-s0; fi
