"""Growth of a training step's time and memory with sequence length and with layers.

    python benchmarks/growth.py [--shape small] [--lengths 512 1024 2048 4096 8192]
        [--layers 2 4 8 16] [--threads 2]

A step is one sequence; every point is measured in a process of its own. The tables show time per
token, and peak memory per token above that of the model: for the control, for KV-CAT, and for
KV-CAT whose masked pass is the last quarter. Each has the ratio to the row before, which is 1 if
the cost of a token is constant.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time

import torch

from kvcat.errors import run_script
from kvcat.training.log import peak_memory
from training import SHAPES, held, options, stepper

VARIANTS = {
    "control": {"policy": "control"},
    "KV-CAT": {},
    "last quarter": {"prefix_range": (0.75, 0.75)},
}


def measure(args: argparse.Namespace) -> dict[str, float]:
    """Milliseconds and MiB per thousand tokens of one variant."""
    torch.set_num_threads(args.threads)
    SHAPES[args.shape]["num_hidden_layers"] = args.num_layers
    groups = min(4, args.num_layers)
    _, step = stepper(args, 1, num_groups=groups, **args.options)
    before = held(args.device)
    taken = []
    for _ in range(args.repeats + 1):
        start = time.perf_counter()
        step()
        taken.append(time.perf_counter() - start)
    thousands = args.seq_len / 1000
    grown = peak_memory(torch.device(args.device)) - before
    return {
        "time": 1000 * statistics.median(taken[1:]) / thousands,
        "memory": 1024 * grown / thousands,
    }


def table(args: argparse.Namespace, name: str, points: list[dict[str, int]]) -> None:
    print(f"\n| {name} | " + " | ".join(f"{v}: ms, MiB per 1000 tokens" for v in VARIANTS) + " |")
    print("|---" * (len(VARIANTS) + 1) + "|")
    before: dict[str, dict[str, float]] = {}
    for point in points:
        cells = []
        for variant, changes in VARIANTS.items():
            request = json.dumps({**vars(args), **point, "options": changes})
            command = [sys.executable, __file__, "--one", request]
            measured = json.loads(
                subprocess.run(command, check=True, capture_output=True, text=True).stdout
            )
            cell = f"{measured['time']:.0f}, {measured['memory']:.0f}"
            if variant in before:
                ratios = (measured[kind] / before[variant][kind] for kind in ("time", "memory"))
                cell += " (x " + ", ".join(f"{ratio:.2f}" for ratio in ratios) + ")"
            before[variant] = measured
            cells.append(cell)
        print(f"| {point[name]} | " + " | ".join(cells) + " |", flush=True)


def main() -> None:
    parser = options(__doc__, shape="small", repeats=2)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192])
    parser.add_argument("--layers", type=int, nargs="+", default=[2, 4, 8, 16])
    args = parser.parse_args()
    if args.one:
        print(json.dumps(measure(argparse.Namespace(**json.loads(args.one)))))
        return
    if args.shape not in SHAPES:
        parser.error("the layers of kvcat-base are what they are: choose another shape")
    print(
        f"{args.shape}, {args.dtype}, {args.device}, {args.threads} threads, torch "
        f"{torch.__version__}"
    )
    num_layers = SHAPES[args.shape]["num_hidden_layers"]
    table(
        args, "seq_len", [{"seq_len": length, "num_layers": num_layers} for length in args.lengths]
    )
    table(args, "num_layers", [{"seq_len": 1024, "num_layers": count} for count in args.layers])


if __name__ == "__main__":
    run_script(main)
