"""Every press of the installed kvpress, compared with our own methods, as a Markdown table.

    python benchmarks/kvpress_presses.py [--windows 8]

Windows have 384 + 128 tokens of the installed Python sources (test split), in float32; a quarter of
the slots is kept. Attention Matching is fitted to the prefix alone, as the presses are. Presses
that need an inner scoring press get SnapKVPress with a window of 16.
"""

import argparse
import inspect
import logging
import platform
import warnings
from itertools import islice
from typing import Any

import torch
import transformers

import kvcat
from kvcat.compress import SCORERS, AttentionMatching, Compressor, Eviction, Trace, compare, trace
from kvcat.compress.kvpress import REFUSED, KVPress, presses, version
from kvcat.data import open_documents, split_of
from kvcat.errors import InputError, run_script
from kvcat.evals import windows_from_documents

KEEP = 0.25
PREFIX = 384
SUFFIX = 128
# defaults that are too long for a prefix of 384 tokens
OPTIONS: dict[str, dict[str, Any]] = {
    "SnapKVPress": {"window_size": 16},
    "PyramidKVPress": {"window_size": 4},
    "LagKVPress": {"lag_size": 32},
    "ChunkPress": {"chunk_length": 96},
}


def window_trace(name: str, windows: int) -> Trace:
    model, tokenizer = kvcat.load(name)
    texts = ((d.id, d.text) for d in open_documents("installed") if split_of(d.id) == "test")
    chosen = windows_from_documents(
        islice(texts, 100), tokenizer, prefix_len=PREFIX, suffix_len=SUFFIX, limit=windows, seed=0
    )
    return trace(model, torch.tensor([window.tokens for window in chosen]), PREFIX)


def press_of(name: str) -> KVPress:
    options = dict(OPTIONS.get(name, {}))
    if "press" in inspect.signature(presses()[name]).parameters:
        options |= {f"press.{key}": value for key, value in OPTIONS["SnapKVPress"].items()}
        name += "+SnapKVPress"
    return KVPress(name, **options)


def row(name: str, traced: Trace, method: Compressor) -> str:
    supervised_by_prefix = isinstance(method, AttentionMatching)
    made = (
        trace(traced.model, traced.input_ids[:, :PREFIX], supervision="self")
        if supervised_by_prefix
        else traced
    )
    cache = method(made, keep_ratio=KEEP)
    counts = torch.stack([layer.counts for layer in cache.layers])
    spread = (
        f"{counts.min()}" if counts.min() == counts.max() else f"{counts.min()} to {counts.max()}"
    )
    return (
        f"| {name} | {cache.mean_slots:.0f} | {spread} | {compare(traced, cache).kl.mean():.4f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--windows", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore", DeprecationWarning)
    try:
        presses()
    except InputError as error:
        print(error)
        return
    traced = window_trace(options.model, options.windows)
    packages = (
        f"kvpress {version()}, transformers {transformers.__version__}, torch {torch.__version__}"
    )
    print(
        f"{packages}, Python {platform.python_version()}, {options.model}, {options.windows} "
        "windows,"
    )
    print(f"keep {KEEP} of {PREFIX}.\n")
    print("| press | slots per head, mean | fewest to most | KL, nats |\n|---|---|---|---|")
    refusals = []
    for name in sorted(presses()):
        try:
            press = press_of(name)
            print(row(press.name, traced, press), flush=True)
        except InputError as error:
            trained = (
                "it needs a component trained for the model; kvpress downloads it for some models"
            )
            refusals.append(
                f"| {name} | "
                f"{REFUSED.get(name, trained if 'trained component' in str(error) else error)} |"
            )
    ours: dict[str, Compressor] = {name: Eviction(name) for name in SCORERS}
    ours["snapkv, window 16, kernel 5, average"] = Eviction(
        "snapkv", window=16, kernel_size=5, pooling="average"
    )
    ours["attention-matching"] = AttentionMatching()
    print("\n| kvcat's own | slots per head, mean | fewest to most | KL, nats |\n|---|---|---|---|")
    for name, method in ours.items():
        print(row(name, traced, method), flush=True)
    print("\n| press without a cache | why |\n|---|---|", *refusals, sep="\n")


if __name__ == "__main__":
    run_script(main)
