"""KL of compression methods on a real model.

    python benchmarks/quality.py --data prose=FILE code=installed --out OUT

Every window is a prefix and the 256 tokens after it. A cache is made in three ways: from the first
half of these tokens ("suffix"), from the prefix's own queries ("self"), and from a repetition of
the prefix ("reconstruction"). The first is judged on the half that it was fitted to ("fitted") and
on the other one ("later"). The last two know nothing of what follows and are judged on all of it
("document"). Methods that read no queries after the prefix make one cache for all three.

Figures are KL(dense || compact) in nats per token, with 95 % intervals that resample documents, and
then paired ratios to the first method. Every window is written to --out when it is done; the same
command continues an interrupted run.
"""

import argparse
import importlib
import math
import platform
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from tqdm import tqdm

import kvcat
from kvcat.cache import CompactCache, CompactLayer
from kvcat.compress import Trace, parse_method, seeded_compressor, split_supervision, trace
from kvcat.compress.compare import replay_hidden
from kvcat.compress.documents import reconstruction_of_tokens
from kvcat.data import split_documents
from kvcat.evals import windows_from_documents
from kvcat.evals.intervals import ClusterBootstrap
from kvcat.files import append_jsonl, claim_folder, read_jsonl
from kvcat.losses import score_positions
from kvcat.models import output_head

SUFFIX = 256
METHODS = (
    "attention-matching",
    "attention-matching,preset=paper",
    "h2o",
    "snapkv",
    "tova",
    "keynorm",
    "streaming",
)
LEARNING = (
    "attention-matching",
    "gradient",
    "original-",
)  # methods that read what follows the prefix
WAYS = ("fitted", "later", "self", "reconstruction")


def windows(options: argparse.Namespace, tokenizer) -> Iterator[tuple[str, str, list[int]]]:
    """Domain, document and tokens of every window; domains take turns, so that the first n are a
    fair sample."""
    domains = []
    for entry in options.data:
        name, _, source = entry.partition("=")
        path, _, split = source.partition(":")
        documents = (
            (d.id, d.text)
            for d in split_documents(path, split or "all", limit=20 * options.windows)
        )
        cut = windows_from_documents(
            documents,
            tokenizer,
            prefix_len=options.prefix,
            suffix_len=SUFFIX,
            limit=options.windows,
            per_document=options.per_document,
            seed=options.seed,
        )
        domains.append([(name, f"{name}:{window.document}", window.tokens) for window in cut])
    for turn in range(max(map(len, domains))):
        yield from (domain[turn] for domain in domains if turn < len(domain))


class Traces:
    """The traces of one window, each made when it is first needed."""

    def __init__(self, model, tokenizer, tokens: list[int], prefix_len: int) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._ids = torch.tensor([tokens])
        self._prefix_len = prefix_len
        self._made: dict[str, Trace] = {}

    def __getitem__(self, name: str) -> Trace:
        if name not in self._made:
            self._made[name] = self._make(name)
        return self._made[name]

    def _make(self, name: str) -> Trace:
        prefix = self._ids[:, : self._prefix_len]
        match name:
            case "whole":
                return trace(self._model, self._ids, self._prefix_len)
            case "suffix":
                return split_supervision(self["whole"], 0.5)[0]
            case "self":
                return trace(self._model, prefix, supervision="self")
        return trace(self._model, reconstruction_of_tokens(self._tokenizer, prefix))


class Original:
    """The authors' own code of Attention Matching, one head at a time, from a checkout of
    adamzweiger/compaction."""

    def __init__(self, folder: Path, name: str) -> None:
        sys.path.insert(0, str(folder))
        kind = "omp" if name.startswith("omp") else "highest_attention_keys"
        module = importlib.import_module(f"compaction.algorithms.{kind}")
        if kind == "omp":
            fast = {"k_choice": 4, "nnls_interval": 2} if name == "omp-fast" else {}
            self._solver = module.OMPCompaction(
                nnls_iters=0,
                nnls_upper_bound=math.exp(7),
                drop_key_beta_cutoff=-7,
                c2_method="lsq",
                **fast,
            )
        else:
            self._solver = module.HighestAttentionKeysCompaction(
                score_method="rms",
                nnls_iters=2,
                nnls_lower_bound=math.exp(-3),
                nnls_upper_bound=math.exp(3),
                c2_method="lsq",
            )

    def each(self, traced: Trace, keeps: list[float]) -> Iterator[CompactCache]:
        """The caches of several keep ratios, each computed alone."""
        for keep in keeps:
            layers = []
            for every, values, queries in zip(
                traced.keys, traced.values, traced.queries, strict=True
            ):
                heads = zip(every[0], values[0], queries[0].chunk(every.shape[1]), strict=True)
                fits = [
                    self._solver.compute_compacted_cache(
                        k, v, q.flatten(0, 1), math.ceil(keep * len(k))
                    )
                    for k, v, q in heads
                ]
                keys, bias, fitted = ([[fit[field] for fit in fits]] for field in range(3))
                layers.append(CompactLayer.ragged(keys, fitted, bias, None))
            yield CompactCache(layers, traced.prefix_len, traced.fingerprint)


def measure(traces: Traces, compressor, way: str, keeps: list[float]) -> Iterator[dict]:
    """KL on both halves of the suffix and the processor seconds of one method on one window, by
    keep ratio."""
    whole = traces["whole"]
    made = traces[way]
    begun = time.process_time()
    for keep, cache in zip(keeps, compressor.each(made, keeps), strict=True):
        seconds = time.process_time() - begun
        hidden = replay_hidden(whole.model, cache, whole.suffix_ids)
        kl = score_positions(
            output_head(whole.model), hidden, whole.suffix_ids, whole.hidden[:, 1:]
        ).kl
        halves = kl[0].unflatten(0, (2, -1)).mean(-1).tolist()
        yield {"keep": keep, "halves": halves, "seconds": round(seconds, 3)}
        begun = time.process_time()


def table(records: list[dict]) -> pd.DataFrame:
    """KL by window (rows) and column, method and keep ratio; only windows that every method has."""
    rows = []
    for record in records:
        first, second = record["halves"]
        losses = {record["way"]: (first + second) / 2}
        if record["way"] == "suffix":
            reads_suffix = record["method"].startswith(LEARNING)
            losses = {"fitted": first, "later": second}
            losses |= (
                {}
                if reads_suffix
                else dict.fromkeys(("self", "reconstruction"), (first + second) / 2)
            )
        rows += [
            (record["window"], record["document"], way, record["method"], record["keep"], kl)
            for way, kl in losses.items()
        ]
    frame = pd.DataFrame(rows, columns=["window", "document", "way", "method", "keep", "kl"])
    return frame.pivot(
        index=["window", "document"], columns=["way", "method", "keep"], values="kl"
    ).dropna()


def report(records: list[dict], methods: list[str], keeps: list[float], ways: list[str]) -> None:
    """For every way and method its mean KL, and its ratio to the first method's."""
    losses = table(records)
    bootstrap = ClusterBootstrap([document for _, document in losses.index])
    print(
        f"{len(losses)} windows of {bootstrap.num_documents} documents; keep "
        f"{' '.join(f'{keep:g}' for keep in keeps)}"
    )
    for way in ("fitted", "later", *(way for way in ways if way != "suffix")):
        print(f"\n{way}")
        shown = [method for method in methods if (way, method, keeps[0]) in losses.columns]
        for method in shown:
            cells = []
            for keep in keeps:
                kl = losses[way, method, keep].to_numpy()
                first = losses[way, shown[0], keep].to_numpy()
                mean = bootstrap.mean(kl)
                ratio = bootstrap.estimate(bootstrap.of_means(np.divide, kl, first))
                cells.append(
                    f"{mean.value:.4f} x{ratio.value:.2f} [{ratio.low:.2f}, {ratio.high:.2f}]"
                )
            print(f"{method:<44}" + "  ".join(cells))
    print("\nprocessor seconds a window, all keep ratios, the model's own forwards left out")
    for (method, way), rows in pd.DataFrame(records).groupby(["method", "way"], sort=False):
        print(f"{method:<44}{way:<16}{rows.seconds.sum() / rows.window.nunique():.1f}")


def plot(records: list[dict], methods: list[str], path: Path) -> None:
    """KL against the slots kept, by method, where the text that follows is half known and where it
    is not."""
    losses = table(records)
    figure, axes = plt.subplots(1, 2, figsize=(9, 4.2), sharey=True, layout="constrained")
    ways = {"later": "text behind the fitted positions", "self": "a document alone"}
    for axis, (way, title) in zip(axes, ways.items(), strict=True):
        for index, method in enumerate(methods):
            if (way, method) in losses.columns.droplevel("keep"):
                curve = losses[way, method]
                axis.plot(
                    100 * curve.columns, curve.mean(), marker="o", label=method, color=f"C{index}"
                )
        axis.set(xscale="log", yscale="log", xlabel="slots kept, %", title=title)
        axis.set_xticks([5, 10, 20, 40], ["5", "10", "20", "40"], minor=False)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("KL(dense || compact), nats per token")
    figure.legend(
        *axes[0].get_legend_handles_labels(), fontsize="small", loc="outside lower center", ncols=3
    )
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--data", nargs="+", required=True, metavar="DOMAIN=PATH[:SPLIT]")
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of this model, prefix length and text"
    )
    parser.add_argument("--prefix", type=int, default=768)
    parser.add_argument("--windows", type=int, default=16, help="of each domain")
    parser.add_argument("--per-document", type=int, default=2)
    parser.add_argument("--keep", type=float, nargs="+", default=[0.05, 0.1, 0.2, 0.4])
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=("suffix", "self", "reconstruction"),
        default=["suffix", "self"],
    )
    parser.add_argument(
        "--peer",
        type=Path,
        help="checkout of the original's code: methods original-keys, original-omp-fast",
    )
    parser.add_argument("--seed", type=int, default=0, help="of the windows' places")
    parser.add_argument("--plot", type=Path, help="write KL against slots as a picture")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, tokenizer = kvcat.load(options.model)
    options.out.mkdir(parents=True, exist_ok=True)
    chosen = options.out / "windows.jsonl"
    done = options.out / "records.jsonl"
    settings = {
        key: vars(options)[key]
        for key in ("model", "data", "prefix", "windows", "per_document", "seed")
    }
    if claim_folder(options.out, "config.json", settings) not in (None, settings):
        raise SystemExit(f"{options.out} holds other windows: see its config.json")
    if not chosen.exists():
        fields = ("domain", "document", "tokens")
        append_jsonl(
            chosen,
            *(dict(zip(fields, window, strict=True)) for window in windows(options, tokenizer)),
        )
    records = read_jsonl(done) if done.exists() else []
    known = {
        (record["window"], record["method"], record["way"], record["keep"]) for record in records
    }
    for index, window in enumerate(tqdm(read_jsonl(chosen), "windows")):
        traces = Traces(model, tokenizer, window["tokens"], options.prefix)
        for spec in options.methods:
            for way in options.ways:
                keeps = [keep for keep in options.keep if (index, spec, way, keep) not in known]
                original = spec.startswith(
                    "original-"
                )  # supports only queries after the prefix as supervision
                if not keeps or not (
                    way == "suffix" or (spec.startswith(LEARNING) and not original)
                ):
                    continue
                if way == "self" and spec.startswith(
                    "gradient"
                ):  # learns from predictions, and there are none
                    continue
                compressor = (
                    Original(options.peer, spec.removeprefix("original-"))
                    if original
                    else seeded_compressor(*parse_method(spec), seed=0)
                )
                about = {
                    "window": index,
                    "document": window["document"],
                    "method": spec,
                    "way": way,
                }
                new = [about | figures for figures in measure(traces, compressor, way, keeps)]
                append_jsonl(done, *new)
                records += new
    print(
        f"{platform.machine()}, torch {torch.__version__}, {options.model}, {options.prefix} + "
        f"{SUFFIX} tokens"
    )
    wanted = [r for r in records if r["method"] in options.methods and r["keep"] in options.keep]
    report(wanted, list(options.methods), options.keep, options.ways)
    if options.plot:
        plot(wanted, list(options.methods), options.plot)


if __name__ == "__main__":
    main()
