"""Cost of a checkpoint: how long training waits, and how much slower a step is during the writing.

python benchmarks/checkpoint.py [--shape small] [--batch 4] [--seq-len 1024] [--threads 2]
"""

import statistics
import tempfile
import time
from pathlib import Path

import torch

from kvcat.errors import run_script
from kvcat.training.checkpoint import Checkpoints
from kvcat.training.distributed import join_world
from kvcat.training.optimizer import make_optimizer
from training import options, stepper


def main() -> None:
    parser = options(__doc__, shape="small", repeats=5)
    parser.add_argument("--seq-len", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    objective, step = stepper(args, args.batch)
    optimizer = make_optimizer(objective.model, objective.policy_parameters(), objective.config)
    for parameter in objective.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    taken: dict[str, list[float]] = {
        "step": [],
        "standstill": [],
        "step while writing": [],
        "until it stands": [],
    }

    def timed(name: str, work: object) -> None:
        start = time.perf_counter()
        work()  # type: ignore[operator]
        taken[name].append(time.perf_counter() - start)

    with tempfile.TemporaryDirectory() as folder, join_world(args.device, group=False) as world:
        checkpoints = Checkpoints(Path(folder), 1, world, objective, optimizer)
        for turn in range(args.repeats):
            timed("step", step)
            began = time.perf_counter()
            timed("standstill", lambda turn=turn: checkpoints.save(turn, {}))
            timed("step while writing", step)
            checkpoints.wait()
            taken["until it stands"].append(time.perf_counter() - began)
    parameters = sum(p.numel() for p in objective.parameters())
    print(
        f"{args.shape}, {parameters:,} parameters, {args.batch} x {args.seq_len} tokens, torch "
        f"{torch.__version__}\n"
    )
    print("| | seconds (median) | in steps |\n|---|---|---|")
    for name, seconds in taken.items():
        steps = statistics.median(a / b for a, b in zip(seconds, taken["step"], strict=True))
        print(f"| {name} | {statistics.median(seconds):.3f} | {steps:.2f} |")


if __name__ == "__main__":
    run_script(main)
