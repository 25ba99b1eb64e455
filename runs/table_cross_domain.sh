#!/bin/sh
# Table "Attention Matching cross-domain": WikiText-103, PG-19 and arXiv in one command.
. "$(dirname "$0")/common.sh"
need "$CROSS_SIZE" router; need "$CROSS_SIZE" control
evaluate cross-domain suffix $(trio "$CROSS_SIZE") $CROSS_DATA $WINDOWS --keep $KEEPS $COMPUTE \
  --method attention-matching,preset=paper attention-matching
