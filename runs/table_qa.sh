#!/bin/sh
# Table "KV-CAT matches base model performance" (Q1): multiple choice, nothing compressed.
. "$(dirname "$0")/common.sh"
for size in $SIZES; do
  need "$size" router; need "$size" control
  evaluate "qa-$size" qa $(trio "$size") $QA $COMPUTE
done
