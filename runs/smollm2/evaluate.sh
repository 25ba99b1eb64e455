#!/bin/sh
# The paper's questions on the branches named as arguments (folders of OUT), beside the base and the adapted model at
# every step that was exported: each against the control, seeds of a branch together (NAME-s0, NAME-s1 are NAME@0,
# NAME@1). Q2 suffixes in three domains, Q3 needles, Q1 multiple choice where QA names a folder of its files.
. "$(dirname "$0")/common.sh"
models="base=$MODEL"
for folder in "$OUT"/adapt-* "$OUT/adapt"; do
  [ ! -e "$folder/export" ] || models="$models $(basename "$folder")=$folder/export"
done
for branch in "$@"; do models="$models $(echo "$branch" | sed 's/-lr.*-s\([0-9]*\)$/@\1/; s/-s\([0-9]*\)$/@\1/')=$OUT/$branch/export"; done
common="--device $DEVICE --dtype float32 --batch-size ${EVAL_BATCH:-2}"
report=""
for domain in books tech code; do
  case $domain in books) text=${BOOKS:-} ;; tech) text=${TECH:-} ;; code) text=${CODE-installed} ;; esac
  [ -n "$text" ] || continue
  split=all; [ "$text" = installed ] && split=test
  kvcat eval suffix $models --data "$text" --split $split --windows "${WINDOWS:-64}" --per-document "${PER_DOCUMENT:-6}" \
    --prefix "${PREFIX:-768}" --suffix "${SUFFIX:-256}" --keep ${KEEP:-0.05 0.1 0.2 0.4} --out "$OUT/suffix-$domain" $common \
    --method ${METHODS:-attention-matching,preset=paper attention-matching h2o snapkv}
  report="$report $OUT/suffix-$domain"
done
if [ "${PER_DEPTH:-20}" != 0 ]; then
  kvcat eval needle $models --length "${LENGTH:-512}" --per-depth "${PER_DEPTH:-20}" --keep 0.1 0.2 0.5 \
    --method attention-matching snapkv --out "$OUT/needle" $common
  report="$report $OUT/needle"
fi
if [ -n "${QA:-}" ]; then
  kvcat eval qa $models --data "$QA" --out "$OUT/qa" $common
  report="$report $OUT/qa"
fi
kvcat report $report -o "$OUT/report"
