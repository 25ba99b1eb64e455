"""A token beyond the embedding is named before any forward, wherever token ids enter a model."""

import pytest
import torch

import kvcat
from kvcat.cache import check_token_ids
from kvcat.evals.answers import greedy_answers, token_nll
from tiny import loud_model, refusal

TOO_LARGE = (
    "token 67 has no embedding: LlamaForCausalLM has 67 (tokens 0 to 66), the tokenizer has at "
    "least 68 tokens"
)


@pytest.fixture(scope="module")
def model():
    return loud_model("llama")


@pytest.fixture
def no_forward(model, monkeypatch):
    """Fails the test if the model runs."""
    monkeypatch.setattr(type(model.model), "forward", lambda *_, **__: pytest.fail("a forward ran"))


def test_ids_of_the_model_pass(model):
    check_token_ids(model, torch.tensor([[0, 66]]))
    check_token_ids(model, torch.zeros(1, 0, dtype=torch.long))


def test_a_token_beyond_the_embedding_is_rejected_before_any_forward(model, no_forward):
    ids = torch.arange(20).repeat(1, 2)
    ids[0, -1] = 67
    assert TOO_LARGE in refusal(kvcat.trace, model, ids, 10)
    assert TOO_LARGE in refusal(kvcat.trace, model, ids, 10, chunk_tokens=4)
    assert TOO_LARGE in refusal(kvcat.trace, model, ids, supervision="self")
    assert TOO_LARGE in refusal(token_nll, model, None, [[1, 67]], [[2]])
    assert TOO_LARGE in refusal(greedy_answers, model, None, [[1, 67]], 3)
    assert "token -120 does not exist: ids are from 0 to 66" in refusal(
        kvcat.trace, model, ids - 120, 10
    )
