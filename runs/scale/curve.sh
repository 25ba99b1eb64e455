#!/bin/sh
# Gain and price of KV-CAT by training tokens per parameter, on kvcat-base (708,960 parameters): the
# paper's recipe (weight 1, whole sequences, 1e-4 to 5e-6) beside its control, on the same tokens of
# the installed Python sources (those of constraints.txt).
# Trains, judges and records one point after the other, in the order of QUEUE, without those that
# RECORDS has; if it is stopped, the same command continues. A point at 10.6 tokens a parameter takes
# half an hour of an idle core for a control, an hour or more for the others.
# `python runs/scale/curve.py` prints what came out.
set -eu
cd "$(dirname "$0")/../.."
OUT=${OUT:-out/scale}
RECORDS=${RECORDS:-runs/scale/records.csv.gz}
QUEUE=${QUEUE:-runs/scale/queue.txt}
mkdir -p "$OUT"

. runs/scale/judge.sh

options() {  # of kvcat train, for a form; with -kv at its end (trainer) the same
  plain=${1%-kv}
  case $plain in
    control) echo "--policy control" ;;
    router) echo "--policy router" ;;
    router-w*) echo "--policy router --mask-weight ${plain#router-w}" ;;
    router-n*) echo "--policy router --router-noise ${plain#router-n}" ;;
    rand) echo "--policy random" ;;
    attn) echo "--policy attention" ;;
    *) echo "no form $1: see runs/scale/queue.txt" >&2; exit 2 ;;
  esac
}

trainer() {  # what trains a form: all weights, or with -kv those of keys and values alone
  case $1 in
    *-kv) echo "runs/smollm2/train_only.py k_proj,v_proj" ;;
    *) echo "-m kvcat train" ;;
  esac
}

points=$(awk 'NF && $1 !~ /^#/' "$QUEUE")
# a form that does not exist ends the command here: in the arguments of kvcat train, it would not
echo "$points" | while read -r form _; do options "$form" > /dev/null; done

is_recorded base@0 || judge base@0 kvcat-base "$OUT/base"
echo "$points" | while read -r form per_parameter steps seed; do
  name=$form-$per_parameter
  folder=$OUT/$name-s$seed
  if is_recorded "$name@$seed" < /dev/null; then continue; fi
  python $(trainer "$form") small --model kvcat-base --output "$folder" $(options "$form") \
    --seq-len 1024 --batch-size 4 --max-steps "$steps" --warmup-steps $((steps * 3 / 200 + 1)) \
    --peak-lr 1e-4 --min-lr 5e-6 --seed "$seed" --validation-sequences 16 \
    --validation-every $((steps / 4 + 1)) --checkpoint-every 100 --log-every 10 --device "$DEVICE" \
    < /dev/null
  judge "$name@$seed" "$folder/export" "$folder-judged" < /dev/null
  rm -rf "$folder/checkpoints"
done
