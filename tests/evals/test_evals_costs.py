import time

import pytest
import torch
from small_evaluations import tiny

from kvcat.compress import trace
from kvcat.evals.costs import MAX_RUNS, answer_speed, measure


def cost_of(make, **settings):
    ((cost, _),) = measure(make, lambda _: None, **settings)
    return cost


@pytest.fixture(scope="module")
def traced():
    ids = torch.randint(0, 40, (1, 8), generator=torch.Generator().manual_seed(0))
    return trace(tiny(0), ids, 6)


def test_seconds_are_those_of_making_a_cache_and_not_of_using_it(traced):
    cache = traced.dense_cache()
    used = []

    def make():
        for step in (0, 5):
            time.sleep(0.02)
            yield step, cache

    def use(_):
        time.sleep(0.2)
        return "used"

    (first, used), (last, _) = measure(make, use)
    assert used == "used"
    assert (first["step"], last["step"], last["bytes"], last["runs"]) == (
        0,
        5,
        cache.nbytes,
        MAX_RUNS,
    )
    assert 0.02 <= first["seconds"] < 0.15
    assert 0.04 <= last["seconds"] < 0.19


def test_seconds_are_the_median_of_the_runs_but_long_work_runs_once_with_what_is_done_ahead(traced):
    clock = [0.0]
    durations = iter([0.9, 0.2, 0.4])

    def make():
        clock[0] += next(durations)
        yield None, traced.dense_cache()

    def ahead():
        clock[0] += 0.02
        return iter([(None, calls.append(1) or traced.dense_cache())])

    def now():
        return clock[0]

    assert cost_of(make, clock=now)["seconds"] == pytest.approx(0.4)
    calls = []
    assert cost_of(ahead, clock=now, max_seconds=0.0)["seconds"] == pytest.approx(0.02)
    assert len(calls) == 1


def test_answers_are_timed_to_the_first_token_and_after_it(traced):
    speed = answer_speed(traced, traced.dense_cache())
    assert set(speed) == {"ttft", "tokens_per_s", "ttft_dense", "tokens_per_s_dense"}
    assert min(speed.values()) > 0
