"""Policies sought against the incompressible network: gradient descent and scans over all that a cache can do.

W_Q = 0 in the last block, so r slots act through the sum of their values; W_O and the detectors leave of it block 3
alone. A search over that vector, one for each prefix and k, is a search over all policies, and a harder test than the
definition, which lets one cache serve every k at once.

References: KV-CAT, appendix "Theory", definition of KV compressibility.
"""

from dataclasses import dataclass

import torch

from kvcat.theory.compression import Budget, Cache, prefix_cache, suffix_error
from kvcat.theory.definitions import Transformer, sequences
from kvcat.theory.detectors import ALARM_SYMBOL, Layout, layout_of
from kvcat.theory.detectors_bound import compressed_lengths
from kvcat.types import Float, Int, Tensor

_UNITS_AT_ONCE = 2**22  # hidden units computed at a time, which bounds the memory of a search
_COARSE, _FINE, _KEPT = 81, 41, 2  # points of a scan's two grids, and starts per prefix that are scanned
_POINTS = _KEPT * (_COARSE + _FINE + 1)


@dataclass(frozen=True)
class FoundPolicy:
    """The smallest worst error that a search found over prefixes and caches, for suffixes of one length.

    Attributes:
        error: max over suffixes of k tokens of || M([a, b]) - M_{C,a}(b) ||, in the unit of f, of the model run behind
            the cache found.
        prefix: a.
        suffix_len: k.
        num_slots: r.
        num_caches: number of caches tried.
    """

    error: float
    prefix: tuple[int, ...]
    suffix_len: int
    num_slots: int
    num_caches: int


def outputs_behind_sum(
    network: Transformer,
    total: Float[Tensor, "*caches d_1"],
    num_slots: int,
    prefix_len: int,
    suffixes: Int[Tensor, "batch k"],
) -> Float[Tensor, "*caches batch d_out"]:
    """M_{C,a}(b) of a network of Construction D behind slots whose values have the sum ``total`` in block 3.

    What ``answer`` returns for any such cache, for many at once; differentiable in the sum.

    Args:
        network: a network of Construction D.
        total: s, block 3 of the sum of the compressed values; zeros if there is no slot.
        num_slots: r.
        prefix_len: n.
        suffixes: b, one per row.
    """
    layout, (first, last) = layout_of(network), network.blocks
    ffn, num_averaged = last.feed_forward, num_slots + suffixes.shape[1]
    tokens = first.feed_forward(network.embed(suffixes, start=prefix_len))
    own = (tokens @ last.heads[0].w_v).sum(-2) / num_averaged @ last.w_o + tokens[:, -1]
    cached = total / num_averaged @ (last.w_o[layout.block(3)] @ ffn.w_1)  # once per cache, not per suffix
    return torch.relu(cached[..., None, :] + own @ ffn.w_1 + ffn.b_1) @ ffn.w_2 + ffn.b_2


def slots_of_sum(
    network: Transformer, prefix: Int[Tensor, " n"], total: Float[Tensor, " d_1"], num_slots: int
) -> Cache:
    """A cache of r slots for a prefix that acts in the last block as a sum in block 3; a whole one before it."""
    layout = layout_of(network)
    first, ((keys, values),) = prefix_cache(network, prefix)
    stored = torch.zeros_like(values[:num_slots])
    stored[:, layout.block(3)] = total / max(num_slots, 1)
    kept = tuple((k[:num_slots], v[:num_slots]) for k, v in first)
    return kept, ((torch.zeros_like(keys[:num_slots]), stored),)


def search_policies(
    network: Transformer, budget: Budget, *, num_starts: int = 4, num_steps: int = 60, seed: int = 0
) -> FoundPolicy:
    """The smallest worst error found over every prefix with r(n) < n and every k: what the best policy found pays.

    Args:
        network: the network of Lemma 2.
        budget: r(n), 0 <= r(n) <= n.
        num_starts: random starts per prefix, beside the canonical ones.
        num_steps: steps of gradient descent from every start; a scan of every alarm's coordinate follows.
        seed: of the random starts.

    Raises:
        ValueError: a budget outside 0 to n, or with r(n) = n at every n; negative counts.
    """
    if num_starts < 0 or num_steps < 0:
        raise ValueError(f"starts and steps cannot be negative, got {num_starts} and {num_steps}")
    lengths = compressed_lengths(network.num_positions, budget)
    draw = torch.Generator().manual_seed(seed)
    found = [
        smallest_error(network, n, k, r, num_starts=num_starts, num_steps=num_steps, generator=draw)
        for n, k, r in lengths
    ]
    best = min(found, key=lambda policy: policy.error)
    total = sum(policy.num_caches for policy in found)
    return FoundPolicy(best.error, best.prefix, best.suffix_len, best.num_slots, total)


def smallest_error(
    network: Transformer,
    prefix_len: int,
    suffix_len: int,
    num_slots: int,
    *,
    num_starts: int,
    num_steps: int,
    generator: torch.Generator,
) -> FoundPolicy:
    """The search at one (n, k, r), over every prefix of n tokens."""
    suffixes, prefixes = sequences(network.num_symbols, suffix_len), sequences(network.num_symbols, prefix_len)
    best, num_caches = FoundPolicy(torch.inf, (), suffix_len, num_slots, 0), 0
    each = layout_of(network).num_units * suffixes.shape[0] * (_POINTS + num_starts)
    for some in prefixes.split(max(1, _UNITS_AT_ONCE // each)):
        search = _Search(network, some, suffixes, num_slots)
        totals, tried = search.run(num_starts, num_steps, generator)
        num_caches += tried
        errors = search.errors(totals)
        row, column = divmod(int(errors.argmin()), errors.shape[1])
        prefix = some[row]
        cache = slots_of_sum(network, prefix, totals[row, column], num_slots)
        error = float(suffix_error(network, cache, prefix, suffixes).max())
        if error < best.error:
            best = FoundPolicy(error, tuple(prefix.tolist()), suffix_len, num_slots, 0)
    return FoundPolicy(best.error, best.prefix, suffix_len, num_slots, num_caches)


class _Search:
    """Searches for the sum s, for some prefixes (rows) from several starts (columns)."""

    def __init__(
        self, network: Transformer, prefixes: Int[Tensor, "rows n"], suffixes: Int[Tensor, "batch k"], num_slots: int
    ) -> None:
        self.network, self.prefixes, self.suffixes, self.num_slots = network, prefixes, suffixes, num_slots
        self.layout: Layout = layout_of(network)
        rows, batch = prefixes.shape[0], suffixes.shape[0]
        whole = torch.cat([prefixes[:, None].expand(-1, batch, -1), suffixes.expand(rows, -1, -1)], -1)
        self.wanted = network(whole)

    def errors(self, totals: Float[Tensor, "rows columns d_1"]) -> Float[Tensor, "rows columns"]:
        """The largest error over the suffixes."""
        n = self.prefixes.shape[1]
        outputs = outputs_behind_sum(self.network, totals, self.num_slots, n, self.suffixes)
        return torch.linalg.vector_norm(outputs - self.wanted[:, None], dim=-1).amax(-1)

    def run(
        self, num_starts: int, num_steps: int, generator: torch.Generator
    ) -> tuple[Float[Tensor, "rows columns d_1"], int]:
        """The best sums found, and how many were tried; without a slot the sum can only be zero."""
        if self.num_slots == 0:
            return torch.zeros(len(self.prefixes), 1, self.layout.code_width, dtype=torch.float64), len(self.prefixes)
        totals = self.starts(num_starts, generator)
        tried = totals.shape[0] * totals.shape[1] * (num_steps + 1)
        totals = self.descend(totals, num_steps)
        best = self.errors(totals).topk(_KEPT, largest=False).indices[..., None]
        totals, scanned = self.scan(totals.gather(1, best.expand(-1, -1, totals.shape[-1])))
        return totals, tried + scanned

    def equaliser(self) -> float:
        """The v = -(n - r)/(2(n + k)) at which both suffixes' alarms of j = n + k are equally loud."""
        n, k = self.prefixes.shape[1], self.suffixes.shape[1]
        return -(n - self.num_slots) / (2 * (n + k))

    def starts(self, num_starts: int, generator: torch.Generator) -> Float[Tensor, "rows columns d_1"]:
        """The prefix's sum S_a, whole and scaled; (r + k)/(n + k) S_a at the equaliser; nothing; and random ones."""
        n, k, r = self.prefixes.shape[1], self.suffixes.shape[1], self.num_slots
        code = self.layout.code(self.prefixes)[:, None]
        scales = torch.tensor([(r + k) / (n + k), 1.0, r / n, 0.0], dtype=torch.float64)[:, None]
        spread = 10.0 ** torch.linspace(-1, 2, num_starts, dtype=torch.float64)[:, None] if num_starts else scales[:0]
        shape = (code.shape[0], num_starts, code.shape[-1])
        noise = torch.randn(shape, generator=generator, dtype=torch.float64) * spread
        equalised = code * scales[:1]
        equalised[..., (n + k - 1) * self.layout.num_symbols + ALARM_SYMBOL] = self.equaliser()
        return torch.cat([code * scales, equalised, noise], 1)

    def descend(self, totals: Float[Tensor, "rows columns d_1"], num_steps: int) -> Float[Tensor, "rows columns d_1"]:
        """Adam on the largest error, with steps that shrink; of every path the best sum met."""
        point = totals.clone().requires_grad_()
        adam = torch.optim.Adam([point], lr=0.3)
        best, least = totals.clone(), self.errors(totals)
        for step in range(num_steps):
            adam.param_groups[0]["lr"] = 0.3 * (1 - step / num_steps) ** 2
            adam.zero_grad()
            errors = self.errors(point)
            better = errors.detach() < least
            best[better], least[better] = point.detach()[better], errors.detach()[better]
            errors.sum().backward()
            adam.step()
        return best

    def scan(self, totals: Float[Tensor, "rows columns d_1"]) -> tuple[Float[Tensor, "rows columns d_1"], int]:
        """Every coordinate in turn, those of t last, put where the largest error is least on two grids.

        One spans y from -2N to 2N, within which every detector can be set off; the other goes to twice the equaliser.
        """
        m, N = self.layout.num_symbols, self.layout.num_positions
        reach = 2.0 * N * (self.num_slots + self.suffixes.shape[1])
        coarse, fine = (torch.linspace(-1, 1, count, dtype=torch.float64) for count in (_COARSE, _FINE))
        grid = torch.cat([reach * coarse, 2 * self.equaliser() * fine])
        totals, tried = totals.clone(), 0
        rows, columns, _ = totals.shape
        for at in sorted(range(m * N), key=lambda at: at % m == ALARM_SYMBOL):
            tries = totals[:, :, None].repeat(1, 1, len(grid) + 1, 1)
            tries[:, :, :-1, at] = grid  # the last try is the coordinate as it stands
            errors = self.errors(tries.flatten(1, 2)).view(rows, columns, -1)
            totals = tries.gather(2, errors.argmin(-1)[..., None, None].expand(-1, -1, 1, tries.shape[-1]))[:, :, 0]
            tried += errors.numel()
        return totals, tried
