"""The definitions against transformers' arithmetic: PyTorch's own attention, and what the text says
must hold."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kvcat.theory import definitions as d


def random_model(seed=0, *, causal=False, symbols=3, positions=5):
    draw = torch.Generator().manual_seed(seed)

    def matrix(*shape: int):
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    def block(d_in, d_out):
        heads = tuple(
            d.AttentionHead(matrix(d_in, 3), matrix(d_in, 3), matrix(d_in, 2)) for _ in range(2)
        )
        return d.Block(
            heads,
            matrix(4, d_in),
            d.FeedForward(matrix(d_in, 7), matrix(7), matrix(7, d_out), matrix(d_out)),
        )

    return d.Transformer(matrix(symbols, positions, 4), (block(4, 5), block(5, 2)), causal)


@pytest.mark.parametrize("causal", [False, True])
def test_a_model_of_two_blocks_equals_pytorch_attention_written_out(causal):
    model = random_model(causal=causal)
    tokens = d.sequences(3, 5)[::17]
    x = model.embedding[tokens, torch.arange(5)]
    for block in model.blocks:
        heads = [
            scaled_dot_product_attention(x @ h.w_q, x @ h.w_k, x @ h.w_v, is_causal=causal)
            for h in block.heads
        ]
        ffn = block.feed_forward
        x = (
            torch.relu((torch.cat(heads, -1) @ block.w_o + x) @ ffn.w_1 + ffn.b_1) @ ffn.w_2
            + ffn.b_2
        )
    torch.testing.assert_close(model(tokens), x[:, -1], rtol=1e-12, atol=1e-12)


def test_under_the_causal_mask_a_whole_cache_gives_the_model_itself():
    model = random_model(causal=True)
    worst = d.compressibility(model, (d.keep_all, d.keep_all), lambda n: n)
    assert worst.error < 1e-11


def test_the_worst_case_is_the_maximum_over_every_prefix_and_suffix():
    model = random_model(causal=True, symbols=2, positions=4)

    def first(keys, values):
        return keys[:1], values[:1]

    worst = d.compressibility(model, (first, first), lambda n: 1)
    errors = {}
    for n in range(1, 4):
        for prefix in d.sequences(2, n):
            for k in range(1, 4 - n + 1):
                for suffix in d.sequences(2, k):
                    cache = d.compress((first, first), d.prefix_cache(model, prefix))
                    difference = model(torch.cat([prefix, suffix])) - d.answer(
                        model, cache, n, suffix
                    )
                    errors[tuple(prefix.tolist()), tuple(suffix.tolist())] = float(
                        difference.norm()
                    )
    assert len(errors) == 2 * (2 + 4 + 8) + 4 * (2 + 4) + 8 * 2
    assert worst.error == pytest.approx(max(errors.values()), rel=1e-12)
    assert errors[worst.prefix, worst.suffix] == pytest.approx(worst.error, rel=1e-12)


def test_a_table_holds_what_its_function_says():
    for table, tokens, value in (
        (d.parity(2, 4), [1, 1, 0, 1], [1.0]),
        (d.last_symbol(3, 3), [0, 2, 1], [0.0, 1.0, 0.0]),
        (d.majority(3, 4), [2, 1, 2], [0.0, 0.0, 1.0]),
        (d.majority(3, 4), [2, 1, 2, 1], [0.0, 1.0, 0.0]),
        (d.mean(4, 3), [3, 0], [1.5]),
    ):
        assert table(torch.tensor(tokens)).tolist() == value
