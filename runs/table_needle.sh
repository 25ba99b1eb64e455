#!/bin/sh
# Table "Needle retrieval from compressed haystack" (Q3); 100 examples at each depth instead of the paper's 20.
. "$(dirname "$0")/common.sh"
for size in $SIZES; do
  need "$size" router; need "$size" control
  evaluate "needle-$size" needle $(trio "$size") $NEEDLE --keep $CURVE_KEEPS $COMPUTE \
    --method gradient,init=random,num_steps=$STEPS attention-matching
done
