"""Seconds of compression methods on one text, each from a cold start.

    python benchmarks/compress.py --text FILE [--model kvcat-base] [--prefix 768] [--suffix 256]
        [--keep 0.05 0.1 0.2 0.4] [--methods ...] [--threads 1]

The first line is the trace, one dense forward that all methods share. A method's seconds are those
of a call on the trace alone. "all" makes the caches of all keep ratios in one call
(``Compressor.each``), which shares their work. KL is KL(dense || compact) on the suffix, in nats
per token. With one thread the clock is processor time.
"""

import argparse
import platform
import time
from pathlib import Path

import torch

import kvcat
from kvcat.compress import parse_method, seeded_compressor
from kvcat.errors import run_script

METHODS = (
    "attention-matching",
    "attention-matching,budgets=equal",
    "attention-matching,preset=paper,num_queries=none",
    "h2o",
    "snapkv",
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--model", default="kvcat-base")
    parser.add_argument("--prefix", type=int, default=768)
    parser.add_argument("--suffix", type=int, default=256)
    parser.add_argument("--keep", type=float, nargs="+", default=[0.05, 0.1, 0.2, 0.4])
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    model, tokenizer = kvcat.load(options.model)
    ids = tokenizer.encode(options.text.read_text(encoding="utf-8"), verbose=False)[
        : options.prefix + options.suffix
    ]
    print(
        f"{platform.machine()}, {options.threads} threads, torch {torch.__version__}, {len(ids)} "
        "tokens"
    )
    kvcat.trace(model, torch.tensor([ids[:64]]), 32)  # set-up of the libraries
    start = clock()
    traced = kvcat.trace(model, torch.tensor([ids]), options.prefix)
    print(f"{'trace':<50}{clock() - start:8.2f} s")
    for spec in options.methods:
        compressor = seeded_compressor(*parse_method(spec), seed=0)
        cells = []
        for keep in options.keep:
            start = clock()
            cache = compressor(traced, keep_ratio=keep)
            cells.append(f"{clock() - start:8.2f} s{kvcat.compare(traced, cache).kl.item():9.5f}")
        start = clock()
        list(compressor.each(traced, options.keep))
        print(f"{spec:<50}" + "".join(cells) + f"   all {clock() - start:8.2f} s", flush=True)


if __name__ == "__main__":
    run_script(main)
