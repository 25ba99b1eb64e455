"""A conversation behind a compact cache, compressed together with it."""

import pytest
import torch

from kvcat.compress import AttentionMatching, compare, replay, trace
from kvcat.errors import InputError


@pytest.fixture(scope="module")
def double(make_model):
    return make_model(torch.float64)


@pytest.fixture(scope="module")
def compact(double, windows):
    return AttentionMatching()(trace(double, windows, 32), num_slots=9)


def test_behind_a_cache_of_all_slots_everything_is_as_in_the_dense_forward(double, windows):
    dense = trace(double, windows, 48)
    again = trace(double, windows, 48, past=trace(double, windows, 32).dense_cache())
    assert (again.past_len, again.num_slots) == (32, 48)
    for name in ("keys", "values", "queries", "log_bias"):
        theirs = getattr(dense, name) or [torch.zeros(3, 2, 48)] * 2
        for left, right in zip(getattr(again, name), theirs, strict=True):
            assert torch.allclose(left, right.to(left), atol=1e-12)
    assert torch.allclose(again.logits, dense.logits, atol=1e-12)


def test_all_slots_of_a_grown_cache_replay_what_follows_it(double, windows, compact):
    grown = trace(double, windows, 48, past=compact)
    assert (grown.num_slots, grown.dense_cache().num_slots) == (25, 25)
    with torch.no_grad():
        followed = double(**compact.inputs(double, windows[:, 32:])).logits[:, 16:]
    assert torch.allclose(grown.logits, followed, atol=1e-12)
    assert torch.allclose(replay(double, grown.dense_cache(), windows[:, 48:]), followed, atol=1e-12)
    assert compare(grown, grown.dense_cache()).kl.abs().max() < 1e-12


@pytest.mark.parametrize(
    ("rows", "prefix_len", "message"),
    [(3, 32, "past holds 32 tokens: the prefix of 32 adds none"), (2, 48, "past holds 3 examples, input_ids 2")],
)
def test_a_past_that_does_not_fit_is_refused(double, windows, compact, rows, prefix_len, message):
    with pytest.raises(InputError, match=message):
        trace(double, windows[:rows], prefix_len, past=compact)
