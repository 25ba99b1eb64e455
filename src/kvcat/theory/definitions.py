"""The paper's transformer, to the letter: heads, blocks, the embedding, and the model they make, in float64.

Rows are tokens and matrices multiply from the right, as in the paper. There is no layer norm, no residual around the
feed-forward map and no mask (appendix "Transformers and KV Cache Compression", its note); ``causal=True``
adds the mask.

References: KV-CAT, appendix "Theory", definitions of attention head, transformer block, token embedding, transformer.
"""

import itertools
from dataclasses import dataclass, replace

import torch

from kvcat.types import Float, Int, Tensor


def _check_matrix(name: str, matrix: Tensor, rows: int | None = None) -> None:
    if matrix.dtype != torch.float64:
        raise ValueError(f"{name} is {matrix.dtype}: the theory is computed in float64")
    if rows is not None and matrix.shape[0] != rows:
        raise ValueError(f"{name} has {matrix.shape[0]} rows, expected {rows}")


@dataclass(frozen=True, eq=False)
class AttentionHead:
    """The projections of one head: keys and values are what a cache holds, so a policy acts behind ``w_k`` and ``w_v``.

    The paper gives all three the shape (d_in, d_out); values may have a width of their own here, since the residual
    asks only that the heads' values, side by side, come back to d_in through the block's ``w_o``.
    """

    w_q: Float[Tensor, "d_in d_k"]
    w_k: Float[Tensor, "d_in d_k"]
    w_v: Float[Tensor, "d_in d_v"]

    def __post_init__(self) -> None:
        _check_matrix("w_q", self.w_q)
        _check_matrix("w_k", self.w_k, self.w_q.shape[0])
        _check_matrix("w_v", self.w_v, self.w_q.shape[0])

    @property
    def d_k(self) -> int:
        """Width of a key."""
        return self.w_k.shape[1]


@dataclass(frozen=True, eq=False)
class FeedForward:
    """x -> relu(x W1 + b1) W2 + b2, row by row: two layers, as the paper has it."""

    w_1: Float[Tensor, "d_in d_ff"]
    b_1: Float[Tensor, " d_ff"]
    w_2: Float[Tensor, "d_ff d_out"]
    b_2: Float[Tensor, " d_out"]

    def __post_init__(self) -> None:
        _check_matrix("w_1", self.w_1)
        _check_matrix("b_1", self.b_1, self.w_1.shape[1])
        _check_matrix("w_2", self.w_2, self.w_1.shape[1])
        _check_matrix("b_2", self.b_2, self.w_2.shape[1])

    def __call__(self, x: Float[Tensor, "*rows d_in"]) -> Float[Tensor, "*rows d_out"]:
        """The map, applied to every row."""
        return torch.relu(x @ self.w_1 + self.b_1) @ self.w_2 + self.b_2


@dataclass(frozen=True, eq=False)
class Block:
    """X -> FFN([head_1(X), ..., head_h(X)] W_O + X).

    The residual adds X, so W_O maps to the block's input width; only the feed-forward map may change the width.
    """

    heads: tuple[AttentionHead, ...]
    w_o: Float[Tensor, "h_d_v d_in"]
    feed_forward: FeedForward

    def __post_init__(self) -> None:
        width = sum(head.w_v.shape[1] for head in self.heads)
        _check_matrix("w_o", self.w_o, width)
        d_in = self.w_o.shape[1]
        for head in self.heads:
            _check_matrix("w_q", head.w_q, d_in)
        _check_matrix("w_1", self.feed_forward.w_1, d_in)


@dataclass(frozen=True, eq=False)
class Transformer:
    """A table te(a, i) of embeddings and blocks; called on sequences it returns the last token's representation.

    ``embedding[a, i - 1]`` is te(a, i): symbols and, with them, prefixes and suffixes are numbered from 0 in code.
    """

    embedding: Float[Tensor, "symbols positions d_0"]
    blocks: tuple[Block, ...]
    causal: bool = False

    def __post_init__(self) -> None:
        _check_matrix("embedding", self.embedding)
        width = self.embedding.shape[2]
        for block in self.blocks:
            _check_matrix("w_o", block.w_o.T, width)
            width = block.feed_forward.w_2.shape[1]

    @property
    def num_symbols(self) -> int:
        """Size of the alphabet."""
        return self.embedding.shape[0]

    @property
    def num_positions(self) -> int:
        """N, the longest sequence that has embeddings."""
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
    block: Block,
    x: Float[Tensor, "*batch queries d_in"],
    slots: list[tuple[Tensor, Tensor]],
    causal: bool,
) -> Float[Tensor, "*batch queries d_out"]:
    """The block on rows ``x`` whose heads attend to the given keys and values, the rows' own being the last of them.

    Every softmax runs over all slots (plain), or over those before the rows and the rows up to each one (causal).
    """
    outputs: list[Tensor] = []
    for head, (keys, values) in zip(block.heads, slots, strict=True):
        scores = x @ head.w_q @ keys.mT / head.d_k**0.5
        if causal:
            num_queries, num_slots = scores.shape[-2:]
            later = torch.ones(num_queries, num_slots, dtype=torch.bool).triu(num_slots - num_queries + 1)
            scores = scores.masked_fill(later, -torch.inf)
        outputs.append(scores.softmax(-1) @ values)
    return block.feed_forward(torch.cat(outputs, -1) @ block.w_o + x)


def sequences(num_symbols: int, length: int) -> Int[Tensor, "all_sequences length"]:
    """Every sequence of this length, in lexicographic order: A^length.

    Raises:
        ValueError: length below 1.
    """
    if length < 1:
        raise ValueError(f"sequences have at least one symbol, got length {length}")
    rows = list(itertools.product(range(num_symbols), repeat=length))
    return torch.tensor(rows, dtype=torch.int64)
