"""KL against the memory that an engine needs for a cache, by what the engine can hold.

    kvcat budgets smollm2-135m --corpus CORPUS -o heads.json
    kvcat budgets smollm2-135m --corpus CORPUS -o two.json --two-sizes
    python benchmarks/engine_memory.py --data books=FILE code=installed:test --half validation \\
        --windows 2 --budgets heads.json --two-sizes two.json --out OUT

Every window is a document of --prefix tokens and the 256 tokens after it, which the cache does not
know. An engine holds equally many cells in every head (llama.cpp, and vLLM as it is), as many in
every head of a layer (vLLM with long and short layers), or what every head needs (kvcat). A method
gets the largest cache whose cells are at most a share of the dense cache's (of a few sizes, where
the fullest head is not known beforehand). Figures are the mean KL(dense || compact) in nats per
token, the geometric mean of its ratio to the first row, and processor seconds of the compression
(of one size). Records in --out continue an interrupted run.
"""

import argparse
import platform
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import torch
from tqdm import tqdm
from windows import add_options, encoder, stored

import kvcat
from kvcat.cache import CompactCache
from kvcat.compress import Compressor, Trace, parse_method, seeded_compressor
from kvcat.errors import run_script
from kvcat.files import append_jsonl, read_jsonl

SUFFIX = 256
# slots of the fullest head over the average: sizes that are tried
FULLEST_TO_MEAN = (4, 5, 6, 7, 8, 10, 12, 16, 32)


def cells_of_fullest(cache: CompactCache) -> float:
    """Cells per head if all heads have as many."""
    return cache.max_slots


def cells_by_layer(cache: CompactCache) -> float:
    """Cells per head if the heads of a layer have as many."""
    return sum(layer.max_slots for layer in cache.layers) / len(cache.layers)


def cells_by_head(cache: CompactCache) -> float:
    """Cells per head if every head has its own."""
    return cache.mean_slots


class Row(NamedTuple):
    """A method in an engine."""

    engine: str
    method: str
    cells: Callable[[CompactCache], float]

    @property
    def is_searched(self) -> bool:
        """Whether the number of slots for some cells is not known beforehand."""
        return self.cells is cells_of_fullest and "equal" not in self.method


def rows(options: argparse.Namespace) -> list[Row]:
    """The rows of the table."""
    both = "llama.cpp, vLLM"
    made = [
        Row(both, "attention-matching,budgets=equal", cells_of_fullest),
        Row(both, "attention-matching", cells_of_fullest),
    ]
    if options.two_sizes:
        method = f"attention-matching,budgets={options.two_sizes}"
        made.append(Row("vLLM, two kinds of layers", method, cells_by_layer))
    made.append(Row("kvcat", "attention-matching", cells_by_head))
    if options.budgets:
        method = f"attention-matching,budgets={options.budgets}"
        made.append(Row("kvcat", method, cells_by_head))
    return made


def largest(row: Row, compressor: Compressor, trace: Trace, most_cells: int) -> CompactCache:
    """The largest cache of at most so many cells per head in the row's engine."""
    if not row.is_searched:
        return compressor(trace, num_slots=most_cells)
    sizes = sorted({max(1, round(most_cells / factor)) for factor in FULLEST_TO_MEAN})
    keeps = [size / trace.prefix_len for size in sizes]
    fitting = [cache for cache in compressor.each(trace, keeps) if row.cells(cache) <= most_cells]
    return max(fitting, key=lambda cache: cache.mean_slots)


def measure(
    model, ids: torch.Tensor, options: argparse.Namespace, done: set[tuple]
) -> Iterator[dict]:
    """A record per row and memory of one window that is not done yet."""
    prefix_len = options.prefix
    whole = kvcat.trace(model, ids, prefix_len)
    alone = kvcat.trace(model, ids[:, :prefix_len], supervision="self")
    for number, row in enumerate(rows(options)):
        compressor = seeded_compressor(*parse_method(row.method), seed=0)
        for memory in options.memory:
            if (number, memory) in done:
                continue
            begun = time.process_time()
            cache = largest(row, compressor, alone, round(memory * prefix_len))
            seconds = time.process_time() - begun
            yield {
                "row": number,
                "memory": memory,
                "kl": kvcat.compare(whole, cache).kl.item(),
                "seconds": seconds,
                "slots": cache.mean_slots,
                "cells": row.cells(cache),
            }


def report(records: list[dict], options: argparse.Namespace) -> None:
    """A Markdown table of mean KL, of the geometric mean of its ratio to the first row, and of
    seconds."""
    frame = pd.DataFrame(records)
    kl = frame.groupby(["row", "memory"]).kl.mean()
    logs = frame.assign(log=np.log(frame.kl)).groupby(["row", "memory"]).log.mean()
    seconds = frame.groupby(["row", "memory"]).seconds.median()
    slots = frame.groupby(["row", "memory"]).slots.mean()
    head = [f"{100 * memory:g} %" for memory in options.memory]
    print(" | ".join(["| what holds the cells", "method", *head, "seconds"]) + " |")
    print("|---" * (len(head) + 3) + "|")
    for number, row in enumerate(rows(options)):
        cells = [
            f"{kl[number, memory]:.3g}, {np.exp(logs[number, memory] - logs[0, memory]):.2f}"
            for memory in options.memory
        ]
        time_of = f"{seconds[number].mean():.2f}"
        if row.is_searched:
            filled = ", ".join(f"{slots[number, memory]:.0f}" for memory in options.memory)
            time_of = f"(slots on average {filled})"
        print(" | ".join([f"| {row.engine}", f"`{row.method}`", *cells, time_of]) + " |")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    add_options(parser)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--memory", type=float, nargs="+", default=[0.05, 0.1, 0.2])
    parser.add_argument("--budgets", help="file of kvcat budgets")
    parser.add_argument("--two-sizes", help="file of kvcat budgets --two-sizes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = kvcat.load(options.model)
    encode = encoder(tokenizer)
    windows = stored(options.out, options, SUFFIX, [encode])
    path = options.out / "records.jsonl"
    records = read_jsonl(path) if path.exists() else []
    for index, window in enumerate(tqdm(windows)):
        done = {
            (record["row"], record["memory"]) for record in records if record["window"] == index
        }
        if len(done) == len(rows(options)) * len(options.memory):
            continue
        ids = torch.tensor([window.tokens(encode, options.prefix + SUFFIX)])
        for figures in measure(model, ids, options, done):
            record = {"window": index, "kind": window.kind, **figures}
            append_jsonl(path, record)
            records.append(record)
    kinds = pd.Series([window.kind for window in windows]).value_counts()
    print(
        f"{options.model}, {options.prefix} + {SUFFIX} tokens, "
        f"{', '.join(f'{count} {kind}' for kind, count in kinds.items())}; "
        f"{platform.machine()}, one thread, torch {torch.__version__}\n"
    )
    report(records, options)


if __name__ == "__main__":
    run_script(main)
