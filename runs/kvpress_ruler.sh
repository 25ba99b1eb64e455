#!/bin/sh
# kvpress' RULER protocol: every method in result folders as kvpress' evaluate.py writes them. One GPU at
# SCALE=paper. SCALE=small: kvcat-base on the CPU, on eight made-up questions (or on DATA, a folder with the data set's
# columns).
. "$(dirname "$0")/common.sh"
METHODS=${METHODS:-"attention-matching attention-matching,budgets=equal kvpress:KVzipPress kvpress:ExpectedAttentionPress snapkv"}
if [ "$SCALE" = paper ]; then
  python benchmarks/kvpress_ruler.py --model "${MODEL:-Qwen/Qwen3-8B}" --data hub:simonjegou/ruler --data-dir "${LENGTH:-4096}" \
    --methods $METHODS --compression-ratio 0.25 0.5 0.75 0.9 --device cuda --dtype bfloat16 --output-dir "$OUT/kvpress-ruler"
else
  python benchmarks/kvpress_ruler.py --model "${MODEL:-kvcat-base}" --data "${DATA:-runs/small/ruler}" \
    --methods attention-matching snapkv --compression-ratio 0.5 0.9 --output-dir "$OUT/kvpress-ruler"
fi
