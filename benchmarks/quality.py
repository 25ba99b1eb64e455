"""What every method loses, where it was fitted and later: python benchmarks/quality.py [--windows 24].

Each window is a prefix, the text that supervises, and text that judges: every method sees the queries (or predictions)
of the first half of the suffix at most. Figures are KL(dense || compact) in nats per token with 95 % intervals,
clustered by document. The best method of a column has a star; below stand the ratios to the first method, paired.
"""

import argparse
import platform

import numpy as np
import torch

import kvcat
from kvcat.compress import parse_method, seeded_compressor, split_supervision, supervised_kl, trace
from kvcat.data import split_documents
from kvcat.evals import windows_from_documents
from kvcat.evals.statistics import ClusterBootstrap

METHODS = (
    "attention-matching",
    "attention-matching,budgets=adaptive",
    "attention-matching,budgets=layers",
    "attention-matching,own_weight=0",
    "attention-matching,selection=omp",
    "attention-matching,preset=paper",
    "attention-matching,log_bias=false",
    "gradient,num_steps=20,init=attention-matching",
    "gradient,num_steps=20",
    "snapkv",
    "h2o",
    "tova",
    "keynorm",
    "streaming",
    "first",
    "random",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="kvcat-base")
    parser.add_argument("--data", default="installed")
    parser.add_argument("--split", default="test")
    parser.add_argument("--prefix", type=int, default=768)
    parser.add_argument("--suffix", type=int, default=256)
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--per-document", type=int, default=1)
    parser.add_argument("--keep", type=float, nargs="+", default=[0.05, 0.1, 0.2, 0.4])
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, tokenizer = kvcat.load(options.model)
    documents = ((d.id, d.text) for d in split_documents(options.data, options.split, limit=10 * options.windows))
    windows = windows_from_documents(
        documents, tokenizer, prefix_len=options.prefix, suffix_len=options.suffix, limit=options.windows,
        per_document=options.per_document, seed=0,
    )  # fmt: skip
    bootstrap = ClusterBootstrap([window.document for window in windows])
    print(f"{platform.machine()}, torch {torch.__version__}, {options.model}, {len(windows)} windows of")
    print(f"{options.prefix} + {options.suffix} tokens, {options.data}:{options.split}")
    found: dict[tuple[str, float], tuple[list[float], list[float]]] = {}
    for window in windows:
        traced = trace(model, torch.tensor([window.tokens]), options.prefix)
        fitted, judge = split_supervision(traced, 0.5)
        for spec in options.methods:
            compressor = seeded_compressor(*parse_method(spec), seed=0)
            for keep, cache in zip(options.keep, compressor.each(fitted, options.keep), strict=True):
                pair = found.setdefault((spec, keep), ([], []))
                pair[0].append(supervised_kl(fitted, cache).item())
                pair[1].append(supervised_kl(judge, cache).item())
    columns = {key: [np.array(part) for part in pair] for key, pair in found.items()}
    for index, name in enumerate(("fitted to", "later")):
        print(f"\nKL at positions {name}, keep {' '.join(f'{keep:g}' for keep in options.keep)}")
        for spec in options.methods:
            cells = []
            for keep in options.keep:
                mean = bootstrap.mean(columns[spec, keep][index])
                best = min(columns[other, keep][index].mean() for other in options.methods) >= mean.value
                cells.append(f"{mean.value:.4f}{'*' if best else ' '}[{mean.low:.4f}, {mean.high:.4f}]")
            print(f"{spec:<50}" + "  ".join(cells))
        first = options.methods[0]
        print(f"of {first}, paired")
        for spec in options.methods[1:]:
            ratios = [bootstrap.ratio(columns[spec, keep][index], columns[first, keep][index]) for keep in options.keep]
            print(f"{spec:<50}" + "  ".join(f"{r.value:6.2f} [{r.low:.2f}, {r.high:.2f}]" for r in ratios))


if __name__ == "__main__":
    main()
