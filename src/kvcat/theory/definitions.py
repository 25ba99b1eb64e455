"""The paper's definitions in float64: transformer, policy, compressibility, functions of sequences.

Rows are tokens and matrices multiply from the right. As in the paper there is no layer norm, no
residual around the feed-forward map and no mask; ``causal=True`` adds the mask. A policy sees the
keys and values of a prefix and nothing else: not the suffix, nor its length. So one cache serves
every suffix, and an error is a maximum over all suffixes.

References: KV-CAT, appendix "Theory", definitions of attention head, transformer block, token
    embedding, transformer,
KV cache compression and KV compressibility.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch.nn.functional import one_hot

from kvcat.errors import InputError
from kvcat.types import Float, Int, Tensor

KeysValues: TypeAlias = tuple[Tensor, Tensor]  # (slots, d_k) and (slots, d_v) of one head
Cache: TypeAlias = tuple[tuple[KeysValues, ...], ...]  # by block, then by head
Policy: TypeAlias = Sequence[Callable[[Tensor, Tensor], KeysValues]]  # C_1, ..., C_L
Budget: TypeAlias = Callable[[int], int]  # r(n), slots for a prefix of n tokens, 0 <= r(n) <= n


@dataclass(frozen=True, eq=False)
class AttentionHead:
    """The projections of one head. A cache holds keys x W_K and values x W_V."""

    w_q: Float[Tensor, "d_in d_k"]
    w_k: Float[Tensor, "d_in d_k"]
    w_v: Float[Tensor, "d_in d_v"]


@dataclass(frozen=True, eq=False)
class FeedForward:
    """x -> relu(x W_1 + b_1) W_2 + b_2, row by row."""

    w_1: Float[Tensor, "d_in d_ff"]
    b_1: Float[Tensor, " d_ff"]
    w_2: Float[Tensor, "d_ff d_out"]
    b_2: Float[Tensor, " d_out"]

    def __call__(self, x: Float[Tensor, "*rows d_in"]) -> Float[Tensor, "*rows d_out"]:
        """The map, applied to every row."""
        return torch.relu(x @ self.w_1 + self.b_1) @ self.w_2 + self.b_2


@dataclass(frozen=True, eq=False)
class Block:
    """X -> FFN([head_1(X), ..., head_h(X)] W_O + X).

    W_O maps to the input width, FFN to another.
    """

    heads: tuple[AttentionHead, ...]
    w_o: Float[Tensor, "h_d_v d_in"]
    feed_forward: FeedForward


def averaging_block(w_v: Tensor, w_o: Tensor, feed_forward: FeedForward) -> Block:
    """A block of one head with W_Q = W_K = 0: uniform attention."""
    zero = torch.zeros_like(w_v)
    return Block((AttentionHead(zero, zero, w_v),), w_o, feed_forward)


@dataclass(frozen=True, eq=False)
class Transformer:
    """Embeddings te(a, i) = ``embedding[a, i - 1]`` of symbols a = 0, 1, ... and blocks."""

    embedding: Float[Tensor, "symbols positions d_0"]
    blocks: tuple[Block, ...]
    causal: bool = False

    @property
    def num_symbols(self) -> int:
        """m, the size of the alphabet."""
        return self.embedding.shape[0]

    @property
    def num_positions(self) -> int:
        """N, the length of the longest sequences."""
        return self.embedding.shape[1]

    def embed(
        self, tokens: Int[Tensor, "*batch tokens"], start: int = 0
    ) -> Float[Tensor, "*batch tokens d_0"]:
        """te(a_1, start + 1), te(a_2, start + 2), ...; ValueError for tokens that do not fit."""
        length = tokens.shape[-1]
        if length < 1 or start + length > self.num_positions:
            raise ValueError(
                f"{length} tokens from position {start}, but sequences have 1 to "
                f"{self.num_positions}"
            )
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.num_symbols:
            raise ValueError(f"symbols must lie in 0 to {self.num_symbols - 1}")
        return self.embedding[tokens, torch.arange(start, start + length)]

    def __call__(self, tokens: Int[Tensor, "*batch tokens"]) -> Float[Tensor, "*batch d_out"]:
        """M(a): the representation of the final token."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = run_block(
                block, x, [(x @ head.w_k, x @ head.w_v) for head in block.heads], self.causal
            )
        return x[..., -1, :]


def run_block(
    block: Block, x: Float[Tensor, "*batch queries d_in"], slots: Sequence[KeysValues], causal: bool
) -> Float[Tensor, "*batch queries d_out"]:
    """A block on rows ``x``; each head attends to its slots, of which those of the rows come last.

    The softmax runs over all slots, or with the causal mask over those up to each row.
    """
    outputs: list[Tensor] = []
    for head, (keys, values) in zip(block.heads, slots, strict=True):
        scores = x @ head.w_q @ keys.mT / keys.shape[-1] ** 0.5
        if causal:
            num_queries, num_slots = scores.shape[-2:]
            later = torch.ones(num_queries, num_slots, dtype=torch.bool).triu(
                num_slots - num_queries + 1
            )
            scores = scores.masked_fill(later, -torch.inf)
        outputs.append(scores.softmax(-1) @ values)
    return block.feed_forward(torch.cat(outputs, -1) @ block.w_o + x)


def sequences(num_symbols: int, length: int) -> Int[Tensor, "all_sequences length"]:
    """Every sequence of this length >= 1 in lexicographic order."""
    return torch.tensor(
        list(itertools.product(range(num_symbols), repeat=length)), dtype=torch.int64
    )


def keep_all(keys: Tensor, values: Tensor) -> KeysValues:
    """The policy that keeps every slot."""
    return keys, values


def one_slot_policy(keep_sum: Float[Tensor, "d d"], keep_last: Float[Tensor, "d d"]) -> Policy:
    """One slot of key 0: value 0 in block 1, (sum_i v_i) keep_sum + v_n keep_last in block 2."""

    def summary(keys: Tensor, values: Tensor) -> KeysValues:
        return 0 * keys[:1], (values.sum(0) @ keep_sum + values[-1] @ keep_last)[None]

    return lambda keys, values: (0 * keys[:1], 0 * values[:1]), summary


def prefix_cache(model: Transformer, prefix: Int[Tensor, " n"]) -> Cache:
    """(K_a, V_a) of every block and head from the prefix alone.

    M([a, b]) computes the same with the causal mask, or where no earlier block mixes tokens.
    """
    x = model.embed(prefix)
    layers: list[tuple[KeysValues, ...]] = []
    for block in model.blocks:
        layers.append(tuple((x @ head.w_k, x @ head.w_v) for head in block.heads))
        x = run_block(block, x, layers[-1], model.causal)
    return tuple(layers)


def compress(policy: Policy, cache: Cache) -> Cache:
    """The policy applied to every head.

    Raises:
        ValueError: slots that are not finite, which would act through zeros.
    """
    compressed = tuple(
        tuple(layer(*head) for head in heads) for layer, heads in zip(policy, cache, strict=True)
    )
    for number, heads in enumerate(compressed, 1):
        if not all(states.isfinite().all() for head in heads for states in head):
            raise ValueError(f"the compressed keys and values of block {number} are not finite")
    return compressed


def answer(
    model: Transformer, cache: Cache, prefix_len: int, suffixes: Int[Tensor, "*batch k"]
) -> Float[Tensor, "*batch d_out"]:
    """M_{C,a}(b): the last token's output of suffixes after a cache, which may be empty.

    Positions continue from the ``prefix_len`` = n tokens that the cache replaces, te(b_i, n + i).
    """
    x = model.embed(suffixes, start=prefix_len)
    for block, cached in zip(model.blocks, cache, strict=True):
        slots: list[KeysValues] = []
        for head, (keys, values) in zip(block.heads, cached, strict=True):
            batch = x.shape[:-2]
            keys, values = keys.expand(*batch, *keys.shape), values.expand(*batch, *values.shape)
            slots.append(
                (torch.cat([keys, x @ head.w_k], -2), torch.cat([values, x @ head.w_v], -2))
            )
        x = run_block(block, x, slots, model.causal)
    return x[..., -1, :]


def suffix_error(
    model: Transformer, cache: Cache, prefix: Int[Tensor, " n"], suffixes: Int[Tensor, "batch k"]
) -> Float[Tensor, " batch"]:
    """|| M([a, b]) - M_{C,a}(b) || (Euclidean) of each suffix; infinite where slots overflow."""
    whole = torch.cat([prefix.expand(suffixes.shape[0], -1), suffixes], -1)
    errors = torch.linalg.vector_norm(
        model(whole) - answer(model, cache, prefix.shape[0], suffixes), dim=-1
    )
    return errors.nan_to_num(nan=torch.inf, posinf=torch.inf)


class WorstCase(NamedTuple):
    """The largest error and the pair where it occurs."""

    error: float
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]


def compressibility(
    model: Transformer,
    policy: Policy,
    budget: Budget,
    *,
    prefixes: Iterable[Sequence[int]] | None = None,
    suffixes: Callable[[int], Tensor] | None = None,
) -> WorstCase:
    """The least epsilon at which a policy shows (N, epsilon, r)-compressibility: its worst error.

    The largest error over every prefix of n >= 1 and every suffix of k >= 1 tokens, n + k <= N.

    ``budget`` is r(n), 0 to n; ``prefixes`` and ``suffixes`` (k to (batch, k)) restrict the
    maximum, default all. ValueError for no prefixes or a policy with another number of slots.
    """
    m = model.num_symbols
    longest = model.num_positions
    if prefixes is None:
        prefixes = (row for n in range(1, longest) for row in sequences(m, n).tolist())
    worst = WorstCase(-1.0, (), ())
    for row in prefixes:
        prefix = torch.tensor(row, dtype=torch.int64)
        n = len(prefix)
        if not 0 <= budget(n) <= n:
            raise ValueError(f"the budget for {n} tokens must lie in 0 to {n}, got {budget(n)}")
        cache = compress(policy, prefix_cache(model, prefix))
        num_slots = {len(keys) for heads in cache for keys, _ in heads}
        if num_slots != {budget(n)}:
            allowed = f"the budget allows {budget(n)} slots for {n} tokens"
            raise ValueError(f"{allowed}, the policy gave {sorted(num_slots)}")
        for k in range(1, longest - n + 1):
            suffix_rows = sequences(m, k) if suffixes is None else suffixes(k)
            errors = suffix_error(model, cache, prefix, suffix_rows)
            index = int(errors.argmax())
            if float(errors[index]) > worst.error:
                suffix = tuple(suffix_rows[index].tolist())
                worst = WorstCase(float(errors[index]), tuple(row), suffix)
    if worst.error < 0.0:
        raise ValueError("there is no prefix to look at")
    return worst


@dataclass(frozen=True, eq=False)
class FunctionTable:
    """f: ``values[n - 1][i]`` is its value at the i-th sequence of n symbols, lexicographically."""

    num_symbols: int
    values: tuple[Float[Tensor, "_ d_out"], ...]

    def __post_init__(self) -> None:
        if self.num_symbols < 2 or not self.values:
            raise InputError(
                f"a table needs 2 symbols and length 1 at least, got {self.num_symbols} symbols"
            )
        for n, rows in enumerate(self.values, 1):
            shape = self.num_symbols**n, self.d_out
            if rows.shape != shape or rows.dtype != torch.float64 or not rows.isfinite().all():
                raise ValueError(
                    f"length {n} needs a finite float64 table of {shape[0]} rows of {shape[1]}"
                )

    @property
    def longest(self) -> int:
        """N, the length of the longest sequences."""
        return len(self.values)

    @property
    def d_out(self) -> int:
        """Width of the values."""
        return self.values[0].shape[1]

    def __call__(self, tokens: Int[Tensor, "*batch n"]) -> Float[Tensor, "*batch d_out"]:
        """f, looked up."""
        n = tokens.shape[-1]
        if not 1 <= n <= self.longest:
            raise ValueError(f"the table has sequences of 1 to {self.longest} symbols, not {n}")
        return self.values[n - 1][
            (tokens * self.num_symbols ** torch.arange(n - 1, -1, -1)).sum(-1)
        ]


def tabulate(
    function: Callable[[Tensor, int], Tensor], num_symbols: int, longest: int
) -> FunctionTable:
    """A function of sequences (all, n) and m, with values (all,) or (all, d_out), as a table."""
    values = [
        function(sequences(num_symbols, n), num_symbols).double() for n in range(1, longest + 1)
    ]
    return FunctionTable(
        num_symbols, tuple(rows[:, None] if rows.ndim == 1 else rows for rows in values)
    )


def random_function(num_symbols: int, longest: int, *, seed: int = 0) -> FunctionTable:
    """Independent standard normal values."""
    draw = torch.Generator().manual_seed(seed)
    sizes = [num_symbols**n for n in range(1, longest + 1)]
    values = (torch.randn(size, 1, generator=draw, dtype=torch.float64) for size in sizes)
    return FunctionTable(num_symbols, tuple(values))


# The sum of the symbols modulo 2; the last symbol, which needs no prefix, as a one-hot vector; the
# most frequent one, the smallest on a tie, as a one-hot vector; the mean of the symbols.
parity = partial(tabulate, lambda rows, _: rows.sum(-1) % 2)
last_symbol = partial(tabulate, lambda rows, m: one_hot(rows[:, -1], m))
majority = partial(tabulate, lambda rows, m: one_hot(one_hot(rows, m).sum(1).argmax(-1), m))
mean = partial(tabulate, lambda rows, _: rows.double().mean(-1))
FUNCTIONS: dict[str, Callable[[int, int], FunctionTable]] = {
    "random": random_function,
    "parity": parity,
    "last": last_symbol,
    "majority": majority,
    "mean": mean,
}
