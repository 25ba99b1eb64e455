# What the scripts of this folder share; see README.md for the variables.
set -eu
cd "$(dirname "$0")/../.."
MODEL=${MODEL:-smollm2-135m}
OUT=${OUT:-out/smollm2}
DEVICE=${DEVICE:-cpu}
DTYPE=${DTYPE:-bfloat16}
SEED=${SEED:-0}
STEPS=${STEPS:-256}             # 4,096 tokens each: a million tokens
BATCH=${BATCH:-4}
MICRO=${MICRO:-4}
CHECKPOINT_EVERY=${CHECKPOINT_EVERY:-16}
VALIDATION_EVERY=64
# glibc keeps the blocks that a step frees: else the kernel may spend a fifth of the time on clearing them anew
export MALLOC_MMAP_MAX_=${MALLOC_MMAP_MAX_:-0} MALLOC_TRIM_THRESHOLD_=${MALLOC_TRIM_THRESHOLD_:-17179869184}
mkdir -p "$OUT"

python() { command "${PYTHON:-python3}" "$@"; }
kvcat() { python -m kvcat "$@"; }

# tokens: the training text, tokenised once
tokens() {
  [ -e "$OUT/tokens/tokens.json" ] || kvcat prepare "${TEXT:?names the training text}" --model "$MODEL" -o "$OUT/tokens"
}

# continue_pretraining FOLDER MODEL ARGUMENTS...: what adaptation and all branches have in common. FORM, in place of
# kvcat train: only-WORDS (train_only.py), align-WEIGHT (align.py), or one of runs/price/train.py
continue_pretraining() {
  folder=$1; from=$2; shift 2
  tokens
  train="-m kvcat train"
  case ${FORM:-} in
    only-*) train="runs/smollm2/train_only.py ${FORM#only-}" ;;
    align-*) train="runs/smollm2/align.py ${FORM#align-}" ;;
    ?*) train="runs/price/train.py $FORM" ;;
  esac
  python $train small --model "$from" --data "$OUT/tokens" --output "$OUT/$folder" --seq-len 1024 \
    --batch-size "$BATCH" --micro-batch-size "$MICRO" --dtype "$DTYPE" --device "$DEVICE" \
    --validation-sequences 16 --validation-every "$VALIDATION_EVERY" --checkpoint-every "$CHECKPOINT_EVERY" --compile "$@"
}
