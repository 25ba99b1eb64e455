"""Loss of quality of a cache for engines without log-bias.

    python benchmarks/export.py [--model kvcat-base]

Attention Matching fits each window's prefix to the first half of its suffix. The table shows the
KL(dense || compact) in nats per token, mean over windows: over the half that was fitted to, and
over the half after it.

- kept: with log-bias, as kvcat itself replays it
- dropped: the same without the log-bias
- without: keys and values fitted without log-bias from the start (`log_bias=False`)
- evicted: the original values of the kept keys, without log-bias

The re-rotated export of every method is replayed as well. The last line is the largest difference
of a logit.
"""

import argparse
import platform

import torch

import kvcat
from kvcat.cache import CompactCache, CompactLayer
from kvcat.compress import AttentionMatching, Trace, replay, trace
from kvcat.data import split_documents
from kvcat.errors import run_script
from kvcat.evals import windows_from_documents
from kvcat.serving.prefix import plain_prefix

KEEP_RATIOS = (0.05, 0.1, 0.2, 0.4)


def without_bias(cache: CompactCache) -> CompactCache:
    layers = [CompactLayer(layer.keys, layer.values) for layer in cache.layers]
    return CompactCache(layers, cache.num_tokens, cache.fingerprint, cache.record)


def original_values(fitted: Trace, cache: CompactCache) -> CompactCache:
    """The kept keys with their original values."""
    layers = []
    for layer, values in zip(cache.layers, fitted.values, strict=True):
        rows = layer.positions.unsqueeze(-1).expand(-1, -1, -1, values.shape[-1])
        layers.append(CompactLayer(layer.keys, values.gather(2, rows)))
    return CompactCache(layers, cache.num_tokens, cache.fingerprint, cache.record)


def caches(fitted: Trace, keep_ratio: float) -> dict[str, CompactCache]:
    kept = AttentionMatching(budgets="equal")(fitted, keep_ratio=keep_ratio)
    return {
        "kept": kept,
        "dropped": without_bias(kept),
        "without": AttentionMatching(log_bias=False, budgets="equal")(
            fitted, keep_ratio=keep_ratio
        ),
        "evicted": original_values(fitted, kept),
    }


def divergence(dense: torch.Tensor, compact: torch.Tensor) -> torch.Tensor:
    """KL by window and position."""
    first = dense.log_softmax(-1)
    second = compact.log_softmax(-1)
    return (first.exp() * (first - second)).sum(-1)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="kvcat-base")
    parser.add_argument("--data", default="installed")
    parser.add_argument("--windows", type=int, default=24)
    parser.add_argument("--per-document", type=int, default=1)
    parser.add_argument("--prefix", type=int, default=384)
    parser.add_argument("--suffix", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    model, tokenizer = kvcat.load(options.model)
    documents = [(document.id, document.text) for document in split_documents(options.data, "test")]
    windows = windows_from_documents(
        documents,
        tokenizer,
        prefix_len=options.prefix,
        suffix_len=options.suffix,
        limit=options.windows,
        per_document=options.per_document,
        seed=options.seed,
    )
    tokens = torch.tensor([window.tokens for window in windows])
    half = options.suffix // 2
    full = trace(model, tokens, options.prefix)
    fitted = trace(model, tokens[:, : options.prefix + half], options.prefix)
    print(
        f"{platform.processor() or platform.machine()}, torch {torch.__version__}, {vars(options)}"
    )
    worst = 0.0
    dense = full.logits
    for keep_ratio in KEEP_RATIOS:
        for name, cache in caches(fitted, keep_ratio).items():
            logits = replay(model, cache, full.suffix_ids)
            kl = divergence(dense, logits)
            print(
                "keep "
                f"{keep_ratio:<5g}{name:<10}{kl[:, :half].mean():8.4f}{kl[:, half:].mean():8.4f}"
            )
            if not cache.has_log_bias:
                again = replay(model, plain_prefix(cache, model), full.suffix_ids)
                worst = max(worst, (again - logits).abs().max().item())
    print(f"re-rotated against original positions: logits differ by at most {worst:.2g}")


if __name__ == "__main__":
    run_script(main)
