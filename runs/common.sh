# What the scripts share. SCALE=paper (default) needs GPUs and the Hub; SCALE=small runs offline on a CPU in minutes.
# OUT: where everything goes.  GPUS: processes.  SIZES: which models.
set -eu
cd "$(dirname "$0")/.."
SCALE=${SCALE:-paper}
OUT=${OUT:-out/runs-$SCALE}
case $SCALE in
  paper | small) ;;
  *) echo "SCALE must be paper or small, not $SCALE" >&2; exit 2 ;;
esac

if [ "$SCALE" = paper ]; then
  GPUS=${GPUS:-8}
  SIZES=${SIZES:-"0.5b 1.5b"} ABLATION_SIZE=0.5b CROSS_SIZE=1.5b
  # float32: the rounding of bfloat16 alone is .0013 nats of KL, more than many cells of the tables
  COMPUTE="--device cuda --dtype float32"
  # the text is tokenised once, at one commit of the data set, so that all runs read the same tokens
  PREPARE="hub:HuggingFaceFW/fineweb-edu/sample-10BT --max-tokens 5300000000"
  TRAIN_OPTIONS="--data $OUT/tokens --compile"
  # one GPU would need 78 GiB for the 1.5B model; sharded over 8, both models fit without recomputation
  [ "$GPUS" -gt 1 ] || TRAIN_OPTIONS="$TRAIN_OPTIONS --activation-checkpointing"
  EVAL_DATA="--data fineweb-edu --split test" CROSS_DATA="--data wikitext-103 --data pg-19 --data arxiv"
  WINDOWS="--windows 128 --per-document 1 --batch-size 16" KEEPS="0.05 0.1 0.2 0.4"
  CURVE_KEEPS="0.05 0.1 0.15 0.2 0.25 0.3 0.35 0.4 0.5" STEPS=100
  NEEDLE="--length 1024 --per-depth 100 --batch-size 20"
  LONGBENCH="--max-tokens 32768"
  QA=""
else
  GPUS=0 SIZES=small ABLATION_SIZE=small CROSS_SIZE=small
  COMPUTE="--device cpu --dtype float32"
  PREPARE=""
  TRAIN_OPTIONS="--model kvcat-base --seq-len 512 --batch-size 4 --max-steps 30 --warmup-steps 3 --peak-lr 3e-4 --min-lr 3e-5 --mask-weight 0.2 --target-warmup-steps 10"
  EVAL_DATA="--data installed --split test" CROSS_DATA="--data docs --data benchmarks --split all"
  WINDOWS="--windows 6 --per-document 2 --prefix 384 --suffix 128 --batch-size 6" KEEPS="0.05 0.1 0.2 0.4"
  CURVE_KEEPS="0.05 0.2" STEPS=5
  NEEDLE="--length 300 --per-depth 2 --batch-size 10"
  LONGBENCH="--data runs/small/longbench.jsonl --sub-domain all --max-tokens 1000"
  QA="--data runs/small/qa"
fi

# kvcat, one process a GPU where there are several; evaluations then share their folder shard by shard
kvcat_parallel() {
  if [ "$GPUS" -gt 1 ]; then torchrun --nproc-per-node "$GPUS" -m kvcat "$@"; else python -m kvcat "$@"; fi
}

# evaluate NAME ARGUMENTS...: an evaluation of the models of $size and its report, the paper's figures beside ours
evaluate() {
  name=$1; shift
  kvcat_parallel eval "$@" --out "$OUT/$name"
  folders=$(find "$OUT/$name" -name config.json -exec dirname {} \; | sort)
  python -m kvcat report $folders -o "$OUT/$name/report" $(paper "$size")
}

paper() { case $1 in small) ;; *) echo "--paper-model Qwen2.5-$(echo "$1" | tr b B)" ;; esac; }

hub() { case $1 in 0.5b) echo Qwen/Qwen2.5-0.5B ;; 1.5b) echo Qwen/Qwen2.5-1.5B ;; small) echo kvcat-base ;; esac; }
recipe() { case $1 in small) echo small ;; *) echo "qwen2.5-$1" ;; esac; }
# sequences of a forward pass: all 16 of a GPU's share on 8; the 1.5B model needs 109 GiB for that, so it keeps the
# recipe's 8, except for its control
micro() {
  case $SCALE/$1-$2 in
    paper/1.5b-control | paper/0.5b-*) [ "$GPUS" -gt 8 ] || echo "--micro-batch-size 16" ;;
  esac
}
trained() { echo "$OUT/train/$1-$2/export"; }

# tokens: the training text of the paper's scale; tokens.json in the folder records the data set's commit
tokens() {
  if [ -n "$PREPARE" ] && [ ! -e "$OUT/tokens/tokens.json" ]; then
    python -m kvcat prepare $PREPARE --model "$(hub 0.5b)" -o "$OUT/tokens"
  fi
}

# trains what is missing: size and variant (router, control, random, attention); a finished run is left as it is
need() {
  variant=$([ "$2" = router ] && echo "" || echo "-$2")
  if [ ! -e "$(trained "$1" "$2")/config.json" ]; then
    tokens
    kvcat_parallel train "$(recipe "$1")$variant" $TRAIN_OPTIONS $(micro "$1" "$2") --output "$OUT/train/$1-$2"
  fi
}

# base, control and KV-CAT of a size, as the evaluations take them
trio() { echo "base=$(hub "$1") control=$(trained "$1" control) KV-CAT=$(trained "$1" router)"; }
