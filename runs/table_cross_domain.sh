#!/bin/sh
# Table "Attention Matching cross-domain": WikiText-103, PG-19 and arXiv in one command.
. "$(dirname "$0")/common.sh"
size=$CROSS_SIZE
need "$size" router; need "$size" control
evaluate cross-domain suffix $(trio "$size") $CROSS_DATA $WINDOWS --keep $KEEPS $COMPUTE \
  --method attention-matching,preset=paper attention-matching
