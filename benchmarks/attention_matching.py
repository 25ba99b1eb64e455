"""Attention Matching beside a one-head-at-a-time twin of the original: python benchmarks/attention_matching.py.

All KV heads of one window at the shape of Qwen2.5-0.5B: 24 layers of 2, 7 query heads each, head 64, a prefix of 768
tokens, 256 suffix tokens. The heads are synthetic, with clustered keys, a sink and queries that look for a few clusters
each. Times are for all 48 heads, from keys, values and queries to slots; every round times all methods one after the
other, the best of the rounds is printed (CPU time with one thread, wall time otherwise). The error is of the attention
output on queries that no method saw, relative to the norm of the dense output and pooled over heads.
"""

import argparse
import platform
import time
from collections.abc import Callable

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from kvcat.cache import CompactCache, CompactLayer
from kvcat.compress import AttentionMatching, Trace

KEEP_RATIOS = (0.05, 0.1, 0.2, 0.4)
LAYERS, KV_HEADS, GROUP, HEAD_DIM, PREFIX, SUFFIX = 24, 2, 7, 64, 768, 256
Tensor = torch.Tensor


def synthetic_trace(seed: int, device: str) -> tuple[Trace, list[Tensor]]:
    """A trace whose model is never run, and per layer further queries of the same kind."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    keys, values, queries, held_out = [], [], [], []
    for _ in range(LAYERS):
        centres = normal(KV_HEADS, 24, HEAD_DIM) * 1.2
        topics = torch.randint(0, 24, (KV_HEADS, PREFIX), generator=draw)
        picked = centres.gather(1, topics.unsqueeze(-1).expand(-1, -1, HEAD_DIM))
        key = picked + 0.6 * normal(KV_HEADS, PREFIX, HEAD_DIM)
        sink = normal(KV_HEADS, 1, HEAD_DIM)
        key[:, :1] = 2 * sink
        values.append((picked.roll(1, -1) + normal(KV_HEADS, PREFIX, HEAD_DIM))[None])
        keys.append(key[None])
        wanted = torch.randint(0, 24, (KV_HEADS, GROUP, 2 * SUFFIX), generator=draw)
        looks = (
            centres.unsqueeze(1).expand(-1, GROUP, -1, -1).gather(2, wanted.unsqueeze(-1).expand(-1, -1, -1, HEAD_DIM))
        )
        looks = looks + 0.8 * normal(KV_HEADS, GROUP, 2 * SUFFIX, HEAD_DIM) + 0.5 * sink.unsqueeze(1)
        looks = looks.flatten(0, 1)[None]
        queries.append(looks[:, :, :SUFFIX].contiguous())
        held_out.append(looks[:, :, SUFFIX:].contiguous())
    to = lambda tensors: [tensor.to(device) for tensor in tensors]  # noqa: E731
    trace = Trace(
        model=LlamaForCausalLM(LlamaConfig(vocab_size=4, hidden_size=8, num_hidden_layers=1, num_attention_heads=1)),
        input_ids=torch.zeros(1, PREFIX + SUFFIX, dtype=torch.long),
        prefix_len=PREFIX,
        supervision="suffix",
        supervision_start=PREFIX,
        keys=to(keys),
        values=to(values),
        queries=to(queries),
        suffix_keys=to([torch.empty(1, KV_HEADS, 0, HEAD_DIM)] * LAYERS),
        prefix_positions=torch.arange(0),
        prefix_queries=[],
        scales=[HEAD_DIM**-0.5] * LAYERS,
        hidden=torch.zeros(1, SUFFIX + 1, 1),
        fingerprint="",
    )
    return trace, to(held_out)


def twin(trace: Trace, num_slots: int) -> CompactCache:
    """The original algorithm, head after head: rms keys over 256 queries, 2 NNLS steps, least-squares values."""
    draw = torch.Generator().manual_seed(0)
    layers = []
    for index in range(LAYERS):
        heads = []
        for head in range(KV_HEADS):
            queries = trace.queries[index][0, head * GROUP : (head + 1) * GROUP].flatten(0, 1)
            rows = torch.randperm(len(queries), generator=draw)[:256].to(queries.device)
            heads.append(twin_head(queries[rows], trace.keys[index][0, head], trace.values[index][0, head], num_slots))
        layers.append(CompactLayer(*(torch.stack(part)[None] for part in zip(*heads, strict=True))))
    return CompactCache(layers, PREFIX, "")


def twin_head(queries: Tensor, keys: Tensor, values: Tensor, num_slots: int) -> tuple[Tensor, Tensor, Tensor]:
    scores = queries @ keys.mT * HEAD_DIM**-0.5
    attention = scores.softmax(-1)
    slots = attention.square().mean(0).sqrt().topk(num_slots).indices.sort().values
    atoms = (scores - scores.amax(-1, keepdim=True)).exp()
    design, mass = atoms[:, slots], atoms.sum(-1)
    low, high = 2.718281828**-3, 2.718281828**3
    weights = torch.linalg.lstsq(design, mass[:, None]).solution[:, 0].nan_to_num(1.0).clamp(low, high)
    vector = torch.ones(num_slots, device=keys.device)
    for _ in range(3):
        vector = design.mT @ (design @ vector)
        vector = vector / vector.norm()
    step = 1 / (design @ vector).square().sum()
    for _ in range(2):
        weights = (weights - step * (design.mT @ (design @ weights - mass))).clamp(low, high)
    log_bias = weights.log()
    fitted = torch.linalg.lstsq((scores[:, slots] + log_bias).softmax(-1), attention @ values).solution
    return keys[slots], fitted, log_bias


def error(trace: Trace, cache: CompactCache, held_out: list[Tensor]) -> float:
    """Relative error of the attention output on the held-out queries."""
    wrong, size = 0.0, 0.0
    for index, layer in enumerate(cache.layers):
        looks = held_out[index].unflatten(1, (KV_HEADS, GROUP)).flatten(2, 3).double() * HEAD_DIM**-0.5
        dense = (looks @ trace.keys[index].double().mT).softmax(-1) @ trace.values[index].double()
        scores = looks @ layer.keys.double().mT + layer.log_bias.double().unsqueeze(2)
        found = scores.softmax(-1) @ layer.values.double()
        wrong += (found - dense).square().sum().item()
        size += dense.square().sum().item()
    return (wrong / size) ** 0.5


def timed(device: str, run: Callable[[], CompactCache]) -> tuple[float, CompactCache]:
    clock = time.process_time if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter
    if device != "cpu":
        torch.cuda.synchronize()
    start = clock()
    cache = run()
    if device != "cpu":
        torch.cuda.synchronize()
    return clock() - start, cache


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    name = platform.processor() or platform.machine()
    where = name if options.device == "cpu" else torch.cuda.get_device_name()
    print(f"{where}, {options.threads} threads, torch {torch.__version__}, best of {options.rounds} rounds")
    trace, held_out = synthetic_trace(0, options.device)
    methods: dict[str, Callable[[Trace, int], CompactCache]] = {
        "twin": twin,
        "paper": lambda seen, slots: AttentionMatching("paper")(seen, num_slots=slots),
        # its solve alone: synthetic heads have no prefix with queries of its own
        "stable": lambda seen, slots: AttentionMatching(own_weight=0.0)(seen, num_slots=slots),
    }
    print(f"{'keep':>5}" + "".join(f"{name + ' ms':>12}{'error':>9}{'x twin':>8}" for name in methods))
    for keep_ratio in KEEP_RATIOS:
        slots = -(-int(keep_ratio * 100) * PREFIX // 100)
        seconds: dict[str, list[float]] = {name: [] for name in methods}
        errors = {}
        for _ in range(options.rounds):
            for name, method in methods.items():
                spent, cache = timed(options.device, lambda method=method, slots=slots: method(trace, slots))
                seconds[name].append(spent)
                errors[name] = error(trace, cache, held_out)
        best = {name: min(spent) for name, spent in seconds.items()}
        cells = [f"{1e3 * best[n]:12.0f}{errors[n]:9.4f}{best['twin'] / best[n]:8.2f}" for n in methods]
        print(f"{keep_ratio:5.0%}" + "".join(cells), flush=True)


if __name__ == "__main__":
    main()
