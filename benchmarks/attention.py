"""Time of masked attention on this machine, relative to plain causal attention.

    python benchmarks/attention.py [--device cuda] [--dtype bfloat16] [--threads 1]

Times are those of a forward and a backward, the best of several; those of the mask's gradient are
what its backward adds. Ratios are to plain causal SDPA of the same shape.
"""

import argparse
import time
from collections.abc import Callable

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvcat.attention import attend, attend_reference, reachable
from kvcat.attention.mask_gradient import fused_keep_gradient, keep_gradient
from kvcat.errors import run_script

# batch, heads, KV heads, tokens, channels
SHAPES = [
    (4, 8, 4, 256, 16),
    (4, 8, 4, 1024, 16),
    (4, 8, 4, 256, 32),
    (4, 8, 4, 1024, 32),
    (2, 14, 2, 1024, 64),
]
GPU_SHAPES = [(16, 9, 3, 1024, 64), (16, 12, 2, 1024, 128), (4, 12, 2, 4096, 128)]
COLUMNS = (
    "plain",
    "bias",
    "mask",
    "mask's gradient, by chunks",
    "mask's gradient, fused",
    "naive",
)


def seconds(run: Callable[[], object], device: torch.device, repeats: int = 5) -> float:
    """The shortest time of a call; a first one warms up."""
    best = float("inf")
    for _ in range(repeats + 1):
        _wait(device)
        start = time.perf_counter()
        run()
        _wait(device)
        best = min(best, time.perf_counter() - start)
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def forward_and_backward(run: Callable[[], torch.Tensor]) -> Callable[[], object]:
    """The call, followed by the backward of the sum of its result."""
    return lambda: run().sum().backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    print(" | ".join(["| batch x heads/kv x tokens x dim", "plain, ms", *COLUMNS[1:]]) + " |")
    print("|" + "---|" * (len(COLUMNS) + 1))
    for shape in GPU_SHAPES if device.type == "cuda" else SHAPES:
        times = _times(shape, device, getattr(torch, arguments.dtype))
        ratios = " | ".join(f"{each / times[0]:.2f}" for each in times[1:])
        batch, heads, kv_heads, length, dim = shape
        sizes = f"{batch} x {heads}/{kv_heads} x {length} x {dim}"
        print(f"| {sizes} | {times[0] * 1e3:.1f} | {ratios} |", flush=True)


def _times(
    shape: tuple[int, int, int, int, int], device: torch.device, dtype: torch.dtype
) -> list[float]:
    """Seconds for one shape, in the order of ``COLUMNS``."""
    batch, heads, kv_heads, length, dim = shape
    torch.manual_seed(0)

    def normal(num_heads: int) -> torch.Tensor:
        return torch.randn(batch, num_heads, length, dim, device=device, dtype=dtype)

    grad_out = normal(heads)
    q = normal(heads).requires_grad_()
    k = normal(kv_heads).requires_grad_()
    v = normal(kv_heads).requires_grad_()
    scale = dim**-0.5
    keep = (torch.rand(batch, length, device=device) < 0.5).to(dtype)
    keep[:, 0] = 1.0
    reach = reachable(length, length, device=device)[None]
    states = grad_out, q.detach(), k.detach(), v.detach()
    runs = [
        forward_and_backward(
            lambda: scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        ),
        forward_and_backward(lambda: attend(q, k, v, keep)),
        forward_and_backward(lambda: attend(q, k, v, keep, reach=reach)),
        lambda: keep_gradient(*states, None, scale),
        lambda: fused_keep_gradient(*states, None, scale),
        forward_and_backward(lambda: attend_reference(q, k, v, keep)),
    ]
    return [seconds(run, device) for run in runs]


if __name__ == "__main__":
    run_script(main)
