"""Policies, the compressed model M_{C,a}(b), and (N, epsilon, r)-compressibility, as the paper defines them.

A policy sees a prefix's keys and values and nothing else: not the suffix, nor its length. One cache serves every
suffix, so an error below is a maximum over suffixes of every length at once.

References: KV-CAT, appendix "Theory", definitions of KV cache compression and of KV compressibility.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch

from kvcat.theory.definitions import Transformer, run_block, sequences
from kvcat.types import Float, Int, Tensor

KeysValues: TypeAlias = tuple[Tensor, Tensor]
"""Keys (slots, d_k) and values (slots, d_v) of one head."""

Cache: TypeAlias = tuple[tuple[KeysValues, ...], ...]
"""Keys and values by block, then by head."""

LayerPolicy: TypeAlias = Callable[[Tensor, Tensor], KeysValues]
"""C_l: keys (n, d_k) and values (n, d_v) of a prefix to r(n) of them."""

Policy: TypeAlias = Sequence[LayerPolicy]
"""C = (C_1, ..., C_L), each applied to every head of its block."""

Budget: TypeAlias = Callable[[int], int]
"""r(n), the slots that a prefix of n tokens is allowed, 0 <= r(n) <= n."""


def keep_all(keys: Tensor, values: Tensor) -> KeysValues:
    """The policy that compresses nothing."""
    return keys, values


def prefix_cache(model: Transformer, prefix: Int[Tensor, " n"]) -> Cache:
    """(K_a, V_a) of every block and head, from the original model run on the prefix alone.

    Under the causal mask these are the keys and values that M([a, b]) computes as well. Without it they agree only
    where no block before them mixes tokens, as in the paper's constructions.
    """
    x = model.embed(prefix)
    layers: list[tuple[KeysValues, ...]] = []
    for block in model.blocks:
        slots = [(x @ head.w_k, x @ head.w_v) for head in block.heads]
        layers.append(tuple(slots))
        x = run_block(block, x, slots, model.causal)
    return tuple(layers)


def compress(policy: Policy, cache: Cache) -> Cache:
    """The policy applied to every head.

    Raises:
        ValueError: not one function per block, or a compressed cache that is not finite. (A key of infinite norm
            would act through a W_Q of zeros as not a number, an unbounded value through a W_O of zeros.)
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
    """The suffixes run behind a cache that stands for a prefix of ``prefix_len`` tokens: the last token's output.

    Positions go on from the prefix (te(b_i, n + i)); cached keys and values come first, the suffix's own behind them.
    Differentiable in the cache, which may be empty (no slots).
    """
    x = model.embed(suffixes, start=prefix_len)
    for block, cached in zip(model.blocks, cache, strict=True):
        slots: list[KeysValues] = []
        for head, (keys, values) in zip(block.heads, cached, strict=True):
            own_keys, own_values = x @ head.w_k, x @ head.w_v
            batch = own_keys.shape[:-2]
            slots.append(
                (
                    torch.cat([keys.expand(*batch, *keys.shape), own_keys], -2),
                    torch.cat([values.expand(*batch, *values.shape), own_values], -2),
                )
            )
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


@dataclass(frozen=True)
class WorstCase:
    """The largest error found, and the pair it was found at."""

    error: float
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]


def suffix_error(
    model: Transformer, cache: Cache, prefix: Int[Tensor, " n"], suffixes: Int[Tensor, "batch k"]
) -> Float[Tensor, " batch"]:
    """|| M([a, b]) - M_{C,a}(b) || (Euclidean) for each suffix behind a compressed cache of the prefix."""
    whole = torch.cat([prefix.expand(suffixes.shape[0], -1), suffixes], -1)
    errors = torch.linalg.vector_norm(model(whole) - answer(model, cache, prefix.shape[0], suffixes), dim=-1)
    return errors.nan_to_num(
        nan=torch.inf, posinf=torch.inf
    )  # finite slots so large that their sums overflow are as wrong as can be


def compressibility(
    model: Transformer,
    policy: Policy,
    budget: Budget,
    *,
    longest: int | None = None,
    prefixes: Iterable[Sequence[int]] | None = None,
) -> WorstCase:
    """The least epsilon with which this policy shows the model to be (N, epsilon, r)-compressible (errors <= epsilon).

    Exhaustive: every prefix a of length n >= 1, every suffix b of length k >= 1, n + k <= N.

    Args:
        model: the transformer M.
        policy: C, one function per block.
        budget: r(n), the number of slots a prefix of n tokens is allowed, 0 <= r(n) <= n.
        longest: N, default the model's number of positions.
        prefixes: look at these prefixes alone (each of less than N symbols); default all.

    Raises:
        ValueError: N outside 2 to the model's positions, no prefixes, a budget outside 0 to n, or a policy that does
            not return exactly r(n) slots.
    """
    longest = model.num_positions if longest is None else longest
    if not 2 <= longest <= model.num_positions:
        raise ValueError(f"N must lie in 2 to {model.num_positions}, got {longest}")
    if prefixes is None:
        prefixes = (row for n in range(1, longest) for row in sequences(model.num_symbols, n).tolist())
    worst = WorstCase(-1.0, (), ())
    for row in prefixes:
        prefix = torch.tensor(row, dtype=torch.int64)
        n = prefix.shape[0]
        if not 0 <= budget(n) <= n:
            raise ValueError(f"the budget for {n} tokens must lie in 0 to {n}, got {budget(n)}")
        cache = compress(policy, prefix_cache(model, prefix))
        slots = {keys.shape[0] for heads in cache for keys, _ in heads}
        if slots != {budget(n)}:
            raise ValueError(f"the budget allows {budget(n)} slots for {n} tokens, the policy returned {sorted(slots)}")
        for k in range(1, longest - n + 1):
            suffixes = sequences(model.num_symbols, k)
            errors = suffix_error(model, cache, prefix, suffixes)
            at = int(errors.argmax())
            if float(errors[at]) > worst.error:
                worst = WorstCase(float(errors[at]), tuple(prefix.tolist()), tuple(suffixes[at].tolist()))
    if worst.error < 0.0:
        raise ValueError("there is no prefix to look at")
    return worst
