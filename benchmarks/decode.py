"""Time and bytes of decoding from compact caches, relative to dense ones.

    python benchmarks/decode.py [--tokens 8192]

A Qwen2 model of random weights decodes after a prefix. It has 4 layers, and 14 query heads and 2 KV
heads of 64 channels, as Qwen2.5-0.5B does. Every cache has its turn in every round. Times are
medians. Ratios are to a dense cache of as many tokens as the compact one has slots. Bytes are those
of the prefix's keys, values and log-bias.
"""

import argparse
import platform
import statistics
import time

import torch
from transformers import Cache, DynamicCache, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

import kvcat.attention  # noqa: F401 (registers the attention function)
from kvcat.cache import CompactCache, CompactLayer, HeadSlots, cache_argument, fingerprint
from kvcat.errors import run_script

NEW = 32


def small_model(tokens: int, dtype: torch.dtype) -> PreTrainedModel:
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=4096,
        hidden_size=896,
        intermediate_size=1792,
        num_hidden_layers=4,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=2 * tokens,
        tie_word_embeddings=True,
    )
    return Qwen2ForCausalLM(config).to(dtype).eval()


def dense(model: PreTrainedModel, tokens: int, dtype: torch.dtype) -> Cache:
    cache = DynamicCache()
    for layer in range(model.config.num_hidden_layers):
        cache.update(
            torch.randn(1, 2, tokens, 64).to(dtype), torch.randn(1, 2, tokens, 64).to(dtype), layer
        )
    return cache


def compact(
    model: PreTrainedModel, tokens: int, slots: int, dtype: torch.dtype, kind: str
) -> CompactCache:
    layers = []
    for _ in range(model.config.num_hidden_layers):
        keys, values = (torch.randn(1, 2, slots, 64).to(dtype) for _ in range(2))
        if kind == "ragged":
            counts = (slots // 2, 2 * slots - slots // 2)
            heads = [
                HeadSlots(
                    torch.randn(n, 64).to(dtype), torch.randn(n, 64).to(dtype), torch.randn(n)
                )
                for n in counts
            ]
            layers.append(CompactLayer.of_heads([heads]))
        else:
            layers.append(
                CompactLayer(keys, values, None if kind == "plain" else torch.randn(1, 2, slots))
            )
    return CompactCache(layers, tokens, fingerprint(model))


@torch.no_grad()
def seconds_per_token(model: PreTrainedModel, past: Cache, position: int) -> float:
    token = torch.zeros(1, 1, dtype=torch.long)
    spent = []
    for step in range(NEW):
        start = time.perf_counter()
        model(
            token,
            **cache_argument(past),
            attention_mask=torch.ones(1, position + step + 1, dtype=torch.long),
        )
        spent.append(time.perf_counter() - start)
    return statistics.median(spent)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--keep", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    dtype = getattr(torch, options.dtype)
    tokens = options.tokens
    slots = round(options.keep * options.tokens)
    print(
        f"{platform.machine()}, {options.threads} threads, torch {torch.__version__}, "
        f"{options.dtype}"
    )
    model = small_model(tokens, dtype)
    compacts = {
        kind: compact(model, tokens, slots, dtype, kind) for kind in ("plain", "log-bias", "ragged")
    }
    model.set_attn_implementation("sdpa")
    variants = {
        f"dense, {tokens} tokens": (lambda: dense(model, tokens, dtype), tokens, "sdpa"),
        f"dense, {slots} tokens": (lambda: dense(model, slots, dtype), slots, "sdpa"),
        **{
            f"compact, {slots} slots, {kind}": (
                lambda c=cache: c.to_transformers(model),
                tokens,
                "kvcat",
            )
            for kind, cache in compacts.items()
        },
        f"compact, {slots} slots, log-bias, static": (
            lambda: compacts["log-bias"].to_transformers(model, static_tokens=NEW),
            tokens,
            "kvcat",
        ),
    }
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(options.rounds):
        for name, (make, position, attention) in variants.items():
            model.set_attn_implementation(attention)
            times[name].append(seconds_per_token(model, make(), position))
    per_slot = 2 * 64 * 2 * model.config.num_hidden_layers * dtype.itemsize
    sizes = [
        tokens * per_slot,
        slots * per_slot,
        *(c.nbytes for c in compacts.values()),
        compacts["log-bias"].nbytes,
    ]
    reference = statistics.median(times[f"dense, {slots} tokens"])
    for (name, spent), size in zip(times.items(), sizes, strict=True):
        middle = statistics.median(spent)
        print(
            f"{name:<42}{middle * 1e3:8.2f} ms a token {middle / reference:6.2f} "
            f"{size / sizes[0]:8.4f} of the bytes"
        )


if __name__ == "__main__":
    run_script(main)
