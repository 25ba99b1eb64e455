"""KL of compression methods on real models.

    python benchmarks/quality.py --model smollm2-135m NAME=FOLDER \\
        --data prose=FILE chat=FOLDER code=installed --out OUT

Every window is a prefix and the 256 tokens after it, from the same texts on every model
(``windows.py``). A cache is made in three ways: from the first half of these tokens ("suffix"),
from the prefix's own queries ("self"), and from a repetition of the prefix ("reconstruction"). The
first is judged on the half that it was fitted to ("fitted") and on the other one ("later"). The
last two know nothing of what follows and are judged on all of it ("document"). Methods that read no
queries after the prefix make one cache for all three.

Figures are KL(dense || compact) in nats per token, with 95 % intervals that resample documents, and
then paired ratios to the first method, and the number of windows on which a method is ahead of it.
Every window is written to --out when it is done; the same command continues an interrupted run, and
with other models or methods adds them.
"""

import argparse
import math
import platform
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from named_models import NamedModel, add_model_option, parse_models
from peers import LEARNING, ORIGINAL, Method, method_of
from tqdm import tqdm
from windows import Window, add_options, encoder, stored

from kvcat.compress import Trace, split_supervision, trace
from kvcat.compress.compare import replay_hidden
from kvcat.compress.documents import reconstruction_of_tokens
from kvcat.errors import InputError, run_script
from kvcat.files import append_jsonl, read_jsonl
from kvcat.losses import score_positions
from kvcat.models import output_head
from kvcat.stats.intervals import ClusterBootstrap, Estimate

SUFFIX = 256
RECORDS = "records.jsonl"
METHODS = (
    "attention-matching",
    "attention-matching,preset=paper",
    "h2o",
    "snapkv",
    "tova",
    "keynorm",
    "streaming",
)
WAYS = ("fitted", "later", "self", "reconstruction")


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


def measure(traces: Traces, compressor: Method, way: str, keeps: list[float]) -> Iterator[dict]:
    """KL on both halves of the suffix, processor seconds, and bytes over those of the dense cache,
    of one method on one window by keep ratio."""
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
        share_of_bytes = cache.nbytes / made.dense_cache().nbytes
        yield {
            "keep": keep,
            "halves": halves,
            "seconds": round(seconds, 3),
            "bytes": round(share_of_bytes, 5),
        }
        begun = time.process_time()


def makes_cache(method: str, way: str) -> bool:
    """Whether a method makes a cache of its own in this way."""
    if way == "suffix":
        return True
    if not method.startswith(LEARNING) or method.startswith(ORIGINAL):
        return False  # the original's code is fitted to queries after the prefix alone
    if way != "self":
        return True
    is_refined_known = method.startswith("refined") and "preset=known" in method
    return not is_refined_known and not method.startswith("gradient")  # which needs predictions


def run(
    named: NamedModel,
    windows: list[Window],
    options: argparse.Namespace,
    known: set[tuple],
) -> Iterator[dict]:
    """A record per window, method, way and keep ratio that is not known yet."""
    encode = encoder(named.tokenizer)
    model = None
    rejected: set[str] = set()  # methods that cannot compress this model: they have no rows
    for index, window in enumerate(tqdm(windows, named.label)):
        todo: list[tuple[str, str, list[float]]] = []
        for spec in filter(lambda spec: spec not in rejected, options.methods):
            for way in options.ways:
                keeps = [
                    keep
                    for keep in options.keep
                    if (named.label, index, spec, way, keep) not in known
                ]
                if keeps and makes_cache(spec, way):
                    todo.append((spec, way, keeps))
        if not todo:
            continue
        if model is None:
            model = named.load_for(options.out / RECORDS)
        tokens = window.tokens(encode, options.prefix + SUFFIX)
        traces = Traces(model, named.tokenizer, tokens, options.prefix)
        for spec, way, keeps in todo:
            about = {
                "model": named.label,
                "window": index,
                "kind": window.kind,
                "document": window.document,
                "method": spec,
                "way": way,
            }
            try:
                for figures in measure(traces, method_of(spec, options.peer), way, keeps):
                    yield about | figures
            except InputError as error:
                rejected.add(spec)
                tqdm.write(f"{named.label}: {spec} is left out: {error}", file=sys.stderr)


def table(records: Iterable[dict]) -> pd.DataFrame:
    """KL by window (rows) and column, method and keep ratio; only windows that every method has."""
    rows = []
    for record in records:
        first, second = record["halves"]
        losses = {record["way"]: (first + second) / 2}
        if record["way"] == "suffix":
            losses = {"fitted": first, "later": second}
            if not record["method"].startswith(LEARNING):
                losses |= dict.fromkeys(("self", "reconstruction"), (first + second) / 2)
        window = (record["window"], record["kind"], record["document"])
        rows += [(*window, way, record["method"], record["keep"], kl) for way, kl in losses.items()]
    names = ["window", "kind", "document", "way", "method", "keep", "kl"]
    frame = pd.DataFrame(rows, columns=names)
    return frame.pivot(
        index=["window", "kind", "document"], columns=["way", "method", "keep"], values="kl"
    ).dropna()


def written(estimate: Estimate) -> str:
    """A figure that is never negative, with its interval, which one document does not have."""
    if math.isnan(estimate.low):
        return f"{estimate.value:.3g} (no interval)"
    return f"{estimate.value:.3g} [{max(0.0, estimate.low):.2g}, {estimate.high:.2g}]"


def cell(losses: pd.DataFrame, bootstrap: ClusterBootstrap, way: str, methods: list[str]) -> str:
    """KL of the last method, or its ratio to the first one's and the windows where it is ahead.

    Args:
        losses: by window, of one keep ratio.
        bootstrap: over the documents of the windows.
        way: of the caches.
        methods: the first one and that of the cell, or one alone.
    """
    first = losses[way, methods[0]].to_numpy()
    if len(methods) == 1:
        return written(bootstrap.mean(first))
    kl = losses[way, methods[1]].to_numpy()
    ratio = bootstrap.estimate(bootstrap.of_means(np.divide, kl, first))
    return f"{written(ratio)}, {int((kl < first).sum())}/{len(kl)}"


def report(records: list[dict], methods: list[str], keeps: list[float], ways: list[str]) -> None:
    """Markdown: for every way, the mean KL of the first method, and the others' ratios to it."""
    labels = list(dict.fromkeys(record["model"] for record in records))
    losses = {
        label: table(record for record in records if record["model"] == label) for label in labels
    }
    bootstraps = {}
    for label, frame in losses.items():
        bootstraps[label] = ClusterBootstrap(list(frame.index.get_level_values("document")))
        of_kinds = frame.groupby("kind").size()
        counts = ", ".join(f"{count} {kind}" for kind, count in of_kinds.items())
        num_documents = bootstraps[label].num_documents
        print(f"{label}: {len(frame)} windows of {num_documents} documents ({counts})")
    head = [f"{label} {100 * keep:g} %" for label in labels for keep in keeps]
    for way in ("fitted", "later", *(way for way in ways if way != "suffix")):
        shown = [
            method
            for method in methods
            if all((way, method, keeps[0]) in frame.columns for frame in losses.values())
        ]
        if not shown:
            continue
        print("\n" + " | ".join([f"| {way}", *head]) + " |")
        print("|---" * (len(head) + 1) + "|")
        for method in shown:
            compared = list(dict.fromkeys([shown[0], method]))
            cells = [
                cell(losses[label].xs(keep, axis=1, level="keep"), bootstraps[label], way, compared)
                for label in labels
                for keep in keeps
            ]
            print(" | ".join([f"| `{method}`", *cells]) + " |")


def report_kinds(records: list[dict], method: str, keeps: list[float]) -> None:
    """Markdown: mean KL of one method by kind of text, later and on a document alone."""
    frame = pd.DataFrame([record for record in records if record["method"] == method])
    if frame.empty or frame.kind.nunique() < 2:
        return
    print("\n" + " | ".join([f"| `{method}` by kind", *(f"{100 * k:g} %" for k in keeps)]) + " |")
    print("|---" * (len(keeps) + 1) + "|")
    frame["later"] = [halves[1] for halves in frame.halves]
    frame["all"] = [sum(halves) / 2 for halves in frame.halves]
    for (label, kind, way), rows in frame.groupby(["model", "kind", "way"], sort=False):
        column = "later" if way == "suffix" else "all"
        means = rows.groupby("keep")[column].mean()
        name = "later" if way == "suffix" else way
        cells = [f"{means[keep]:.3g}" for keep in keeps]
        print(" | ".join([f"| {label}, {kind}, {name}", *cells]) + " |")


def report_seconds(records: list[dict], methods: list[str], keeps: list[float]) -> None:
    """Markdown: median processor seconds of a cache that is fitted to the suffix."""
    of_suffix = [record for record in records if record["way"] == "suffix"]
    if not of_suffix:
        return
    frame = pd.DataFrame(of_suffix)
    labels = list(dict.fromkeys(frame.model))
    head = [f"{label} {100 * keep:g} %" for label in labels for keep in keeps]
    print("\n" + " | ".join(["| seconds", *head]) + " |")
    print("|---" * (len(head) + 1) + "|")
    medians = frame.groupby(["method", "model", "keep"]).seconds.median()
    for method in methods:
        cells = [f"{medians[method, label, keep]:.2f}" for label in labels for keep in keeps]
        print(" | ".join([f"| `{method}`", *cells]) + " |")


def plot(records: list[dict], methods: list[str], path: Path) -> None:
    """KL against the slots kept on one model, by method, where the text that follows is half known
    and where it is not."""
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
    add_model_option(parser)
    add_options(parser)
    parser.add_argument(
        "--out", type=Path, required=True, help="folder of these texts and this prefix length"
    )
    parser.add_argument("--keep", type=float, nargs="+", default=[0.05, 0.1, 0.2, 0.4])
    parser.add_argument(
        "--methods",
        nargs="+",
        default=METHODS,
        help="kvcat's methods, kvsculpt, kvsculpt-adaptive, grkv[:METHOD], and with --peer "
        "original-keys, original-omp, original-omp-fast",
    )
    parser.add_argument(
        "--ways",
        nargs="+",
        choices=("suffix", "self", "reconstruction"),
        default=["suffix", "self"],
    )
    parser.add_argument("--first", type=int, help="measure so many windows alone")
    parser.add_argument("--peer", type=Path, help="checkout of the original's code")
    parser.add_argument("--plot", type=Path, help="write a picture of the first model's KL")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for method in options.methods:
        method_of(method, options.peer)  # an unknown method is rejected before a model is loaded
    if not any(makes_cache(method, way) for method in options.methods for way in options.ways):
        raise InputError(
            f"{', '.join(options.methods)} makes no cache of its own in the way "
            f"{', '.join(options.ways)}: add --ways suffix"
        )
    models = parse_models(options.model)
    windows = stored(options.out, options, SUFFIX, [encoder(model.tokenizer) for model in models])
    done = options.out / RECORDS
    records = read_jsonl(done) if done.exists() else []
    known = {
        (record["model"], record["window"], record["method"], record["way"], record["keep"])
        for record in records
    }
    for named in models:
        for record in run(named, windows[: options.first], options, known):
            append_jsonl(done, record)
            records.append(record)
    print(f"{platform.machine()}, torch {torch.__version__}, {options.prefix} + {SUFFIX} tokens\n")
    labels = {named.label for named in models}
    wanted = [
        record
        for record in records
        if record["method"] in options.methods
        and record["keep"] in options.keep
        and record["model"] in labels
        and record["way"] in options.ways
        and record["window"] < (options.first or len(windows))
    ]
    report(wanted, list(options.methods), options.keep, options.ways)
    report_kinds(wanted, options.methods[0], options.keep)
    report_seconds(wanted, list(options.methods), options.keep)
    if options.plot:
        of_first = [record for record in wanted if record["model"] == models[0].label]
        plot(of_first, list(options.methods), options.plot)


if __name__ == "__main__":
    run_script(main)
