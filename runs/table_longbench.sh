#!/bin/sh
# Table "Long-form QA after context compression" (Q4): seven sub-domains of LongBench v2, after 20 and 100 steps.
. "$(dirname "$0")/common.sh"
for size in $SIZES; do
  need "$size" router; need "$size" control
  evaluate "longbench-$size" longbench $(trio "$size") $LONGBENCH --keep 0.1 0.2 0.5 $COMPUTE \
    --method gradient,num_steps=$STEPS,activation_checkpointing=true attention-matching
done
