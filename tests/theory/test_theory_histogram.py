"""Propositions 1 and 2: both networks are the histogram, and the second needs one slot, for every prefix and suffix."""

import pytest
import torch

from kvcat.theory.compression import CompressedModel, compress, compressibility, prefix_cache
from kvcat.theory.definitions import Transformer, sequences
from kvcat.theory.histogram import (
    block_moves,
    compressible_histogram,
    count_vectors,
    histogram,
    histogram_policy,
    incompressible_histogram,
    mass_ratios,
)
from kvcat.theory.histogram_maps import first_map_deviation, linear_map_deviation, rescaling_map_deviation

SIZES = [(2, 2), (2, 6), (3, 5), (4, 4), (6, 3)]


def constructions(num_symbols: int, longest: int) -> list[Transformer]:
    return [
        incompressible_histogram(num_symbols, longest),
        incompressible_histogram(num_symbols, longest, num_blocks=4),
        compressible_histogram(num_symbols, longest),
    ]


def weights(model: Transformer) -> dict[str, torch.Tensor]:
    """Every matrix of the model by name."""
    found = {"embedding": model.embedding}
    for number, block in enumerate(model.blocks, 1):
        found[f"{number}.w_o"] = block.w_o
        found |= {f"{number}.{name}": getattr(block.heads[0], name) for name in ("w_q", "w_k", "w_v")}
        found |= {f"{number}.ffn.{name}": getattr(block.feed_forward, name) for name in ("w_1", "b_1", "w_2", "b_2")}
    return found


def test_the_histogram_counts() -> None:
    assert histogram(torch.tensor([[0, 0, 1, 2], [3, 3, 3, 1]]), 4).tolist() == [
        [0.5, 0.25, 0.25, 0],
        [0, 0.25, 0, 0.75],
    ]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("num_symbols", "longest"), SIZES)
def test_every_network_returns_the_histogram_of_every_sequence(num_symbols: int, longest: int, causal: bool) -> None:
    for model in constructions(num_symbols, longest):
        for n in range(1, longest + 1):
            tokens = sequences(num_symbols, n)
            counts = torch.stack([(tokens == a).sum(1) for a in range(num_symbols)], 1).double()
            torch.testing.assert_close(model.with_causal_mask(causal)(tokens), counts / n, rtol=0, atol=1e-15)


@pytest.mark.parametrize(("num_symbols", "longest"), SIZES)
def test_one_slot_is_enough_for_every_prefix_and_every_suffix(num_symbols: int, longest: int) -> None:
    model = compressible_histogram(num_symbols, longest)
    assert compressibility(model, histogram_policy(num_symbols), lambda n: 1).error < 1e-12
    masked = compressibility(model.with_causal_mask(), histogram_policy(num_symbols), lambda n: 1)
    assert masked.error < 1e-12


@pytest.mark.parametrize(("num_symbols", "longest"), [(4, 12), (3, 20), (7, 16), (2, 26)])
def test_one_slot_is_enough_for_sampled_prefixes_and_suffixes_of_longer_sequences(
    num_symbols: int, longest: int
) -> None:
    model, policy = compressible_histogram(num_symbols, longest), histogram_policy(num_symbols)
    draw = torch.Generator().manual_seed(longest)
    for n in range(1, longest, 4):
        for k in range(1, longest - n + 1, 3):
            tokens = torch.randint(0, num_symbols, (4, n + k), generator=draw)
            tokens[1:, :n] = tokens[0, :n]
            tokens[0, n:] = int(tokens[0, 0])  # a constant suffix: the largest counts
            short = CompressedModel(model, policy, tokens[0, :n])(tokens[:, n:])
            assert float((short - histogram(tokens, num_symbols)).norm(dim=1).max()) < 1e-10


def test_the_slot_holds_the_counts_and_the_length_of_the_prefix() -> None:
    model = compressible_histogram(3, 6)
    (_, ((keys, values),)) = compress(histogram_policy(3), prefix_cache(model, torch.tensor([2, 0, 2, 2])))
    assert keys.tolist() == [[0.0] * 12]
    assert values.tolist() == [[0, 0, 0, 0, 0, 0, 1, 0, 3, 4, 1, 0]]


@pytest.mark.parametrize("causal", [False, True])
def test_the_slot_without_the_length_or_with_another_prefixs_counts_is_wrong(causal: bool) -> None:
    model, (nothing, summary) = compressible_histogram(2, 6).with_causal_mask(causal), histogram_policy(2)

    def without_length(keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = summary(keys, values)
        return key, value @ block_moves(4, 2, (3, 3))

    assert compressibility(model, (nothing, without_length), lambda n: 1).error > 0.1
    assert compressibility(model, (nothing, lambda k, v: summary(k, v.flip(0))), lambda n: 1).error > 0.1


def test_a_slot_does_not_compress_the_first_construction() -> None:
    model = incompressible_histogram(2, 6, num_blocks=4)
    assert compressibility(model, histogram_policy(2), lambda n: 1).error > 0.5


@pytest.mark.parametrize(("num_symbols", "longest"), SIZES)
def test_both_constructions_have_one_architecture_and_differ_in_the_last_map_and_m_rows_of_w_o(
    num_symbols: int, longest: int
) -> None:
    first = weights(incompressible_histogram(num_symbols, longest, num_blocks=4))
    second = weights(compressible_histogram(num_symbols, longest))
    assert {name: tensor.shape for name, tensor in first.items()} == {name: t.shape for name, t in second.items()}
    differing = {name for name in first if not torch.equal(first[name], second[name])}
    assert differing <= {"2.w_o", "2.ffn.w_1", "2.ffn.b_1", "2.ffn.w_2"}
    rows = (first["2.w_o"] != second["2.w_o"]).any(1).nonzero().flatten()
    assert rows.tolist() == list(range(3 * num_symbols, 4 * num_symbols))


@pytest.mark.parametrize(("num_symbols", "longest", "width"), [(2, 6, 36), (4, 12, 320), (2, 2, 4)])
def test_the_rescaling_map_needs_two_hidden_units_for_each_symbol_and_mass(
    num_symbols: int, longest: int, width: int
) -> None:
    assert compressible_histogram(num_symbols, longest).blocks[1].feed_forward.w_1.shape == (4 * num_symbols, width)
    assert len(mass_ratios(longest)) * 2 * num_symbols == width
    assert incompressible_histogram(num_symbols, longest).blocks[1].feed_forward.w_1.shape[1] == 2 * num_symbols


@pytest.mark.parametrize(("num_symbols", "longest"), [*SIZES, (9, 30)])
def test_the_first_map_is_exact_on_every_embedding_and_embeddings_differ(num_symbols: int, longest: int) -> None:
    for model in constructions(num_symbols, longest):
        deviation = first_map_deviation(model)
        assert (deviation.largest, deviation.num_inputs) == (0.0, num_symbols * longest)
        assert len(model.embedding.flatten(0, 1).unique(dim=0)) == num_symbols * longest


@pytest.mark.parametrize("num_blocks", [2, 4])
def test_the_linear_map_is_linear_for_inputs_of_any_size(num_blocks: int) -> None:
    model = incompressible_histogram(3, 5, num_blocks=num_blocks)
    assert linear_map_deviation(model, num_draws=500, largest=1e9, seed=0).largest == 0.0


@pytest.mark.parametrize(("num_symbols", "longest"), [(2, 2), (2, 12), (3, 8), (4, 6)])
def test_the_rescaling_map_is_exact_on_every_reachable_input_and_on_real_ones(num_symbols: int, longest: int) -> None:
    model = compressible_histogram(num_symbols, longest)
    reached = rescaling_map_deviation(model)
    num_inputs = sum(j * int((count_vectors(num_symbols, j) > 0).sum()) for j in range(1, longest + 1))
    assert reached.num_inputs == num_inputs
    assert reached.largest < 2e-12
    assert rescaling_map_deviation(model, num_real=40, seed=1).largest < 2e-12


def test_the_rescaling_map_stays_exact_for_longer_sequences() -> None:
    assert rescaling_map_deviation(compressible_histogram(3, 24), num_real=10).largest < 1e-10


def test_count_vectors_are_all_there_and_blocks_move_where_they_should() -> None:
    expected = {tuple(torch.bincount(row, minlength=3).tolist()) for row in sequences(3, 4)}
    rows = count_vectors(3, 4).tolist()
    assert {tuple(row) for row in rows} == expected
    assert len(rows) == len(expected) == 15
    x = torch.arange(1.0, 7.0, dtype=torch.float64)
    assert (x @ block_moves(3, 2, (1, 1), (1, 3))).tolist() == [1, 2, 0, 0, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "blocks", "message"),
    [((1, 4), 2, "2 symbols, got 1"), ((2, 1), 2, "N >= 2, got 1"), ((2, 4), 3, "2 or 4 blocks, not 3")],
)
def test_what_cannot_be_constructed_is_refused(arguments: tuple[int, int], blocks: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        incompressible_histogram(*arguments, num_blocks=blocks)
