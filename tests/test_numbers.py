"""Numbers that a caller gives: whole ones, fractions, and values that are neither."""

import math

import numpy as np
import pytest
import torch

import kvcat
from kvcat.compress.compare import smallest_cache
from kvcat.compress.solvers import fit_log_bias
from kvcat.corpus import CorpusSettings
from kvcat.errors import check_in
from kvcat.losses import budget_loss
from kvcat.models.masked_pass import MaskedPass
from kvcat.policies import RandomPolicy, Router
from kvcat.settings import Sampling
from kvcat.theory.optimum import paper_bound
from tiny import byte_tokenizer, loud_model, refusal, without_type_checks

NOT_WHOLE = (True, 1.5, 2.0, math.nan, math.inf, "2", np.float64(2.0), np.bool_(True))
NOT_FINITE = (True, math.nan, math.inf, "0.5", np.float32("nan"))
KEPT = torch.zeros(2, 3)


@pytest.fixture(scope="module")
def loaded():
    tokenizer = byte_tokenizer()
    return loud_model(vocab_size=len(tokenizer), max_position_embeddings=256), tokenizer


@pytest.fixture(scope="module")
def trace(loaded):
    return kvcat.trace(loaded[0], torch.arange(3, 43).unsqueeze(0), 30)


def session(loaded, **options):
    return kvcat.Session(*loaded, **{"budget": 40, "tail": 8, "room": 10, **options})


def whole_numbers(loaded, trace):
    """Calls with one whole number, and a number with which each works."""
    model = loaded[0]
    method = kvcat.AttentionMatching()
    cache = method(trace, num_slots=9)
    return {
        "num_slots": (lambda n: method(trace, num_slots=n), 9),
        "num_slots of an eviction": (lambda n: kvcat.Eviction("snapkv")(trace, num_slots=n), 9),
        "num_slots of a corpus": (lambda n: CorpusSettings(num_slots=n), 9),
        "prefix_len": (lambda n: kvcat.trace(model, trace.input_ids, n), 30),
        "room": (lambda n: kvcat.trace(model, trace.input_ids, 30, room=n), 5),
        "chunk_tokens": (lambda n: kvcat.trace(model, trace.input_ids, 30, chunk_tokens=n), 9),
        "start": (lambda n: kvcat.compare(trace, cache, start=n), 2),
        "protect": (lambda n: method(trace, num_slots=9, protect=[(0, n)]), 2),
        "seam_tokens": (lambda n: kvcat.compose(model, [cache], seam_tokens=n), 2),
        "static_tokens": (lambda n: cache.inputs(model, trace.suffix_ids, static_tokens=n), 30),
        "bits": (cache.quantize, 8),
        "budget": (lambda n: session(loaded, budget=n), 40),
        "budget_bytes": (lambda n: session(loaded, budget=None, budget_bytes=n), 10**6),
        "tail": (lambda n: session(loaded, tail=n), 8),
        "seed of a corpus": (lambda n: CorpusSettings(seed=n), 9),
        "prefix_len of the theory": (lambda n: paper_bound(n, 4, 2), 9),
        "room of a session": (lambda n: session(loaded, room=n), 9),
        "num_kept": (lambda n: session(loaded, num_kept=n), 9),
        "piece": (lambda n: session(loaded, piece=n), 9),
        "max_new_tokens": (lambda n: session(loaded).generate([3], max_new_tokens=n), 1),
        "max_new_tokens of an answer": (lambda n: Sampling(max_new_tokens=n), 9),
        "seed": (lambda n: Sampling(seed=n), 9),
        "num_steps": (lambda n: kvcat.GradientCompression(num_steps=n), 9),
        "num_queries": (lambda n: kvcat.AttentionMatching(num_queries=n), 9),
        "num_sinks": (lambda n: kvcat.Eviction("streaming", num_sinks=n), 2),
        "num_iters": (lambda n: fit_log_bias(KEPT, KEPT, num_iters=n), 2),
        "hidden_size": (Router, 8),
        "feature_dim": (lambda n: Router(8, n), 8),
    }


def finite_numbers(loaded, trace):
    """Calls with one number, and one with which each works."""
    method = kvcat.AttentionMatching()
    return {
        "keep_ratio": (lambda x: method(trace, keep_ratio=x), 0.5),
        "keep_ratio of several": (lambda x: list(method.each(trace, [0.5, x])), 0.5),
        "keep_ratio of a corpus": (lambda x: CorpusSettings(keep_ratio=x), 0.5),
        "keep_ratio of a policy": (RandomPolicy, 0.5),
        "temperature": (lambda x: Sampling(temperature=x), 0.5),
        "top_p": (lambda x: Sampling(top_p=x), 0.5),
        "max_kl": (lambda x: smallest_cache(trace, method, x), 9.0),
        "held_out": (lambda x: smallest_cache(trace, method, 9.0, held_out=x), 0.5),
        "lr": (lambda x: kvcat.GradientCompression(lr=x), 0.5),
        "ridge": (lambda x: kvcat.AttentionMatching(ridge=x), 0.5),
        "pull": (lambda x: fit_log_bias(KEPT, KEPT, pull=x), 0.5),
        "bounds": (lambda x: fit_log_bias(KEPT, KEPT, bounds=(-1.0, x)), 0.5),
        "target": (lambda x: budget_loss(torch.ones(1, 4), torch.ones(1, 4), x), 0.5),
        "noise": (lambda x: Router(8, noise=x), 0.5),
        "tau": (lambda x: MaskedPass(loaded[0], {0: RandomPolicy(0.5)}, tau=x).close(), 0.5),
    }


def test_a_value_that_is_no_whole_number_is_rejected_and_one_of_numpy_is_as_one_of_python(
    loaded, trace
):
    for name, (call, number) in whole_numbers(loaded, trace).items():
        for value in NOT_WHOLE:
            assert repr(value) in refusal(call, value), name
        with without_type_checks():
            call(np.int64(number))


def test_a_value_that_is_no_finite_number_is_rejected_and_one_of_numpy_is_as_one_of_python(
    loaded, trace
):
    for name, (call, number) in finite_numbers(loaded, trace).items():
        for value in NOT_FINITE:
            assert repr(value) in refusal(call, value), name
        with without_type_checks():
            call(np.float64(number))


@pytest.mark.parametrize(
    ("interval", "inside", "outside", "wanted"),
    [
        ("(0, 1]", [1e-9, 1], [0, -1, 1.01], "in (0, 1]"),
        ("(0, 1)", [0.5], [0, 1], "in (0, 1)"),
        ("[2, 9]", [2, 9], [1, 10], "in [2, 9]"),
        ("[0, inf)", [0, 1e300], [-1e-9], "at least 0"),
        ("(0, inf)", [1e-9, 1e300], [0, -1], "larger than 0"),
    ],
)
def test_a_number_outside_an_interval_is_named_with_it(interval, inside, outside, wanted):
    for value in inside:
        check_in(interval, share=value)
    for value in outside:
        assert refusal(check_in, interval, share=value) == f"share must be {wanted}, not {value}"


@without_type_checks()
def test_a_session_of_numpys_numbers_is_saved(loaded, tmp_path):
    with session(loaded, budget=np.int64(40), tail=np.int32(8), protect=[(0, np.int64(2))]) as made:
        made.append([3] * 60)
        made.save(tmp_path / "talk")
    with kvcat.Session.load(tmp_path / "talk", *loaded) as read:
        assert (read.budget, read.tail, read.protect) == (40, 8, ((0, 2),))
