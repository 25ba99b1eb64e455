#!/bin/sh
# Beyond the paper: caches fitted to other text than the one that is scored, and RULER.
. "$(dirname "$0")/common.sh"
for size in $SIZES; do
  need "$size" router; need "$size" control
  for supervision in first-half reconstruction; do
    evaluate "$supervision-$size" suffix $(trio "$size") $EVAL_DATA $WINDOWS --supervision $supervision --keep $KEEPS $COMPUTE \
      --method attention-matching attention-matching,budgets=equal snapkv streaming
  done
  if [ "$SCALE" = paper ]; then lengths="--length 4096 --length 8192 --length 16000"; else lengths="--length 420 --per-task 2 --task niah_single --task vt"; fi
  evaluate "ruler-$size" ruler $(trio "$size") $lengths --keep $KEEPS $COMPUTE
done
