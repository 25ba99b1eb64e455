"""The queries that Attention Matching fits to, and their weights."""

import sys
from dataclasses import replace

import pytest
import torch
from structured_heads import eager_attention

from kvcat.compress import AttentionMatching, split_supervision, trace
from kvcat.compress.head_attention import dense_attention
from kvcat.compress.heads import Heads
from kvcat.compress.kept_queries import keep_queries, placed_after
from kvcat.compress.parts import repeated_tokens
from kvcat.compress.prefix import Prefix, protecting
from kvcat.compress.queries import fitted_queries
from kvcat.compress.sessions.repetition import fitted_also_to
from kvcat.compress.trace import sampled_positions
from kvcat.models.rotation import KeyRotation
from kvcat.models.rounded import Rounded
from tiny import loud_model


@pytest.fixture
def double_trace(double, windows):
    return trace(double, windows, 48)


def prefix_queries(double_trace):
    """The prefix's own queries alone, weighted by share."""
    return fitted_queries(
        Prefix.of(replace(double_trace, text=replace(double_trace.text, supervision="self"))),
        1.0,
        by_share=True,
    )


def queries_of(fitted, layer):
    """All queries of a layer: (batch, heads, queries, head_dim)."""
    examples, heads = fitted[0].log_elsewhere[layer].shape[:2]
    return torch.stack(
        [
            torch.cat([each.of_heads(layer, layer, row, list(range(heads))) for each in fitted], 1)
            for row in range(examples)
        ]
    )


def weights_of(double_trace, fitted, layer):
    """What the errors of a layer's queries are multiplied by: (batch, heads, queries)."""
    result = torch.cat([torch.zeros_like(each.log_elsewhere[layer]) for each in fitted], 2)
    for head in range(2):
        for example in range(len(result)):
            weights = dense_attention(
                Heads(Prefix.of(double_trace), fitted).load([(layer, example, head)])
            ).weights
            result[example, 2 * head : 2 * head + 2] = weights.view(-1, 2).T
    return result


def test_a_query_weighs_as_the_attention_that_it_gives_to_the_prefix(double, windows, double_trace):
    fitted, plain = (
        fitted_queries(Prefix.of(double_trace), 0.0, by_share=by_share)
        for by_share in (True, False)
    )
    for layer, attention in enumerate(eager_attention(double, windows)):
        assert torch.allclose(
            weights_of(double_trace, fitted, layer), attention[:, :, 48:, :48].sum(-1), atol=1e-9
        )
        assert torch.equal(queries_of(fitted, layer), double_trace.queries[layer])
        assert (weights_of(double_trace, plain, layer) == 1).all()
    learn, _ = split_supervision(double_trace, 0.5)
    rests = (
        fitted_queries(Prefix.of(learn), 0.0, by_share=True)[0].log_elsewhere,
        [masses[:, :, :8] for masses in fitted[0].log_elsewhere],
    )
    torch.testing.assert_close(*rests, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("prefix_len", "piece_len"), [(48, 16), (46, 16), (1, 1), (48, 10)])
def test_prefix_queries_of_the_first_layer_are_those_of_each_part_repeated_after_the_prefix(
    double, windows, prefix_len, piece_len, monkeypatch
):
    if piece_len == 10:  # less than a third
        monkeypatch.setattr(sys.modules["kvcat.compress.trace"], "OWN_PART_TOKENS", piece_len)
    traced_prefix = trace(double, windows, prefix_len)
    fitted = prefix_queries(traced_prefix)
    weights = weights_of(traced_prefix, fitted, 0)
    for stop in range(prefix_len, 0, -piece_len):
        text = slice(max(0, stop - piece_len), stop)
        rows = slice(prefix_len - stop, prefix_len - max(0, stop - piece_len))
        ids = torch.cat([windows[:, :prefix_len], windows[:, text]], 1)
        # the model makes its rotations in single precision
        assert torch.allclose(
            queries_of(fitted, 0)[:, :, rows], trace(double, ids, prefix_len).queries[0], atol=1e-5
        )
        shares = eager_attention(double, ids)[0][:, :, prefix_len:, :prefix_len].sum(-1)
        assert torch.allclose(weights[:, :, rows], shares, atol=1e-5)


def test_prefix_queries_of_deeper_layers_are_those_in_place_and_have_the_stated_weights(
    double, windows, double_trace
):
    """Rotated back by the 16 positions that the last third was moved by, they are the queries of
    the dense forward."""
    back = KeyRotation(double, -16)(queries_of(prefix_queries(double_trace), 1)[:, :, :16], 1)
    in_place = trace(double, windows[:, :48], supervision="self").queries[1][:, :, 32:]
    assert torch.allclose(back, in_place, atol=1e-5)
    for own_weight in (0.5, 2.0):
        fitted = fitted_queries(Prefix.of(double_trace), own_weight, by_share=False)
        for layer in range(2):
            squares = weights_of(double_trace, fitted, layer).square().sum(2)
            assert torch.allclose(
                squares[0, 0], torch.tensor(16 * (1 + own_weight), dtype=torch.float64)
            )
            assert torch.equal(
                queries_of(fitted, layer)[:, :, 16:],
                queries_of(prefix_queries(double_trace), layer),
            )


def test_all_positions_of_up_to_4096_choose_keys():
    assert sampled_positions(4096).tolist() == list(range(4096))
    assert sampled_positions(8192).tolist() == list(range(0, 8192, 2))


def test_a_batch_counts_its_supervising_queries_also_when_it_is_split(double_trace):
    fitted = fitted_queries(Prefix.of(double_trace), 1.0, by_share=True)
    batch = Heads(Prefix.of(double_trace), fitted).load([(1, 0, 0), (1, 0, 1)])
    assert batch.num_supervising == 2 * 16  # two query heads read a KV head
    assert [smaller.num_supervising for smaller in batch.split(1)] == [32, 32]


@pytest.mark.parametrize("elements", [1, 700, 40 * 48])
def test_attention_in_parts_of_heads_and_chunks_of_queries_is_that_of_the_whole(
    double_trace, elements
):
    batch = Heads(
        Prefix.of(double_trace), fitted_queries(Prefix.of(double_trace), 1.0, by_share=True)
    ).load([(1, 0, 0), (1, 0, 1), (1, 1, 0)])
    whole = dense_attention(batch)
    in_chunks = dense_attention(batch, cpu_elements=elements)
    for result, expected in zip(in_chunks, whole, strict=True):
        assert torch.allclose(result, expected, atol=1e-12)


def test_models_whose_positions_cannot_be_rotated_have_no_prefix_queries(windows):
    model = loud_model("opt", ffn_dim=48, word_embed_proj_dim=32)
    fitted = fitted_queries(Prefix.of(trace(model, windows, 48)), 1.0, by_share=True)
    assert queries_of(fitted, 0).shape[2] == 16
    alone = fitted_queries(Prefix.of(trace(model, windows, supervision="self")), 1.0, by_share=True)
    assert [each.is_causal for each in alone] == [True]


def test_a_rotation_is_tested_once_per_model_and_shift_and_may_differ_by_slot(double):
    forwards = []
    model = loud_model(dtype=torch.float64)  # on which no rotation was tried before
    hook = model.model.register_forward_pre_hook(lambda *_: forwards.append(len(forwards)))
    num_forwards = []
    for shift in (29, 29, 31):
        KeyRotation(model, shift)
        num_forwards.append(len(forwards))
    hook.remove()
    assert num_forwards[0] == num_forwards[1] < num_forwards[2]
    first = KeyRotation(double, 29)
    keys = torch.randn(1, 2, 3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    each = [first(keys[:, :, slot : slot + 1], 1, shift) for slot, shift in enumerate((7, 0, -4))]
    assert torch.allclose(first(keys, 1, torch.tensor([7, 0, -4])), torch.cat(each, 2))


def test_a_group_of_heads_holds_no_more_than_its_limit_whatever_is_the_largest(
    double_trace, monkeypatch
):
    monkeypatch.setattr(Heads, "group_elements", 4096)
    fitted = fitted_queries(Prefix.of(double_trace), 0.0, by_share=True)
    queries = 2 * sum(map(len, fitted))
    prefix = 48
    dims = 2 * double_trace.keys[0].shape[3]
    for size in (1, 5, 40):
        heads = Heads(Prefix.of(double_trace), fitted)
        groups = heads.groups_for_fit(
            {head: size for group in heads.groups_for_scores() for head in group}
        )
        largest = max(queries * size, size * size, prefix * dims)
        assert max(map(len, groups)) == max(1, 4096 // largest)


def test_kept_queries_are_those_of_evenly_spaced_tokens_with_the_mass_of_their_part(
    double, windows
):
    traced = trace(double, windows[:, :48], supervision="self")
    every = keep_queries(traced, 1000)
    # parts of 16 tokens
    assert every.positions.tolist() == list(range(48))
    assert every.starts.tolist() == [position // 16 * 16 for position in range(48)]
    for layer, queries in enumerate(each.prefix_queries for each in traced.layers):
        # in 8 bits: within half a step of each query
        step = queries.abs().amax(-1, keepdim=True) / 127
        assert ((every.states[layer].numbers() - queries).abs() <= step * 0.501).all()
        keys = traced.keys[layer].repeat_interleave(2, dim=1)
        scores = queries @ keys.mT * traced.scales[layer]
        for token in range(48):
            seen = scores[:, :, token, token // 16 * 16 : token + 1]
            mass = every.log_elsewhere[layer][:, :, token]
            torch.testing.assert_close(mass, seen.logsumexp(-1))
    sample = keep_queries(traced, 12)
    assert len(sample.positions) == 12
    assert sample.positions.diff().max() <= 6
    assert keep_queries(traced, 0).positions.tolist() == []


def test_a_fit_behind_a_cache_weighs_kept_queries_by_the_tokens_that_they_represent(
    double, windows
):
    method = AttentionMatching(budgets="equal")
    before = trace(double, windows, 32)
    past = method(before, num_slots=9)
    kept = keep_queries(before, 8)
    new = grown_trace(double, windows, past, kept)
    fitted = fitted_queries(Prefix.of(new), 1.0, by_share=True)
    # 16 of the suffix, 8 kept for 32 tokens, 16 of the tokens after the cache
    weights = torch.cat([each.weights for each in fitted]).square()
    assert list(map(len, fitted)) == [16, 8, 16]
    torch.testing.assert_close(weights[16:24], weights[24:25].expand(8) * 4)
    torch.testing.assert_close(weights[16:].sum(), weights[:16].sum())
    # rotated to where they would be if their part were repeated at their place
    moved = fitted[1].of_heads(1, 1, 0, [2])[0]
    back = KeyRotation(double, 1)(moved[None, None], 1, kept.starts - kept.place)[0, 0]
    torch.testing.assert_close(back, kept.states[1][0, 2].numbers())


def grown_trace(double, windows, past, kept):
    """A trace of 16 tokens after a compact cache of 32, with kept queries."""
    grown = trace(double, windows, 48, past=past)
    return replace(
        grown,
        past=replace(grown.past, queries=kept),
        prefix_positions=torch.arange(32, 48),
        layers=[
            replace(layer, prefix_queries=layer.prefix_queries[:, :, -16:])
            for layer in grown.layers
        ],
    )


def test_queries_kept_of_a_repetition_count_like_those_of_the_last_one(double, windows):
    before = trace(double, windows, 32)
    kept = keep_queries(before, 8, repeated_tokens(before, windows[0, :5], 0))
    past = AttentionMatching()(before, num_slots=9)
    new = placed_after(grown_trace(double, windows, past, kept))
    repeated = repeated_tokens(new, windows[0, :5], 32)
    new = fitted_also_to(new, repeated)
    fitted = fitted_queries(Prefix.of(new), None, by_share=True)
    assert list(map(len, fitted)) == [16, 8, 16]
    squares = [each.weights.square() for each in fitted]
    torch.testing.assert_close(squares[0], torch.ones(16))
    torch.testing.assert_close(squares[1], torch.full([8], 4.0))  # each for four tokens
    torch.testing.assert_close(squares[2], torch.ones(16))
    without_own = fitted_queries(Prefix.of(new), 0.0, by_share=True)
    assert [each.weights.tolist() for each in without_own] == [[1.0] * 16, [2.0] * 8]
    # peaks are the largest attention of both, from where they are
    batch = Heads(Prefix.of(new), fitted).load([(1, 0, 0)])
    scores = batch.scores(slice(0, 2 * 24))
    elsewhere = batch.log_elsewhere[:, : 2 * 24].unsqueeze(-1)
    attention = torch.cat([scores, elsewhere], -1).softmax(-1)[..., :-1]
    peaks = dense_attention(batch).peaks
    torch.testing.assert_close(peaks, attention.square().amax(1))


def already_at(place, kept):
    """Kept queries that have been moved to a place, from where they attend as before."""
    return replace(kept, place=place, starts=kept.starts + (place - kept.place))


def attention_from(double, states, layer, shifts, keys, values):
    """Log-mass and outputs of queries moved by ``shifts``, over all keys: (batch, heads, ...)."""
    moved = KeyRotation(double, 1)(states, layer, shifts)
    keys = keys.repeat_interleave(2, dim=1)
    values = values.repeat_interleave(2, dim=1)
    scores = moved @ keys.mT * states.shape[3] ** -0.5
    return scores.logsumexp(-1), scores.softmax(-1) @ values


def assert_rounded(rows, exact, before):
    """Rounded equal exact vectors, but for their rounding to 8 bits and that of what was before."""
    largest = exact.abs().amax(-1, keepdim=True)
    step = largest / 127 + before.scales
    assert ((rows.numbers() - exact).abs() <= 0.51 * step).all()


@pytest.mark.parametrize(
    ("budgets", "is_repeated"), [("equal", False), ("adaptive", False), ("adaptive", True)]
)
def test_kept_queries_attend_to_the_text_as_it_was_before_it_was_compressed(
    double, windows, budgets, is_repeated
):
    before = trace(double, windows, 32)
    repeated = repeated_tokens(before, windows[0, :5], 0) if is_repeated else []
    kept = keep_queries(before, 8, repeated)
    if is_repeated:
        assert kept.starts.tolist() == [32] * 8
    kept = already_at(48, kept)
    past = AttentionMatching(budgets=budgets)(before, num_slots=9)
    new = grown_trace(double, windows, past, kept)
    fitted = fitted_queries(Prefix.of(new), 1.0, by_share=True)
    joined = keep_queries(new, 48)
    is_kept = torch.isin(joined.positions, kept.positions)
    assert is_kept.sum() == 8
    for layer in range(2):
        keys = torch.cat([before.keys[layer], new.keys[layer][:, :, -16:]], dim=2)
        values = torch.cat([before.values[layer], new.values[layer][:, :, -16:]], dim=2)
        shifts = kept.place - kept.starts
        states = kept.states[layer].numbers()
        log_mass, outputs = attention_from(double, states, layer, shifts, keys, values)
        # what later fits are to reproduce
        torch.testing.assert_close(joined.log_mass[layer][:, :, is_kept], log_mass)
        assert_rounded(joined.outputs[layer][:, :, is_kept], outputs, kept.outputs[layer])
        # what this fit is to reproduce
        dense = dense_attention(Heads(Prefix.of(new), fitted).load([(layer, 1, 0)]))
        rows = slice(2 * 16, 2 * 24)  # after those of the suffix; both query heads of a token
        torch.testing.assert_close(dense.log_mass[0, rows], log_mass[1, :2].T.flatten())
        weighted = outputs[1, :2].transpose(0, 1).flatten(0, 1)
        weighted = weighted * dense.weights[0, rows].unsqueeze(1)
        largest_output = weighted.abs().amax(-1, keepdim=True)
        assert ((dense.outputs[0, rows] - weighted).abs() < 0.01 * largest_output).all()
        largest = dense.log_mass[0, rows] - dense.mass[0, rows].log()
        scores = Heads(Prefix.of(new), fitted).load([(layer, 1, 0)]).scores(rows)
        torch.testing.assert_close(largest, scores[0].amax(-1))


def test_kept_queries_that_are_moved_on_attend_as_from_their_new_place(double, windows):
    before = trace(double, windows, 32)
    kept = keep_queries(before, 8)
    # every slot is kept: the attention to the slots is that to the text
    new = grown_trace(double, windows, before.dense_cache(), kept)
    moved_on = placed_after(new).past.queries
    assert (kept.place, moved_on.place) == (32, 48)
    for layer in range(2):
        log_mass, outputs = attention_from(
            double,
            kept.states[layer].numbers(),
            layer,
            48 - kept.starts,
            before.keys[layer],
            before.values[layer],
        )
        torch.testing.assert_close(moved_on.log_mass[layer], log_mass)
        error = (moved_on.outputs[layer].numbers() - outputs).abs()
        assert error.max() < 0.01 * outputs.abs().max()
    without = replace(new, past=replace(new.past, queries=None))
    assert placed_after(without).past.queries is None


def test_kept_queries_attend_to_the_cache_alone_if_all_tokens_after_it_are_protected(
    double, windows
):
    before = protecting(trace(double, windows, 32), [(0, 2)])
    kept = keep_queries(before, 8)
    past = before.dense_cache()
    new = protecting(grown_trace(double, windows, past, kept), [(0, 2), (32, 48)])
    moved_on = placed_after(new)
    place = moved_on.past.queries.place
    joined = keep_queries(moved_on, 48)
    is_kept = torch.isin(joined.positions, kept.positions)
    for layer in range(2):
        states = kept.states[layer].numbers()
        # every slot of the cache is kept
        keys = before.keys[layer][:, :, 2:]
        values = before.values[layer][:, :, 2:]
        log_mass, outputs = attention_from(double, states, layer, place - kept.starts, keys, values)
        torch.testing.assert_close(joined.log_mass[layer][:, :, is_kept], log_mass)
        error = (joined.outputs[layer].numbers()[:, :, is_kept] - outputs).abs()
        assert error.max() < 0.01 * outputs.abs().max()


def test_kept_queries_are_moved_on_over_a_cache_of_protected_slots_alone(double, windows):
    before = protecting(trace(double, windows, 32), [(0, 2)])
    kept = keep_queries(before, 8)
    past = AttentionMatching()(before, num_slots=2)
    new = protecting(grown_trace(double, windows, past, kept), [(0, 2)])
    moved_on = placed_after(new).past.queries
    assert moved_on.place == 48
    for layer in range(2):
        torch.testing.assert_close(moved_on.log_mass[layer], kept.log_mass[layer])


def test_protected_tokens_are_no_part_of_what_kept_queries_attended_to(double, windows):
    protect = [(2, 5), (30, 32)]
    before = protecting(trace(double, windows, 32), protect)
    kept = already_at(48, keep_queries(before, 8))
    past = AttentionMatching(budgets="equal")(before, num_slots=12)
    new = protecting(grown_trace(double, windows, past, kept), [*protect, (40, 43)])
    joined = keep_queries(new, 48)
    is_kept = torch.isin(joined.positions, kept.positions)
    old = [slot for slot in range(32) if slot not in (2, 3, 4, 30, 31)]
    exact = [slot for slot in range(-16, 0) if slot not in (-8, -7, -6)]
    for layer in range(2):
        keys = [before.keys[layer][:, :, old], new.keys[layer][:, :, exact]]
        values = [before.values[layer][:, :, old], new.values[layer][:, :, exact]]
        log_mass, outputs = attention_from(
            double,
            kept.states[layer].numbers(),
            layer,
            kept.place - kept.starts,
            torch.cat(keys, dim=2),
            torch.cat(values, dim=2),
        )
        torch.testing.assert_close(joined.log_mass[layer][:, :, is_kept], log_mass)
        assert_rounded(joined.outputs[layer][:, :, is_kept], outputs, kept.outputs[layer])


def test_vectors_in_eight_bits_are_within_half_a_step_and_zeros_stay_zeros():
    generator = torch.Generator().manual_seed(0)
    scale = torch.logspace(-3, 3, 7).unsqueeze(-1)
    vectors = torch.randn(2, 7, 16, generator=generator) * scale
    vectors[1, 3] = 0.0
    rows = Rounded.of(vectors)
    step = vectors.abs().amax(-1, keepdim=True) / 127
    assert ((rows.numbers() - vectors).abs() <= 0.5001 * step).all()
    assert (rows.numbers()[1, 3] == 0).all()
    assert rows.integers.dtype == torch.int8
    places = torch.tensor([5, 0])
    assert torch.equal(rows.selected(1, places).numbers(), rows.numbers()[:, places])
    again = Rounded.joined([rows[:, :4], rows[:, 4:]], dim=1)
    assert torch.equal(again.numbers(), rows.numbers())
    assert torch.equal(Rounded.of(rows.numbers()).integers, rows.integers)
