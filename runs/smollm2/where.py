"""Where a gain in compressibility is: in a cache's writer or its reader, and in which layers.

    python runs/smollm2/where.py CONTROL TRAINED --data held-out.parquet

*Writer, reader*: the prefix runs on one model, the suffix on another, which reads the first one's
keys and values. Each of the four pairs is treated as one model, dense and compressed; KL is between
these two. If the gain is in the writer, (TRAINED, CONTROL) has it; if in the reader, (CONTROL,
TRAINED).

*Layers*: the caches of all layers are compressed, then only those of one group replace the dense
ones.

*Heads* (``--heads``): the same with one KV head at a time; a table of the heads that lose most
under the control, the middle and the others. The other half of the documents decides which heads
these are.

Figures are ratios of KL to those of the control, and differences of dense NLL, with paired 95 %
intervals over documents. Windows are those of `kvcat eval suffix` with the same numbers.
"""

import argparse
import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import torch
from tqdm import tqdm
from transformers import PreTrainedModel

import kvcat
from kvcat.cache import CompactCache, CompactLayer
from kvcat.compress import Trace, make_compressor
from kvcat.errors import run_script
from kvcat.evals.evaluations.suffix import Suffix, Window
from kvcat.models import capture
from kvcat.stats.intervals import ClusterBootstrap

MODELS = ("control", "trained")
SHARES = {
    "the tenth that loses most": (0, 0.1),
    "the next 40 %": (0.1, 0.5),
    "the other half": (0.5, 1),
}


def read_by(reader: PreTrainedModel, written: Trace, read: Trace) -> Trace:
    """A trace of the suffix on the reader, after the whole cache of the writer's prefix.

    ``read`` is the reader's trace of prefix and suffix.
    """
    dense = replace(written.dense_cache(), fingerprint=read.fingerprint)
    seen = capture(reader, written.suffix_ids, past=dense.to_transformers(reader))
    behind = [keys[:, :, written.prefix_len :].clone() for keys in seen.keys]
    hidden = torch.cat([read.hidden[:, :1], seen.hidden], 1)
    layers = [
        replace(layer, queries=queries, suffix_keys=keys)
        for layer, queries, keys in zip(written.layers, seen.queries, behind, strict=True)
    ]
    return replace(
        written,
        model=reader,
        layers=layers,
        hidden=hidden,
        fingerprint=read.fingerprint,
    )


def head_losses(seen: Trace, cache: CompactCache) -> Iterator[float]:
    """KL with one head of one layer compressed, for every layer and head."""
    dense = list(seen.dense_cache().layers)
    for index, (whole, compact) in enumerate(zip(dense, cache.layers, strict=True)):
        heads = range(whole.counts.shape[1])
        for chosen in heads:
            mixed = [(compact if h == chosen else whole).head(0, h) for h in heads]
            layer = CompactLayer.of_heads([mixed])
            layers = [*dense[:index], layer, *dense[index + 1 :]]
            yield float(kvcat.compare(seen, replace(cache, layers=layers)).kl)


def measure(
    models: list[PreTrainedModel], windows: list[Window], options: argparse.Namespace
) -> Iterator[dict]:
    """One record per method, keep ratio, pair or group, and window."""
    for window in tqdm(windows):
        ids = torch.tensor([window.tokens])
        traces = [kvcat.trace(model, ids, options.prefix) for model in models]
        for w, r in np.ndindex(2, 2):
            seen = traces[w] if w == r else read_by(models[r], traces[w], traces[r])
            for method in options.method:
                for keep, cache in zip(
                    options.keep, make_compressor(method).each(seen, options.keep), strict=True
                ):
                    about = {
                        "document": window.document,
                        "window": window.name,
                        "method": method,
                        "keep": keep,
                    }
                    scores = kvcat.compare(seen, cache)
                    figures = {
                        "kl": float(scores.kl),
                        "nll": float(scores.nll),
                        "nll_dense": float(scores.nll_dense),
                    }
                    yield about | {"cell": f"{MODELS[w]} writes, {MODELS[r]} reads"} | figures
                    for start, stop in (
                        pairwise([*options.groups, len(cache.layers)]) if w == r else ()
                    ):
                        layers = list(seen.dense_cache().layers)
                        layers[start:stop] = cache.layers[start:stop]
                        replaced_kl = float(kvcat.compare(seen, replace(cache, layers=layers)).kl)
                        yield about | {
                            "cell": f"layers {start} to {stop - 1}",
                            "model": MODELS[w],
                            "kl": replaced_kl,
                        }
                    if w == r and options.heads:
                        figures = list(head_losses(seen, cache))
                        yield about | {
                            "cell": "heads",
                            "model": MODELS[w],
                            "kl": sum(figures),
                            "heads": figures,
                        }


def table(records: list[dict]) -> Iterator[str]:
    """A line for each method, keep ratio and cell: KL, its ratio to the control's and the
    difference of dense NLL.
    """
    pairs = [f"{w} writes, {r} reads" for w in MODELS for r in MODELS]
    groups = list(dict.fromkeys(record["cell"] for record in records if "model" in record))
    for method, keep in dict.fromkeys((record["method"], record["keep"]) for record in records):
        chosen = [
            record for record in records if (record["method"], record["keep"]) == (method, keep)
        ]
        rows = {
            c: [x for x in chosen if x["cell"] == c and x.get("model") != "control"]
            for c in pairs + groups
        }
        controls = {
            c: [x for x in chosen if x["cell"] == c and x["model"] == "control"] for c in groups
        }
        for cell, cell_rows in rows.items():
            base = controls.get(cell, rows[pairs[0]])
            draws = ClusterBootstrap([x["document"] for x in cell_rows])
            kl, reference = (np.array([x["kl"] for x in side]) for side in (cell_rows, base))
            ratio = draws.estimate(draws.of_means(np.divide, kl, reference))
            line = (
                f"{method} {keep:g}, {cell}: KL {kl.mean():.4f}, over the control's "
                f"{reference.mean():.4f}: "
            )
            line += f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
            for name in ("nll_dense", "nll") if cell in pairs else ():
                difference = draws.mean(
                    np.array([x[name] - y[name] for x, y in zip(cell_rows, base, strict=True)])
                )
                line += (
                    f"; {name} {difference.value:+.4f} [{difference.low:.4f}, "
                    f"{difference.high:.4f}]"
                )
            yield line
        if "heads" in rows:
            yield from (
                f"{method} {keep:g}, {line}"
                for line in heads_table(rows["heads"], controls["heads"])
            )


def heads_table(trained: list[dict], control: list[dict]) -> Iterator[str]:
    """The share of the control's KL, and the ratio to it, in heads that lose much or little under
    the control.
    """
    draws = ClusterBootstrap([x["document"] for x in trained])
    ours, theirs = (
        np.array([x["heads"] for x in side]) for side in (trained, control)
    )  # (windows, heads)
    half = np.unique([x["document"] for x in trained], return_inverse=True)[1] % 2
    order = np.stack([theirs[half != h].mean(0).argsort()[::-1] for h in (0, 1)])[half]
    ours, theirs = (np.take_along_axis(side, order, axis=1) for side in (ours, theirs))
    for name, bounds in SHARES.items():
        heads = slice(*(round(share * ours.shape[1]) for share in bounds))
        kl = ours[:, heads].sum(1)
        reference = theirs[:, heads].sum(1)
        ratio = draws.estimate(draws.of_means(np.divide, kl, reference))
        share = reference.mean() / theirs.sum(1).mean()
        yield (
            f"heads, {name}: {100 * share:.0f} % of the control's KL, "
            f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"
        )


def main() -> None:
    """Write the records, then print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("control")
    parser.add_argument("trained")
    parser.add_argument("--data", required=True)
    parser.add_argument("--method", nargs="+", default=["attention-matching", "snapkv"])
    parser.add_argument("--keep", nargs="+", type=float, default=[0.05])
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--per-document", type=int, default=2)
    parser.add_argument("--prefix", type=int, default=384)
    parser.add_argument("--suffix", type=int, default=128)
    parser.add_argument(
        "--groups", nargs="+", type=int, default=[0, 7, 15, 22], help="first layer of each group"
    )
    parser.add_argument("--heads", action="store_true", help="also one head at a time")
    parser.add_argument("--out", default="where.jsonl", help="records, one a line")
    options = parser.parse_args()
    (control, tokenizer), (trained, _) = (
        kvcat.load(name) for name in (options.control, options.trained)
    )
    drawn = {
        "prefix": options.prefix,
        "suffix": options.suffix,
        "per_document": options.per_document,
    }
    task = Suffix.task(tokenizer, options.data, split="all", windows=options.windows, **drawn)
    records = []
    with open(options.out, "w", encoding="utf-8") as file:
        for record in measure([control, trained], list(task.examples), options):
            records.append(record)
            file.write(json.dumps(record) + "\n")
    print("\n".join(table(records)))


if __name__ == "__main__":
    run_script(main)
