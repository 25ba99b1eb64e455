#!/bin/sh
# Figures "KV-CAT speeds up gradient-based KV cache compression" (Q2, main and appendix): nine keep ratios, steps 0 to 100.
# The report's table steps.md has the steps to the other model's level ("up to 5 times fewer"), with intervals.
. "$(dirname "$0")/common.sh"
for size in $SIZES; do
  need "$size" router; need "$size" control
  evaluate "steps-$size" suffix $(trio "$size") $EVAL_DATA $WINDOWS --keep $CURVE_KEEPS $COMPUTE \
    --method gradient,num_steps=$STEPS attention-matching
done
