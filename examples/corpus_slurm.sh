#!/bin/bash
# Compress a corpus on several GPUs with Slurm: one rank per GPU, all ranks write to one store.
#   sbatch --ntasks 8 --gpus-per-task 1 examples/corpus_slurm.sh MODEL CORPUS STORE [OPTION ...]
# MODEL, CORPUS and STORE must be readable on every node. Submit the job again if a rank died: it
# makes only what is missing. The last line puts the rows of all ranks into the manifest.
#SBATCH --job-name kvcat-corpus
set -eu

model=$1
corpus=$2
store=$3
shift 3

srun --kill-on-bad-exit=0 bash -c '
    kvcat corpus "$1" "$2" -o "$3" --device "${KVCAT_DEVICE:-cuda}" \
        --shard "$SLURM_PROCID/$SLURM_NTASKS" "${@:4}"
' rank "$model" "$corpus" "$store" "$@" || echo "a rank failed: its documents are made below" >&2

kvcat corpus "$model" "$corpus" -o "$store" --device "${KVCAT_DEVICE:-cuda}" "$@"
