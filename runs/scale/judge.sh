# What curve.sh and scratch.sh share: it is read by them, in the root of the repository.
DEVICE=${DEVICE:-cpu}
WINDOWS=${WINDOWS:-48}

python() { command "${PYTHON:-python3}" "$@"; }
kvcat() { python -m kvcat "$@"; }

judge() {  # judge LABEL MODEL FOLDER
  # as the paper does, with caches fitted to the scored text; then as users do, from the text alone
  kvcat eval suffix "$1=$2" --windows "$WINDOWS" --per-document 1 --prefix 768 --suffix 256 \
    --keep 0.05 0.1 0.2 --method attention-matching,preset=paper attention-matching h2o snapkv \
    --supervision suffix --device "$DEVICE" --out "$3/suffix"
  kvcat eval suffix "$1=$2" --windows "$WINDOWS" --per-document 1 --prefix 384 --suffix 128 \
    --keep 0.05 0.1 0.2 --method attention-matching h2o --supervision reconstruction \
    --device "$DEVICE" --out "$3/reconstruction"
  python runs/scale/curve.py --add "$3/suffix" "$3/reconstruction" --records "$RECORDS"
}

is_recorded() { python runs/scale/curve.py --has "$1" --records "$RECORDS"; }
