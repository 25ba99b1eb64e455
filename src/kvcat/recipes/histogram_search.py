"""The best compressed caches of many prefixes at once, by gradient."""

from typing import NamedTuple

import torch

from kvcat.recipes.histogram_network import dense_pass
from kvcat.theory.compression import Cache
from kvcat.theory.definitions import Transformer, run_block, sequences
from kvcat.types import Float, Int, Tensor

SHARPNESS = (4.0, 200.0)


class FoundCaches(NamedTuple):
    """For each prefix the worst error over all suffixes behind the best cache found, and that cache."""

    errors: Float[Tensor, " prefixes"]
    caches: list[Cache]


def search_caches(
    model: Transformer,
    prefixes: Int[Tensor, "prefixes n"],
    num_slots: int,
    *,
    num_steps: int = 400,
    num_restarts: int = 3,
    step_size: float = 0.1,
    seed: int = 0,
) -> FoundCaches:
    """Keys and values of r slots in every block that minimise max over b of || M([a, b]) - M_{C,a}(b) ||.

    The maximum runs over every suffix of 1 to N - n symbols. Adam on the p-norm of the errors over suffixes, p rising
    from 4 to 200, the step size falling to zero; the exact maximum of every iterate is noted and the best one kept, so
    what comes back is the error of an actual cache: an upper bound on the optimum, which the true one may lie below.

    Keys move in the coordinates in which the suffix tokens' queries are white and values in units of their root mean
    square, so that a step changes attention alike whatever the size of W_Q: a model gets no credit for small queries.
    Restarts begin from runs of adjacent slots merged into their means, from those with the logarithm of the run's
    length added to the scores as far as the mean query allows, and from slots of the prefix at random.

    Args:
        model: a causal transformer with one head in every block.
        prefixes: sequences of one length n < N.
        num_slots: r, 1 <= r <= n.
        num_steps: of Adam.
        num_restarts: searches for every prefix, at least 1.
        step_size: of Adam at the start.
        seed: of the random starts.

    Raises:
        ValueError: r or n out of range, no causal mask, or several heads in a block.
    """
    num_prefixes, n = prefixes.shape
    if not model.causal or any(len(block.heads) != 1 for block in model.blocks):
        raise ValueError("the search takes a causal transformer with one head in every block")
    if not 1 <= num_slots <= n < model.num_positions:
        raise ValueError(f"{num_slots} slots for prefixes of {n} tokens of at most {model.num_positions - 1}")
    suffixes = sequences(model.num_symbols, model.num_positions - n)
    with torch.no_grad():
        targets = dense_pass(model, _continued(prefixes, suffixes))[-1][..., n:, :]
        starts = _starts(model, prefixes, num_slots, num_restarts, torch.Generator().manual_seed(seed))
        scales = _scales(model, prefixes)
    targets = targets.repeat_interleave(num_restarts, 0)
    moves = [torch.zeros_like(part, requires_grad=True) for start in starts for part in start]

    def caches() -> list[tuple[Tensor, Tensor]]:
        pairs = zip(starts, scales, zip(moves[::2], moves[1::2], strict=True), strict=True)
        return [(keys + dk @ whiten, values + dv * size) for (keys, values), (whiten, size), (dk, dv) in pairs]

    optimizer = torch.optim.Adam(moves, lr=step_size, fused=True)
    best = torch.full((len(targets),), torch.inf, dtype=torch.float64)
    found = [(keys.clone(), values.clone()) for keys, values in starts]
    for step in range(num_steps + 1):
        share = step / max(1, num_steps)
        optimizer.param_groups[0]["lr"] = step_size * (1 - share) ** 1.5
        current = caches()
        errors = (_answers(model, current, n, suffixes) - targets).square().sum(-1).add(1e-30).sqrt().flatten(1)
        worst = errors.detach().amax(1)
        better = worst < best
        best = torch.where(better, worst, best)
        for kept, now in zip(found, current, strict=True):
            for old, new in zip(kept, now, strict=True):
                old[better] = new.detach()[better]
        p = SHARPNESS[0] * (SHARPNESS[1] / SHARPNESS[0]) ** share
        loss = ((p * errors.log()).logsumexp(1) / p).sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    winner = best.view(num_prefixes, num_restarts).argmin(1) + torch.arange(num_prefixes) * num_restarts
    chosen = [tuple(((keys[i], values[i]),) for keys, values in found) for i in winner.tolist()]
    return FoundCaches(best[winner], chosen)


def _answers(
    model: Transformer,
    caches: list[tuple[Tensor, Tensor]],
    n: int,
    suffixes: Int[Tensor, "suffixes k"],
) -> Float[Tensor, "problems suffixes k d_out"]:
    """M_{C,a}(b) for every beginning b of every suffix: under the causal mask a token's output is its beginning's."""
    x = model.embed(suffixes, start=n).expand(len(caches[0][0]), -1, -1, -1)
    for block, (keys, values) in zip(model.blocks, caches, strict=True):
        head = block.heads[0]
        slots = [
            torch.cat([cached[:, None].expand(-1, len(suffixes), -1, -1), own], -2)
            for cached, own in ((keys, x @ head.w_k), (values, x @ head.w_v))
        ]
        x = run_block(block, x, [(slots[0], slots[1])], causal=True)
    return x


def _continued(
    prefixes: Int[Tensor, "prefixes n"], suffixes: Int[Tensor, "suffixes k"]
) -> Int[Tensor, "prefixes suffixes tokens"]:
    """Every prefix continued by every suffix."""
    shape = (len(prefixes), len(suffixes), -1)
    return torch.cat([prefixes[:, None].expand(shape), suffixes.expand(shape)], -1)


def _queries(model: Transformer, prefixes: Int[Tensor, "prefixes n"]) -> list[Float[Tensor, "rows d_k"]]:
    """The suffix tokens' queries of every block, behind the whole prefixes, over the longest suffixes."""
    n = prefixes.shape[1]
    suffixes = sequences(model.num_symbols, model.num_positions - n)
    suffixes = suffixes[:: max(1, len(suffixes) // 81)]
    states = dense_pass(model, _continued(prefixes, suffixes).flatten(0, 1))
    return [
        (x[:, n:] @ block.heads[0].w_q).flatten(0, 1) / block.heads[0].d_k ** 0.5
        for x, block in zip(states, model.blocks, strict=False)
    ]


def _scales(model: Transformer, prefixes: Int[Tensor, "prefixes n"]) -> list[tuple[Tensor, Tensor]]:
    """For every block, what turns a key step of size 1 into a score change of about 1, and the values' size."""
    scales: list[tuple[Tensor, Tensor]] = []
    for q, x, block in zip(_queries(model, prefixes), dense_pass(model, prefixes), model.blocks, strict=False):
        energy, axes = torch.linalg.eigh(q.mT @ q / len(q))
        floor = energy[-1] * 1e-6
        whiten = torch.where(energy > floor, energy, floor.clamp_min(1e-300)).rsqrt() * axes
        if not float(energy[-1]) > 1e-24:  # uniform attention: keys do not matter, let them stay
            whiten = torch.zeros_like(axes)
        scales.append((whiten.mT, (x @ block.heads[0].w_v).square().mean().sqrt()))
    return scales


def _starts(
    model: Transformer, prefixes: Int[Tensor, "prefixes n"], num_slots: int, num_restarts: int, draw: torch.Generator
) -> list[tuple[Tensor, Tensor]]:
    """Keys and values of every block's first caches, (prefixes * restarts, slots, width)."""
    num_prefixes, n = prefixes.shape
    edges = torch.arange(num_slots + 1) * n // num_slots
    run_len = edges.diff().double()
    run_of = torch.repeat_interleave(torch.arange(num_slots), edges.diff())
    merge = torch.nn.functional.one_hot(run_of, num_slots).double().mT / run_len[:, None]
    noise = torch.rand(num_prefixes, max(0, num_restarts - 2), n, generator=draw, dtype=torch.float64)
    subset = torch.eye(n, dtype=torch.float64)[noise.argsort(-1)[..., :num_slots]]
    fixed = merge.expand(num_prefixes, min(2, num_restarts), -1, -1)
    mixes = torch.cat([fixed, subset], 1)
    starts: list[tuple[Tensor, Tensor]] = []
    for q, x, block in zip(_queries(model, prefixes), dense_pass(model, prefixes), model.blocks, strict=False):
        keys, values = (mixes @ (x @ w)[:, None] for w in (block.heads[0].w_k, block.heads[0].w_v))
        mean = q.mean(0)
        if num_restarts > 1 and float(mean.square().sum()) > 1e-24:
            keys = keys.clone()
            keys[:, 1] += run_len.log()[:, None] * mean / mean.square().sum()
        starts.append((keys.flatten(0, 1).contiguous(), values.flatten(0, 1).contiguous()))
    return starts
