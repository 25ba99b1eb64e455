"""KL of compact caches against their bytes: 16, 8 and 4 bits, for two methods and dense caches.

    python benchmarks/quantized.py --model smollm2-135m --data prose=FILE code=installed --out OUT

Windows, the three ways to make a cache and the folder OUT are those of quality.py. A row of the
table is a method, its bits, and how many times fewer bytes its caches have than a dense cache in 16
bits; scales, offsets, log-bias and counts are counted. A cache in 16 bits is computed in the
model's own type and counted as 16 bits. The rows "transformers" are its QuantizedCache (residual of
1 token, groups of 64; values and keys per channel as its backend makes them), if quanto or hqq is
installed.
"""

import argparse
import importlib.util
import math
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd
import torch
from quality import SUFFIX, Traces
from tqdm import tqdm
from transformers import QuantizedCache
from windows import add_options, encoder, stored

import kvcat
from kvcat.cache import CompactCache, cache_argument
from kvcat.compress import Trace, make_compressor, parse_method
from kvcat.compress.compare import replay_hidden
from kvcat.evals.intervals import ClusterBootstrap
from kvcat.files import append_jsonl, read_jsonl
from kvcat.losses import score_positions
from kvcat.models import frozen, hidden_states, output_head

METHODS = ("attention-matching", "snapkv")
BITS = ("16", "8", "8/4", "4")
BACKENDS = {"quanto": "optimum.quanto", "hqq": "hqq"}


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
    name, options = parse_method(spec)
    quantized = {} if bits == "16" else {"bits": bits}
    compressor = make_compressor(name, **options, **quantized)
    made = traces[way]
    whole = traces["whole"]
    for keep, cache in zip(keeps, compressor.each(made, keeps), strict=True):
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


def table(records: list[dict[str, Any]]) -> pd.DataFrame:
    """One row per way, method, bits and keep ratio: bytes, and KL with its interval."""
    rows = []
    frame = pd.DataFrame(records)
    for (way, method, bits, keep), group in frame.groupby(
        ["way", "method", "bits", "keep"], sort=False
    ):
        bootstrap = ClusterBootstrap(list(group.document))
        positions = {"document": [sum(pair) / 2 for pair in group.halves]}
        if way == "suffix":
            positions = {
                "fitted": [first for first, _ in group.halves],
                "later": [second for _, second in group.halves],
            }
        for where, losses in positions.items():
            mean = bootstrap.mean(torch.tensor(losses).double().numpy())
            rows.append((where, method, bits, keep, group.fewer.mean(), mean))
    made = pd.DataFrame(rows, columns=["on", "method", "bits", "keep", "fewer", "kl"])
    return made.sort_values(["on", "fewer"])


def report(records: list[dict[str, Any]]) -> None:
    """Print the table."""
    for where, rows in table(records).groupby("on", sort=False):
        print(f"\n{where}: times fewer bytes, KL in nats per token")
        for row in rows.itertuples():
            kl: Any = row.kl
            print(
                f"{row.method:<44}{row.bits:>5} bits  keep {row.keep:<6g}{row.fewer:6.1f}x  "
                f"{kl.value:.5f} [{kl.low:.5f}, {kl.high:.5f}]"
            )


def plot(records: list[dict[str, Any]], path: Path) -> None:
    """KL against bytes, by method and bits, on later text and on a document's."""
    made = table(records)
    positions = [where for where in ("later", "document") if where in set(made.on)]
    figure, axes = plt.subplots(
        1, len(positions), figsize=(5 * len(positions), 4.2), layout="constrained", squeeze=False
    )
    for axis, where in zip(axes[0], positions, strict=True):
        chosen = made[made.on == where]
        for (method, bits), rows in chosen.groupby(["method", "bits"], sort=False):
            losses = [kl.value for kl in rows.kl]
            axis.plot(100 / rows.fewer, losses, marker="o", label=f"{method}, {bits} bits")
        axis.set(
            xscale="log", yscale="log", xlabel="bytes, % of a dense cache in 16 bits", title=where
        )
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("KL(dense || compact), nats per token")
    handles, labels = axes[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, fontsize="small", loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=150)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    add_options(parser)
    parser.add_argument("--out", type=Path, required=True, help="folder of this model and text")
    parser.add_argument("--keep", type=float, nargs="+", default=[0.05, 0.1, 0.14, 0.22, 0.4])
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--bits", nargs="+", default=BITS)
    parser.add_argument("--ways", nargs="+", choices=("suffix", "self"), default=["suffix", "self"])
    parser.add_argument("--plot", type=Path, help="write KL against bytes as a picture")
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def figures_of(
    traces: Traces, options: argparse.Namespace, is_known: Any
) -> Iterator[dict[str, Any]]:
    """The figures of a window that are not known yet."""
    for spec in options.methods:
        for bits in options.bits:
            for way in options.ways:
                if way == "self" and not spec.startswith("attention-matching"):
                    continue  # a method that reads nothing after the prefix has one cache
                keeps = [k for k in options.keep if not is_known(spec, bits, way, k)]
                for figures in compact(traces, way, spec, bits, keeps) if keeps else ():
                    yield {"method": spec, "bits": bits, "way": way, **figures}
    for bits in options.bits:
        if bits != "16" and not is_known("dense", bits, "suffix", 1.0):
            yield {"method": "dense", "bits": bits, "way": "suffix", **dense(traces, bits)}
    for backend in installed_backends():
        for number in (4, 2):
            name = f"transformers {backend}"
            if not is_known(name, str(number), "suffix", 1.0):
                figures = of_transformers(traces, backend, number)
                yield {"method": name, "bits": str(number), "way": "suffix", **figures}


def main() -> None:
    options = parsed()
    torch.set_num_threads(options.threads)
    model, tokenizer = kvcat.load(options.model)
    encode = encoder(tokenizer)
    windows = stored(options.out, options, SUFFIX, [encode])
    done = options.out / "records.jsonl"
    records = read_jsonl(done) if done.exists() else []
    known = {(r["window"], r["method"], r["bits"], r["way"], r["keep"]) for r in records}
    for index, window in enumerate(tqdm(windows, "windows")):
        tokens = window.tokens(encode, options.prefix + SUFFIX)
        traces = Traces(model, tokenizer, tokens, options.prefix)

        def is_known(*key: object, window_number: int = index) -> bool:
            return (window_number, *key) in known

        for figures in figures_of(traces, options, is_known):
            record = {"window": index, "document": window.document, **figures}
            append_jsonl(done, record)
            records.append(record)
    print(
        f"{platform.machine()}, torch {torch.__version__}, {options.model}, {options.prefix} + "
        f"{SUFFIX} tokens; backends of QuantizedCache: {installed_backends() or 'none installed'}"
    )
    finite = [record for record in records if all(map(math.isfinite, record["halves"]))]
    report(finite)
    if options.plot:
        plot(finite, options.plot)


if __name__ == "__main__":
    main()
