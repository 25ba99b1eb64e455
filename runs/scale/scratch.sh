#!/bin/sh
# KV-CAT (Rand) in a training from scratch, of kvcat-base's shape at 10.6 tokens a parameter: from the
# first step, in the last fifth alone, in which the learning rate decays, or not at all, on the same
# tokens in the same order. All begin with the same random weights and have a constant rate for four
# fifths; the last fifth begins with new moments of the optimizer and other tokens, for all of them.
# Trains, judges and records one model after the other, without those that RECORDS has; if it is
# stopped, the same command continues. It takes about three hours of an idle core for a seed.
# `python runs/scale/curve.py --records runs/scale/scratch.csv.gz` prints what came out.
set -eu
cd "$(dirname "$0")/../.."
OUT=${OUT:-out/scratch}
RECORDS=${RECORDS:-runs/scale/scratch.csv.gz}
SEEDS=${SEEDS:-1}
CONSTANT=${CONSTANT:-1468}  # steps of 4,096 tokens
DECAY=${DECAY:-367}
mkdir -p "$OUT"
. runs/scale/judge.sh

train() {  # train MODEL FOLDER SEED OPTION...
  from=$1 to=$2 order=$3
  shift 3
  kvcat train small --model "$from" --output "$to" --seq-len 1024 --batch-size 4 --peak-lr 4e-3 \
    --seed "$order" --validation-sequences 16 --validation-every 367 --checkpoint-every 100 \
    --log-every 10 --device "$DEVICE" "$@"
}

last_fifth() {  # last_fifth LABEL BEGUN OPTION...: after four fifths of BEGUN, never or always
  label=$1 begun=$OUT/$2-s$seed
  case $2 in never) policy=control ;; always) policy=random ;; esac
  shift 2
  if is_recorded "$label@$seed"; then return; fi
  [ -e "$OUT/fresh-s$seed/config.json" ] || python runs/scale/fresh.py "$OUT/fresh-s$seed" "$seed"
  train "$OUT/fresh-s$seed" "$begun" "$seed" --policy $policy --max-steps "$CONSTANT" \
    --warmup-steps 28 --min-lr 4e-3
  train "$begun/export" "$OUT/$label-s$seed" "$((seed + 100))" --max-steps "$DECAY" \
    --warmup-steps 6 --min-lr 2e-4 "$@"
  judge "$label@$seed" "$OUT/$label-s$seed/export" "$OUT/$label-s$seed-judged"
}

for seed in $SEEDS; do
  last_fifth control-10.6 never --policy control
  last_fifth rand-last-fifth-10.6 never --policy random
  last_fifth rand-w0.3-last-fifth-10.6 never --policy random --mask-weight 0.3
  last_fifth rand-from-the-first-step-10.6 always --policy random
done
