"""Seconds of every compressor on a tiny model with random weights: python benchmarks/compress.py [--windows 96].

The windows are 768 + 256 tokens, the model has 6 layers, 2 KV heads and 24 channels per head. The trace and, for
Attention Matching, the dense attention are shared between the keep ratios, so the first ratio pays for them.
The gradient method runs on two windows only.
"""

import argparse
import platform
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvcat.compress import SCORERS, AttentionMatching, Eviction, GradientCompression, Trace, compare, trace

KEEP_RATIOS = (0.05, 0.1, 0.2, 0.4)


def random_trace(windows: int) -> Trace:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=2048, hidden_size=144, intermediate_size=384, num_hidden_layers=6, num_attention_heads=6,
        num_key_value_heads=2, max_position_embeddings=1024,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(4)
    return trace(model, torch.randint(0, 2048, (windows, 1024)), 768)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{platform.processor() or platform.machine()}, {options.threads} threads, torch {torch.__version__}")
    clock = time.process_time if options.threads == 1 else time.perf_counter
    start = clock()
    traced = random_trace(options.windows)
    print(f"{'trace':<32}{clock() - start:8.2f} s for {options.windows} windows")
    methods = {
        "attention-matching stable": AttentionMatching(),
        "attention-matching paper": AttentionMatching("paper"),
        **{name: Eviction(name) for name in SCORERS},
        "gradient, 2 steps": GradientCompression(num_steps=2),
    }
    for name, method in methods.items():
        traced = random_trace(2) if name.startswith("gradient") else traced
        seconds = []
        for keep_ratio in KEEP_RATIOS:
            start = clock()
            cache = method(traced, keep_ratio=keep_ratio)
            seconds.append(clock() - start)
        kl = compare(traced, cache).kl.mean()
        print(f"{name:<32}" + "".join(f"{s:8.2f}" for s in seconds) + f"   sum {sum(seconds):7.2f} s   KL {kl:.4f}")


if __name__ == "__main__":
    main()
