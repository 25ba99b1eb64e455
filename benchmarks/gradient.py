"""Seconds and memory of a step of the gradient-based compressor, relative to a bare step.

    python benchmarks/gradient.py [--shape large-vocabulary] [--batch 2] [--prefix 768]
        [--suffix 256] [--keep 0.1] [--threads 1] [--steps 3] [--rounds 3]

The bare step is a forward and backward of the same suffix tokens in transformers' own model, on a
dense cache of as many slots. It computes the cross-entropy of the logits and its gradient with
respect to the slots. Weights are frozen in both. Each figure comes from a process of its own; the
forms take turns, and the best of all rounds counts. With one thread the clock is processor time,
which other processes hardly disturb; otherwise it is wall time. Memory is the peak above what the
process held before the first step, with the optimizer.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable

import torch
from torch.nn.functional import cross_entropy
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import kvcat
from kvcat.cache import cache_argument
from kvcat.compress import GradientCompression, slots_for, trace
from kvcat.compress.methods.gradient import SlotTraining
from kvcat.errors import run_script
from kvcat.training.log import peak_memory

SHAPES = {
    "large-vocabulary": {
        "vocab_size": 65536,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
    },
    "kvcat-base": None,
}
FORMS = {
    "bare": None,
    "step": False,
    "step, activation checkpointing": True,
}


def make_step(options: argparse.Namespace) -> Callable[[], object]:
    torch.manual_seed(0)
    sizes = SHAPES[options.shape]
    model = (
        kvcat.load("kvcat-base")[0]
        if sizes is None
        else LlamaForCausalLM(LlamaConfig(**sizes)).eval()
    )
    vocab = model.config.vocab_size
    ids = torch.randint(vocab, (options.batch, options.prefix + options.suffix))
    traced = trace(model, ids, options.prefix)
    slots = slots_for(options.prefix, options.keep, None)
    start = GradientCompression().starting_layers(traced, slots)
    recompute = FORMS[options.one]
    if recompute is not None:
        return SlotTraining(
            GradientCompression(activation_checkpointing=recompute), traced, start
        ).step
    leaves = [
        tensor.requires_grad_(True) for layer in start for tensor in (layer.keys, layer.values)
    ]
    model.requires_grad_(False).set_attn_implementation("sdpa")
    suffix = ids[:, options.prefix :]
    targets = ids[:, options.prefix + 1 :]

    def bare() -> object:
        past = DynamicCache()
        for index in range(len(start)):
            past.update(leaves[2 * index], leaves[2 * index + 1], index)
        logits = model(suffix, **cache_argument(past)).logits[:, :-1]
        return torch.autograd.grad(cross_entropy(logits.flatten(0, 1), targets.flatten()), leaves)

    return bare


def peak_bytes() -> int:
    return round(peak_memory(torch.device("cpu")) * 2**30)


def measure(options: argparse.Namespace) -> None:
    """Print one form's seconds per step and peak bytes as JSON."""
    torch.set_num_threads(options.threads)
    step = make_step(options)
    clock = time.process_time if options.threads == 1 else time.perf_counter
    before = peak_bytes()
    seconds = []
    for _ in range(1 + options.steps):
        start = clock()
        step()
        seconds.append(clock() - start)
    print(json.dumps({"seconds": min(seconds[1:]), "bytes": peak_bytes() - before}))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=list(SHAPES), help="one of them; both without it")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--prefix", type=int, default=768)
    parser.add_argument("--suffix", type=int, default=256)
    parser.add_argument("--keep", type=float, default=0.1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        measure(options)
        return
    print(
        f"{options.batch} x {options.suffix} suffix tokens, {options.keep:g} of {options.prefix} "
        "slots\n"
    )
    print("| shape | form | time, ms | ratio | peak memory, MiB |\n|---|---|---|---|---|")
    for shape in SHAPES if options.shape is None else [options.shape]:
        runs_by_form: dict[str, list[dict]] = {form: [] for form in FORMS}
        for _ in range(options.rounds):
            for form, runs in runs_by_form.items():
                command = [sys.executable, __file__, *sys.argv[1:], "--shape", shape, "--one", form]
                runs.append(
                    json.loads(
                        subprocess.run(command, check=True, capture_output=True, text=True).stdout
                    )
                )
        bare = min(run["seconds"] for run in runs_by_form["bare"])
        for form, runs in runs_by_form.items():
            seconds = min(run["seconds"] for run in runs)
            size = min(run["bytes"] for run in runs)
            print(
                f"| {shape} | {form} | {seconds * 1e3:.0f} | {seconds / bare:.2f} | "
                f"{size / 2**20:.0f} |"
            )


if __name__ == "__main__":
    run_script(main)
