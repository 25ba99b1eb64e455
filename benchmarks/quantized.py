"""KL and right answers of compact caches against their bytes: 16, 8 and 4 bits, and dense caches.

    python benchmarks/quantized.py --model smollm2-135m NAME=FOLDER \\
        --data prose=FILE code=installed --documents 2 2 2 --out OUT --plot FILE

Windows and the folder OUT are those of quality.py, and so are two of its ways to make a cache
("suffix" and "reconstruction"); the questions are those of questions.py (a document alone, repeated
for the methods that learn). A row of the tables is a method, its bits, and how many times fewer
bytes its caches have than a dense cache in 16 bits; scales, offsets, log-bias and counts are
counted. A cache in 16 bits is computed in the model's own type and counted as 16 bits. The rows
"transformers" are its QuantizedCache (residual of 1 token, groups of 64; values and keys per
channel as its backend makes them), if quanto or hqq is installed; no questions are asked of it. The
same command continues an interrupted run.
"""

import argparse
import importlib.util
import math
import platform
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from named_models import NamedModel, add_model_option, parse_models
from peers import LEARNING
from quality import SUFFIX, Traces
from questions import Document, documents_of, right
from tqdm import tqdm
from transformers import QuantizedCache
from windows import Window, add_options, encoder, stored

from kvcat.cache import CompactCache, cache_argument
from kvcat.compress import Compressor, Trace, make_compressor, parse_method
from kvcat.compress.compare import replay_hidden
from kvcat.errors import run_script
from kvcat.files import append_jsonl
from kvcat.losses import score_positions
from kvcat.models import frozen, hidden_states, output_head
from kvcat.stats.intervals import ClusterBootstrap
from kvcat.stats.shares import share

METHODS = ("attention-matching", "snapkv")
BITS = ("16", "8", "4")
BACKENDS = {"quanto": "optimum.quanto", "hqq": "hqq"}
LENGTHS = (512, 1024)
STYLES = {"16": ("o", "-"), "8": ("s", "--"), "4": ("^", ":")}
TICKS = (1, 2, 5, 10, 20, 50)
WORDS = {
    "attention-matching": "Attention Matching, the default",
    "snapkv": "SnapKV",
    "h2o": "H2O",
    "kvpress:KVzipPress": "KVzip (kvpress)",
    "dense": "every slot kept",
    "transformers hqq": "every slot, transformers' QuantizedCache (hqq)",
    "transformers quanto": "every slot, transformers' QuantizedCache (quanto)",
}


def compressor_of(spec: str, bits: str) -> Compressor:
    """The method that makes caches of so many bits."""
    name, options = parse_method(spec)
    quantized = {} if bits == "16" else {"bits": bits}
    return make_compressor(name, **options, **quantized)


def halves(whole: Trace, hidden: torch.Tensor) -> list[float]:
    """KL on the first and on the second half of the suffix, nats per token."""
    head = output_head(whole.model)
    kl = score_positions(head, hidden, whole.suffix_ids, whole.hidden[:, 1:]).kl
    return kl[0].unflatten(0, (2, -1)).mean(-1).tolist()


def dense_bytes(made: Trace) -> int:
    """Bytes of the dense cache in 16 bits."""
    return sum(2 * states.numel() for states in (*made.keys, *made.values))


def bytes_of(cache: CompactCache) -> int:
    """Bytes of a cache, one in ordinary numbers as if they had 16 bits."""
    if cache.bits is not None:
        return cache.nbytes
    return sum(2 * t.nbytes // t.itemsize for layer in cache.layers for t in counted(layer))


def counted(layer: Any) -> list[torch.Tensor]:
    """Keys, values and log-bias of a layer."""
    tensors = (layer.keys, layer.values, layer.log_bias)
    return [tensor for tensor in tensors if tensor is not None]


def compact(
    traces: Traces, way: str, spec: str, bits: str, keeps: list[float]
) -> Iterator[dict[str, Any]]:
    """Figures of one method on one window, by keep ratio."""
    made = traces[way]
    whole = traces["whole"]
    caches = compressor_of(spec, bits).each(made, keeps)
    for keep, cache in zip(keeps, caches, strict=True):
        hidden = replay_hidden(whole.model, cache, whole.suffix_ids)
        fewer = dense_bytes(made) / bytes_of(cache)
        yield {"keep": keep, "fewer": fewer, "halves": halves(whole, hidden)}


def dense(traces: Traces, bits: str) -> dict[str, Any]:
    """Figures of the dense cache, every number rounded to the nearest code."""
    whole = traces["whole"]
    cache = whole.dense_cache().quantize(bits)
    hidden = replay_hidden(whole.model, cache, whole.suffix_ids)
    fewer = dense_bytes(whole) / bytes_of(cache)
    return {"keep": 1.0, "fewer": fewer, "halves": halves(whole, hidden)}


@torch.no_grad()
def of_transformers(traces: Traces, backend: str, bits: int) -> dict[str, Any]:
    """Figures of transformers' QuantizedCache."""
    whole = traces["whole"]
    config = whole.model.config
    past = QuantizedCache(backend, config, nbits=bits, q_group_size=64, residual_length=1)
    prefix = whole.input_ids[:, : whole.prefix_len]
    with frozen(whole.model):
        hidden_states(whole.model, input_ids=prefix, use_cache=True, **cache_argument(past))
        hidden = hidden_states(
            whole.model, input_ids=whole.suffix_ids, use_cache=True, **cache_argument(past)
        )
    # a scale and an offset of 16 bits for each group of 64 numbers
    return {"keep": 1.0, "fewer": 16 / (bits + 32 / 64), "halves": halves(whole, hidden)}


def installed_backends() -> list[str]:
    """Backends of transformers' QuantizedCache that are installed."""
    names = []
    for name, module in BACKENDS.items():
        top = module.partition(".")[0]
        if importlib.util.find_spec(top) and importlib.util.find_spec(module):
            names.append(name)
    return names


def figures_of(
    traces: Traces, options: argparse.Namespace, is_known: Any
) -> Iterator[dict[str, Any]]:
    """The figures of a window that are not known yet."""
    for spec in options.methods:
        for bits in options.bits:
            for way in options.ways:
                if way == "reconstruction" and not spec.startswith(LEARNING):
                    continue  # a method that reads nothing after the prefix has one cache
                keeps = [k for k in options.keep if not is_known(spec, bits, way, k)]
                for figures in compact(traces, way, spec, bits, keeps) if keeps else ():
                    yield {"method": spec, "bits": bits, "way": way, **figures}
    for bits in options.bits:
        if bits != "16" and not is_known("dense", bits, "suffix", 1.0):
            yield {"method": "dense", "bits": bits, "way": "suffix", **dense(traces, bits)}
    for backend in installed_backends():
        for number in (8, 4):
            name = f"transformers {backend}"
            if not is_known(name, str(number), "suffix", 1.0):
                figures = of_transformers(traces, backend, number)
                yield {"method": name, "bits": str(number), "way": "suffix", **figures}


def answers_of(
    document: Document, options: argparse.Namespace, is_known: Any
) -> Iterator[dict[str, Any]]:
    """Which answers about a document are right, as far as it is not known yet."""
    codes = [code for _, code in document.facts]
    traces: dict[str, Trace] = {}

    def traced(way: str) -> Trace:
        if way not in traces:
            traces[way] = document.traced(way)
        return traces[way]

    def record(method: str, bits: str, keep: float, made: Trace, cache: CompactCache) -> dict:
        answers = document.answers(cache)
        marks = [right(answer, code) for answer, code in zip(answers, codes, strict=True)]
        fewer = dense_bytes(made) / bytes_of(cache)
        return {"method": method, "bits": bits, "keep": keep, "fewer": fewer, "right": marks}

    for spec in options.methods:
        for bits in options.bits:
            keeps = [keep for keep in options.keep if not is_known(spec, bits, keep)]
            if not keeps:
                continue
            made = traced("reconstruction" if spec.startswith(LEARNING) else "self")
            caches = compressor_of(spec, bits).each(made, keeps)
            for keep, cache in zip(keeps, caches, strict=True):
                yield record(spec, bits, keep, made, cache)
    for bits in options.bits:
        if not is_known("dense", bits, 1.0):
            made = traced("self")
            cache = made.dense_cache() if bits == "16" else made.dense_cache().quantize(bits)
            yield record("dense", bits, 1.0, made, cache)


def measure(
    named: NamedModel, windows: Sequence[Window], options: argparse.Namespace
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The records of one model's windows and of its questions; new ones are written to --out."""
    files = (options.out / "records.jsonl", options.out / "questions.jsonl")
    of_windows, of_questions = (named.records(file) for file in files)
    known = {(r["window"], r["method"], r["bits"], r["way"], r["keep"]) for r in of_windows}
    known |= {(r["document"], r["method"], r["bits"], r["keep"]) for r in of_questions}
    tokenizer = named.tokenizer
    encode = encoder(tokenizer)
    model = named.load_for(files[0])

    def add(file: Path, records: list, place: dict[str, Any], figures: dict[str, Any]) -> None:
        record = {"model": named.label, **place, **figures}
        append_jsonl(file, record)
        records.append(record)

    for index, window in enumerate(tqdm(windows, f"{named.label}, windows")):
        tokens = window.tokens(encode, options.prefix + SUFFIX)
        traces = Traces(model, tokenizer, tokens, options.prefix)

        def is_known(*key: object, place: int = index) -> bool:
            return (place, *key) in known

        for figures in figures_of(traces, options, is_known):
            place = {"window": index, "document": window.document}
            add(files[0], of_windows, place, figures)
    documents = documents_of(model, tokenizer, LENGTHS, options.documents, "test")
    for document in tqdm(documents, f"{named.label}, questions"):

        def is_answered(*key: object, place: str = document.name) -> bool:
            return (place, *key) in known

        for figures in answers_of(document, options, is_answered):
            add(files[1], of_questions, {"document": document.name}, figures)
    finite = [record for record in of_windows if all(map(math.isfinite, record["halves"]))]
    return finite, of_questions


def losses(records: list[dict[str, Any]]) -> pd.DataFrame:
    """One row per position, method, bits and keep ratio: bytes, and KL with its interval.

    Methods that read nothing after the prefix are judged on all of it, as for a document alone, and
    also on its halves.
    """
    rows = []
    frame = pd.DataFrame(records)
    keys = ["way", "method", "bits", "keep"]
    for (way, method, bits, keep), group in frame.groupby(keys, sort=False):
        bootstrap = ClusterBootstrap(list(group.document))
        positions = {}
        if way == "suffix":
            positions["fitted"] = [first for first, _ in group.halves]
            positions["later"] = [second for _, second in group.halves]
        if way == "reconstruction" or not str(method).startswith(LEARNING):
            positions["document"] = [sum(pair) / 2 for pair in group.halves]
        for where, values in positions.items():
            mean = bootstrap.mean(torch.tensor(values).double().numpy())
            rows.append((where, method, bits, keep, group.fewer.mean(), mean))
    made = pd.DataFrame(rows, columns=["on", "method", "bits", "keep", "fewer", "estimate"])
    return made.sort_values(["on", "fewer"])


def shares_right(records: list[dict[str, Any]]) -> pd.DataFrame:
    """One row per method, bits and keep ratio: bytes, and the share of right answers.

    Documents count on which every cache was asked.
    """
    rows = []
    frame = pd.DataFrame(records)
    cells = frame.groupby("document").size()
    whole = cells[cells == len(frame[["method", "bits", "keep"]].drop_duplicates())].index
    frame = frame[frame.document.isin(whole)]
    for (method, bits, keep), group in frame.groupby(["method", "bits", "keep"], sort=False):
        marks = group.explode("right")
        estimate = share(marks.right.astype(float).to_numpy(), list(marks.document))
        rows.append((method, bits, keep, group.fewer.mean(), estimate))
    made = pd.DataFrame(rows, columns=["method", "bits", "keep", "fewer", "estimate"])
    return made.sort_values("fewer")


def report(label: str, kl: pd.DataFrame, answers: pd.DataFrame) -> None:
    """Print the tables of one model."""
    tables = {f"{where}: KL in nats per token": rows for where, rows in kl.groupby("on")}
    if len(answers):
        tables["share of right answers"] = answers
    for title, rows in tables.items():
        print(f"\n{label}, {title}, by how many times fewer bytes")
        for row in rows.itertuples():
            estimate: Any = row.estimate
            print(
                f"{row.method:<44}{row.bits:>5} bits  keep {row.keep:<6g}{row.fewer:6.1f}x  "
                f"{estimate.value:.5f} [{estimate.low:.5f}, {estimate.high:.5f}]"
            )


def plot(tables: dict[str, tuple[pd.DataFrame, pd.DataFrame]], path: Path) -> None:
    """KL on the text after a document, and right answers, against bytes; a column per model."""
    has_answers = any(len(answers) for _, answers in tables.values())
    figure, axes = plt.subplots(
        1 + has_answers,
        len(tables),
        figsize=(5.2 * len(tables), 4.2 * (1 + has_answers)),
        layout="constrained",
        squeeze=False,
    )
    named = [method for kl, _ in tables.values() for method in kl.method]
    colours = {method: f"C{index}" for index, method in enumerate(dict.fromkeys(named))}
    for column, (label, (kl, answers)) in enumerate(tables.items()):
        panels = {0: kl[kl.on == "document"], 1: answers}
        for row in range(len(axes)):
            axis = axes[row, column]
            axis.set(xscale="log", xlabel="bytes, per cent of the whole cache in 16 bits")
            axis.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS])
            axis.minorticks_off()
            axis.grid(alpha=0.3)
            if not len(panels[row]):
                continue
            for (method, bits), series in panels[row].groupby(["method", "bits"], sort=False):
                draw(axis, series, str(method), str(bits), colours[method])
        axes[0, column].set(yscale="log", title=label)
    axes[0, 0].set_ylabel("KL to the whole cache, nats per token\n(lower is better)")
    if has_answers:
        axes[1, 0].set_ylabel("share of right answers\n(higher is better)")
    handles, names = axes[0, 0].get_legend_handles_labels()
    figure.legend(
        handles, names, fontsize="small", loc="outside lower center", ncols=1 + (len(tables) > 1)
    )
    figure.savefig(path, dpi=150)


def draw(axis: Any, series: pd.DataFrame, method: str, bits: str, colour: str) -> None:
    """A method's caches of so many bits, with 95 % intervals."""
    marker, line = STYLES[bits]
    value, low, high = np.transpose(
        [(estimate.value, estimate.low, estimate.high) for estimate in series.estimate]
    )
    axis.errorbar(
        100 / series.fewer,
        value,
        yerr=[np.minimum(value - low, 0.9 * value), high - value],
        marker=marker,
        linestyle=line,
        color=colour,
        linewidth=1.2,
        elinewidth=0.6,
        capsize=2,
        label=f"{WORDS.get(method, method)}, {bits} bits",
    )


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_model_option(parser)
    add_options(parser)
    parser.add_argument("--out", type=Path, required=True, help="folder of these texts")
    parser.add_argument("--keep", type=float, nargs="+", default=[0.05, 0.1, 0.14, 0.22, 0.4])
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--bits", nargs="+", default=BITS, choices=BITS)
    ways = ("suffix", "reconstruction")
    parser.add_argument("--ways", nargs="+", choices=ways, default=ways)
    parser.add_argument("--first", type=int, help="measure so many windows alone")
    parser.add_argument(
        "--documents", type=int, nargs=3, default=[0, 0, 0], metavar="N", help="with questions"
    )
    parser.add_argument("--plot", type=Path, help="write both against bytes as a picture")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def main() -> None:
    options = parsed()
    torch.set_num_threads(options.threads)
    models = parse_models(options.model)
    encoders = [encoder(named.tokenizer) for named in models]
    windows = stored(options.out, options, SUFFIX, encoders)[: options.first]
    tables = {}
    for named in models:
        of_windows, of_questions = measure(named, windows, options)
        answers = shares_right(of_questions) if of_questions else pd.DataFrame()
        tables[named.label] = (losses(of_windows), answers)
    print(
        f"{platform.machine()}, torch {torch.__version__}, {options.prefix} + {SUFFIX} tokens; "
        f"backends of QuantizedCache: {installed_backends() or 'none installed'}"
    )
    for label, (kl, answers) in tables.items():
        report(label, kl, answers)
    if options.plot:
        plot(tables, options.plot)


if __name__ == "__main__":
    run_script(main)
