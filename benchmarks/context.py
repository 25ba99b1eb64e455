"""How every method grows with the context, in time and memory: python benchmarks/context.py [--tokens 1024 4096 16384].

A tiny model of random weights (2 layers, 4 query heads and 2 KV heads of 64 channels) is traced over the context and
256 further tokens; each method compresses in a process of its own. Seconds are processor time of the compression alone,
MiB the growth of the resident set while it runs, beside the trace's own; KL is that of the 256 tokens.
"""

import argparse
import json
import platform
import resource
import subprocess
import sys
import time

import torch

METHODS = (
    "attention-matching",
    "attention-matching,budgets=adaptive",
    "attention-matching,preset=paper",
    "gradient,num_steps=5",
    "snapkv",
    "h2o",
    "keynorm",
    "streaming",
)
SUFFIX = 256


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(spec: str, tokens: int, keep: float) -> dict[str, float]:
    from transformers import LlamaConfig, LlamaForCausalLM

    from kvcat.compress import compare, parse_method, seeded_compressor, trace

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=256, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=2 * tokens,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.data.mul_(4)
    ids = torch.randint(0, 512, (1, tokens + SUFFIX), generator=torch.Generator().manual_seed(1))
    compressor = seeded_compressor(*parse_method(spec), seed=0)
    before = peak_mib()
    traced = trace(model, ids, tokens)
    after, start = peak_mib(), time.process_time()
    cache = compressor(traced, keep_ratio=keep)
    spent = time.process_time() - start
    result = {"seconds": spent, "trace_mib": after - before, "mib": peak_mib() - after}
    return {**result, "kl": compare(traced, cache).kl.item(), "cache_mib": cache.nbytes / 2**20}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096, 16384])
    parser.add_argument("--keep", type=float, nargs="+", default=[0.1])
    parser.add_argument("--methods", nargs="+", default=METHODS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.tokens[0], options.keep[0])))
        return
    print(f"{platform.machine()}, one thread, torch {torch.__version__}; seconds, MiB (trace), KL, cache MiB")
    for keep in options.keep:
        for spec in options.methods:
            cells = []
            for tokens in options.tokens:
                command = [sys.executable, __file__, "--one", spec, "--tokens", str(tokens), "--keep", str(keep)]
                done = subprocess.run(command, capture_output=True, text=True, check=False)
                if done.returncode:
                    cells.append(done.stderr.strip().splitlines()[-1][:60])
                    continue
                x = json.loads(done.stdout.splitlines()[-1])
                told = f"{x['mib']:6.0f} ({x['trace_mib']:.0f}) KL {x['kl']:.4f} {x['cache_mib']:.1f}"
                cells.append(f"{tokens:6d}: {x['seconds']:7.2f} s {told}")
            print(f"{keep:<5g}{spec:<38}" + " | ".join(cells), flush=True)


if __name__ == "__main__":
    main()
