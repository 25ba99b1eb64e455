"""The smallest cache that reaches a KL, judged where it was not fitted."""

import math
import sys

import pytest
import torch

from kvcat.compress import (
    Eviction,
    Reconstruction,
    compare,
    make_compressor,
    replay,
    smallest_cache,
    supervised_kl,
    trace,
)
from kvcat.compress.document_cache import compress_trace, document_compressor
from kvcat.compress.trace import split_supervision
from kvcat.errors import InputError
from kvcat.settings import DocumentSettings
from tiny import refusal


@pytest.fixture
def one(model, windows):
    return trace(model, windows[:1], 48)


def test_the_result_reaches_the_mark_and_one_slot_fewer_misses_it(one):
    judge = split_supervision(one, 0.25)[1]
    for max_kl in (0.02, 0.2, 0.8):
        result = smallest_cache(one, Eviction("first"), max_kl)
        assert result.kl == pytest.approx(supervised_kl(judge, result.cache).item(), rel=1e-5)
        assert result.kl <= max_kl
        assert (
            result.num_slots
            == result.cache.num_slots
            == min(n for n, kl in result.tried.items() if kl <= max_kl)
        )
        assert result.tried[result.num_slots - 1] > max_kl
    assert smallest_cache(one, Eviction("first"), 1e6).num_slots == 1
    nothing_lost = smallest_cache(one, Eviction("first"), 0.0)
    assert (nothing_lost.num_slots, nothing_lost.kl) == (48, 0.0)


def test_the_answer_is_that_of_trying_everything_where_the_kl_falls_and_good_where_it_does_not(
    one, monkeypatch
):
    def judge_by(kls):

        def kl(trace, cache):
            return torch.tensor([kls[cache.num_slots]], dtype=torch.float64)

        monkeypatch.setattr(sys.modules["kvcat.compress.compare"], "supervised_kl", kl)

    judge_by({slots: 1 / slots for slots in range(1, 48)})
    for slots in range(1, 49):
        assert smallest_cache(one, Eviction("first"), 1 / slots).num_slots == slots
    bumpy = {
        slots: 0.0 if slots in (3, 7, 8, 20, 21) or slots > 30 else 1.0 for slots in range(1, 48)
    }
    judge_by(bumpy)
    result = smallest_cache(one, Eviction("first"), 0.5)
    assert bumpy[result.num_slots] == 0.0
    assert all(kl > 0.5 for slots, kl in result.tried.items() if slots < result.num_slots)
    judge_by(dict.fromkeys(range(1, 48), math.nan))
    with pytest.raises(InputError, match="the KL of 7 slots is not a number: Eviction failed"):
        smallest_cache(one, Eviction("first"), 0.1)


@pytest.mark.slow
def test_with_bits_all_slots_are_tried_first_and_what_they_miss_is_refused(one):
    method = make_compressor("attention-matching", bits=4)
    judge = split_supervision(one, 0.25)[1]
    within = smallest_cache(one, method, 1e6)
    assert within.cache.bits == 4
    assert next(iter(within.tried)) == 48
    floor = within.tried[48]
    at_the_floor = smallest_cache(one, method, floor)
    assert at_the_floor.cache.bits == 4
    assert supervised_kl(judge, at_the_floor.cache).item() <= floor * (1 + 1e-5)
    message = refusal(smallest_cache, one, method, floor / 2)
    assert "all 48 slots in 4 bits have a KL of" in message


@pytest.mark.parametrize("bits", ["auto", "8", "4", "16"])
def test_a_document_keeps_its_bits_or_says_that_they_are_too_few(model, windows, bits):
    copied = torch.cat([windows[:1, :48], windows[:1, 60:64], windows[:1, :48]], 1)
    traced = trace(model, Reconstruction(copied, 48, 52))
    settings = DocumentSettings(max_kl=1e-9, bits=bits)
    method = document_compressor(settings)
    if bits in ("8", "4"):
        assert f"slots in {bits} bits" in refusal(compress_trace, traced, method, settings)
    else:
        assert compress_trace(traced, method, settings).bits is None
    loose = DocumentSettings(max_kl=1.0, bits=bits)
    made = compress_trace(traced, document_compressor(loose), loose)
    assert made.bits == {"auto": 8, "8": 8, "4": 4, "16": None}[bits]


def test_every_example_reaches_the_mark_and_what_judges_is_never_shown_to_the_compressor(
    model, windows
):
    traced = trace(model, windows, 48)
    seen = []
    reported = {}

    def spy(learn, *, num_slots):
        seen.append(num_slots)
        assert (learn.input_ids.shape, learn.hidden.shape[1]) == ((3, 59), 12)
        assert {q.shape[2] for q in learn.queries} == {11}
        return Eviction("first")(learn, num_slots=num_slots)

    result = smallest_cache(traced, spy, 0.3, held_out=0.3, on_try=reported.__setitem__)
    assert reported == result.tried
    assert list(reported) == seen
    assert len(seen) > 2
    judge = split_supervision(traced, 0.3)[1]
    for slots, kl in reported.items():
        cache = Eviction("first")(traced, num_slots=slots)
        assert kl == pytest.approx(supervised_kl(judge, cache).max().item(), rel=1e-4)
    assert (supervised_kl(judge, result.cache) <= 0.3).all()


def test_both_parts_of_a_split_are_traces_of_their_tokens(model, windows):
    traced = trace(model, windows, 48)
    learn, judge = split_supervision(traced, 0.4)
    plain = trace(model, windows[:, :57], 48)
    tensors_of_both = (
        [x.input_ids, x.keys, x.queries, [each.suffix_keys for each in x.layers], x.logits]
        for x in (learn, plain)
    )
    torch.testing.assert_close(*tensors_of_both, rtol=0, atol=1e-5)
    assert (judge.text.supervision_start, judge.prefix_len) == (57, 48)
    assert torch.equal(judge.queries[1], traced.queries[1][:, :, 9:])
    cache = Eviction("first")(traced, num_slots=5)
    whole = compare(traced, cache).kl
    kls = (supervised_kl(learn, cache), supervised_kl(judge, cache))
    assert torch.allclose((9 * kls[0] + 7 * kls[1]).float() / 16, whole, rtol=1e-4)


def test_the_second_copy_of_a_reconstruction_is_split(model, windows):
    traced = trace(model, Reconstruction(windows[:1], 20, 44))
    learn, judge = split_supervision(traced, 0.25)
    assert (
        learn.text.supervision_start,
        learn.input_ids.shape[1],
        judge.text.supervision_start,
    ) == (
        44,
        59,
        59,
    )
    cache = Eviction("first")(traced, num_slots=5)
    with torch.no_grad():
        dense, compact = (
            x[:, 39:].log_softmax(-1)
            for x in (traced.logits, replay(model, cache, windows[:1, 20:]))
        )
    expected = (dense.exp() * (dense - compact)).sum(-1).mean(1)
    assert torch.allclose(supervised_kl(judge, cache).float(), expected, rtol=1e-4)
