"""The paper's definitions in float64: transformer, policy, compressed model, compressibility.

Rows are tokens and matrices multiply from the right. As in the paper there is no layer norm, no
residual around the feed-forward map and no mask; ``causal=True`` adds the mask. A policy sees the
keys and values of a prefix and nothing else: not the suffix, nor its length. So one cache serves
every suffix, and an error is a maximum over all suffixes.

References: KV-CAT, appendix "Theory", definitions of attention head, transformer block, token
embedding, transformer, KV cache compression and KV compressibility.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from kvcat.types import Float, Int, Tensor

KeysValues: TypeAlias = tuple[Tensor, Tensor]
"""Keys (slots, d_k) and values (slots, d_v) of one head."""

Cache: TypeAlias = tuple[tuple[KeysValues, ...], ...]
"""Keys and values by block, then by head."""

Policy: TypeAlias = Sequence[Callable[[Tensor, Tensor], KeysValues]]
"""C = (C_1, ..., C_L): each maps keys (n, d_k) and values (n, d_v) of a prefix to r(n) of them."""

Budget: TypeAlias = Callable[[int], int]
"""r(n), the number of slots for a prefix of n tokens, 0 <= r(n) <= n."""


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

    W_O maps to the input width, as the residual adds X; the feed-forward map may change the width.
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
    """A table of embeddings te(a, i) and blocks; called on sequences it returns the last token's output.

    ``embedding[a, i - 1]`` is te(a, i). In code symbols are numbered from 0.
    """

    embedding: Float[Tensor, "symbols positions d_0"]
    blocks: tuple[Block, ...]
    causal: bool = False

    @property
    def num_symbols(self) -> int:
        """Size m of the alphabet."""
        return self.embedding.shape[0]

    @property
    def num_positions(self) -> int:
        """N, the length of the longest sequences."""
        return self.embedding.shape[1]

    def with_causal_mask(self, causal: bool = True) -> "Transformer":
        """The same weights with (without) the causal mask."""
        return replace(self, causal=causal)

    def embed(self, tokens: Int[Tensor, "*batch tokens"], start: int = 0) -> Float[Tensor, "*batch tokens d_0"]:
        """te(a_1, start + 1), te(a_2, start + 2), ...

        Raises:
            ValueError: no tokens, more than there are positions, or a symbol outside the alphabet.
        """
        length = tokens.shape[-1]
        if length < 1 or start + length > self.num_positions:
            raise ValueError(f"{length} tokens from position {start}, but sequences have 1 to {self.num_positions}")
        if tokens.numel() and not 0 <= int(tokens.min()) <= int(tokens.max()) < self.num_symbols:
            raise ValueError(f"symbols must lie in 0 to {self.num_symbols - 1}")
        return self.embedding[tokens, torch.arange(start, start + length)]

    def __call__(self, tokens: Int[Tensor, "*batch tokens"]) -> Float[Tensor, "*batch d_out"]:
        """M(a): the representation of the final token."""
        x = self.embed(tokens)
        for block in self.blocks:
            x = run_block(block, x, [(x @ head.w_k, x @ head.w_v) for head in block.heads], self.causal)
        return x[..., -1, :]


def run_block(
    block: Block, x: Float[Tensor, "*batch queries d_in"], slots: Sequence[KeysValues], causal: bool
) -> Float[Tensor, "*batch queries d_out"]:
    """A block on rows ``x``; each head attends to its keys and values, of which the rows' own come last.

    The softmax runs over all slots, or with the causal mask over those up to each row.
    """
    outputs: list[Tensor] = []
    for head, (keys, values) in zip(block.heads, slots, strict=True):
        scores = x @ head.w_q @ keys.mT / keys.shape[-1] ** 0.5
        if causal:
            num_queries, num_slots = scores.shape[-2:]
            later = torch.ones(num_queries, num_slots, dtype=torch.bool).triu(num_slots - num_queries + 1)
            scores = scores.masked_fill(later, -torch.inf)
        outputs.append(scores.softmax(-1) @ values)
    return block.feed_forward(torch.cat(outputs, -1) @ block.w_o + x)


def sequences(num_symbols: int, length: int) -> Int[Tensor, "all_sequences length"]:
    """Every sequence of this length >= 1 in lexicographic order.

    Raises:
        ValueError: length below 1.
    """
    if length < 1:
        raise ValueError(f"sequences have at least one symbol, got length {length}")
    return torch.tensor(list(itertools.product(range(num_symbols), repeat=length)), dtype=torch.int64)


def keep_all(keys: Tensor, values: Tensor) -> KeysValues:
    """The policy that compresses nothing."""
    return keys, values


def one_slot_policy(keep_sum: Float[Tensor, "d d"], keep_last: Float[Tensor, "d d"]) -> Policy:
    """One slot of key 0 in both blocks: value 0 in the first, (sum_i v_i) keep_sum + v_n keep_last in the second."""

    def nothing(keys: Tensor, values: Tensor) -> KeysValues:
        return torch.zeros_like(keys[:1]), torch.zeros_like(values[:1])

    def summary(keys: Tensor, values: Tensor) -> KeysValues:
        return torch.zeros_like(keys[:1]), (values.sum(0) @ keep_sum + values[-1] @ keep_last)[None]

    return nothing, summary


def prefix_cache(model: Transformer, prefix: Int[Tensor, " n"]) -> Cache:
    """(K_a, V_a) of every block and head, from the model run on the prefix alone.

    With the causal mask M([a, b]) computes the same keys and values. Without it they agree only
    where no earlier block mixes tokens, as in the paper's constructions.
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
        ValueError: not one function per block, or a compressed cache that is not finite. (Infinite
            keys and values would act through matrices of zeros.)
    """
    if len(policy) != len(cache):
        raise ValueError(f"a policy needs one function per block: {len(policy)} for {len(cache)} blocks")
    compressed = tuple(tuple(layer(*head) for head in heads) for layer, heads in zip(policy, cache, strict=True))
    for number, heads in enumerate(compressed, 1):
        for keys, values in heads:
            if keys.shape[0] != values.shape[0]:
                raise ValueError(f"block {number} has {keys.shape[0]} keys but {values.shape[0]} values")
            if not (keys.isfinite().all() and values.isfinite().all()):
                raise ValueError(f"the compressed keys and values of block {number} are not finite")
    return compressed


def answer(
    model: Transformer, cache: Cache, prefix_len: int, suffixes: Int[Tensor, "*batch k"]
) -> Float[Tensor, "*batch d_out"]:
    """M_{C,a}(b): the last token's output of suffixes run behind a cache that stands for ``prefix_len`` tokens.

    Positions continue from the prefix, te(b_i, n + i). The cache may be empty.
    """
    x = model.embed(suffixes, start=prefix_len)
    for block, cached in zip(model.blocks, cache, strict=True):
        slots: list[KeysValues] = []
        for head, (keys, values) in zip(block.heads, cached, strict=True):
            batch = x.shape[:-2]
            keys, values = keys.expand(*batch, *keys.shape), values.expand(*batch, *values.shape)
            slots.append((torch.cat([keys, x @ head.w_k], -2), torch.cat([values, x @ head.w_v], -2)))
        x = run_block(block, x, slots, model.causal)
    return x[..., -1, :]


@dataclass(frozen=True, eq=False)
class CompressedModel:
    """M_{C,a}: the model behind the compressed cache of the prefix a."""

    model: Transformer
    policy: Policy
    prefix: Int[Tensor, " n"]

    def __call__(self, suffix: Int[Tensor, "*batch k"]) -> Float[Tensor, "*batch d_out"]:
        """M_{C,a}(b), for one suffix or many of one length."""
        cache = compress(self.policy, prefix_cache(self.model, self.prefix))
        return answer(self.model, cache, self.prefix.shape[0], suffix)


def suffix_error(
    model: Transformer, cache: Cache, prefix: Int[Tensor, " n"], suffixes: Int[Tensor, "batch k"]
) -> Float[Tensor, " batch"]:
    """|| M([a, b]) - M_{C,a}(b) || (Euclidean) for each suffix; infinite where finite slots overflow."""
    whole = torch.cat([prefix.expand(suffixes.shape[0], -1), suffixes], -1)
    errors = torch.linalg.vector_norm(model(whole) - answer(model, cache, prefix.shape[0], suffixes), dim=-1)
    return errors.nan_to_num(nan=torch.inf, posinf=torch.inf)


@dataclass(frozen=True)
class WorstCase:
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
    """The least epsilon with which a policy shows the model (N, epsilon, r)-compressible (errors <= epsilon).

    The maximum of the error over every prefix of n >= 1 and every suffix of k >= 1 tokens, n + k <= N.

    Args:
        model: the transformer M, with N positions.
        policy: C, one function per block.
        budget: r(n), the number of slots for a prefix of n tokens, 0 <= r(n) <= n.
        prefixes: only these; default all.
        suffixes: k to the suffixes (batch, k) to look at; default all.

    Raises:
        ValueError: no prefixes, a budget outside 0 to n, or a policy that returns another number of slots.
    """
    m, longest = model.num_symbols, model.num_positions
    if prefixes is None:
        prefixes = (row for n in range(1, longest) for row in sequences(m, n).tolist())
    worst = WorstCase(-1.0, (), ())
    for row in prefixes:
        prefix = torch.tensor(row, dtype=torch.int64)
        n = len(prefix)
        if not 0 <= budget(n) <= n:
            raise ValueError(f"the budget for {n} tokens must lie in 0 to {n}, got {budget(n)}")
        cache = compress(policy, prefix_cache(model, prefix))
        num_slots = {keys.shape[0] for heads in cache for keys, _ in heads}
        if num_slots != {budget(n)}:
            raise ValueError(
                f"the budget allows {budget(n)} slots for {n} tokens, the policy returned {sorted(num_slots)}"
            )
        for k in range(1, longest - n + 1):
            some = sequences(m, k) if suffixes is None else suffixes(k)
            errors = suffix_error(model, cache, prefix, some)
            at = int(errors.argmax())
            if float(errors[at]) > worst.error:
                worst = WorstCase(float(errors[at]), tuple(prefix.tolist()), tuple(some[at].tolist()))
    if worst.error < 0.0:
        raise ValueError("there is no prefix to look at")
    return worst
