"""Seconds of compression methods on real models, optionally compared with the original's code.

    python benchmarks/attention_matching.py --model smollm2-135m NAME=FOLDER [--peer FOLDER]

A document alone is compressed (--way self), or fitted to the 128 tokens that follow it (--way
suffix). All methods take turns on every window. Each starts cold on the same trace. The tables, one
for each model and prefix length, show medians and their ratio to the prefill, a forward of the
prefix that fills the cache: processor time of one thread, or wall time on a GPU. With --peer, a
checkout of adamzweiger/compaction, and --way suffix that code's matching pursuit ("fast") is one of
the methods.
"""

import argparse
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from named_models import NamedModel, add_model_option, parse_models
from peers import method_of
from windows import Source, choose, encoder

import kvcat
from kvcat.errors import InputError, run_script

SUFFIX = 128
METHODS = (
    "attention-matching",
    "attention-matching,budgets=equal",
    "attention-matching,preset=paper",
    "refined",
)
PEER = "original-omp-fast"
PREFILL = "prefill"


def seconds_of(run: Callable[[], Any], device: torch.device) -> float:
    """Processor time of a call, or wall time on a GPU."""
    if device.type != "cuda":
        begun = time.process_time()
        run()
        return time.process_time() - begun
    begun = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - begun


def measured(
    model: Any, windows: list[list[int]], prefix: int, options: argparse.Namespace
) -> dict[tuple[str, float], list[float]]:
    """Seconds of every round by method and keep ratio; the prefill has the keep ratio 1."""
    methods = {spec: method_of(spec, options.peer) for spec in options.methods}
    seconds: dict[tuple[str, float], list[float]] = {}

    def add(name: str, keep: float, run: Callable[[], Any]) -> None:
        seconds.setdefault((name, keep), []).append(seconds_of(run, model.device))

    for tokens in windows:
        ids = torch.tensor([tokens], device=model.device)

        def prefill(ids: torch.Tensor = ids) -> Any:
            with torch.no_grad():
                return model(ids[:, :prefix], use_cache=True, logits_to_keep=1)

        if options.way == "self":
            traced = kvcat.trace(model, ids[:, :prefix], supervision="self")
        else:
            traced = kvcat.trace(model, ids, prefix)
        for _ in range(options.rounds):
            add(PREFILL, 1.0, prefill)
            for keep in options.keep:
                for name, method in methods.items():
                    add(name, keep, lambda m=method, k=keep, t=traced: next(m.each(t, [k])))
    return seconds


def report(seconds: dict[tuple[str, float], list[float]], options: argparse.Namespace) -> None:
    """A Markdown table of medians and ratios to the prefill."""
    prefill = statistics.median(seconds[PREFILL, 1.0])
    print(" | ".join(["|", *(f"{100 * keep:g} %" for keep in options.keep)]) + " |")
    print("|---" * (len(options.keep) + 1) + "|")
    for name in options.methods:
        medians = [statistics.median(seconds[name, keep]) for keep in options.keep]
        cells = [f"{median:.2f}, {median / prefill:.2f}" for median in medians]
        print(" | ".join([f"| `{name}`", *cells]) + " |")
    print(f"\nprefill {prefill:.2f}")


def measure(named: NamedModel, prefix: int, options: argparse.Namespace) -> None:
    """Measure one model at one prefix length, and print a table."""
    model = named.load(options.device)
    encode = encoder(named.tokenizer)
    sources = [Source.parse(text) for text in options.data]
    windows = choose(sources, [encode], length=prefix + SUFFIX, num_windows=options.windows)
    tokens = [window.tokens(encode, prefix + SUFFIX) for window in windows]
    where = f"{platform.machine()}, one thread"
    if model.device.type == "cuda":
        where = torch.cuda.get_device_name()
    print(
        f"\n{named.label}, {prefix} tokens ({options.way}), {len(windows)} windows, "
        f"{options.rounds} rounds, {where}, torch {torch.__version__}\n"
    )
    report(measured(model, tokens, prefix, options), options)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_option(parser)
    parser.add_argument(
        "--data",
        nargs="+",
        default=["code=installed"],
        metavar="KIND=PATH[:SPLIT]",
        help="texts of the windows, long enough for the longest prefix",
    )
    parser.add_argument("--windows", type=int, default=2, help="of each kind")
    parser.add_argument("--prefix", type=int, nargs="+", default=[768], help="lengths, tokens")
    parser.add_argument("--way", choices=("self", "suffix"), default="suffix")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--keep", type=float, nargs="+", default=[0.05, 0.1, 0.2, 0.4])
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--peer", help="checkout of the original's code")
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.methods = list(options.methods)
    if options.peer and options.way == "self":
        raise InputError("the original's code is fitted to text after the prefix: --way suffix")
    if options.peer:
        options.methods.append(PEER)
    for named in parse_models(options.model):
        for prefix in options.prefix:
            measure(named, prefix, options)


if __name__ == "__main__":
    run_script(main)
