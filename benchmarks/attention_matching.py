"""Seconds of Attention Matching, optionally compared with its authors' code.

    python benchmarks/attention_matching.py [--peer FOLDER]

Caches of 768 tokens are fitted to the 128 tokens that follow. All methods take turns on every
window. Each starts cold on the same trace. The table shows medians: processor time of one thread,
or wall time on a GPU. With --peer, a checkout of adamzweiger/compaction, it also shows ratios to
that code's matching pursuit ("fast").
"""

import argparse
import platform
import statistics
import time
from pathlib import Path

import torch
from quality import Original

import kvcat
from kvcat.compress import parse_method, seeded_compressor
from kvcat.data import split_documents
from kvcat.evals import windows_from_documents

PREFIX = 768
SUFFIX = 128
METHODS = (
    "attention-matching",
    "attention-matching,budgets=equal",
    "attention-matching,preset=paper",
)
PEER = "original-omp-fast"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--data", default="installed", help="text of the windows")
    parser.add_argument("--windows", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", type=float, nargs="+", default=[0.05, 0.1, 0.2, 0.4])
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--peer", type=Path, help="checkout of the original's code")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, tokenizer = kvcat.load(options.model, device=options.device)
    methods = {spec: seeded_compressor(*parse_method(spec), seed=0) for spec in options.methods}
    if options.peer:
        methods[PEER] = Original(options.peer, PEER.removeprefix("original-"))
    documents = (
        (d.id, d.text) for d in split_documents(options.data, "all", limit=20 * options.windows)
    )
    windows = windows_from_documents(
        documents,
        tokenizer,
        prefix_len=PREFIX,
        suffix_len=SUFFIX,
        limit=options.windows,
        per_document=1,
        seed=0,
    )
    gpu = model.device.type == "cuda"
    where = torch.cuda.get_device_name() if gpu else f"{platform.machine()}, one thread"
    print(
        f"{where}, torch {torch.__version__}, {options.model}, {len(windows)} windows, "
        f"{options.rounds} rounds\n"
    )
    seconds: dict[tuple[str, float], list[float]] = {}
    for window in windows:
        traced = kvcat.trace(model, torch.tensor([window.tokens], device=model.device), PREFIX)
        for _ in range(options.rounds):
            for keep in options.keep:
                for name, method in methods.items():
                    clock = time.perf_counter if gpu else time.process_time
                    begun = clock()
                    next(method.each(traced, [keep]))
                    if gpu:
                        torch.cuda.synchronize()
                    seconds.setdefault((name, keep), []).append(clock() - begun)
    print(" | ".join(["|", *(f"{100 * keep:g} %" for keep in options.keep)]) + " |")
    print("|---" * (len(options.keep) + 1) + "|")
    for name in methods:
        cells = []
        for keep in options.keep:
            kvcat_seconds, peer = (
                statistics.median(seconds[key, keep]) if (key, keep) in seconds else 0.0
                for key in (name, PEER)
            )
            cells.append(f"{kvcat_seconds:.2f}" + (f", {kvcat_seconds / peer:.2f}" if peer else ""))
        print(" | ".join([f"| `{name}`", *cells]) + " |")


if __name__ == "__main__":
    main()
