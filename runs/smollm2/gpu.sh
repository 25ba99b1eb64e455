#!/bin/sh
# Everything on one GPU, resumable: tests marked gpu, the step ratio, the solver, then ten million tokens of adaptation
# and of each branch. Folders of weights and text are arguments by variable, see README.md.
# PART=check|adapt|branches|evaluate|pack does one part; without it all run in order.
DEVICE=cuda BATCH=${BATCH:-32} MICRO=${MICRO:-16} STEPS=${STEPS:-305} ADAPT_STEPS=${ADAPT_STEPS:-305}
EVAL_BATCH=${EVAL_BATCH:-16} WINDOWS=${WINDOWS:-72} CHECKPOINT_EVERY=${CHECKPOINT_EVERY:-150}
export DEVICE BATCH MICRO STEPS ADAPT_STEPS EVAL_BATCH WINDOWS CHECKPOINT_EVERY
. "$(dirname "$0")/common.sh"
python -c "import kvcat.cli.train, kvcat.evals, kvcat.report"  # what is missing is told before anything runs
: "${TEXT:?names the training text}" "${BOOKS:?names the held-out text}"
case ${PART:-} in "" | check | adapt | branches | evaluate | pack) ;; *) echo "no part $PART" >&2; exit 2 ;; esac
part() { [ -z "${PART:-}" ] || [ "$PART" = "$1" ]; }
branches=${BRANCHES:-control router:1 rand:1 rand-prefix:1 attn-reader:0.3}  # each with its weight
# a command whose output is kept in a file and shown; it fails as the command does
kept() {
  file=$OUT/gpu-$1.txt; shift
  "$@" > "$file" 2>&1 || { cat "$file"; exit 1; }
  cat "$file"
}
if part check; then
  kept tests python -m pytest -q -m gpu tests
  kept attention python benchmarks/attention.py --device cuda --dtype bfloat16
  for compile in "" --compile; do
    kept "training${compile:+-compiled}" python benchmarks/training.py --device cuda --shape "$MODEL" --dtype bfloat16 \
      --batch 16 $compile
  done
  kept solve python benchmarks/attention_matching.py --device cuda --model "$MODEL"
fi
if part adapt; then sh runs/smollm2/adapt.sh; fi
if part branches; then for branch in $branches; do WEIGHT=${branch#*:} sh runs/smollm2/branch.sh "${branch%:*}"; done; fi
if part evaluate; then
  rate=; [ "${LR:-3e-5}" = 3e-5 ] || rate=-lr$LR
  names=$(for branch in $branches; do echo "$(echo "$branch" | sed 's/:/-w/')$rate-s$SEED"; done)
  sh runs/smollm2/evaluate.sh $names
fi
if part pack; then  # what is small enough to carry away
  cd "$OUT" && find . -name '*.jsonl' -o -name '*.csv' -o -name '*.txt' -o -name config.json -o -path './report/*' -type f | tar czf records.tar.gz -T -
fi
