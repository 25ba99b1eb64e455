"""The smallest cache that reaches a KL, judged where it was not fitted."""

import math
import sys
from dataclasses import dataclass, field

import pytest
import torch

from kvcat.compress import Eviction, compare, replay, trace
from kvcat.compress.compare import smallest_cache, split_supervision, supervised_kl
from kvcat.compress.documents import Reconstruction
from kvcat.errors import InputError


@dataclass(frozen=True)
class Spy:
    """First slots, and what it was given."""

    seen: list = field(default_factory=list)

    def __call__(self, trace, *, keep_ratio=None, num_slots=None):
        self.seen.append((trace, num_slots))
        return Eviction("first")(trace, keep_ratio=keep_ratio, num_slots=num_slots)


@pytest.fixture
def one(model, windows):
    return trace(model, windows[:1], 48)


@pytest.fixture
def judge(one):
    return split_supervision(one, 0.25)[1]


def test_the_result_reaches_the_mark_and_one_slot_fewer_misses_it(one, judge):
    for max_kl in (0.02, 0.2, 0.8):
        result = smallest_cache(one, Eviction("first"), max_kl)
        assert result.kl == pytest.approx(supervised_kl(judge, result.cache).item(), rel=1e-5)
        assert result.kl <= max_kl
        assert result.num_slots == result.cache.num_slots == min(n for n, kl in result.tried.items() if kl <= max_kl)
        assert result.tried[result.num_slots - 1] > max_kl


def test_the_answer_is_that_of_trying_everything_where_the_kl_falls_with_every_slot(one, judge, monkeypatch):
    kl = lambda trace, cache: 1 / torch.tensor([cache.num_slots]).double()  # noqa: E731
    monkeypatch.setattr(sys.modules["kvcat.compress.compare"], "supervised_kl", kl)
    for slots in range(1, 48):
        assert smallest_cache(one, Eviction("first"), 1 / slots).num_slots == slots
    assert smallest_cache(one, Eviction("first"), 1 / 48).num_slots == 48


def test_a_kl_that_rises_and_falls_still_gives_a_cache_that_reaches_the_mark(one, monkeypatch):
    bumpy = {slots: 0.0 if slots in (3, 7, 8, 20, 21) or slots > 30 else 1.0 for slots in range(1, 48)}
    kl = lambda trace, cache: torch.tensor([bumpy[cache.num_slots]])  # noqa: E731
    monkeypatch.setattr(sys.modules["kvcat.compress.compare"], "supervised_kl", kl)
    result = smallest_cache(one, Eviction("first"), 0.5)
    assert bumpy[result.num_slots] == 0.0
    assert all(kl > 0.5 for slots, kl in result.tried.items() if slots < result.num_slots)


def test_the_whole_prefix_is_the_answer_to_a_kl_of_zero_and_one_slot_to_a_large_one(one):
    nothing_lost = smallest_cache(one, Eviction("first"), 0.0)
    assert (nothing_lost.num_slots, nothing_lost.kl) == (48, 0.0)
    assert torch.equal(nothing_lost.cache.layers[1].keys, one.keys[1])
    anything = smallest_cache(one, Eviction("first"), 1e6)
    assert anything.num_slots == 1
    assert list(anything.tried)[-1] == 1


def test_what_judges_is_never_shown_to_the_compressor(one):
    spy = Spy()
    smallest_cache(one, spy, 0.3, held_out=0.3)
    assert len(spy.seen) > 2
    for learn, _ in spy.seen:
        assert learn.input_ids.shape == (1, 59)
        assert learn.hidden.shape[1] == 12
        assert {q.shape[2] for q in learn.queries} == {11}
        assert learn is spy.seen[0][0]


def test_both_parts_of_a_split_are_traces_of_their_tokens(model, windows):
    found = trace(model, windows, 48)
    learn, judge = split_supervision(found, 0.4)
    plain = trace(model, windows[:, :57], 48)
    assert torch.equal(learn.input_ids, plain.input_ids)
    for name in ("keys", "queries", "suffix_keys"):
        for a, b in zip(getattr(learn, name), getattr(plain, name), strict=True):
            assert torch.allclose(a, b, atol=1e-5)
    assert torch.allclose(learn.logits, plain.logits, atol=1e-5)
    assert (judge.supervision_start, judge.prefix_len) == (57, 48)
    assert torch.equal(judge.queries[1], found.queries[1][:, :, 9:])
    cache = Eviction("first")(found, num_slots=5)
    whole, parts = compare(found, cache).kl, (supervised_kl(learn, cache), supervised_kl(judge, cache))
    assert torch.allclose((9 * parts[0] + 7 * parts[1]).float() / 16, whole, rtol=1e-4)


def test_the_second_copy_of_a_reconstruction_is_split(model, windows):
    found = trace(model, Reconstruction(windows[:1], 20, 44))
    learn, judge = split_supervision(found, 0.25)
    assert (learn.supervision_start, learn.input_ids.shape[1], judge.supervision_start) == (44, 59, 59)
    cache = Eviction("first")(found, num_slots=5)
    with torch.no_grad():
        dense, compact = (x[:, 39:].log_softmax(-1) for x in (found.logits, replay(model, cache, windows[:1, 20:])))
    expected = (dense.exp() * (dense - compact)).sum(-1).mean(1)
    assert torch.allclose(supervised_kl(judge, cache).float(), expected, rtol=1e-4)


def test_another_suffix_of_the_prefix_can_judge(model, windows, one):
    other = trace(model, torch.cat([windows[:1, :48], windows[1:2, 48:60]], 1), 48)
    spy, told = Spy(), []
    result = smallest_cache(one, spy, 0.3, held_out=other, on_try=lambda slots, kl: told.append((slots, kl)))
    assert all(learn is one for learn, _ in spy.seen)
    assert told == list(result.tried.items())
    assert [slots for _, slots in spy.seen] == list(result.tried)
    for slots, kl in told:
        cache = Eviction("first")(one, num_slots=slots)
        assert kl == pytest.approx(compare(other, cache).kl.item(), rel=1e-4)


def test_every_example_of_a_batch_reaches_the_mark(model, windows):
    found = trace(model, windows, 48)
    together = smallest_cache(found, Eviction("first"), 0.3)
    alone = [smallest_cache(trace(model, windows[i : i + 1], 48), Eviction("first"), 0.3).num_slots for i in range(3)]
    assert together.num_slots >= max(alone) > min(alone)
    assert (supervised_kl(split_supervision(found, 0.25)[1], together.cache) <= 0.3).all()


def test_what_cannot_be_asked_is_refused_before_any_cache_is_made(model, windows, one):
    spy = Spy()
    own = trace(model, windows[:1, :48], supervision="self")
    requests = [
        ((one, -0.1), {}, "max_kl must be at least 0 nats per token and finite, not -0.1"),
        ((one, math.nan), {}, "max_kl .* not nan"),
        ((one, math.inf), {}, "max_kl .* not inf"),
        ((one, 0.1), {"held_out": 0.0}, r"a fraction in \(0, 1\), not 0.0"),
        ((one, 0.1), {"held_out": 0.99}, "leaves none of the 16 supervising positions"),
        ((one, 0.1), {"held_out": trace(model, windows[1:2], 48)}, "of other prefixes"),
        ((one, 0.1), {"held_out": trace(model, windows, 48)}, "of other prefixes"),
        ((one, 0.1), {"held_out": trace(model, windows[:1], 48)}, "has the tokens of the trace"),
        ((own, 0.1), {}, "supervision='self' has no predictions after its prefix"),
        ((one, 0.1), {"held_out": own}, "supervision='self' has no predictions"),
    ]
    for (found, max_kl), options, message in requests:
        with pytest.raises(InputError, match=message):
            smallest_cache(found, spy, max_kl, **options)
    assert not spy.seen


def test_a_compressor_that_gives_nan_is_refused(one):
    def broken(trace, *, keep_ratio=None, num_slots=None):
        cache = Eviction("first")(trace, num_slots=num_slots)
        cache.layers[0].values[0, 0, 0, 0] = math.nan
        return cache

    with pytest.raises(InputError, match="the KL of a cache of 7 slots is not a number: function went wrong"):
        smallest_cache(one, broken, 0.1)
