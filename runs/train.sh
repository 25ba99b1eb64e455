#!/bin/sh
# The continued pretraining of section "Experiments" and its control on the same tokens; figure "training diagnostics".
. "$(dirname "$0")/common.sh"
for size in $SIZES; do
  need "$size" router
  need "$size" control
  python -m kvcat report "$OUT/train/$size-router" "$OUT/train/$size-control" -o "$OUT/train/$size-report"
done
