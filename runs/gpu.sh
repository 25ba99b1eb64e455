#!/bin/sh
# What only a GPU can tell, in parts of at most eight minutes on an H100, each useful alone:
#   PART=check   the tests for a GPU; attention and solver timings
#   PART=train   tokens a second of `kvcat train` at Qwen2.5-0.5B's shape: control and router, eager and compiled,
#                micro-batches of 8 and 16
#   PART=curve   gain and price on kvcat-base (runs/scale) at RATIO tokens a parameter, 10.6 or 100: SEEDS, FORMS; a
#                point after the other, and the same command continues
#   PART=long    what `kvcat compress` costs on documents of 8,000 to 32,000 tokens, over reading them (MODEL)
#   PART=vllm    the attention of compact documents in vLLM against its reference (needs kvcat[vllm])
# PART=check runs/gpu.sh on a bare machine with Python and torch first installs kvcat; WHEELS=folder installs from that
# folder alone, without a network. TRY=1 tries a part on a processor, with tiny sizes. Results are files in OUT.
set -eu
cd "$(dirname "$0")/.."
: "${PART:?one of check, train, curve, long, vllm}"
OUT=${OUT:-out/gpu} DEVICE=${DEVICE:-cuda}
[ -z "${TRY:-}" ] || DEVICE=cpu
mkdir -p "$OUT"
python() { command "${PYTHON:-python3}" "$@"; }
kvcat() { python -m kvcat "$@"; }
# a command whose output is kept in a file and shown; it fails as the command does
kept() {
  file=$OUT/$1; shift
  "$@" > "$file" 2>&1 || { cat "$file"; exit 1; }
  cat "$file"
}

python -c "import kvcat, pytest, datasets, pandas, scipy, matplotlib" 2> "$OUT/missing.txt" || {
  # torch stays the machine's
  echo "torch==$(python -c 'import torch; print(torch.__version__)')" > "$OUT/torch.txt"
  python -m pip install --quiet ${WHEELS:+--no-index --find-links "$WHEELS"} --constraint "$OUT/torch.txt" \
    --editable ".[report]" pytest hypothesis
}

case $PART in
  check)
    tests="-m gpu tests"
    [ -z "${TRY:-}" ] || { export KVCAT_TEST_DEVICE=accel; tests="-m gpu tests/test_gpu.py -k attention"; }
    kept tests.txt python -m pytest -q $tests
    dtype=bfloat16 windows=4 prefixes="1024 4096"
    [ -z "${TRY:-}" ] || { dtype=float32; windows=1; prefixes=256; }
    kept attention.txt python benchmarks/attention.py --device "$DEVICE" --dtype $dtype
    kept solver.txt python benchmarks/attention_matching.py --device "$DEVICE" --model "${MODEL:-kvcat-base}" \
      --data code=installed:test --windows $windows --prefix $prefixes --methods attention-matching snapkv
    ;;
  train)
    [ -e "$OUT/shape/config.json" ] || python runs/gpu.py shape "$OUT/shape" ${TRY:+--tiny}
    sequence=1024 steps=20 micros="8 16" compiles="no --compile"
    [ -z "${TRY:-}" ] || { sequence=64; steps=4; micros=2; compiles=no; }
    runs=
    for form in "" -control; do
      for micro in $micros; do
        for compile in $compiles; do
          [ "$compile" != no ] || compile=
          run=$OUT/train/qwen2.5-0.5b${form:--router}-$micro${compile:+-compiled}
          runs="$runs $run"
          [ ! -e "$run/export" ] || continue
          kvcat train "qwen2.5-0.5b$form" --model "$OUT/shape" --output "$run" --data installed --dtype bfloat16 \
            --device "$DEVICE" --seq-len $sequence --batch-size $micro --micro-batch-size $micro --max-steps $steps \
            --warmup-steps 2 --validation-every 1000 --validation-sequences 2 --checkpoint-every 1000 $compile
          # 8 GB a run, of which only the record counts
          rm -rf "$run/checkpoints" "$run"/export/*.safetensors
        done
      done
    done
    kept speed.txt python runs/gpu.py speed $runs
    ;;
  curve)
    queue=$OUT/queue.txt records=$OUT/scale.csv.gz
    per_parameter=${RATIO:-10.6} seeds=${SEEDS:-1 2 3 4 5}
    # of 4 x 1,024 tokens, for 708,960 parameters
    steps=$(awk "BEGIN { printf \"%d\", $per_parameter * 708960 / 4096 + 0.5 }")
    [ -z "${TRY:-}" ] || { per_parameter=0.1; steps=3; seeds=1; export WINDOWS=2; }
    : > "$queue"
    for seed in $seeds; do
      for form in ${FORMS:-control router rand}; do echo "$form $per_parameter $steps $seed" >> "$queue"; done
    done
    OUT=$OUT/scale RECORDS=$records QUEUE=$queue DEVICE=$DEVICE runs/scale/curve.sh
    kept scale.txt python runs/scale/curve.py --records "$records"
    ;;
  long)
    lengths="8000 16000 32000" model=${MODEL:-$OUT/shape}
    [ -z "${TRY:-}" ] || { lengths=600; model=kvcat-base; }
    [ "$model" != "$OUT/shape" ] || [ -e "$OUT/shape/config.json" ] || python runs/gpu.py shape "$OUT/shape"
    for length in $lengths; do
      python runs/gpu.py text "$OUT/$length.txt" --tokens "$length" --model "$model"
      # its last line on standard error: seconds, also over those of reading, and memory over the whole cache
      kept "long-$length.txt" python -m kvcat compress "$model" --text "$OUT/$length.txt" --keep 0.1 \
        --device "$DEVICE" -o "$OUT/$length.safetensors" --overwrite
    done
    ;;
  vllm)
    python -c "import vllm" 2> "$OUT/missing.txt" || { echo "PART=vllm needs kvcat[vllm], for a GPU" >&2; exit 2; }
    kept vllm.txt python -m pytest -q -m gpu tests/serving
    ;;
  *) echo "no part $PART: check, train, curve, long or vllm" >&2; exit 2 ;;
esac
