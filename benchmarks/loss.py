"""Time and peak memory of the chunked objective and of the naive one, forward plus backward.

    python benchmarks/loss.py [--vocab 32768] [--tokens 1024] [--hidden 256] [--chunk 64 1024]
        [--device cpu] [--autocast] [--threads 1] [--rounds 1]

Each figure comes from a process of its own; the forms take turns, and the best of all rounds
counts. Ratios are to the naive form of the same objective. With one thread the clock is processor
time, which other processes hardly disturb; otherwise it is wall time. Memory is the peak above what
the process held before a step: inputs and weights, and no gradients.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from kvcat.errors import run_script
from kvcat.losses import OutputHead, chunked_objective, distillation_kl, next_token_loss
from kvcat.training.log import peak_memory

Step = Callable[[], torch.Tensor]


def naive_objective(
    head: OutputHead, dense: torch.Tensor, masked: torch.Tensor | None, ids: torch.Tensor
):
    if masked is None:
        return next_token_loss(head.logits(dense), ids)
    logits, masked_logits = head.logits(torch.cat([dense, masked])).chunk(2)
    total = next_token_loss(logits, ids) + distillation_kl(logits, masked_logits)
    with torch.no_grad():
        next_token_loss(masked_logits, ids)
        (logits[:, :-1].argmax(-1) == masked_logits[:, :-1].argmax(-1)).double().mean()
    return total


def make_step(options: argparse.Namespace) -> Step:
    """The objective of ``options.one``, "naive" or a chunk length, 0 for the default; gradients
    start anew."""
    torch.manual_seed(0)
    linear = torch.nn.Linear(options.hidden, options.vocab, bias=False, device=options.device)
    shape = (1, options.tokens + 1, options.hidden)
    dense = torch.randn(shape, device=options.device, requires_grad=True)
    masked = (
        None if options.control else torch.randn(shape, device=options.device, requires_grad=True)
    )
    ids = torch.randint(options.vocab, shape[:2], device=options.device)
    head = OutputHead(linear)

    def step() -> torch.Tensor:
        for leaf in (linear.weight, dense, masked):
            if leaf is not None:
                leaf.grad = None
        with torch.autocast(options.device, torch.bfloat16, enabled=options.autocast):
            if options.one == "naive":
                return naive_objective(head, dense, masked, ids)
            masked_states = None if masked is None else masked[:, :-1]
            chunk_tokens = int(options.one) or None
            losses = chunked_objective(
                head, dense[:, :-1], masked_states, ids[:, 1:], chunk_tokens=chunk_tokens
            )
            return losses.total

    return step


def peak_bytes(device: str) -> int:
    return round(peak_memory(torch.device(device)) * 2**30)


def measure(options: argparse.Namespace) -> None:
    """Print one form's seconds and peak bytes as JSON."""
    torch.set_num_threads(options.threads)
    step = make_step(options)
    cuda = options.device == "cuda"
    small = torch.randn(256, 256, device=options.device)
    (small @ small).sum().item()  # the libraries' own buffers
    before = peak_bytes(options.device)
    best = float("inf")
    clock = time.process_time if options.threads == 1 and not cuda else time.perf_counter
    for _ in range(2 + 3 * cuda):
        start = clock()
        step().backward()
        if cuda:
            torch.cuda.synchronize()
        best = min(best, clock() - start)
    print(json.dumps({"seconds": best, "bytes": peak_bytes(options.device) - before}))


def rounds(
    options: argparse.Namespace, forms: list[str], *flags: str
) -> dict[str, tuple[float, int]]:
    """Best seconds and peak bytes of every form; the forms take turns."""
    runs_by_form: dict[str, list[dict]] = {form: [] for form in forms}
    for _ in range(options.rounds):
        for form in forms:
            command = [sys.executable, __file__, *sys.argv[1:], *flags, "--one", form]
            result = subprocess.run(command, check=True, capture_output=True, text=True)
            runs_by_form[form].append(json.loads(result.stdout))
    return {
        f: (min(x["seconds"] for x in runs), min(x["bytes"] for x in runs))
        for f, runs in runs_by_form.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--vocab", type=int, default=32768)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--chunk", nargs="+", default=["64", "1024"])
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--autocast", action="store_true", help="bfloat16 products")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--control", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        measure(options)
        return
    print(
        f"{options.tokens} predictions, vocabulary {options.vocab}, width {options.hidden}, "
        f"{options.device}\n"
    )
    print(
        "| objective | form | time, ms | ratio | peak memory, MiB | ratio |\n"
        "|---|---|---|---|---|---|"
    )
    for name, flags in (("KV-CAT", ()), ("control", ("--control",))):
        table = rounds(options, ["naive", "0", *options.chunk], *flags)
        seconds, size = table["naive"]
        for form, (s, b) in table.items():
            label = {"naive": "naive", "0": "chunked, default"}.get(form, f"chunked, {form}")
            print(
                f"| {name} | {label} | {s * 1e3:.0f} | {s / seconds:.2f} | {b / 2**20:.0f} | "
                f"{b / size:.2f} |"
            )


if __name__ == "__main__":
    run_script(main)
