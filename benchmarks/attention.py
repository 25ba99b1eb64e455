"""Time of masked attention on this machine, relative to plain causal attention.

    python benchmarks/attention.py [--threads 1]

Times are those of a forward and a backward, the best of several. Ratios are to plain causal SDPA of
the same shape.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvcat.attention import attend, attend_reference, reachable
from kvcat.errors import run_script

SHAPES = [
    (4, 8, 4, 256, 16),
    (4, 8, 4, 1024, 16),
    (4, 8, 4, 256, 32),
    (4, 8, 4, 1024, 32),
    (2, 14, 2, 1024, 64),
]


def seconds(run: Callable[[], torch.Tensor], repeats: int = 5) -> float:
    best = float("inf")
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run().sum().backward()
        best = min(best, time.perf_counter() - start)
    return best


def soft_call(q, k, v, keep):
    """The mask's gradient from a second attention call whose value is subtracted again, for
    comparison with the separate backward."""
    hard = attend(q, k, v, keep.detach())
    bias = (keep - keep.detach())[:, None].expand(-1, k.shape[1], -1)
    soft = attend(q.detach(), k.detach(), v.detach(), log_bias=bias)
    return hard + soft - soft.detach()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    columns = ["plain", "bias", "mask", "mask's gradient", "soft call", "naive"]
    print("| batch x heads/kv x tokens x dim | plain, ms | " + " | ".join(columns[1:]) + " |")
    print("|" + "---|" * (len(columns) + 1))
    for batch, heads, kv_heads, length, dim in SHAPES:
        torch.manual_seed(0)
        q = torch.randn(batch, heads, length, dim, requires_grad=True)
        k, v = (torch.randn(batch, kv_heads, length, dim, requires_grad=True) for _ in range(2))
        hard = (torch.rand(batch, length) < 0.5).float()
        hard[:, 0] = 1.0
        keep = hard.clone().requires_grad_()
        reach = reachable(length, length)[None]
        plain = seconds(
            lambda q=q, k=k, v=v: scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=True
            )
        )
        runs: list[Callable[[], torch.Tensor]] = [
            lambda q=q, k=k, v=v, m=hard: attend(q, k, v, m),
            lambda q=q, k=k, v=v, m=hard, r=reach: attend(q, k, v, m, reach=r),
            lambda q=q, k=k, v=v, m=keep: attend(q, k, v, m),
            lambda q=q, k=k, v=v, m=keep: soft_call(q, k, v, m),
            lambda q=q, k=k, v=v, m=hard: attend_reference(q, k, v, m),
        ]
        ratios = " | ".join(f"{seconds(run) / plain:.2f}" for run in runs)
        print(
            f"| {batch} x {heads}/{kv_heads} x {length} x {dim} | {plain * 1e3:.1f} | {ratios} |",
            flush=True,
        )


if __name__ == "__main__":
    run_script(main)
