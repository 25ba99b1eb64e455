"""The theory's transformer with trainable tensors, and its dense and masked passes over every position."""

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple, cast

import torch
from torch import nn

from kvcat.attention import attend_coupled_reference
from kvcat.policies import SparsificationPolicy, gate
from kvcat.theory.definitions import AttentionHead, Block, FeedForward, Transformer, run_block
from kvcat.types import Float, Int, Tensor

NUM_BLOCKS = 2


class MaskedOutput(NamedTuple):
    """What a masked pass gives: its outputs, and the policies' masks and scores by first block of their group."""

    values: Float[Tensor, "batch queries d_out"]
    keep: dict[int, Float[Tensor, "batch tokens"]]
    scores: dict[int, Float[Tensor, "batch tokens"]]


class HistogramNetwork(nn.Module):
    """Two blocks of one head each, te(a, i) = u_a + p_i, causal, no layer norm, no residual around the FFN; float64.

    ``transformer()`` is the network as the theory defines one, on the same tensors: what is measured is what is
    trained.

    Args:
        num_symbols: m, also the width of the output.
        num_positions: N.
        width: of the embedding and between the blocks.
        key_width: of queries and keys.
        hidden_width: of both feed-forward maps.
        mixing: block 1 attends; False fixes its W_O at zero, as in the paper's constructions.
        uniform: W_Q = W_K = 0 in both blocks, as in the paper's constructions; False trains them.
        positions: train p_i; False fixes them at zero.
        generator: source of the initial weights.

    References: KV-CAT, appendix "Transformers and KV Cache Compression".
    """

    def __init__(
        self,
        num_symbols: int,
        num_positions: int,
        *,
        width: int,
        key_width: int,
        hidden_width: int,
        mixing: bool,
        uniform: bool,
        positions: bool,
        generator: torch.Generator,
    ) -> None:
        super().__init__()

        def normal(rows: int, columns: int, scale: float) -> nn.Parameter:
            return nn.Parameter(scale * torch.randn(rows, columns, generator=generator, dtype=torch.float64))

        # every tensor is drawn, then the fixed ones are zeroed: variants start from the same weights elsewhere
        self.symbol_table = normal(num_symbols, width, 1.0)
        self.position_table = normal(num_positions, width, 0.5)
        if not positions:
            _fix_at_zero(self.position_table)
        self.tensors = nn.ModuleList()
        for number in range(NUM_BLOCKS):
            d_out = num_symbols if number == NUM_BLOCKS - 1 else width
            tensors = {
                "w_q": normal(width, key_width, width**-0.5),
                "w_k": normal(width, key_width, width**-0.5),
                "w_v": normal(width, width, width**-0.5),
                "w_o": normal(width, width, width**-0.5),
                "w_1": normal(width, hidden_width, math.sqrt(2 / width)),
                "w_2": normal(hidden_width, d_out, hidden_width**-0.5),
            }
            tensors |= {
                "b_1": nn.Parameter(torch.zeros(hidden_width, dtype=torch.float64)),
                "b_2": nn.Parameter(torch.zeros(d_out, dtype=torch.float64)),
            }
            fixed = (["w_q", "w_k"] if uniform else []) + (["w_o"] if number == 0 and not mixing else [])
            for name in fixed:
                _fix_at_zero(tensors[name])
            self.tensors.append(nn.ParameterDict(tensors))

    def transformer(self) -> Transformer:
        """The network as it stands; gradients reach the parameters through it."""
        embedding = self.symbol_table[:, None] + self.position_table
        blocks = [
            Block(
                (AttentionHead(t["w_q"], t["w_k"], t["w_v"]),),
                t["w_o"],
                FeedForward(t["w_1"], t["b_1"], t["w_2"], t["b_2"]),
            )
            for t in cast(Iterable[nn.ParameterDict], self.tensors)
        ]
        return Transformer(embedding, tuple(blocks), causal=True)


def _fix_at_zero(parameter: nn.Parameter) -> None:
    parameter.requires_grad_(False).zero_()


def dense_pass(model: Transformer, tokens: Int[Tensor, "*batch tokens"]) -> list[Float[Tensor, "*batch tokens _"]]:
    """X^(0), ..., X^(L) of every position: the embedding, the blocks' outputs, the last of them the model's."""
    states = [model.embed(tokens)]
    for block in model.blocks:
        x = states[-1]
        slots = [(x @ head.w_k, x @ head.w_v) for head in block.heads]
        states.append(run_block(block, x, slots, model.causal))
    return states


def masked_pass(
    model: Transformer,
    tokens: Int[Tensor, "batch tokens"],
    policies: Mapping[int, SparsificationPolicy],
    generator: torch.Generator,
    *,
    tau: float = 0.5,
    coupling: str = "surrogate",
    dense: list[Tensor] | None = None,
    prefix_len: int | None = None,
) -> MaskedOutput:
    """The forward pass in which block l attends over the slots that its group's policy keeps.

    Without ``prefix_len`` query t sees {j <= t : m_j = 1} (itself if that is empty) among the masked pass' own keys
    and values; position 0 is always kept. With it the tokens behind the prefix alone are run: they see the dense
    pass' kept slots of the prefix and all of their own, as a compressed model does. Blocks before the first group
    are dense.

    Args:
        model: a causal transformer.
        tokens: symbols.
        policies: by first block of each group, from 0.
        generator: source of random masks.
        tau: threshold on the scores, in (0, 1).
        coupling: gradient of the mask, one of ``kvcat.attention.COUPLINGS``.
        dense: the states of ``dense_pass``, needed with a prefix_len.
        prefix_len: n, 1 <= n < tokens; None masks whole sequences.

    Raises:
        ValueError: a prefix_len without dense states.

    References: KV-CAT, appendix "Masked attention forward pass".
    """
    if prefix_len is not None and dense is None:
        raise ValueError(f"a masked pass behind a prefix of {prefix_len} tokens needs the dense states")
    start = prefix_len or 0
    x = model.embed(tokens)[:, start:]
    keep: dict[int, Tensor] = {}
    scores: dict[int, Tensor] = {}
    visible: Tensor | None = None
    for number, block in enumerate(model.blocks):
        prefix = dense[number][:, :start] if dense is not None and prefix_len is not None else x[:, :0]
        if number in policies:
            scores[number] = policies[number](prefix if start else x, generator=generator)
            keep[number] = gate(scores[number], tau)
            visible = torch.cat([keep[number], x.new_ones(len(x), x.shape[1])], 1) if start else keep[number]
        past = torch.cat([prefix, x], 1)
        outputs: list[Tensor] = []
        for head in block.heads:
            q, k, v = ((rows @ w)[:, None] for rows, w in ((x, head.w_q), (past, head.w_k), (past, head.w_v)))
            slots = x.new_ones(past.shape[:2]) if visible is None else visible
            outputs.append(attend_coupled_reference(q, k, v, slots, coupling=coupling)[:, 0])
        x = block.feed_forward(torch.cat(outputs, -1) @ block.w_o + x)
    return MaskedOutput(x, keep, scores)
