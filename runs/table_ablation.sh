#!/bin/sh
# Tables of the policy ablation: base, control, Router, Rand and Attn, multiple choice and compressed prefixes.
. "$(dirname "$0")/common.sh"
size=$ABLATION_SIZE
for variant in router control random attention; do need "$size" "$variant"; done
models="$(trio "$size") rand=$(trained "$size" random) attn=$(trained "$size" attention)"
evaluate ablation-qa qa $models $QA $COMPUTE
evaluate ablation-suffix suffix $models $EVAL_DATA $WINDOWS --keep $KEEPS $COMPUTE \
  --method attention-matching,preset=paper attention-matching
