#!/bin/sh
# Table "Attention Matching" (Q2): suffix perplexity on compressed prefixes; our `stable` preset, 8 iterations and eviction beside it.
. "$(dirname "$0")/common.sh"
for size in $SIZES; do
  need "$size" router; need "$size" control
  evaluate "suffix-$size" suffix $(trio "$size") $EVAL_DATA $WINDOWS --keep $KEEPS --speed $COMPUTE \
    --method attention-matching,preset=paper attention-matching,preset=paper,num_iters=8 attention-matching snapkv keynorm
done
