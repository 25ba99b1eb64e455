import time

import pytest
import torch
from test_evals_suffix import tiny

from kvcat.compress import trace
from kvcat.evals.costs import Meter, answer_speed


def test_a_meter_sums_the_seconds_of_its_blocks_alone():
    meter = Meter(torch.device("cpu"))
    for _ in range(2):
        with meter:
            time.sleep(0.02)
        time.sleep(0.05)
    assert 0.04 <= meter.seconds < 0.09


def test_a_meter_sees_memory_that_was_given_back_before_the_block_ended():
    meter = Meter(torch.device("cpu"))
    with meter:
        torch.ones(16 << 20).neg_()
    if meter.peak_mib is None:
        pytest.skip("this system does not tell the highest resident size")
    assert 60 < meter.peak_mib < 120
    with meter:
        pass
    assert meter.peak_mib < 120


def test_answers_are_timed_to_the_first_token_and_behind_it():
    model = tiny(0)
    ids = torch.randint(0, 40, (1, 8), generator=torch.Generator().manual_seed(0))
    speed = answer_speed(model, trace(model, ids, 6).dense_cache(), ids[:, :4], num_tokens=4)
    assert speed["ttft"] > 0
    assert speed["tokens_per_s"] > 0
