"""Long documents: repeated part by part, and fitted part by part."""

import re
from dataclasses import replace

import pytest
import torch
from structured_heads import eager_attention

from kvcat.compress import (
    AttentionMatching,
    Eviction,
    Reconstruction,
    fitted_rows,
    make_compressor,
    segments,
    trace,
)
from kvcat.compress.documents import check_length
from kvcat.compress.head_attention import DenseAttention, dense_attention
from kvcat.compress.heads import Heads
from kvcat.compress.parts import num_positions_in_parts, repeated_tokens, trace_in_parts
from kvcat.compress.prefix import Prefix
from kvcat.compress.queries import fitted_queries
from kvcat.compress.segments import Segments, split_prefix
from kvcat.errors import InputError
from tiny import refusal

TEXT = 48
INSTRUCTION = 5


@pytest.fixture(scope="session")
def sequence(windows):
    """Three texts of 48 tokens that begin with a token which the copy leaves out."""
    text = windows[:, :TEXT]
    instruction = windows[:, TEXT : TEXT + INSTRUCTION]
    ids = torch.cat([text, instruction, text[:, 1:]], dim=1)
    return Reconstruction(ids, TEXT, TEXT + INSTRUCTION)


@pytest.fixture(scope="session")
def in_parts(double, sequence):
    return trace_in_parts(double, sequence, part_tokens=24)


def weights_of(traced, queries, layer, head):
    """What dense attention gives of one KV head of the first example."""
    return dense_attention(Heads(Prefix.of(traced), queries).load([(layer, 0, head)]))


def test_the_queries_of_a_part_are_those_of_a_stock_forward_of_text_and_part(
    double, windows, in_parts
):
    text = windows[:, :TEXT]
    instruction = windows[:, TEXT : TEXT + INSTRUCTION]
    first, second, _ = in_parts.sources
    # the queries of every token that is repeated: answers need each of them
    assert first.repeated.tolist() == list(range(1, 24))
    assert second.repeated.tolist() == list(range(24, 48))
    # the second part is begun with the 16 tokens before it, whose queries are not kept
    repeated = [text[:, 1:24], text[:, 24 - 16 : 48]]
    for source, copied, num_lead in zip((first, second), repeated, (0, 16), strict=True):
        ids = torch.cat([text, instruction, copied], dim=1)
        attention = eager_attention(double, ids)
        start = TEXT + INSTRUCTION + num_lead
        for layer, keys in enumerate(in_parts.keys):
            states = source.of_layer(layer, layer)
            order = source.positions - start
            expected = attention[layer][:, :, start:, :TEXT][:, :, order]
            scores = states @ keys.repeat_interleave(2, 1).mT * in_parts.scales[layer]
            total = torch.logaddexp(scores.logsumexp(-1), source.log_elsewhere[layer])
            ours = (scores - total.unsqueeze(-1)).exp()
            # queries are kept in 8 bits
            torch.testing.assert_close(ours, expected, rtol=0, atol=0.02)


@pytest.mark.parametrize("num_past", [None, 24, 10])
def test_the_last_tokens_of_a_prefix_are_repeated_as_in_a_stock_forward(double, windows, num_past):
    """Without a cache; after one of the first 24 tokens; after one that has dropped 14 of them."""
    text = windows[:, :TEXT]
    past = None
    num_dropped = 0
    if num_past is not None:
        past = Eviction("first")(trace(double, windows, 24), num_slots=num_past)
        num_dropped = 24 - num_past
    traced = trace(double, windows, TEXT, past=past)
    instruction = windows[0, TEXT : TEXT + INSTRUCTION]
    (source,) = repeated_tokens(traced, instruction, 24)
    assert source.repeated.tolist() == list(range(24, 48))
    # begun with the 16 tokens before them
    middle = instruction.expand(len(windows), -1)
    ids = torch.cat([text, middle, text[:, 24 - 16 :]], dim=1)
    numbers = torch.arange(ids.shape[1])
    is_seen = (numbers < 24 - num_dropped) | (numbers >= 24)
    attention = eager_attention(double, ids, is_seen)
    for layer, keys in enumerate(traced.keys):
        scores = source.of_layer(layer, layer) @ keys.repeat_interleave(2, 1).mT
        scores = scores * traced.scales[layer]
        total = torch.logaddexp(scores.logsumexp(-1), source.log_elsewhere[layer])
        expected = attention[layer][:, :, -24:, :TEXT][..., is_seen[:TEXT]]
        ours = (scores - total.unsqueeze(-1)).exp()
        torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)


def test_a_text_of_one_part_gives_the_cache_of_one_repetition(double, sequence):
    one = trace(double, sequence)
    whole = trace_in_parts(double, sequence)
    for budgets in ("equal", "adaptive"):
        method = AttentionMatching(budgets=budgets)
        caches = [method(traced, num_slots=9) for traced in (one, whole)]
        for ours, theirs in zip(*(cache.layers for cache in caches), strict=True):
            assert torch.equal(ours.counts, theirs.counts)
            for one_row, other_row in zip(ours.heads(), theirs.heads(), strict=True):
                for one_head, other in zip(one_row, other_row, strict=True):
                    torch.testing.assert_close(one_head.values, other.values)
                    torch.testing.assert_close(one_head.log_bias, other.log_bias)


@pytest.fixture
def parts_of_24(monkeypatch):
    """Slots of 24 tokens are fitted together."""
    monkeypatch.setattr(segments, "SEGMENT_TOKENS", 24)


def test_drawn_queries_attend_again_as_when_the_slots_of_a_part_were_ordered(
    in_parts, parts_of_24, monkeypatch
):
    monkeypatch.setattr(fitted_rows, "LEAST_FITTED", 0)
    monkeypatch.setattr(fitted_rows, "FITTED_PER_SLOT", 1.0)
    monkeypatch.setattr("kvcat.compress.budgets.PEAK_RATIO", 1.0)
    again = AttentionMatching()(in_parts, num_slots=9)
    # their attention is kept, not only the choice of queries, and with all its digits
    monkeypatch.setattr(DenseAttention, "in_16_bits", lambda attention: attention)
    monkeypatch.setattr(DenseAttention, "order_alone", lambda attention: attention)
    kept = AttentionMatching()(in_parts, num_slots=9)
    for ours, theirs in zip(again.layers, kept.layers, strict=True):
        for our_row, their_row in zip(ours.heads(), theirs.heads(), strict=True):
            for our_head, their_head in zip(our_row, their_row, strict=True):
                torch.testing.assert_close(our_head.keys, their_head.keys)
                torch.testing.assert_close(our_head.log_bias, their_head.log_bias)
                torch.testing.assert_close(our_head.values, their_head.values)


def test_outputs_that_wait_for_the_fit_in_16_bits_move_the_fitted_values_as_little(
    in_parts, monkeypatch
):
    rounded = AttentionMatching()(in_parts, num_slots=9)
    monkeypatch.setattr(DenseAttention, "in_16_bits", lambda attention: attention)
    exact = AttentionMatching()(in_parts, num_slots=9)
    for ours, theirs in zip(rounded.layers, exact.layers, strict=True):
        assert torch.equal(ours.counts, theirs.counts)
        values, wanted = (
            torch.cat([head.values for row in layer.heads() for head in row])
            for layer in (ours, theirs)
        )
        change = (values - wanted).norm() / wanted.norm()
        assert 0 < change < 2**-8


def test_a_part_counts_the_mass_of_the_other_parts_as_elsewhere(in_parts, parts_of_24, monkeypatch):
    prefix = Prefix.of(in_parts)
    queries = fitted_queries(prefix, None, by_share=True)
    split = split_prefix(prefix, queries)
    assert [(each.first_slot, each.tokens) for each in split] == [(0, (0, 24)), (24, (24, 48))]
    # every query of the text in every part
    monkeypatch.setattr(segments, "SAMPLED", 1.0)
    for layer, keys in enumerate(in_parts.keys):
        for segment, heads in zip(split, Segments.of(prefix, split, queries), strict=True):
            shares = []
            for whole, each in zip(queries, heads.queries, strict=True):
                rows = torch.isin(whole.positions, each.positions)
                if whole.repeated is not None:
                    rows = torch.isin(whole.repeated, each.repeated)
                assert rows.all()
                assert (each.weights == whole.weights[rows]).all()
                states = each.of_layer(layer, layer)
                scores = states @ keys.repeat_interleave(2, 1).mT * in_parts.scales[layer]
                elsewhere = whole.log_elsewhere[layer][:, :, rows]
                total = torch.logaddexp(scores.logsumexp(-1), elsewhere)
                of_part = scores[..., slice(*segment.tokens)].logsumexp(-1)
                shares.append((of_part - total).exp())
            share = torch.cat(shares, 2)  # (batch, query heads, queries)
            for example in range(len(share)):
                batch = heads.load([(layer, example, head) for head in range(2)])
                weights = dense_attention(batch).weights / batch.factors
                of_heads = share[example].unflatten(0, (2, 2)).mT.flatten(1)
                torch.testing.assert_close(weights, of_heads)


def test_queries_of_other_parts_are_sampled_with_the_weight_of_those_they_represent(
    in_parts, parts_of_24, monkeypatch
):
    prefix = Prefix.of(in_parts)
    queries = fitted_queries(prefix, 0.0, by_share=True)
    for sampled, stride in ((0.5, 2), (0.25, 4)):
        monkeypatch.setattr(segments, "SAMPLED", sampled)
        other, inside = Segments.of(prefix, split_prefix(prefix, queries), queries)[1].queries
        # 23 tokens are repeated in the first part
        assert [len(other), len(inside)] == [-(-23 // stride), 24]
        assert other.weights.tolist() == pytest.approx([stride**0.5] * len(other))
        assert (inside.weights == 1).all()


@pytest.mark.parametrize("budgets", ["adaptive", "equal"])
def test_a_cache_of_a_split_prefix_is_the_same_with_a_smaller_one_that_is_not_split(
    in_parts, parts_of_24, budgets
):
    method = AttentionMatching(budgets=budgets)
    small, large = method.each(in_parts, [5 / TEXT, 20 / TEXT])
    for num_slots, cache in ((5, small), (20, large)):
        alone = method(in_parts, num_slots=num_slots)
        for layer, other in zip(cache.layers, alone.layers, strict=True):
            assert torch.equal(layer.counts, other.counts)
            for name, states in layer.tensors().items():
                assert torch.equal(states, other.tensors()[name])


@pytest.mark.parametrize(
    ("num_slots", "budgets", "peak_ratio"),
    [(8, "adaptive", 0.05), (20, "adaptive", 0.05), (20, "adaptive", 1.0), (9, "equal", 1.0)],
)
def test_parts_share_the_slots_of_the_budget_and_their_slots_are_of_their_tokens(
    in_parts, parts_of_24, monkeypatch, num_slots, budgets, peak_ratio
):
    monkeypatch.setattr("kvcat.compress.budgets.PEAK_RATIO", peak_ratio)
    cache = AttentionMatching(budgets=budgets)(in_parts, num_slots=num_slots)
    is_equal = {bool(layer.counts.min() == layer.counts.max()) for layer in cache.layers}
    assert (is_equal == {True}) == (budgets == "equal")
    num_heads = sum(layer.counts[0].numel() for layer in cache.layers)
    for example in range(3):
        assert sum(int(layer.counts[example].sum()) for layer in cache.layers) == (
            num_slots * num_heads
        )
    for layer, keys in zip(cache.layers, in_parts.keys, strict=True):
        for example, row in enumerate(layer.heads()):
            for head, slots in enumerate(row):
                assert slots.positions.diff().min() > 0
                assert torch.equal(slots.keys, keys[example, head, slots.positions])


def test_queries_in_place_are_fitted_to_a_long_prefix_as_a_whole(double, windows, monkeypatch):
    """They see nothing of the parts after their own."""
    traced = trace(double, windows[:, :TEXT], supervision="self")
    method = AttentionMatching("known")
    whole = method(traced, num_slots=9)
    monkeypatch.setattr(segments, "SEGMENT_TOKENS", 24)
    long = method(traced, num_slots=9)
    for layer, other in zip(long.layers, whole.layers, strict=True):
        for name, tensor in layer.tensors().items():
            assert torch.equal(tensor, other.tensors()[name]), name


def test_protected_tokens_stay_exact_in_parts(in_parts, parts_of_24):
    cache = AttentionMatching()(in_parts, num_slots=20, protect=[(3, 6), (23, 26)])
    positions = [3, 4, 5, 23, 24, 25]
    for layer, keys, values in zip(cache.layers, in_parts.keys, in_parts.values, strict=True):
        slots = layer.head(1, 0)
        assert torch.equal(slots.keys[:6], keys[1, 0, positions])
        assert torch.equal(slots.values[:6], values[1, 0, positions])
        assert (slots.bias_or_zeros()[:6] == 0).all()


@pytest.mark.parametrize("method", ["refined", "snapkv", "h2o", "attention-matching,bits=8"])
def test_other_methods_compress_a_trace_of_parts(in_parts, parts_of_24, method):
    name, _, bits = method.partition(",bits=")
    options = {"bits": int(bits)} if bits else {}
    assert make_compressor(name, **options)(in_parts, num_slots=9).mean_slots == 9


def test_a_text_that_leaves_no_room_for_a_part_is_rejected_with_what_can_be_done(model, sequence):
    config = replace_positions(model.config, 200)
    ids = torch.zeros(1, 305, dtype=torch.long)
    long = replace(sequence, input_ids=ids, prefix_len=150, supervision_start=155)
    assert num_positions_in_parts(long, 200) == 150 + 5 + 16 + 64  # at least 64 tokens a part
    assert num_positions_in_parts(long, 260) == 150 + 5 + 16 + 75  # as large as the model allows
    assert num_positions_in_parts(long, 305) == 305
    assert num_positions_in_parts(long, 305, part_tokens=40) == 150 + 5 + 16 + 38
    message = refusal(check_length, config, long, "reconstruction", in_parts=True)
    assert "the text has 150 tokens, and the model 200 positions" in message
    assert "supervision self repeats nothing, or shorten the text to 115" in message
    check_length(config, long, "self", in_parts=True)
    check_length(replace_positions(config, 305), long, "reconstruction", in_parts=False)
    far = replace(long, prefix_len=250, supervision_start=255)
    assert "split it into several" in refusal(
        check_length, config, far, "reconstruction", in_parts=True
    )


@pytest.mark.parametrize("positions", [60, 120, 200, 400])
@pytest.mark.parametrize("opening", [0, 3])
def test_a_text_is_rejected_if_it_is_longer_than_the_advice_says(
    model, sequence, positions, opening
):
    config = replace_positions(model.config, positions)

    def advice(num_tokens: int) -> int | None:
        ids = torch.zeros(1, 2 * num_tokens + 5 - opening, dtype=torch.long)
        start = num_tokens + 5
        text = replace(sequence, input_ids=ids, prefix_len=num_tokens, supervision_start=start)
        try:
            check_length(config, text, "reconstruction", in_parts=True)
        except InputError as error:
            return int(re.findall(r"shorten the text to (\d+)", str(error))[0])
        return None

    advised = [advice(num_tokens) for num_tokens in range(opening + 1, positions + 20)]
    (longest,) = {number for number in advised if number is not None}
    num_fitting = longest - opening
    assert advised == [None] * num_fitting + [longest] * (len(advised) - num_fitting)


@pytest.mark.parametrize("positions", [200, 201])
def test_a_text_that_is_repeated_as_a_whole_is_told_the_length_with_which_it_fits(
    model, sequence, positions
):
    config = replace_positions(model.config, positions)

    def repeated(num_tokens):
        """A text with one opening token, which the copy omits, and five of an instruction."""
        start = num_tokens + 5
        ids = torch.zeros(1, start + num_tokens - 1, dtype=torch.long)
        return replace(sequence, input_ids=ids, prefix_len=num_tokens, supervision_start=start)

    for num_tokens in (110, 250):  # shorter and longer than the positions
        message = refusal(
            check_length, config, repeated(num_tokens), "reconstruction", in_parts=False
        )
        (longest,) = map(int, re.findall(r"shorten the text to (\d+)", message))
        check_length(config, repeated(longest), "reconstruction", in_parts=False)
        refusal(check_length, config, repeated(longest + 1), "reconstruction", in_parts=False)


def replace_positions(config, positions):
    """A configuration with another number of positions."""
    changed = type(config).from_dict(config.to_dict())
    changed.max_position_embeddings = positions
    return changed
