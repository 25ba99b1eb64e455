"""The histogram constructions as the paper prints them, each beside what it is said to give.

They differ from ``kvcat.theory.histogram`` in nothing but the matrices and the slot named here.

References: KV-CAT, appendix "Motivating example", proofs of "hist_non_compressible" and "hist_compressible".
"""

from dataclasses import dataclass, replace

import torch

from kvcat.theory.compression import CompressedModel, KeysValues
from kvcat.theory.definitions import Block, FeedForward, Transformer, run_block
from kvcat.theory.histogram import (
    block_moves,
    compressible_histogram,
    histogram,
    histogram_policy,
    incompressible_histogram,
)
from kvcat.types import Float, Int, Tensor


@dataclass(frozen=True, eq=False)
class CounterExample:
    """What a printed construction computes on one input and what the text says that it computes."""

    computed: Float[Tensor, " d"]
    claimed: Float[Tensor, " d"]

    @property
    def deviation(self) -> float:
        """The Euclidean distance of the two."""
        return float(torch.linalg.vector_norm(self.computed - self.claimed))


def nilpotent_output(tokens: Int[Tensor, " n"], num_symbols: int, *, transposed: bool = False) -> CounterExample:
    """Proposition 1 with W_V = W_O = ((0, 0), (I, 0)): the output is 0, not the histogram.

    The square of that matrix is 0, whether it multiplies rows from the right or (``transposed``) columns from the left.
    """
    fixed = incompressible_histogram(num_symbols, max(2, len(tokens)))
    moved = block_moves(2, num_symbols, (1, 2) if transposed else (2, 1))
    return CounterExample(_with_attention(fixed, moved, moved)(tokens), histogram(tokens, num_symbols))


def unmoved_output(tokens: Int[Tensor, " n"], num_symbols: int) -> CounterExample:
    """Proposition 2 with the printed W_V, whose third block column is 0, and W_O = I: the output is 0.

    Nothing reaches block 3, which the last map rescales. Multiplied from the left the matrix does what the text says.
    """
    printed = _printed_one_slot(num_symbols, max(2, len(tokens)), transposed=False)
    return CounterExample(printed(tokens), histogram(tokens, num_symbols))


def doubled_blocks(tokens: Int[Tensor, " n"], num_symbols: int) -> CounterExample:
    """Proposition 2 with W_V transposed and W_O = I: the last token's blocks (w, x, y, z) before the last map.

    Claimed are (e_a, p_n, hist, 0). Blocks 1 and 2 come through W_V and W_O and, once more, through the residual:
    (e_a + hist, p_n + mean of the p_i, hist, 0).
    """
    model = _printed_one_slot(num_symbols, max(2, len(tokens)), transposed=True)
    x = model.blocks[0].feed_forward(model.embed(tokens))
    block = model.blocks[1]
    before = Block(block.heads, block.w_o, _identity_map(x.shape[1]))
    mixed = run_block(before, x, [(x @ head.w_k, x @ head.w_v) for head in block.heads], causal=False)
    claimed = x[-1] + histogram(tokens, num_symbols) @ block_moves(4, num_symbols, (1, 3))[:num_symbols]
    return CounterExample(mixed[-1], claimed)


def misplaced_counts(prefix: Int[Tensor, " n"], suffix: Int[Tensor, " k"], num_symbols: int) -> CounterExample:
    """Proposition 2 in the corrected network behind the printed slot, which holds the counts in block 1.

    The average is read in block 3, so the prefix is missing from it: S_b / (n + k), not (S_a + S_b) / (n + k).
    """
    model = compressible_histogram(num_symbols, len(prefix) + len(suffix))
    counts, length = block_moves(4, num_symbols, (1, 1)), block_moves(4, num_symbols, (2, 4))

    def printed_slot(keys: Tensor, values: Tensor) -> KeysValues:
        return torch.zeros_like(keys[:1]), (values.sum(0) @ counts + values[-1] @ length)[None]

    nothing, _ = histogram_policy(num_symbols)
    computed = CompressedModel(model, (nothing, printed_slot), prefix)(suffix)
    return CounterExample(computed, histogram(torch.cat([prefix, suffix]), num_symbols))


def _printed_one_slot(num_symbols: int, longest: int, *, transposed: bool) -> Transformer:
    printed = block_moves(4, num_symbols, (1, 1), (2, 2), (3, 1))
    identity = block_moves(4, num_symbols, (1, 1), (2, 2), (3, 3), (4, 4))
    return _with_attention(
        compressible_histogram(num_symbols, longest), printed.T.contiguous() if transposed else printed, identity
    )


def _with_attention(model: Transformer, w_v: Tensor, w_o: Tensor) -> Transformer:
    """The model with other W_V and W_O in its second block."""
    block = model.blocks[1]
    return replace(model, blocks=(model.blocks[0], replace(block, heads=(replace(block.heads[0], w_v=w_v),), w_o=w_o)))


def _identity_map(width: int) -> FeedForward:
    """The map x -> x as relu(x) - relu(-x)."""
    one = torch.eye(width, dtype=torch.float64)
    zeros = torch.zeros(2 * width, dtype=torch.float64)
    return FeedForward(torch.cat([one, -one], 1), zeros, torch.cat([one, -one]), zeros[:width])
