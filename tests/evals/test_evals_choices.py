import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvcat.compress import AttentionMatching, replay, trace
from kvcat.errors import InputError
from kvcat.evals.chance import plumbing
from kvcat.evals.choices import choice_log_likelihoods, choice_values
from kvcat.evals.records import Record
from tiny import stock_model

PROMPT, CHOICES = [5, 9, 2], [[3, 7], [4], [11, 7, 8], [3, 8]]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    made = stock_model(
        "llama", vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.4,
    )  # fmt: skip
    return made.double().eval()


@pytest.fixture(scope="module")
def traced(model):
    ids = torch.randint(40, (2, 30), generator=torch.Generator().manual_seed(1))
    return trace(model, ids, 24)


@torch.no_grad()
def full_forward(model, before, choice):
    """Each token's log-probability in one plain forward over everything, summed."""
    log_probs = model(input_ids=torch.tensor([[*before, *choice]]), use_cache=False).logits[0].log_softmax(-1)
    return sum(float(log_probs[len(before) + i - 1, token]) for i, token in enumerate(choice))


@pytest.mark.parametrize("row", [0, 1])
def test_scoring_on_a_dense_cache_equals_a_full_forward_of_the_same_ids(model, traced, row):
    found = choice_log_likelihoods(model, traced.dense_cache().select([row]), PROMPT, CHOICES)
    before = [*traced.input_ids[row, :24].tolist(), *PROMPT]
    assert found.tolist() == pytest.approx([full_forward(model, before, choice) for choice in CHOICES], abs=1e-6)


def test_without_a_cache_the_prompt_is_all_there_is(model):
    found = choice_log_likelihoods(model, None, PROMPT, CHOICES)
    assert found.tolist() == pytest.approx([full_forward(model, PROMPT, choice) for choice in CHOICES], abs=1e-6)


def test_on_a_compact_cache_every_row_equals_its_own_replay(model, traced):
    cache = AttentionMatching()(traced, num_slots=6).select([0])
    found = choice_log_likelihoods(model, cache, PROMPT, CHOICES)
    for choice, total in zip(CHOICES, found.tolist(), strict=True):
        log_probs = replay(model, cache, torch.tensor([[*PROMPT, *choice]]))[0].log_softmax(-1)
        own = sum(float(log_probs[len(PROMPT) + i - 1, token]) for i, token in enumerate(choice))
        assert total == pytest.approx(own, abs=1e-6)


def test_a_continuation_scores_the_same_alone_as_beside_longer_ones(model, traced):
    cache = traced.dense_cache().select([1])
    together = choice_log_likelihoods(model, cache, PROMPT, CHOICES)
    alone = torch.cat([choice_log_likelihoods(model, cache, PROMPT, [choice]) for choice in CHOICES])
    assert together.tolist() == pytest.approx(alone.tolist(), abs=1e-9)


def test_scoring_leaves_the_cache_as_it_was(model, traced):
    cache = traced.dense_cache().select([0])
    before = cache.layers[0].keys.clone()
    choice_log_likelihoods(model, cache, PROMPT, CHOICES)
    assert torch.equal(cache.layers[0].keys, before)


@pytest.mark.parametrize(("prompt", "choices"), [([], CHOICES), (PROMPT, []), (PROMPT, [[1], []])])
def test_a_prompt_or_continuation_without_tokens_is_refused(model, prompt, choices):
    with pytest.raises(ValueError, match="at least one token"):
        choice_log_likelihoods(model, None, prompt, choices)


def test_a_cache_of_several_examples_is_refused(model, traced):
    with pytest.raises(InputError, match="a cache of 2 examples"):
        choice_log_likelihoods(model, traced.dense_cache(), PROMPT, CHOICES)


def test_equally_likely_choices_have_no_margin_and_log_4_of_surprise():
    values = [choice_values(torch.full((4,), -7.0, dtype=torch.float64), right) for right in range(4)]
    assert [v["accuracy"] for v in values] == [1.0, 0.0, 0.0, 0.0]
    for value in values:
        assert value["margin"] == 0.0
        assert value["choice"] == 0.0
        assert value["nll_choice"] == pytest.approx(math.log(4))


def test_known_log_likelihoods_give_known_figures():
    found = choice_values(torch.tensor([0.1, 0.2, 0.6, 0.1], dtype=torch.float64).log() - 30.0, 1)
    assert found["accuracy"] == 0.0
    assert found["choice"] == 2.0
    assert found["margin"] == pytest.approx(math.log(0.2 / 0.6))
    assert found["nll_choice"] == pytest.approx(-math.log(0.2))


@given(st.lists(st.floats(-50, 0), min_size=2, max_size=6), st.data())
def test_the_answer_is_right_where_the_margin_is_positive_and_wrong_where_it_is_negative(found, data):
    values = choice_values(torch.tensor(found, dtype=torch.float64), data.draw(st.integers(0, len(found) - 1)))
    assert values["margin"] == 0.0 or values["accuracy"] == float(values["margin"] > 0)
    assert values["nll_choice"] >= 0.0


def records(model, right, total, method="dense"):
    return [
        Record(
            model, "f", "float32", method, "{}", 1.0, None, None, "longbench", "Legal", str(i), str(i),
            {"accuracy": float(i < right)},
        )
        for i in range(total)
    ]  # fmt: skip


def test_only_models_above_chance_with_the_whole_context_give_results():
    found = plumbing([
        *records("able", 100, 221), *records("guesser", 60, 221), *records("few", 19, 19),
        *records("unknown", 221, 221, method="gradient"),
    ])  # fmt: skip
    assert set(found) == {"guesser", "few", "unknown"}
    assert found["guesser"] == (
        "plumbing: dense accuracy 27.1% [21.7%, 33.4%] on 221 documents is not above chance, 25%"
    )
    assert found["few"] == "plumbing: 19 documents with a dense score, fewer than 20"
    assert found["unknown"] == "plumbing: 0 documents with a dense score, fewer than 20"


def test_the_chance_of_guessing_can_be_another_one():
    assert plumbing(records("m", 100, 221), chance=0.5)
    assert not plumbing(records("m", 60, 221), chance=0.1)
